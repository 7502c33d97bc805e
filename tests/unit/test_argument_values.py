"""Arguments that are not written as JSON: a text stays one where it may be one."""

from typing import Any

import pytest

from worker.text.tool_call_parser import read_python_calls, read_value

INTEGER, NULL, NUMBER = ({"string", each} for each in ("integer", "null", "number"))


@pytest.mark.parametrize(
    ("text", "types", "meant"),
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
    text: str, types: Any, meant: Any
) -> None:
    made = read_value(text, types)
    assert (made, type(made)) == (meant, type(meant))


@pytest.mark.parametrize(
    ("written", "types", "meant"),
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
    written: str, types: Any, meant: Any
) -> None:
    assert read_python_calls(f"[f(o={written})]", {"f": {"o": types}}, False) == [
        ("f", {"o": meant})
    ]
