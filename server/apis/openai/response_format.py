"""The format that a request asks of its output: `response_format`, `text.format`, or vLLM's
`structured_outputs`.

Chat nests the JSON schema of a format where the Responses API has it flat.
"""

from typing import Any, Literal, Protocol

import orjson
from msgspec import Struct

from batching.errors import InvalidInput
from server.http.json import Document
from worker.messages.generation import Constraint

ANY_OBJECT = {"type": "object"}
CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object")
FormatType = Literal["text", "json_object", "json_schema"]


class JsonSchema(Struct):
    name: str | None = None
    description: str | None = None
    strict: bool | None = None  # ignored: a schema is always enforced
    schema: dict[str, Any] | None = None


class ResponseFormat(Struct):
    """The format of a chat or text completion.

    A schema beside json_object is `schema` for llama.cpp and `value` for huggingface_hub."""

    type: FormatType
    json_schema: JsonSchema | None = None
    schema: dict[str, Any] | None = None
    value: dict[str, Any] | None = None

    def find_schema(self) -> tuple[str, Document | None]:
        """Return the field of the schema, relative to this format, and the schema."""
        if self.type == "json_object":
            if self.schema and self.value:
                raise InvalidInput.at("response_format.value", "cannot be combined with schema")
            field = ".schema" if self.schema else ".value"
            return field, self.schema or self.value or ANY_OBJECT
        return ".json_schema.schema", self.json_schema.schema if self.json_schema else None


class TextFormat(JsonSchema, kw_only=True):
    """The format of a response's text."""

    type: FormatType

    def find_schema(self) -> tuple[str, Document | None]:
        check_depth(self.schema, "text.format.schema")
        if self.type == "json_object":
            return (".schema", self.schema) if self.schema else ("", ANY_OBJECT)
        if self.name is None:
            raise InvalidInput.at("text.format.name", "is required")
        return ".schema", self.schema


class RequestedFormat(Protocol):
    @property
    def type(self) -> str: ...

    def find_schema(self) -> tuple[str, Document | None]:
        """Return the field of the schema, relative to this format, and the schema."""


class StructuredOutputs(Struct):
    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


def output_constraint(
    path: str,
    output_format: RequestedFormat | None,
    structured_outputs: StructuredOutputs | None,
    field: str = "structured_outputs",
) -> Constraint | None:
    """Return the constraint on the output, None for free text.

    `path` is the field of the format, `field` that of `structured_outputs`, or of the only value
    in it. Raises InvalidInput for an unusable one, or for two."""
    by_format = by_structured_outputs = None
    if output_format is not None and output_format.type != "text":
        of_schema, schema = output_format.find_schema()
        by_format = _json_constraint(schema, path + of_schema)
    if structured_outputs is not None:
        by_structured_outputs = _structured_constraint(structured_outputs, field)
    if by_format and by_structured_outputs:
        raise InvalidInput.at(field, f"cannot be combined with {path}")
    return by_format or by_structured_outputs


def check_depth(schema: Document | None, path: str) -> None:
    """Raise InvalidInput for a schema that is nested too deeply to be sent back.

    JSON is parsed to a greater depth than it is written."""
    try:
        orjson.dumps([[[[[[schema]]]]]])  # at least as deep as in an event
    except orjson.JSONEncodeError:
        raise InvalidInput.at(path, "is nested too deeply") from None


def _structured_constraint(structured: StructuredOutputs, field: str) -> Constraint:
    values: dict[str, Any] = {
        name: value for name in CONSTRAINTS if (value := getattr(structured, name)) is not None
    }
    if structured.json_object is False:
        del values["json_object"]
    if len(values) != 1:
        reason = f"needs one of {', '.join(CONSTRAINTS)}, not {len(values)}"
        raise InvalidInput.at("structured_outputs", reason)
    [(name, value)] = values.items()
    path = f"{field}.{name}" if field == "structured_outputs" else field
    if name in ("json", "json_object"):
        return _json_constraint(ANY_OBJECT if name == "json_object" else value, path)
    if not value or (name == "choice" and "" in value):
        raise InvalidInput.at(path, "must not be empty")
    kind: Any = name
    return Constraint(kind, value, path)


def _json_constraint(schema: Document | str | None, path: str) -> Constraint:
    if schema is None:
        raise InvalidInput.at(path, "is required")
    if isinstance(schema, str):
        try:
            schema = orjson.loads(schema)
        except orjson.JSONDecodeError as error:
            raise InvalidInput.at(path, f"is not valid JSON: {error}") from None
        if not isinstance(schema, dict):
            raise InvalidInput.at(path, "must be a JSON object")
    return Constraint("json_schema", schema, path)
