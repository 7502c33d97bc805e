"""`POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's API over the path of chats."""

import base64
from typing import Any

import httpx
import pytest

from server.core.sealing import seal, unseal
from tests.event_streams import CLIENT, open_stream, read_until
from tests.fake_generator import FakeGenerator
from tests.serving import Server, chat_server_fixture, serving
from worker.messages.generation import Chat

PATH = "/v1/messages"
HI = [{"role": "user", "content": "hi"}]
TOOL = {"name": "look", "description": "Look", "input_schema": {"type": "object"}}
IMAGE: dict[str, Any] = {"type": "image"}
BAD_SOURCE = {"type": "base64", "media_type": "image/png", "data": "!!"}
CALL = {"type": "tool_use", "id": "1", "name": "look", "input": {}}
Document = dict[str, Any]


server = chat_server_fixture(model_aliases=("claude-*=demo",), api_keys=("key",))


def post(server: Server, path: str = PATH, **fields: Any) -> httpx.Response:
    fields = {"model": "demo", "messages": HI, "max_tokens": 100} | fields
    body = {name: value for name, value in fields.items() if value is not ...}
    return CLIENT.post(server.url + path, json=body, headers={"x-api-key": "key"})


DEEP: Document = {}
for _ in range(300):
    DEEP = {"properties": {"a": DEEP}}


def error(response: httpx.Response, status: int, type: str) -> str:
    """Return the message of an error in Anthropic's envelope."""
    assert response.status_code == status, response.text
    document = response.json()
    assert document["type"] == "error"
    assert document["error"]["type"] == type
    assert document["request_id"] == response.headers["request-id"]
    text: str = document["error"]["message"]
    return text


def chat(server: Server, generator: FakeGenerator, **fields: Any) -> Chat:
    response = post(server, **fields)
    assert response.status_code == 200, response.text
    prompt = generator.payloads[-1].prompt
    assert isinstance(prompt, Chat)
    return prompt


# ── responses ──


def test_omitted_thinking_comes_back_in_the_signature(
    server: Server, generator: FakeGenerator
) -> None:
    thinking = {"type": "adaptive", "display": "omitted"}
    ask: Document = {"messages": [{"role": "user", "content": "say *why so"}], "thinking": thinking}
    content = post(server, **ask).json()["content"]
    assert content[0]["thinking"] == ""
    assert unseal(content[0]["signature"]) == "why "
    stream = post(server, **ask, stream=True).text
    assert "content_block_delta" in stream
    assert "thinking_delta" not in stream
    sent = [*content, {"type": "redacted_thinking", "data": seal("hidden")}]
    messages = [*HI, {"role": "assistant", "content": sent}, *HI]
    prompt = chat(server, generator, messages=messages)
    assert prompt.messages[1]["reasoning_content"] == "why \nhidden"


# ── requests ──


def test_images_are_translated(server: Server, generator: FakeGenerator) -> None:
    generator.refused_media, data = {}, base64.b64encode(b"png").decode()
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
    found = {"type": "tool_reference", "tool_name": "look"}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [found, image]}
    messages = [
        {"role": "user", "content": [image]},
        {"role": "assistant", "content": [CALL]},
        {"role": "user", "content": [result, {"type": "text", "text": "say a"}]},
    ]
    try:
        prompt = chat(server, generator, messages=messages)
    finally:
        generator.refused_media = {"image": "text only"}
    assert prompt.messages[0]["content"] == [{"type": "image"}]
    assert prompt.messages[2]["content"] == "look"
    assert prompt.messages[3]["content"] == [{"type": "image"}, {"type": "text", "text": "say a"}]
    assert [image.data for image in prompt.media] == [b"png", b"png"]
    assert prompt.media[1].param.startswith("messages[2].content[0].content[1].source")


# ── errors ──


def user(*parts: Any) -> dict[str, Any]:
    """A request with a message of the user that has these parts."""
    return {"messages": [{"role": "user", "content": [*parts]}]}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"max_tokens": ...}, "max_tokens: is required"),
        ({"max_tokens": 0}, "max_tokens: "),
        ({"messages": []}, "messages: must not be empty"),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers: is not implemented"),
        ({"output_format": {"type": "json_schema"}}, "use output_config.format"),
        ({"stop": ["a"]}, "stop: is not implemented, use stop_sequences"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "look"}]}, "tools[0].input_schema: is required"),
        ({"tools": [{**TOOL, "input_schema": DEEP}]}, "tools[0].input_schema: is nested too"),
        ({"tool_choice": {"type": "any"}}, "tool_choice: 'any' requires tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "x"}}, "there is no tool 'x'"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens: is required"),
        (user({"type": "server_tool_use"}), "messages[0]"),
        (
            user({"type": "search_result", "source": "u"}),
            "messages[0].content[0].title: is required",
        ),
        (
            user({"type": "document", "source": "u"}),
            "messages[0].content[0].source: expected object, got str",
        ),
        (user({"type": "text"}), "messages[0].content[0].text: is required"),
        (
            user({"type": "tool_result", "tool_use_id": "0"}),
            "messages[0].content[0].tool_use_id: no tool_use",
        ),
        (
            user(
                {
                    "type": "document",
                    "source": {"type": "base64", "media_type": "application/pdf", "data": ""},
                }
            ),
            "source.type: must be text or content, not 'base64'",
        ),
        (user(IMAGE | {"source": BAD_SOURCE}), "messages[0].content[0].source.data: "),
        (
            {"messages": [*HI, {"role": "assistant", "content": [CALL]}]},
            "messages[1].content: tool_use must be followed",
        ),
        (
            {
                "messages": [
                    *HI,
                    {"role": "assistant", "content": [{"type": "thinking", "thinking": "a"}]},
                ]
            },
            "messages[1].content: thinking must be followed",
        ),
        ({"messages": [{"role": "user", "content": "refused"}]}, "this prompt is refused"),
    ],
)
def test_invalid_requests_name_the_field(server: Server, fields: Document, reason: str) -> None:
    assert reason in error(post(server, **fields), 400, "invalid_request_error")


def test_threads_are_refused_so_that_the_sdk_sends_the_whole_conversation(server: Server) -> None:
    for thread in ({"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}):
        response = post(server, messages=HI, thread=thread)
        assert "thread: is not implemented" in error(response, 400, "invalid_request_error")
        assert response.json()["error"]["details"] == {
            "error_code": "thread_unsupported_request",
            "unsupported": ["thread"],
        }


def test_errors_before_the_route_have_the_envelope(server: Server) -> None:
    url = server.url + PATH
    error(CLIENT.post(url, json={}), 401, "authentication_error")
    error(CLIENT.get(url, headers={"x-api-key": "key"}), 405, "invalid_request_error")
    gone = CLIENT.post(url + "/batches", json={}, headers={"x-api-key": "key"})
    error(gone, 404, "not_found_error")


@pytest.mark.parametrize(
    ("bearer", "key", "status"),
    [("other", "key", 200), ("key", "other", 200), ("other", "other", 401), ("other", "", 401)],
)
def test_one_valid_key_is_enough(server: Server, bearer: str, key: str, status: int) -> None:
    """A client that is logged in elsewhere sends that token beside the key of this server."""
    headers = {"authorization": f"Bearer {bearer}", "x-api-key": key}
    body = {"model": "demo", "max_tokens": 5, "messages": HI}
    assert CLIENT.post(server.url + PATH, json=body, headers=headers).status_code == status


def test_an_idle_stream_gets_pings() -> None:
    generator = FakeGenerator()
    generator.one_by_one = True
    generator.permits.release()
    body = {"model": "demo", "messages": HI, "max_tokens": 9, "stream": True}
    with serving(load_chat=lambda: generator, sse_keepalive_s=0.5) as server:
        with open_stream(server, PATH, body, "x-api-key: key") as client:
            received = read_until(client, b'{"type":"ping"}\n\n')  # the one of every stream
            assert b"content_block_start" in received
            received += read_until(client, b'{"type":"ping"}\n\n')
            assert b"keep-alive" not in received
        generator.release()
