"""Values of arguments that are not JSON: a string stays one where the schema allows strings."""

from typing import Any

import pytest

from worker.text.tool_call_parser import read_python_calls, read_value

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
