"""A tokenizer's chat template: renders a conversation, and infers formats from it.

    at load:    probing messages  --try_render-->  texts  --inference.py-->  formats
    a request:  messages  --history.py-->  messages of the template  --render-->  prompt

The formats: how the model writes its output (output_format.py, tool_call_format.py), and how the
template takes earlier calls and results (history.py). Requests are rendered in pool threads.
"""

import copy
import inspect
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import date
from itertools import product, takewhile
from types import MappingProxyType
from typing import Any, NamedTuple

from jinja2 import Template, TemplateError
from jinja2.filters import FILTERS
from jinja2.meta import find_undeclared_variables
from transformers import PreTrainedTokenizerBase, ProcessorMixin
from transformers.utils import chat_template_utils

from batching.errors import InvalidInput
from worker.messages.generation import Chat, ToolCallPolicy, without_video_sound
from worker.text.chat_template.history import (
    QUESTION,
    HistoryAdapter,
    HistoryFormat,
    Message,
    fold_messages,
)
from worker.text.chat_template.inference import (
    ARGUMENTS,
    CONTENT,
    FALLBACK,
    IDS,
    SWITCHES,
    TOOLS,
    assistant,
    example_calls,
    infer_profile,
    with_default_calls,
)
from worker.text.chat_template.sandbox import TemplateTooExpensive, lenient
from worker.text.output_format import DEFAULT_OUTPUT_FORMAT, OutputFormat
from worker.text.tekken import INSTALL, lacks_mistral_common
from worker.text.tool_call_format import DEFAULT_TOOL_CALL_FORMAT

EFFORT = "reasoning_effort"
EFFORTS = None, "none", "high"  # of probing messages
ROLES = "system", "developer", "user", "assistant", "tool"
MAX_REASON = 500  # characters of the template's own error
INSTRUCTIONS = """# Tools

You may call functions. Each is described by a line of JSON between <tools> and </tools>:
<tools>
{tools}
</tools>
To call one, write its name and a value for each of its parameters just so:
{example}"""
NO_TEMPLATE = "no chat template: use /v1/completions, or set CHAT_TEMPLATE=file.jinja%s"
log = logging.getLogger("onequeue.template")
utils: Any = chat_template_utils  # untyped


class RenderedPrompt(NamedTuple):
    """The text of a chat's prompt, and how the model writes the response to it."""

    text: str
    output_format: OutputFormat


class ChatTemplate:
    """`defaults`: variables, by CHAT_TEMPLATE_KWARGS. `reasoning`: auto, or the value of the
    template's switches, on or off. `source`: "" without a template.
    `history_format`: None if the template takes no calls or results. `examples`: calls as the
    template renders them, with their names and arguments. `notes`: what the template lacks, and
    what is done instead. `reasoning_start`: the tokens that the model writes before it reasons;
    empty if the prompt ends with them. `omits_video_sound`: the processor adds its tokens."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        defaults: Mapping[str, Any] = MappingProxyType({}),
        reasoning: str = "auto",
    ) -> None:
        self._tokenizer, self._defaults = tokenizer, defaults
        self.omits_video_sound = False
        self._environment = utils._compile_jinja_template("").environment
        source = tokenizer.chat_template or ""
        if isinstance(source, dict):
            source = source.get("tool_use") or source.get("default") or ""
        self.source = str(source)
        self._alternative = f"; or {INSTALL}" if lacks_mistral_common(tokenizer) else ""
        if not self.source:
            log.warning(NO_TEMPLATE, self._alternative)
        try:
            variables = find_undeclared_variables(self._environment.parse(self.source))
        except (TemplateError, RecursionError):
            variables = set()
        self._takes_documents = "documents" in variables
        self._takes_functions = "functions" in variables and "tools" not in variables
        self._effort_variables = [name for name in (EFFORT, *SWITCHES) if name in variables]
        switches = variables & {*SWITCHES} if reasoning != "auto" else ()
        self._switch_defaults = dict.fromkeys(switches, reasoning == "on")
        self._reserved_names = self._find_reserved_names()
        for name in self._reserved_names & defaults.keys():
            raise ValueError(f"CHAT_TEMPLATE_KWARGS: {name} is not a variable of the template")
        # Some render content, or that of system messages, only as a list of parts.
        self._roles_with_parts = frozenset[str]()
        question, system = ({"role": role, "content": CONTENT} for role in ("user", "system"))
        for messages, roles in (([question], ROLES), ([system, question], ("system",))):
            if self.try_render(messages).count(CONTENT) < len(messages):
                parts = [_as_parts(each) if each["role"] in roles else each for each in messages]
                if self.try_render(parts).count(CONTENT) >= len(messages):
                    self._roles_with_parts |= {*roles}
        response_template = getattr(tokenizer, "response_template", None)
        profile = infer_profile(
            self.try_render, self._lenient_render, self.source, response_template
        )
        self.output_format, self.history_format = profile.output_format, profile.history_format
        self.message_order = profile.message_order
        self.shows_tools, self.examples = profile.shows_tools, profile.examples
        self.notes: list[str] = []
        self.reasoning_start = self._find_reasoning_start()
        self._reasons_by_default = self._find_reasoning_default()
        self._unrepeated_ends = self._find_unrepeated_ends()
        lacks = [*profile.lacks]
        if not self.shows_tools:
            role = "system" if self.message_order.system else "user's"
            lacks.append(f"tools: the template does not show them; the {role} message does")
        self._note(*lacks)

    def _note(self, *lacks: str) -> None:
        """Keep and log what the template lacks. A checkpoint without a template takes no chats."""
        if self.source and lacks:
            self.notes += lacks
            log.info("chat template: %s", ". ".join(lacks))

    def disable_tool_call_format(self, reason: str) -> None:
        """Use the default format of tool calls, since the inferred one failed a test."""
        self._note(f"calls: {reason}; {FALLBACK}")
        self.output_format, self.examples = with_default_calls(self.output_format), []

    # ── formats ──

    def output_format_for(self, calls: ToolCallPolicy | None) -> OutputFormat:
        """Return the format of responses: the default one, where tool calls are requested and the
        format in which this model writes them is unknown."""
        known = self.output_format
        if calls and (not known.call_delimiters or (calls.required and known.tool_calls is None)):
            return DEFAULT_OUTPUT_FORMAT
        return known

    def call_id(self, name: str, index: int) -> str:
        """Return a new id for the `index`-th call of a conversation."""
        return (self.history_format or HistoryFormat()).call_id(name, index)

    def reasoning_end(self, output_format: OutputFormat) -> tuple[int, ...]:
        """Return the tokens that end reasoning; InvalidInput if they are unknown."""
        if output_format.reasoning is None:
            reason = "the delimiter that ends this model's reasoning is unknown"
            raise InvalidInput.at("thinking_token_budget", reason)
        return self._encode(output_format.reasoning[1])

    def _find_reasoning_start(self) -> tuple[int, ...]:
        reasoning = self.output_format.reasoning
        prompt = self.try_render([QUESTION], enable_thinking=True)
        opened = self.output_format.reasoning_at_end(prompt)
        is_open = opened and not self.output_format.ends_reasoning(opened)
        return () if reasoning is None or not prompt or is_open else self._encode(reasoning[0])

    def _find_reasoning_default(self) -> bool:
        """Return whether the model reasons by default: the template has no switch, or its default
        prompt equals that of an effort, or only a switch that is off ends the reasoning in it."""
        default = self.try_render([QUESTION])
        if not self._effort_variables:
            return self.output_format.reasoning is not None
        if EFFORT in self._effort_variables:
            efforts = "low", "medium", "high"
            return default in [self.try_render([QUESTION], **{EFFORT: name}) for name in efforts]
        switched: dict[str, Any] = dict.fromkeys(SWITCHES, False)
        off = self.try_render([QUESTION], **switched)
        return off != default and self.output_format.ends_reasoning(off.removeprefix(default))

    def history_len(self, rendered: RenderedPrompt, ids: Sequence[int]) -> int:
        """Return how many leading tokens of a prompt the conversation's next prompt repeats: all
        but the end of the generation prompt, in place of which the history may have others."""
        reasoning: tuple[int, ...] = ()
        if rendered.output_format.reasoning:
            reasoning = self._encode(rendered.output_format.reasoning_at_end(rendered.text))
        ends = reasoning, *(end for end in self._unrepeated_ends if tuple(ids[-len(end) :]) == end)
        return len(ids) - max(map(len, ends))

    def _find_unrepeated_ends(self) -> set[tuple[int, ...]]:
        """Return the ends of generation prompts that the history of the same output does not have,
        such as reasoning that is switched off."""
        call, content = assistant(ARGUMENTS), assistant(content=CONTENT)
        result = {"role": "tool", "tool_call_id": IDS[0], "content": CONTENT}
        asked = QUESTION, call, result, content, QUESTION
        conversations = asked[:1], asked[:3], asked
        ends: set[tuple[int, ...]] = set()
        for messages, output, effort in product(conversations, (content, call), EFFORTS):
            chat = Chat(messages, tuple(TOOLS), effort=effort)
            history = replace(chat, messages=(*messages, output), add_generation_prompt=False)
            try:
                prompt, repeated = (self._encode(self._render_chat(c)) for c in (chat, history))
            except InvalidInput:
                continue
            pairs = zip(prompt, repeated, strict=False)
            shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            ends.add(prompt[shared:])
        return ends - {()}

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    # ── requests ──

    def render(self, chat: Chat, calls: ToolCallPolicy | None = None) -> RenderedPrompt:
        """Render a chat's prompt. `calls`: the tool calls that the response may contain.

        Raise InvalidInput, with the template's own reason if it gives one."""
        return RenderedPrompt(self._render_chat(chat), self.output_format_for(calls))

    def _render_chat(self, chat: Chat) -> str:
        if not (chat.template or self._tokenizer.chat_template):
            raise InvalidInput("this model has " + NO_TEMPLATE % self._alternative, "messages")
        for name in chat.template_kwargs:
            if name in self._reserved_names:
                param = f"chat_template_kwargs.{name}"
                raise InvalidInput.at(param, "is not a variable of the template")
        if chat.documents and not (chat.template or self._takes_documents):
            raise InvalidInput.at("documents", "is not read by this model's chat template")
        variables = {
            "add_generation_prompt": chat.add_generation_prompt,
            "continue_final_message": chat.continue_final_message,
            **self._variables(chat),
        }
        if chat.documents:
            variables["documents"] = [*chat.documents]
        if chat.template:
            variables["chat_template"] = chat.template
        try:
            messages, tools = self._adapt(chat)
            try:
                return self._apply(messages, tools, **variables)
            except Exception:  # some templates require descriptions of tools and parameters
                if (described := [_with_descriptions(tool) for tool in tools]) == tools:
                    raise
                return self._apply(messages, described, **variables)
        except InvalidInput:
            raise
        except Exception as error:  # templates raise anything
            # The text of raise_exception is for the client; other errors are internal.
            reason = error.message if type(error) is TemplateError else None
            cannot = "cannot render these messages"
            why = f"refuses the messages: {reason[:MAX_REASON]}" if reason else cannot
            raise InvalidInput(f"the model's chat template {why}", "messages") from error

    def reasoning_requested(self, chat: Chat) -> bool:
        """Return whether a chat reasons: by its variables, by its effort, or by default."""
        variables = self._variables(chat)
        switches = [variables[switch] for switch in SWITCHES if switch in variables]
        effort = variables.get(EFFORT) if chat.effort is None else chat.effort
        if not switches and effort is None:
            return self._reasons_by_default
        return any(switches) or effort not in (None, "none")

    def _variables(self, chat: Chat) -> dict[str, Any]:
        """Return the values of the template's variables: the chat's own, those for its reasoning
        effort, and the defaults. A chat that sets one switch leaves the others to the template."""
        effort: dict[str, Any] = {}
        if chat.effort is not None:
            enabled = chat.effort != "none"
            effort = dict.fromkeys(self._effort_variables, enabled)
            effort |= {EFFORT: chat.effort} if EFFORT in effort else {}
        switches = {} if chat.template_kwargs.keys() & SWITCHES else self._switch_defaults
        return {**self._defaults, **switches, **effort, **chat.template_kwargs}

    def _adapt(self, chat: Chat) -> tuple[list[Message], list[Message]]:
        """Return messages and tools in the format that the template takes."""
        chat = without_video_sound(chat) if self.omits_video_sound else chat
        # Newer versions of transformers remove fields that are None; older ones do not.
        messages = [
            {key: value for key, value in message.items() if value is not None}
            for message in chat.messages
        ]
        is_adapted = any(
            message["role"] == "tool"
            or message.get("tool_calls")
            or message.get("reasoning_content")
            for message in messages
        )
        if is_adapted:
            if self.history_format is None:
                cannot = "the model's chat template does not support tool calls and results"
                raise InvalidInput(cannot, "messages")
            calls = self.output_format.tool_calls
            is_json = calls is not None and calls.arguments.style == "json"
            content_calls = calls if calls and is_json else DEFAULT_TOOL_CALL_FORMAT
            messages = HistoryAdapter(self.history_format, content_calls).adapt(messages)
        tools = [dict(tool) for tool in chat.tools]
        if tools and not self.shows_tools:
            messages, tools = self._with_instructions(messages, tools), []
        others = messages[1:] if self.message_order.system else messages
        if is_adapted or any(message["role"] == "system" for message in others):
            messages = fold_messages(messages, self.message_order)
        return messages, tools

    def _with_instructions(
        self, messages: Sequence[Message], tools: Sequence[Message]
    ) -> list[Message]:
        """Add the tools to the system message, for a template that does not show them."""
        lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        text = INSTRUCTIONS.format(tools=lines, example=example_calls(self.examples, 1))
        first, *others = messages
        if first["role"] not in ("system", "developer"):
            return [{"role": "system", "content": text}, *messages]
        content = first["content"]
        if isinstance(content, str):
            return [{**first, "content": f"{content}\n\n{text}"}, *others]
        return [{**first, "content": [*content, {"type": "text", "text": text}]}, *others]

    # ── the template as a function ──

    def try_render(
        self, messages: list[Message], tools: Sequence[Any] = (), **variables: Any
    ) -> str:
        """Render messages, by default with the generation prompt; "" where the template raises.
        A template that takes too much ends the load."""
        try:
            return self._apply(messages, tools, **{"add_generation_prompt": True, **variables})
        except TemplateTooExpensive:
            raise
        except Exception:  # templates raise anything
            return ""

    def _apply(self, messages: list[Message], tools: Sequence[Message], **variables: Any) -> str:
        apply: Any = self._tokenizer.apply_chat_template
        roles = self._roles_with_parts
        messages = [_as_parts(each) if each["role"] in roles else each for each in messages]
        options = {"tokenize": False, **variables}
        if self._takes_functions:  # tools as a text, and the date
            functions = json.dumps([tool["function"] for tool in tools], indent=4)
            options = {"functions": functions, "datetime": str(date.today()), **options}
        try:
            text = apply(messages, tools=list(tools) or None, **options)
        except TypeError:
            if tools:
                raise
            text = apply(messages, tools=[], **options)  # some templates do not take None
        assert isinstance(text, str)
        return text

    def _lenient_render(
        self, messages: list[Message], tools: Sequence[Any] = (), **variables: Any
    ) -> str:
        """Render probing messages where the template may change lists, which the library's sandbox
        forbids: some templates show calls only so."""
        with lenient():  # copies, since the template may change them
            return self.try_render(*copy.deepcopy((messages, tools)), **variables)

    def _find_reserved_names(self) -> set[str]:
        """Return the names that `chat_template_kwargs` may not set: parameters of the functions on
        the way to the template, special tokens, and the template's functions."""
        functions = (
            type(self._tokenizer).apply_chat_template,
            ProcessorMixin.apply_chat_template,
            utils.render_jinja_template,
            Template.render,
        )
        return {
            "messages",  # the template's name of a conversation
            *(name for function in functions for name in inspect.signature(function).parameters),
            *self._tokenizer.SPECIAL_TOKENS_ATTRIBUTES,
            *self._tokenizer.special_tokens_map,
            *self._environment.globals,
            *(name for name, _ in self._environment.filters.items() - FILTERS.items()),
        }


def _as_parts(message: Message) -> Message:
    """Write text content as a list of one part."""
    content = message.get("content")
    if not content or not isinstance(content, str):
        return message
    return {**message, "content": [{"type": "text", "text": content}]}


def _with_descriptions(tool: Message) -> Message:
    """Add empty descriptions and parameters where a tool has none, and what objects contain."""
    function = {"description": "", "parameters": {}, **tool["function"]}
    parameters = function["parameters"] or {"type": "object", "properties": {}}
    properties = parameters.get("properties")
    if isinstance(properties, dict):
        described = {
            key: {
                "description": "",
                **({"additionalProperties": {}} if schema.get("type") == "object" else {}),
                **schema,
            }
            if isinstance(schema, dict)
            else schema
            for key, schema in properties.items()
        }
        parameters = {**parameters, "properties": described}
    return {**tool, "function": {**function, "parameters": parameters}}
