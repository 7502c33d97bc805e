"""Anthropic's Python SDK, unmodified, against the real server."""

import asyncio
import base64
from itertools import groupby
from typing import Any

import anthropic
import pytest

from tests import sdk
from tests.fake_generator import FakeGenerator
from tests.sdk import Sdk
from tests.serving import Server, chat_server_fixture, wait_until

WHOLE = "Hello there, wörld!"
LOOK: Any = {"name": "look", "description": "Look", "input_schema": {"type": "object"}}
SAY_CALL = 'say *why then !look ={"a": =1}'


server = chat_server_fixture(model_aliases=("claude-*=demo",), api_keys=("key",))


@pytest.fixture(scope="module")
def client(server: Server) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="key", max_retries=0)


def ask(text: str = "hi", **fields: Any) -> Any:
    messages = [{"role": "user", "content": text}]
    return {"model": "claude-test", "max_tokens": 50, "messages": messages, **fields}


def test_a_message(client: anthropic.Anthropic) -> None:
    message = client.messages.create(**ask())
    assert type(message).model_validate(message.model_dump(), strict=True)
    [block] = message.content
    assert block.type == "text"
    assert block.text == WHOLE
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert message.usage.model_dump(exclude_unset=True) == {
        "input_tokens": 0,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 2,
        "output_tokens": 5,
        "output_tokens_details": {"thinking_tokens": 0},
    }
    assert message._request_id


def test_a_streamed_message_is_the_same(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(**ask(SAY_CALL, tools=[LOOK]))
    with client.messages.stream(**ask(SAY_CALL, tools=[LOOK])) as stream:
        events = list(stream)
        streamed = stream.get_final_message()
    exclude: Any = {"id": True, "content": {0: {"signature"}}}
    assert streamed.model_dump(exclude=exclude) == whole.model_dump(exclude=exclude)
    thinking, text, call = streamed.content
    assert thinking.type == "thinking"
    assert (thinking.thinking, bool(thinking.signature)) == ("why ", True)
    assert text.type == "text"
    assert text.text == " then"
    assert call.type == "tool_use"
    assert (call.id, call.name, call.input) == ("call_look:0", "look", {"a": 1})
    assert streamed.stop_reason == "tool_use"
    assert whole.usage.output_tokens_details.thinking_tokens == 1
    assert {event.type for event in events} >= {"thinking", "signature", "input_json"}
    sent = (event.type for event in events if event.type.startswith(("message", "content")))
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    expected = ["message_start", *3 * block, "message_delta", "message_stop"]
    assert [type for type, _ in groupby(sent)] == expected
    assert events[0].type == "message_start"
    usage = events[0].message.usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == len(SAY_CALL)


def test_a_tool_loop(client: anthropic.Anthropic, generator: FakeGenerator) -> None:
    first = client.messages.create(**ask(SAY_CALL, tools=[LOOK]))
    call = first.content[-1]
    assert call.type == "tool_use"
    image = base64.b64encode(b"png").decode()
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "18 degrees"}
    messages = [
        *ask(SAY_CALL)["messages"],
        first.to_param(),
        {"role": "user", "content": [result, {"type": "text", "text": "say done"}]},
    ]
    last = client.messages.create(**ask(tools=[LOOK], messages=messages))
    assert last.content[0].model_dump()["text"] == "done"
    prompt: Any = generator.payloads[-1].prompt
    assert [message["role"] for message in prompt.messages] == ["user", "assistant", "tool", "user"]
    assert prompt.messages[1]["reasoning_content"] == "why "
    source = {"type": "base64", "media_type": "image/png", "data": image}
    picture = [{"role": "user", "content": [{"type": "image", "source": source}]}]
    with pytest.raises(anthropic.BadRequestError, match="this model takes text, no images"):
        client.messages.create(**ask(messages=picture))


def test_errors_have_their_classes(client: anthropic.Anthropic, server: Server) -> None:
    with pytest.raises(anthropic.BadRequestError, match="max_tokens") as error:
        client.messages.create(**ask(max_tokens=0))
    assert error.value.request_id
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**ask(model="other"))
    stranger = client.with_options(api_key="other")
    with pytest.raises(anthropic.AuthenticationError):
        stranger.messages.create(**ask())
    with pytest.raises(anthropic.InternalServerError):
        client.messages.create(**ask("bad"))


def test_a_cancelled_stream_ends_the_generation(server: Server, generator: FakeGenerator) -> None:
    async def run() -> None:
        async with anthropic.AsyncAnthropic(base_url=server.url, api_key="key") as client:
            stream = await client.messages.create(**ask("long", max_tokens=100_000, stream=True))
            async for event in stream:
                if event.type == "content_block_delta":
                    break
            await stream.close()

    asyncio.run(run())
    wait_until(lambda: generator.dropped[-1:] == ["long"])


def test_the_count_is_the_prompt_of_a_real_model(tiny: Sdk) -> None:
    """Tools, thinking and a forced tool included; the schema constrains the call."""
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 8}},
        "required": ["city"],
    }
    tool: Any = {"name": "get_weather", "input_schema": schema}
    client = anthropic.Anthropic(base_url=tiny.url.removesuffix("/v1"), api_key="-", max_retries=0)
    fields: Any = {
        "model": tiny.model,
        "messages": [{"role": "user", "content": sdk.QUESTION}],
        "system": "Be brief.",
        "tools": [tool],
        "thinking": {"type": "enabled", "budget_tokens": 5},
    }
    counted = client.messages.count_tokens(**fields).input_tokens
    for _ in range(2):  # the second one finds its prefix in the cache
        message = client.messages.create(
            **fields,
            max_tokens=200,
            extra_body={"temperature": 1.0, "seed": 1},
            tool_choice={"type": "tool", "name": "get_weather"},
        )
        usage = message.usage
        cached = usage.cache_read_input_tokens or 0
        created = usage.cache_creation_input_tokens or 0
        assert usage.input_tokens + cached + created == counted
    assert message.stop_reason == "tool_use"
    call = message.content[-1]
    assert call.type == "tool_use"
    assert list(call.input) == ["city"]
