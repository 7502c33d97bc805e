"""A tokenizer's chat template: a conversation as its text, in the form that the template takes.

    at load:    messages made up for it  --tried-->  texts  --chat_template/inference.py-->  forms
    a request:  messages  --history.py-->  messages as the template takes them  --render-->  text

A *form* is what is known of a template: how answers and their calls are written (output_format.py,
tool_call_format.py), and how calls and results are taken back (history.py). Requests come in pool
threads.
"""

import copy
import inspect
import json
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

from jinja2 import Template, TemplateError
from jinja2.filters import FILTERS
from jinja2.meta import find_undeclared_variables
from jinja2.sandbox import SandboxedEnvironment
from transformers import PreTrainedTokenizerBase, ProcessorMixin
from transformers.utils import chat_template_utils

from batching.errors import InvalidInput
from worker.messages.generation import Chat, ToolCallPolicy
from worker.text.chat_template.history import (
    QUESTION,
    HistoryAdapter,
    HistoryFormat,
    Message,
    Render,
)
from worker.text.chat_template.inference import (
    CONTENT,
    INSTEAD,
    SWITCHES,
    TOOLS,
    learn,
    names_tools,
    plain_calls,
    shown_calls,
)
from worker.text.output_format import DEFAULT_OUTPUT_FORMAT, OutputFormat
from worker.text.tool_call_format import DEFAULT_TOOL_CALL_FORMAT

EFFORT = "reasoning_effort"
INSTRUCTIONS = """# Tools

You may call functions. Each is described by a line of JSON between <tools> and </tools>:
<tools>
{tools}
</tools>
To call one, write its name and a value for each of its parameters just so:
{example}"""
log = logging.getLogger("onequeue.template")
utils: Any = chat_template_utils


class RenderedPrompt(NamedTuple):
    """The text of a chat's prompt, and how the model writes the response to it."""

    text: str
    output_format: OutputFormat


class ChatTemplate:
    """`answers`: how they are written. `turns`: how calls and results are taken; None: not at all.
    `examples`: calls as the template writes them, with the names and arguments that went in.
    `notes`: what the template lacks, and what is done instead. `source`: nothing if there is no
    template. `opens_thoughts`: the tokens by which the model does so; none if the prompt does.
    Some templates of models that see take no text as content, but parts alone: they get those."""

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
        self._thinking = [name for name in (EFFORT, *SWITCHES) if name in found]
        self._reserved = self._own_names()
        self._wants_parts = False
        asked = {"role": "user", "content": CONTENT}
        if CONTENT not in self.tried([asked]):
            self._wants_parts = CONTENT in self.tried([_in_parts(asked)])
        response = getattr(tokenizer, "response_template", None)
        learned = learn(self.tried, self._lenient(), self.source, response)
        self.answers, self.turns, self.shows_tools, self.examples, lacks = learned
        self.notes: list[str] = []
        # Or they are told in a system message. A template that takes nothing says so itself.
        told = self.tried(self._instructed([QUESTION], TOOLS))
        self.takes_tools = self.shows_tools or names_tools(told) or not self.tried([QUESTION])
        self.opens_thoughts = self._start_of_thoughts()
        for lack in lacks:
            self._note(lack)
        if not self.takes_tools:
            self._note("tools: the template shows neither tools nor a system message; refused")
        elif not self.shows_tools:
            self._note("tools: the template does not show them; told in the system message")

    def _note(self, lack: str) -> None:
        """A checkpoint without a template lacks nothing: it takes no chats."""
        if self.source:
            self.notes.append(lack)
            log.warning("chat template: %s", lack)

    def refuse_calls(self, why: str) -> None:
        """The form of calls is not used: it does not prove itself elsewhere."""
        self._note(f"calls: {why}; {INSTEAD}")
        self.answers, self.examples = plain_calls(self.answers), []

    # ── what is known of it ──

    def output_format_for(self, calls: ToolCallPolicy | None) -> OutputFormat:
        """Return the format of responses: the default one, where tool calls are requested and the
        format in which this model writes them is unknown."""
        known = self.answers
        if calls and (not known.call_delimiters or (calls.required and known.tool_calls is None)):
            return DEFAULT_OUTPUT_FORMAT
        return known

    def call_id(self, name: str, index: int) -> str:
        """For a call that the model makes, its conversation's `index`-th."""
        return (self.turns or HistoryFormat()).call_id(name, index)

    def _start_of_thoughts(self) -> tuple[int, ...]:
        form, prompt = self.answers, self.tried([QUESTION], enable_thinking=True)
        begun = form.reasoning_at_end(prompt)
        if form.reasoning is None or not prompt or (begun and not form.ends_reasoning(begun)):
            return ()
        return self._tokens(form.reasoning[0])

    def end_of_thoughts(self, form: OutputFormat) -> tuple[int, ...]:
        """The tokens of the mark that ends them; InvalidInput if there is none."""
        if form.reasoning is None:
            param = "thinking_token_budget"
            raise InvalidInput(f"{param}: it is not known how this model ends its thoughts", param)
        return self._tokens(form.reasoning[1])

    def _tokens(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    # ── requests ──

    def render(self, chat: Chat, calls: ToolCallPolicy | None = None) -> RenderedPrompt:
        """Render a chat's prompt. `calls`: the tool calls that the response may contain.

        Raise InvalidInput, with the template's own reason if it gives one."""
        return RenderedPrompt(self._rendered(chat), self.output_format_for(calls))

    def _rendered(self, chat: Chat) -> str:
        if not self._tokenizer.chat_template:
            raise InvalidInput("this model has no chat template: use /v1/completions", "messages")
        for name in chat.template_kwargs:
            if name in self._reserved:
                param = f"chat_template_kwargs.{name}"
                raise InvalidInput(f"{param}: is not a variable of the template", param)
        variables = {
            "add_generation_prompt": chat.add_generation_prompt,
            "continue_final_message": chat.continue_final_message,
            **self._effort(chat),
            **chat.template_kwargs,
        }
        try:
            messages, tools = self._taken(chat)
            try:
                return self._text(messages, tools, **variables)
            except Exception:  # some fail only where a tool or its parameters are not described
                if (described := [_described(tool) for tool in tools]) == tools:
                    raise
                return self._text(messages, described, **variables)
        except InvalidInput:
            raise
        except Exception as error:  # whatever a template raises
            # What it says by raise_exception is meant to be read; other errors are its insides.
            said = error.message if type(error) is TemplateError else None
            why = f"refuses the messages: {said[:500]}" if said else "cannot render these messages"
            raise InvalidInput(f"the model's chat template {why}", "messages") from error

    def _effort(self, chat: Chat) -> dict[str, Any]:
        """The template's variables that say how much to think; it may know none."""
        if chat.effort is None:
            return {}
        switch = chat.effort != "none"
        return {name: chat.effort if name == EFFORT else switch for name in self._thinking}

    def _taken(self, chat: Chat) -> tuple[list[Message], list[Message]]:
        """Messages and tools as the template takes them."""
        # Newer versions of transformers show a template no None; older ones do.
        messages = [
            {key: value for key, value in message.items() if value is not None}
            for message in chat.messages
        ]
        if any(
            each["role"] == "tool" or each.get("tool_calls") or each.get("reasoning_content")
            for each in messages
        ):
            if self.turns is None:
                cannot = "the model's chat template cannot show calls and their results"
                raise InvalidInput(cannot, "messages")
            calls = self.answers.tool_calls
            written = (
                calls if calls and calls.arguments.style == "json" else DEFAULT_TOOL_CALL_FORMAT
            )
            messages = HistoryAdapter(self.turns, written).adapt(messages)
        tools = [dict(tool) for tool in chat.tools]
        if tools and not self.takes_tools:
            cannot = "the model's chat template can show neither tools nor a system message"
            raise InvalidInput(f"tools: {cannot}", "tools")
        if tools and not self.shows_tools:
            return self._instructed(messages, tools), []
        return messages, tools

    def _instructed(self, messages: Sequence[Message], tools: Sequence[Message]) -> list[Message]:
        """With the tools in the system's message, for a template that does not show them."""
        listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        told = INSTRUCTIONS.format(tools=listed, example=shown_calls(self.examples, 1))
        first, *others = messages
        if first["role"] not in ("system", "developer"):
            return [{"role": "system", "content": told}, *messages]
        content = first["content"]
        if isinstance(content, str):
            return [{**first, "content": f"{content}\n\n{told}"}, *others]
        return [{**first, "content": [*content, {"type": "text", "text": told}]}, *others]

    # ── the template as a function ──

    def tried(self, messages: list[Message], tools: Sequence[Any] = (), **variables: Any) -> str:
        """With the generation prompt, if nothing else is said; "" where the template raises."""
        try:
            return self._text(messages, tools, **{"add_generation_prompt": True, **variables})
        except Exception:  # whatever it is
            return ""

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

    def _lenient(self) -> Render:
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

    def _given(self, messages: list[Message]) -> list[Message]:
        return [_in_parts(each) for each in messages] if self._wants_parts else messages

    def _own_names(self) -> set[str]:
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
            "messages",  # what the library calls a conversation
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
