"""scripts/load_test.py and its package, against a small real server on loopback."""

import asyncio
import base64
import contextlib
import io
import json
import math
import os
import pty
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import uvicorn
from PIL import Image
from starlette.applications import Starlette
from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from tokenizers import Tokenizer

from server.commands.load_test import generator as generator_module
from server.commands.load_test.arguments import make_parser
from server.commands.load_test.command import arrival_intervals, load_command, make_generator
from server.commands.load_test.generator import LoadGenerator
from server.commands.load_test.latency_plot import plot
from server.commands.load_test.report import duration
from server.commands.load_test.request_bodies import WORDS
from tests import processes
from tests.fakes import FakeRunner
from tests.serving import serving as serving_app

SCRIPT = Path(__file__).parents[2] / "scripts" / "load_test.py"


class Target:
    """A server that responds at once and keeps the requests."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.headers: list[dict[str, str]] = []
        self.requested = threading.Event()
        self.url = ""

    async def respond(self, request: Request) -> Response:
        self.bodies.append(await request.body())
        self.headers.append(dict(request.headers))
        self.requested.set()
        return PlainTextResponse("ok")

    async def form(self, request: Request) -> Response:
        async with request.form() as form:
            file = form["file"]
            assert isinstance(file, UploadFile)
            self.bodies.append(await file.read())
            self.headers.append({"model": str(form["model"]), "language": str(form["language"])})
            return PlainTextResponse(f"{file.filename} {file.content_type}")

    async def busy(self, request: Request) -> Response:
        return PlainTextResponse("busy", 503, {"Retry-After": "7"})

    async def wrong(self, request: Request) -> Response:
        self.bodies.append(await request.body())
        number = len(self.bodies) - 1
        if number % 2:
            return Response(b"wrong %d\n\x1b\xff" % number, 413)
        return PlainTextResponse(f"wrong {number}\n" + "x" * 1000, 400)

    async def chat(self, request: Request) -> Response:
        self.bodies.append(await request.body())
        model = json.loads(self.bodies[-1])["model"]
        return StreamingResponse(self.events(model), media_type="text/event-stream")

    async def events(self, model: str) -> AsyncIterator[str]:
        yield 'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\n\n'
        for _ in range(3):
            yield 'data: {"choices": [{"delta": {"content": "a"}}]}\n\n'
        if model == "failing":
            yield 'data: {"error": {"message": "no"}}\n\n'
        if model == "with-usage":
            yield 'data: {"choices": [], "usage": {"completion_tokens": 5}}\n\n'
        if model != "cut-off":
            yield "data: [DONE]\n\n"


@contextlib.contextmanager
def serving(target: Target, **config_options: str) -> Iterator[int]:
    """Serve the target in a thread; yield the port."""
    routes = [
        Route("/", target.respond, methods=["POST"]),
        Route("/busy", target.busy, methods=["POST"]),
        Route("/wrong", target.wrong, methods=["POST"]),
        Route("/v1/chat/completions", target.chat, methods=["POST"]),
        Route("/v1/embeddings", target.respond, methods=["POST"]),
        Route("/v1/audio/transcriptions", target.form, methods=["POST"]),
    ]
    app = Starlette(routes=routes)
    config = uvicorn.Config(app, log_level="error", lifespan="off", **config_options)  # type: ignore[arg-type]
    server = uvicorn.Server(config)
    # It listens before the thread starts, so a request waits for the server and not the test.
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        yield listener.getsockname()[1]
        server.should_exit = True
        thread.join()


@pytest.fixture
def target() -> Iterator[Target]:
    target = Target()
    with serving(target) as port:
        target.url = f"http://127.0.0.1:{port}"
        yield target


def generator_for(*words: str) -> tuple[LoadGenerator, Any]:
    """Return the generator of a command line, and the parsed arguments."""
    args = make_parser("load").parse_args(words)
    return make_generator(args), args


def printed(*args: str | Path) -> tuple[list[str], dict[str, Any]]:
    """Run the command; return the lines that it prints, and the document behind them."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        load_command("load", [*map(str, args)])
    *lines, last = output.getvalue().splitlines()
    return lines, json.loads(last)


def run(*args: str | Path) -> dict[str, Any]:
    return printed(*args)[1]


def test_closed_loop_counts_every_request_but_the_warmup(target: Target) -> None:
    result = run(target.url, "--concurrency", "4", "--requests", "50", "--warmup", "5")
    assert len(target.bodies) == 55
    assert result["requests"] == result["ok"] == 50
    assert result["statuses"] == {"200": 50}
    assert 0 < result["latency_ms"]["p50"] <= result["latency_ms"]["max"]
    assert result["settings"]["concurrency"] == 4


def test_texts_follow_the_options(target: Target) -> None:
    options = "--requests=20", "--words=2-5", "--mask=[MASK]", "--header=X-Key: secret"
    result = run(target.url, *options)
    texts = [body.decode().split() for body in target.bodies]
    assert all(text.count("[MASK]") == 1 and 3 <= len(text) <= 6 for text in texts)
    assert target.headers[0]["x-key"] == "secret"
    assert "secret" not in json.dumps(result)

    run(target.url, *options)
    assert target.bodies[:20] == target.bodies[20:]


def test_texts_come_from_a_file(target: Target, tmp_path: Path) -> None:
    file = tmp_path / "texts.txt"
    file.write_text("one\n\nzwölf words\r\n", encoding="utf-8")
    run(target.url, "--texts", file, "--requests", "3")
    assert [body.decode() for body in target.bodies] == ["one", "zwölf words", "one"]
    run(target.url, "--kind", "embeddings", "--texts", file, "--requests", "1")
    assert json.loads(target.bodies[3])["input"] == "one"


EMPTY = "no such file, or it has no text"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--texts=/dev/null"], EMPTY),
        (["--texts=/nowhere"], EMPTY),
        (["--kind=json", "--fields=[1]"], "--fields"),
        (['--fields={"a": 1}'], "--fields"),
        *(([f"--words={words}"], "--words") for words in ("0", "5-4", "4,60", "-4", "4-", "many")),
    ],
)
def test_options_that_cannot_be_used_are_refused(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        load_command("load", ["http://x", "--requests=1", *flags])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.skipif(not shutil.which("openssl"), reason="there is no openssl to make certificates")
def test_https_is_verified(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    options = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=test"
    named = ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(key)]
    command = ["openssl", *options.split(), *named, "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)

    def statuses(url: str, requests: int) -> dict[str, int]:
        done = processes.run([sys.executable, SCRIPT, url, f"--requests={requests}"])
        found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])["statuses"]
        return found

    with serving(target, ssl_keyfile=str(key), ssl_certfile=str(certificate)) as port:
        url = f"https://localhost:{port}/"
        assert statuses(url, 1) == {"SSLCertVerificationError": 1}
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        assert statuses(url, 2) == {"200": 2}
        assert statuses(f"https://127.0.0.1:{port}/", 1) == {"SSLCertVerificationError": 1}


def test_json_kind_posts_the_text_under_the_key(target: Target) -> None:
    flags = ("--kind", "json", "--json-key", "text", "--requests", "1")
    run(target.url, *flags, "--fields", '{"documents": ["a"]}')
    body = json.loads(target.bodies[0])
    assert set(body) == {"text", "documents"}
    assert body["documents"] == ["a"]
    assert target.headers[0]["content-type"] == "application/json"


def test_parameters_reach_a_pipeline() -> None:
    with serving_app(FakeRunner) as server:
        for top_k, status in ((1, "200"), (0, "400")):
            fields = json.dumps({"parameters": {"top_k": top_k}})
            flags = ("--kind", "json", "--fields", fields, "--requests", "2")
            assert run(server.url, *flags)["statuses"] == {status: 2}
            assert run(f"{server.url}/?top_k={top_k}", "--requests", "2")["statuses"] == {status: 2}


def test_open_loop_sends_at_the_scheduled_times(monkeypatch: pytest.MonkeyPatch) -> None:
    now, sent = 0.0, []

    async def sleep(seconds: float) -> None:
        nonlocal now
        await asyncio.sleep(0)  # tasks that are due send first
        now += seconds

    async def send(scheduled: float) -> None:
        sent.append((scheduled, now))

    clock = SimpleNamespace(perf_counter=lambda: now, process_time=time.process_time)
    fake_asyncio = SimpleNamespace(**{**vars(asyncio), "sleep": sleep})
    monkeypatch.setattr(generator_module, "time", clock)
    monkeypatch.setattr(generator_module, "asyncio", fake_asyncio)
    generator, args = generator_for("http://x", "--rate", "100", "--arrivals", "constant")
    generator.record.started = now
    monkeypatch.setattr(generator, "send", send)
    asyncio.run(generator.open_loop(arrival_intervals(args), math.inf, 1.005))
    due = [(n + 1) / 100 for n in range(100)]
    assert [one for one, _ in sent] == pytest.approx(due)
    assert [other for _, other in sent] == pytest.approx(due)


def test_open_loop_latency_counts_from_the_scheduled_time(target: Target) -> None:
    generator, _ = generator_for(target.url, "--rate", "1")
    asyncio.run(generator.send(time.perf_counter() - 0.5))
    (sample,) = generator.record.samples
    assert sample.status == "200"
    assert sample.latency > sample.send_lag >= 0.5


def test_open_loop_drops_arrivals_beyond_max_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    generator, args = generator_for(
        "http://x", "--rate", "1000", "--max-in-flight", "2", "--requests", "10"
    )

    async def until_the_rest_is_dropped(*_: Any) -> Any:
        while generator.record.dropped < 8:  # noqa: ASYNC110  # there is no event to wait for
            await asyncio.sleep(0)
        return SimpleNamespace(status=200)

    monkeypatch.setattr(generator.client, "post", until_the_rest_is_dropped)
    run = generator.open_loop(arrival_intervals(args), args.requests, math.inf)
    asyncio.run(asyncio.wait_for(run, 60))
    assert [sample.status for sample in generator.record.samples] == ["200", "200"]
    assert generator.record.dropped == 8


def test_timeouts_are_counted() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        result = run(url, "--concurrency", "2", "--requests", "2", "--timeout", "0.2")
    assert result["statuses"] == {"TimeoutError": 2}


def test_refused_connections_are_counted_by_name() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    result = run(f"http://127.0.0.1:{port}", "--requests", "3")
    assert result["statuses"] == {"ConnectionRefusedError": 3}
    assert "Connect call failed" in result["first_errors"]["ConnectionRefusedError"]
    assert result["latency_ms"] is None


def test_503_is_counted_with_its_retry_after(target: Target) -> None:
    result = run(f"{target.url}/busy", "--requests", "5")
    assert result["statuses"] == {"503": 5}
    assert result["retry_after"] == {"7": 5}
    assert result["first_errors"] == {"503": "busy"}
    assert result["ok"] == 0


def test_the_first_error_of_each_status_is_shown_on_one_line(target: Target) -> None:
    table, result = printed(f"{target.url}/wrong", "--requests", "6")
    first_400 = "wrong 0 " + "x" * 191 + "…"
    assert result["first_errors"] == {"400": first_400, "413": "wrong 1 �"}
    shown = [line.split(maxsplit=2) for line in table if line.startswith("first ")]
    assert shown == [["first", "400", first_400], ["first", "413", "wrong 1 �"]]


def test_default_texts_fit_the_demo_model() -> None:
    """The command in the README gets no 400."""
    tokenizer = Tokenizer.from_file(
        str(SCRIPT.parent.parent / "worker/demo/fill-mask/tokenizer.json")
    )
    max_tokens = max(
        len(tokenizer.encode(word, add_special_tokens=False)) for word in WORDS.split()
    )
    words = make_parser("load").parse_args(["http://x"]).words
    assert words[1] * max_tokens + len(tokenizer.encode("[MASK]")) <= 128


def test_streamed_chat_measures_tokens(target: Target) -> None:
    chat = ("--kind", "chat", "--stream", "--requests", "4", "--max-tokens", "9")
    result = run(target.url, *chat, "--model", "with-usage")
    assert result["output_tokens"] == 20
    assert 0 < result["ttft_ms"]["p50"] <= result["latency_ms"]["max"]
    assert result["inter_token_ms"]["p95"] >= 0
    request = json.loads(target.bodies[0])
    assert request["max_tokens"] == 9
    assert request["stream_options"] == {"include_usage": True}

    assert run(target.url, *chat, "--model", "without-usage")["output_tokens"] == 12


def test_a_stream_that_fails_is_an_error(target: Target) -> None:
    chat = ("--kind", "chat", "--stream", "--requests", "2")
    failing = run(target.url, *chat, "--model", "failing")
    assert failing["statuses"] == {"StreamError": 2}
    assert failing["first_errors"] == {"StreamError": '{"message": "no"}'}
    assert run(target.url, *chat, "--model", "cut-off")["statuses"] == {"IncompleteStreamError": 2}


def test_every_embedding_request_has_another_text(target: Target) -> None:
    run(target.url, "--kind", "embeddings", "--model", "m", "--requests", "5")
    requests = [json.loads(body) for body in target.bodies]
    assert {request["model"] for request in requests} == {"m"}
    assert len({request["input"] for request in requests}) == 5


@pytest.mark.parametrize("same", [False, True])
def test_images_differ_unless_the_same_one_is_wanted(target: Target, same: bool) -> None:
    flags = ["--kind", "chat", "--stream", "--model", "m", "--picture", "20", "--requests", "3"]
    run(target.url, *flags, *["--same-picture"] * same)
    parts = [json.loads(body)["messages"][0]["content"] for body in target.bodies]
    urls = [image["image_url"]["url"] for _, image in parts]
    assert len(set(urls)) == (1 if same else 3)
    assert len({text["text"] for text, _ in parts}) == 3
    image = Image.open(io.BytesIO(base64.b64decode(urls[0].partition(",")[2])))
    image.load()
    assert (image.mode, image.size) == ("RGB", (20, 20))


def test_files_are_posted_raw_or_in_a_form(target: Target, tmp_path: Path) -> None:
    (tmp_path / "a.wav").write_bytes(b"\x00\r\n--sound")
    (tmp_path / "b.wav").write_bytes(b"other")
    files = ("--file", tmp_path / "a.wav", "--file", tmp_path / "b.wav", "--requests", "3")
    fields = ("--model", "m", "--fields", '{"language": "de"}')
    assert run(target.url, "--kind", "upload", *fields, *files)["ok"] == 3
    assert target.bodies == [b"\x00\r\n--sound", b"other", b"\x00\r\n--sound"]
    assert target.headers[0] == {"model": "m", "language": "de"}
    run(target.url, "--kind", "file", *files)
    assert target.bodies[3:] == target.bodies[:3]
    assert target.headers[3]["content-type"] in ("audio/wav", "audio/x-wav")


def test_several_targets_are_loaded_in_turn_and_compared_side_by_side(target: Target) -> None:
    urls = [target.url, f"{target.url}/busy"]
    lines, result = printed(*urls, "--requests", "7")
    first, second = result["targets"]
    assert (first["ok"], second["ok"]) == (7, 0)
    assert first["settings"]["url"] == target.url
    errors = next(line for line in lines if line.startswith("errors"))
    assert errors.split() == ["errors", "0", "7"]
    hosts = [url.removeprefix("http://") for url in urls]
    assert hosts in [line.split() for line in lines]


def test_a_second_target_gets_other_texts() -> None:
    args = make_parser("load").parse_args(["http://x", "http://x", "--requests", "9"])
    bodies = [make_generator(args, number).bodies for number in range(2)]
    first, second = ({next(target) for _ in range(9)} for target in bodies)
    assert not first & second


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.354, "0.35 ms"), (41.23, "41.2 ms"), (999.4, "999 ms"), (5530, "5.53 s"), (72e3, "72.0 s")],
)
def test_durations_are_rounded_by_size(value: float, text: str) -> None:
    assert duration(value) == text


def test_a_terminal_shows_a_progress_line(target: Target) -> None:
    terminal, child_end = pty.openpty()
    command = [sys.executable, str(SCRIPT), f"{target.url}/wrong", "--duration", "60"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=child_end, text=True) as process:
        seen = b""
        while b"first 4" not in seen:
            seen += os.read(terminal, 4096)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert b"done " in seen
    assert b"in flight 1" in seen


def test_an_interrupted_run_still_reports(target: Target) -> None:
    command = [sys.executable, str(SCRIPT), target.url, "--duration", "60"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert target.requested.wait(60)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    result = json.loads(output.splitlines()[-1])
    assert result["interrupted"]
    assert result["requests"] + result["unfinished"] >= 1


def texts_of(svg: Path) -> list[str]:
    root = ElementTree.parse(svg).getroot()
    return [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}text")]


@pytest.mark.parametrize(("slowest", "label"), [(20, ""), (2000, ", log scale")])
def test_latencies_far_apart_get_a_log_scale(tmp_path: Path, slowest: float, label: str) -> None:
    points = [(0.1 * n, ms, "200") for n, ms in enumerate([1.0] * 19 + [slowest])]
    plot(str(tmp_path / "a.svg"), "title", "subtitle", points, {})
    assert "latency (ms)" + label in texts_of(tmp_path / "a.svg")


def test_a_plot_has_the_url_and_the_statuses(target: Target, tmp_path: Path) -> None:
    svg = tmp_path / "a.svg"
    run(target.url + "/?a=1&b=2", "--requests", "20", "--plot", svg)
    texts = texts_of(svg)
    assert any(text.startswith("latency (ms)") for text in texts)
    assert any("?a=1&b=2" in text for text in texts)
    assert any(text.startswith("200 (20)") for text in texts)
