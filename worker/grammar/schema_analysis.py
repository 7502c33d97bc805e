"""What is known of the documents that fit a JSON schema, to tell whether two schemas exclude each
other.

It may be less than the schemas say, never more: keywords that are not looked at here only make a
schema take less, so that what is apart by the facts is apart. Schemas come from strangers: all that
is done about one is counted.
"""

from collections.abc import Hashable, Iterator, Sequence
from functools import cached_property
from itertools import chain
from typing import Any

from batching.errors import InvalidInput
from worker.text.tool_call_parser import json_type, resolve_reference

Schema = dict[str, Any]

MOST_STEPS = 50_000
MOST_DEPTH = 8  # of properties, items and alternatives, one in the other
# An integer is a number too, and 1.0 is one; `fraction` are the other numbers.
KINDS = {kind: {kind} for kind in ("null", "boolean", "integer", "string", "array", "object")}
KINDS["number"] = {"integer", "fraction"}
ALL = frozenset({"fraction", *KINDS} - {"number"})
NUMBERS = (("minimum", 0), ("exclusiveMinimum", 1)), (("maximum", 0), ("exclusiveMaximum", -1))
# Of each kind: the keywords that bound it from below and above, and which way past their value.
BOUNDS = {
    "integer": NUMBERS,
    "fraction": NUMBERS,
    "string": ((("minLength", 0),), (("maxLength", 0),)),
    "array": ((("minItems", 0),), (("maxItems", 0),)),
    "object": ((("minProperties", 0),), (("maxProperties", 0),)),
}


class Document:
    """A whole schema, and how much may still be done about it."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._left = MOST_STEPS

    def spend(self, steps: int = 1) -> None:
        self._left -= steps
        if self._left < 0:
            raise InvalidInput("it has too many properties or branches")

    def resolve_reference(self, reference: Any) -> Any:
        """What a `$ref` means; True, which takes anything, where it is none."""
        if not isinstance(reference, str):
            return True
        self.spend(1 + len(reference) // 10)
        return resolve_reference(self._root, reference)


class SchemaAnalysis:
    """What holds for all documents that fit some schemas at once."""

    def __init__(self, document: Document, schemas: Sequence[Any], depth: int = MOST_DEPTH) -> None:
        self.document, self.schemas, self.depth = document, schemas, depth
        self.parts: list[Schema] = []
        self._members: dict[str, SchemaAnalysis] = {}
        self._bounds: dict[str, tuple[tuple[float, int], tuple[float, int]]] = {}
        waiting, seen = list(schemas) if depth > 0 else [], set()
        while waiting:
            document.spend()
            part = waiting.pop()
            if part is False:
                self.parts.append({"enum": []})
            elif isinstance(part, dict) and id(part) not in seen:
                document.spend(len(part))
                seen.add(id(part))
                waiting += list_in(part, "allOf")
                if "$ref" in part:
                    waiting.append(document.resolve_reference(part["$ref"]))
                self.parts.append({key: part[key] for key in part if key not in ("allOf", "$ref")})

    @property
    def every_part(self) -> list[Schema]:
        """For whoever goes through all of them."""
        self.document.spend(len(self.parts))
        return self.parts

    def and_(self, schema: Schema) -> "SchemaAnalysis":
        return SchemaAnalysis(self.document, [*self.parts, schema], self.depth)

    @cached_property
    def kinds(self) -> frozenset[str]:
        found = ALL
        for part in self.every_part:
            if (type_ := part.get("type")) is not None:
                names = type_ if isinstance(type_, list) else [type_]
                self.document.spend(len(names))
                known = [KINDS[name] for name in names if isinstance(name, str) and name in KINDS]
                found &= frozenset().union(*known)
            for key in ("anyOf", "oneOf"):
                if (alternatives := list_in(part, key)) and self.depth > 1:
                    each = [
                        SchemaAnalysis(self.document, [one], self.depth - 1) for one in alternatives
                    ]
                    found &= frozenset().union(*(facts.kinds for facts in each))
        if self.values is not None:
            found &= {kind_of(value) for value in self.values.values()}
        return found

    @cached_property
    def values(self) -> dict[Hashable, Any] | None:
        """All that there can be, by what they equal; None: they are not listed."""
        found: dict[Hashable, Any] | None = None
        for part in self.every_part:
            given = [part["const"]] if "const" in part else part.get("enum")
            if isinstance(given, list):
                listed = {self._key(value): value for value in given}
                kept = listed if found is None else found
                found = {key: value for key, value in kept.items() if key in listed}
        return found

    def _key(self, value: Any) -> Hashable:
        """Equal for what JSON Schema takes as equal: 1 and 1.0, but not 1 and true."""
        self.document.spend()
        if isinstance(value, list):
            return "array", tuple([self._key(each) for each in value])
        if isinstance(value, dict):
            return "object", frozenset([(name, self._key(each)) for name, each in value.items()])
        return kind_of(value), value

    @cached_property
    def required(self) -> dict[str, None]:
        found: dict[str, None] = {}
        for part in self.every_part:
            names = list_in(part, "required")
            self.document.spend(len(names))
            found |= dict.fromkeys(name for name in names if isinstance(name, str))
        return found

    @cached_property
    def declared(self) -> dict[str, None]:
        """The properties that are named."""
        found: dict[str, None] = {}
        for part in self.every_part:
            if isinstance(named := part.get("properties"), dict):
                self.document.spend(len(named))
                found |= dict.fromkeys(named)
        return found

    def member(self, name: str) -> "SchemaAnalysis":
        """Of its value, where there is one."""
        if name not in self._members:
            schemas = []
            for part in self.every_part:
                named = part.get("properties")
                if isinstance(named, dict) and name in named:
                    schemas.append(named[name])
                elif not part.get("patternProperties"):
                    schemas.append(part.get("additionalProperties", True))
            self._members[name] = SchemaAnalysis(self.document, schemas, self.depth - 1)
        return self._members[name]

    def item(self, place: int) -> "SchemaAnalysis":
        """Of the one there, if there are so many."""
        schemas = []
        for part in self.every_part:
            first = list_in(part, "prefixItems")
            schemas.append(first[place] if place < len(first) else part.get("items", True))
        return SchemaAnalysis(self.document, schemas, self.depth - 1)

    def bounds(self, kind: str) -> tuple[tuple[float, int], tuple[float, int]]:
        """The least and the most that a document of this kind counts or is."""
        if kind not in self._bounds:
            lows, highs = [(-float("inf"), 0)], [(float("inf"), 0)]
            for found, keywords in zip((lows, highs), BOUNDS[kind], strict=True):
                for part in self.every_part:
                    for keyword, side in keywords:
                        value = part.get(keyword)
                        if isinstance(value, int | float) and not isinstance(value, bool):
                            found.append((value, side))
            self._bounds[kind] = max(lows), min(highs)
        return self._bounds[kind]

    @property
    def cases(self) -> Iterator[list["SchemaAnalysis"]]:
        """For each list of alternatives, what holds with the one or the other."""
        for n, part in enumerate(self.every_part if self.depth > 1 else ()):
            for key in ("anyOf", "oneOf"):
                if alternatives := list_in(part, key):
                    rest = {name: value for name, value in part.items() if name != key}
                    others = [*self.parts[:n], *self.parts[n + 1 :], rest]
                    yield [
                        SchemaAnalysis(self.document, [one, *others], self.depth - 1)
                        for one in alternatives
                    ]


def branches(facts: SchemaAnalysis) -> Iterator[SchemaAnalysis]:
    """For each choice among all alternatives, what holds with it."""
    facts.document.spend()
    if (cases := next(facts.cases, None)) is None:
        yield facts
    else:
        yield from chain.from_iterable(map(branches, cases))


def disjoint(a: SchemaAnalysis, b: SchemaAnalysis) -> bool:
    """Whether no document can fit both."""
    a.document.spend()
    if all(_apart_in(kind, a, b) for kind in a.kinds & b.kinds):
        return True
    return any(
        all(disjoint(case, other) for case in cases)
        for facts, other in ((a, b), (b, a))
        for cases in facts.cases
    )


def _apart_in(kind: str, a: SchemaAnalysis, b: SchemaAnalysis) -> bool:
    if a.values is not None and b.values is not None:
        return all(kind_of(a.values[key]) != kind for key in a.values.keys() & b.values.keys())
    if kind in BOUNDS:
        (low_a, high_a), (low_b, high_b) = a.bounds(kind), b.bounds(kind)
        if low_a > high_b or low_b > high_a:
            return True
    if kind == "object":  # what has a property that one of them asks for
        return any(disjoint(a.member(n), b.member(n)) for n in chain(a.required, b.required))
    if kind == "array" and max(a.bounds(kind)[0], b.bounds(kind)[0]) > (0, 0):
        return disjoint(a.item(0), b.item(0))
    return False


def kind_of(value: Any) -> str:
    if isinstance(value, float):
        return "integer" if value.is_integer() else "fraction"
    return json_type(value)


def list_in(part: Schema, key: str) -> list[Any]:
    found = part.get(key)
    return found if isinstance(found, list) else []
