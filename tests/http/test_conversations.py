"""`/v1/conversations` by the OpenAI SDK, and responses that continue a conversation."""

import sqlite3
from pathlib import Path
from typing import Any

import openai
import pytest

from server.apis.openai.responses.store import ResponseStore
from tests.event_streams import CLIENT, error_of
from tests.fake_generator import FakeGenerator
from tests.http import test_response_lookup
from tests.http.test_response_lookup import messages_of, sdk_of
from tests.postgres import Databases
from tests.response_events import respond
from tests.serving import Server, serving, wait_until

server = test_response_lookup.server  # with each kind of database

CALL: Any = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "id": "fc_1"}
RESULT: Any = {"type": "function_call_output", "call_id": "c", "output": "d", "id": "fco_1"}


def user(text: str, id: str | None = None) -> Any:
    return {"type": "message", "role": "user", "content": text} | ({"id": id} if id else {})


@pytest.fixture
def sdk(server: Server) -> openai.OpenAI:
    return sdk_of(server)


def ids(sdk: openai.OpenAI, id: str) -> list[Any]:
    return [item.id for item in sdk.conversations.items.list(id, order="asc")]


def test_a_conversation_is_created_updated_and_deleted(sdk: openai.OpenAI) -> None:
    created = sdk.conversations.create(metadata={"a": "b"})
    assert (created.object, created.metadata) == ("conversation", {"a": "b"})
    assert sdk.conversations.retrieve(created.id) == created
    updated = sdk.conversations.update(created.id, metadata={"c": "d"})
    assert updated.metadata == {"c": "d"}
    assert sdk.conversations.retrieve(created.id) == updated
    deleted = sdk.conversations.delete(created.id)
    assert (deleted.id, deleted.deleted, deleted.object) == (
        created.id, True, "conversation.deleted",
    )  # fmt: skip
    for call in (
        sdk.conversations.retrieve,
        sdk.conversations.delete,
        sdk.conversations.items.list,
    ):
        with pytest.raises(openai.NotFoundError, match="there is no conversation"):
            call(created.id)


def test_items_are_added_listed_and_removed(sdk: openai.OpenAI) -> None:
    id = sdk.conversations.create(items=[user("one", "msg_1"), user("two")]).id
    added = sdk.conversations.items.create(id, items=[CALL, RESULT])
    assert (added.first_id, added.last_id, added.has_more) == ("fc_1", "fco_1", False)
    pages = sdk.conversations.items.list(id, order="asc", limit=3)
    assert pages.has_more
    assert [item.type for item in pages] == [
        "message", "message", "function_call", "function_call_output",
    ]  # fmt: skip
    item = sdk.conversations.items.retrieve("msg_1", conversation_id=id)
    assert item.type == "message"
    assert item.content[0].text == "one"  # type: ignore[union-attr]
    assert sdk.conversations.items.delete("fco_1", conversation_id=id).id == id
    assert sdk.conversations.items.list(id).data[0].id == "fc_1"
    for call in (sdk.conversations.items.retrieve, sdk.conversations.items.delete):
        with pytest.raises(openai.NotFoundError, match="there is no item"):
            call("fco_1", conversation_id=id)
    sdk.conversations.items.create(id, items=[RESULT])
    assert ids(sdk, id)[-1] == "fco_1"


def test_items_of_other_tools_are_added_as_those_of_a_response(sdk: openai.OpenAI) -> None:
    searched: Any = {"type": "web_search_call", "id": "ws_1", "status": "completed"}
    called: Any = {"type": "shell_call", "id": "sh_1", "call_id": "c", "action": {"commands": []}}
    id = sdk.conversations.create(items=[user("x", "msg_1"), searched]).id
    sdk.conversations.items.create(id, items=[called])
    assert ids(sdk, id) == ["msg_1", "sh_1"]


@pytest.mark.parametrize(
    ("items", "param"),
    [
        ([user("x"), user("x", "msg_1")], "items[1].id"),  # is there
        ([user("x", "a/b")], "items[0].id"),
        ([user("x", "é")], "items[0].id"),
        ([user("x", "x" * 513)], "items[0].id"),
        ([user("x", "msg_2"), user("y", "msg_2")], "items[1].id"),
        ([user("x")] * 21, "items"),
        ([], "items"),
        ([{"role": "user"}], "items[0].content"),
    ],
)
def test_items_that_cannot_be_added_are_refused(sdk: openai.OpenAI, items: Any, param: str) -> None:
    id = sdk.conversations.create(items=[user("one", "msg_1")]).id
    with pytest.raises(openai.BadRequestError) as error:
        sdk.conversations.items.create(id, items=items)
    assert str(error.value.param).startswith(param)
    assert ids(sdk, id) == ["msg_1"]


@pytest.mark.parametrize("form", ["whole", "stream", "background", "not stored"])
def test_a_response_continues_a_conversation_and_is_added_to_it(
    sdk: openai.OpenAI, generator: FakeGenerator, form: str
) -> None:
    conversation = sdk.conversations.create(items=[user("hi")])
    fields: dict[str, Any] = {"model": "demo", "input": "say two", "conversation": conversation.id}
    if form == "stream":
        with sdk.responses.stream(**fields) as stream:
            response: Any = stream.until_done().get_final_response()
    elif form == "background":
        queued = sdk.responses.create(**fields, background=True)
        wait_until(lambda: sdk.responses.retrieve(queued.id).status == "completed")
        response = sdk.responses.retrieve(queued.id)
    else:
        response = sdk.responses.create(**fields, store=form != "not stored")
    assert response.conversation.id == conversation.id
    sdk.responses.create(model="demo", input="go on", conversation={"id": conversation.id})
    assert messages_of(generator) == [
        ("user", "hi"), ("user", "say two"), ("assistant", "two"), ("user", "go on"),
    ]  # fmt: skip
    assert ids(sdk, conversation.id)[2] == response.output[0].id
    assert len(ids(sdk, conversation.id)) == 5


def test_a_response_that_fails_or_is_cancelled_is_not_added(
    sdk: openai.OpenAI, generator: FakeGenerator
) -> None:
    id = sdk.conversations.create(items=[user("hi", "msg_1")]).id
    with pytest.raises(openai.APIStatusError):
        sdk.responses.create(model="demo", input="bad", conversation=id)
    generator.gate.clear()
    queued = sdk.responses.create(model="demo", input="go", conversation=id, background=True)
    assert sdk.responses.cancel(queued.id).status == "cancelled"
    generator.release()
    assert ids(sdk, id) == ["msg_1"]


def test_error_names_what_cannot_be_continued(server: Server, sdk: openai.OpenAI) -> None:
    id = sdk.conversations.create(items=[user("hi", "msg_1")]).id
    added = sdk.responses.create(model="demo", input="go", conversation=id).id
    orphan = sdk.conversations.create(items=[RESULT]).id
    for fields, status, param in (
        ({"conversation": added}, 404, "conversation"),
        ({"conversation": ""}, 400, "conversation"),
        ({"conversation": {"id": ""}}, 400, "conversation.id"),
        ({"conversation": {"id": "conv_none"}}, 404, "conversation"),
        ({"previous_response_id": id}, 404, "previous_response_id"),
        ({"previous_response_id": added}, 400, "previous_response_id"),
        ({"previous_response_id": added, "conversation": id}, 400, "conversation"),
        ({"conversation": id, "input": [user("x", "msg_1")]}, 400, "input[0].id"),
        ({"conversation": orphan}, 400, "conversation"),
    ):
        answer = respond(server, **fields)
        assert (answer.status_code, error_of(answer)["param"]) == (status, param), fields
    for path in (f"responses/{id}", f"conversations/{added}"):
        assert CLIENT.get(f"{server.url}/v1/{path}").status_code == 404


def test_a_conversation_larger_than_the_body_limit_is_refused() -> None:
    with serving(load_chat=FakeGenerator, max_body_mb=0.01) as server:
        sdk = sdk_of(server)
        with pytest.raises(openai.BadRequestError, match=r"exceed 0.01 MB"):
            sdk.conversations.create(items=[user("x" * 4900), user("x" * 4900)])
        id = sdk.conversations.create(items=[user("x" * 6000)]).id
        with pytest.raises(openai.BadRequestError, match=r"exceed 0.01 MB"):
            sdk.conversations.items.create(id, items=[user("x" * 6000)])
        long = sdk.responses.create(model="demo", input="x" * 6000, conversation=id)
        assert long.conversation is None  # it does not fit
        assert len(ids(sdk, id)) == 1
        fits = sdk.responses.create(model="demo", input="hi", conversation=id)
        assert fits.conversation is not None


def test_a_conversation_of_another_key_is_unknown() -> None:
    with serving(load_chat=FakeGenerator, api_keys=("mine", "other")) as server:
        id = sdk_of(server, "mine").conversations.create(items=[user("private", "msg_1")]).id
        other = sdk_of(server, "other")
        items = other.conversations.items
        for call in (
            lambda: other.conversations.retrieve(id),
            lambda: other.conversations.update(id, metadata={}),
            lambda: other.conversations.delete(id),
            lambda: items.list(id),
            lambda: items.create(id, items=[user("x")]),
            lambda: items.retrieve("msg_1", conversation_id=id),
            lambda: items.delete("msg_1", conversation_id=id),
            lambda: other.responses.create(model="demo", input="hi", conversation=id),
        ):
            with pytest.raises(openai.NotFoundError):
                call()
        assert ids(sdk_of(server, "mine"), id) == ["msg_1"]


def test_a_response_that_cannot_be_added_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(load_chat=FakeGenerator, responses_db=str(tmp_path / "db")) as server:
        sdk = sdk_of(server)
        id = sdk.conversations.create(items=[user("hi")]).id

        def fail(*_: Any) -> None:
            raise sqlite3.OperationalError("database or disk is full")

        monkeypatch.setattr(ResponseStore, "_add_items", fail)
        answer = respond(server, conversation=id)
        assert (answer.status_code, answer.json()["conversation"]) == (200, None)
        with pytest.raises(openai.InternalServerError, match="disk has failed"):
            sdk.conversations.items.create(id, items=[user("x")])
        monkeypatch.undo()
        assert len(ids(sdk, id)) == 1
        refused = respond(server, "go on", previous_response_id=answer.json()["id"])
        assert "send `conversation`" in error_of(refused)["message"]


def test_processes_share_conversations(server_databases: Databases) -> None:
    """Turns of both are added one after the other."""
    with (
        serving(load_chat=FakeGenerator, **server_databases.settings) as one,
        serving(load_chat=FakeGenerator, **server_databases.settings) as other,
    ):
        clients = sdk_of(one), sdk_of(other)
        id = clients[0].conversations.create().id
        for n in range(4):
            clients[n % 2].responses.create(model="demo", input=f"say {n}", conversation=id)
        assert len(ids(clients[0], id)) == len(ids(clients[1], id)) == 8
