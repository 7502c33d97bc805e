"""A tiny random-weight model with a Qwen-style chat template, which has reasoning and tool calls.

Its outputs mean nothing. Its tokenizer has no response template.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

from batching.request_queue import WorkItem
from tests.generating import Request, loaded, shares_template
from tests.tiny import for_tokenizer, hf
from tests.tiny_tokenizers import llama_tokenizer
from worker.engines.generation.engine import GenerationEngine
from worker.engines.generation.loading import load_generator, paged_engine
from worker.messages.deltas import Delta
from worker.messages.generation import Chat, GenerationInput, Sampling, Stopping
from worker.model.language_model import GeneratorOptions
from worker.model.paged_runner import PagedRunner

ORDINARY = Sampling(temperature=1.0, seed=1)
DELIMITERS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
TEMPLATE = """
{%- for tool in (tools or [])[:2] -%}
    {{- tool.function.name[:8] -}}
    {{- (tool.function.parameters or {}).get("properties", {}) | list | join(" ") | truncate(8) -}}
{%- endfor -%}
{%- for message in messages -%}
    {{- "<|" ~ message.role ~ "|>" -}}
    {%- if message.reasoning_content -%}
        {{- "<think>\\n" ~ message.reasoning_content ~ "\\n</think>\\n\\n" -}}
    {%- endif -%}
    {{- message.content or "" -}}
    {%- for call in message.tool_calls or [] -%}
        {{- "\\n" if message.content or not loop.first else "" -}}
        {{- '<tool_call>\\n{"name": "' ~ call.function.name ~ '", "arguments": ' -}}
        {{- (call.function.arguments | tojson) ~ "}\\n</tool_call>" -}}
    {%- endfor -%}
    {{- "</s>" -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- "<|assistant|>" -}}
    {%- if enable_thinking is defined and not enable_thinking -%}
        {{- "<think>\\n\\n</think>\\n\\n" -}}
    {%- elif thinking_begun -%}
        {{- "<think>\\n" -}}
    {%- endif -%}
{%- endif -%}
""".strip()
CONTEXT = 1024


def tokenizer(template: str = TEMPLATE, delimiters: list[str] = DELIMITERS) -> Any:
    chat_tokenizer = llama_tokenizer(template)
    chat_tokenizer.add_tokens(
        [hf.AddedToken(text, normalized=False, special=False) for text in delimiters]
    )
    chat_tokenizer.model_max_length = CONTEXT
    return chat_tokenizer


# A template that accepts no null content beside tool calls, and only ids of nine letters.
STRICT = TEMPLATE.replace(
    '{{- message.content or "" -}}',
    """{{- "" + message.content -}}
    {%- for call in message.tool_calls or [message] -%}
        {%- set id = call.id or call.tool_call_id -%}
        {{- raise_exception("IDs have nine letters") if id and id | length != 9 -}}
    {%- endfor -%}""",
)


@cache
def folder(config: str = "LlamaConfig", template: str = TEMPLATE) -> Path:
    name = f"chat-{config}-{'strict' if template == STRICT else 'plain'}"
    return for_tokenizer(name, tokenizer(template), config)


def options() -> GeneratorOptions:
    return GeneratorOptions(str(folder()), dtype="float32", device="cpu", kv_cache_gb=0.01)


@cache
def _loaded() -> GenerationEngine:
    generator = load_generator(options())
    assert generator.info.batching == "continuous", generator.info.why
    return generator


@shares_template
def engine(speculation: str = "auto", blocks: int = 400) -> GenerationEngine:
    """Return a new engine of a model that is loaded once."""
    engine_options = GeneratorOptions("", speculation=speculation)
    runner = PagedRunner(_loaded().runner.language, blocks, CONTEXT, engine_options.max_running)
    generator = paged_engine(runner, engine_options)
    # all engines share one sandbox process
    generator.input_processor.constraint_builder.grammars = (
        _loaded().input_processor.constraint_builder.grammars
    )
    return generator


@cache
def plain_engine() -> GenerationEngine:
    """Return an engine whose template has neither reasoning nor tools."""
    return loaded("llama")


def asking(
    text: str = "hello",
    sampling: Sampling = ORDINARY,
    max_tokens: int = 300,
    tools: tuple[Any, ...] = (),
    n: int = 1,
    stopping: dict[str, Any] | None = None,
    variables: dict[str, Any] | None = None,
    effort: str | None = None,
    **fields: Any,
) -> Request:
    messages = ({"role": "user", "content": text},)
    payload = GenerationInput(
        Chat(messages, tools, variables or {}, effort=effort),
        sampling,
        Stopping(max_tokens=max_tokens, **(stopping or {})),
        n=n,
        **fields,
    )
    return WorkItem(payload, float("inf"), 0.0)


def calls_of(delta: Delta) -> list[tuple[str, Any]]:
    """Return the names and the arguments of a choice's calls."""
    calls: list[tuple[str, str]] = []
    for part in delta.parts:
        if part.kind == "call" and part.name is not None:
            calls.append((part.name, part.text))
        elif part.kind == "call":
            calls[-1] = (calls[-1][0], calls[-1][1] + part.text)
    return [(name, json.loads(arguments)) for name, arguments in calls]
