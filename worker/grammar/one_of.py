"""Makes the branches of every `oneOf` exclusive, so that a grammar may choose any of them.

    oneOf [A, B] → anyOf [A, B] where no document matches both
                 → anyOf [A and X, B and Y] where X and Y exclude the other branch
                 → InvalidInput

A grammar of overlapping branches would generate documents that match two, which `oneOf` forbids.
"""

import json
from collections.abc import Hashable, Iterable, Iterator
from itertools import combinations
from typing import Any

from batching.errors import InvalidInput
from worker.grammar.schema_analysis import (
    Schema,
    SchemaAnalysis,
    SchemaDocument,
    disjoint,
    list_in,
)

LITERAL_KEYWORDS = ("const", "enum", "default", "examples")  # their values are no schemas
NAMING_KEYWORDS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


def make_exclusive(schema: Schema) -> Schema:
    """Return the schema without `oneOf`; InvalidInput if branches cannot be made exclusive."""
    try:
        if '"oneOf"' not in json.dumps(schema):
            return schema
        rewritten: Schema = _rewrite(SchemaDocument(schema), schema)
    except RecursionError:
        raise InvalidInput("it is nested too deeply") from None
    return rewritten


def _rewrite(document: SchemaDocument, node: Any) -> Any:
    if isinstance(node, list):
        return [_rewrite(document, item) for item in node]
    if not isinstance(node, dict):
        return node
    schema: Schema = {}
    for key, value in node.items():
        if key in NAMING_KEYWORDS and isinstance(value, dict):
            schema[key] = {name: _rewrite(document, item) for name, item in value.items()}
        else:
            schema[key] = value if key in LITERAL_KEYWORDS else _rewrite(document, value)
    if branches := list_in(schema, "oneOf"):
        del schema["oneOf"]
        rest = {key: value for key, value in node.items() if key != "oneOf"}
        limits = _limits([SchemaAnalysis(document, [rest, branch]) for branch in node["oneOf"]])
        any_of = [
            {"allOf": [branch, *added]} if added else branch
            for branch, added in zip(branches, limits, strict=True)
        ]
        if "anyOf" in schema:
            schema["allOf"] = [*list_in(schema, "allOf"), {"anyOf": any_of}]
        else:
            schema["anyOf"] = any_of
    return schema


def _limits(branches: list[SchemaAnalysis]) -> list[list[Schema]]:
    """Return the schemas that each branch must match too, so that it excludes the others."""
    limits: list[list[Schema]] = [[] for _ in branches]
    if (names := _discriminators(branches)) is not None:
        for branch, added in zip(branches, limits, strict=True):
            added += [{"required": [name]} for name in names if name not in branch.required]
        return limits
    for (n, a), (m, b) in combinations(enumerate(branches), 2):
        if disjoint(a, b):
            continue
        for limit_a, limit_b in _narrowings(a, b):
            if disjoint(a.with_schema(limit_a), b) and disjoint(a, b.with_schema(limit_b)):
                limits[n] += [limit_a] if limit_a not in limits[n] else []
                limits[m] += [limit_b] if limit_b not in limits[m] else []
                break
        else:
            both = f"the branches {n} and {m} of a oneOf may match the same document"
            raise InvalidInput(f"{both} and cannot be made exclusive")
    return limits


def _discriminators(branches: list[SchemaAnalysis]) -> list[str] | None:
    """Return the properties to require so that the branches' listed values differ: none if the
    documents themselves do, one if a property's do. None if no values tell all branches apart."""
    if _values_differ(branches):
        return []
    if all(branch.kinds <= {"object"} for branch in branches):
        for name in branches[0].declared:
            if _values_differ(branch.property_value(name) for branch in branches):
                optional = sum(name not in branch.required for branch in branches)
                return [name] if optional > 1 else []
    return None


def _values_differ(analyses: Iterable[SchemaAnalysis]) -> bool:
    seen: set[Hashable] = set()
    for analysis in analyses:
        if analysis.values is None or not seen.isdisjoint(analysis.values):
            return False
        seen |= analysis.values.keys()
    return True


def _narrowings(a: SchemaAnalysis, b: SchemaAnalysis) -> Iterator[tuple[Schema, Schema]]:
    """Yield candidates for schemas that separate two overlapping branches: one for each."""
    if limits := _differences(a, b):
        yield limits
    if (limit_a := _of_kinds(a.kinds - b.kinds)) and (limit_b := _of_kinds(b.kinds - a.kinds)):
        yield limit_a, limit_b
    # The rest separates objects, and excludes other documents that match both.
    type_a, type_b = _objects_only(a, b), _objects_only(b, a)
    for name in [name for name in a.declared if name in b.declared]:
        has, in_a, in_b = {"required": [name]}, a.property_value(name), b.property_value(name)
        if disjoint(in_a, in_b):
            yield type_a | has, type_b | has
        elif limits := _differences(in_a, in_b):
            limit_a, limit_b = ({**has, "properties": {name: limit}} for limit in limits)
            yield type_a | limit_a, type_b | limit_b
    only_a = next((name for name in a.required if name not in b.required), None)
    only_b = next((name for name in b.required if name not in a.required), None)
    if only_a is not None and only_b is not None:
        yield (
            type_a | {"properties": {only_b: False}},
            type_b | {"properties": {only_a: False}},
        )


def _objects_only(a: SchemaAnalysis, b: SchemaAnalysis) -> Schema:
    """Return a schema of `a`'s objects and of kinds that `b` does not have; {} if that is all."""
    if a.kinds & b.kinds <= {"object"}:
        return {}
    return _of_kinds((a.kinds - b.kinds) | {"object"}) or {"type": "object"}


def _differences(a: SchemaAnalysis, b: SchemaAnalysis) -> tuple[Schema, Schema] | None:
    """Return schemas of the listed values that only one of the two has."""
    if not a.values or not b.values:
        return None
    only_a = [value for key, value in a.values.items() if key not in b.values]
    only_b = [value for key, value in b.values.items() if key not in a.values]
    return ({"enum": only_a}, {"enum": only_b}) if only_a and only_b else None


def _of_kinds(kinds: frozenset[str]) -> Schema | None:
    """Return a schema of exactly these kinds; None if no JSON Schema type expresses that."""
    if not kinds or ("fraction" in kinds and "integer" not in kinds):
        return None
    kinds -= {"integer"} if "fraction" in kinds else set()
    return {"type": sorted("number" if kind == "fraction" else kind for kind in kinds)}
