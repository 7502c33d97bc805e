"""Responses of `POST /v1/responses` over a real socket, with a fake generator."""

import itertools
import re
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.event_streams import open_stream, read_until, writes
from tests.fake_generator import FakeGenerator
from tests.http.test_pipeline_http import error_of
from tests.response_events import (
    PATH,
    WHOLE,
    Document,
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
def generator() -> FakeGenerator:
    return FakeGenerator()


@pytest.fixture(scope="module")
def server(generator: FakeGenerator) -> Iterator[Server]:
    with serving(load_chat=lambda: generator) as started:
        yield started


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="-", max_retries=0)


# ── whole ──


def test_response_has_every_field_of_the_api(server: Server) -> None:
    started = int(time.time())
    answer = response_document(respond(server))
    assert re.fullmatch("resp_[0-9a-f]{48}", answer.pop("id"))
    assert started <= answer.pop("created_at") <= answer.pop("completed_at") <= time.time()
    assert re.fullmatch("msg_[0-9a-f]{48}", answer["output"][0].pop("id"))
    assert answer == {
        "object": "response",
        "status": "completed",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "max_output_tokens": None,
        "max_tool_calls": None,
        "model": "demo",
        "output": [
            {
                "type": "message",
                "status": "completed",
                "role": "assistant",
                "content": [
                    {"type": "output_text", "text": WHOLE, "annotations": [], "logprobs": []}
                ],
            }
        ],
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "prompt_cache_key": None,
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": None,
        "service_tier": "default",
        "store": True,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "temperature": 0.7,
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "top_p": 0.8,
        "truncation": "disabled",
        "usage": {
            "input_tokens": 2,
            "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
            "output_tokens": 5,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 7,
        },
        "user": None,
        "metadata": {},
    }


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


def test_reasoning_text_and_calls_are_items_in_order(server: Server) -> None:
    answer = response_document(respond(server, ALL, tools=[TOOL]))
    assert output_texts(answer) == [
        ("reasoning", "hm well "),
        ("message", " Hello there"),
        ("function_call", '{"city":"Paris"}'),
    ]
    thought, _, call = answer["output"]
    assert thought["summary"] == []
    assert thought["content"][0]["type"] == "reasoning_text"
    assert call["name"] == "get_weather"
    assert call["call_id"] == "call_get_weather:0"  # as the generator makes them
    assert call["id"] != call["call_id"]
    assert {item["status"] for item in answer["output"]} == {"completed"}
    assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] == 2


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


@pytest.mark.parametrize("stream", [False, True])
def test_response_that_is_cut_off_is_incomplete(server: Server, stream: bool) -> None:
    response = respond(server, "say a b c", max_output_tokens=2, stream=stream)
    if stream:
        last = events(response)[-1]
        assert last["type"] == "response.incomplete"
        answer: Document = last["response"]
    else:
        answer = response_document(response)
    assert answer["status"] == "incomplete"
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert answer["completed_at"] is None
    assert answer["output"][0]["status"] == "incomplete"
    assert output_texts(answer) == [("message", "a b")]


def test_tokens_of_logprobs_join_to_the_text(server: Server) -> None:
    fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    answer = response_document(respond(server, **fields))
    part = answer["output"][0]["content"][0]
    assert "".join(token["token"] for token in part["logprobs"]) == WHOLE
    assert part["logprobs"][0] == {
        "token": "Hello",
        "logprob": -1.0,
        "bytes": list(b"Hello"),
        "top_logprobs": [
            {"token": "Hello", "logprob": -1.0, "bytes": list(b"0")},
            {"token": "Hello1", "logprob": -2.0, "bytes": list(b"1")},
        ],
    }
    assert answer["top_logprobs"] == 2
    received = events(respond(server, stream=True, **fields))
    deltas = [event for event in received if event["type"] == "response.output_text.delta"]
    for event in deltas:
        assert "".join(token["token"] for token in event["logprobs"]) == event["delta"]
    assert [token for event in deltas for token in event["logprobs"]] == part["logprobs"]
    done = next(event for event in received if event["type"] == "response.output_text.done")
    assert done["logprobs"] == part["logprobs"]


# ── events ──


def test_stream_has_every_event_in_order(server: Server) -> None:
    received = events(respond(server, ALL, stream=True))
    types = [event["type"].removeprefix("response.") for event in received]
    steps = [name for name, _ in itertools.groupby(types)]  # neighbouring deltas may be merged
    assert steps == [
        "created", "in_progress",
        "output_item.added", "content_part.added",
        "reasoning_text.delta", "reasoning_text.done",
        "content_part.done", "output_item.done",
        "output_item.added", "content_part.added",
        "output_text.delta", "output_text.done",
        "content_part.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta",
        "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    for event in received[:2]:
        assert event["response"]["status"] == "in_progress"
        assert event["response"]["output"] == []
    assert len({e["response"]["id"] for e in received if "response" in e}) == 1


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


def test_stream_ends_with_the_whole_response(server: Server) -> None:
    whole = response_document(respond(server, ALL))
    streamed = events(respond(server, ALL, stream=True))[-1]["response"]
    assert output_texts(streamed) == output_texts(whole)
    assert streamed["usage"] == whole["usage"]
    assert set(streamed) == set(whole)


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


# ── the SDK ──


def test_sdk_reads_a_response(client: openai.OpenAI) -> None:
    answer = client.responses.create(model="demo", input="hi")
    assert answer.output_text == WHOLE
    assert answer.usage is not None
    assert answer.usage.total_tokens == 7


def test_sdk_reads_a_stream(client: openai.OpenAI) -> None:
    with client.responses.stream(model="demo", input=ALL) as stream:
        types = [event.type for event in stream]
        final = stream.get_final_response()
    assert types[0] == "response.created"
    assert types[-1] == "response.completed"
    assert final.output_text == " Hello there"
    assert final.output[2].type == "function_call"
    assert final.output[2].arguments == '{"city":"Paris"}'


def test_sdk_parses_into_a_pydantic_model(client: openai.OpenAI, generator: FakeGenerator) -> None:
    class City(BaseModel):
        name: str

    answer = client.responses.parse(model="demo", input='say {"name":"Paris"}', text_format=City)
    assert answer.output_parsed == City(name="Paris")
    constraint = generator.payloads[-1].constraint
    assert constraint is not None
    assert constraint.value["properties"]["name"]["type"] == "string"


def test_sdk_returns_the_result_of_a_tool(client: openai.OpenAI, generator: FakeGenerator) -> None:
    tools: Any = [TOOL]
    turns: list[Any] = [{"role": "user", "content": ALL}]
    first = client.responses.create(model="demo", input=turns, tools=tools)
    turns += first.output
    call = next(item for item in first.output if item.type == "function_call")
    turns.append({"type": "function_call_output", "call_id": call.call_id, "output": "say sunny"})
    second = client.responses.create(model="demo", input=turns, tools=tools)
    assert second.output_text == "sunny"
    messages = generator.payloads[-1].prompt.messages  # type: ignore[union-attr]  # a Chat
    assert [message["role"] for message in messages] == ["user", "assistant", "tool"]
    assert messages[1] == {
        "role": "assistant",
        "content": " Hello there",
        "reasoning_content": "hm well ",
        "tool_calls": [
            {
                "id": call.call_id,
                "type": "function",
                "function": {"name": "get_weather", "arguments": '{"city":"Paris"}'},
            }
        ],
    }
    assert messages[2] == {
        "role": "tool",
        "content": "say sunny",
        "name": "get_weather",
        "tool_call_id": call.call_id,
    }
    built_on = client.responses.create(
        model="demo",
        previous_response_id=first.id,
        input=[{"type": "function_call_output", "call_id": call.call_id, "output": "say sunny"}],
    )
    assert built_on.output_text == "sunny"
    assert generator.payloads[-1].prompt.messages == messages  # type: ignore[union-attr]  # a Chat


def test_sdk_raises_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve("resp_none")
    with pytest.raises(openai.BadRequestError) as bad:
        client.responses.create(model="demo", input="hi", max_output_tokens=0)
    assert bad.value.param == "max_output_tokens"
    with pytest.raises(openai.NotFoundError) as missing:
        client.responses.create(model="other", input="hi")
    assert (missing.value.param, missing.value.code) == ("model", "model_not_found")
