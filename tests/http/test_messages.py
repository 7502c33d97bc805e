"""`POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's API over the path of chats."""

import base64
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from server.core.sealing import seal, unseal
from tests.event_streams import CLIENT, open_stream, read_until
from tests.fake_generator import FakeGenerator
from tests.serving import Server, serving
from worker.messages.generation import Chat, GenerationInput, ToolCallPolicy

PATH = "/v1/messages"
HI = [{"role": "user", "content": "hi"}]
TOOL = {"name": "look", "description": "Look", "input_schema": {"type": "object"}}
IMAGE: dict[str, Any] = {"type": "image"}
BAD_SOURCE = {"type": "base64", "media_type": "image/png", "data": "!!"}
CALL = {"type": "tool_use", "id": "1", "name": "look", "input": {}}
Document = dict[str, Any]


@pytest.fixture(scope="module")
def server(generator: FakeGenerator) -> Iterator[Server]:
    aliases = ("claude-*=demo",)
    with serving(load_chat=lambda: generator, model_aliases=aliases, api_keys=("key",)) as started:
        yield started


def post(server: Server, path: str = PATH, **fields: Any) -> httpx.Response:
    fields = {"model": "demo", "messages": HI, "max_tokens": 100} | fields
    body = {name: value for name, value in fields.items() if value is not ...}
    return CLIENT.post(server.url + path, json=body, headers={"x-api-key": "key"})


def say(text: str) -> list[Document]:
    return [{"role": "user", "content": f"say {text}"}]


DEEP: Document = {}
for _ in range(300):
    DEEP = {"properties": {"a": DEEP}}


def message(response: httpx.Response) -> Document:
    assert response.status_code == 200, response.text
    document: Document = response.json()
    return document


def events(response: httpx.Response) -> list[Document]:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    frames = response.text.removesuffix("\n\n").split("\n\n")
    parsed = []
    for frame in frames:
        name, data = frame.split("\n")
        document = json.loads(data.removeprefix("data: "))
        assert name == f"event: {document['type']}"
        parsed.append(document)
    return parsed


def error(response: httpx.Response, status: int, type: str) -> str:
    """Return the message of an error in Anthropic's envelope."""
    assert response.status_code == status, response.text
    document = response.json()
    assert document["type"] == "error"
    assert document["error"]["type"] == type
    assert document["request_id"] == response.headers["request-id"]
    text: str = document["error"]["message"]
    return text


def last_input(server: Server, generator: FakeGenerator, **fields: Any) -> GenerationInput:
    message(post(server, **fields))
    return generator.payloads[-1]


def chat(server: Server, generator: FakeGenerator, **fields: Any) -> Chat:
    prompt = last_input(server, generator, **fields).prompt
    assert isinstance(prompt, Chat)
    return prompt


# ── responses ──


def test_half_a_surrogate_pair_in_a_call_is_replaced(server: Server) -> None:
    text = r'!look ={"a":[{"\ud83d":"b\ude00"}]}'
    document = message(post(server, messages=say(text), tools=[TOOL]))
    assert document["content"][0]["input"] == {"a": [{"\ufffd": "b\ufffd"}]}


def test_stop_reasons(server: Server) -> None:
    assert message(post(server, max_tokens=2))["stop_reason"] == "max_tokens"
    cut = message(post(server, messages=say("!look ={"), tools=[TOOL], max_tokens=2))
    assert cut["content"][0]["input"] == {}


def test_omitted_thinking_comes_back_in_the_signature(
    server: Server, generator: FakeGenerator
) -> None:
    thinking = {"type": "adaptive", "display": "omitted"}
    document = message(post(server, messages=say("*why so"), thinking=thinking))
    block = document["content"][0]
    assert block["thinking"] == ""
    assert unseal(block["signature"]) == "why "
    stream = events(post(server, messages=say("*why so"), thinking=thinking, stream=True))
    assert "thinking_delta" not in json.dumps(stream)
    messages = [*HI, {"role": "assistant", "content": document["content"]}, *HI]
    prompt = chat(server, generator, messages=messages)
    assert prompt.messages[1]["reasoning_content"] == "why "


def test_a_failure_within_a_stream_is_the_last_event(
    server: Server, generator: FakeGenerator
) -> None:
    stream = events(post(server, messages=[{"role": "user", "content": "bad later"}], stream=True))
    assert stream[-1]["type"] == "error"
    assert stream[-1]["error"]["type"] == "api_error"
    assert stream[-2]["type"] == "content_block_delta"


# ── requests ──


def test_blocks_are_translated(server: Server, generator: FakeGenerator) -> None:
    document = {"type": "document", "title": "T", "source": {"type": "text", "data": "D"}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, document]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "why", "signature": "another server's"},
                {"type": "redacted_thinking", "data": seal("hidden")},
                {"type": "redacted_thinking", "data": "another server's"},
                {"type": "text", "text": "b"},
                {"type": "tool_use", "id": "1", "name": "look", "input": {"x": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "1",
                    "content": [
                        {"type": "text", "text": "r", "cache_control": {"type": "ephemeral"}}
                    ],
                },
                {"type": "text", "text": "c"},
            ],
        },
        {"role": "system", "content": "later"},
        {"role": "user", "content": "say d"},
    ]
    prompt = chat(server, generator, messages=messages, tools=[TOOL], system="s")
    function = {"name": "look", "arguments": {"x": 1}}
    assert prompt.messages == (
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a\nT\nD"},
        {
            "role": "assistant",
            "content": "b",
            "reasoning_content": "why\nhidden",
            "tool_calls": [{"function": function, "id": "1", "type": "function"}],
        },
        {"role": "tool", "content": "r", "name": "look", "tool_call_id": "1"},
        {"role": "user", "content": "c"},
        {"role": "system", "content": "later"},
        {"role": "user", "content": "say d"},
    )
    parameters = {"name": "look", "description": "Look", "parameters": {"type": "object"}}
    assert prompt.tools == ({"type": "function", "function": parameters},)


def test_search_results_are_text(server: Server, generator: FakeGenerator) -> None:
    text = {"type": "text", "text": "Found.", "citations": None}
    found: Document = {
        "type": "search_result",
        "source": "https://a.b",
        "title": "T",
        "content": [text],
    }
    found |= {"citations": {"enabled": True}}
    call = {"type": "tool_use", "id": "1", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [found]}
    messages = [
        *say("a"),
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result, found]},
    ]
    prompt = chat(server, generator, messages=messages, tools=[{**TOOL, "strict": True}])
    assert [m["content"] for m in prompt.messages[-2:]] == ["T\nhttps://a.b\nFound."] * 2
    assert prompt.tools[0]["function"]["strict"] is True


def test_images_are_translated(server: Server, generator: FakeGenerator) -> None:
    generator.refused_media, data = {}, base64.b64encode(b"png").decode()
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
    call = {"type": "tool_use", "id": "1", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [image]}
    messages = [
        {"role": "user", "content": [image]},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result, {"type": "text", "text": "say a"}]},
    ]
    try:
        prompt = chat(server, generator, messages=messages)
    finally:
        generator.refused_media = {"image": "text only"}
    assert prompt.messages[0]["content"] == [{"type": "image"}]
    assert prompt.messages[2]["content"] == ""
    assert prompt.messages[3]["content"] == [{"type": "image"}, {"type": "text", "text": "say a"}]
    assert [image.data for image in prompt.media] == [b"png", b"png"]
    assert prompt.media[1].param.startswith("messages[2].content[0].content[0].source")


def test_the_billing_line_is_removed(server: Server, generator: FakeGenerator) -> None:
    line = "x-anthropic-billing-header: cc_version=2.1; cch=00000;"
    blocks = [{"type": "text", "text": text} for text in (line, "You are an agent.", f"a {line}")]
    prompt = chat(server, generator, system=blocks)
    assert prompt.messages[0]["content"] == f"You are an agent.\na {line}"
    assert chat(server, generator, system=f"{line}\nBe brief.").messages[0] == {
        "role": "system",
        "content": "Be brief.",
    }
    assert chat(server, generator, system=line).messages[0]["role"] == "user"


@pytest.mark.parametrize(
    ("choice", "policy"),
    [
        (None, ToolCallPolicy(("look",))),
        (
            {"type": "auto", "disable_parallel_tool_use": True},
            ToolCallPolicy(("look",), False, False),
        ),
        ({"type": "any"}, ToolCallPolicy(("look",), True)),
        ({"type": "tool", "name": "look"}, ToolCallPolicy(("look",), True, False)),
        ({"type": "none"}, None),
    ],
)
def test_tool_choices(
    server: Server, generator: FakeGenerator, choice: Any, policy: ToolCallPolicy | None
) -> None:
    payload = last_input(server, generator, tools=[TOOL], tool_choice=choice)
    assert payload.tool_policy == policy


def test_parameters_are_translated(server: Server, generator: FakeGenerator) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    payload = last_input(
        server,
        generator,
        max_tokens=7,
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        stop_sequences=["END"],
        thinking={"type": "enabled", "budget_tokens": 31_999},
        output_config={"effort": "high", "format": {"type": "json_schema", "schema": schema}},
        metadata={"user_id": "u"},
        service_tier="auto",
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    )
    sampling = payload.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 5)
    assert payload.stopping.stop == ("END",)
    assert payload.stopping.default_tokens == 7
    assert payload.thinking_tokens == 31_999
    assert payload.constraint is not None
    assert payload.constraint.value == schema
    assert isinstance(payload.prompt, Chat)
    assert payload.prompt.effort == "high"
    prompt = chat(server, generator)
    assert prompt.effort == "none"  # thinking is off unless a request turns it on


def test_the_last_message_of_the_assistant_is_continued(
    server: Server, generator: FakeGenerator
) -> None:
    prompt = chat(server, generator, messages=[*HI, {"role": "assistant", "content": "say a"}])
    assert prompt.continue_final_message
    assert not prompt.add_generation_prompt


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


def test_names_of_claude_models_need_an_alias(server: Server) -> None:
    document = message(post(server, model="claude-sonnet-4-5"))
    assert document["model"] == "claude-sonnet-4-5"  # Claude Code compares the names
    assert message(post(server, model=None))["model"] == "demo"
    assert "there is no model" in error(post(server, model="claudius"), 404, "not_found_error")
    with serving(load_chat=FakeGenerator) as other:
        error(post(other, model="claude-sonnet-4-5"), 404, "not_found_error")


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
