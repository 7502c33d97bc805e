"""The grammar of tool calls, in Lark syntax, from a model's format, its tools and their parameters.

llguidance constrains JSON arguments itself; argument_grammar.py has the rules of other styles.
engines/generation/input_processor.py requests the grammar, compiler.py compiles it.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from batching.errors import InvalidInput
from worker.grammar.argument_grammar import ArgumentGrammar
from worker.grammar.custom_input import escaped_value, plain_pattern, plain_value
from worker.grammar.lark import (
    Quote,
    arguments_schema,
    format_literals,
    regex_terminal,
    schema_rule,
    without_annotations,
)
from worker.messages.generation import INPUT, Constraint
from worker.text.tool_call_format import ArgumentFormat, ToolCallFormat

Tool = Mapping[str, Any]
NO_INPUTS: Mapping[str, Constraint] = {}


def tool_calls_grammar(
    call_format: ToolCallFormat,
    tools: Sequence[Tool],
    several: bool,
    quote: Quote,
    message_starts: Sequence[str] = (),
    started: bool = False,
    inputs: Mapping[str, Constraint] = NO_INPUTS,
) -> str:
    """Return a grammar of calls of these tools and nothing else, of one call unless `several`.
    `message_starts`: texts that may stand before them. `started`: the model has started the call
    itself, perhaps inside a section. `inputs`: the constraints of custom tools' inputs."""
    rules: list[str] = []  # named rules of the arguments
    section, end = call_format.section
    before = " ".join(f"({format_literals(text, quote)})?" for text in message_starts)
    starts_call = format_literals if section.strip() and not started else _optional_space
    first_call = starts_call(call_format.call[0], quote)
    opens = _optional_space(section, quote)
    if started and call_format.call[0].strip() and opens:
        opens = f"({opens})?"
    between = format_literals((call_format.separator or "") + call_format.call[0], quote)
    more = f"({between} call)*" if several and call_format.separator is not None else ""
    closes = format_literals(end.rstrip(), quote)
    closes = f"({closes})?" if closes and (started or not section.strip()) else closes
    calls = []
    for tool in tools:
        name, parameters = tool["function"]["name"], tool["function"].get("parameters")
        if name in inputs:
            arguments = _custom_input(call_format.arguments, inputs[name], quote, rules)
        else:
            arguments = _arguments(call_format.arguments, parameters, quote, rules)
        prefix = format_literals(call_format.braces[0] + name + call_format.middle_of(name), quote)
        suffix = format_literals(call_format.braces[1] + call_format.call[1], quote)
        calls.append(f"{prefix} {arguments} {suffix}")
    return "\n".join(
        [
            f"start: {before} {opens} {first_call} call {more} {closes}",
            "call: " + " | ".join(f"call_{n}" for n in range(len(tools))),
            *(f"call_{n}: {call}" for n, call in enumerate(calls)),
            *rules,
        ]
    )


def text_or_calls(beginnings: Sequence[str], calls: str, special: Sequence[int]) -> str:
    """Return a grammar of text that ends before calls, with them, or with one of the special
    tokens; or that is the beginning of a call, which special tokens may spell in `calls`."""
    text = regex_terminal("(?s:.*)")
    begins = "|".join(map(re.escape, beginnings))
    tokens = f" | <[{','.join(map(str, special))}]>" if special else ""
    return "\n".join(
        [
            f"start: FREE? (calls{tokens})? | BEGINNING",
            f"FREE: {text} & ~{regex_terminal(f'(?s:.*)({begins})(?s:.*)')}",
            f"BEGINNING: {regex_terminal(begins)}",
            f"calls: {calls.removeprefix('start:')}",
        ]
    )


def _custom_input(
    argument_format: ArgumentFormat, constraint: Constraint, quote: Quote, rules: list[str]
) -> str:
    """Return the rule of the only argument of a custom tool."""
    if argument_format.style == "json":
        before = f'{{"{INPUT}"{argument_format.colon}'
        return f"{quote(before)} {escaped_value(constraint)} {quote('}')}"
    if argument_format.style == "python":
        return f"{quote(f'{INPUT}=')} {escaped_value(constraint)}"
    before = argument_format.opening(INPUT, "string") + argument_format.quotes
    close = argument_format.quotes + argument_format.closing(INPUT)
    ending = format_literals(close.lstrip(), quote)
    is_token = ending.startswith("<[")  # a special token, no text
    close = "" if is_token else close
    if constraint.kind == "regex":
        rules.append(f"INPUT_{len(rules)}: {plain_pattern(constraint, close)}")
        text = rules[-1].partition(":")[0]
    else:
        text = plain_value(constraint, close)
    return f"{quote(before)} {text} {ending if is_token else ''}"


def accepts(call_format: ToolCallFormat, tools: Sequence[Tool], text: str) -> bool:
    """Return whether the grammar of a format accepts the text of calls."""
    tokenizer = LLTokenizer("byte")
    matcher = LLMatcher(tokenizer, tool_calls_grammar(call_format, tools, True, json.dumps))
    tokens = tokenizer.tokenize_str(text.strip())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def _optional_space(text: str, quote: Quote) -> str:
    """White space before the text may be missing."""
    bare = text.lstrip()
    space = format_literals(text[: len(text) - len(bare)], quote)
    literals = format_literals(bare, quote)
    return f"({space})? {literals}" if space else literals


def _arguments(
    argument_format: ArgumentFormat, parameters: Any, quote: Quote, rules: list[str]
) -> str:
    """Return the rule of a function's arguments; InvalidInput with the reason."""
    options = {
        "whitespace_flexible": False,
        "item_separator": re.escape(argument_format.comma),
        "key_separator": re.escape(argument_format.colon),
        "lenient": True,  # tools' schemas may have keywords that llguidance does not support
    }
    try:
        schema = without_annotations(parameters, of_tool=True)
        if argument_format.style == "json":
            return schema_rule(arguments_schema(schema), options)
        return ArgumentGrammar(argument_format, quote, rules, schema).arguments()
    except RecursionError:
        raise InvalidInput("it is nested too deeply") from None
