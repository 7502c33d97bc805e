"""The formats in which chat templates write tool calls: one table for the tests that infer, parse,
constrain and generate them."""

import json
import re
from functools import cache
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from tests.tiny_tokenizers import llama_tokenizer
from worker.text.chat_template.template import ChatTemplate
from worker.text.output_format import (
    DEFAULT_OUTPUT_FORMAT,
    ChannelFormat,
    OutputFormat,
    inferred_output_format,
)
from worker.text.tool_call_format import DELIMITER, ID, ToolCallFormat

# The text before the calls, a call, the text between calls (None: only one is written) and the text
# after them. « » is repeated for each argument.
WRITTEN: dict[str, tuple[str, str, str | None, str]] = {
    "hermes": ("", '<tool_call>\n{"name": "NAME", "arguments": JSON}\n</tool_call>', "\n", ""),
    "coder": (
        "",
        "<tool_call>\n<function=NAME>\n«<parameter=KEY>\nVALUE\n</parameter>\n»</function>\n"
        "</tool_call>",
        "\n",
        "",
    ),
    "pairs": (
        "",
        "<tool_call>NAME\n«<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n»</tool_call>",
        "\n",
        "",
    ),
    "typed": ("", "<|tool_call>call:NAME{«KEY:QUOTED,»}<tool_call|>", "", ""),
    "python": ("<|calls|>[", "NAME(«KEY=LITERAL, »)", ", ", "]<|end_calls|>"),
    "bare python": ("[", "NAME(«KEY=LITERAL, »)", ", ", "]"),
    "args": ("", "[TOOL_CALLS]NAME[CALL_ID]IDENTIFIER[ARGS]JSON", "", ""),
    "list": ("[TOOL_CALLS] [", '{"name": "NAME", "arguments": JSON}', ", ", "]"),
    "key": ("<|prefix|>[", '{"NAME": JSON}', ", ", "]<|suffix|>"),
    "llama": ("", '{"name": "NAME", "parameters": JSON}', None, ""),
    "section": ("<calls>", "<call>functions.NAME:INDEX<args>JSON</call>", "", "</calls>"),
    "tags": ("", "<call name=NAME>«<KEY>VALUE</>»</call>", "", ""),
    "typed tags": (
        "<calls>",
        '<call name="NAME">«<arg name="KEY" text="IS_TEXT">VALUE</arg>»</call>',
        "",
        "</calls>",
    ),
    "named closings": ("", "<call name=NAME>«<KEY>VALUE</KEY>»</call>", "", ""),
}
NAMES = [name for name in WRITTEN if name not in ("hermes", "tags", "typed tags", "named closings")]
JINJA = {
    "NAME": "{{ c.function.name }}",
    "INDEX": "{{ loop.index0 }}",
    "IDENTIFIER": "{{ c.id }}",
    "JSON": "{{ c.function.arguments | tojson }}",
    "KEY": "{{ key }}",
    "VALUE": "{{ value if value is string else value | tojson }}",
    "LITERAL": "{{ value | tojson }}",
    "QUOTED": "{{ quoted(value) }}",
    "IS_TEXT": "{{ 'yes' if value is string else 'no' }}",
    "«": "{% for key, value in c.function.arguments.items() %}",
    "»": "{% endfor %}",
    ", »": "{{ ', ' if not loop.last }}{% endfor %}",
    ",»": "{{ ',' if not loop.last }}{% endfor %}",
    "\n": '{{ "\\n" }}',
    "{": "{{ '{' }}",
}
PLACEHOLDER = re.compile("|".join(map(re.escape, sorted(JINJA, key=len, reverse=True))))
QUOTED = """{% macro quoted(value) %}
{%- if value is string %}<|"|>{{ value }}<|"|>{% elif value is mapping %}{{ '{' }}
{%- for k, v in value.items() %}{{ k }}:{{ quoted(v) }}{{ ',' if not loop.last }}{% endfor %}}
{%- elif value is sequence %}[
{%- for v in value %}{{ quoted(v) }}{{ ',' if not loop.last }}{% endfor %}]
{%- else %}{{ value | tojson }}{% endif %}{% endmacro %}"""
HEAD = """
{%- for tool in tools or [] -%}
    {{- tool.function.name }}{{ tool.function.parameters.properties | list | join(" ") -}}
{%- endfor -%}
{%- for m in messages -%}
    {{- "<|" ~ m.role ~ "|>" -}}
    {%- if m.reasoning_content -%}{{- "<think>" ~ m.reasoning_content ~ "</think>" -}}{%- endif -%}
    {{- m.content or "" -}}
    {%- if m.tool_calls -%}
"""
TAIL = "{%- endif -%}</s>{%- endfor -%}{{- '<|assistant|>' if add_generation_prompt -}}"


def loop(name: str) -> str:
    """Return the part of a template that writes `m.tool_calls` in a format."""
    before, call, between, after = WRITTEN[name]
    calls = "m.tool_calls[:1]" if between is None else "m.tool_calls"
    separator = f"{{{{ {between or ''!r} if not loop.last }}}}"
    each = PLACEHOLDER.sub(lambda match: JINJA[match[0]], call)
    macro = QUOTED if "QUOTED" in call else ""
    return f"{before}{macro}{{% for c in {calls} %}}{each}{separator}{{% endfor %}}{after}"


def written(name: str, *names: str) -> str:
    """Return the text of calls without arguments; {} stands in place of entries."""
    before, call, between, after = WRITTEN[name]
    call = re.sub("«.*»|JSON", "{}", call, flags=re.DOTALL).replace("IDENTIFIER", ID)
    calls = [
        call.replace("NAME", called).replace("INDEX", str(n)) for n, called in enumerate(names)
    ]
    return before + (between or "").join(calls) + after


def delimiters(name: str) -> list[str]:
    """Return the delimiters that may be tokens, in the order of the text; quotes are the last."""
    return sorted(dict.fromkeys(DELIMITER.findall(loop(name))), key=QUOTED.__contains__)


@cache
def call_format_of(name: str) -> ToolCallFormat:
    if name == "channels":
        text = "<|channel|>commentary json<|message|>"
        return ToolCallFormat(("", ""), (" to=functions.", "<|call|>"), text, None)
    template = ChatTemplate(llama_tokenizer(HEAD + loop(name) + TAIL))
    assert template.output_format.tool_calls
    return template.output_format.tool_calls


@cache
def output_format_of(name: str) -> OutputFormat:
    if name == "hermes":
        return DEFAULT_OUTPUT_FORMAT
    if name != "channels":
        return inferred_output_format(("<think>", "</think>"), None, call_format_of(name), None)
    ends = ("<|end|>", "<|return|>", "<|call|>")
    names = ("analysis", "final", " to=functions.")
    channels = ChannelFormat("<|start|>assistant", "<|channel|>", "<|message|>", ends, *names)
    return inferred_output_format(None, None, call_format_of(name), channels)


def arguments_text(name: str, arguments: dict[str, Any]) -> str:
    """Return the text of arguments within a call."""
    form = call_format_of(name).arguments
    if form.style == "json":
        return json.dumps(arguments, ensure_ascii=False, separators=(", ", form.colon))
    if form.style == "python":
        return ", ".join(f"{key}={python(value)}" for key, value in arguments.items())
    return form.comma.join(
        form.open + key + form.middle + entry(form.quotes, value) + form.close
        for key, value in arguments.items()
    )


def call_text(name: str, arguments: dict[str, Any], tool: str = "get") -> str:
    call = call_format_of(name).render([(tool, arguments_text(name, arguments))])
    return call.replace(ID, "id1").lstrip()


def python(value: Any) -> str:
    is_name = isinstance(value, bool) or value is None
    return repr(value) if is_name else json.dumps(value, ensure_ascii=False)


def entry(quotes: str, value: Any) -> str:
    if isinstance(value, str):
        return f"{quotes}{value}{quotes}"
    if quotes and isinstance(value, list):
        return f"[{','.join(entry(quotes, item) for item in value)}]"
    if quotes and isinstance(value, dict):
        return f"{{{','.join(f'{key}:{entry(quotes, item)}' for key, item in value.items())}}}"
    return json.dumps(value)


TOKENIZER = LLTokenizer("byte")


@cache
def matcher_of(grammar: str) -> LLMatcher:
    matcher = LLMatcher(TOKENIZER, grammar)
    assert not matcher.get_error(), matcher.get_error()
    return matcher


def accepts(grammar: str, text: str) -> bool:
    """Whether a grammar accepts the text as a whole output."""
    matcher = matcher_of(grammar)
    assert matcher.reset(), matcher.get_error()
    tokens = TOKENIZER.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()
