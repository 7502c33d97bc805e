"""Limits of JSON: too many values and too long lists are refused before they are parsed."""

import asyncio
import contextlib
import socket
import threading
import time
import tracemalloc
from collections.abc import Iterator
from typing import Any

import httpx
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batching.errors import DeadlineExceeded, InvalidInput
from server.app import create_app
from server.core.settings import Settings
from server.http import json
from server.http.json import (
    HEAVY_VALUES,
    INLINE_BYTES,
    MAX_VALUES,
    JsonBodyParser,
    has_values,
    parse_json,
)
from server.http.request import MAX_BODIES, read_body
from server.http.transfers import Transfer
from tests.event_streams import error_of
from tests.fake_generator import FakeGenerator
from tests.fakes import FakeRunner
from tests.serving import Server, read_response, server_fixture, serving, wait_until

CONTEXT = FakeGenerator.max_model_len
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
PATHS = ("/", CHAT, COMPLETIONS, RESPONSES, "/tokenize", "/detokenize", "/load_model")
USER = {"role": "user", "content": "hi"}
JSON = {"content-type": "application/json"}


server = server_fixture(FakeRunner, load_chat=FakeGenerator, max_queue_size=8)


def count(value: Any) -> int:
    """Count keys and values; an empty list or object counts twice."""
    if isinstance(value, dict):
        return 1 + (sum(1 + count(item) for item in value.values()) or 1)
    if isinstance(value, list):
        return 1 + (sum(map(count, value)) or 1)
    return 1


TEXTS = st.text(st.sampled_from('a,:[{"\\\n\u1234'), max_size=8)
VALUES = st.recursive(
    st.none() | st.integers(0, 9) | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=20,
)


@given(VALUES, st.integers(1, 9), st.booleans())
def test_values_are_counted_across_chunks_and_strings(
    value: Any, chunk: int, indented: bool
) -> None:
    body = orjson.dumps(value, option=orjson.OPT_INDENT_2 if indented else None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json, "_CHUNK_BYTES", chunk)
        assert not has_values(body, count(value))
        assert has_values(body, count(value) - 1) or len(body) <= count(value) - 1


def test_values_are_counted_in_small_steps_also_among_escapes() -> None:
    class Body(bytes):
        def replace(self, *_: Any) -> bytes:
            pytest.fail("holds the interpreter lock for the whole body")

    assert not has_values(Body(b'"' + b'\\"' * MAX_VALUES + b'"'), MAX_VALUES)


@pytest.mark.parametrize("path", PATHS)
def test_a_body_of_too_many_values_is_refused_by_every_endpoint(server: Server, path: str) -> None:
    body = b'{"other": [%b]}' % b",".join([b"1"] * MAX_VALUES)
    response = httpx.post(server.url + path, content=body, headers=JSON, timeout=60)
    assert response.status_code == 400
    assert "1000000 JSON values" in error_of(response)["message"]


@pytest.mark.parametrize(
    ("path", "param", "entry", "body"),
    [
        (CHAT, "messages", 3, lambda many: {"messages": many}),
        (CHAT, "messages[1].content", 3, lambda many: chat(USER, {**USER, "content": many})),
        (CHAT, "messages[0].tool_calls", 3, lambda many: chat({**USER, "tool_calls": many})),
        (CHAT, "stop_token_ids", "x", lambda many: {**chat(USER), "stop_token_ids": many}),
        (COMPLETIONS, "prompt", -1, lambda many: {"prompt": many}),
        (COMPLETIONS, "prompt", {}, lambda many: {"prompt": many}),
        (COMPLETIONS, "prompt[1]", -1, lambda many: {"prompt": [[1], many]}),
        (RESPONSES, "input", 3, lambda many: {"input": many}),
        (RESPONSES, "input[0].content", 3, lambda many: {"input": [{**USER, "content": many}]}),
        (RESPONSES, "include", 3, lambda many: {"input": "a", "include": many}),
        ("/v1/conversations", "items", 3, lambda many: {"items": many}),
        ("/tokenize", "messages", 3, lambda many: {"messages": many}),
        ("/detokenize", "tokens", -1, lambda many: {"tokens": many}),
    ],
)
def test_a_list_longer_than_the_context_is_refused_before_its_entries(
    server: Server, path: str, param: str, entry: Any, body: Any
) -> None:
    for length, refused_for_it in ((CONTEXT, False), (CONTEXT + 1, True)):
        response = httpx.post(server.url + path, json=body([entry] * length))
        assert response.status_code == 400  # no entry is valid
        error = error_of(response)
        message = f"{param}: takes at most {CONTEXT} entries, not {length}"
        assert (error["message"] == message and error["param"] == param) is refused_for_it


def chat(*messages: Any) -> dict[str, Any]:
    return {"messages": messages}


def test_unused_lists_may_be_long(server: Server) -> None:
    for path, body in ((CHAT, chat(USER)), (COMPLETIONS, {"prompt": "hi"})):
        response = httpx.post(server.url + path, json={**body, "other": [1] * (CONTEXT + 1)})
        assert response.status_code == 200, response.text


def test_the_number_of_prompts_is_limited_by_the_queue_size() -> None:
    with serving(load_chat=FakeGenerator, max_queue_size=CONTEXT + 1) as server:
        body = {"prompt": ["hi"] * (CONTEXT + 1), "max_tokens": 1}
        assert len(httpx.post(server.url + COMPLETIONS, json=body, timeout=60).json()["choices"])
        body["prompt"] = ["hi"] * (CONTEXT + 2)
        assert httpx.post(server.url + COMPLETIONS, json=body).status_code == 400


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("opening", [b"[", b'{"a":', b'[{"a":'])
def test_deeply_nested_json_is_refused(server: Server, path: str, opening: bytes) -> None:
    for field in (b"", b'{"messages":', b'{"input":', b'{"inputs":', b'{"metadata":', b'{"x":'):
        body = field + opening * 200_000
        response = httpx.post(server.url + path, content=body, headers=JSON)
        assert response.status_code == 400
        assert error_of(response)["param"] is None


def test_a_lone_surrogate_is_located_without_building_every_path() -> None:
    key = b"k" * 800_000
    body = b'{"%b": {"a": [%b], "x": "\\ud800"}}' % (key, b",".join([b"1"] * 2000))
    tracemalloc.start()
    try:
        with pytest.raises(InvalidInput, match="surrogate") as caught:
            parse_json(body)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert caught.value.param == "k" * 100 + ".x"
    assert peak < 20_000_000


def test_large_bodies_of_an_endpoint_are_parsed_one_at_a_time() -> None:
    large, gate, started = b"x" * (INLINE_BYTES + 1), threading.Event(), threading.Semaphore(0)
    running = 0
    max_running = 0

    def slow(body: bytes) -> int:
        nonlocal running, max_running
        running += 1
        max_running = max(max_running, running)
        started.release()
        assert gate.wait(10)
        running -= 1
        return len(body)

    async def several() -> None:
        parser, later = JsonBodyParser(), time.monotonic() + 10
        tasks = [asyncio.create_task(parser.run(slow, large, later)) for _ in range(5)]
        assert await asyncio.to_thread(started.acquire, timeout=10)
        assert await parser.run(len, b"small", later) == 5
        assert await parser.run(len, b"small", later, blocks=True) == 5
        assert await JsonBodyParser().run(len, large, later) == len(large)  # another endpoint's
        with pytest.raises(DeadlineExceeded):
            await parser.run(len, large, time.monotonic())
        gate.set()
        assert await asyncio.gather(*tasks) == [len(large)] * 5

    asyncio.run(several())
    assert max_running == 1


HEAD = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n"


def test_bodies_of_many_values_are_parsed_one_at_a_time() -> None:
    """Of all endpoints together; bodies of fewer values are parsed meanwhile."""
    heavy = b"[%b]" % b",".join([b"1"] * (HEAVY_VALUES + 1))
    gate, started = threading.Event(), threading.Semaphore(0)
    running: list[int] = []

    def slow(body: bytes) -> int:
        running.append(len(body))
        started.release()
        assert gate.wait(10)
        assert running == [len(body)]
        running.clear()
        return len(body)

    async def several() -> None:
        one, two, later = JsonBodyParser(), JsonBodyParser(), time.monotonic() + 10
        tasks = [asyncio.create_task(parser.run(slow, heavy, later)) for parser in (one, two, one)]
        assert await asyncio.to_thread(started.acquire, timeout=10)
        for parser in (one, two):
            light = b"1," * (HEAVY_VALUES - 1)
            assert await parser.run(len, light, later) == len(light)
            with pytest.raises(DeadlineExceeded):
                await parser.run(len, heavy, time.monotonic() + 0.1)
        gate.set()
        assert await asyncio.gather(*tasks) == [len(heavy)] * 3

    asyncio.run(several())


def test_a_body_in_small_pieces_takes_no_more_memory_than_its_bytes() -> None:
    pieces = 50_000

    async def read() -> int:
        left = pieces

        async def receive() -> dict[str, Any]:
            nonlocal left
            left -= 1
            if left % 100 == 0:
                await asyncio.sleep(0)
            return {"type": "http.request", "body": b"%02d" % (left % 100), "more_body": left > 0}

        app = create_app(Settings(chat_model="none", embedding_model="none"), FakeRunner)
        scope = {"app": app, "transfer": Transfer()}
        tracemalloc.start()
        try:
            body = await read_body(scope, receive, {}, time.monotonic() + 60)
            assert len(body) == 2 * pieces
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert asyncio.run(read()) < 8 * pieces


@contextlib.contextmanager
def stalled(server: Server, bodies: int) -> Iterator[list[socket.socket]]:
    """Connections that have sent nearly all of a body, one after the other, and stopped."""
    with contextlib.ExitStack() as stack:
        clients = []
        for n in range(1, bodies + 1):
            client = socket.create_connection(("127.0.0.1", server.port), timeout=60)
            stack.enter_context(client).sendall(HEAD + b"x" * 99_999)
            clients.append(client)
            wait_until(lambda n=n: server.app.memory.used == n * 99_999)  # type: ignore[misc]
        yield clients


def test_slowest_body_ends_while_the_memory_for_bodies_is_short() -> None:
    with (
        serving(FakeRunner, max_body_mb=0.1, body_timeout_s=3600) as server,
        stalled(server, MAX_BODIES) as clients,
    ):
        assert httpx.post(server.url, content=b"x").status_code == 200  # there is room for it
        assert server.app.memory.used == MAX_BODIES * 99_999
        served = httpx.post(server.url, content=b"x" * 1000)
        assert served.status_code == 200
        status, body = read_response(clients[0])  # it has waited longest with as many bytes
        assert (status, orjson.loads(body)["error"]["code"]) == (408, "body_timeout")
        assert server.app.memory.used == (MAX_BODIES - 1) * 99_999
        for client in clients[1:]:
            client.sendall(b"x")
            assert read_response(client)[0] == 200
        wait_until(lambda: not server.app.memory.used)


def test_bodies_of_running_requests_are_limited_together() -> None:
    """The server waits for no client, so none can make room."""
    runner = FakeRunner()
    runner.gate.clear()
    with (
        serving(lambda: runner, max_body_mb=0.1) as server,
        stalled(server, MAX_BODIES) as clients,
    ):
        for client in clients:
            client.sendall(b"x")
        wait_until(lambda: server.worker_client.queue.pending == MAX_BODIES)
        refused = httpx.post(server.url, content=b"x" * 1000)
        assert refused.status_code == 503
        assert error_of(refused)["code"] == "queue_full"
        assert refused.headers["retry-after"]
        runner.gate.set()
        for client in clients:
            assert read_response(client)[0] == 200
        wait_until(lambda: not server.app.memory.used)
        assert httpx.post(server.url, content=b"x" * 1000).status_code == 200
