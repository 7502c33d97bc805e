"""The requirements of Open Responses (openresponses.org), on the embedded model."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.event_streams import post
from tests.response_events import events
from tests.serving import Server, serving

NONE = type(None)
# Of each field of a response, none of which may be missing: what JSON has there.
FIELDS: dict[str, tuple[type, ...]] = {
    "id": (str,),
    "object": (str,),
    "created_at": (int,),
    "completed_at": (int, NONE),
    "status": (str,),
    "incomplete_details": (dict, NONE),
    "model": (str,),
    "previous_response_id": (str, NONE),
    "instructions": (str, NONE),
    "output": (list,),
    "error": (dict, NONE),
    "tools": (list,),
    "tool_choice": (str, dict),
    "truncation": (str,),
    "parallel_tool_calls": (bool,),
    "text": (dict,),
    "top_p": (int, float),
    "presence_penalty": (int, float),
    "frequency_penalty": (int, float),
    "top_logprobs": (int,),
    "temperature": (int, float),
    "reasoning": (dict, NONE),
    "usage": (dict, NONE),
    "max_output_tokens": (int, NONE),
    "max_tool_calls": (int, NONE),
    "store": (bool,),
    "background": (bool,),
    "service_tier": (str,),
    "metadata": (dict,),
    "safety_identifier": (str, NONE),
    "prompt_cache_key": (str, NONE),
}
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the current weather in a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "description": "The city"}},
        "required": ["city"],
    },
}
PIRATE = "You are a pirate. Always respond in pirate speak."
CASES: dict[str, list[tuple[str, str]]] = {
    "a text": [("user", "Say hello in exactly 3 words.")],
    "a system prompt": [("system", PIRATE), ("user", "Say hello.")],
    "several turns": [
        ("user", "My name is Alice."),
        ("assistant", "Hello Alice! Nice to meet you. How can I help you today?"),
        ("user", "What is my name?"),
    ],
}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(chat_model="demo", compile="off") as started:
        yield started


def respond(server: Server, turns: list[tuple[str, str]], stream: bool, **fields: Any) -> Any:
    """The response, as a stream ends with it or as a whole; and the events."""
    items = [{"type": "message", "role": role, "content": text} for role, text in turns]
    body = {"model": "demo", "input": items, "stream": stream, **fields}
    answer = post(server, "/v1/responses", body)
    assert answer.status_code == 200, answer.text
    received = events(answer) if stream else []
    response = received[-1]["response"] if stream else answer.json()
    for name, kinds in FIELDS.items():
        assert type(response[name]) in kinds, name
    assert response["text"]["verbosity"] in ("low", "medium", "high")
    assert response["status"] == "completed"
    assert response["output"]
    return response, received


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_a_conversation_is_answered(server: Server, case: str, stream: bool) -> None:
    response, _ = respond(server, CASES[case], stream)
    assert [item["type"] for item in response["output"]] == ["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_is_called(server: Server, stream: bool) -> None:
    turns = [("user", "What is the weather in Paris?")]
    response, received = respond(server, turns, stream, tools=[WEATHER])
    [call] = response["output"]
    assert (call["type"], call["name"]) == ("function_call", "get_weather")
    for event in received:
        if event["type"].startswith("response.output_item"):
            assert event["item"]["type"] == "function_call"
    if stream:
        begun = "response.function_call_arguments"
        kinds = {event["type"] for event in received}
        assert {f"{begun}.delta", f"{begun}.done", "response.output_item.done"} <= kinds


def test_an_image_is_refused_by_name(server: Server) -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
    content = [{"type": "input_text", "text": "What is this?"}, image]
    answer = post(server, "/v1/responses", {"input": [{"role": "user", "content": content}]})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "input[0].content[1].image_url"
