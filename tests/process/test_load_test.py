"""Runs scripts/load_test.py against a small real server on loopback."""

import asyncio
import base64
import importlib
import io
import json
import math
import os
import pty
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
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

SCRIPT = Path(__file__).parents[2] / "scripts" / "load_test.py"


class Target:
    """A server that answers at once and keeps what it was sent."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.headers: list[dict[str, str]] = []
        self.asked = threading.Event()
        self.url = ""

    async def answer(self, request: Request) -> Response:
        self.bodies.append(await request.body())
        self.headers.append(dict(request.headers))
        self.asked.set()
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
        asked = json.loads(self.bodies[-1])
        return StreamingResponse(self.events(asked["model"]), media_type="text/event-stream")

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


@pytest.fixture
def target() -> Iterator[Target]:
    target = Target()
    routes = [
        Route("/", target.answer, methods=["POST"]),
        Route("/busy", target.busy, methods=["POST"]),
        Route("/wrong", target.wrong, methods=["POST"]),
        Route("/v1/chat/completions", target.chat, methods=["POST"]),
        Route("/v1/embeddings", target.answer, methods=["POST"]),
        Route("/v1/audio/transcriptions", target.form, methods=["POST"]),
    ]
    config = uvicorn.Config(Starlette(routes=routes), log_level="error", lifespan="off")
    server = uvicorn.Server(config)
    # It listens before the thread starts, so a request waits for the server and not the test.
    with socket.create_server(("127.0.0.1", 0)) as listener:
        target.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        yield target
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def load_test() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPT.parent)  # where the script finds its siblings
        return importlib.import_module("load_test")


def run(*args: str | Path) -> dict[str, Any]:
    command = [sys.executable, str(SCRIPT), *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert done.stderr == ""
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_closed_loop_counts_every_request_but_the_warmup(target: Target) -> None:
    result = run(target.url, "--concurrency", "4", "--requests", "50", "--warmup", "5")
    assert len(target.bodies) == 55
    assert result["requests"] == result["ok"] == 50
    assert result["statuses"] == {"200": 50}
    assert 0 < result["latency_ms"]["p50"] <= result["latency_ms"]["max"]
    assert result["settings"]["concurrency"] == 4


def test_the_texts_follow_the_options(target: Target) -> None:
    options = (
        "--requests",
        "20",
        "--words",
        "2-5",
        "--mask",
        "[MASK]",
        "--header",
        "X-Key: secret",
    )
    result = run(target.url, *options)
    texts = [body.decode().split() for body in target.bodies]
    assert all(text.count("[MASK]") == 1 and 3 <= len(text) <= 6 for text in texts)
    assert target.headers[0]["x-key"] == "secret"
    assert "secret" not in json.dumps(result)

    run(target.url, *options)
    assert target.bodies[:20] == target.bodies[20:]


def test_json_kind_posts_the_text_under_the_key(target: Target) -> None:
    run(target.url, "--kind", "json", "--json-key", "text", "--requests", "1")
    assert list(json.loads(target.bodies[0])) == ["text"]
    assert target.headers[0]["content-type"] == "application/json"


def test_open_loop_keeps_to_the_rate(target: Target) -> None:
    result = run(target.url, "--rate", "100", "--arrivals", "constant", "--duration", "1.005")
    assert result["requests"] == 100
    assert result["elapsed_s"] >= 1
    assert result["send_lag_p99_ms"] > 0


def test_open_loop_sends_when_it_is_due(
    load_test: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, sent = 0.0, []

    async def sleep(seconds: float) -> None:
        nonlocal now
        await asyncio.sleep(0)  # what was due is sent first
        now += seconds

    async def send(scheduled: float) -> None:
        sent.append((scheduled, now))

    clock = SimpleNamespace(perf_counter=lambda: now, process_time=time.process_time)
    monkeypatch.setattr(load_test, "time", clock)
    monkeypatch.setattr(load_test, "asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": sleep}))
    args = load_test.make_parser().parse_args(
        ["http://x", "--rate", "100", "--arrivals", "constant"]
    )
    test = load_test.LoadTest(args, load_test.make_client(args))
    test.record.started = now
    test.send = send
    asyncio.run(test.open_loop(math.inf, 1.005))
    due = [(n + 1) / 100 for n in range(100)]
    assert [one for one, _ in sent] == pytest.approx(due)
    assert [other for _, other in sent] == pytest.approx(due)


def test_open_loop_latency_counts_from_the_schedule(load_test: ModuleType, target: Target) -> None:
    args = load_test.make_parser().parse_args([target.url, "--rate", "1"])
    test = load_test.LoadTest(args, load_test.make_client(args))
    asyncio.run(test.send(time.perf_counter() - 0.5))
    (sample,) = test.record.samples
    assert sample.status == "200"
    assert sample.latency > sample.send_lag >= 0.5


def test_open_loop_drops_what_exceeds_the_bound_until_there_is_room(load_test: ModuleType) -> None:
    args = load_test.make_parser().parse_args(
        ["http://x", "--rate", "1000", "--max-in-flight", "2", "--requests", "10"]
    )
    test = load_test.LoadTest(args, load_test.make_client(args))

    async def until_the_rest_is_dropped(*_: Any) -> Any:
        while test.record.dropped < 8:  # noqa: ASYNC110  # nobody tells of it
            await asyncio.sleep(0)
        return SimpleNamespace(status=200)

    test.client.post = until_the_rest_is_dropped
    asyncio.run(asyncio.wait_for(test.open_loop(args.requests, math.inf), 60))
    assert [sample.status for sample in test.record.samples] == ["200", "200"]
    assert test.record.dropped == 8


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


def test_the_name_of_an_error_stands_apart_from_its_text() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    command = [sys.executable, str(SCRIPT), f"http://127.0.0.1:{port}", "--requests", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "first ConnectionRefusedError [Errno" in done.stdout


def test_503_is_counted_with_its_retry_after(target: Target) -> None:
    result = run(f"{target.url}/busy", "--requests", "5")
    assert result["statuses"] == {"503": 5}
    assert result["retry_after"] == {"7": 5}
    assert result["first_errors"] == {"503": "busy"}
    assert result["ok"] == 0


def test_the_first_error_of_each_status_is_shown_on_one_line(target: Target) -> None:
    command = [sys.executable, str(SCRIPT), f"{target.url}/wrong", "--requests", "6"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    *table, last = done.stdout.splitlines()
    first_400 = "wrong 0 " + "x" * 191 + "…"
    assert json.loads(last)["first_errors"] == {"400": first_400, "413": "wrong 1 �"}
    shown = [line.split(maxsplit=2) for line in table if line.startswith("first ")]
    assert shown == [["first", "400", first_400], ["first", "413", "wrong 1 �"]]


def test_the_texts_fit_the_demo_unless_asked_otherwise(load_test: ModuleType) -> None:
    """README's own command gets no 400."""
    tokenizer = Tokenizer.from_file(
        str(SCRIPT.parent.parent / "worker/demo/fill-mask/tokenizer.json")
    )
    most = max(
        len(tokenizer.encode(word, add_special_tokens=False)) for word in load_test.WORDS.split()
    )
    words = load_test.make_parser().parse_args(["http://x"]).words
    assert words[1] * most + len(tokenizer.encode("[MASK]")) <= 128


@pytest.mark.parametrize("words", ["0", "5-4", "4,60", "-4", "4-", "many"])
def test_a_range_that_there_is_not_is_refused(
    load_test: ModuleType, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        load_test.make_parser().parse_args(["http://x", f"--words={words}"])
    assert "--words" in capsys.readouterr().err


def test_streamed_chat_measures_tokens(target: Target) -> None:
    chat = ("--kind", "chat", "--stream", "--requests", "4", "--max-tokens", "9")
    result = run(target.url, *chat, "--model", "with-usage")
    assert result["output_tokens"] == 20
    assert 0 < result["ttft_ms"]["p50"] <= result["latency_ms"]["max"]
    assert result["inter_token_ms"]["p95"] >= 0
    asked = json.loads(target.bodies[0])
    assert asked["max_tokens"] == 9
    assert asked["stream_options"] == {"include_usage": True}

    assert run(target.url, *chat, "--model", "without-usage")["output_tokens"] == 12


def test_a_stream_that_fails_is_an_error(target: Target) -> None:
    chat = ("--kind", "chat", "--stream", "--requests", "2")
    failing = run(target.url, *chat, "--model", "failing")
    assert failing["statuses"] == {"StreamError": 2}
    assert failing["first_errors"] == {"StreamError": '{"message": "no"}'}
    assert run(target.url, *chat, "--model", "cut-off")["statuses"] == {"IncompleteStreamError": 2}


def test_embeddings_are_asked_for_by_texts_of_their_own(target: Target) -> None:
    run(target.url, "--kind", "embeddings", "--model", "m", "--requests", "5")
    asked = [json.loads(body) for body in target.bodies]
    assert {each["model"] for each in asked} == {"m"}
    assert len({each["input"] for each in asked}) == 5


@pytest.mark.parametrize("same", [False, True])
def test_pictures_are_of_their_own_or_the_same(target: Target, same: bool) -> None:
    flags = ["--kind", "chat", "--stream", "--model", "m", "--picture", "20", "--requests", "3"]
    run(target.url, *flags, *["--same-picture"] * same)
    parts = [json.loads(body)["messages"][0]["content"] for body in target.bodies]
    urls = [picture["image_url"]["url"] for _, picture in parts]
    assert len(set(urls)) == (1 if same else 3)
    assert len({text["text"] for text, _ in parts}) == 3
    image = Image.open(io.BytesIO(base64.b64decode(urls[0].partition(",")[2])))
    image.load()
    assert (image.mode, image.size) == ("RGB", (20, 20))


def test_files_are_posted_as_they_are_or_in_a_form(target: Target, tmp_path: Path) -> None:
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


def test_targets_are_loaded_in_turn_and_shown_side_by_side(target: Target) -> None:
    command = [sys.executable, str(SCRIPT), target.url, f"{target.url}/busy", "--requests", "7"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    *lines, last = done.stdout.splitlines()
    first, second = json.loads(last)["targets"]
    assert (first["ok"], second["ok"]) == (7, 0)
    assert first["settings"]["url"] == target.url
    errors = next(line for line in lines if line.startswith("errors"))
    assert errors.split() == ["errors", "0", "7"]
    hosts = [each.removeprefix("http://") for each in command[2:4]]
    assert hosts in [line.split() for line in lines]


def test_a_second_target_gets_other_texts(load_test: ModuleType) -> None:
    args = load_test.make_parser().parse_args(["http://x", "http://x", "--requests", "9"])
    first, second = ({next(bodies) for _ in range(9)} for bodies in bodies_of(load_test, args))
    assert not first & second


def bodies_of(load_test: ModuleType, args: Any) -> list[Iterator[bytes]]:
    return [load_test.LoadTest(args, None, number).bodies for number in range(2)]


@pytest.mark.parametrize(
    ("value", "text"), [(2050.4, "2,050 ms"), (41.23, "41.2 ms"), (0.354, "0.35 ms")]
)
def test_times_read_well(load_test: ModuleType, value: float, text: str) -> None:
    assert load_test.milliseconds(value) == text


def test_a_terminal_sees_a_line_while_it_runs(target: Target) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, str(SCRIPT), f"{target.url}/wrong", "--duration", "60"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs, text=True) as process:
        seen = b""
        while b"first 4" not in seen:
            seen += os.read(ours, 4096)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert b"done " in seen
    assert b"in flight 1" in seen


def test_an_interrupted_run_still_reports(target: Target) -> None:
    command = [sys.executable, str(SCRIPT), target.url, "--duration", "60"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert target.asked.wait(60)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    result = json.loads(output.splitlines()[-1])
    assert result["interrupted"]
    assert result["requests"] + result["unfinished"] >= 1


def texts_of(svg: Path) -> list[str]:
    root = ElementTree.parse(svg).getroot()
    return [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}text")]


@pytest.mark.parametrize(("slowest", "label"), [(20, ""), (2000, ", log scale")])
def test_latencies_far_apart_get_a_log_scale(
    load_test: ModuleType, tmp_path: Path, slowest: float, label: str
) -> None:
    answers = [(0.1 * n, ms, "200") for n, ms in enumerate([1.0] * 19 + [slowest])]
    load_test.plot(str(tmp_path / "a.svg"), "title", "subtitle", answers, {})
    assert "latency (ms)" + label in texts_of(tmp_path / "a.svg")


def test_plots(target: Target, tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    svg, png = tmp_path / "a.svg", tmp_path / "a.png"
    run(target.url + "/?a=1&b=2", "--requests", "20", "--plot", svg)
    texts = texts_of(svg)
    assert any(text.startswith("latency (ms)") for text in texts)
    assert any("?a=1&b=2" in text for text in texts)
    assert any(text.startswith("200 (20)") for text in texts)

    run(target.url + "/busy", "--requests", "20", "--plot", png)
    with image.open(png) as picture:
        assert picture.width > picture.height > 0
        picture.load()
