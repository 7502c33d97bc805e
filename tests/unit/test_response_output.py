"""Output items and events made of deltas that the fake generator does not produce."""

from collections.abc import Iterable
from typing import Any

import orjson

from server.apis.openai.responses.events import ResponseOutput
from server.http.json import to_json
from tests.fake_generator import FakeGenerator
from worker.messages.deltas import Delta, DeltaPart, Kind, TokenLogprob


def empty() -> ResponseOutput:
    return ResponseOutput(FakeGenerator().call_id, 0)


def score(text: str) -> TokenLogprob:
    return TokenLogprob(1, text, text.encode(), -1.0)


def documents(structs: Iterable[object]) -> list[dict[str, Any]]:
    """Structs as clients get them."""
    return [orjson.loads(to_json(struct)) for struct in structs]


def tokens(logprobs: list[Any]) -> list[str]:
    return [logprob["token"] for logprob in logprobs]


def test_logprobs_that_lag_behind_their_text_are_in_its_last_event() -> None:
    output = empty()
    first = documents(output.add(Delta(0, [DeltaPart("content", "abc")], logprobs=[score("ab")])))
    assert tokens(first[-1]["logprobs"]) == ["ab"]
    assert list(output.add(Delta(0, [], logprobs=[score("c")], finish_reason="stop"))) == []
    done = documents(output.close("completed"))
    assert tokens(done[0]["logprobs"]) == ["ab", "c"]
    assert tokens(documents(output.items)[0]["content"][0]["logprobs"]) == ["ab", "c"]


def test_logprobs_belong_to_the_message_with_their_text() -> None:
    output = empty()
    parts = [DeltaPart("content", "ab"), DeltaPart("call", "{}", "f"), DeltaPart("content", "cd")]
    delta = Delta(0, parts, logprobs=[score("a"), score("b"), score(""), score("cd")])
    events = [event for event in documents(output.add(delta)) if "text.delta" in event["type"]]
    assert [tokens(event["logprobs"]) for event in events] == [["a", "b", ""], ["cd"]]


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
