"""OpenAI's Python SDK and the Responses API, with real models: items, stored and continued."""

import json
from typing import Any

import openai
import pytest
from openai.types.responses import ParsedResponse, ResponseFunctionToolCall

from tests import sdk
from tests.sdk import GetWeather, Place, Sdk

TOOLS: list[Any] = [sdk.WEATHER, sdk.CLOCK]  # the SDK takes them as they are for the other API


def sampled(**extra: Any) -> dict[str, Any]:
    """A seed is no parameter of this API."""
    return {"temperature": 1.0, "extra_body": {"seed": 1, **extra}}


def calls_of(answer: ParsedResponse[Any]) -> list[Any]:
    """The arguments of all calls, as the SDK made objects of them."""
    assert answer.status == "completed"
    calls = [item for item in answer.output if item.type == "function_call"]
    assert len({call.call_id for call in calls}) == len(calls) > 0
    return [call.parsed_arguments for call in calls]


# ── documents ──


def test_text_is_parsed_into_a_pydantic_model(target: Sdk) -> None:
    answer = target.client.responses.parse(
        model=target.model,
        input=sdk.QUESTION,
        text_format=Place,
        max_output_tokens=300,
        **sampled(),
    )
    assert answer.status == "completed"
    assert isinstance(answer.output_parsed, Place)
    assert json.loads(answer.output_text) == answer.output_parsed.model_dump()


def test_streamed_text_is_parsed_at_its_end(target: Sdk) -> None:
    with target.client.responses.stream(
        model=target.model,
        input=sdk.QUESTION,
        text_format=Place,
        max_output_tokens=300,
        reasoning={"effort": "none"},  # which is random, and may take all tokens
    ) as stream:
        events = list(stream)
        final = stream.get_final_response()
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    [done] = [event for event in events if event.type == "response.output_text.done"]
    assert "".join(event.delta for event in deltas) == done.text == final.output_text
    assert isinstance(done.parsed, Place)
    assert final.output_parsed == done.parsed
    assert events[0].type == "response.created"
    assert events[-1].type == "response.completed"
    assert [event.sequence_number for event in events] == list(range(len(events)))


# ── calls ──


@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("streams", [True, False])
def test_result_of_a_tool_is_in_the_response(demo: Sdk, stored: bool, streams: bool) -> None:
    """Either the server keeps the conversation, or the client tells all of it again."""

    def turn(**fields: Any) -> ParsedResponse[None]:
        fields |= {"model": "demo", "tools": TOOLS[:1], "store": stored}
        if not streams:
            return demo.client.responses.parse(**fields)
        with demo.client.responses.stream(**fields) as stream:
            return stream.until_done().get_final_response()

    items: list[Any] = [{"role": "user", "content": sdk.QUESTION}]
    asking = turn(input=items)
    [call] = asking.output
    assert isinstance(call, ResponseFunctionToolCall)
    assert calls_of(asking) == [GetWeather(city="Paris")]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": sdk.RESULT}
    if stored:
        answer = turn(input=[result], previous_response_id=asking.id)
    else:
        answer = turn(input=[*items, *asking.output, result])
    assert sdk.reports_weather(answer.output_text), answer.output_text


# ── reasoning ──


def test_reasoning_is_an_item(tiny: Sdk) -> None:
    extra = sdk.THINK | {"thinking_token_budget": 6}
    fields: dict[str, Any] = {"model": tiny.model, "input": "hi", "text_format": Place}
    fields |= sampled(**extra) | {"max_output_tokens": 300}
    answer = tiny.client.responses.parse(**fields)
    thought, message = answer.output
    assert thought.type == "reasoning"
    [part] = thought.content or []
    assert part.text
    assert message.type == "message"
    assert isinstance(answer.output_parsed, Place)
    assert answer.usage is not None
    assert 6 <= answer.usage.output_tokens_details.reasoning_tokens <= 7
    with tiny.client.responses.stream(**fields) as stream:
        deltas = [e.delta for e in stream if e.type == "response.reasoning_text.delta"]
        final = stream.get_final_response()
    assert "".join(deltas) == part.text
    assert final.output_parsed == answer.output_parsed
    again = tiny.client.responses.create(
        model=tiny.model, input=[*answer.output, {"role": "user", "content": "why"}],  # type: ignore[list-item]  # as the SDK's guides do
        max_output_tokens=3,
    )  # fmt: skip
    assert again.usage is not None
    assert again.usage.input_tokens > answer.usage.output_tokens


# ── stored and in the background ──


def test_response_is_retrieved_continued_and_deleted(demo: Sdk) -> None:
    responses = demo.client.responses
    first = responses.create(model="demo", input="What is the capital of France?")
    assert first.output_text == "The capital of France is Paris."
    then = responses.create(model="demo", input="And of Japan?", previous_response_id=first.id)
    assert then.output_text == "The capital of Japan is Tokyo."
    assert responses.retrieve(first.id).output_text == first.output_text
    [item] = responses.input_items.list(then.id)
    assert item.type == "message"
    assert item.content[0].type == "input_text"
    assert item.content[0].text == "And of Japan?"
    responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        responses.retrieve(first.id)
