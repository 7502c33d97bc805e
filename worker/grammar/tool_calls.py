"""The grammar of calls: a model's form of them, its tools and their parameters, in Lark's notation.

JSON arguments are left to llguidance; the rules of others are made in argument_grammar.py.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from batching.errors import InvalidInput
from worker.grammar.argument_grammar import ArgumentGrammar
from worker.grammar.lark import Quote, frame, rules_of, schema_of_arguments, schema_rule
from worker.text.tool_call_format import ArgumentFormat, ToolCallFormat

Tool = Mapping[str, Any]


def calls_grammar(
    form: ToolCallFormat,
    tools: Sequence[Tool],
    several: bool,
    quote: Quote,
    begins: Sequence[str] = (),
    started: bool = False,
) -> str:
    """Nothing but calls of these tools; one if not `several`. `begins`: what may stand before
    them. `started`: the model has begun by itself, perhaps in the middle of a section."""
    made: list[str] = []  # rules that others refer to
    section, end = form.section
    before = " ".join(f"({frame(text, quote)})?" for text in begins)
    begin = (frame if section.strip() else _first)(form.call[0], quote)
    opens = _first(section, quote)
    if started and form.call[0].strip() and opens:
        opens = f"({opens})?"
    between = frame((form.separator or "") + form.call[0], quote)
    more = f"({between} call)*" if several and form.separator is not None else ""
    ends = frame(end.rstrip(), quote)
    ends = f"({ends})?" if ends and not section.strip() else ends
    calls = []
    for tool in tools:
        name, parameters = tool["function"]["name"], _rules(tool["function"].get("parameters"))
        if form.arguments.style == "json":
            arguments = _json(form.arguments, parameters)
        else:
            arguments = ArgumentGrammar(form.arguments, quote, made, parameters).arguments()
        begun = frame(form.braces[0] + name + form.middle, quote)
        calls.append(f"{begun} {arguments} {frame(form.braces[1] + form.call[1], quote)}")
    return "\n".join(
        [
            f"start: {before} {opens} {begin} call {more} {ends}",
            "call: " + " | ".join(f"call_{n}" for n in range(len(tools))),
            *(f"call_{n}: {call}" for n, call in enumerate(calls)),
            *made,
        ]
    )


def accepts(form: ToolCallFormat, tools: Sequence[Tool], text: str) -> bool:
    """Whether the grammar of a form takes calls as they are written."""
    tokenizer = LLTokenizer("byte")
    matcher = LLMatcher(tokenizer, calls_grammar(form, tools, True, json.dumps))
    tokens = tokenizer.tokenize_str(text.strip())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def _first(text: str, quote: Quote) -> str:
    """The space before the first text may be left out."""
    bare = text.lstrip()
    space = frame(text[: len(text) - len(bare)], quote)
    return f"({space})? {frame(bare, quote)}" if space else frame(bare, quote)


def _rules(parameters: Any) -> Any:
    try:
        return rules_of(parameters)
    except RecursionError:
        raise InvalidInput("it is nested too deeply") from None


def _json(form: ArgumentFormat, parameters: Any) -> str:
    options = {
        "whitespace_flexible": False,
        "item_separator": re.escape(form.comma),
        "key_separator": re.escape(form.colon),
        "lenient": True,  # schemas of tools come from everywhere
    }
    return schema_rule(schema_of_arguments(parameters), options)
