"""Responses of `POST /v1/responses` over a real socket, with a fake generator."""

from typing import Any

import openai
import pytest

from tests.event_streams import open_stream, read_until, writes
from tests.fake_generator import FakeGenerator
from tests.http.test_pipeline_http import error_of
from tests.response_events import (
    PATH,
    events,
    get_response,
    output_texts,
    respond,
    response_document,
)
from tests.serving import Server, metric, serving, wait_until

TOOL = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather in a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": True,
}
ALL = 'say *hm *well Hello there !get_weather ={"city": ="Paris"}'


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="-", max_retries=0)


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


def test_each_event_is_one_write_and_none_is_done(server: Server) -> None:
    client = open_stream(server, PATH, {"input": "hi", "stream": True}, "Connection: close")
    raw = b""
    while more := client.recv(65536):
        raw += more
    frames = [frame for frame in writes(raw) if frame]
    assert all(frame.startswith(b"event: response.") for frame in frames)
    assert all(frame.count(b"\n\n") == 1 for frame in frames)
    assert b"[DONE]" not in raw


def test_refusal_before_the_first_token_has_a_status_code(server: Server) -> None:
    for fields in ({}, {"stream": True}):
        answer = respond(server, "refused", **fields)
        assert answer.status_code == 400
        assert error_of(answer)["param"] == "input"
        answer = respond(server, "bad", **fields)
        assert answer.status_code == 500
        assert error_of(answer)["type"] == "server_error"


def test_failure_after_the_start_is_an_event_and_stored(server: Server) -> None:
    received = events(respond(server, "bad later", stream=True))
    last = received[-1]["response"]
    assert [event["type"] for event in received].count("response.failed") == 1
    assert received[-1]["type"] == "response.failed"
    assert last["status"] == "failed"
    assert last["error"] == {
        "code": "server_error",
        "message": "the model failed on this input",
    }
    assert last["output"][0]["status"] == "incomplete"
    assert response_document(get_response(server, last["id"])) == last


@pytest.mark.parametrize("stream", [False, True])
def test_disconnect_aborts_the_request(stream: bool) -> None:
    generator = FakeGenerator()
    with serving(load_chat=lambda: generator) as server:
        client = open_stream(server, PATH, {"input": "long", "stream": stream})
        if stream:
            read_until(client, b"response.output_text.delta")
        else:
            assert generator.responded.wait(60)
        client.close()
        wait_until(lambda: generator.dropped == ["long"])
        wait_until(lambda: server.worker_client.queue.pending == 0)


def test_requests_are_counted_by_the_path_and_not_by_the_id(server: Server) -> None:
    def count(path: str, status: int) -> float:
        return metric(
            server, f'onequeue_requests_total{{endpoint="/v1/responses{path}",status="{status}"}}'
        )

    before = {key: count(*key) for key in (("", 200), ("/{id}", 200), ("/{id}", 404))}
    id = response_document(respond(server))["id"]
    get_response(server, id)
    get_response(server, "resp_none")
    assert count("", 200) == before["", 200] + 1
    assert count("/{id}", 200) == before["/{id}", 200] + 1
    assert count("/{id}", 404) == before["/{id}", 404] + 1
