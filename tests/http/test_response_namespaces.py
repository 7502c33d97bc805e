"""Stored responses and their items are visible only to the API key that has stored them."""

from typing import Any

import httpx
import pytest

from tests.event_streams import CLIENT, error_of
from tests.fake_generator import FakeGenerator
from tests.response_events import PATH
from tests.serving import Server, chat_server_fixture, serving, wait_until

KEYS = ("mine", "other")
ROUTES = [("GET", ""), ("DELETE", ""), ("GET", "/input_items"), ("POST", "/cancel")]
ITEM = {"type": "message", "role": "user", "content": "private", "id": "msg_1"}


server = chat_server_fixture(api_keys=KEYS)


def request(
    server: Server, key: str, method: str, path: str = "", body: Any = None
) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"}
    return CLIENT.request(method, server.url + PATH + path, json=body, headers=headers)


def status(server: Server, id: str) -> str:
    """Read a response with the key that has stored it, sent in the other header."""
    response = CLIENT.get(f"{server.url}{PATH}/{id}", headers={"x-api-key": "mine"})
    return str(response.json()["status"])


def create(server: Server, key: str, **fields: Any) -> str:
    response = request(server, key, "POST", body={"input": [ITEM], **fields})
    assert response.status_code == 200, response.text
    return str(response.json()["id"])


def assert_unknown(refusal: httpx.Response, id: str, unknown: httpx.Response) -> None:
    """Compare with the response for an id that does not exist, of the same length."""
    assert refusal.status_code == unknown.status_code == 404
    assert refusal.text.replace(id, "ID") == unknown.text.replace(id[::-1], "ID")


@pytest.mark.parametrize("state", ["stored", "completed in background", "running"])
def test_response_of_another_key_is_unknown_and_cannot_be_continued(
    server: Server, generator: FakeGenerator, state: str
) -> None:
    if state == "running":
        generator.gate.clear()
    id = create(server, "mine", background=state != "stored")
    if state != "running":
        wait_until(lambda: status(server, id) == "completed")
    for method, below in ROUTES:
        refusal = request(server, "other", method, f"/{id}{below}")
        assert_unknown(refusal, id, request(server, "other", method, f"/{id[::-1]}{below}"))
        assert status(server, id) == ("queued" if state == "running" else "completed")
    body = {"input": "go on", "previous_response_id": id}
    refusal = request(server, "other", "POST", body=body)
    unknown = body | {"previous_response_id": id[::-1]}
    assert_unknown(refusal, id, request(server, "other", "POST", body=unknown))
    assert error_of(refusal)["param"] == "previous_response_id"
    generator.gate.set()


def test_item_of_another_key_is_unknown(server: Server) -> None:
    create(server, "mine")
    output = request(server, "mine", "POST", body={"input": "hi"}).json()["output"][0]["id"]
    for id in ("msg_1", output):
        for item in ({"type": "item_reference", "id": id}, {"id": id}):
            body = {"input": [item, {"role": "user", "content": "what was it?"}]}
            refusal = request(server, "other", "POST", body=body)
            unknown = {"input": [item | {"id": id[::-1]}, body["input"][1]]}
            assert_unknown(refusal, id, request(server, "other", "POST", body=unknown))


def test_reference_finds_the_item_of_its_own_key(server: Server, generator: FakeGenerator) -> None:
    for key, text in (("other", "planted"), ("mine", "private"), ("other", "planted again")):
        create(server, key, input=[ITEM | {"content": text}])
    create(server, "mine", input=[{"type": "item_reference", "id": "msg_1"}])
    prompt: Any = generator.payloads[-1].prompt
    assert [message["content"] for message in prompt.messages] == ["private"]


def test_without_keys_all_clients_share_responses() -> None:
    with serving(load_chat=FakeGenerator) as server:
        id = create(server, "mine")
        assert request(server, "other", "GET", f"/{id}").status_code == 200
        create(server, "other", input=[{"type": "item_reference", "id": "msg_1"}])
