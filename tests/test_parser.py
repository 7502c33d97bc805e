"""Answers read as they come: the same however they are cut, and what transformers makes of the
whole."""

import copy
import json
import random
import time
from itertools import pairwise
from typing import Any

import pytest
from transformers.utils.chat_parsing import parse_response

from worker.protocol import TokenLogprob
from worker.text.answer_form import PLAIN, AnswerForm, answer_form, literal
from worker.text.detokenizer import Piece, Share
from worker.text.parser import Event, Parser

WEATHER = {
    "type": "function",
    "function": {
        "name": "get",
        "parameters": {"properties": {"n": {"type": "integer"}, "s": {"type": "string"}}},
    },
}
CALL = '<tool_call>\n{"name": "w", "arguments": {"city": "P <b"}}\n</tool_call>'
WHOLE = f"<think>\nhm,  ok\n</think>\n\nHello  there. \n{CALL}\n{CALL}"


class Carrier:
    """As much of a tokenizer as a form is told by."""

    def __init__(self, chat: str = "", template: dict[str, Any] | None = None) -> None:
        self.chat_template = chat
        self.response_template = template


def form(chat: str) -> AnswerForm:
    tokenizer: Any = Carrier(chat)
    found = answer_form(tokenizer)
    assert found is not None
    return found


HERMES = form("<tool_call> </think>")


def read(
    how: AnswerForm, text: str, cuts: list[int] | None = None, begun: str = "", calls: bool = True
) -> dict[str, Any]:
    parser = Parser(how, begun, calls, [WEATHER])
    bounds = [0, *(cuts or []), len(text)]
    events = []
    for start, end in pairwise(bounds):
        events += parser.feed(piece(text[start:end], start))
    events += parser.finish()
    made: dict[str, Any] = {"content": "", "reasoning": "", "calls": []}
    for event in events:
        if event.kind == "content":
            assert_of_its_tokens(event.piece, text)
        if event.kind != "call":
            made[event.kind] += event.piece.text
        elif event.name is not None:
            made["calls"].append((event.name, event.piece.text))
        else:
            name, arguments = made["calls"][-1]
            made["calls"][-1] = (name, arguments + event.piece.text)
    assert parser.calls_begun == len(made["calls"])
    assert bool(parser.calls_ended) == bool(made["calls"])
    return made


def piece(text: str, start: int = 0) -> Piece:
    """Of one token, whose id says where in the whole text it stands."""
    return Piece(text, [Share(text, (TokenLogprob(start, text, b"", 0.0),))] if text else [])


def assert_of_its_tokens(content: Piece, text: str) -> None:
    """It is a stretch of the text, made of just those tokens that stand there."""
    assert "".join(share.text for share in content.shares) == content.text
    for share in content.shares:
        [token] = share.tokens
        assert text[token.token_id :].startswith(token.text)
        assert token.text.endswith(share.text) if share.ends else share.text in token.text
    for before, after in pairwise(content.shares):
        if before.ends:
            before_text = before.tokens[0].text
            assert before.tokens[0].token_id + len(before_text) == after.tokens[0].token_id
        else:
            assert before.tokens is after.tokens


def feed(parser: Parser, text: str) -> list[Event]:
    return parser.feed(Piece(text))


def texts(events: list[Event]) -> list[str]:
    return [event.piece.text for event in events]


def test_an_answer_falls_into_its_parts() -> None:
    assert read(HERMES, WHOLE) == {
        "reasoning": "hm,  ok",
        "content": "Hello  there.",
        "calls": [("w", '{"city": "P <b"}')] * 2,
    }


LLAMA = '{"name": "x", "parameters": '
FAMILIES = [
    ("<tool_call> </think>", WHOLE),
    (
        "<tool_call><function=<parameter=</think>",
        "<think>x</think>so\n<tool_call>\n<function=get>\n<parameter=n>\n7\n</parameter>\n"
        "<parameter=s>\n7\nx\n</parameter>\n</function>\n</tool_call>",
    ),
    ("[TOOL_CALLS][ARGS]", '[TOOL_CALLS]get[ARGS]{"n": 1}[TOOL_CALLS]put[ARGS]{}'),
    ("[TOOL_CALLS]", 'Well. [TOOL_CALLS] [{"name": "get", "arguments": {"n": 1}, "id": "a"}]'),
    (
        "[TOOL_CALLS]",
        '[TOOL_CALLS] [{"name": "get", "arguments": {"n": 1}}, {"name": "put", "arguments": {}}]',
    ),
    ("<|tool_call>call:", '<|tool_call>call:get{s:<|"|>x "y"<|"|>,n:2}<tool_call|>'),
    (LLAMA, '{"name": "get", "parameters": {"s": "b"}}'),
    (LLAMA, '<|python_tag|>{"name": "get", "parameters": {"s": "b"}}'),
    ("</think>", "<think>\na\n</think>\n\nThe <b>answer</b> </think"),
]


@pytest.mark.parametrize(("chat", "text"), FAMILIES)
def test_cuts_make_no_difference(chat: str, text: str) -> None:
    how = form(chat)
    expected = read(how, text)
    assert read(how, text, list(range(len(text)))) == expected
    chance = random.Random(0)
    for _ in range(100):
        cuts = sorted(chance.choices(range(len(text)), k=chance.randrange(12)))
        assert read(how, text, cuts) == expected, cuts


@pytest.mark.parametrize(("chat", "text"), FAMILIES)
def test_the_library_reads_the_same(chat: str, text: str) -> None:
    how = form(chat)
    spec = copy.deepcopy(dict(how.spec))
    if spec["fields"].get("tool_calls", {}).get("open") == "<tool_call>":
        # left to itself, the library takes the space between two calls for content
        spec["fields"]["tool_calls"]["open_pattern"] = r"\s*<tool_call>"
        del spec["fields"]["tool_calls"]["open"]
    theirs = parse_response(text, spec, prefix="", tools=[WEATHER])
    ours = read(how, text)
    assert ours["content"].strip() == theirs.get("content", "")
    assert ours["reasoning"] == theirs.get("reasoning_content", "")
    calls = theirs.get("tool_calls", [])
    calls = [call for each in calls for call in (each if isinstance(each, list) else [each])]
    expected = [(c["function"]["name"], c["function"]["arguments"]) for c in calls]
    assert [(name, json.loads(arguments)) for name, arguments in ours["calls"]] == expected


def test_arguments_come_while_they_are_written() -> None:
    parser = Parser(HERMES, "", True)
    assert feed(parser, '<tool_call>\n{"name": "w"') == [("call", Piece(""), "w")]
    phases = [parser.phase]
    assert texts(feed(parser, ', "arguments": {"city": "Pa')) == ['{"city": "Pa']
    assert texts(feed(parser, 'ris"}')) == ['ris"}']
    feed(parser, "}\n</tool_call>")
    assert [*phases, parser.phase] == ["call", "answer"]
    assert (parser.calls_begun, parser.calls_ended) == (1, 1)


def test_content_is_not_held_back_longer_than_it_must() -> None:
    parser = Parser(HERMES, "", True)
    assert texts(feed(parser, "one two")) == ["one two"]
    assert feed(parser, " <too") == []
    assert texts(feed(parser, "k>")) == [" <took>"]
    assert feed(parser, "\n") == []
    assert texts(parser.finish()) == ["\n"]


@pytest.mark.parametrize(
    ("begun", "text", "expected"),
    [
        ("<think>\n", "more\n</think>\n\nHi ", {"reasoning": "more", "content": "Hi "}),
        ("<think>\n\n</think>\n\n", "Hi", {"reasoning": "", "content": "Hi"}),
        ("The capital", " of France", {"reasoning": "", "content": " of France"}),
        ("", "  Hi", {"reasoning": "", "content": "  Hi"}),
    ],
)
def test_what_the_prompt_has_begun_goes_on(begun: str, text: str, expected: dict[str, str]) -> None:
    assert read(HERMES, text, begun=begun) == {**expected, "calls": []}
    assert read(HERMES, text, list(range(len(text))), begun) == {**expected, "calls": []}


def test_a_call_that_the_prompt_has_begun_is_told_whole() -> None:
    begun = '<tool_call>\n{"name": "weather", "arguments": {"ci'
    text = 'ty": "Paris"}}\n</tool_call>'
    whole = [("weather", '{"city": "Paris"}')]
    assert read(HERMES, text, begun=begun)["calls"] == whole
    assert read(HERMES, text, list(range(len(text))), begun)["calls"] == whole
    ended = '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'
    assert read(HERMES, "Hi", begun=ended) == {"content": "Hi", "reasoning": "", "calls": []}
    one = Parser(HERMES, begun, True, [WEATHER])
    other = one.sibling()
    for parser in (one, other):
        assert [event.name for event in feed(parser, "")] == ["weather", None]


@pytest.mark.parametrize("name", ['["x"', "12", '{"x": "y"', '""', "null", "[" * 2000 + '"x"'])
def test_a_name_that_is_none_begins_no_call(name: str) -> None:
    text = '<tool_call>\n{"name": ' + name + ', "arguments": {}}\n</tool_call>'
    found = read(HERMES, text)
    assert found["calls"] == []


def test_without_tools_calls_are_text() -> None:
    assert read(HERMES, WHOLE, calls=False)["content"] == f"Hello  there. \n{CALL}\n{CALL}"


@pytest.mark.parametrize("body", ["nonsense", '{"name": 3}', '{"arguments": {}}', ""])
def test_a_call_that_makes_no_sense_is_text(body: str) -> None:
    text = f"So: <tool_call>{body}</tool_call> yes"
    made = read(HERMES, text)
    assert made["content"] == f"So:<tool_call>{body}</tool_call> yes"
    assert made["calls"] == []


def test_a_call_that_is_cut_short_keeps_what_there_is() -> None:
    parser = Parser(HERMES, "", True)
    events = feed(parser, '<tool_call>\n{"name": "w", "arguments": {"ci') + parser.finish()
    assert [(event.name, event.piece.text) for event in events] == [("w", ""), (None, '{"ci')]


@pytest.mark.parametrize("cut", ["<tool_call>", '<tool_call>\n{"na', '<tool_call>\n{"name": "w'])
def test_a_call_without_a_name_yet_is_not_shown(cut: str) -> None:
    parser = Parser(HERMES, "", True)
    events = feed(parser, "So " + cut) + parser.finish()
    assert [(event.kind, event.piece.text) for event in events] == [("content", "So")]
    assert parser.calls_begun == 0


def test_a_tokenizers_own_template_is_the_one() -> None:
    own = {"start_anchor": "A", "fields": {"content": {"content": "text"}}}
    tokenizer: Any = Carrier("<tool_call>", own)
    found = answer_form(tokenizer)
    assert found is not None
    assert found.calls is None
    tokenizer = Carrier("{{ messages }}")
    assert answer_form(tokenizer) is None


@pytest.mark.parametrize(
    ("prompt", "begun"),
    [
        ("<|assistant|>old</s><|assistant|><think>\n", "<think>\n"),
        ("<|assistant|><think>\n\n</think>\n\n", "<think>\n\n</think>\n\n"),
        ("<think>old</think>yes</s><|assistant|>", ""),
        ("<|user|>what is <think>?</s><|assistant|>", ""),
        ("no such mark", ""),
        ("", ""),
    ],
)
def test_what_a_prompt_has_begun(prompt: str, begun: str) -> None:
    assert PLAIN.thoughts_in(prompt) == begun
    assert form("[TOOL_CALLS]").thoughts_in(prompt) == ""


def test_what_is_held_to_a_document_has_no_marks() -> None:
    parser = Parser(HERMES, "<think>\n\n</think>\n\n", False, document=True)
    text = f' "<think>{CALL}</think> '
    events = [event for letter in text for event in parser.feed(Piece(letter), True)]
    events += parser.finish()
    assert "".join(texts(events)) == text
    assert {event.kind for event in events} == {"content"}


def test_a_document_begins_where_it_is_held_to_its_grammar() -> None:
    parser = Parser(HERMES, "", False, document=True)
    events = feed(parser, "<think>a <b></think>")
    events += parser.feed(Piece("<think>1"), True) + parser.finish()
    assert [(event.kind, event.piece.text) for event in events] == [
        ("reasoning", "a <b>"), ("content", "<think>1")
    ]  # fmt: skip


def test_calls_in_place_of_a_document_come_first() -> None:
    parser = Parser(HERMES, "", True, document=True)
    events = parser.feed(Piece(f"{CALL}\n{CALL}"), True)
    assert [event.name for event in events if event.name] == ["w", "w"]
    parser = Parser(HERMES, "", True, document=True)
    text = f'{{"a": "{CALL}"}}'
    assert "".join(texts(parser.feed(Piece(text), True) + parser.finish())) == text
    assert parser.calls_begun == 0


def test_a_mark_within_a_string_ends_no_call_that_is_held_to_json() -> None:
    text = '<tool_call>\n{"name": "w", "arguments": {"s": "a</tool_call>b"}}\n</tool_call>'
    parser = Parser(HERMES, "", True)
    events = [event for letter in text for event in parser.feed(Piece(letter), True)]
    assert "".join(texts(events)) == '{"s": "a</tool_call>b"}'
    assert parser.calls_ended == 1


def test_json_in_the_middle_of_a_text_is_no_call() -> None:
    how = form(LLAMA)
    text = 'Here: {"name": "Bob", "parameters": {}} done.'
    assert read(how, text) == {"content": text, "reasoning": "", "calls": []}
    assert read(how, text, list(range(len(text))))["content"] == text


def test_plain_text_is_not_searched_for_marks() -> None:
    parser = Parser(HERMES, "", True)
    marks = [mark._replace(pattern=None) for mark in parser._marks_outside]
    parser._marks_outside = marks
    assert texts(feed(parser, "1 > 0")) == ["1 > 0"]


def test_spaces_and_marks_that_never_end_take_no_time() -> None:
    for how, text in (
        (HERMES, (" " * 4000 + "x") * 20),
        (form("[TOOL_CALLS][ARGS]"), "[TOOL_CALLS]" * 8000),
        (form("<tool_call><function=<parameter="), "<tool_call> <function" * 4000),
    ):
        parser = Parser(how, "", True)
        started = time.process_time()
        events = []
        for at in range(0, len(text), 16):
            events += parser.feed(piece(text[at : at + 16], at))
        events += parser.finish()
        assert time.process_time() - started < 3
        assert "".join(texts(events)).strip() == text.strip()


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (r"\s*<tool_call>", None),
        ("<tool_call>", "<tool_call>"),
        (r"<\|a\|>", "<|a|>"),
        (r"a+", None),
        (r"(?P<name>x)", None),
        (r"\w", None),
        (r"a\\", "a\\"),
    ],
)
def test_patterns_that_stand_for_one_text(pattern: str, text: str | None) -> None:
    assert literal(pattern) == text
