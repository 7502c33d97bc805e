"""Grammars constrain calls of every format: names, keys, types, choices, required properties."""

import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from tests.unit.test_parser import CALL_FORMATS, HARMONY
from worker.grammar.constraint_builder import ConstraintBuilder
from worker.grammar.tool_calls import tool_calls_grammar
from worker.messages.generation import Chat, Constraint, GenerationInput, ToolCallPolicy
from worker.text.output_format import DEFAULT_OUTPUT_FORMAT
from worker.text.tool_call_format import ToolCallFormat
from worker.text.tool_call_parser import parameter_types, read_value

TOOL = {
    "type": "function",
    "function": {
        "name": "get",
        "parameters": {
            "type": "object",
            "properties": {
                "s": {"type": "string"},
                "n": {"type": "integer"},
                "c": {"type": "string", "enum": ["red", "green"]},
                "b": {"type": "boolean"},
                "l": {"type": "array", "items": {"type": "string"}},
                "o": {"type": "object", "properties": {"k": {"type": "number"}}, "required": ["k"]},
            },
            "required": ["s"],
        },
    },
}
TOOLS = [TOOL, {"type": "function", "function": {"name": "put"}}]
JSON = [
    ('{"s": "x", "n": 2, "c": "red", "b": true, "l": ["y"], "o": {"k": 1.5}}', True),
    ('{"s": "x"}', True),
    ('{"n": 2}', False),
    ('{"s": "x", "n": "2"}', False),
    ('{"s": "x", "c": "blue"}', False),
    ('{"s": "x", "z": 1}', False),
]
PYTHON = [
    ('s="x", n=2, c=\'red\', b=True, l=["y"], o={"k": 1.5}', True),
    ("s='it\\'s'", True),
    ("n=2", False),
    ('s="x", n="2"', False),
    ('s="x", c="blue"', False),
    ('s="x", z=1', False),
]
TAGS = [
    ([("s", "x <b>"), ("n", "2"), ("c", "red"), ("b", "true"), ("l", '["y"]')], True),
    ([("s", 'a\nb "c"')], True),
    ([("n", "2")], False),
    ([("s", "x"), ("n", "two")], False),
    ([("s", "x"), ("c", "blue")], False),
    ([("s", "x"), ("z", "1")], False),
]
Q = '<|"|>'
TYPED = [
    (f"s:{Q}x, y{Q},n:2,c:{Q}red{Q},b:true,l:[{Q}y{Q}],o:{{k:1.5}}", True),
    (f"b:true,s:{Q}x{Q}", True),  # sorted by name
    ("n:2", False),
    (f"s:{Q}x{Q},n:{Q}2{Q}", False),
    (f"s:{Q}x{Q},c:{Q}blue{Q}", False),
    (f"s:{Q}x{Q},z:1", False),
]


def takes(
    call_format: ToolCallFormat,
    text: str,
    several: bool = True,
    started: bool = False,
    tools: Sequence[Any] = TOOLS,
) -> bool:
    """Whether the grammar accepts the text as a whole output."""
    tokenizer = LLTokenizer("byte")
    grammar = tool_calls_grammar(call_format, tools, several, json.dumps, started=started)
    matcher = LLMatcher(tokenizer, grammar)
    assert not matcher.get_error()
    tokens = tokenizer.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def rendered(call_format: ToolCallFormat, entries: list[tuple[str, str]]) -> str:
    arguments = call_format.arguments
    return "".join(
        arguments.open + key + arguments.middle + value + arguments.close for key, value in entries
    )


CASES = [
    *(
        (name, text, good)
        for name in ("args", "list", "key", "llama", "section")
        for text, good in JSON
    ),
    *((name, text, good) for name in ("python", "bare python") for text, good in PYTHON),
    *(
        (name, rendered(CALL_FORMATS[name], entries), good)
        for name in ("coder", "pairs")
        for entries, good in TAGS
    ),
    *(("typed", text, good) for text, good in TYPED),
]


@pytest.mark.parametrize(("name", "arguments", "good"), CASES)
def test_arguments_are_constrained_by_their_schema(name: str, arguments: str, good: bool) -> None:
    call_format = CALL_FORMATS[name]
    text = call_format.render([("get", arguments)]).replace("\1", "id1").lstrip()
    assert takes(call_format, text) == good
    assert not takes(call_format, text.replace("get", "set", 1))


BOUND = {
    "properties": {
        "s": {"type": "string", "minLength": 2, "maxLength": 4},
        "p": {"type": "string", "pattern": "^[a-c]+/[0-9]{2}$"},
    },
    "required": ["s"],
}


@pytest.mark.parametrize("name", ["python", "bare python"])
@pytest.mark.parametrize(
    ("s", "p", "good"),
    [("abc", "ab/12", True), ("a", "ab/12", False), ("abcde", "ab/12", False), ("abc", "x", False)],
)
def test_strings_have_their_length_and_pattern(name: str, s: str, p: str, good: bool) -> None:
    call_format = CALL_FORMATS[name]
    text = call_format.render([("get", f's="{s}", p="{p}"')])
    tool = {"type": "function", "function": {"name": "get", "parameters": BOUND}}
    assert takes(call_format, text, tools=[tool]) == good


REFERS = {
    "properties": {"n": {"$ref": "#/$defs/count"}, "l": {"items": {"$ref": "#/$defs/count"}}},
    "required": ["n"],
    "$defs": {"count": {"type": "integer", "minimum": 3, "maximum": 5}},
}


@pytest.mark.parametrize(
    ("name", "arguments", "good"),
    [
        ("python", "n=4", True),
        ("python", "n=7", False),
        ("typed", "n:4", True),
        ("typed", 'n:<|"|>4<|"|>', False),
        ("coder", rendered(CALL_FORMATS["coder"], [("n", "4")]), True),
        ("coder", rendered(CALL_FORMATS["coder"], [("n", "four")]), False),
    ],
)
def test_referenced_schemas_constrain(name: str, arguments: str, good: bool) -> None:
    call_format = CALL_FORMATS[name]
    tool = {"type": "function", "function": {"name": "get", "parameters": REFERS}}
    assert takes(call_format, call_format.render([("get", arguments)]), tools=[tool]) == good


PARALLEL_FORMATS = [name for name in CALL_FORMATS if CALL_FORMATS[name].separator is not None]


@pytest.mark.parametrize("name", PARALLEL_FORMATS)
def test_several_calls_only_where_allowed(name: str) -> None:
    call_format = CALL_FORMATS[name]
    empty = "{}" if call_format.arguments.style == "json" else ""
    two = call_format.render([("put", empty), ("put", empty)]).replace("\1", "id1").lstrip()
    assert takes(call_format, two)
    assert not takes(call_format, two, several=False)


def test_call_started_in_a_section_is_constrained() -> None:
    call_format = CALL_FORMATS["section"]
    within = "<call>functions.put:1<args>{}</call>"
    assert takes(call_format, f"<calls>{within}</calls>", started=True)
    assert takes(call_format, f"{within}</calls>", started=True)
    assert not takes(call_format, f"{within}</calls>")


def test_message_start_may_precede_a_call() -> None:
    call_format = HARMONY.tool_calls
    assert call_format is not None
    tokenizer = LLTokenizer("byte")
    grammar = tool_calls_grammar(call_format, TOOLS, False, json.dumps, ["<|start|>assistant"])
    text = " to=functions.put<|channel|>commentary json<|message|>{}<|call|>"
    for begins in ("<|start|>assistant", ""):
        matcher = LLMatcher(tokenizer, grammar)
        tokens = tokenizer.tokenize_str((begins + text) if begins else text.lstrip())
        assert matcher.try_consume_tokens(tokens) == len(tokens)


class GrammarRecorder:
    """In place of GrammarCompiler: records the grammar."""

    quote = staticmethod(json.dumps)

    def compile(self, grammar: str, param: str) -> None:
        self.grammar = grammar


def test_document_instead_of_calls_has_its_own_header() -> None:
    builder: Any = ConstraintBuilder.__new__(ConstraintBuilder)
    builder._template, builder.grammars = SimpleNamespace(), GrammarRecorder()
    chat = Chat(({"role": "user", "content": "?"},), (TOOL,))
    constraint = Constraint("json_schema", {"type": "object"}, "response_format")
    request = GenerationInput(chat, tool_policy=ToolCallPolicy(("get",)), constraint=constraint)
    builder.build(request, HARMONY, "")
    tokenizer = LLTokenizer("byte")
    header = "<|channel|>final<|message|>"
    call = ' to=functions.get<|channel|>commentary json<|message|>{"s": "x"}<|call|>'
    for text in (
        "{}",
        header + "{}",
        f"<|start|>assistant{header}{{}}",
        f"<|start|>assistant{call}",
    ):
        matcher = LLMatcher(tokenizer, builder.grammars.grammar)
        tokens = tokenizer.tokenize_str(text)
        assert matcher.try_consume_tokens(tokens) == len(tokens), text
        assert matcher.is_accepting()


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {"anyOf": [{"type": "string"}, {"type": "null"}]}}},
        {"properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"type": "string"}}},
        {"properties": {"a": {}, "b": {"enum": [1, "x"]}, "c": {"type": ["integer", "null"]}}},
        {"properties": {"a": {"type": "object"}, "b": {"type": "array"}}},
        {"properties": {'a "b"': {"type": "string"}, "</x>": {"type": "array", "items": {}}}},
        {"properties": 3, "required": "a"},
        {"properties": {"a": 7}, "required": ["a", "b", 1]},
        [],
        None,
    ],
)
@pytest.mark.parametrize("name", [*CALL_FORMATS, "plain"])
def test_any_schema_has_a_grammar(name: str, schema: object) -> None:
    call_format = DEFAULT_OUTPUT_FORMAT.tool_calls if name == "plain" else CALL_FORMATS[name]
    assert call_format is not None
    tool = {"type": "function", "function": {"name": "get", "parameters": schema}}
    if name not in ("coder", "pairs", "typed", "python", "bare python") and (
        not isinstance(schema, dict) or schema.get("properties") in (3, {"a": 7})
    ):
        pytest.skip("not an object schema: left to llguidance")
    matcher = LLMatcher(
        LLTokenizer("byte"), tool_calls_grammar(call_format, [tool], True, json.dumps)
    )
    assert not matcher.get_error()


HELD = {
    "properties": {
        "a": {"type": "string"},
        "b": {"type": "boolean", "enum": [True]},
        "c": {"enum": [1, "x"]},
        "d": {"const": "only"},
        "e": {},
        "z": {"type": "integer"},
    },
    "required": ["z"],
}


def entry(name: str, key: str, value: object) -> str:
    """Write an argument in a format; Python strings in single quotes."""
    argument_format = CALL_FORMATS[name].arguments
    if argument_format.style == "python":
        return f"{key}={value!r}"
    text = (
        f"{argument_format.quotes}{value}{argument_format.quotes}"
        if isinstance(value, str)
        else json.dumps(value)
    )
    return argument_format.open + key + argument_format.middle + text + argument_format.close


@pytest.mark.parametrize("name", ["coder", "pairs", "typed", "python", "bare python"])
@pytest.mark.parametrize(
    ("arguments", "good"),
    [
        ({"z": 1}, True),
        ({"a": "x", "z": 1}, True),
        ({"b": True, "c": 1, "d": "only", "e": 2, "z": 1}, True),
        ({}, False),  # a required property after an optional one
        ({"a": "x"}, False),
        ({"b": False, "z": 1}, False),
        ({"c": 2, "z": 1}, False),
        ({"c": "y", "z": 1}, False),
        ({"d": "other", "z": 1}, False),
    ],
)
def test_required_properties_and_choices(name: str, arguments: dict[str, Any], good: bool) -> None:
    call_format = CALL_FORMATS[name]
    joined = call_format.arguments.comma.join(entry(name, *item) for item in arguments.items())
    tool = {"type": "function", "function": {"name": "get", "parameters": HELD}}
    assert takes(call_format, call_format.render([("get", joined)]), tools=[tool]) == good


@pytest.mark.parametrize(
    "schema",
    [
        {"type": ["string", 3, {}]},
        {"anyOf": 3},
        {"type": "object", "properties": {"k": {}}, "required": True},
    ],
)
@pytest.mark.parametrize("name", [*CALL_FORMATS, "plain"])
def test_invalid_schemas_raise_no_internal_error(name: str, schema: dict[str, Any]) -> None:
    call_format = DEFAULT_OUTPUT_FORMAT.tool_calls if name == "plain" else CALL_FORMATS[name]
    assert call_format is not None
    parameters = {"properties": {"a": schema}, "required": [["a"], {}]}
    function = {"name": "get", "parameters": parameters}
    assert tool_calls_grammar(call_format, [{"function": function}], True, json.dumps)
    assert read_value("1", parameter_types({"function": function})["a"]) is not None


def test_untyped_python_arguments_have_their_keys() -> None:
    tool = {"type": "function", "function": {"name": "get", "parameters": HELD}}
    assert takes(CALL_FORMATS["python"], "<|calls|>[get(e='x', z=1)]<|end_calls|>", tools=[tool])
    assert not takes(CALL_FORMATS["python"], "<|calls|>[get('x', z=1)]<|end_calls|>", tools=[tool])


@pytest.mark.parametrize("kind", ["any", "int", ["string", "int"]])
@pytest.mark.parametrize("name", ["llama", "coder", "python"])
def test_types_unknown_to_json_are_unconstrained(name: str, kind: Any) -> None:
    parameters = {"type": "dict", "properties": {"n": {"type": kind}}, "required": ["n"]}
    tool = {"type": "function", "function": {"name": "get", "parameters": parameters}}
    call_format = CALL_FORMATS[name]
    arguments = {
        "llama": '{"n": 7}',
        "coder": rendered(call_format, [("n", "7")]),
        "python": "n=7",
    }[name]
    assert takes(call_format, call_format.render([("get", arguments)]), tools=[tool])
    assert not takes(
        call_format, call_format.render([("get", arguments.replace("n", "m"))]), tools=[tool]
    )
