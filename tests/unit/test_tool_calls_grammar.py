"""Grammars constrain calls of every format: names, keys, types, listed values, required properties,
items, alternatives and references at any depth. Strings without JSON's quotes are free."""

import json
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import jsonschema_rs
import pytest
from llguidance import LLMatcher, LLTokenizer

from batching.errors import InvalidInput
from tests.call_formats import NAMES, accepts, call_format_of, call_text, output_format_of
from worker.grammar.constraint_builder import ConstraintBuilder
from worker.grammar.lark import FORMATS
from worker.grammar.tool_calls import tool_calls_grammar
from worker.messages.generation import Chat, Constraint, GenerationInput, ToolCallPolicy
from worker.text.output_format import DEFAULT_OUTPUT_FORMAT
from worker.text.tool_call_format import ID, ToolCallFormat
from worker.text.tool_call_parser import parameter_types, read_value

TAGS, PYTHON = ["coder", "pairs"], ["python", "bare python"]
FREE = [*TAGS, "typed"]  # their strings are free
NOT_JSON = [*FREE, *PYTHON]
JSON = [name for name in NAMES if name not in NOT_JSON]
GOOD = {
    "date-time": ["2024-02-29T23:59:59.12Z", "1999-12-31t00:00:00+05:30"],
    "time": ["00:00:00Z"],
    "date": ["2024-02-29", "2000-02-29", "2023-12-31"],
    "duration": ["P1Y2M3DT4H", "PT5M", "P2W"],
    "email": ["a.b@c.de", "x@[1.2.3.4]"],
    "hostname": ["a", "a-b.c1"],
    "ipv4": ["255.0.10.199"],
    "ipv6": ["::", "::1", "1::", "2001:db8::1:2", "1:2:3:4:5:6:7:8", "1:2:3:4:5:6:7::"],
    "uuid": ["123e4567-e89b-12d3-a456-426614174000"],
    "uri": ["http://a@b.c:80/d/e?f#g", "mailto:x@y", "urn:a:b", "file:///x", "http://[::1]/"],
}
BAD = {
    "date-time": ["2024-02-29", "2024-01-01T24:00:00Z", "2024-01-01T00:00:00"],
    "time": ["00:00:00", "1:00:00Z"],
    "date": ["2024-13-01", "2024-04-31", "24-01-01"],
    "duration": ["P", "PT", "1D", "P1DT"],
    "email": ["a", "@b", ".a@b", "a@"],
    "hostname": ["-a", "a-", "a..b", "a_b"],
    "ipv4": ["256.0.0.1", "1.2.3", "01.2.3.4"],
    "ipv6": ["1", "1:2:3:4:5:6:7:8:9", ":::", "1::2::3"],
    "uuid": ["123e4567e89b12d3a456426614174000"],
    "uri": ["a", "//b", "1:a", "a:b c"],
}
BOOLEAN, INTEGER, STRING = ({"type": kind} for kind in ("boolean", "integer", "string"))


def record(*required: str, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*required]}


def array(items: Any, **more: Any) -> dict[str, Any]:
    return {"type": "array", "items": items, **more}


def of(name: str) -> dict[str, str]:
    return {"$ref": f"#/$defs/{name}"}


MIXED = record(
    "s",
    b=BOOLEAN,
    c=STRING | {"enum": ["red", "green"]},
    l=array(STRING),
    n=INTEGER,
    o=record("k", k={"type": "number"}),
    s=STRING,
)
HELD = record(
    "z",
    a=STRING,
    b=BOOLEAN | {"enum": [True]},
    c={"enum": [1, "x"]},
    d={"const": "only"},
    e={},
    z=INTEGER,
)
BOUND = record(
    "s",
    s=STRING | {"minLength": 2, "maxLength": 4},
    p=STRING | {"pattern": "^[a-c]+/[0-9]{2}$"},
)
REFERS = record("n", n=of("count"), l={"items": of("count")})
REFERS["$defs"] = {"count": INTEGER | {"minimum": 3, "maximum": 5}}
COLOR = record(c={"anyOf": [of("color"), {"type": "null"}, {"const": 3}]})
COLOR["$defs"] = {"color": {"enum": ["red", "blue"]}}
EITHER = record(a=INTEGER, b={"type": "null"})
EITHER["anyOf"] = [{"required": ["a"]}, {"required": ["b"]}]
NEST = array(array(INTEGER, maxItems=1), minItems=2)
IPV4 = STRING | {"format": "ipv4"}
NESTED = record(
    or_null={"anyOf": [STRING | {"format": "uuid"}, {"type": "null"}]},
    list=array(IPV4, minItems=1, maxItems=2),
    first=array(False, prefixItems=[INTEGER, BOOLEAN], minItems=1),
    none={"type": "array", "maxItems": 0},
    object=record("at", at=of("time"), nest=NEST),
    map={"type": "object", "additionalProperties": INTEGER, "minProperties": 1},
    text_or_list={"type": ["string", "array"], "minItems": 2},
    text_or_number={"type": ["string", "integer"], "minimum": 5},
    any_format=STRING | {"format": "nonsense"},
    undefined={"anyOf": [{"anyOf": [{"not": {}}, array(INTEGER)]}, {"type": "null"}]},  # zod's
    unique={"type": "array", "uniqueItems": True, "contains": {"const": 3}},
    choice={"enum": [[1, "x"], {"k": "v"}, "s"]},
    tree=of("tree"),
    both={"allOf": [STRING, {"pattern": "^a/"}, {"maxLength": 4}]},
)
NESTED["$defs"] = {
    "time": {"allOf": [STRING, {"format": "time"}]},
    "tree": record(next=array(of("tree"), maxItems=1)),
}
AT = "00:00:00Z"
# With the formats that accept the arguments: all, none, or those that take more than JSON does.
ARGUMENTS: list[tuple[dict[str, Any], dict[str, Any], bool | list[str]]] = [
    (MIXED, {"b": True, "c": "red", "l": ["y"], "n": 2, "o": {"k": 1.5}, "s": "x, <b>"}, True),
    (MIXED, {"s": "it's"}, True),
    (MIXED, {"n": 2}, False),
    (MIXED, {"s": "x", "n": "two"}, False),
    (MIXED, {"c": "blue", "s": "x"}, False),
    (MIXED, {"s": "x", "z": 1}, False),
    (HELD, {"z": 1}, True),
    (HELD, {"a": "x", "z": 1}, True),
    (HELD, {"b": True, "c": 1, "d": "only", "e": 2, "z": 1}, True),
    (HELD, {"e": "x", "z": 1}, True),
    (HELD, {}, False),  # a required property after an optional one
    (HELD, {"a": "x"}, False),
    (HELD, {"b": False, "z": 1}, False),
    (HELD, {"c": 2, "z": 1}, False),
    (HELD, {"c": "y", "z": 1}, False),
    (HELD, {"d": "other", "z": 1}, False),
    (BOUND, {"s": "abc", "p": "ab/12"}, True),
    (BOUND, {"s": "a", "p": "ab/12"}, FREE),
    (BOUND, {"s": "abcde", "p": "ab/12"}, FREE),
    (BOUND, {"s": "abc", "p": "x"}, FREE),
    (REFERS, {"n": 4}, True),
    (REFERS, {"n": 7}, False),
    (REFERS, {"n": "four"}, False),
    (COLOR, {"c": "red"}, True),
    (COLOR, {"c": None}, True),
    (COLOR, {"c": 3}, True),
    (COLOR, {"c": "green"}, False),
    (COLOR, {"c": 4}, False),
    (EITHER, {"a": 1}, True),
    (EITHER, {"b": None}, True),
    (EITHER, {}, False),
    *(
        (NESTED, {key: value}, good)
        for key, value, good in (
            ("or_null", GOOD["uuid"][0], True),
            ("or_null", None, True),
            ("or_null", "x", FREE),
            ("list", ["1.2.3.4"], True),
            ("list", ["1.2.3.4"] * 2, True),
            ("list", [], False),
            ("list", ["1.2.3.4"] * 3, False),
            ("list", ["x"], ["typed"]),
            ("first", [1], True),
            ("first", [1, True], True),
            ("first", [], False),
            ("first", [1, True, 1], ["typed"]),
            ("first", [True], ["typed"]),
            ("none", [], True),
            ("none", [1], False),
            ("object", {"at": AT}, True),
            ("object", {"at": AT, "nest": [[1], []]}, True),
            ("object", {}, False),
            ("object", {"at": "0"}, ["typed"]),
            ("object", {"at": AT, "nest": [[1]]}, False),
            ("object", {"at": AT, "nest": [[1, 2], [1]]}, False),
            ("map", {"k": 1}, True),
            ("map", {}, ["typed"]),
            ("map", {"k": "v"}, False),
            ("text_or_list", [1, 2], True),
            ("text_or_list", "see [1]", True),
            ("text_or_list", [1], TAGS),
            ("text_or_number", 7, True),
            ("text_or_number", "3 Main Street", True),
            ("text_or_number", 3, TAGS),
            ("any_format", "any", True),
            ("undefined", [1], True),
            ("undefined", None, True),
            ("undefined", {}, False),
            ("unique", [1, 1], True),  # not enforced in JSON either
            ("choice", [1, "x"], True),
            ("choice", {"k": "v"}, True),
            ("choice", "s", True),
            ("choice", [2], False),
            ("tree", {"next": [{"next": [{}]}]}, True),
            ("tree", {"next": [{"next": [{}, {}]}]}, False),
            ("tree", {"next": [1]}, False),
            ("both", "a/b", True),
            ("both", "b/a", FREE),
            ("both", "a/bcd", FREE),
        )
    ),
    # properties that are named as keywords
    *((record("not", **{"not": {}}), {"not": value}, True) for value in ("a", 1)),
    (record(**{"not": {}}, propertyNames=STRING), {"propertyNames": "a"}, True),
    (record(propertyNames=STRING), {"propertyNames": 1}, TAGS),
    # types that JSON schema does not know
    *(
        ({"type": "dict", "properties": {"n": {"type": kind}}, "required": ["n"]}, arguments, good)
        for kind in ("any", "int", ["string", "int"])
        for arguments, good in (({"n": 7}, True), ({"m": 7}, False))
    ),
]


def tool(parameters: Any, name: str = "get") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [tool(MIXED), {"type": "function", "function": {"name": "put"}}]


def takes(
    call_format: ToolCallFormat,
    text: str,
    tools: Sequence[Any] = TOOLS,
    several: bool = True,
    started: bool = False,
) -> bool:
    grammar = tool_calls_grammar(call_format, tools, several, json.dumps, started=started)
    return accepts(grammar, text)


@pytest.mark.parametrize(("schema", "arguments", "good"), ARGUMENTS)
def test_arguments_are_constrained_by_their_schema(
    schema: dict[str, Any], arguments: dict[str, Any], good: bool | list[str]
) -> None:
    accepting = good if isinstance(good, list) else NAMES * good
    for name in NAMES:
        text = call_text(name, arguments)
        assert takes(call_format_of(name), text, [tool(schema)]) == (name in accepting), text
        if schema is MIXED and good:
            other = text.replace("get", "set", 1)
            assert not takes(call_format_of(name), other, [tool(schema)])


@pytest.mark.parametrize("key", sorted(FORMATS))
@pytest.mark.parametrize("name", PYTHON)
def test_strings_have_their_format(name: str, key: str) -> None:
    tools = [tool({"properties": {"s": {"type": "string", "format": key}}})]
    for texts, good in ((GOOD[key], True), (BAD[key], False)):
        for text in texts:
            assert jsonschema_rs.is_valid({"format": key}, text, validate_formats=True) == good
            assert takes(call_format_of(name), call_text(name, {"s": text}), tools) == good, text


@pytest.mark.parametrize("name", PYTHON)
def test_python_arguments_have_their_keys_and_either_quotes(name: str) -> None:
    for entries, good in (
        ("a='it\\'s', c='x', d='only', e='x', z=1", True),
        ("c='y', z=1", False),
        ("'x', z=1", False),
    ):
        text = call_format_of(name).render([("get", entries)])
        assert takes(call_format_of(name), text, [tool(HELD)]) == good, text


@pytest.mark.parametrize("name", FREE)
def test_strings_without_quotes_of_json_are_free(name: str) -> None:
    schema = {"type": "string", "format": "uuid", "pattern": "^a", "minLength": 5}
    tools = [tool({"properties": {"s": schema}})]
    for text in ("x", "</b>\n\n<b>", "a 'b' \"c\"\\", "7"):
        assert takes(call_format_of(name), call_text(name, {"s": text}), tools), text


@pytest.mark.parametrize("name", [name for name in NAMES if name != "llama"])
def test_several_calls_only_where_allowed(name: str) -> None:
    call_format = call_format_of(name)
    empty = "{}" if name in JSON else ""
    two = call_format.render([("put", empty), ("put", empty)]).replace(ID, "id1").lstrip()
    assert takes(call_format, two)
    assert not takes(call_format, two, several=False)


def test_call_started_in_a_section_is_constrained() -> None:
    call_format = call_format_of("section")
    within = "<call>functions.put:1<args>{}</call>"
    assert takes(call_format, f"<calls>{within}</calls>", started=True)
    assert takes(call_format, f"{within}</calls>", started=True)
    assert not takes(call_format, f"{within}</calls>")


def test_calls_and_documents_have_their_own_headers() -> None:
    header = "<|channel|>final<|message|>"
    call = ' to=functions.get<|channel|>commentary json<|message|>{"s": "x"}<|call|>'
    calls = tool_calls_grammar(
        call_format_of("channels"), TOOLS, False, json.dumps, ["<|start|>assistant"]
    )
    for text in (f"<|start|>assistant{call}", call.lstrip()):
        assert accepts(calls, text), text
    builder, grammars = ConstraintBuilder.__new__(ConstraintBuilder), list[str]()
    compiler = SimpleNamespace(
        quote=json.dumps, compile=lambda grammar, _: grammars.append(grammar)
    )
    builder._template, builder.grammars = SimpleNamespace(), compiler  # type: ignore[assignment]
    chat = Chat(({"role": "user", "content": "?"},), (tool(MIXED),))
    constraint = Constraint("json_schema", {"type": "object"}, "response_format")
    request = GenerationInput(chat, tool_policy=ToolCallPolicy(("get",)), constraint=constraint)
    builder.build(request, output_format_of("channels"), "")
    for text in (
        "{}",
        f"{header}{{}}",
        f"<|start|>assistant{header}{{}}",
        f"<|start|>assistant{call}",
    ):
        assert accepts(grammars[-1], text), text


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
        # refused by llguidance, but no internal errors
        {"properties": {"a": {"type": ["string", 3, {}]}}, "required": [["a"], {}]},
        {"properties": {"a": {"anyOf": 3}}, "required": [["a"], {}]},
        {"properties": {"a": {"properties": {"k": {}}, "required": True}}, "required": [["a"], {}]},
    ],
)
@pytest.mark.parametrize("name", [*NAMES, "plain"])
def test_any_schema_has_a_grammar(name: str, schema: Any) -> None:
    call_format = DEFAULT_OUTPUT_FORMAT.tool_calls if name == "plain" else call_format_of(name)
    assert call_format is not None
    grammar = tool_calls_grammar(call_format, [tool(schema)], True, json.dumps)
    is_refused = isinstance(schema, dict) and schema.get("required") == [["a"], {}]
    is_odd = isinstance(schema, dict) and schema.get("properties") in (3, {"a": 7})
    if is_refused:
        assert read_value("1", parameter_types(tool(schema))["a"]) is not None
    elif name in NOT_JSON or not is_odd:  # llguidance reads the schema itself in JSON
        assert not LLMatcher(LLTokenizer("byte"), grammar).get_error()


@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": {"a": False}, "required": ["a"]},
        {"properties": {"a": {"type": "array", "minItems": 3, "maxItems": 2}}, "required": ["a"]},
    ],
)
def test_unsatisfiable_schemas_are_errors(parameters: Any) -> None:
    with pytest.raises((InvalidInput, AssertionError)):
        takes(call_format_of("coder"), "", [tool(parameters)])


def test_hostile_schemas_cost_little() -> None:
    many = {"type": "object", "properties": {f"k{n}": {"$ref": "#/$defs/a"} for n in range(20)}}
    either = {"anyOf": [{"properties": {"x": {"minLength": n}}} for n in range(10)]}
    deep: dict[str, Any] = {"type": "array"}
    for _ in range(500):
        deep = {"type": "array", "items": deep}
    for schema, refused in (
        ({"properties": {"a": deep}}, True),
        ({"properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": many}}, False),
        ({"properties": {"a": {"allOf": [dict(either) for _ in range(10)]}}}, True),
        ({"properties": {"a": {"anyOf": [{"$ref": "#/properties/a"}] * 3}}}, True),
    ):
        started = time.process_time()
        try:
            result = len(
                tool_calls_grammar(call_format_of("typed"), [tool(schema)], True, json.dumps)
            )
            assert not refused
            assert result < 100_000
        except InvalidInput:
            assert refused
        assert time.process_time() - started < 2


@pytest.mark.parametrize("name", ["coder", "python", "typed"])
def test_shared_definitions_are_written_once(name: str) -> None:
    shared = {f"d{n}": {"type": "string", "pattern": "d" * 900} for n in range(20)}
    numbers = {f"k{n}": {"type": "number", "description": "d" * 900} for n in range(100)}
    tree = {"type": "array", "items": {"$ref": "#/$defs/d0"}}
    schema = {"$defs": shared, "properties": {**numbers, "t": tree}}
    result = tool_calls_grammar(call_format_of(name), [tool(schema)], True, json.dumps)
    assert len(result) < 60_000
    assert not LLMatcher(LLTokenizer("byte"), result).get_error()


def test_size_of_a_grammar_is_bounded_while_it_is_written() -> None:
    shared = {f"d{n}": {"type": "string", "pattern": "d" * 900} for n in range(100)}
    many = {f"k{n}": {"type": "array", "items": {"$ref": "#/$defs/d0"}} for n in range(800)}
    parameters = {"$defs": shared, "properties": many}
    with pytest.raises(InvalidInput, match="too long"):
        tool_calls_grammar(call_format_of("coder"), [tool(parameters)], True, json.dumps)
