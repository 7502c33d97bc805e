"""What form a request asks its answer to have: `response_format`, or vLLM's structured_outputs."""

from typing import Annotated, Any

import orjson
from msgspec import Meta, Struct, field

from batching.errors import InvalidInput
from worker.protocol import Constraint

ANY_OBJECT = {"type": "object"}
NULL = Meta(extra_json_schema={"type": "null"})  # refused; for the OpenAPI document
FORMATS = ("text", "json_object", "json_schema")


class JsonSchema(Struct):
    name: str | None = None
    description: str | None = None
    strict: bool | None = None  # it is held to in any case
    schema: dict[str, Any] | None = None


class ResponseFormat(Struct):
    type: Annotated[str, Meta(extra_json_schema={"enum": FORMATS})]
    json_schema: JsonSchema | None = None
    value: dict[str, Any] | None = None  # huggingface_hub's name for a schema


class StructuredOutputs(Struct):
    schema: dict[str, Any] | str | None = field(default=None, name="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    whitespace_pattern: Annotated[Any, NULL] = None
    structural_tag: Annotated[Any, NULL] = None


def constraint_of(
    wanted: ResponseFormat | None, structured: StructuredOutputs | None
) -> Constraint | None:
    """None: free text. InvalidInput for what makes no sense, or is asked for twice."""
    first, second = _of_format(wanted), _of_structured(structured)
    if first and second:
        both = "structured_outputs: excludes response_format"
        raise InvalidInput(both, "structured_outputs")
    return first or second


def json_constraint(schema: dict[str, Any] | None, param: str) -> Constraint:
    if schema is None:
        raise InvalidInput(f"{param}: is required", param)
    return Constraint("json_schema", schema, param)


def _of_format(wanted: ResponseFormat | None) -> Constraint | None:
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type not in FORMATS:
        known = f"must be one of {', '.join(FORMATS)}, not {wanted.type[:50]!r}"
        raise InvalidInput(f"response_format.type: {known}", "response_format.type")
    if wanted.type == "json_object":
        return json_constraint(wanted.value or ANY_OBJECT, "response_format.value")
    schema = wanted.json_schema.schema if wanted.json_schema else None
    return json_constraint(schema, "response_format.json_schema.schema")


def _of_structured(structured: StructuredOutputs | None) -> Constraint | None:
    if structured is None:
        return None
    for name in ("whitespace_pattern", "structural_tag"):
        if getattr(structured, name) is not None:
            param = f"structured_outputs.{name}"
            raise InvalidInput(f"{param}: is not implemented here, leave it out", param)
    named: dict[str, Any] = {
        "json": structured.schema,
        "regex": structured.regex,
        "choice": structured.choice,
        "grammar": structured.grammar,
        "json_object": structured.json_object or None,
    }
    given = {name: value for name, value in named.items() if value is not None}
    if len(given) != 1:
        one = f"structured_outputs: needs one of {', '.join(named)}, not {len(given)}"
        raise InvalidInput(one, "structured_outputs")
    [(name, value)] = given.items()
    param = f"structured_outputs.{name}"
    if name == "json_object":
        return json_constraint(ANY_OBJECT, param)
    if name == "json":
        return json_constraint(_parsed(value, param) if isinstance(value, str) else value, param)
    if not value or (name == "choice" and "" in value):
        raise InvalidInput(f"{param}: must not be empty", param)
    kind: Any = name
    return Constraint(kind, value, param)


def _parsed(text: str, param: str) -> dict[str, Any]:
    try:
        schema = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise InvalidInput(f"{param}: is not JSON: {error}", param) from None
    if not isinstance(schema, dict):
        raise InvalidInput(f"{param}: must be an object", param)
    return schema
