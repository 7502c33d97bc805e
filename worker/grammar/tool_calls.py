"""Calls of a request's tools in Lark's notation, written as the model's template writes them."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from worker.grammar.notation import schema_rule
from worker.text.call_form import CallForm

Quote = Callable[[str], str]  # a text as Lark's notation has it
Tool = Mapping[str, Any]

# Where properties may be declared besides.
ELSEWHERE = ("allOf", "anyOf", "oneOf", "$ref", "if", "patternProperties", "dependentSchemas")


def calls_grammar(form: CallForm, tools: Sequence[Tool], several: bool, quote: Quote) -> str:
    """Nothing but calls of these tools; one if not `several`."""
    more = f"({quote(form.between)} call)*" if several and form.between else ""
    return "\n".join(
        [
            f"start: {quote(form.begin)} call {more} {quote(form.end)}",
            "call: " + " | ".join(f"call_{n}" for n in range(len(tools))),
            *(f"call_{n}: {_call(form, tool, quote)}" for n, tool in enumerate(tools)),
        ]
    )


def _call(form: CallForm, tool: Tool, quote: Quote) -> str:
    function = tool["function"]
    options = {
        "whitespace_flexible": False,
        "item_separator": re.escape(form.comma),
        "key_separator": re.escape(form.colon),
        "lenient": True,  # schemas of tools come from everywhere
    }
    schema = schema_rule(_schema(function.get("parameters")), options)
    return f"{quote(function['name'] + form.middle)} {schema}"


def _schema(parameters: Any) -> dict[str, Any]:
    """Arguments are an object of what is declared; a function that declares none takes none."""
    if not parameters:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    schema = dict(parameters)
    if "$ref" not in schema:
        schema["type"] = "object"
    declared = schema.get("properties")
    if isinstance(declared, dict) and not any(key in schema for key in ELSEWHERE):
        required = schema.get("required")
        if set(required if isinstance(required, list) else ()) <= set(declared):
            schema.setdefault("additionalProperties", False)
    return schema
