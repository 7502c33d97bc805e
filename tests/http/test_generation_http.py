"""Promises of all generation endpoints: status codes, time limits, slow and gone clients."""

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from server.http import connections
from tests.event_streams import (
    CLIENT,
    chat,
    chunks,
    error_of,
    frames,
    open_stream,
    post,
    read_until,
    writes,
)
from tests.fake_generator import FakeGenerator
from tests.serving import ManualTimers, Server, metric, serving, wait_until

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES = "/v1/messages"
CHATS = pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
PATHS = pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES])
STREAM = pytest.mark.parametrize("stream", [False, True])


@contextmanager
def serving_fake(**settings: Any) -> Iterator[tuple[Server, FakeGenerator]]:
    generator = FakeGenerator()
    with serving(load_chat=lambda: generator, **settings) as server:
        try:
            yield server, generator
            wait_until(lambda: server.worker_client.queue.pending == 0)  # no place is lost
        finally:
            generator.release()


def body_for(path: str, text: str = "hi", **fields: Any) -> dict[str, Any]:
    bodies: dict[str, dict[str, Any]] = {
        CHAT: {"messages": [{"role": "user", "content": text}]},
        COMPLETIONS: {"prompt": text, "max_tokens": 10**9},
        RESPONSES: {"input": text},
        MESSAGES: {"messages": [{"role": "user", "content": text}], "max_tokens": 9},
    }
    return {**bodies[path], **fields}


def ask(server: Server, path: str, text: str = "hi", limit_ms: int = 0, **fields: Any) -> Any:
    headers = {"X-Request-Timeout-Ms": str(limit_ms)} if limit_ms else {}
    return post(server, path, body_for(path, text, **fields), **headers)


def text_of(response: httpx.Response) -> str:
    """The whole text of a streamed chat."""
    parts = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks(response)]
    return "".join(parts)


# ── before the first token: real status codes ──


def test_everything_is_a_503_while_loading() -> None:
    gate = threading.Event()

    def load() -> FakeGenerator:
        assert gate.wait(60)
        return FakeGenerator()

    requests: list[tuple[str, Any]] = [
        *((path, body_for(path)) for path in (CHAT, COMPLETIONS, RESPONSES)),
        *(("/tokenize", {"prompt": "hi"}), ("/detokenize", {"tokens": [1]})),
        *(("/load_model", {"model": "demo"}), ("/v1/models", None), ("/v1/models/demo", None)),
    ]
    with serving(load_chat=load, ready=False) as server:
        for path, body in requests:
            answer = CLIENT.request("POST" if body else "GET", server.url + path, json=body)
            assert answer.status_code == 503, answer.text
            assert error_of(answer)["code"] == "not_ready"
        gate.set()


@PATHS
@STREAM
def test_no_token_in_time_is_a_504(path: str, stream: bool) -> None:
    with serving_fake() as (server, generator), ThreadPoolExecutor(1) as pool:
        timers = ManualTimers(server)
        pending = pool.submit(ask, server, path, "hang", limit_ms=40_000, stream=stream)
        wait_until(lambda: bool(generator.running))
        timers.fire(within_s=40)
        answer = pending.result()
        assert answer.status_code == 504
        assert error_of(answer)["code"] == "deadline_exceeded"
        wait_until(lambda: generator.dropped == ["hang"])


def test_a_long_limit_of_the_client_does_not_lengthen_the_wait_for_the_first_token() -> None:
    with serving_fake(request_timeout_s=0.1) as (server, _):
        assert ask(server, CHAT, "hang", limit_ms=3600_000).status_code == 504


# ── streams that wait for the first token ──


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES, MESSAGES])
@pytest.mark.parametrize("text", ["hi", "bad"])
def test_a_stream_that_waits_opens_with_comments(path: str, text: str) -> None:
    """A refusal is then one event, which is counted as the status that it would have been."""
    with serving_fake(sse_keepalive_s=0.05) as (server, generator):
        generator.gate.clear()
        body = body_for(path, text, stream=True)
        with open_stream(server, path, body, "x-api-key: key") as client:
            got = read_until(client, b": keep-alive\n\n")
            got += read_until(client, b": keep-alive\n\n")
            assert got.startswith(b"HTTP/1.1 200")
            generator.release()
            got += read_until(client, b"\r\n0\r\n\r\n")
        events = [write for write in writes(got) if not write.startswith(b":")]
        assert b"".join(writes(got)).startswith(b": keep-alive")
        status = 500 if text == "bad" else 200
        counted = f'onequeue_requests_total{{endpoint="{path}",status="{status}"}}'
        wait_until(lambda: metric(server, counted) == 1)
        if status == 500:
            assert b"the model failed on this input" in events[0]
            assert len(events) == 2  # the last is empty
        else:
            assert not any(b'"error":{' in event for event in events)


# ── after the first token ──


@STREAM
def test_one_failing_prompt_of_a_list_ends_the_others(stream: bool) -> None:
    with serving_fake() as (server, generator):
        prompts = ["long", "bad later"]
        fields = {"prompt": prompts, "max_tokens": 10**9, "stream": stream}
        answer = post(server, COMPLETIONS, fields)
        assert "the model failed on this input" in answer.text
        wait_until(lambda: generator.dropped == ["long"])


@STREAM
def test_the_time_limit_is_extended_by_progress(stream: bool) -> None:
    with serving_fake() as (server, generator), ThreadPoolExecutor(1) as pool:
        timers = ManualTimers(server)
        generator.one_by_one = True
        pending = pool.submit(chat, server, stream=stream)
        generator.permits.release()
        wait_until(lambda: metric(server, "onequeue_time_to_first_token_seconds_count") == 1)
        timers.fire(within_s=60)
        generator.release()
        answer = pending.result()
        assert answer.status_code == 200
        text = text_of(answer) if stream else answer.json()["choices"][0]["message"]["content"]
        assert text == "Hello there, wörld!"


@STREAM
@pytest.mark.parametrize("field", ["progress_at", "accepted_at"])
def test_time_without_progress_and_the_whole_time_are_limited(field: str, stream: bool) -> None:
    with serving_fake() as (server, generator), ThreadPoolExecutor(1) as pool:
        timers = ManualTimers(server)
        generator.one_by_one = True
        pending = pool.submit(chat, server, "long", stream=stream)
        generator.permits.release()
        wait_until(lambda: metric(server, "onequeue_time_to_first_token_seconds_count") == 1)
        [request] = generator.running
        seconds = {"progress_at": 61, "accepted_at": 601}[field]
        setattr(request.item, field, getattr(request.item, field) - seconds)
        timers.fire(within_s=60)
        generator.permits.release()
        answer = pending.result()
        if stream:
            assert json.loads(frames(answer.text)[-2])["error"]["code"] == "deadline_exceeded"
        else:
            assert answer.status_code == 504


@CHATS
@STREAM
def test_the_clients_own_limit_bounds_the_whole(path: str, stream: bool) -> None:
    with serving_fake() as (server, generator), ThreadPoolExecutor(1) as pool:
        timers = ManualTimers(server)
        pending = pool.submit(ask, server, path, "long", limit_ms=40_000, stream=stream)
        wait_until(lambda: metric(server, "onequeue_time_to_first_token_seconds_count") == 1)
        timers.fire(within_s=40)
        answer = pending.result()
        if stream:
            assert answer.status_code == 200
            assert json.loads(frames(answer.text)[-2])["error"]["code"] == "deadline_exceeded"
        else:
            assert answer.status_code == 504
            error_of(answer)
        wait_until(lambda: generator.dropped == ["long"])


def test_stream_of_a_stopping_server_ends_with_an_error() -> None:
    with serving_fake() as (server, _), ThreadPoolExecutor(1) as pool:
        pending = pool.submit(chat, server, "long", stream=True)
        wait_until(lambda: metric(server, "onequeue_time_to_first_token_seconds_count") == 1)
        server.worker_client.loop.call_soon_threadsafe(server.worker_client.cancel_all)
        assert json.loads(frames(pending.result().text)[-2])["error"]["code"] == "draining"


def test_stream_of_a_dying_worker_ends_with_an_error() -> None:
    with serving_fake() as (server, generator), ThreadPoolExecutor(1) as pool:
        pending = pool.submit(chat, server, "long", stream=True)
        assert generator.responded.wait(60)
        generator.step_error = RuntimeError("CUDA error: unspecified launch failure")
        assert json.loads(frames(pending.result().text)[-2])["error"]["code"] == "worker_down"
        assert chat(server, stream=True).status_code == 503


# ── the connection ──


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_each_event_is_one_write(path: str) -> None:
    with serving_fake() as (server, generator):
        generator.one_by_one = True
        body, raw = body_for(path, "say a b c d e f g h i j", stream=True), b""
        with open_stream(server, path, body, "Connection: close") as client:
            for word in (b'"a"', *(b' %c"' % letter for letter in b"bcdefghij")):
                generator.permits.release()  # else a slow reader gets several words at a time
                raw += read_until(client, word)
            generator.release()
            raw += b"".join(iter(lambda: client.recv(65536), b""))
        *events, last = writes(raw)
        assert last == b""
        assert len(events) >= 10
        for event in events:
            assert event.startswith(b"event: response." if path == RESPONSES else b"data: ")
            assert event.endswith(b"\n\n")
            assert event.count(b"\n\n") == 1


def test_an_idle_stream_is_kept_alive_by_comments() -> None:
    with serving_fake(sse_keepalive_s=0.05) as (server, generator):
        generator.one_by_one = True
        started = time.monotonic()
        with open_stream(server, CHAT, body_for(CHAT, stream=True)) as client:
            generator.permits.release()
            got = read_until(client, b": keep-alive\n\n")
            got += read_until(client, b": keep-alive\n\n")
            generator.release()
            got += read_until(client, b"[DONE]\n\n")
        comments = [write for write in writes(got) if write == b": keep-alive\n\n"]
        assert 2 <= len(comments) <= 1 + (time.monotonic() - started) / 0.05
        events = b"".join(write for write in writes(got) if not write.startswith(b":"))
        assert len(frames(events.decode())) >= 4


@PATHS
@STREAM
def test_a_client_that_leaves_ends_its_work_within_a_step(path: str, stream: bool) -> None:
    with serving_fake() as (server, generator):
        generator.one_by_one = True
        client = open_stream(server, path, body_for(path, "long", stream=stream))
        generator.permits.release()
        if stream:
            read_until(client, b"\n\n")
        assert generator.responded.wait(60)
        client.close()
        wait_until(lambda: server.worker_client.queue.pending == 0)
        assert generator.dropped == []
        generator.permits.release()
        generator.permits.release()  # the step that was under way may not have seen it yet
        wait_until(lambda: generator.dropped == ["long"])
        assert not generator.running
        generator.release()
        assert chat(server).status_code == 200


@STREAM
def test_a_client_that_leaves_before_the_first_token_ends_its_work(stream: bool) -> None:
    with serving_fake(max_queue_size=1) as (server, generator):
        client = open_stream(server, CHAT, body_for(CHAT, "hang", stream=stream))
        wait_until(lambda: bool(generator.running))
        client.close()
        wait_until(lambda: generator.dropped == ["hang"])
        wait_until(lambda: server.worker_client.queue.pending == 0)
        assert chat(server).status_code == 200


def test_a_client_that_stops_reading_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "STALLED_S", 0.3)
    with serving_fake(body_timeout_s=3600) as (server, generator):
        with open_stream(server, CHAT, body_for(CHAT, "big", stream=True)) as client:
            wait_until(lambda: generator.dropped == ["big"])
            wait_until(lambda: server.worker_client.queue.pending == 0)
            assert client.recv(4096).startswith(b"HTTP/1.1 200")
        assert chat(server).status_code == 200
        assert metric(server, 'onequeue_errors_total{kind="client_gone",model="fake"}') == 1


def test_a_slow_reader_gets_everything_in_fewer_events(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving_fake() as (server, generator):
        body = body_for(CHAT, "big", stream=True, max_tokens=60)
        with open_stream(server, CHAT, body) as client:
            assert generator.responded.wait(60)
            wait_until(lambda: not generator.running)
            raw = read_until(client, b"[DONE]\n\n\r\n")
        data = frames(b"".join(writes(raw)).decode())
        texts = [json.loads(entry)["choices"][0]["delta"].get("content", "") for entry in data[:-1]]
        assert sum(map(len, texts)) == 60 * 100_000
        assert len(data) < 50


# ── as everywhere ──


def test_keys_origins_limits_and_methods_hold_here_too() -> None:
    settings: dict[str, Any] = {
        "api_keys": ("secret",), "cors_origins": ("*",), "max_body_mb": 0.01,
    }  # fmt: skip
    with serving_fake(**settings) as (server, _):
        key = {"Authorization": "Bearer secret"}
        for path in (CHAT, COMPLETIONS, "/tokenize", "/detokenize", "/load_model"):
            url = server.url + path
            assert CLIENT.post(url, json={}).status_code == 401
            large = CLIENT.post(url, content=b"x" * 20_000, headers=key)
            assert large.status_code == 413
            error_of(large)
            wrong = CLIENT.get(url, headers=key)
            assert wrong.status_code == 405
            assert wrong.headers["allow"] == "POST"
            form = CLIENT.post(url, files={"file": b"x"}, headers=key)
            assert form.status_code == 415
            error_of(form)
            plain = CLIENT.post(url, content=b"[]", headers=key)
            assert plain.status_code == 400
            origin = CLIENT.post(url, json={}, headers={**key, "Origin": "https://a.example"})
            assert origin.headers["access-control-allow-origin"] == "*"
        assert CLIENT.get(server.url + "/v1/models").status_code == 401
        stream = post(server, CHAT, body_for(CHAT, stream=True), Origin="https://a", **key)
        assert stream.headers["access-control-allow-origin"] == "*"


def test_the_first_token_is_timed_and_requests_are_counted() -> None:
    with serving_fake() as (server, _):
        chat(server)
        chat(server, stream=True)
        chat(server, "refused")
        CLIENT.get(server.url + "/v1/models/some/name")
        CLIENT.get(server.url + "/v1/models/demo")
        assert metric(server, "onequeue_time_to_first_token_seconds_count") == 2
        for path, status, count in (
            (CHAT, 200, 2),
            (CHAT, 400, 1),
            ("/v1/models/{id}", 200, 1),
            ("/v1/models/{id}", 404, 1),
        ):
            name = f'onequeue_requests_total{{endpoint="{path}",status="{status}"}}'
            assert metric(server, name) == count


def test_a_hundred_streams_at_once_all_get_their_text() -> None:
    with serving_fake() as (server, _), ThreadPoolExecutor(50) as pool:
        responses = [pool.submit(chat, server, f"say a{n} b c", stream=True) for n in range(100)]
        for n, request in enumerate(responses):
            assert text_of(request.result()) == f"a{n} b c"
