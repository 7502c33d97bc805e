"""Chunks, output items and events made of deltas, one at a time; a real stream may merge some."""

import copy
import math
from collections.abc import Iterable
from typing import Any

import orjson
import pytest

from batching.errors import InvalidInput
from server.apis.openai.chat import ChatBuilder, ChatRequest
from server.apis.openai.choices import ChoicesBuilder
from server.apis.openai.completions import CompletionBuilder, CompletionRequest
from server.apis.openai.endpoint import ParsedRequest
from server.apis.openai.request_fields import decode
from server.apis.openai.responses.events import ResponseOutput
from server.core.delta_stream import UsageCounts
from server.http.json import to_json
from tests.fake_generator import FakeGenerator
from worker.messages.deltas import Delta, DeltaPart, Kind, TokenLogprob


def delta(text: str, tokens: int, logprobs: list[TokenLogprob] | None = None, **ends: Any) -> Delta:
    parts = [DeltaPart("content", text)] if text else []
    return Delta(0, parts, tokens, logprobs or [], **ends)


TOKENS = [
    delta("a", 1, [TokenLogprob(1, "a", b"a", -0.5)]),
    delta("", 1, [TokenLogprob(2, "", b"\xc3", -math.inf)]),
    delta("é", 1, [TokenLogprob(3, "é", b"\xa9", -1.0)]),
    delta("", 1),  # held back by a stop string that may be coming
    delta("bc", 1, [TokenLogprob(4, "b", b"b", -2.0), TokenLogprob(5, "c", b"c", -3.0)]),
    delta("", 1, [TokenLogprob(6, "", b"", -4.0)]),
    delta("", 0, finish_reason="stop"),
]


Builder = ChoicesBuilder[Any, Any]


def chat(**fields: Any) -> Builder:
    body = {"messages": [{"role": "user", "content": "x"}], "stream": True, **fields}
    request = decode(body, ChatRequest, lambda _: "demo", {})
    model: Any = FakeGenerator()
    return ChatBuilder(ParsedRequest(request, request.generation_inputs(1)), UsageCounts(), model)


def test_generation_config_provides_absent_fields() -> None:
    """As `transformers chat` sends it."""
    body = {"generation_config": '{"temperature": 0.5, "top_p": 0.4, "max_new_tokens": 9}'}
    fields = {"messages": [{"role": "user", "content": "hi"}], "top_p": 1, "max_tokens": None}
    request = decode(body | fields, ChatRequest, lambda _: "demo", {})
    [generation_input] = request.generation_inputs(1)
    sampling, stopping = generation_input.sampling, generation_input.stopping
    assert (sampling.temperature, sampling.top_p) == (None, 1)
    assert dict(generation_input.config) == {"temperature": 0.5, "top_p": 0.4, "max_new_tokens": 9}
    assert (stopping.max_tokens, stopping.default_tokens) == (None, None)
    for wrong in ("{", "[]", "", '"' + "x" * 40_000 + '"'):
        with pytest.raises(InvalidInput) as refused:
            decode(fields | {"generation_config": wrong}, ChatRequest, lambda _: "demo", {})
        assert refused.value.param == "generation_config"


def completion(**fields: Any) -> Builder:
    body = {"prompt": "x", "stream": True, **fields}
    request = decode(body, CompletionRequest, lambda _: "demo", {})
    parsed = ParsedRequest(request, request.generation_inputs(10))
    model: Any = FakeGenerator()
    return CompletionBuilder(parsed, UsageCounts(), model)


def choices(builder: Builder) -> list[dict[str, Any]]:
    deltas = copy.deepcopy(TOKENS)  # a builder changes the deltas that it is given
    events = [*builder.start([]), *(event for delta in deltas for event in builder.add(delta))]
    return [choice_of(event) for event in events]


def choice_of(event: bytes) -> dict[str, Any]:
    [choice] = orjson.loads(event.removeprefix(b"data: "))["choices"]
    found: dict[str, Any] = choice
    return found


def test_logprobs_of_a_partial_character_wait_for_the_whole_one() -> None:
    role, *middle, last = choices(chat(logprobs=True))
    assert role["delta"] == {"role": "assistant", "content": ""}
    assert [c["delta"] for c in middle] == [{"content": "a"}, {"content": "é"}, {"content": "bc"}]
    tokens = [[token["token"] for token in c["logprobs"]["content"]] for c in middle]
    assert tokens == [["a"], ["", "é"], ["b", "c"]]
    assert middle[1]["logprobs"]["content"][0]["bytes"] == [0xC3]
    assert middle[1]["logprobs"]["content"][0]["logprob"] == -9999.0  # JSON has no infinity
    assert last["delta"] == {}
    assert last["finish_reason"] == "stop"
    assert [token["logprob"] for token in last["logprobs"]["content"]] == [-4.0]


def test_text_offsets_continue_across_chunks() -> None:
    *middle, last = choices(completion(logprobs=0))
    assert [c["text"] for c in middle] == ["a", "é", "bc"]
    assert [c["logprobs"]["text_offset"] for c in middle] == [[0], [1, 1], [2, 3]]
    assert last["text"] == ""
    assert last["logprobs"]["text_offset"] == [4]
    assert [c["finish_reason"] for c in (*middle, last)] == [None, None, None, "stop"]


def test_top_logprobs_have_the_chosen_token_by_its_own_text() -> None:
    top = (TokenLogprob(9, "er", b"er", -0.1), TokenLogprob(3, "\ufffd", b"\xa9", -1.0))
    last = delta("é", 1, [TokenLogprob(3, "é", b"\xa9", -1.0, top)], finish_reason="length")
    (event,) = completion(logprobs=2).add(last)
    logprobs = choice_of(event)["logprobs"]
    assert logprobs["top_logprobs"] == [{"er": -0.1, "é": -1.0}]


# ── of /v1/responses ──


def empty() -> ResponseOutput:
    return ResponseOutput(FakeGenerator().call_id, 0)


def score(text: str) -> TokenLogprob:
    return TokenLogprob(1, text, text.encode(), -1.0)


def documents(structs: Iterable[object]) -> list[dict[str, Any]]:
    """Structs as clients get them."""
    return [orjson.loads(to_json(struct)) for struct in structs]


def texts_of(logprobs: list[Any]) -> list[str]:
    return [logprob["token"] for logprob in logprobs]


def test_logprobs_that_lag_behind_their_text_are_in_its_last_event() -> None:
    output = empty()
    first = documents(output.add(Delta(0, [DeltaPart("content", "abc")], logprobs=[score("ab")])))
    assert texts_of(first[-1]["logprobs"]) == ["ab"]
    assert list(output.add(Delta(0, [], logprobs=[score("c")], finish_reason="stop"))) == []
    done = documents(output.close("completed"))
    assert texts_of(done[0]["logprobs"]) == ["ab", "c"]
    assert texts_of(documents(output.items)[0]["content"][0]["logprobs"]) == ["ab", "c"]


def test_logprobs_belong_to_the_message_with_their_text() -> None:
    output = empty()
    parts = [DeltaPart("content", "ab"), DeltaPart("call", "{}", "f"), DeltaPart("content", "cd")]
    whole = Delta(0, parts, logprobs=[score("a"), score("b"), score(""), score("cd")])
    events = [event for event in documents(output.add(whole)) if "text.delta" in event["type"]]
    assert [texts_of(event["logprobs"]) for event in events] == [["a", "b", ""], ["cd"]]


def test_a_reasoning_item_follows_text_and_text_follows_it() -> None:
    output = empty()
    kinds: tuple[Kind, ...] = ("content", "reasoning", "content", "content")
    list(output.add(Delta(0, [DeltaPart(kind, kind[0]) for kind in kinds])))
    list(output.close("incomplete"))
    assert [item["content"][0]["text"] for item in documents(output.items)] == ["c", "r", "cc"]
    assert [item.status for item in output.items] == ["completed", "completed", "incomplete"]


def test_completed_output_without_text_is_an_empty_message() -> None:
    output = empty()
    assert list(output.close("incomplete")) == []
    assert [event["type"].removeprefix("response.") for event in output.close("completed")] == [
        "output_item.added", "content_part.added", "output_text.done",
        "content_part.done", "output_item.done",
    ]  # fmt: skip
