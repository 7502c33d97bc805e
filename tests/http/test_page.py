"""`GET /` and the page's files: HTML for browsers, curl examples for other clients."""

import json
import re
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from server.apis.pipeline.endpoint import FORM, PipelineInputParser
from server.core.settings import Settings
from server.http.operation import JSON
from server.web.examples import ASSETS, curl_examples
from server.web.page import CONTENT_SECURITY_POLICY
from tests.fake_generator import FakeGenerator
from tests.page_server import BROWSER, FillMaskRunner, run_shell, serving_all
from tests.serving import Server, metric, serving, wait_until
from worker.tasks import TASKS


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving_all(FakeGenerator()) as server:
        yield server


@pytest.mark.parametrize(
    ("accept", "html"),
    [
        (BROWSER, True),
        ("TEXT/HTML", True),
        ("*/*", False),
        ("text/*", False),
        ("application/json", False),
        ("", False),
    ],
)
def test_html_is_sent_if_the_accept_header_names_it(
    server: Server, accept: str, html: bool
) -> None:
    media = httpx.get(server.url, headers={"accept": accept}).headers["content-type"]
    assert media.startswith("text/html" if html else "text/plain")


def test_the_page_needs_no_key_and_may_load_its_own_files_only(server: Server) -> None:
    response = httpx.get(server.url, headers={"accept": BROWSER})
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert response.headers["content-security-policy"] == CONTENT_SECURITY_POLICY
    assert {"default-src 'none'", "frame-ancestors 'none'"} < set(
        CONTENT_SECURITY_POLICY.split("; ")
    )
    assert "unsafe" not in CONTENT_SECURITY_POLICY
    assert httpx.post(server.url, content="a").status_code == 401, "the pipeline needs one"
    assert httpx.get(server.url + "/ready").json()["takes"] == "text"
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["referrer-policy"] == "no-referrer"
    assert "accept" in response.headers["vary"].split(", ")
    assert "//" not in response.text.replace("<!--", "").replace("-->", ""), (
        "nothing from other hosts"
    )
    for path in ("assets/page.js", "assets/page.css", "assets/icon.svg"):
        assert path in response.text
        assert httpx.get(f"{server.url}/{path}").status_code == 200
    for path in ("nothing.js", "..%2fpage.py", "%2e%2e%2fpage.py", ".js"):
        assert httpx.get(f"{server.url}/assets/{path}").status_code == 404


def test_the_reference_needs_no_key_and_may_load_its_own_files_only(server: Server) -> None:
    response = httpx.get(server.url + "/docs")
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert response.headers["content-security-policy"] == CONTENT_SECURITY_POLICY
    assert "//" not in response.text.replace("<!--", "").replace("-->", "")
    assert httpx.get(server.url + "/openapi.json").status_code == 401, "the document needs one"
    for path in re.findall(r'"(assets/[^"]+)"', response.text):
        assert httpx.get(f"{server.url}/{path}").status_code == 200


def test_the_pages_are_two_html_files_and_every_other_file_is_used() -> None:
    files = {path.name: path.read_text() for path in ASSETS.iterdir()}
    pages = {"index.html", "reference.html"}
    assert {name for name in files if name.endswith(".html")} == pages
    assert sum(map(len, files.values())) < 133_000
    used, new = set(), pages
    while new:
        used |= new
        text = "".join(files[name] for name in new)
        new = set(re.findall(r'"(?:\./|assets/)([\w.]+)"', text)) - used
    assert used == set(files)


def test_files_have_etags_and_head_responses(server: Server) -> None:
    for path in ("/", "/assets/page.js"):
        whole = httpx.get(server.url + path, headers={"accept": BROWSER})
        assert whole.headers["cache-control"] == "no-cache"
        tag = whole.headers["etag"]
        for known in (tag, f'W/{tag}, "other"'):
            fields = {"accept": BROWSER, "if-none-match": known}
            again = httpx.get(server.url + path, headers=fields)
            assert (again.status_code, again.content) == (304, b"")
            assert again.headers["etag"] == tag
        part = {"accept": BROWSER, "range": "bytes=0-1"}
        assert httpx.get(server.url + path, headers=part).content == whole.content
        date = {"accept": BROWSER, "if-modified-since": whole.headers["last-modified"]}
        assert httpx.get(server.url + path, headers=date).content == whole.content
        head = httpx.head(server.url + path, headers={"accept": BROWSER})
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-length"] == whole.headers["content-length"]


def test_the_page_is_served_while_the_queue_is_full() -> None:
    with serving(FillMaskRunner, max_queue_size=1) as server:
        engine: Any = server.worker_client.models["pipeline"].engine
        engine.runner.gate.clear()
        waiting = threading.Thread(target=httpx.post, args=(server.url,), kwargs={"content": "a"})
        waiting.start()
        wait_until(lambda: metric(server, "onequeue_queue_depth") == 1)
        assert httpx.post(server.url, content="b").status_code == 503
        assert httpx.get(server.url, headers={"accept": BROWSER}).status_code == 200
        assert httpx.get(server.url).status_code == 200
        engine.runner.gate.set()
        waiting.join(60)
        posted = 'onequeue_requests_total{endpoint="/",status="200"}'
        wait_until(lambda: metric(server, posted) == 1)  # the page is counted apart


def test_without_a_pipeline_only_get_is_served() -> None:
    with serving(load_chat=FakeGenerator) as server:
        assert httpx.get(server.url).status_code == 200
        refused = httpx.post(server.url, content="a")
        assert refused.status_code == 405
        assert set(refused.headers["allow"].split(", ")) == {"GET", "HEAD"}


def test_curl_gets_commands_that_work(server: Server) -> None:
    response = httpx.get(server.url, headers={"accept": "*/*"})
    assert response.headers["content-type"] == "text/plain; charset=utf-8"
    lines = [line for line in response.text.splitlines() if line.startswith("curl ")]
    assert [line.split()[1].removeprefix(server.url) for line in lines] == [
        "/",
        "/v1/chat/completions",
        "/v1/embeddings",
    ]
    for line in lines:
        assert json.loads(run_shell(line))
    forged = httpx.get(server.url, headers={"host": "a;b $(c)"}).text
    assert "$(c)" not in forged


FAKE_CURL = """#!/bin/sh
for word; do printf '%s\\0' "$word"; done > words
cat > input
"""


def test_each_task_has_an_example_that_it_accepts(tmp_path: Path) -> None:
    program = tmp_path / "curl"
    program.write_text(FAKE_CURL)
    program.chmod(0o755)
    for name in ("picture.jpg", "recording.wav"):
        (tmp_path / name).write_bytes(b"\xffbytes")
    for task in TASKS:
        settings = Settings(pipeline_task=task, chat_model="none", embedding_model="none")
        (command,) = curl_examples(settings, "http://here", "<mask>").values()
        path = f"{tmp_path}:/usr/bin:/bin"
        subprocess.run(
            ["sh", "-c", command], cwd=tmp_path, env={"PATH": path}, stdin=subprocess.DEVNULL,
            check=True,
        )  # fmt: skip
        url, *words = (tmp_path / "words").read_bytes().decode().split("\0")[:-1]
        options = dict(zip(words[::2], words[1::2], strict=True))
        body = options.get("-d", options.get("--data-binary", "")).encode()
        if body == b"@-":
            body = (tmp_path / "input").read_bytes()
        elif body.startswith(b"@"):
            body = (tmp_path / body[1:].decode()).read_bytes()
        request = PipelineInputParser(settings).parse(body, JSON if "-H" in options else FORM, {})
        assert (url, len(request.inputs)) == ("http://here/", 1)
        assert ("<mask>" in command) is (task == "fill-mask")
        assert "$FILE" not in str(request.inputs)
