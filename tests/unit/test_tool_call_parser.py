"""Streamed calls equal those of a JSON parser; an argument that is not JSON may stay a string."""

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.text.tool_call_parser import JsonCallParser, read_python_calls, read_value

KEYS = st.sampled_from(["name", "arguments", "x", 'a "quoted" one', "{", ""])
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-99, 99)
    | st.text(max_size=8)
    | st.sampled_from('"\\{}[],: '),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=6,
)
OBJECTS = st.dictionaries(KEYS, VALUES, max_size=3)
CALLS = st.tuples(st.text(min_size=1, max_size=6), OBJECTS, st.permutations(range(3)), VALUES)
STYLES = st.sampled_from(
    [(",", ":", None), (", ", ": ", None), (" , ", " : ", None), (",", ": ", 2)]
)


def read(parser: JsonCallParser, text: str, cuts: Sequence[int]) -> list[tuple[str, str]]:
    calls: list[tuple[str, str]] = []
    bounds = [0, *sorted(cuts), len(text)]
    for start, end in pairwise(bounds):
        for part in parser.feed(text[start:end]):
            if part.name is not None:
                calls.append((part.name, ""))
            calls[-1] = (calls[-1][0], calls[-1][1] + part.arguments)
    return calls


@given(st.lists(CALLS, min_size=1, max_size=3), STYLES, st.booleans(), st.data())
def test_calls_are_parsed_whatever_the_chunks(
    result: list[tuple[str, dict[str, Any], list[int], Any]],
    style: tuple[str, str, int | None],
    listed: bool,
    data: st.DataObject,
) -> None:
    objects = []
    for name, arguments, order, other in result:
        members = [("fn", name), ("args", arguments), ("id", other)]
        objects.append(dict(members[n] for n in order))
    shown: Any = objects if listed or len(objects) > 1 else objects[0]
    comma, colon, indent = style
    text = "\n" + json.dumps(shown, separators=(comma, colon), indent=indent) + "\n"
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=12))
    calls = read(JsonCallParser("fn", "args"), text, cuts)
    assert [name for name, _ in calls] == [name for name, *_ in result]
    assert [json.loads(arguments) for _, arguments in calls] == [a for _, a, *_ in result]
    assert all(arguments == arguments.strip() and arguments in text for _, arguments in calls)
    assert calls == read(JsonCallParser("fn", "args"), text, range(len(text)))


def test_bare_arguments_belong_to_the_fixed_name() -> None:
    assert read(JsonCallParser("", "", "f"), ' {"a": "b } "} \n', [3, 9]) == [
        ("f", '{"a": "b } "}')
    ]


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize(
    ("shown", "text"),
    [
        ('{"x": "\\"}"}', '{"x": "\\"}"}'), ("{}", "{}"), ("", "{}"), (None, "{}"),
        ("x", '"x"'), ([7], "[7]"),
    ],
)  # fmt: skip
def test_arguments_may_be_a_string_of_json(shown: Any, text: str, wrapped: bool) -> None:
    objects: list[Any] = [{"name": "f", "arguments": shown}, {"arguments": {"y": 7}, "name": "g"}]
    if wrapped:
        objects = [{"type": "function", "function": call, "id": "{"} for call in objects]
    for cuts in (range(0), range(200)):
        calls = read(JsonCallParser("name", "arguments"), json.dumps(objects), cuts)
        assert calls == [("f", text), ("g", '{"y": 7}')]


# ── values that are not JSON ──

INTEGER, NULL, NUMBER = ({"string", item} for item in ("integer", "null", "number"))


@pytest.mark.parametrize(
    ("text", "types", "expected"),
    [
        ('"use strict"', NULL, '"use strict"'),
        ("  x\n", NULL, "  x\n"),
        ("'x'", INTEGER, "'x'"),
        ("007", INTEGER, "007"),
        ("+33612345678", INTEGER, "+33612345678"),
        ("1_000", INTEGER, "1_000"),
        ("1.0", INTEGER, "1.0"),
        ("+1.5", NUMBER, "+1.5"),
        ("7", INTEGER, 7),
        (" 7 ", INTEGER, 7),
        ("1.5", NUMBER, 1.5),
        ("null", NULL, None),
        ("None", NULL, None),
        ("['a']", {"string", "array"}, ["a"]),
        ("1.0", {"integer"}, 1),
        ("007", {"integer"}, 7),
        ("'x'", (), "x"),
        ("{name}", (), "{name}"),
        ("[a, b]", (), "[a, b]"),
        ("{color: red}", (), "{color: red}"),
        ("[true, None]", (), [True, None]),
        ("[a, b]", {"array"}, ["a", "b"]),
    ],
)
def test_possible_string_is_one_unless_it_is_json_of_another_type(
    text: str, types: Any, expected: Any
) -> None:
    result = read_value(text, types)
    assert (result, type(result)) == (expected, type(expected))


@pytest.mark.parametrize(
    ("text", "types", "expected"),
    [
        ("'null'", NULL, "null"),
        ("'12345'", INTEGER, "12345"),
        ('"1e3"', {"number", "string"}, "1e3"),
        ("None", NULL, None),
        ("12345", INTEGER, 12345),
        ("12345", NULL, "12345"),
        ("'7'", {"integer"}, 7),
        ("'true'", {"boolean", "null"}, True),
    ],
)
def test_quoted_value_is_a_string_where_the_schema_allows_one(
    text: str, types: Any, expected: Any
) -> None:
    assert read_python_calls(f"[f(o={text})]", {"f": {"o": types}}, False) == [
        ("f", {"o": expected})
    ]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('"""a "b", c\n"""', 'a "b", c\n'),
        ("'''a 'b', c'''", "a 'b', c"),
        ('"""\\d \\n"""', "\\d \n"),
        ('""""""', ""),
        ('"echo """', 'echo ""'),
        ('""a" b"', '"a" b'),
        ("""'it's "x"'""", """it's "x\""""),
    ],
)
def test_strings_with_three_quotes_and_quotes_at_the_edges_are_read(text: str, value: str) -> None:
    assert read_python_calls(f"[f(a={text}, b=1)]", {}, False) == [("f", {"a": value, "b": 1})]
