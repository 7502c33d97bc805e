"""Stored responses over HTTP: look-up, conversations, deletion, and background responses."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import openai
import pytest
from openai.types.responses import ResponseItem
from pydantic import TypeAdapter

from batching.fair_share import Priority
from server import routes
from server.apis.openai import jobs
from server.apis.openai.batches.runner import BatchRunner
from server.apis.openai.database import DatabaseDown, SqliteDatabase
from server.apis.openai.responses import endpoint
from server.apis.openai.responses.store import ResponseStore
from tests.conftest import opened_databases
from tests.event_streams import CLIENT, error_of, post
from tests.fake_generator import FakeGenerator
from tests.matrix import matrix
from tests.postgres import Databases, Postgres
from tests.response_events import (
    PATH,
    WHOLE,
    events,
    get_response,
    output_texts,
    respond,
    response_document,
)
from tests.serving import Server, metric, serving, wait_until
from tests.unit.test_response_store import filled
from worker.messages.generation import Chat

ITEM: TypeAdapter[Any] = TypeAdapter(ResponseItem)


@pytest.fixture(scope="module", params=matrix(["sqlite", "postgres"], "sqlite"))
def server(
    request: pytest.FixtureRequest,
    generator: FakeGenerator,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Server]:
    with (
        opened_databases(request, tmp_path_factory.mktemp("responses")) as databases,
        serving(load_chat=lambda: generator, **databases.settings) as started,
    ):
        yield started


class Own(NamedTuple):
    server: Server
    generator: FakeGenerator
    sdk: openai.OpenAI


@pytest.fixture
def own() -> Iterator[Own]:
    """A server of one test."""
    generator = FakeGenerator()
    with serving(load_chat=lambda: generator) as server:
        yield Own(server, generator, sdk_of(server))


def sdk_of(server: Server, key: str = "-") -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key=key, max_retries=0)


def delete(server: Server, id: str) -> Any:
    return CLIENT.delete(f"{server.url}{PATH}/{id}")


def cancel(server: Server, id: str) -> Any:
    return CLIENT.post(f"{server.url}{PATH}/{id}/cancel")


def messages_of(generator: FakeGenerator) -> list[tuple[str, str]]:
    prompt = generator.payloads[-1].prompt
    assert isinstance(prompt, Chat)
    return [(message["role"], message["content"]) for message in prompt.messages]


# ── looked up ──


@pytest.mark.parametrize("stream", [False, True])
def test_response_is_stored_before_its_end_is_sent(server: Server, stream: bool) -> None:
    answer = respond(server, stream=stream, metadata={"a": "b"})
    response = events(answer)[-1]["response"] if stream else response_document(answer)
    assert response_document(get_response(server, response["id"])) == response


# ── built upon ──


def test_megabytes_of_input_are_accepted(server: Server) -> None:
    long = "x" * 5_000_000
    messages = [{"role": "user", "content": long}, {"role": "user", "content": "say fine"}]
    answer = response_document(respond(server, messages))
    items = get_response(server, answer["id"], "/input_items", order="asc").json()["data"]
    assert items[0]["content"] == [{"type": "input_text", "text": long}]


def test_unknown_previous_response_is_404(server: Server) -> None:
    first = response_document(respond(server))
    second = response_document(respond(server, previous_response_id=first["id"]))
    delete(server, first["id"])
    for previous in ("resp_none", second["id"]):  # of the second, the beginning is missing
        answer = respond(server, previous_response_id=previous)
        assert answer.status_code == 404
        assert error_of(answer)["param"] == "previous_response_id"


def test_conversation_larger_than_the_body_limit_is_refused() -> None:
    with serving(load_chat=FakeGenerator, max_body_mb=0.01) as server:
        id = response_document(respond(server, "say " + "x" * 4500))["id"]
        answer = respond(server, "hi", previous_response_id=id)
        assert answer.status_code == 400
        assert error_of(answer)["param"] == "previous_response_id"


def test_items_are_referenced_by_id(server: Server, generator: FakeGenerator) -> None:
    first = response_document(respond(server, [{"role": "user", "content": "hi", "id": "msg_hi"}]))
    items: list[Any] = [
        {"type": "item_reference", "id": "msg_hi"},
        {"id": first["output"][0]["id"]},
        {"role": "user", "content": "say more"},
    ]
    response_document(respond(server, items))
    assert messages_of(generator) == [
        ("user", "hi"),
        ("assistant", WHOLE),
        ("user", "say more"),
    ]
    answer = respond(server, [*items, {"type": "item_reference", "id": "msg_none"}])
    assert answer.status_code == 404
    assert error_of(answer)["param"] == "input[3].id"


def test_referenced_items_larger_than_the_body_limit_are_refused() -> None:
    with serving(load_chat=FakeGenerator, max_body_mb=0.01) as server:
        long = [{"role": "user", "content": "say " + "x" * 4500, "id": f"msg_{n}"} for n in (1, 2)]
        for item in long:
            response_document(respond(server, [item]))
        one, other = ({"type": "item_reference", "id": item["id"]} for item in long)
        for input, param in (([one, one], "input[1].id"), ([one, other], "input")):
            answer = respond(server, input)
            assert answer.status_code == 400
            assert error_of(answer)["param"] == param


# ── in the background ──


def test_background_response_is_polled_until_it_ends(own: Own) -> None:
    server, generator, sdk = own
    generator.gate.clear()
    queued = sdk.responses.create(model="demo", input="say a b", background=True)
    assert (queued.status, queued.background, queued.output) == ("queued", True, [])
    assert response_document(get_response(server, queued.id))["status"] == "queued"
    early = respond(server, previous_response_id=queued.id)
    assert early.status_code == 400
    assert "is still being generated" in error_of(early)["message"]
    items = sdk.responses.input_items.list(queued.id).data
    assert [item.type for item in items] == ["message"]
    generator.one_by_one = True
    generator.gate.set()
    generator.permits.release()
    wait_until(lambda: get_response(server, queued.id).json()["status"] == "in_progress")
    generator.release()
    wait_until(lambda: sdk.responses.retrieve(queued.id).status == "completed")
    assert sdk.responses.retrieve(queued.id).output_text == "a b"
    assert not server.worker_client.queue.pending


def background_events(server: Server, id: str, after: int = -1) -> list[dict[str, Any]]:
    """Read the events of a background response after a number, until its end."""
    query = {"stream": "true"} | ({"starting_after": str(after)} if after >= 0 else {})
    return events(get_response(server, id, **query), after + 1)


def test_a_lost_stream_of_a_background_response_is_resumed(own: Own) -> None:
    server, generator, sdk = own
    generator.gate.clear()
    generator.one_by_one = True
    text = "say a b c d"
    stream = sdk.responses.create(model="demo", input=text, background=True, stream=True)
    created, queued = next(stream), next(stream)
    assert (created.type, queued.type) == ("response.created", "response.queued")
    assert created.type == "response.created"
    id = created.response.id
    stream.close()  # before the first token
    generator.gate.set()
    generator.permits.release(2)
    begun: list[Any] = []
    for event in sdk.responses.retrieve(id, stream=True):
        begun.append(event)
        if event.type == "response.output_text.delta":
            break
    assert [event.sequence_number for event in begun] == [*range(len(begun))]
    generator.release()
    last = begun[-1].sequence_number
    rest = [*sdk.responses.retrieve(id, stream=True, starting_after=last)]
    assert [event.sequence_number for event in rest] == [*range(last + 1, last + 1 + len(rest))]
    assert rest[-1].type == "response.completed"
    assert rest[-1].response.output_text == "a b c d"
    assert generator.dropped == []
    whole = background_events(server, id)  # also after the end
    assert whole[0]["type"] == "response.created"
    assert [event["type"] for event in whole[last + 1 :]] == [event.type for event in rest]
    assert background_events(server, id, whole[-2]["sequence_number"]) == whole[-1:]
    assert whole[-1]["response"] == get_response(server, id).json()
    gone = metric(server, 'onequeue_errors_total{kind="client_gone",model=""}')
    assert gone <= 1, "one reader has left"


@pytest.mark.parametrize("text", ["long", "bad"])
def test_two_readers_of_a_background_response_get_its_end(own: Own, text: str) -> None:
    server, generator, sdk = own
    generator.gate.clear()
    with ThreadPoolExecutor(2) as pool:
        stream = sdk.responses.create(model="demo", input=text, background=True, stream=True)
        opened: Any = next(stream)
        id = opened.response.id
        readers = [pool.submit(get_response, server, id, stream="true") for _ in range(2)]
        generator.gate.set()
        if text == "long":
            assert generator.responded.wait(60)
            cancel(server, id)
        end = "response.failed" if text == "bad" else "response.cancelled"
        first, second = [reader.result().text for reader in readers]
        assert first == second
        assert first.count(f"event: {end}\n") == 1


def test_events_beyond_their_bound_are_replaced_by_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(endpoint, "MAX_EVENT_BYTES", 2_500)
    with serving(load_chat=FakeGenerator) as server:
        got = events(respond(server, "say a b c d e", background=True, stream=True))
        assert [event["type"] for event in got[:2]] == ["response.created", "response.queued"]
        assert got[-1]["type"] == "response.completed"
        assert output_texts(got[-1]["response"]) == [("message", "a b c d e")]
        assert len(got) < 6


def test_cancelling_ends_a_background_response(own: Own) -> None:
    server, generator, _ = own
    id = response_document(respond(server, "long", background=True))["id"]
    assert generator.responded.wait(60)
    cancelled = response_document(cancel(server, id))
    assert cancelled["status"] == "cancelled"
    assert cancelled["completed_at"] is None
    wait_until(lambda: generator.dropped == ["long"])
    assert response_document(get_response(server, id)) == cancelled
    assert response_document(cancel(server, id)) == cancelled
    assert server.worker_client.queue.pending == 0


def test_deleting_a_background_response_ends_it(own: Own) -> None:
    server, generator, _ = own
    id = response_document(respond(server, "long", background=True))["id"]
    assert generator.responded.wait(60)
    assert delete(server, id).status_code == 200
    assert get_response(server, id).status_code == 404
    wait_until(lambda: generator.dropped == ["long"])


@pytest.mark.parametrize(
    ("text", "code", "reason"),
    [("bad", "server_error", "failed on this input"), ("refused", "invalid_prompt", "is refused")],
)
def test_failure_in_the_background_is_in_the_response(
    server: Server, text: str, code: str, reason: str
) -> None:
    id = response_document(respond(server, text, background=True))["id"]
    wait_until(lambda: get_response(server, id).json()["status"] == "failed")
    failed = response_document(get_response(server, id))
    assert failed["error"]["code"] == code
    assert reason in failed["error"]["message"]
    assert failed["output"] == []
    assert failed["usage"] is None


def test_background_response_has_a_time_limit(server: Server) -> None:
    body = {"input": "hang", "background": True}
    id = response_document(post(server, PATH, body, **{"X-Request-Timeout-Ms": "50"}))["id"]
    wait_until(lambda: get_response(server, id).json()["status"] == "failed")
    assert "time limit" in get_response(server, id).json()["error"]["message"]


def test_background_response_waits_to_start_without_a_limit() -> None:
    generator = FakeGenerator()
    generator.one_by_one = True
    with serving(load_chat=lambda: generator, request_timeout_s=0.05) as server:
        id = response_document(respond(server, "say a b", background=True))["id"]
        assert respond(server, "hang").status_code == 504  # the same limit, later
        assert get_response(server, id).json()["status"] == "queued"
        generator.release()
        wait_until(lambda: get_response(server, id).json()["status"] == "completed")


def test_background_responses_take_at_most_a_quarter_of_the_slots() -> None:
    generator = FakeGenerator()
    with serving(load_chat=lambda: generator, max_queue_size=8, shutdown_grace_s=0) as server:
        for _ in range(2):
            response_document(respond(server, "hang", background=True))
        wait_until(lambda: generator.priorities == [Priority.BACKGROUND] * 2)
        full = respond(server, background=True)
        assert full.status_code == 503
        assert error_of(full)["code"] == "queue_full"
        assert "background" in error_of(full)["message"]
        assert int(full.headers["retry-after"]) >= 1
        response_document(respond(server))
        assert generator.priorities[2:] == [Priority.INTERACTIVE]


# ── what the store cannot take ──


@pytest.fixture
def full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """With a disk that has no room for an input of a hundred kilobytes."""
    monkeypatch.setattr(routes, "open_store", lambda *_: filled(tmp_path / "responses.db"))
    with serving(load_chat=FakeGenerator) as started:
        yield started


LONG = "say " + "x" * 100_000
NOT_STORED = "onequeue_responses_not_stored_total"


def test_response_that_cannot_be_stored_has_store_false(full: Server) -> None:
    whole = response_document(respond(full, LONG))
    received = events(respond(full, LONG, stream=True))
    assert received[-1]["type"] == "response.completed"
    for response in (whole, received[-1]["response"]):
        assert (response["store"], response["status"]) == (False, "completed")
        assert output_texts(response) == [("message", LONG.removeprefix("say "))]
        assert get_response(full, response["id"]).status_code == 404
        built = respond(full, previous_response_id=response["id"])
        assert built.status_code == 404
    assert metric(full, NOT_STORED) == 2
    assert response_document(respond(full, LONG, store=False))["store"] is False
    assert metric(full, NOT_STORED) == 2


def test_background_response_is_found_without_the_store(full: Server) -> None:
    id = response_document(respond(full, LONG, background=True))["id"]
    wait_until(lambda: get_response(full, id).json()["status"] == "completed")
    found = response_document(get_response(full, id))
    assert found["store"] is False
    assert output_texts(found) == [("message", LONG.removeprefix("say "))]
    assert len(get_response(full, id, "/input_items").json()["data"]) == 1
    assert response_document(cancel(full, id)) == found
    assert metric(full, NOT_STORED) == 1
    assert delete(full, id).json()["deleted"] is True
    assert get_response(full, id).status_code == delete(full, id).status_code == 404


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ResponseStore:
    """The store of the servers that are started later."""
    store = ResponseStore(SqliteDatabase(str(tmp_path / "responses.db")))
    monkeypatch.setattr(routes, "open_store", lambda *_: store)
    return store


def test_a_failed_disk_is_a_503(store: ResponseStore, own: Own) -> None:
    server, _, _ = own
    id = response_document(respond(server))["id"]
    store.database.execute("PRAGMA query_only = ON")
    for refused in (cancel(server, id), delete(server, id)):
        assert (refused.status_code, error_of(refused)["code"]) == (503, "queue_full")
        assert "the server's disk has failed" in error_of(refused)["message"]
        assert refused.headers["retry-after"] == "10"
    assert get_response(server, id).status_code == 200
    store.database.execute("PRAGMA query_only = OFF")
    store.database.execute("ALTER TABLE responses RENAME TO gone")
    refused = respond(server, previous_response_id=id)
    assert (refused.status_code, error_of(refused)["code"]) == (503, "queue_full")


def test_a_stream_ends_where_the_disk_fails_meanwhile(store: ResponseStore, own: Own) -> None:
    server, generator, sdk = own
    generator.gate.clear()
    stream = sdk.responses.create(model="demo", input="say a", background=True, stream=True)
    created: Any = next(stream)
    store.database.execute("PRAGMA query_only = ON")
    generator.gate.set()
    *_, last = stream
    assert last.type == "response.completed"
    assert last.response.output_text == "a"
    id = created.response.id
    assert get_response(server, id).json()["status"] == "completed"
    store.database.execute("PRAGMA query_only = OFF")
    assert delete(server, id).json()["deleted"] is True
    assert get_response(server, id).status_code == 404
    store.remove_expired()
    assert store.database.execute("SELECT count(*) FROM generating") == [(0,)]


def test_a_stream_goes_on_while_the_database_is_down(
    store: ResponseStore, own: Own, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise DatabaseDown

    own.generator.gate.clear()
    stream = own.sdk.responses.create(model="demo", input="say a", background=True, stream=True)
    next(stream)
    with monkeypatch.context() as patch:
        patch.setattr(store.database, "execute", fail)
        own.generator.gate.set()
        *_, last = stream
    assert last.type == "response.completed"
    assert (last.response.output_text, last.response.store) == ("a", False)  # type: ignore[attr-defined]


def test_a_stream_of_which_no_event_is_kept_has_the_last_one(
    own: Own, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ResponseStore, "add_event", fail)
    stream = own.sdk.responses.create(model="demo", input="say a", background=True, stream=True)
    [last] = stream
    assert last.type == "response.completed"
    assert last.response.output_text == "a"


def test_unstored_background_responses_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "open_store", lambda *_: filled(tmp_path / "responses.db"))
    monkeypatch.setattr(endpoint, "MAX_FALLBACK_RESPONSES", 2)
    with serving(load_chat=FakeGenerator) as server:
        ids = []
        for _ in range(3):
            ids.append(response_document(respond(server, LONG, background=True))["id"])
            wait_until(lambda: get_response(server, ids[-1]).json()["status"] == "completed")
            wait_until(lambda: metric(server, NOT_STORED) == len(ids))
        wait_until(lambda: get_response(server, ids[0]).status_code == 404)
        assert [get_response(server, id).status_code for id in ids[1:]] == [200, 200]


# ── from one start to the next ──


def test_responses_are_kept_and_those_that_shutdown_cut_off(server_databases: Databases) -> None:
    generator = FakeGenerator()
    settings: dict[str, Any] = server_databases.settings | {"shutdown_grace_s": 0}
    with serving(load_chat=lambda: generator, **settings) as server:
        first = response_document(respond(server, "hi"))
        cut = response_document(respond(server, "long", background=True))
        wait_until(lambda: get_response(server, cut["id"]).json()["status"] == "in_progress")
    generator = FakeGenerator()
    with serving(load_chat=lambda: generator, **settings) as server:
        assert response_document(get_response(server, first["id"])) == first
        failed = response_document(get_response(server, cut["id"]))
        assert failed["status"] == "failed"
        assert "stopped" in failed["error"]["message"]
        assert output_texts(failed)[0][1].startswith("w0 ")
        response_document(respond(server, "say on", previous_response_id=first["id"]))
        assert messages_of(generator) == [
            ("user", "hi"),
            ("assistant", WHOLE),
            ("user", "say on"),
        ]


def test_responses_are_lost_at_shutdown_without_a_file() -> None:
    with serving(load_chat=FakeGenerator) as server:
        id = response_document(respond(server))["id"]
    with serving(load_chat=FakeGenerator) as server:
        assert get_response(server, id).status_code == 404


def test_a_chat_that_stores_nothing_costs_no_query(
    postgres: Postgres, generator: FakeGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two polls, which exchange the limits of keys and read cancellations."""
    poll, polled = BatchRunner._poll, threading.Event()

    async def last_poll(runner: BatchRunner) -> None:
        await poll(runner)
        polled.set()

    def last_query() -> Any:
        [[started_at]] = postgres.execute(activity)
        return started_at

    monkeypatch.setattr(BatchRunner, "_poll", last_poll)
    monkeypatch.setattr(jobs, "POLL_S", 1e6)
    url = postgres.new_database()
    name = url.partition("?")[0].rpartition("/")[2]
    activity = f"SELECT max(query_start) FROM pg_stat_activity WHERE datname = '{name}'"
    with serving(load_chat=lambda: generator, store=url) as server:
        assert polled.wait(60)
        before = last_query()
        assert before
        chat = {"model": "demo", "messages": [{"role": "user", "content": "say a b"}]}
        for body in (chat, chat | {"stream": True}):
            CLIENT.post(server.url + "/v1/chat/completions", json=body).raise_for_status()
        CLIENT.post(server.url + PATH, json={"input": "say a", "store": False}).raise_for_status()
        assert last_query() == before
        respond(server, "say a")
        assert last_query() > before
