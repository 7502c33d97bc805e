"""What is asked of Jinja and of the library that renders chat templates, beside rendering."""

import copy
import inspect
from collections.abc import Sequence
from typing import Any

from jinja2 import Template, TemplateError
from jinja2.filters import FILTERS
from jinja2.meta import find_undeclared_variables
from jinja2.sandbox import SandboxedEnvironment
from transformers import PreTrainedTokenizerBase, ProcessorMixin
from transformers.utils import chat_template_utils

from worker.text.turns import Message

SWITCHES = ("enable_thinking", "thinking")  # what templates call it
EFFORT = "reasoning_effort"
utils: Any = chat_template_utils


def source_of(tokenizer: PreTrainedTokenizerBase) -> str:
    source = tokenizer.chat_template or ""
    if isinstance(source, dict):
        source = source.get("tool_use") or source.get("default") or ""
    return str(source)


def variables_of(source: str) -> list[str]:
    """Those that say whether and how much to think."""
    try:
        found = find_undeclared_variables(
            utils._compile_jinja_template("").environment.parse(source)
        )
    except (TemplateError, RecursionError):
        return []
    return [name for name in (EFFORT, *SWITCHES) if name in found]


def lenient(tokenizer: PreTrainedTokenizerBase, source: str) -> Any:
    """Renders what we have made up, in a sandbox where a template may add to its lists: the
    library's forbids it, so that some templates cannot show calls."""
    strict = utils._compile_jinja_template("").environment
    extensions = [type(each) for each in strict.extensions.values()]
    made = SandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    made.filters, made.globals = strict.filters, strict.globals

    def render(messages: list[Message], tools: Sequence[Any] = (), **variables: Any) -> str:
        known = {**tokenizer.special_tokens_map, "add_generation_prompt": True, **variables}
        try:
            template = made.from_string(source)
            messages, tools = copy.deepcopy((messages, list(tools)))  # it may change them
            return template.render(messages=messages, tools=tools or None, **known)
        except Exception:  # whatever it is
            return ""

    return render


def reserved(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """Names that `chat_template_kwargs` may not set: arguments on the way to the template, which
    would be given twice or do something else, special tokens, and the functions it finds."""
    environment = utils._compile_jinja_template("").environment
    way = (
        type(tokenizer).apply_chat_template,
        ProcessorMixin.apply_chat_template,
        utils.render_jinja_template,
        Template.render,
    )
    return {
        "messages",  # what the renderer calls a conversation
        *(name for function in way for name in inspect.signature(function).parameters),
        *tokenizer.SPECIAL_TOKENS_ATTRIBUTES,
        *tokenizer.special_tokens_map,
        *environment.globals,
        *(name for name, _ in environment.filters.items() - FILTERS.items()),
    }
