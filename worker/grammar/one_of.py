"""Makes the branches of every `oneOf` exclusive, so that a grammar may take any of them.

    oneOf [A, B] → anyOf [A, B] where nothing fits both
                 → anyOf [A and X, B and Y] where X and Y keep each from the other
                 → InvalidInput

A grammar of overlapping branches gives documents that fit two of them, which `oneOf` forbids.
"""

import json
from collections.abc import Hashable, Iterable, Iterator
from itertools import combinations
from typing import Any

from batching.errors import InvalidInput
from worker.grammar.schema_analysis import Document, Schema, SchemaAnalysis, disjoint, list_in

LITERAL = ("const", "enum", "default", "examples")  # keywords whose values are no schemas
NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


def exclusive(schema: Schema) -> Schema:
    """The schema with no `oneOf` left; InvalidInput where branches cannot be kept apart."""
    try:
        if '"oneOf"' not in json.dumps(schema):
            return schema
        made: Schema = _rewritten(Document(schema), schema)
    except RecursionError:
        raise InvalidInput("it is nested too deeply") from None
    return made


def _rewritten(document: Document, node: Any) -> Any:
    if isinstance(node, list):
        return [_rewritten(document, each) for each in node]
    if not isinstance(node, dict):
        return node
    made: Schema = {}
    for key, value in node.items():
        if key in NAMED and isinstance(value, dict):
            made[key] = {name: _rewritten(document, each) for name, each in value.items()}
        else:
            made[key] = value if key in LITERAL else _rewritten(document, value)
    if branches := list_in(made, "oneOf"):
        del made["oneOf"]
        around = {key: value for key, value in node.items() if key != "oneOf"}
        limits = _limits([SchemaAnalysis(document, [around, each]) for each in node["oneOf"]])
        either = [
            {"allOf": [branch, *more]} if more else branch
            for branch, more in zip(branches, limits, strict=True)
        ]
        if "anyOf" in made:
            made["allOf"] = [*list_in(made, "allOf"), {"anyOf": either}]
        else:
            made["anyOf"] = either
    return made


def _limits(branches: list[SchemaAnalysis]) -> list[list[Schema]]:
    """What each must fit besides, so that it fits no other."""
    limits: list[list[Schema]] = [[] for _ in branches]
    if (names := _told_by(branches)) is not None:
        for facts, more in zip(branches, limits, strict=True):
            more += [{"required": [name]} for name in names if name not in facts.required]
        return limits
    for (n, a), (m, b) in combinations(enumerate(branches), 2):
        if disjoint(a, b):
            continue
        for of_a, of_b in _narrowings(a, b):
            if disjoint(a.and_(of_a), b) and disjoint(a, b.and_(of_b)):
                limits[n] += [of_a] if of_a not in limits[n] else []
                limits[m] += [of_b] if of_b not in limits[m] else []
                break
        else:
            both = f"the branches {n} and {m} of a oneOf may fit the same document"
            raise InvalidInput(f"{both}, and cannot be made exclusive")
    return limits


def _told_by(branches: list[SchemaAnalysis]) -> list[str] | None:
    """What tells any number of branches apart at once: values that are all different, as a whole
    (no names) or in a property, which all of them are to have then."""
    if _differ(branches):
        return []
    if all(facts.kinds <= {"object"} for facts in branches):
        for name in branches[0].declared:
            if _differ(facts.member(name) for facts in branches):
                missing = sum(name not in facts.required for facts in branches)
                return [name] if missing > 1 else []
    return None


def _differ(branches: Iterable[SchemaAnalysis]) -> bool:
    seen: set[Hashable] = set()
    for facts in branches:
        if facts.values is None or not seen.isdisjoint(facts.values):
            return False
        seen |= facts.values.keys()
    return True


def _narrowings(a: SchemaAnalysis, b: SchemaAnalysis) -> Iterator[tuple[Schema, Schema]]:
    """What may keep two branches apart that are not: what the one must fit, and the other."""
    if limits := _differences(a, b):
        yield limits
    if (of_a := _typed(a.kinds - b.kinds)) and (of_b := _typed(b.kinds - a.kinds)):
        yield of_a, of_b
    # What follows is about objects: other documents that fit both are given up.
    type_a, type_b = _objects(a, b), _objects(b, a)
    for name in [name for name in a.declared if name in b.declared]:
        has, in_a, in_b = {"required": [name]}, a.member(name), b.member(name)
        if disjoint(in_a, in_b):
            yield type_a | has, type_b | has
        elif limits := _differences(in_a, in_b):
            of_a, of_b = ({**has, "properties": {name: limit}} for limit in limits)
            yield type_a | of_a, type_b | of_b
    only_a = next((name for name in a.required if name not in b.required), None)
    only_b = next((name for name in b.required if name not in a.required), None)
    if only_a is not None and only_b is not None:
        yield (
            type_a | {"properties": {only_b: False}},
            type_b | {"properties": {only_a: False}},
        )


def _objects(a: SchemaAnalysis, b: SchemaAnalysis) -> Schema:
    """What leaves objects, and what cannot fit the other for its type, if that takes saying."""
    if a.kinds & b.kinds <= {"object"}:
        return {}
    return _typed((a.kinds - b.kinds) | {"object"}) or {"type": "object"}


def _differences(a: SchemaAnalysis, b: SchemaAnalysis) -> tuple[Schema, Schema] | None:
    """The listed values that only the one has, and only the other."""
    if not a.values or not b.values:
        return None
    of_a = [value for key, value in a.values.items() if key not in b.values]
    of_b = [value for key, value in b.values.items() if key not in a.values]
    return ({"enum": of_a}, {"enum": of_b}) if of_a and of_b else None


def _typed(kinds: frozenset[str]) -> Schema | None:
    """Documents of these kinds and no others; None where there is no type for that."""
    if not kinds or ("fraction" in kinds and "integer" not in kinds):
        return None
    kinds -= {"integer"} if "fraction" in kinds else set()
    return {"type": sorted("number" if kind == "fraction" else kind for kind in kinds)}
