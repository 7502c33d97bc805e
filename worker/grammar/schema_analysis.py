"""Properties that all documents matching a JSON schema have: types, values, properties.

argument_grammar.py writes rules by them. An analysis may be looser than the schema, never stricter:
an ignored keyword only makes a schema match less. Schemas are untrusted: every step is counted
against a limit.
"""

from collections.abc import Hashable, Iterator, Sequence
from functools import cached_property
from typing import Any

from batching.errors import InvalidInput
from worker.text.tool_call_parser import json_type, resolve_reference

Schema = dict[str, Any]

MAX_STEPS = 50_000
MAX_DEPTH = 64  # of nested alternatives
# An integer is a number too, and 1.0 is an integer; a `fraction` is any other number.
KINDS_OF_TYPE = {kind: {kind} for kind in ("null", "boolean", "integer", "string")}
KINDS_OF_TYPE |= {"array": {"array"}, "object": {"object"}, "number": {"integer", "fraction"}}
ALL_KINDS = frozenset({"fraction", *KINDS_OF_TYPE} - {"number"})


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
    """The properties of documents that match all of several schemas, without their alternatives."""

    def __init__(self, document: SchemaDocument, schemas: Sequence[Any]) -> None:
        self._document = document
        self.parts: list[Schema] = []  # the schemas, without references and `allOf`
        waiting, seen = list(schemas), set()
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
        self._document.spend(len(self.parts))
        return self.parts

    @cached_property
    def kinds(self) -> frozenset[str]:
        kinds = ALL_KINDS
        for part in self.counted_parts:
            if (declared := part.get("type")) is not None:
                types = declared if isinstance(declared, list) else [declared]
                self._document.spend(len(types))
                kinds &= frozenset().union(
                    *(
                        KINDS_OF_TYPE[type_]
                        for type_ in types
                        if isinstance(type_, str) and type_ in KINDS_OF_TYPE
                    )
                )
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
        self._document.spend()
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
            self._document.spend(len(names))
            required |= dict.fromkeys(name for name in names if isinstance(name, str))
        return required

    @cached_property
    def declared(self) -> dict[str, None]:
        """The names of declared properties, in order."""
        declared: dict[str, None] = {}
        for part in self.counted_parts:
            if isinstance(properties := part.get("properties"), dict):
                self._document.spend(len(properties))
                declared |= dict.fromkeys(properties)
        return declared

    def property_schemas(self, name: str) -> list[Any]:
        """Return the schemas of a property's value, if it has one."""
        schemas = []
        for part in self.counted_parts:
            properties = part.get("properties")
            if isinstance(properties, dict) and name in properties:
                schemas.append(properties[name])
            elif not part.get("patternProperties"):
                schemas.append(part.get("additionalProperties", True))
        return schemas

    def item_schemas(self, index: int) -> list[Any]:
        """Return the schemas of an array's item, if it has so many."""
        schemas = []
        for part in self.counted_parts:
            first = list_in(part, "prefixItems")
            schemas.append(first[index] if index < len(first) else part.get("items", True))
        return schemas


def branches(
    document: SchemaDocument, schemas: Sequence[Any], depth: int = MAX_DEPTH
) -> Iterator[SchemaAnalysis]:
    """Yield the analysis of each combination of alternatives of `anyOf` and `oneOf`."""
    document.spend()
    analysis = SchemaAnalysis(document, schemas)
    for n, part in enumerate(analysis.counted_parts if depth > 1 else ()):
        for keyword in ("anyOf", "oneOf"):
            if alternatives := list_in(part, keyword):
                rest = {name: value for name, value in part.items() if name != keyword}
                others = [*analysis.parts[:n], *analysis.parts[n + 1 :], rest]
                for schema in alternatives:
                    yield from branches(document, [schema, *others], depth - 1)
                return
    yield analysis


def kind_of(value: Any) -> str:
    if isinstance(value, float):
        return "integer" if value.is_integer() else "fraction"
    return json_type(value)


def list_in(part: Schema, key: str) -> list[Any]:
    value = part.get(key)
    return value if isinstance(value, list) else []
