"""The memory that stored responses take while they are sent, continued or generated, and each
client's share of the store."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from server.apis.openai.responses.endpoint import Responses
from tests.event_streams import CLIENT, error_of, open_stream
from tests.fake_generator import FakeGenerator
from tests.fakes import FakeRunner
from tests.response_events import PATH, get_response, respond, response_document
from tests.serving import Server, read_response, serving, wait_until

LONG = "x" * 7_000_000  # more than the buffers of a connection take
LIMIT = 20_000_000


@pytest.fixture
def generator() -> FakeGenerator:
    return FakeGenerator()


@pytest.fixture
def server(generator: FakeGenerator) -> Iterator[Server]:
    with serving(FakeRunner, load_chat=lambda: generator, max_body_mb=8) as started:
        started.app.memory.limit = LIMIT
        yield started
        generator.release()


def endpoint(server: Server) -> Responses:
    [responses] = [route.app for route in server.app.routes if route.path == PATH]
    assert isinstance(responses, Responses)
    return responses


def store_long(server: Server) -> str:
    items = [{"role": "user", "content": LONG}, {"role": "user", "content": "hi"}]
    id = str(response_document(respond(server, items))["id"])
    wait_until(lambda: not server.app.memory.used)
    return id


def received(client: socket.socket) -> int:
    """Read until the end of the connection; return the number of bytes."""
    total = 0
    while data := client.recv(1 << 20):
        total += len(data)
    return total


def unread(server: Server, path: str) -> socket.socket:
    """Return a connection with a response that has begun: the order counts."""
    client = open_stream(server, path, None)
    assert client.recv(1, socket.MSG_PEEK)
    return client


@pytest.mark.parametrize("below", ["", "/input_items"])
def test_unread_responses_are_limited_together(server: Server, below: str) -> None:
    if below:
        path = f"{PATH}/{store_long(server)}{below}"
    else:
        path = f"{PATH}/{response_document(respond(server, instructions=LONG))['id']}"
        wait_until(lambda: not server.app.memory.used)
    with ExitStack() as stack:
        first, second = (stack.enter_context(unread(server, path)) for _ in range(2))
        assert 14_000_000 < server.app.memory.used <= LIMIT
        read = CLIENT.get(server.url + path)
        assert read.status_code == 200
        assert LONG in read.text
        assert received(first) < len(LONG)
        status, body = read_response(second)
        assert (status, len(body) > len(LONG)) == (200, True)
    wait_until(lambda: not server.app.memory.used)


def test_other_large_responses_count_while_they_are_unread(server: Server) -> None:
    with open_stream(server, "/", {"inputs": LONG}) as client:
        assert client.recv(1, socket.MSG_PEEK)
        assert server.app.memory.used > len(LONG)
        assert read_response(client)[0] == 200
    wait_until(lambda: not server.app.memory.used)


@pytest.mark.parametrize("refers_by", ["previous_response_id", "item_reference"])
def test_continued_responses_count_until_the_end(
    server: Server, generator: FakeGenerator, refers_by: str
) -> None:
    if refers_by == "item_reference":
        named = {"role": "user", "content": LONG, "id": "msg_long"}
        response_document(respond(server, [named]))
        body: dict[str, Any] = {"input": [{"type": "item_reference", "id": "msg_long"}]}
    else:
        body = {"input": "and then?", refers_by: store_long(server)}
    wait_until(lambda: not server.app.memory.used)
    generator.gate.clear()
    with open_stream(server, PATH, body) as first, open_stream(server, PATH, body) as second:
        wait_until(lambda: server.app.memory.used > 2 * len(LONG))
        refused = CLIENT.post(server.url + PATH, json=body)
        assert refused.status_code == 503
        assert error_of(refused)["code"] == "queue_full"
        generator.release()
        assert read_response(first)[0] == read_response(second)[0] == 200
    wait_until(lambda: not server.app.memory.used)


def test_background_responses_hold_at_most_their_share(
    server: Server, generator: FakeGenerator
) -> None:
    memory = endpoint(server).background_memory
    assert memory.limit == 32_000_000
    memory.limit = 10_000_000
    generator.gate.clear()
    id = response_document(respond(server, LONG, background=True))["id"]
    assert len(LONG) < memory.used < memory.limit
    assert not server.app.memory.used
    refused = respond(server, LONG, background=True)
    assert refused.status_code == 503
    assert "background" in error_of(refused)["message"]
    assert response_document(respond(server, background=True))
    generator.release()
    wait_until(lambda: get_response(server, id).json()["status"] == "completed")
    wait_until(lambda: not memory.used)


def test_background_memory_is_released_where_the_queue_is_full() -> None:
    generator = FakeGenerator()
    settings: dict[str, Any] = {"max_queue_size": 4, "shutdown_grace_s": 0}
    with serving(load_chat=lambda: generator, **settings) as server:
        response_document(respond(server, "hang", background=True))
        before = endpoint(server).background_memory.used
        assert respond(server, "hang", background=True).status_code == 503
        assert endpoint(server).background_memory.used == before > 0


def test_failed_response_keeps_no_input(server: Server) -> None:
    id = response_document(respond(server, "bad", background=True))["id"]
    wait_until(lambda: get_response(server, id).json()["status"] == "failed")
    assert get_response(server, id, "/input_items").json()["data"] == []
    continued = respond(server, previous_response_id=id)
    assert continued.status_code == 400
    error = error_of(continued)
    assert error["param"] == "previous_response_id"
    assert "failed" in error["message"]


def test_clients_do_not_evict_each_others_responses() -> None:
    def create(server: Server, key: str, text: str) -> str:
        body = {"input": text, "background": text == "bad"}
        headers = {"Authorization": f"Bearer {key}"}
        id = str(CLIENT.post(server.url + PATH, json=body, headers=headers).json()["id"])
        wait_until(lambda: not endpoint(server).jobs.jobs)
        return id

    def status(server: Server, key: str, id: str) -> int:
        headers = {"Authorization": f"Bearer {key}"}
        return CLIENT.get(f"{server.url}{PATH}/{id}", headers=headers).status_code

    with serving(load_chat=FakeGenerator, api_keys=("one", "two")) as server:
        endpoint(server).store.max_responses = 4
        kept = create(server, "one", "hi")
        for text in ("hi", "bad"):
            ids = [create(server, "two", text) for _ in range(6)]
            assert status(server, "one", kept) == 200
            assert [status(server, "two", id) for id in ids] == [404, 404, 404, 200, 200, 200]


def test_freed_memory_is_returned_after_large_stored_responses_are_read(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    small, large = str(response_document(respond(server, "hi"))["id"]), store_long(server)
    trimmed: list[int] = []
    monkeypatch.setattr("server.apis.openai.responses.endpoint.trim_heap", trimmed.append)
    for id in (small, large):
        get_response(server, id, "/input_items")
        respond(server, "and then?", previous_response_id=id)
        assert len(trimmed) == (2 if id == large else 0)
