"""The constraints of a request as grammars in Lark syntax, as llguidance reads it.

The size of a grammar is bounded here; the cost of compiling it, in sandbox.py.
"""

import json
import re
from collections.abc import Callable
from typing import Any

from batching.errors import InvalidInput
from worker.messages.generation import Constraint
from worker.text.tool_call_format import PLACEHOLDER_PATTERNS
from worker.text.tool_call_parser import JSON_TYPES

Quote = Callable[[str], str]  # from a text to Lark literals

COMPACT_JSON = {"whitespace_flexible": False}
FORMATS = {"date-time", "time", "date", "duration", "email"}  # of strings, that llguidance enforces
FORMATS |= {"hostname", "ipv4", "ipv6", "uuid", "uri"}
LITERAL_KEYWORDS = ("const", "enum")  # their values are no schemas
NO_VALUE: dict[str, Any] = {"not": {}}  # as zod writes undefined
MAX_LENGTH = 1_000_000  # characters of a grammar, with all tools
MAX_LENGTH_OF = {"regex": 50_000, "choice": 100_000, "grammar": 100_000}  # by kind
MAX_CHOICES = 2_000
MAX_REASON = 500  # characters of llguidance's message
# Keywords beside `properties` that may declare properties.
APPLICATORS = ("allOf", "anyOf", "oneOf", "$ref", "if", "patternProperties", "dependentSchemas")
# Keywords that the properties of an object are declared or required by.
OF_OBJECTS = {"properties", "required", "additionalProperties", "unevaluatedProperties"}
OF_OBJECTS |= {"minProperties", *LITERAL_KEYWORDS}
SCHEMAS_BY_NAME = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
UNESCAPED = re.compile(r"(\\.)|/|\\?\n")  # in a regex between slashes
ESCAPED = {"/": r"\/", "\n": r"\n"}
# Attributes of a rule. That of a capture, as guidance writes it, changes nothing here.
ATTRIBUTES = re.compile(
    r'^[ \t]*[?!]?[\w-]+[ \t]*\[(?!capture(?:="[\w-]*")?\])(.*?)\][ \t]*:', re.MULTILINE
)
POSITION = re.compile(r"^at \d+\(\d+\): ")
QUOTED_LINE = re.compile(r"\s*(\d+ \||\^)")


def content_rule(constraint: Constraint) -> str:
    """Return the body of a rule, or a whole grammar for the kind `grammar`; InvalidInput if the
    constraint is invalid or too long."""
    value, kind, param = constraint.value, constraint.kind, constraint.param
    if kind == "grammar":
        check_grammar(value, param)
        return str(value)
    if kind == "json_schema" and not isinstance(value, dict):
        raise InvalidInput.at(param, "must be an object")
    if kind == "choice" and len(value) > MAX_CHOICES:
        raise InvalidInput.at(param, f"takes at most {MAX_CHOICES} choices, not {len(value)}")
    try:
        if kind == "json_schema":
            schema = without_annotations(value)
            if not combines_schemas(schema):
                schema = close_objects(schema)
            rule = schema_rule(schema, COMPACT_JSON)
        elif kind == "regex":
            rule = regex_terminal(value)
        else:
            rule = " | ".join(map(string_literal, value))
    except Exception as error:  # anything that is wrong with the schema or grammar
        raise unusable_grammar(str(error) or type(error).__name__, param) from None
    check_length(rule, param, MAX_LENGTH_OF.get(kind, MAX_LENGTH))
    return rule


def content_or_calls(constraint: Constraint, calls: str, before: str) -> str:
    """Return a grammar of constrained content, after the rules `before` it, or of tool calls."""
    if constraint.kind != "json_schema":
        reason = "must be a JSON schema where the request has tools"
        raise InvalidInput.at(constraint.param, reason)
    return "\n".join(
        [
            "start: calls | answer",
            f"calls: {calls.removeprefix('start:')}",
            f"answer: {before}document",
            f"document: {content_rule(constraint)}",
        ]
    )


def schema_rule(schema: dict[str, Any], options: dict[str, Any]) -> str:
    """Return the rule of a JSON schema. `options` replace those that the client set for llguidance
    in it. The branches of a `oneOf` may overlap."""
    options = {"coerce_one_of": True, **options}
    return f"%json {json.dumps({**schema, 'x-guidance': options})}"


def arguments_schema(parameters: Any) -> dict[str, Any]:
    """Return the schema of a function's arguments: an object of the declared properties; an empty
    one if none are declared."""
    if not parameters:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    schema = dict(parameters)
    if "$ref" not in schema:
        schema["type"] = "object"
    properties = schema.get("properties")
    if isinstance(properties, dict) and not any(key in schema for key in APPLICATORS):
        required = schema.get("required")
        if all(key in [*properties] for key in (required if isinstance(required, list) else ())):
            schema.setdefault("additionalProperties", False)
    return schema


def close_objects(schema: Any) -> Any:
    """Allow only declared properties where a schema does not say whether others are allowed, as
    vLLM and llama.cpp do. Small models would add properties without end."""
    if not isinstance(schema, dict):
        return [close_objects(item) for item in schema] if isinstance(schema, list) else schema
    closed: dict[str, Any] = {}
    for key, value in schema.items():
        if key in SCHEMAS_BY_NAME and isinstance(value, dict):
            closed[key] = {name: close_objects(part) for name, part in value.items()}
        else:
            closed[key] = value if key in LITERAL_KEYWORDS else close_objects(value)
    properties = schema.get("properties")
    if not isinstance(properties, dict) or not properties.keys() >= {*schema.get("required", ())}:
        return closed
    if properties and OF_OBJECTS & schema.keys() <= {"properties", "required"}:
        closed["additionalProperties"] = False
    return closed


def combines_schemas(schema: Any) -> bool:
    """Return whether two schemas within one apply to the same value, such as those of an `allOf`:
    each may declare properties of an object."""
    if isinstance(schema, list):
        return any(map(combines_schemas, schema))
    if not isinstance(schema, dict):
        return False
    applied = [key for key in APPLICATORS if key in schema]
    several = schema.get("allOf")
    if len(applied) > 1 or (isinstance(several, list) and len(several) > 1):
        return True
    declares = bool(applied) and not OF_OBJECTS.isdisjoint(schema)
    return declares or any(map(combines_schemas, schema.values()))


def without_annotations(schema: Any, of_tool: bool = False, is_strict: bool = False) -> Any:
    """Remove descriptions and what llguidance would reject: `propertyNames` that allow any name,
    and unknown formats unless `is_strict`. Write the schema of no value, `not: {}`, as False. Of a
    tool's schema also remove types that JSON does not have: their values are unconstrained."""

    def within(part: Any) -> Any:
        return part != NO_VALUE and without_annotations(part, of_tool, is_strict)

    def is_annotation(key: str, value: Any) -> bool:
        if key == "format":
            return isinstance(value, str) and value not in FORMATS and not is_strict
        if key == "type":
            return of_tool and _has_unknown_type(value)
        return key == "description" or (key, value) == ("propertyNames", {"type": "string"})

    if isinstance(schema, list):
        return [within(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    kept: dict[str, Any] = {}
    for key, value in schema.items():
        if key in SCHEMAS_BY_NAME and isinstance(value, dict):
            kept[key] = {name: within(part) for name, part in value.items()}
        elif not is_annotation(key, value):
            kept[key] = value if key in LITERAL_KEYWORDS else within(value)
    return kept


def _has_unknown_type(types: Any) -> bool:
    names = types if isinstance(types, list) else [types]
    return any(isinstance(name, str) and name not in JSON_TYPES for name in names)


def string_literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def format_literals(text: str, quote: Quote) -> str:
    """Return a text of a ToolCallFormat as literals, and its placeholders as patterns."""
    parts = re.split(f"([{''.join(PLACEHOLDER_PATTERNS)}])", text)
    return " ".join(
        f"/{PLACEHOLDER_PATTERNS[part]}/" if part in PLACEHOLDER_PATTERNS else quote(part)
        for part in parts
        if part
    )


def regex_terminal(pattern: str) -> str:
    """Return a regular expression between slashes."""
    return f"/{UNESCAPED.sub(lambda match: match[1] or ESCAPED[match[0][-1]], pattern)}/"


def check_length(grammar: str, param: str, max_length: int = MAX_LENGTH) -> None:
    if len(grammar) > max_length:
        raise unusable_grammar(f"it has {len(grammar)} characters, more than {max_length}", param)


def check_grammar(grammar: str, param: str) -> None:
    """Raise InvalidInput for a client's grammar that is too long, or whose rules have attributes,
    such as max_tokens: these are not served."""
    check_length(grammar, param, MAX_LENGTH_OF["grammar"])
    if match := ATTRIBUTES.search(grammar):
        raise unusable_grammar(f"rules have no attributes here, as [{match[1][:50]}]", param)


def unusable_grammar(reason: str, param: str) -> InvalidInput:
    """Return an error with llguidance's reason, without the lines of the grammar that it quotes."""
    reason = re.split("<backtrace>|<state>|<non-verbose/>", reason)[0]
    if reason.startswith("panic:"):
        reason = "the grammar library cannot process it"
    lines = [line for line in reason.splitlines() if not QUOTED_LINE.match(line)]
    reason = POSITION.sub("", " ".join(" ".join(lines).split()).rstrip(": "))
    return InvalidInput(f"{param}: cannot be compiled: {reason[:MAX_REASON]}", param)
