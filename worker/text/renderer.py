"""A tokenizer's chat template as a function from messages to text, and its variables.

What it is asked to render, and what becomes of it if it cannot, is chat_template.py's.
"""

import copy
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from jinja2 import Template, TemplateError
from jinja2.filters import FILTERS
from jinja2.meta import find_undeclared_variables
from jinja2.sandbox import SandboxedEnvironment
from transformers import PreTrainedTokenizerBase, ProcessorMixin
from transformers.utils import chat_template_utils

from worker.text.turns import Message

WORD = "qpartq"  # occurs nowhere else
SWITCHES = ("enable_thinking", "thinking")  # what templates call it
EFFORT = "reasoning_effort"
utils: Any = chat_template_utils

# Messages, tools and variables as the template's text; nothing where it raises.
Render = Callable[..., str]


class Renderer:
    """`source`: of the template; nothing if there is none. `thinking`: its variables that say
    whether and how much to think. Some templates of models that see take no text as content, but
    lists of parts alone: they are given those."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._environment = utils._compile_jinja_template("").environment
        source = tokenizer.chat_template or ""
        if isinstance(source, dict):
            source = source.get("tool_use") or source.get("default") or ""
        self.source = str(source)
        try:
            found = find_undeclared_variables(self._environment.parse(self.source))
        except (TemplateError, RecursionError):
            found = set()
        self.thinking = [name for name in (EFFORT, *SWITCHES) if name in found]
        self.reserved = self._reserved()
        self._wants_parts = False
        self._wants_parts = self._shows_parts_alone()

    def text(self, messages: list[Message], tools: Sequence[Message], **variables: Any) -> str:
        """Raises what the template raises; but some fail only where there are no tools, or where
        one or its parameters are not described."""
        try:
            return self._text(messages, tools, **variables)
        except Exception:
            described = [_described(tool) for tool in tools]
            if described == tools:
                raise
            return self._text(messages, described, **variables)

    def tried(self, messages: list[Message], tools: Sequence[Any] = (), **variables: Any) -> str:
        """With the generation prompt, if nothing else is said; "" where the template raises."""
        try:
            return self._text(messages, tools, **{"add_generation_prompt": True, **variables})
        except Exception:  # whatever it is
            return ""

    def lenient(self) -> Render:
        """As `tried`, in a sandbox where a template may add to its lists: the library's forbids it,
        so that some templates cannot show calls. For messages that we have made up."""
        strict = self._environment
        extensions = [type(each) for each in strict.extensions.values()]
        sandbox = SandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        sandbox.filters, sandbox.globals = strict.filters, strict.globals

        def tried(messages: list[Message], tools: Sequence[Any] = (), **variables: Any) -> str:
            known = {"add_generation_prompt": True, **variables}
            try:
                template = sandbox.from_string(self.source)
                given = self._given(messages)
                messages, tools = copy.deepcopy((given, list(tools)))  # it may change them
                known |= {"messages": messages, "tools": tools or None}
                return template.render(self._tokenizer.special_tokens_map, **known)
            except Exception:  # whatever it is
                return ""

        return tried

    def _text(self, messages: list[Message], tools: Sequence[Message], **variables: Any) -> str:
        render: Any = self._tokenizer.apply_chat_template
        messages = self._given(messages)
        given = {"tokenize": False, **variables}
        try:
            text = render(messages, tools=list(tools) or None, **given)
        except TypeError:
            if tools:
                raise
            text = render(messages, tools=[], **given)  # some take no None
        assert isinstance(text, str)
        return text

    def _shows_parts_alone(self) -> bool:
        asked = {"role": "user", "content": WORD}
        return WORD not in self.tried([asked]) and WORD in self.tried([_in_parts(asked)])

    def _given(self, messages: list[Message]) -> list[Message]:
        return [_in_parts(each) for each in messages] if self._wants_parts else messages

    def _reserved(self) -> set[str]:
        """Names that `chat_template_kwargs` may not set: arguments on the way to the template,
        which would be given twice or do something else, special tokens, and the functions it
        finds."""
        way = (
            type(self._tokenizer).apply_chat_template,
            ProcessorMixin.apply_chat_template,
            utils.render_jinja_template,
            Template.render,
        )
        return {
            "messages",  # what the renderer calls a conversation
            *(name for function in way for name in inspect.signature(function).parameters),
            *self._tokenizer.SPECIAL_TOKENS_ATTRIBUTES,
            *self._tokenizer.special_tokens_map,
            *self._environment.globals,
            *(name for name, _ in self._environment.filters.items() - FILTERS.items()),
        }


def _in_parts(message: Message) -> Message:
    content = message.get("content")
    if not content or not isinstance(content, str):
        return message
    return {**message, "content": [{"type": "text", "text": content}]}


def _described(tool: Message) -> Message:
    function = {"description": "", "parameters": {}, **tool["function"]}
    parameters = function["parameters"] or {"type": "object", "properties": {}}
    properties = parameters.get("properties")
    if isinstance(properties, dict):
        described = {
            key: {"description": "", **each} if isinstance(each, dict) else each
            for key, each in properties.items()
        }
        parameters = {**parameters, "properties": described}
    return {**tool, "function": {**function, "parameters": parameters}}
