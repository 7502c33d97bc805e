"""What form a request asks its answer to have: a format, or vLLM's `structured_outputs`.

Chat nests a format's schema where the Responses API has it flat; both are read here.
"""

from typing import Any, Literal

import orjson
from msgspec import Struct

from batching.errors import InvalidInput
from server.http.json import Document
from worker.messages.generation import Constraint

ANY_OBJECT = {"type": "object"}
KINDS = ("json", "regex", "choice", "grammar", "json_object")
FormatType = Literal["text", "json_object", "json_schema"]


class JsonSchema(Struct):
    name: str | None = None
    description: str | None = None
    strict: bool | None = None  # it is enforced in any case
    schema: dict[str, Any] | None = None


class ResponseFormat(Struct):
    type: FormatType
    json_schema: JsonSchema | None = None
    # Schemas beside json_object: llama.cpp's name for them, and huggingface_hub's.
    schema: dict[str, Any] | None = None
    value: dict[str, Any] | None = None

    def schema_asked(self) -> tuple[str, Document | None]:
        """Where in it the schema stands that the answer is to have, and the schema."""
        if self.type == "json_object":
            if self.schema and self.value:
                raise InvalidInput.at("response_format.value", "excludes schema")
            below = ".schema" if self.schema else ".value"
            return below, self.schema or self.value or ANY_OBJECT
        return ".json_schema.schema", self.json_schema.schema if self.json_schema else None


class Format(JsonSchema, kw_only=True):
    type: FormatType

    def schema_asked(self) -> tuple[str, Document | None]:
        check_depth(self.schema, "text.format.schema")
        if self.type == "json_object":
            return (".schema", self.schema) if self.schema else ("", ANY_OBJECT)
        if self.name is None:
            raise InvalidInput.at("text.format.name", "is required")
        return ".schema", self.schema


class StructuredOutputs(Struct):
    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


def constraint_of(
    path: str, format: ResponseFormat | Format | None, structured: StructuredOutputs | None
) -> Constraint | None:
    """None: free text. InvalidInput for what makes no sense, or is asked for twice; `path` is what
    errors call the format."""
    first = second = None
    if format is not None and format.type != "text":
        below, schema = format.schema_asked()
        first = _json(schema, path + below)
    if structured is not None:
        second = _of_structured(structured)
    if first and second:
        raise InvalidInput.at("structured_outputs", f"excludes {path}")
    return first or second


def check_depth(schema: Document | None, path: str) -> None:
    """JSON may be parsed that is nested too deeply to be written, and this is sent back."""
    try:
        orjson.dumps([[[[[[schema]]]]]])  # at least as deep as it lies in an event
    except orjson.JSONEncodeError:
        raise InvalidInput.at(path, "is nested too deeply") from None


def _of_structured(structured: StructuredOutputs) -> Constraint:
    given = {name: value for name in KINDS if (value := getattr(structured, name)) is not None}
    if structured.json_object is False:
        del given["json_object"]
    if len(given) != 1:
        one = f"needs one of {', '.join(KINDS)}, not {len(given)}"
        raise InvalidInput.at("structured_outputs", one)
    [(name, value)] = given.items()
    path = f"structured_outputs.{name}"
    if name in ("json", "json_object"):
        return _json(ANY_OBJECT if name == "json_object" else value, path)
    if not value or (name == "choice" and "" in value):
        raise InvalidInput.at(path, "must not be empty")
    kind: Any = name
    return Constraint(kind, value, path)


def _json(schema: Document | str | None, path: str) -> Constraint:
    if schema is None:
        raise InvalidInput.at(path, "is required")
    if isinstance(schema, str):
        try:
            schema = orjson.loads(schema)
        except orjson.JSONDecodeError as error:
            raise InvalidInput.at(path, f"is not JSON: {error}") from None
        if not isinstance(schema, dict):
            raise InvalidInput.at(path, "must be an object")
    return Constraint("json_schema", schema, path)
