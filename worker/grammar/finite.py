"""Refuses JSON schemas that only infinite documents match: generation would never complete one.

A reference is finite if its target matches a document that needs finite references only: the least
fixed point. Only `type`, `required`, `minItems`, `minProperties` and the applicators are read, so a
refused schema certainly has no finite document.
"""

from typing import Any

from batching.errors import InvalidInput
from worker.grammar.schema_analysis import Schema, list_in
from worker.text.tool_call_parser import resolve_reference

MAX_VISITS = 20_000  # of schemas; beyond it, the schema is accepted


def check_finite(schema: Schema) -> None:
    """InvalidInput if a schema has no finite document."""
    if not FiniteReferences(schema).is_finite():
        raise InvalidInput("no text matches it: each document contains itself")


class FiniteReferences:
    """The references of a schema that are known to have a finite document."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._targets: dict[str, Any] = {}  # by reference
        self._finite: set[str] = set()
        self._visits_left = MAX_VISITS

    def is_finite(self) -> bool:
        known = -1
        while not self._matches(self._root):
            if known == (known := len(self._targets) + len(self._finite)):
                return False
            for name in [*self._targets]:
                if name not in self._finite and self._matches(self._targets[name]):
                    self._finite.add(name)
        return True

    def _matches(self, schema: Any) -> bool:
        """Return whether a document that needs finite references only may match."""
        self._visits_left -= 1
        if not isinstance(schema, dict) or self._visits_left < 0:
            return schema is not False
        if "const" in schema or "enum" in schema:
            return True
        return (
            ("$ref" not in schema or self._is_finite(schema["$ref"]))
            and all(map(self._matches, list_in(schema, "allOf")))
            and all(
                any(map(self._matches, alternatives))
                for keyword in ("anyOf", "oneOf")
                if (alternatives := list_in(schema, keyword))
            )
            and self._matches_contents(schema)
        )

    def _is_finite(self, reference: Any) -> bool:
        if not isinstance(reference, str) or reference in self._finite:
            return True
        if reference not in self._targets:
            self._targets[reference] = resolve_reference(self._root, reference)
        return False

    def _matches_contents(self, schema: Schema) -> bool:
        """Return whether the required members of an object or an array may be finite."""
        kinds = list_in(schema, "type") or [schema.get("type")]
        return (
            any(kind not in ("object", "array") for kind in kinds)
            or ("object" in kinds and self._matches_object(schema))
            or ("array" in kinds and self._matches_array(schema))
        )

    def _matches_object(self, schema: Schema) -> bool:
        named, patterns = (
            value if isinstance(value := schema.get(keyword), dict) else {}
            for keyword in ("properties", "patternProperties")
        )
        others = [*patterns.values(), schema.get("additionalProperties")]
        names = {name for name in list_in(schema, "required") if isinstance(name, str)}
        contents = [[named[name]] if name in named else others for name in names]
        count = schema.get("minProperties")
        if isinstance(count, int) and count > len(names):
            contents.append([*(named[name] for name in named.keys() - names), *others])
        return all(any(map(self._matches, alternatives)) for alternatives in contents)

    def _matches_array(self, schema: Schema) -> bool:
        count, first = schema.get("minItems"), list_in(schema, "prefixItems")
        if not isinstance(count, int):
            return True
        rest = [schema.get("items")] if count > len(first) else []
        return all(map(self._matches, [*first[: max(0, count)], *rest]))
