"""Grammars constrain arguments that are not JSON: types, listed values, required properties, items,
alternatives and references at any depth. Strings without JSON's quotes are free."""

import json
import time
from typing import Any

import jsonschema_rs
import pytest
from llguidance import LLMatcher, LLTokenizer

from batching.errors import InvalidInput
from tests.unit.test_parser import CALL_FORMATS
from tests.unit.test_tool_calls_grammar import takes
from worker.grammar.lark import FORMATS
from worker.grammar.tool_calls import tool_calls_grammar

TAGS, PYTHON = ["coder", "pairs"], ["python", "bare python"]
NOT_JSON = [*TAGS, "typed", *PYTHON]
FREE = [*TAGS, "typed"]  # their strings are free
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
NEST = {
    "type": "array",
    "minItems": 2,
    "items": {"type": "array", "maxItems": 1, "items": {"type": "integer"}},
}
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "or_null": {"anyOf": [{"type": "string", "format": "uuid"}, {"type": "null"}]},
        "list": {
            "type": "array",
            "items": {"type": "string", "format": "ipv4"},
            "minItems": 1,
            "maxItems": 2,
        },
        "first": {
            "type": "array",
            "prefixItems": [{"type": "integer"}, {"type": "boolean"}],
            "items": False,
            "minItems": 1,
        },
        "none": {"type": "array", "maxItems": 0},
        "object": {
            "type": "object",
            "properties": {"at": {"$ref": "#/$defs/time"}, "nest": NEST},
            "required": ["at"],
        },
        "map": {
            "type": "object",
            "additionalProperties": {"type": "integer"},
            "minProperties": 1,
        },
        "text_or_list": {"type": ["string", "array"], "minItems": 2},
        "text_or_number": {"type": ["string", "integer"], "minimum": 5},
        "any_format": {"type": "string", "format": "nonsense"},
        "unique": {"type": "array", "uniqueItems": True, "contains": {"const": 3}},
        "choice": {"enum": [[1, "x"], {"k": "v"}, "s"]},
        "tree": {"$ref": "#/$defs/tree"},
        "both": {"allOf": [{"type": "string"}, {"pattern": "^a/"}, {"maxLength": 4}]},
    },
    "$defs": {
        "time": {"allOf": [{"type": "string"}, {"format": "time"}]},
        "tree": {
            "type": "object",
            "properties": {
                "next": {"type": "array", "maxItems": 1, "items": {"$ref": "#/$defs/tree"}}
            },
        },
    },
}
AT = "00:00:00Z"
# With the formats that accept an argument: all, none, or those that take more than JSON does.
ARGUMENTS: list[tuple[str, Any, bool | list[str]]] = [
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
]


def rendered(name: str, key: str, value: Any) -> str:
    """Return the text of a call with this argument."""
    form = CALL_FORMATS[name].arguments
    if form.style == "python":
        shown = f"{key}={'None' if value is None else json.dumps(value)}"
    else:
        shown = form.open + key + form.middle + entry(form.quotes, value) + form.close
    return CALL_FORMATS[name].render([("get", shown)])


def entry(quotes: str, value: Any) -> str:
    if isinstance(value, str):
        return f"{quotes}{value}{quotes}"
    if quotes and isinstance(value, list):
        return f"[{','.join(entry(quotes, item) for item in value)}]"
    if quotes and isinstance(value, dict):
        return f"{{{','.join(f'{key}:{entry(quotes, item)}' for key, item in value.items())}}}"
    return json.dumps(value)


def tool(parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "get", "parameters": parameters}}


@pytest.mark.parametrize("key", sorted(FORMATS))
@pytest.mark.parametrize("name", PYTHON)
def test_strings_have_their_format(name: str, key: str) -> None:
    tools = [tool({"properties": {"s": {"type": "string", "format": key}}})]
    for text in GOOD[key]:
        assert jsonschema_rs.is_valid({"format": key}, text, validate_formats=True)
        assert takes(CALL_FORMATS[name], rendered(name, "s", text), tools=tools), text
    for text in BAD[key]:
        assert not jsonschema_rs.is_valid({"format": key}, text, validate_formats=True)
        assert not takes(CALL_FORMATS[name], rendered(name, "s", text), tools=tools), text


@pytest.mark.parametrize("name", FREE)
def test_strings_without_quotes_of_json_are_free(name: str) -> None:
    schema = {"type": "string", "format": "uuid", "pattern": "^a", "minLength": 5}
    for text in ("x", "</b>\n\n<b>", "a 'b' \"c\"\\", "7"):
        shown = rendered(name, "s", text)
        assert takes(CALL_FORMATS[name], shown, tools=[tool({"properties": {"s": schema}})]), text


@pytest.mark.parametrize(("key", "value", "good"), ARGUMENTS)
def test_arguments_are_constrained_as_in_json(key: str, value: Any, good: bool | list[str]) -> None:
    accepting = good if isinstance(good, list) else NOT_JSON * good
    for name in NOT_JSON:
        text = rendered(name, key, value)
        accepts = takes(CALL_FORMATS[name], text, tools=[tool(PARAMETERS)])
        assert accepts == (name in accepting), text
    as_json = CALL_FORMATS["args"].render([("get", json.dumps({key: value}))]).replace("\1", "id1")
    assert takes(CALL_FORMATS["args"], as_json, tools=[tool(PARAMETERS)]) == (good is True)


@pytest.mark.parametrize("name", NOT_JSON)
def test_listed_values_hold_within_alternatives(name: str) -> None:
    color = {"anyOf": [{"$ref": "#/$defs/color"}, {"type": "null"}, {"const": 3}]}
    parameters = {"properties": {"c": color}, "$defs": {"color": {"enum": ["red", "blue"]}}}
    for value, good in (("red", True), (None, True), (3, True), ("green", False), (4, False)):
        text = rendered(name, "c", value)
        assert takes(CALL_FORMATS[name], text, tools=[tool(parameters)]) == good, text


@pytest.mark.parametrize("name", ["typed", "coder"])
def test_alternatives_of_the_whole_schema(name: str) -> None:
    either = {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}
    tools = [tool({"properties": {"a": {"type": "integer"}, "b": {"type": "null"}}, **either})]
    assert takes(CALL_FORMATS[name], rendered(name, "a", 1), tools=tools)
    assert takes(CALL_FORMATS[name], rendered(name, "b", None), tools=tools)
    assert not takes(CALL_FORMATS[name], CALL_FORMATS[name].render([("get", "")]), tools=tools)


@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": {"a": False}, "required": ["a"]},
        {"properties": {"a": {"type": "array", "minItems": 3, "maxItems": 2}}, "required": ["a"]},
    ],
)
def test_unsatisfiable_schemas_are_errors(parameters: Any) -> None:
    with pytest.raises((InvalidInput, AssertionError)):
        takes(CALL_FORMATS["coder"], "", tools=[tool(parameters)])


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
                tool_calls_grammar(CALL_FORMATS["typed"], [tool(schema)], True, json.dumps)
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
    result = tool_calls_grammar(
        CALL_FORMATS[name],
        [tool({"$defs": shared, "properties": {**numbers, "t": tree}})],
        True,
        json.dumps,
    )
    assert len(result) < 60_000
    assert not LLMatcher(LLTokenizer("byte"), result).get_error()


def test_size_of_a_grammar_is_bounded_while_it_is_written() -> None:
    shared = {f"d{n}": {"type": "string", "pattern": "d" * 900} for n in range(100)}
    many = {f"k{n}": {"type": "array", "items": {"$ref": "#/$defs/d0"}} for n in range(800)}
    parameters = {"$defs": shared, "properties": many}
    with pytest.raises(InvalidInput, match="too long"):
        tool_calls_grammar(CALL_FORMATS["coder"], [tool(parameters)], True, json.dumps)
