"""Responses of `POST /v1/responses` over a real socket, with a fake generator."""

from typing import Any

from tests.response_events import events, get_response, output_texts, respond, response_document
from tests.serving import Server

TOOL = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather in a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": True,
}


# ── whole ──


def test_response_has_the_parameters_of_the_request(server: Server) -> None:
    fields: dict[str, Any] = {
        "instructions": "be brief", "max_output_tokens": 20, "temperature": 0.5, "top_p": 0.9,
        "parallel_tool_calls": False, "store": False, "tools": [TOOL], "user": "u",
        "tool_choice": {"type": "function", "name": "get_weather"}, "metadata": {"a": "b"},
        "prompt_cache_key": "k", "safety_identifier": "s", "top_logprobs": 0, "max_tool_calls": 3,
        "truncation": "auto",
        "reasoning": {"effort": "low", "summary": "auto"},
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"},
                            "strict": True, "description": None}, "verbosity": "low"},
    }  # fmt: skip
    fields |= {"presence_penalty": 0.5, "frequency_penalty": -0.5}
    answer = response_document(respond(server, **fields))
    assert {name: answer[name] for name in fields} == fields
    fields = {"temperature": 0, "text": {"format": {"type": "json_object", "schema": {"a": 1}}}}
    answer = response_document(respond(server, **fields))
    assert answer["temperature"] == 0
    assert answer["text"] == {**fields["text"], "verbosity": "medium"}


def test_two_calls_of_one_function_are_two_items(server: Server) -> None:
    answer = response_document(respond(server, "say !f ={} !f ={}"))
    assert output_texts(answer) == [("function_call", "{}"), ("function_call", "{}")]
    first, second = answer["output"]
    assert (first["call_id"], second["call_id"]) == ("call_f:0", "call_f:1")
    more = respond(server, "say !f ={}", previous_response_id=answer["id"])
    assert response_document(more)["output"][0]["call_id"] == "call_f:2"


# ── events ──


def test_failure_after_the_start_is_stored(server: Server) -> None:
    last = events(respond(server, "bad later", stream=True))[-1]
    assert last["type"] == "response.failed"
    assert response_document(get_response(server, last["response"]["id"])) == last["response"]
