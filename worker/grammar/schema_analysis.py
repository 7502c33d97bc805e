"""Properties that all documents matching a JSON schema have: types, values, bounds, properties.

argument_grammar.py writes rules by them. An analysis may be looser than the schema, never stricter:
an ignored keyword only makes a schema match less. Schemas are untrusted: every step is counted
against a limit.
"""

from collections.abc import Hashable, Iterator, Sequence
from functools import cached_property
from itertools import chain
from typing import Any

from batching.errors import InvalidInput
from worker.text.tool_call_parser import json_type, resolve_reference

Schema = dict[str, Any]
Bound = tuple[float, int]  # a value, and whether it is excluded: 1 from below, -1 from above, 0 not

MAX_STEPS = 50_000
MAX_DEPTH = 8  # of nested properties, items and alternatives
# An integer is a number too, and 1.0 is an integer; a `fraction` is any other number.
KINDS_OF_TYPE = {kind: {kind} for kind in ("null", "boolean", "integer", "string")}
KINDS_OF_TYPE |= {"array": {"array"}, "object": {"object"}, "number": {"integer", "fraction"}}
ALL_KINDS = frozenset({"fraction", *KINDS_OF_TYPE} - {"number"})
NUMBER_BOUNDS = (
    (("minimum", 0), ("exclusiveMinimum", 1)),
    (("maximum", 0), ("exclusiveMaximum", -1)),
)
# The keywords of each kind's lower and upper bounds, with the second part of a Bound.
BOUNDS = {
    "integer": NUMBER_BOUNDS,
    "fraction": NUMBER_BOUNDS,
    "string": ((("minLength", 0),), (("maxLength", 0),)),
    "array": ((("minItems", 0),), (("maxItems", 0),)),
    "object": ((("minProperties", 0),), (("maxProperties", 0),)),
}


class SchemaDocument:
    """The schema that references point into, and the steps that are left for it."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._steps_left = MAX_STEPS

    def spend(self, steps: int = 1) -> None:
        """Count steps; InvalidInput beyond the limit."""
        self._steps_left -= steps
        if self._steps_left < 0:
            raise InvalidInput("it has too many properties or branches")

    def resolve(self, reference: Any) -> Any:
        """Return the target of a `$ref`; True, the schema of anything, if it has none."""
        if not isinstance(reference, str):
            return True
        self.spend(1 + len(reference) // 10)
        return resolve_reference(self._root, reference)


class SchemaAnalysis:
    """The properties of documents that match all of several schemas."""

    def __init__(
        self, document: SchemaDocument, schemas: Sequence[Any], depth: int = MAX_DEPTH
    ) -> None:
        self.document, self.schemas, self.depth = document, schemas, depth
        self.parts: list[Schema] = []  # the schemas, without references and `allOf`
        self._properties: dict[str, SchemaAnalysis] = {}
        self._bounds: dict[str, tuple[Bound, Bound]] = {}
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
                    waiting.append(document.resolve(part["$ref"]))
                self.parts.append({key: part[key] for key in part if key not in ("allOf", "$ref")})

    @property
    def counted_parts(self) -> list[Schema]:
        """The parts; counts a step for each."""
        self.document.spend(len(self.parts))
        return self.parts

    @cached_property
    def kinds(self) -> frozenset[str]:
        kinds = ALL_KINDS
        for part in self.counted_parts:
            if (declared := part.get("type")) is not None:
                types = declared if isinstance(declared, list) else [declared]
                self.document.spend(len(types))
                kinds &= frozenset().union(
                    *(
                        KINDS_OF_TYPE[type_]
                        for type_ in types
                        if isinstance(type_, str) and type_ in KINDS_OF_TYPE
                    )
                )
            for keyword in ("anyOf", "oneOf"):
                if (alternatives := list_in(part, keyword)) and self.depth > 1:
                    analyses = [
                        SchemaAnalysis(self.document, [schema], self.depth - 1)
                        for schema in alternatives
                    ]
                    kinds &= frozenset().union(*(analysis.kinds for analysis in analyses))
        if self.values is not None:
            kinds &= {kind_of(value) for value in self.values.values()}
        return kinds

    @cached_property
    def values(self) -> dict[Hashable, Any] | None:
        """All possible documents, by keys that are equal for equal documents; None if the schemas
        do not list them."""
        values: dict[Hashable, Any] | None = None
        for part in self.counted_parts:
            listed = [part["const"]] if "const" in part else part.get("enum")
            if isinstance(listed, list):
                by_key = {self._key(value): value for value in listed}
                before = by_key if values is None else values
                values = {key: value for key, value in before.items() if key in by_key}
        return values

    def _key(self, value: Any) -> Hashable:
        """Equal as JSON Schema defines it: 1 equals 1.0, but not true."""
        self.document.spend()
        if isinstance(value, list):
            return "array", tuple([self._key(item) for item in value])
        if isinstance(value, dict):
            return "object", frozenset([(name, self._key(item)) for name, item in value.items()])
        return kind_of(value), value

    @cached_property
    def required(self) -> dict[str, None]:
        """The names of required properties, in order."""
        required: dict[str, None] = {}
        for part in self.counted_parts:
            names = list_in(part, "required")
            self.document.spend(len(names))
            required |= dict.fromkeys(name for name in names if isinstance(name, str))
        return required

    @cached_property
    def declared(self) -> dict[str, None]:
        """The names of declared properties, in order."""
        declared: dict[str, None] = {}
        for part in self.counted_parts:
            if isinstance(properties := part.get("properties"), dict):
                self.document.spend(len(properties))
                declared |= dict.fromkeys(properties)
        return declared

    def property_value(self, name: str) -> "SchemaAnalysis":
        """Return the analysis of a property's value, if it has one."""
        if name not in self._properties:
            schemas = []
            for part in self.counted_parts:
                properties = part.get("properties")
                if isinstance(properties, dict) and name in properties:
                    schemas.append(properties[name])
                elif not part.get("patternProperties"):
                    schemas.append(part.get("additionalProperties", True))
            self._properties[name] = SchemaAnalysis(self.document, schemas, self.depth - 1)
        return self._properties[name]

    def item(self, index: int) -> "SchemaAnalysis":
        """Return the analysis of an array's item, if it has so many."""
        schemas = []
        for part in self.counted_parts:
            first = list_in(part, "prefixItems")
            schemas.append(first[index] if index < len(first) else part.get("items", True))
        return SchemaAnalysis(self.document, schemas, self.depth - 1)

    def bounds(self, kind: str) -> tuple[Bound, Bound]:
        """Return the lower and the upper bound of the value or length of documents of a kind."""
        if kind not in self._bounds:
            lower, upper = [(-float("inf"), 0)], [(float("inf"), 0)]
            for bounds, keywords in zip((lower, upper), BOUNDS[kind], strict=True):
                for part in self.counted_parts:
                    for keyword, side in keywords:
                        value = part.get(keyword)
                        if isinstance(value, int | float) and not isinstance(value, bool):
                            bounds.append((value, side))
            self._bounds[kind] = max(lower), min(upper)
        return self._bounds[kind]

    @property
    def alternatives(self) -> Iterator[list["SchemaAnalysis"]]:
        """For each `anyOf` and `oneOf`, the analyses with each of its schemas."""
        for n, part in enumerate(self.counted_parts if self.depth > 1 else ()):
            for keyword in ("anyOf", "oneOf"):
                if schemas := list_in(part, keyword):
                    rest = {name: value for name, value in part.items() if name != keyword}
                    others = [*self.parts[:n], *self.parts[n + 1 :], rest]
                    yield [
                        SchemaAnalysis(self.document, [schema, *others], self.depth - 1)
                        for schema in schemas
                    ]


def branches(analysis: SchemaAnalysis) -> Iterator[SchemaAnalysis]:
    """Yield the analysis of each combination of alternatives."""
    analysis.document.spend()
    if (alternatives := next(analysis.alternatives, None)) is None:
        yield analysis
    else:
        yield from chain.from_iterable(map(branches, alternatives))


def kind_of(value: Any) -> str:
    if isinstance(value, float):
        return "integer" if value.is_integer() else "fraction"
    return json_type(value)


def list_in(part: Schema, key: str) -> list[Any]:
    value = part.get(key)
    return value if isinstance(value, list) else []
