"""Streamed outputs are parsed the same whatever the chunks, and as transformers parses a whole."""

import copy
import gc
import json
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from transformers.utils.chat_parsing import parse_response

from tests.call_formats import NAMES, call_text, output_format_of
from tests.matrix import matrix
from worker.messages.deltas import TokenLogprob
from worker.text.detokenizer import TextSpan, TokenSpan
from worker.text.output_format import (
    DEFAULT_OUTPUT_FORMAT,
    OutputFormat,
    declared_output_format,
    inferred_output_format,
)
from worker.text.parser import OutputEvent, OutputParser
from worker.text.tool_call_format import DEFAULT_TOOL_CALL_FORMAT

WEATHER = {
    "type": "function",
    "function": {
        "name": "get",
        "parameters": {"properties": {"n": {"type": "integer"}, "s": {"type": "string"}}},
    },
}
CALL = '<tool_call>\n{"name": "w", "arguments": {"city": "P <b"}}\n</tool_call>'
WHOLE = f"<think>\nhm,  ok\n</think>\n\nHello  there. \n{CALL}\n{CALL}"


HERMES = DEFAULT_OUTPUT_FORMAT


def read(
    output_format: OutputFormat,
    text: str,
    cuts: list[int] | None = None,
    begun: str = "",
    calls: bool = True,
    tools: Sequence[Any] = (WEATHER,),
) -> dict[str, Any]:
    parser = OutputParser(output_format, begun, calls, tools)
    bounds = [0, *(cuts or []), len(text)]
    events = []
    for start, end in pairwise(bounds):
        events += parser.feed(piece(text[start:end], start))
    events += parser.finish()
    result: dict[str, Any] = {"content": "", "reasoning": "", "calls": []}
    for event in events:
        if event.kind == "content":
            assert_of_its_tokens(event.span, text)
        if event.kind != "call":
            result[event.kind] += event.span.text
        elif event.name is not None:
            result["calls"].append((event.name, event.span.text))
        else:
            name, arguments = result["calls"][-1]
            result["calls"][-1] = (name, arguments + event.span.text)
    assert parser.calls_started == len(result["calls"])
    assert bool(parser.calls_finished) == bool(result["calls"])
    return result


def piece(text: str, start: int = 0) -> TextSpan:
    """Return a span of one token, whose id is its position in the text."""
    return TextSpan(text, [TokenSpan(text, (TokenLogprob(start, text, b"", 0.0),))] if text else [])


def assert_of_its_tokens(content: TextSpan, text: str) -> None:
    """Assert that a span has the tokens at its position of the text."""
    assert "".join(span.text for span in content.token_spans) == content.text
    for span in content.token_spans:
        [token] = span.tokens
        assert text[token.token_id :].startswith(token.text)
        assert token.text.endswith(span.text) if span.ends_token else span.text in token.text
    for before, after in pairwise(content.token_spans):
        if before.ends_token:
            before_text = before.tokens[0].text
            assert before.tokens[0].token_id + len(before_text) == after.tokens[0].token_id
        else:
            assert before.tokens is after.tokens


def feed(parser: OutputParser, text: str) -> list[OutputEvent]:
    return parser.feed(TextSpan(text))


def texts(events: list[OutputEvent]) -> list[str]:
    return [event.span.text for event in events]


def get(**arguments: Any) -> tuple[str, Any]:
    return "get", arguments


PUT: tuple[str, Any] = ("put", {})
TEXTS: list[tuple[str, str, tuple[str, str, list[tuple[str, Any]]]]] = [
    (
        "coder",
        "<think>x</think>so\n<tool_call>\n<function=get>\n<parameter=n>\n7\n</parameter>\n"
        "<parameter=s>\n7\nx\n</parameter>\n</function>\n</tool_call>",
        ("so", "x", [get(n=7, s="7\nx")]),
    ),
    (  # the first delimiter is missing
        "coder",
        "So\n<function=get>\n<parameter=n>1</parameter></function>\n</tool_call>",
        ("So", "", [get(n=1)]),
    ),
    (
        "pairs",
        "<tool_call>get\n<arg_key>s</arg_key>\n<arg_value>1</arg_value>\n</tool_call>\n"
        "<tool_call>put</tool_call> so",
        ("so", "", [get(s="1"), PUT]),
    ),
    (
        "typed",
        'a<|tool_call>call:get{s:<|"|>x "y", z:<|"|>,n:2,o:{a:[true,<|"|>b<|"|>]}}<tool_call|>',
        ("a", "", [get(s='x "y", z:', n=2, o={"a": [True, "b"]})]),
    ),
    (  # keys that are no identifiers
        "typed",
        '<|tool_call>call:get{$a/b:1, my key:<|"|>x<|"|>,o:{a\\b:[1,2]}}<tool_call|>',
        ("", "", [("get", {"$a/b": 1, "my key": "x", "o": {"a\\b": [1, 2]}})]),
    ),
    ("python", "<|calls|>[get($a/b=1)]<|end_calls|>", ("", "", [("get", {"$a/b": 1})])),
    (  # a number that JSON cannot write
        "pairs",
        "<tool_call>get<arg_key>f</arg_key><arg_value>1e999</arg_value></tool_call>",
        ("", "", [get(f="1e999")]),
    ),
    (
        "python",
        "Well. <|calls|>[get(s='it\\'s', n=-1.5e3, from=[None, {'a': True}]), a.b()]<|end_calls|>",
        (
            "Well.",
            "",
            [("get", {"s": "it's", "n": -1500.0, "from": [None, {"a": True}]}), ("a.b", {})],
        ),
    ),
    ("bare python", '[get(s="b")]', ("", "", [get(s="b")])),
    ("bare python", "[see(this)] or not", ("[see(this)] or not", "", [])),
    ("bare python", '[get("b")]', ('[get("b")]', "", [])),
    ("bare python", '[get("b")] or\nnot', ('[get("b")] or\nnot', "", [])),
    ("bare python", "[see(n=1)]", ("[see(n=1)]", "", [])),
    ("bare python", "[get(n=1), see(n=1)] so", ("[get(n=1), see(n=1)] so", "", [])),
    (
        "bare python",
        "[get(s=']\\'[', n=[1])]\n So [it] is.",
        ("So [it] is.", "", [get(s="]'[", n=[1])]),
    ),
    ("bare python", "[get(n=1)]\n[get(n=2)]", ("", "", [get(n=1), get(n=2)])),
    (
        "args",
        '[TOOL_CALLS]get[CALL_ID]a1[ARGS]{"n": 1}[TOOL_CALLS]put[CALL_ID]b[ARGS]{}',
        ("", "", [get(n=1), PUT]),
    ),
    ("python", "So\n[get(n=1)]", ("So", "", [get(n=1)])),
    ("python", '```json\n{"name": "get", "arguments": {"n": 1}}\n```', ("", "", [get(n=1)])),
    (
        "python",
        '{"name": "get", "description": "x"}',
        ('{"name": "get", "description": "x"}', "", []),
    ),
    ("args", 'So\nget[TOOL_CALLS]{"n": 1}', ("So", "", [get(n=1)])),
    ("args", 'get[ARGS] {"n": 1}\nput[ARGS]{}', ("", "", [get(n=1), PUT])),
    ("args", '[TOOL_CALLS]get[TOOL_CALLS]{"n": 1}', ("", "", [get(n=1)])),
    (
        "list",
        'Well. [TOOL_CALLS] [{"name": "get", "arguments": {"n": 1}, "id": "a"},\n {"name": "put", '
        '"parameters": {}}]',
        ("Well.", "", [get(n=1), PUT]),
    ),
    ("key", '<|prefix|>[{"get": {"n": 1}}, {"put": {}}]<|suffix|>', ("", "", [get(n=1), PUT])),
    ("llama", '{"name": "get", "parameters": {"s": "b"}}', ("", "", [get(s="b")])),
    ("llama", '<|python_tag|>{"name": "get", "parameters": {"s": "b"}}', ("", "", [get(s="b")])),
    (
        "section",
        '<calls><call>functions.get:0<args>{"n": 1}</call>'
        "<call>functions.put:1<args>{}</call></calls>",
        ("", "", [get(n=1), PUT]),
    ),
    (  # no arguments at all
        "section",
        "<calls><call>functions.get:0<args></call></calls>",
        ("", "", [get()]),
    ),
    (
        "list",
        '[TOOL_CALLS] [{"name": "get"}, {"name": "put", "arguments": {}}]',
        ("", "", [get(), PUT]),
    ),
    (
        "channels",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.get <|constrain|>json<|message|>{"n": 1}<|call|>',
        ("", "Hm.", [get(n=1)]),
    ),
    ("channels", " to=functions.get<|channel|>commentary json<|message|>{}", ("", "", [get()])),
    (
        "channels",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>to=me",
        ("to=me", "Hm.", []),
    ),
    (  # a tool's name alone; other recipients are ignored
        "channels",
        '<|channel|>commentary to=get <|constrain|>json<|message|>{"n": 1}<|call|>',
        ("", "", [get(n=1)]),
    ),
    ("channels", " to=get<|channel|>commentary json<|message|>{}", ("", "", [get()])),
    ("channels", "<|channel|>analysis to=browser.search<|message|>{}<|call|>", ("", "", [])),
    (  # a delimiter in a string ends no call
        "section",
        '<calls><call>functions.get:0<args>{"s": "a</call>\\" b"}</call></calls>',
        ("", "", [get(s='a</call>" b')]),
    ),
    (
        "coder",
        "<think>\na\n</think>\n\nThe <b>answer</b> </think",
        ("The <b>answer</b> </think", "a", []),
    ),
    # A call inside reasoning counts only if the reasoning never closes.
    (
        "section",
        "<think>a <calls><call>functions.get:0<args>{}</call></calls> b</think>c",
        ("c", "a <calls><call>functions.get:0<args>{}</call></calls> b", []),
    ),
    ("section", "<think>a <calls><call>functions.get:0<args>{}</call></calls>", ("", "a", [get()])),
    # A delimiter within a line of content is a mention.
    (
        "coder",
        "The `<think>` tag and <think> open.",
        ("The `<think>` tag and <think> open.", "", []),
    ),
    ("coder", "A <think> or\n<think>x</think>\nno.", ("A <think> or\n\nno.", "x", [])),
    ("coder", "<think>a</think>\nb <think>", ("b <think>", "a", [])),
    (
        "coder",
        "So <tool_call>\n<function=get></function></tool_call><think>x</think> y",
        ("So  y", "x", [get()]),
    ),
    # An invalid call returns to the reasoning.
    *(
        (name, f"<think>So {text}", ("", f"So {text}", []))
        for name, text in (
            ("coder", "<tool_call>\n<function=get> it </function> is  it"),
            ("hermes", "a <tool_call> may"),
            ("hermes", "a <tool_call>x</tool_call> may"),
        )
    ),
    ("coder", "Before\n<think>x</think>\nafter", ("Before\n\nafter", "x", [])),
    ("hermes", WHOLE, ("Hello  there.", "hm,  ok", [("w", {"city": "P <b"})] * 2)),
    # A call with an invalid end or name.
    (
        "hermes",
        CALL.replace("</tool_call>", "</tool>\nand\n") + CALL,
        ("", "", [("w", {"city": "P <b"})] * 2),
    ),
    *(
        ("hermes", text, (text, "", []))
        for text in (
            "So: <tool_call>nonsense</tool_call> yes",
            'So: <tool_call>{"arguments": {}}</tool_call> yes',
            "So: <tool_call></tool_call> yes",
            *(
                f'<tool_call>{{"name": {name}, "arguments": {{}}}}</tool_call>'
                for name in ('["x"', "3", '{"x": "y"', '""', "null", "[" * 2000 + '"x"')
            ),
        )
    ),
]


@pytest.mark.parametrize(("name", "text", "expected"), TEXTS)
def test_every_format_is_parsed_whatever_the_chunks(
    name: str, text: str, expected: tuple[str, str, list[tuple[str, Any]]]
) -> None:
    rng = random.Random(0)
    cuts: list[list[int]] = [[], list(range(len(text)))]
    cuts += [sorted(rng.choices(range(len(text)), k=rng.randrange(12))) for _ in range(100)]
    for item in cuts:
        result = read(
            output_format_of(name), text, item, tools=[WEATHER, {"function": {"name": "put"}}]
        )
        calls = [(called, json.loads(arguments)) for called, arguments in result["calls"]]
        assert (result["content"].strip(), result["reasoning"].strip(), calls) == expected, item


def garbled(text: str, delimiters: Sequence[str], rng: random.Random) -> str:
    """Remove, repeat or insert stretches, delimiters and signs, or truncate the text."""
    for _ in range(rng.randint(1, 4)):
        start, length = rng.randrange(len(text) + 1), rng.randint(0, 8)
        between = rng.choice([*"{}[]\"\\,:<> \n'(", "", text[start - length : start], *delimiters])
        between = between[: rng.randint(1, 40)]
        text = text[:start] + between + text[start + length * rng.randrange(2) :]
    return text


@pytest.mark.parametrize("number", matrix(range(len(TEXTS)), *range(0, len(TEXTS), 3)))
def test_invalid_text_is_parsed_the_same_whatever_the_chunks(number: int) -> None:
    name, text, _ = TEXTS[number]
    rng, output_format = random.Random(number), output_format_of(name)
    for _ in range(60):
        garbled_text = garbled(text, output_format.visible_texts, rng)
        cuts = sorted(rng.choices(range(len(garbled_text) + 1), k=5))
        cut = [garbled_text[start:end] for start, end in pairwise([0, *cuts, None])]
        whole, *others = (
            joined(output_format, chunks) for chunks in ([garbled_text], [*garbled_text], cut)
        )
        assert others == [whole, whole], garbled_text


def joined(output_format: OutputFormat, chunks: Sequence[str]) -> list[tuple[str, str]]:
    """Return the kinds of an output's parts, or the names of its calls, and their texts."""
    parser = OutputParser(output_format, "", True, [WEATHER])
    result: list[tuple[str, str]] = []
    for kind, piece, name in [e for item in chunks for e in feed(parser, item)] + parser.finish():
        if name is None and result and (kind == "call" or result[-1][0] == kind):
            result[-1] = result[-1][0], result[-1][1] + piece.text
        elif piece.text or name is not None:
            result.append((name or kind, piece.text))
    return result


@pytest.mark.parametrize(
    ("name", "text", "begun"),
    [
        (
            "channels",
            "<|channel|>commentary to=functions.get <|constrain|>json<|message|>{",
            " to=functions.get<|channel|>commentary json<|message|>{",
        ),
        ("coder", "<function=get>\n<para", "<tool_call>\n<function=get>\n<para"),
        ("coder", "So <tool_call> ", "<tool_call> "),
        ("channels", "<|channel|>commentary to=functions.g", " to=functions.g"),
        ("channels", " to=functions.", " to=functions."),
        ("section", "<calls><call>functions.", "<call>functions."),
        ("args", "[TOOL_CALLS]get[CALL_ID]x1[ARGS]", "[TOOL_CALLS]get[CALL_ID]id[ARGS]"),
        ("list", "[TOOL_CALLS] [", "[TOOL_CALLS] ["),
    ],
)
def test_phase_text_of_a_started_call_has_the_formats_delimiter(
    name: str, text: str, begun: str
) -> None:
    parser = OutputParser(output_format_of(name), "", True, [WEATHER])
    feed(parser, text)
    assert parser.phase == "call"
    assert parser.phase_text.split() == begun.split()


def test_undelimited_json_is_content_up_to_the_name_of_a_tool() -> None:
    """So that the grammar of calls constrains nothing else."""
    parser = OutputParser(output_format_of("llama"), "", True, [WEATHER])
    phases = []
    for text in ('{"name', '": "get', '"'):
        feed(parser, text)
        phases.append((parser.phase, parser.phase_text))
    assert phases[1][0] == phases[0][0] == "content"
    assert phases[2] == ("call", '{"name": "get"')
    parser = OutputParser(output_format_of("llama"), "", True, [WEATHER])
    for char in '{"city": {"name": "get"}}':
        feed(parser, char)
        assert parser.phase == "content"


@pytest.mark.parametrize("tool", ["ns:tool", "a/b", "3d_render", "-x", "a.b-c", "x" * 64])
@pytest.mark.parametrize("name", [*NAMES, "channels"])
def test_every_valid_tool_name_is_parsed_in_every_format(name: str, tool: str) -> None:
    output_format = output_format_of(name)
    text = call_text(name, {"n": 1}, tool)
    tools = [{"type": "function", "function": {"name": tool}}]
    for cuts in ([], list(range(1, len(text)))):
        result = read(output_format, text, cuts, tools=tools)
        assert [called for called, _ in result["calls"]] == [tool], text
        assert result["content"] == ""


def test_unopened_reasoning_is_reported_where_it_closes() -> None:
    open_ended = replace(DEFAULT_OUTPUT_FORMAT, may_close_unopened=True)
    for text, kinds in (
        ("a</think>b", ["content", "reasoning_end", "content"]),
        ("<think>a</think>b</think>c", ["reasoning", "content", "content"]),
        ("</think>b", ["content"]),
    ):
        parser = OutputParser(open_ended, "", False)
        assert [event.kind for event in feed(parser, text) + parser.finish()] == kinds


THINK = {"open": "<think>", "close": "</think>", "content": "text"}


def function(name: str, arguments: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


# Fields of the tool calls of response templates, and outputs.
TEMPLATES: list[tuple[dict[str, Any], str]] = [
    (
        {
            "open_pattern": r"\s*<tool_call>",
            "close": "</tool_call>",
            "transform": {"type": "function", "function": "{content}"},
        },
        WHOLE,
    ),
    (
        {
            "open_pattern": r"<tool_call>\s{0,8}<function=(?P<name>[^>\n]{1,128})>",
            "close_pattern": r"</function>\s{0,8}</tool_call>",
            "content": "xml-inline",
            "content_args": {
                "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"
            },
        },
        "so\n<tool_call>\n<function=get>\n<parameter=n>\n7\n</parameter>\n"
        "<parameter=s>\n7\nx\n</parameter>\n</function>\n</tool_call>",
    ),
    (
        {
            "open_pattern": r"\[TOOL_CALLS\](?P<name>[^\[{]{1,128})\[ARGS\]",
            "close_pattern": r"(?=\[TOOL_CALLS\])",
        },
        '[TOOL_CALLS]get[ARGS]{"n": 1}[TOOL_CALLS]put[ARGS]{}',
    ),
    (
        {
            "open": "[TOOL_CALLS]",
            "repeats": False,
            "transform": function("{name}", "{arguments}"),
            "transform_each": True,
        },
        'Well. [TOOL_CALLS] [{"name": "get", "arguments": {"n": 1}}, '
        '{"name": "put", "arguments": {}}]',
    ),
    (
        {
            "open_pattern": r"<\|tool_call>call:(?P<name>\w{1,128})",
            "close": "<tool_call|>",
            "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
        },
        '<|tool_call>call:get{s:<|"|>x "y"<|"|>,n:2}<tool_call|>',
    ),
    (
        {
            "open_pattern": r'(?=\{"name": ?")',
            "transform": function("{content.name}", "{content.parameters}"),
        },
        '{"name": "get", "parameters": {"s": "b"}}',
    ),
]


@pytest.mark.parametrize(("fields", "text"), TEMPLATES)
def test_response_templates_are_parsed_as_by_transformers(
    fields: dict[str, Any], text: str
) -> None:
    calls = {"repeats": True, "content": "json", "transform": function("{name}", "{content}")}
    content = {"content": {"content": "text"}, "reasoning_content": THINK}
    spec = {"start_anchor": "\n", "fields": {"tool_calls": calls | fields, **content}}
    theirs = parse_response(text, copy.deepcopy(spec), prefix="", tools=[WEATHER])
    expected = []
    for item in theirs.get("tool_calls", []):
        called = [call["function"] for call in (item if isinstance(item, list) else [item])]
        expected += [(call["name"], call["arguments"]) for call in called]
    for cuts in ([], list(range(len(text)))):
        ours = read(declared_output_format(spec), text, cuts)
        assert ours["content"].strip() == theirs.get("content", "")
        assert ours["reasoning"] == theirs.get("reasoning_content", "")
        assert [(name, json.loads(arguments)) for name, arguments in ours["calls"]] == expected


def test_arguments_are_streamed() -> None:
    parser = OutputParser(HERMES, "", True)
    assert feed(parser, '<tool_call>\n{"name": "w"') == [("call", TextSpan(""), "w")]
    phases = [parser.phase]
    assert texts(feed(parser, ', "arguments": {"city": "Pa')) == ['{"city": "Pa']
    assert texts(feed(parser, 'ris"}')) == ['ris"}']
    feed(parser, "}\n</tool_call>")
    assert [*phases, parser.phase] == ["call", "content"]
    assert (parser.calls_started, parser.calls_finished) == (1, 1)


def test_content_is_emitted_as_soon_as_it_is_certain() -> None:
    parser = OutputParser(HERMES, "", True)
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
def test_parsing_continues_from_the_prompts_prefix(
    begun: str, text: str, expected: dict[str, str]
) -> None:
    assert read(HERMES, text, begun=begun) == {**expected, "calls": []}
    assert read(HERMES, text, list(range(len(text))), begun) == {**expected, "calls": []}


def test_call_started_in_the_prompt_is_emitted_whole() -> None:
    begun = '<tool_call>\n{"name": "weather", "arguments": {"ci'
    text = 'ty": "Paris"}}\n</tool_call>'
    whole = [("weather", '{"city": "Paris"}')]
    assert read(HERMES, text, begun=begun)["calls"] == whole
    assert read(HERMES, text, list(range(len(text))), begun)["calls"] == whole
    ended = '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'
    assert read(HERMES, "Hi", begun=ended) == {"content": "Hi", "reasoning": "", "calls": []}
    one = OutputParser(HERMES, begun, True, [WEATHER])
    other = one.fork()
    for parser in (one, other):
        assert [event.name for event in feed(parser, "")] == ["weather", None]


REFERRING = {
    "type": "object",
    "properties": {
        "place": {"anyOf": [{"$ref": "#/$defs/Place"}, {"type": "null"}]},
        "kind": {"$ref": "#/$defs/Kind"},
        "size": {"allOf": [{"$ref": "#/$defs/Size"}]},
        "tree": {"$ref": "#/$defs/Tree"},
        "odd": {"type": "str"},
    },
    "$defs": {
        "Place": {"type": "object", "properties": {"city": {"type": "string"}}},
        "Kind": {"enum": ["1", "2"]},
        "Size": {"type": "integer"},
        "Tree": {"anyOf": [{"$ref": "#/$defs/Tree"}, {"type": "string"}]},
    },
}


def test_arguments_have_the_types_of_referenced_schemas() -> None:
    arguments = {"place": {"city": "P"}, "kind": "1", "size": 2, "tree": "3", "odd": "4"}
    tool = {"type": "function", "function": {"name": "get", "parameters": REFERRING}}
    result = read(output_format_of("coder"), call_text("coder", arguments), tools=[tool])
    assert [json.loads(text) for _, text in result["calls"]] == [arguments]


def test_calls_are_content_without_tools() -> None:
    assert read(HERMES, WHOLE, calls=False)["content"] == f"Hello  there. \n{CALL}\n{CALL}"


@pytest.mark.parametrize(
    ("follows", "calls", "content"),
    [
        (CALL, ["w", "w"], ""),
        ('They say "no", and', ["w"], 'They say "no", and'),
        ("x" * 10_000, ["w"], "x" * 10_000),
    ],
)
def test_unterminated_string_ends_with_its_call(
    follows: str, calls: list[str], content: str
) -> None:
    text = '<tool_call>\n{"name": "w", "arguments": {"s": "a}}\n</tool_call>' + follows
    for cuts in ([], list(range(1, len(text)))):
        result = read(HERMES, text, cuts)
        assert [name for name, _ in result["calls"]] == calls
        assert result["calls"][0][1] == '{"s": "a}}\n'
        assert result["content"] == content


@pytest.mark.parametrize(
    ("name", "text", "first"),
    [
        ("llama", '{"name": "get"', 1),
        ("llama", '<|python_tag|>{"name": "get"', 1),
        ("bare python", "[get(n=1, s='a'", 1),
        ("hermes", '<tool_call>\n{"name": "get"', 11),
        ("coder", "<tool_call>\n<function=get>\n<parameter=n>\n7\n</p", 11),
        ("coder", call_text("coder", {}), 11),
        ("section", call_text("section", {"n": 1}), 7),
    ],
)
def test_truncated_call_is_no_content(name: str, text: str, first: int) -> None:
    """`first`: the length from which on it may be a call."""
    for end in range(first, len(text)):
        for cuts in ([], list(range(1, end))):
            result = read(output_format_of(name), text[:end], cuts)
            names = [called for called, _ in result["calls"]]
            assert result["content"] == "", text[:end]
            assert names in ([], ["get"])
    assert names == ["get"] or not text.endswith(">")  # only the last delimiter is truncated


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("llama", '{"city": 4'),
        ("llama", '{"name": "Bob", "a'),
        ("llama", "{x"),
        ("llama", 'Here: {"name": "Bob", "parameters": {}} done.'),
        ("bare python", "[note] thi"),
        ("bare python", "[see(n=1, s"),
    ],
)
def test_text_that_cannot_become_an_undelimited_call_is_shown(name: str, text: str) -> None:
    for cuts in ([], list(range(len(text)))):
        assert read(output_format_of(name), text, cuts)["content"] == text
    assert read(output_format_of(name), text, calls=False)["content"] == text


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
def test_reasoning_at_the_end_of_a_prompt_is_found(prompt: str, begun: str) -> None:
    assert DEFAULT_OUTPUT_FORMAT.reasoning_at_end(prompt) == begun
    assert (
        inferred_output_format(None, None, DEFAULT_TOOL_CALL_FORMAT, None).reasoning_at_end(prompt)
        == ""
    )


def test_constrained_document_has_no_delimiters() -> None:
    parser = OutputParser(HERMES, "<think>\n\n</think>\n\n", False, is_document=True)
    text = f' "<think>{CALL}</think> '
    events = [event for char in text for event in parser.feed(TextSpan(char), True)]
    events += parser.finish()
    assert "".join(texts(events)) == text
    assert {event.kind for event in events} == {"content"}


def test_document_starts_where_the_grammar_constrains() -> None:
    parser = OutputParser(HERMES, "", False, is_document=True)
    events = feed(parser, "<think>a <b></think>")
    events += parser.feed(TextSpan("<think>1"), True) + parser.finish()
    assert [(event.kind, event.span.text) for event in events] == [
        ("reasoning", "a <b>"), ("content", "<think>1")
    ]  # fmt: skip


def test_calls_count_only_before_a_document() -> None:
    parser = OutputParser(HERMES, "", True, is_document=True)
    events = parser.feed(TextSpan(f"{CALL}\n{CALL}"), True)
    assert [event.name for event in events if event.name] == ["w", "w"]
    parser = OutputParser(HERMES, "", True, is_document=True)
    text = f'{{"a": "{CALL}"}}'
    assert "".join(texts(parser.feed(TextSpan(text), True) + parser.finish())) == text
    assert parser.calls_started == 0


def test_delimiter_in_a_string_does_not_end_a_constrained_json_call() -> None:
    text = '<tool_call>\n{"name": "w", "arguments": {"s": "a</tool_call>b"}}\n</tool_call>'
    parser = OutputParser(HERMES, "", True)
    events = [event for char in text for event in parser.feed(TextSpan(char), True)]
    assert "".join(texts(events)) == '{"s": "a</tool_call>b"}'
    assert parser.calls_finished == 1


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("coder", "<tool_call>\n<function=get>\n<parameter=s>\n{}\n</parameter>\n</function>"),
        ("pairs", "<tool_call>get\n<arg_key>s</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>"),
        ("typed", '<|tool_call>call:get{{s:<|"|>{}<|"|>}}<tool_call|>'),
    ],
)
def test_delimiter_in_a_value_does_not_end_a_constrained_call(name: str, text: str) -> None:
    string = "a </function> b</tool_call><|tool_call>}<tool_call|> c"
    parser = OutputParser(output_format_of(name), "", True, [WEATHER])
    events = [event for char in text.format(string) for event in parser.feed(TextSpan(char), True)]
    assert json.loads("".join(texts(events))) == {"s": string}
    assert parser.calls_finished == 1
    cut = read(output_format_of(name), text.format(string))
    assert cut["content"]


def test_endless_spaces_and_delimiters_take_linear_time() -> None:
    """Four times as many take about four times as long, not sixteen."""
    for output_format, text in (
        (HERMES, (" " * 4000 + "x") * 20),
        (output_format_of("llama"), "\n" * 20_000 + "x"),
        (output_format_of("bare python"), "[\n" + " " * 20_000 + "x"),
        (output_format_of("channels"), " " * 20_000 + "x"),
        (output_format_of("args"), "[TOOL_CALLS]" * 8000),
        (output_format_of("coder"), "<tool_call> <function" * 4000),
        (output_format_of("channels"), "<|channel|>" * 4000),
        (
            output_format_of("section"),
            "<think>" + "<calls><call>functions.get:0<args>{}</call>" * 2000,
        ),
    ):
        fewer, _ = parsed_by_pieces(output_format, text[: len(text) // 4])
        seconds, events = parsed_by_pieces(output_format, text)
        assert seconds < 8 * fewer + 0.2
        assert "".join(texts(events)).strip()[:9999] == text.removeprefix("<think>").strip()[:9999]


@pytest.mark.parametrize("header", ["<|channel|>to=a", " to=functions.get_it<|channel|>comment"])
def test_endless_headers_take_linear_time(header: str) -> None:
    text = header * 100
    seconds, events = parsed_by_pieces(output_format_of("channels"), text)
    assert seconds < 0.5
    assert text.strip().startswith("".join(texts(events)).strip())
    started = time.thread_time()
    OutputParser(output_format_of("channels"), text * 10, True, [WEATHER])
    assert time.thread_time() - started < 1


def parsed_by_pieces(output_format: Any, text: str) -> tuple[float, list[Any]]:
    """Parse a text in chunks of 16 characters; return CPU seconds and the events."""
    parser = OutputParser(output_format, "", True)
    gc.disable()  # a collection would traverse the objects of other tests
    started = time.thread_time()
    events = []
    for at in range(0, len(text), 16):
        events += parser.feed(piece(text[at : at + 16], at))
    events += parser.finish()
    seconds = time.thread_time() - started
    gc.enable()
    return seconds, events
