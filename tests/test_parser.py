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

from worker.text.parser import Reader
from worker.text.response_template import PLAIN, AnswerForm, answer_form, literal

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
    reader = Reader(how, begun, calls, [WEATHER])
    bounds = [0, *(cuts or []), len(text)]
    found = []
    for start, end in pairwise(bounds):
        found += reader.push(text[start:end])
        assert reader.at <= end
    found += reader.flush()
    made: dict[str, Any] = {"content": "", "reasoning": "", "calls": []}
    for each in found:
        if each.kind == "content" and not reader.calls_ended:
            assert text[each.at : each.at + len(each.text)] == each.text
        if each.kind != "call":
            made[each.kind] += each.text
        elif each.name is not None:
            made["calls"].append((each.name, each.text))
        else:
            name, arguments = made["calls"][-1]
            made["calls"][-1] = (name, arguments + each.text)
    assert reader.calls_begun == len(made["calls"])
    assert bool(reader.calls_ended) == bool(made["calls"])
    return made


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
    reader = Reader(HERMES, "", True)
    assert reader.push('<tool_call>\n{"name": "w"') == [("call", "", "w", 0)]
    assert reader.calling
    assert [each.text for each in reader.push(', "arguments": {"city": "Pa')] == ['{"city": "Pa']
    assert [each.text for each in reader.push('ris"}')] == ['ris"}']
    reader.push("}\n</tool_call>")
    assert not reader.calling
    assert (reader.calls_begun, reader.calls_ended) == (1, 1)


def test_content_is_not_held_back_longer_than_it_must() -> None:
    reader = Reader(HERMES, "", True)
    assert [each.text for each in reader.push("one two")] == ["one two"]
    assert reader.push(" <too") == []
    assert [each.text for each in reader.push("k>")] == [" <took>"]
    assert reader.push("\n") == []
    assert [each.text for each in reader.flush()] == ["\n"]


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
    one = Reader(HERMES, begun, True, [WEATHER])
    other = one.sibling()
    for reader in (one, other):
        assert [each.name for each in reader.push("")] == ["weather", None]


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
    reader = Reader(HERMES, "", True)
    found = reader.push('<tool_call>\n{"name": "w", "arguments": {"ci') + reader.flush()
    assert [(each.name, each.text) for each in found] == [("w", ""), (None, '{"ci')]


@pytest.mark.parametrize("cut", ["<tool_call>", '<tool_call>\n{"na', '<tool_call>\n{"name": "w'])
def test_a_call_without_a_name_yet_is_not_shown(cut: str) -> None:
    reader = Reader(HERMES, "", True)
    found = reader.push("So " + cut) + reader.flush()
    assert [(each.kind, each.text) for each in found] == [("content", "So")]
    assert reader.calls_begun == 0


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
    reader = Reader(HERMES, "<think>\n\n</think>\n\n", True)
    reader.hold(marks=False)
    text = f' "<think>{CALL}</think> '
    found = [each for letter in text for each in reader.push(letter)] + reader.flush()
    assert "".join(each.text for each in found) == text
    assert {each.kind for each in found} == {"content"}


def test_calls_in_place_of_a_document_come_first() -> None:
    reader = Reader(HERMES, "", True)
    reader.hold(marks=True)
    found = reader.push(f"{CALL}\n{CALL}")
    assert [each.name for each in found if each.name] == ["w", "w"]
    reader = Reader(HERMES, "", True)
    reader.hold(marks=True)
    text = f'{{"a": "{CALL}"}}'
    assert "".join(each.text for each in reader.push(text) + reader.flush()) == text
    assert reader.calls_begun == 0


def test_a_mark_within_a_string_ends_no_call_that_is_held_to_json() -> None:
    text = '<tool_call>\n{"name": "w", "arguments": {"s": "a</tool_call>b"}}\n</tool_call>'
    reader = Reader(HERMES, "", True)
    reader.calls_held = True
    found = [each for letter in text for each in reader.push(letter)]
    assert "".join(each.text for each in found) == '{"s": "a</tool_call>b"}'
    assert reader.calls_ended == 1


def test_json_in_the_middle_of_a_text_is_no_call() -> None:
    how = form(LLAMA)
    text = 'Here: {"name": "Bob", "parameters": {}} done.'
    assert read(how, text) == {"content": text, "reasoning": "", "calls": []}
    assert read(how, text, list(range(len(text))))["content"] == text


def test_spaces_and_marks_that_never_end_take_no_time() -> None:
    for how, text in (
        (HERMES, (" " * 4000 + "x") * 20),
        (form("[TOOL_CALLS][ARGS]"), "[TOOL_CALLS]" * 8000),
        (form("<tool_call><function=<parameter="), "<tool_call> <function" * 4000),
    ):
        reader = Reader(how, "", True)
        started = time.process_time()
        found = [each for at in range(0, len(text), 16) for each in reader.push(text[at : at + 16])]
        found += reader.flush()
        assert time.process_time() - started < 3
        assert "".join(each.text for each in found).strip() == text.strip()


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
