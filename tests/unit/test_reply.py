"""From deltas to events, one delta at a time, where a real stream may have merged some."""

import copy
import math
from typing import Any

import orjson
import pytest

from batching.errors import InvalidInput
from server.openai.chat import ChatRequest, ChatResponseBuilder, with_config
from server.openai.choices import ChoicesResponseBuilder
from server.openai.completions import CompletionRequest, CompletionResponseBuilder
from server.openai.request_fields import decode
from tests.fake_generator import FakeGenerator
from worker.messages.deltas import Delta, DeltaPart, TokenLogprob


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


def chat(**fields: Any) -> ChoicesResponseBuilder:
    body = {"messages": [{"role": "user", "content": "x"}], "stream": True, **fields}
    request = decode(body, ChatRequest, lambda _: "demo")
    return ChatResponseBuilder(request, FakeGenerator().call_id)


def test_a_configuration_stands_in_for_fields_that_are_missing() -> None:
    """As `transformers chat` sends it."""
    body = {"generation_config": '{"temperature": 0.5, "top_p": 0.4, "max_new_tokens": 9}'}
    asked = {"messages": [{"role": "user", "content": "hi"}], "top_p": 1, "max_tokens": None}
    told = decode(with_config(body | asked), ChatRequest, lambda _: "demo").generation_input()
    assert (told.sampling.temperature, told.sampling.top_p) == (0.5, 1)
    # as many as there is room for: it always asks for some
    assert (told.stopping.max_tokens, told.stopping.default_tokens) == (None, 9)
    for wrong in ("{", "[]", ""):
        with pytest.raises(InvalidInput) as refused:
            with_config({"generation_config": wrong})
        assert refused.value.param == "generation_config"


def completion(**fields: Any) -> ChoicesResponseBuilder:
    body = {"prompt": "x", "stream": True, **fields}
    return CompletionResponseBuilder(decode(body, CompletionRequest, lambda _: "demo"), 10)


def choices(reply: ChoicesResponseBuilder) -> list[dict[str, Any]]:
    deltas = copy.deepcopy(TOKENS)  # they are the reply's, once they are added
    made = [*reply.begin([]), *(event for each in deltas for event in reply.add(each))]
    return [choice_of(event) for event in made]


def choice_of(event: bytes) -> dict[str, Any]:
    [choice] = orjson.loads(event.removeprefix(b"data: "))["choices"]
    found: dict[str, Any] = choice
    return found


def test_log_probabilities_of_half_a_character_wait_for_the_whole_one() -> None:
    role, *said, last = choices(chat(logprobs=True))
    assert role["delta"] == {"role": "assistant"}
    assert [c["delta"] for c in said] == [{"content": "a"}, {"content": "é"}, {"content": "bc"}]
    tokens = [[each["token"] for each in c["logprobs"]["content"]] for c in said]
    assert tokens == [["a"], ["", "é"], ["b", "c"]]
    assert said[1]["logprobs"]["content"][0]["bytes"] == [0xC3]
    assert said[1]["logprobs"]["content"][0]["logprob"] == -9999.0  # JSON has no infinity
    assert last["delta"] == {}
    assert last["finish_reason"] == "stop"
    assert [each["logprob"] for each in last["logprobs"]["content"]] == [-4.0]


def test_chunks_of_a_completion_count_their_offsets_on() -> None:
    *said, last = choices(completion(logprobs=0))
    assert [c["text"] for c in said] == ["a", "é", "bc"]
    assert [c["logprobs"]["text_offset"] for c in said] == [[0], [1, 1], [2, 3]]
    assert last["text"] == ""
    assert last["logprobs"]["text_offset"] == [4]
    assert [c["finish_reason"] for c in (*said, last)] == [None, None, None, "stop"]


def test_a_chunk_without_log_probabilities_says_null() -> None:
    assert all(choice["logprobs"] is None for choice in choices(completion()))
    bare = [delta("a", 1), Delta(0, finish_reason="stop")]
    made = [event for each in bare for event in chat().add(each)]
    assert all(choice_of(event)["logprobs"] is None for event in made)


def test_the_chosen_token_is_among_the_top_by_its_own_text() -> None:
    top = (TokenLogprob(9, "er", b"er", -0.1), TokenLogprob(3, "\ufffd", b"\xa9", -1.0))
    last = delta("é", 1, [TokenLogprob(3, "é", b"\xa9", -1.0, top)], finish_reason="length")
    (event,) = completion(logprobs=2).add(last)
    logprobs = choice_of(event)["logprobs"]
    assert logprobs["top_logprobs"] == [{"er": -0.1, "é": -1.0}]


def test_a_chunk_of_text_alone_is_like_any_other() -> None:
    for make in (chat, completion):
        templated, made = make(), make(n=2)
        made._alike = False
        for text in ("a", '"{}"\n', "é\u2028", "b"):
            for index in (0, 1):
                told = [
                    choice_of(event)
                    for reply in (templated, made)
                    for event in reply.add(Delta(index, [DeltaPart("content", text)], 1))
                ]
                assert told[0] == told[1]
                assert text in (told[0].get("text"), told[0].get("delta", {}).get("content"))
