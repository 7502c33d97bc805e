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
ALL = 'say *hm *well Hello there !get_weather ={"city": ="Paris"}'


# ── whole ──


def test_response_has_the_parameters_of_the_request(server: Server) -> None:
    fields: dict[str, Any] = {
        "instructions": "be brief", "max_output_tokens": 20, "temperature": 0.5, "top_p": 0.9,
        "parallel_tool_calls": False, "store": False, "tools": [TOOL], "user": "u",
        "tool_choice": {"type": "function", "name": "get_weather"}, "metadata": {"a": "b"},
        "prompt_cache_key": "k", "safety_identifier": "s", "top_logprobs": 0,
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


def test_text_on_both_sides_of_a_call_is_two_messages(server: Server) -> None:
    answer = response_document(respond(server, "say a !f ={} b"))
    assert [item["type"] for item in answer["output"]] == ["message", "function_call", "message"]


# ── events ──


def test_events_of_an_item_agree_with_each_other_and_the_end(server: Server) -> None:
    received = events(respond(server, ALL, stream=True))
    output = received[-1]["response"]["output"]
    assert len(output) == 3
    for index, item in enumerate(output):
        own = [event for event in received if event.get("output_index") == index]
        added, done = own[0], own[-1]
        assert added["item"]["id"] == item["id"]
        assert added["item"]["status"] == "in_progress"
        assert not added["item"].get("content")
        assert not added["item"].get("arguments")
        assert done["item"] == item
        assert {event["item_id"] for event in own[1:-1]} == {item["id"]}
        joined = "".join(event["delta"] for event in own if event["type"].endswith(".delta"))
        assert joined == output_texts(received[-1]["response"])[index][1]
        whole = next(e for e in own if e["type"].endswith(("_text.done", "arguments.done")))
        assert whole.get("text", whole.get("arguments")) == joined
    assert {e.get("content_index", 0) for e in received} == {0}
    assert len({e["response"]["id"] for e in received if "response" in e}) == 1


def test_output_without_text_is_an_empty_message(server: Server) -> None:
    silence = "say ="  # a part of a call that there is not
    assert output_texts(response_document(respond(server, silence))) == [("message", "")]
    received = events(respond(server, silence, stream=True))
    assert received[2]["item"]["type"] == "message"
    assert received[-1]["type"] == "response.completed"


def test_failure_after_the_start_is_stored(server: Server) -> None:
    last = events(respond(server, "bad later", stream=True))[-1]
    assert last["type"] == "response.failed"
    assert response_document(get_response(server, last["response"]["id"])) == last["response"]
