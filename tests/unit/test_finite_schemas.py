"""Schemas that only an infinite document matches are refused, and no others."""

from typing import Any

import pytest

from batching.errors import InvalidInput
from worker.grammar.finite import check_finite
from worker.grammar.lark import COMPACT_JSON, schema_rule

SELF = {"$ref": "#"}
A = {"required": ["a"]}
NODE = {"$ref": "#/$defs/node"}


def tree(children: dict[str, Any], **more: Any) -> dict[str, Any]:
    node = {"type": "object", "properties": {"next": children}, "required": ["next"], **more}
    return {"$defs": {"node": node}, **NODE}


INFINITE: list[dict[str, Any]] = [
    SELF,
    {"anyOf": [SELF]},
    {"anyOf": [SELF, {"allOf": [SELF]}]},
    {"allOf": [{"type": "object"}, SELF]},
    tree(NODE),
    tree({"anyOf": [NODE, {"type": "array", "items": NODE, "minItems": 1}]}),
    tree({"type": "array", "prefixItems": [NODE], "minItems": 1}),
    {"type": "object", "additionalProperties": SELF, "required": ["a"]},
    {"type": "object", "additionalProperties": SELF, "minProperties": 1},
    {"type": "object", "patternProperties": {"^a": SELF}, "additionalProperties": SELF, **A},
    {"type": ["object", "array"], "additionalProperties": SELF, **A, "items": SELF, "minItems": 1},
    {
        "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/b"}]}, "b": {"anyOf": [{"$ref": "#/$defs/a"}]}},
        "type": "array",
        "items": {"$ref": "#/$defs/a"},
        "minItems": 1,
    },
]
FINITE: list[dict[str, Any]] = [
    tree({"anyOf": [NODE, {"type": "null"}]}),
    tree({"type": "array", "items": NODE}),
    tree(NODE, required=[]),
    tree(NODE, type=["object", "null"]),
    {"anyOf": [SELF, {"type": "string"}]},
    {"$ref": "#/$defs/absent"},
    {
        "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/c"}, "c": {}},
        "$ref": "#/$defs/a",
    },
    {"type": "array", "items": SELF, "minItems": 0},
    {"type": "object", "additionalProperties": SELF, "minProperties": 0},
    {"type": "object", "properties": {"a": {}}, "additionalProperties": SELF, "minProperties": 1},
    {"type": "object", "patternProperties": {"^a": {}}, "additionalProperties": False, **A},
    {"type": ["object", "array"], "additionalProperties": SELF, **A, "items": SELF},
]


@pytest.mark.parametrize("schema", INFINITE)
def test_a_schema_without_finite_documents_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match="no text matches it"):
        schema_rule(schema, COMPACT_JSON)


@pytest.mark.parametrize("schema", FINITE)
def test_a_schema_with_a_finite_document_is_accepted(schema: dict[str, Any]) -> None:
    assert schema_rule(schema, COMPACT_JSON)


def test_the_work_on_a_long_chain_of_references_is_bounded() -> None:
    chain = {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}]} for n in range(5000)}
    check_finite({"$defs": chain | {"d5000": {"type": "null"}}, "$ref": "#/$defs/d0"})
