"""What an answer or its calls may be, in Lark's notation as llguidance reads it.

Its size is bounded here; what it takes to compile, in sandbox.py.
"""

import json
import re
from collections.abc import Callable
from typing import Any

from batching.errors import InvalidInput
from worker.grammar.one_of import LITERAL, exclusive
from worker.grammar.string_formats import FORMATS
from worker.messages.generation import Constraint
from worker.text.tool_call_format import PLACEHOLDER_PATTERNS
from worker.text.tool_call_parser import JSON_TYPES

Quote = Callable[[str], str]  # a text in the notation

COMPACT = {"whitespace_flexible": False}
LONGEST = 1_000_000  # characters of a grammar, tools and all
LONGEST_TEXT = {"regex": 50_000, "choice": 100_000, "grammar": 100_000}
MOST_CHOICES = 2_000
REASON = 500  # characters of what the library says
# Where a schema may declare properties besides.
ELSEWHERE = ("allOf", "anyOf", "oneOf", "$ref", "if", "patternProperties", "dependentSchemas")
UNESCAPED = re.compile(r"(\\.)|/|\\?\n")  # in a regex that is to stand between slashes
ESCAPED = {"/": r"\/", "\n": r"\n"}
POSITION = re.compile(r"^at \d+\(\d+\): ")
QUOTED = re.compile(r"\s*(\d+ \||\^)")


def rule(constraint: Constraint) -> str:
    """What follows `start:`, or a whole grammar; InvalidInput if it is none, or too long."""
    value, kind, param = constraint.value, constraint.kind, constraint.param
    if kind == "json_schema" and not isinstance(value, dict):
        raise InvalidInput(f"{param}: must be an object", param)
    if kind in ("regex", "grammar"):
        check_length(value, param, LONGEST_TEXT[kind])
    if kind == "choice" and len(value) > MOST_CHOICES:
        raise InvalidInput(f"{param}: takes at most {MOST_CHOICES} texts", param)
    try:
        if kind == "json_schema":
            written = schema_rule(_without_unknown_formats(value), COMPACT)
        elif kind == "regex":
            written = terminal(value)
        elif kind == "choice":
            written = " | ".join(map(literal, value))
        else:
            written = str(value)
    except Exception as error:  # whatever makes it no schema, or no grammar
        raise unusable(str(error) or type(error).__name__, param) from None
    check_length(written, param, LONGEST_TEXT.get(kind, LONGEST))
    return written


def either(constraint: Constraint, calls: str, before: str) -> str:
    """An answer as the constraint says, after what may stand `before` it; or calls."""
    if constraint.kind != "json_schema":
        only = "goes with tools only where it asks for JSON"
        raise InvalidInput(f"{constraint.param}: {only}", constraint.param)
    lines = [f"calls: {calls.removeprefix('start:')}", f"answer: {before}document"]
    return "\n".join(["start: calls | answer", *lines, f"document: {rule(constraint)}"])


def schema_rule(schema: dict[str, Any], options: dict[str, Any]) -> str:
    """A JSON schema; `options` replace what a client says to llguidance itself. InvalidInput with
    the reason for one with a `oneOf` that cannot be held to."""
    return f"%json {json.dumps({**exclusive(schema), 'x-guidance': options})}"


def schema_of_arguments(parameters: Any) -> dict[str, Any]:
    """Arguments are an object of what is declared; a function that declares none takes none."""
    if not parameters:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    schema = dict(parameters)
    if "$ref" not in schema:
        schema["type"] = "object"
    declared = schema.get("properties")
    if isinstance(declared, dict) and not any(key in schema for key in ELSEWHERE):
        required = schema.get("required")
        if all(key in [*declared] for key in (required if isinstance(required, list) else ())):
            schema.setdefault("additionalProperties", False)
    return schema


def rules_of(schema: Any) -> Any:
    """A tool's schema without descriptions, and without types that JSON has not: what is of one may
    be anything."""
    if isinstance(schema, list):
        return [rules_of(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: value if key in LITERAL else rules_of(value)
        for key, value in schema.items()
        if not (key == "description" and isinstance(value, str))
        and not (key == "type" and _is_unknown(value))
    }


def _is_unknown(kind: Any) -> bool:
    named = kind if isinstance(kind, list) else [kind]
    return any(isinstance(each, str) and each not in JSON_TYPES for each in named)


def literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def frame(text: str, quote: Quote) -> str:
    """A text of a form, with indices and ids."""
    parts = re.split(f"([{''.join(PLACEHOLDER_PATTERNS)}])", text)
    each = (
        f"/{PLACEHOLDER_PATTERNS[part]}/" if part in PLACEHOLDER_PATTERNS else quote(part)
        for part in parts
        if part
    )
    return " ".join(each)


def terminal(pattern: str) -> str:
    """A regular expression, which the notation has between slashes."""
    return f"/{UNESCAPED.sub(lambda found: found[1] or ESCAPED[found[0][-1]], pattern)}/"


def check_length(grammar: str, param: str, longest: int = LONGEST) -> None:
    if len(grammar) > longest:
        raise unusable(f"it is longer than {longest} characters", param)


def unusable(reason: str, param: str) -> InvalidInput:
    """With the library's reason, without the lines of the grammar that it quotes."""
    reason = re.split("<backtrace>|<state>|<non-verbose/>", reason)[0]
    if reason.startswith("panic:"):
        reason = "it is more than the library for grammars can take"
    lines = [line for line in reason.splitlines() if not QUOTED.match(line)]
    reason = POSITION.sub("", " ".join(" ".join(lines).split()).rstrip(": "))
    return InvalidInput(f"{param}: cannot be used: {reason[:REASON]}", param)


def _without_unknown_formats(schema: Any) -> Any:
    """A format is a remark, not a rule, where it is not known."""
    if isinstance(schema, list):
        return [_without_unknown_formats(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: value if key in ("const", "enum") else _without_unknown_formats(value)
        for key, value in schema.items()
        if key != "format" or not isinstance(value, str) or value in FORMATS
    }
