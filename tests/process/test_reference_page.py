"""The reference of the API at GET /docs, in a headless Chromium."""

import subprocess
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.fake_generator import FakeGenerator
from tests.page_server import KEY, open_page, server_fixture
from tests.processes import ROOT
from tests.serving import Server

server = server_fixture(FakeGenerator())


@pytest.fixture
def page(visitor: Any, server: Server) -> Any:
    return open_page(visitor, server, "/docs", "heading", "Chat and completions")


def test_the_key_is_asked_for(visitor: Any, server: Server) -> None:
    visitor.goto(server.url + "/docs")
    visitor.get_by_role("textbox", name="API key").fill(KEY)
    visitor.get_by_role("button", name="Continue").click()
    visitor.get_by_role("heading", name="Chat and completions").wait_for()
    visitor.problems.ignore_status(401)


def test_an_operation_shows_its_fields_and_errors(page: Any) -> None:
    chat = page.locator("#post_v1_chat_completions")
    chat.get_by_text("/v1/chat/completions").click()
    fields = chat.locator(".fields > div")
    assert fields.first.locator("dt").inner_text().split("\n")[0] == "messages"
    assert fields.first.get_by_text("required").count() == 1
    temperature = fields.filter(has=page.get_by_text("temperature", exact=True))
    assert temperature.get_by_text("number (≥ 0, ≤ 2)").is_visible()
    assert temperature.get_by_text("Divides the logits").is_visible()
    refused = fields.filter(has_text="Not implemented").first
    assert "web_search_options" in refused.inner_text()
    overloaded = fields.filter(has=page.get_by_text("503", exact=True))
    assert overloaded.get_by_text("retry later").is_visible()
    fields.first.locator("summary").click()
    fields.first.locator(".nested").get_by_text("role", exact=True).wait_for()


def test_the_filter_finds_paths_and_fields(page: Any) -> None:
    page.get_by_label("Find a path or a field").fill("Encoding_Format")
    shown = page.locator(".operation:visible summary code").all_inner_texts()
    assert shown == ["/v1/embeddings", "/embed"]
    assert page.get_by_role("heading", name="Chat and completions").is_hidden()


def test_every_operation_opens_and_fits_a_phone(page: Any, server: Server) -> None:
    page.evaluate("for (const node of document.querySelectorAll('.operation')) node.open = true")
    page.wait_for_function(
        "[...document.querySelectorAll('.operation')].every(node => node.children.length > 1)"
    )
    page.evaluate("for (const node of document.querySelectorAll('.nested')) node.open = true")
    page.wait_for_function(
        "[...document.querySelectorAll('.nested[open]')].every(node => node.children.length > 1)"
    )
    assert "undefined" not in page.locator("main").inner_text()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_the_page_links_to_an_operation_by_its_address(visitor: Any, server: Server) -> None:
    open_page(visitor, server).get_by_role("link", name="API").click()
    visitor.get_by_role("heading", name="Chat and completions").wait_for()
    visitor.goto(server.url + "/docs#post_tokenize")
    visitor.locator("#post_tokenize").get_by_text("Errors").wait_for()


class SiteHandler(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


def test_the_site_has_the_reference_of_all_kinds_of_models(visitor: Any, tmp_path: Path) -> None:
    command = [sys.executable, "scripts/generate_docs.py", "reference", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True)
    site = ThreadingHTTPServer(("127.0.0.1", 0), partial(SiteHandler, directory=tmp_path))
    threading.Thread(target=site.serve_forever, daemon=True).start()
    visitor.goto(f"http://127.0.0.1:{site.server_address[1]}/")
    visitor.get_by_role("heading", name="Audio").wait_for()
    paths = visitor.locator(".operation summary code").all_inner_texts()
    site.shutdown()
    assert {"/v1/chat/completions", "/v1/rerank", "/v1/audio/transcriptions"} < set(paths)
    assert {"/", "/v1/batches"} < set(paths)
    assert "generate_docs.py reference .site/reference" in (ROOT / "scripts/docs").read_text()
