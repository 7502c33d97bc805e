"""OpenAI's Python SDK and Chat Completions, with real models: documents, calls and reasoning."""

import json
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import openai
import pytest
from openai.types.chat import ParsedChatCompletion

from tests import sdk, tiny_chat
from tests.sdk import Clock, GetWeather, Place, Sdk


@pytest.fixture(scope="module")
def strict() -> Iterator[Sdk]:
    with sdk.tiny(tiny_chat.STRICT) as connected:
        yield connected


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def parse(
    target: Sdk, text: str = sdk.QUESTION, form: Any = openai.omit, **fields: Any
) -> ParsedChatCompletion[Any]:
    fields = {"max_tokens": 300, **fields}
    return target.client.chat.completions.parse(
        model=target.model, messages=user(text), response_format=form, **fields
    )


def calls_of(answer: ParsedChatCompletion[Any]) -> list[Any]:
    """The arguments of all calls, as the SDK made objects of them."""
    [choice] = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    calls = choice.message.tool_calls or []
    assert len({call.id for call in calls}) == len(calls) > 0
    return [call.function.parsed_arguments for call in calls]


# ── documents ──


def test_response_is_parsed_into_a_pydantic_model(target: Sdk) -> None:
    answer = parse(target, form=Place, n=3, **sdk.SAMPLED)
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        assert isinstance(choice.message.parsed, Place)
        document = json.loads(choice.message.content or "")
        assert document == choice.message.parsed.model_dump()
        assert list(document) == list(Place.model_fields)
    assert len({choice.message.content for choice in answer.choices}) > 1


def test_streamed_response_is_parsed_in_parts_and_at_its_end(target: Sdk) -> None:
    with target.client.chat.completions.stream(
        model=target.model,
        messages=user(sdk.QUESTION),
        response_format=Place,
        max_tokens=300,
        seed=0,
    ) as stream:
        events = list(stream)
        final = stream.get_final_completion().choices[0].message
    deltas = [event for event in events if event.type == "content.delta"]
    written = list(accumulate(event.delta for event in deltas))
    assert [event.snapshot for event in deltas] == written
    assert written[-1] == final.content
    assert all(isinstance(event.parsed, dict) for event in deltas[1:])  # what there is of it so far
    [done] = [event for event in events if event.type == "content.done"]
    assert isinstance(done.parsed, Place)
    assert done.parsed == final.parsed
    assert done.content == final.content


def test_document_that_is_cut_off_raises_its_own_error(target: Sdk) -> None:
    with pytest.raises(openai.LengthFinishReasonError) as cut:
        parse(target, form=Place, max_tokens=4, reasoning_effort="none")
    assert (cut.value.completion.choices[0].message.content or "").startswith('{"')


def test_error_names_the_unsupported_schema(target: Sdk) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "none"}}}
    for streams in (False, True):
        with pytest.raises(openai.BadRequestError) as bad:
            target.client.chat.completions.create(
                model=target.model, messages=user("hi"), response_format=form, stream=streams
            )
        assert bad.value.param == "response_format.json_schema.schema"


# ── calls ──


def test_model_calls_a_tool_when_needed(demo: Sdk) -> None:
    assert calls_of(parse(demo, tools=[sdk.WEATHER])) == [GetWeather(city="Paris")]
    free = parse(demo, "What is the capital of France?", tools=[sdk.WEATHER], tool_choice="auto")
    assert free.choices[0].message.content == "The capital of France is Paris."
    assert not free.choices[0].message.tool_calls


def test_named_tool_is_called(target: Sdk) -> None:
    named = {"type": "function", "function": {"name": "clock"}}
    [call, *_] = calls_of(parse(target, tools=[sdk.WEATHER, sdk.CLOCK], tool_choice=named))
    assert isinstance(call, Clock)


def test_tools_with_a_format_give_a_call_or_a_document(tiny: Sdk) -> None:
    fields: dict[str, Any] = {"form": Place, "tools": [sdk.CLOCK], "temperature": 2}
    kinds = set()
    for seed in range(8):
        answer = parse(tiny, f"number {seed}", seed=seed, **fields)
        message = answer.choices[0].message
        kinds.add(type(calls_of(answer)[0] if message.tool_calls else message.parsed))
    assert kinds == {Clock, Place}


def test_streamed_call_has_its_name_first_and_is_parsed_at_its_end(target: Sdk) -> None:
    with target.client.chat.completions.stream(
        model=target.model,
        messages=user(sdk.QUESTION),
        tools=[sdk.WEATHER],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=200,
        seed=0,
    ) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    deltas = [e for e in events if e.type == "tool_calls.function.arguments.delta"]
    [done] = [e for e in events if e.type == "tool_calls.function.arguments.done"]
    assert {event.name for event in deltas} == {"get_weather"}
    assert "".join(event.arguments_delta for event in deltas) == done.arguments
    assert isinstance(done.parsed_arguments, GetWeather)
    assert calls_of(final) == [done.parsed_arguments]
    assert not any(event.type == "content.delta" for event in events)


@pytest.mark.parametrize("streams", [False, True])
def test_result_of_a_tool_is_in_the_response(demo: Sdk, streams: bool) -> None:
    def turn(messages: list[Any]) -> ParsedChatCompletion[None]:
        chat = demo.client.chat.completions
        if not streams:
            return chat.parse(model="demo", messages=messages, tools=[sdk.WEATHER])
        with chat.stream(model="demo", messages=messages, tools=[sdk.WEATHER]) as stream:
            return stream.until_done().get_final_completion()

    messages = user(sdk.QUESTION)
    called = turn(messages).choices[0].message
    messages.append(called)
    [call] = called.tool_calls or []
    assert call.function.parsed_arguments == GetWeather(city="Paris")
    messages.append({"role": "tool", "tool_call_id": call.id, "content": sdk.RESULT})
    answer = turn(messages).choices[0]
    assert answer.finish_reason == "stop"
    assert sdk.reports_weather(answer.message.content or ""), answer.message.content


@pytest.mark.parametrize("streams", [False, True])
def test_calls_are_rendered_by_a_strict_template(strict: Sdk, streams: bool) -> None:
    fields: dict[str, Any] = {"model": strict.model, "tools": [sdk.CLOCK], "max_tokens": 600}
    fields["reasoning_effort"] = "none"  # which is random, and may take all tokens
    messages = user("What time is it?")
    ids = []
    for _ in range(3):
        chat = strict.client.chat.completions
        if streams:
            with chat.stream(messages=messages, tool_choice="required", **fields) as stream:
                called = stream.get_final_completion().choices[0].message
        else:
            called = (
                chat.parse(messages=messages, tool_choice="required", **fields).choices[0].message
            )
        assert called.content is None
        messages.append(called)
        for call in called.tool_calls or ():
            ids.append(call.id)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "noon"})
    assert len(set(ids)) == len(ids) >= 3
    assert all(len(id) == 9 and id.isalnum() for id in ids)


# ── reasoning ──


def reasoning(message: Any) -> str:
    """It is no field of the SDK's types."""
    return str((message.model_extra or {}).get("reasoning_content", ""))


@pytest.mark.parametrize("budget", [0, 5, 20])
def test_reasoning_is_separate_and_ends_with_its_budget(tiny: Sdk, budget: int) -> None:
    body = sdk.THINK | {"thinking_token_budget": budget}
    fields: dict[str, Any] = {"messages": user("hi"), "max_tokens": 60, "extra_body": body}
    create = tiny.client.chat.completions.create
    answer = create(model=tiny.model, **fields, **sdk.SAMPLED)
    [choice] = answer.choices
    assert bool(reasoning(choice.message)) == bool(budget)
    assert choice.message.content
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 60
    details = answer.usage.completion_tokens_details
    assert details is not None
    assert details.reasoning_tokens is not None
    assert budget <= details.reasoning_tokens <= budget + 1  # the mark that ends it
    deltas = [
        chunk.choices[0].delta
        for chunk in create(model=tiny.model, stream=True, **fields, **sdk.SAMPLED)
    ]
    assert "".join(map(reasoning, deltas)) == reasoning(choice.message)
    assert "".join(delta.content or "" for delta in deltas) == choice.message.content
    assert not any(reasoning(delta) and delta.content for delta in deltas)


def test_reasoning_precedes_constrained_output(tiny: Sdk) -> None:
    body = sdk.THINK | {"thinking_token_budget": 8}
    thought = parse(tiny, form=Place, extra_body=body, **sdk.SAMPLED).choices[0].message
    assert reasoning(thought)
    assert isinstance(thought.parsed, Place)
    fields: dict[str, Any] = {"tools": [sdk.CLOCK], "tool_choice": "required", "extra_body": body}
    called = parse(tiny, **fields, **sdk.SAMPLED)
    assert reasoning(called.choices[0].message)
    assert all(isinstance(call, Clock) for call in calls_of(called))
