"""Infers from a chat template how the model writes its output and what history the template takes.

    probing messages  --Render-->  texts  --compare-->  TemplateProfile

The template renders messages with and without calls, reasoning and content, whose names and values
occur nowhere else; the text around them is the format. With

    <call>nameone{"keyone": "valueone", "keytwo": 12}</call>
    <call>nametwo{…}</call>

calls stand in <call> … </call>, nothing is between name and arguments, arguments are JSON, and a
line feed separates calls. A delimiter may also be a word between two tokens (find_brackets).
history.py infers the history. There is no table of model families, except <think> where a template
closes it and shows no reasoning. A format counts only if the parser reads back the calls that the
template has rendered.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from itertools import pairwise
from os.path import commonprefix
from typing import Any, NamedTuple

from worker.messages.deltas import Delta
from worker.text.chat_template.history import (
    QUESTION,
    REASONING_BLOCKS,
    HistoryAdapter,
    HistoryFormat,
    Message,
    MessageOrder,
    Render,
    infer_history_format,
    infer_message_order,
    make_call,
)
from worker.text.detokenizer import TextSpan
from worker.text.output_format import (
    NAME_BEFORE_JSON,
    ChannelFormat,
    OutputFormat,
    declared_output_format,
    inferred_output_format,
)
from worker.text.parser import OutputParser
from worker.text.tool_call_format import (
    DEFAULT_TOOL_CALL_FORMAT,
    DELIMITER,
    ID,
    INDEX,
    KEY,
    NAME,
    TYPE,
    ArgumentFormat,
    DelimiterSyntax,
    Pair,
    ToolCallFormat,
)
from worker.text.tool_call_parser import WRAPPER_KEY

# ── the probing messages ──

CONTENT, THOUGHT = "qcontentq", "qthoughtq"
NAMES, IDS = ("nameone", "nametwo"), ("callidone", "callidtwo")
TEXT, NUMBER = "valueone", 12
ARGUMENTS = {"keyone": TEXT, "keytwo": NUMBER}
# One of each JSON type, and a string that looks like a number.
TYPED_ARGUMENTS = {
    "keyone": "value-1.b",
    "keytwo": 12,
    "keythree": 1.5,
    "keyfour": True,
    "keyfive": ["ab", 2],
    "keysix": {"inner": "c"},
    "keyseven": "7",
}
TYPES = ("string", "integer", "number", "boolean", "array", "object", "string")
EXAMPLE_ARGUMENTS: tuple[tuple[dict[str, Any], ...], ...] = (
    (ARGUMENTS,),
    (ARGUMENTS, ARGUMENTS),
    ({},),
    (TYPED_ARGUMENTS,),
    (TYPED_ARGUMENTS, TYPED_ARGUMENTS),
)
PLACEHOLDERS = {  # in examples that a prompt shows
    **{"nameone": "FUNCTION", "nametwo": "OTHER_FUNCTION", "callidone": "ID"},
    **{"keyone": "PARAMETER", "keytwo": "OTHER", "valueone": "VALUE", "callidtwo": "OTHER_ID"},
}


def assistant(*arguments: dict[str, Any], content: str = "", reasoning: str = "") -> Message:
    """Return an assistant's message of the API, with a call for each of these arguments."""
    message: Message = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if arguments:
        calls = zip(IDS, NAMES, arguments, strict=False)
        message["tool_calls"] = [make_call(*call) for call in calls]
    return message


# Some templates read these to describe parameters as code.
NESTED_SCHEMAS: dict[str, Any] = {
    "array": {"items": {}},
    "object": {"additionalProperties": {}},
}


def _tool(name: str, types: dict[str, str]) -> dict[str, Any]:
    properties = {
        key: {"description": "any", "type": type_, **NESTED_SCHEMAS.get(type_, {})}
        for key, type_ in types.items()
    }
    parameters = {"type": "object", "properties": properties, "required": []}
    function = {"name": name, "description": "any", "parameters": parameters}
    return {"type": "function", "function": function}


TOOLS = [_tool(name, {"keyone": "string", "keytwo": "integer"}) for name in NAMES]
TYPED_TOOLS = [_tool(name, dict(zip(TYPED_ARGUMENTS, TYPES, strict=True))) for name in NAMES]


def shows_tools(text: str) -> bool:
    """Return whether a prompt shows TOOLS."""
    return all(name in text for name in (*NAMES, "keyone"))


# ── the profile ──

# A template's text of calls, and their names and arguments.
Example = tuple[str, list[tuple[str, Any]]]
UNKNOWN_CALLS: tuple[Pair, ...] = (
    DEFAULT_TOOL_CALL_FORMAT.call,
    *(("<|tool_call_start|>", "<|tool_call_end|>"), ("<|tool_call|>", "<|/tool_call|>")),
)
FALLBACK = "JSON in <tool_call> is used"
SWITCHES = ("enable_thinking", "thinking")  # variables of templates
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking", "tool_plan", REASONING_BLOCKS)


class TemplateProfile(NamedTuple):
    output_format: OutputFormat
    history_format: HistoryFormat | None  # None: the template takes no calls or results
    message_order: MessageOrder
    shows_tools: bool
    examples: list[Example]
    lacks: list[str]  # messages about what the template cannot do, and what is done instead


def infer_profile(
    render: Render, lenient: Render, source: str, response_template: Mapping[str, Any] | None
) -> TemplateProfile:
    """Return the formats of a template; a response template decides the output format if there is
    one. `lenient`: renders templates that show no calls with `render`."""
    prober = TemplateProber(render, source)
    history, template_shows_tools = prober.history_format, shows_tools(prober.prompt)
    order = prober.message_order
    calls = prober.tool_call_format()
    if calls is None and (history is None or history.calls_in_content):
        prober = TemplateProber(lenient, source)
        calls = prober.tool_call_format()
    examples = make_examples(prober.render_calls, calls) if calls else []
    lacks = []
    if response_template:
        output = replace(declared_output_format(response_template), tool_calls=calls)
        if output.call_delimiters and calls and not reads_back(output, examples):
            output = replace(output, tool_calls=None)
            lacks.append("calls: the response template has another format; not constrained")
    else:
        output = prober.output_format(calls)
        if calls is None:
            lacks.append(f"calls: the template writes none in a known format; {FALLBACK}")
        elif not reads_back(output, examples):
            lacks.append(f"calls: the parser does not read back the template's own; {FALLBACK}")
        elif calls.arguments.item:
            output, examples = replace(output, tool_calls=None), []
        if lacks:
            output, examples = with_default_calls(output), []
            shown = (*output.visible_texts, *prober.tool_delimiters())
            output = replace(output, visible_texts=shown)
        for pair in prober.unseen_call_delimiters() if calls is None else ():
            output = _with_unseen_calls(output, pair)
            lacks[0] += f", and calls in {pair[0]} are parsed"
        if output.tool_calls is None and not lacks:
            nested = "calls: lists and objects are elements in tags"
            lacks.append(f"{nested}; only JSON in <tool_call> is constrained")
    if history is None:
        lacks.append("history: the template does not support calls and results; refused")
    elif history.calls_in_content:
        lacks.append("history: the template does not show calls; the content does")
    if history and history.results == "user":
        lacks.append("history: the template does not show results; user messages do")
    return TemplateProfile(output, history, order, template_shows_tools, examples, lacks)


def with_default_calls(output_format: OutputFormat) -> OutputFormat:
    """Replace the format of tool calls by the default one."""
    default = inferred_output_format(
        output_format.reasoning, output_format.content, DEFAULT_TOOL_CALL_FORMAT, None
    )
    for delimiters in UNKNOWN_CALLS:
        default = _with_unseen_calls(default, delimiters)
    ignored = (each for each in output_format.delimiters if each.phases == {each.next_phase})
    return replace(
        default,
        delimiters=(*default.delimiters, *ignored),
        call_delimiters=(NAME_BEFORE_JSON, *default.call_delimiters),
        may_close_unopened=output_format.may_close_unopened,
        tool_calls=DEFAULT_TOOL_CALL_FORMAT,
    )


def _with_unseen_calls(output_format: OutputFormat, delimiters: Pair) -> OutputFormat:
    """Add calls between these delimiters, in any style. Since the model decides which, no grammar
    constrains the calls that it begins."""
    calls = replace(DEFAULT_TOOL_CALL_FORMAT, call=delimiters, any_style=True)
    unseen = inferred_output_format(None, None, calls, None)
    return replace(
        output_format,
        call_delimiters=(*unseen.call_delimiters, *output_format.call_delimiters),
        tool_calls=None,
        visible_texts=(*unseen.visible_texts, *output_format.visible_texts),
    )


def make_examples(render_calls: Callable[..., str], call_format: ToolCallFormat) -> list[Example]:
    return [
        (render_calls(*arguments), [*zip(NAMES, arguments, strict=False)])
        for arguments in EXAMPLE_ARGUMENTS
        if call_format.separator is not None or len(arguments) == 1
    ]


def example_calls(examples: Iterable[Example], count: int) -> str:
    """Return an example of `count` calls for a prompt, in the default format if there are none."""
    text = next((text for text, calls in examples if len(calls) == count), "").strip()
    if not text:
        return DEFAULT_TOOL_CALL_FORMAT.render([("FUNCTION", '{"PARAMETER": "VALUE"}')] * count)
    for name, placeholder in PLACEHOLDERS.items():
        text = text.replace(name, placeholder)
    return text


def reads_back(output_format: OutputFormat, examples: Iterable[Example]) -> bool:
    """Return whether the parser reads the examples' calls, whole and character by character."""
    return all(
        _parse_calls(output_format, pieces) == calls
        for text, calls in examples
        for pieces in ([text], text)
    )


def _parse_calls(
    output_format: OutputFormat, pieces: Iterable[str]
) -> list[tuple[str | None, Any]] | None:
    """Return the calls of a text that has nothing else; None if it has, or if JSON is invalid."""
    parser, delta = OutputParser(output_format, "", True, TYPED_TOOLS), Delta(0)
    events = [event for piece in pieces for event in parser.feed(TextSpan(piece))]
    for event in events + parser.finish():
        if event.kind != "call" and event.span.text:
            return None
        delta.add("call", event.span.text, event.name)
    try:
        return [(part.name, json.loads(part.text)) for part in delta.parts]
    except ValueError:
        return None


# ── the prober ──

# A word before a list of calls, as in functools[{"name": …
PREFIX_WORD = re.compile(r"([^\s<>\[\]{}\"'`(]{3,40})\[\s*\{\s*\"name\"")
# Reasoning that is shown as the list of blocks that was passed: {'type': 'thinking', …
DUMPED_BLOCKS = re.compile(rf"\W(?:type|thinking)\W\s*:\s*\W(?:thinking|{THOUGHT})")
# In the name of a delimiter around the results of calls
RESULT_WORD = re.compile(r"(?:response|result|output)s?", re.IGNORECASE)
# In a delimiter, what tells its two ends apart: <|text_start|> and <|text_end|>, <text> and </text>
EDGE_WORD = re.compile(r"[\W_]|start|begin|open|end|close", re.IGNORECASE)
MAX_TAGS = 40  # of a template's source that are tried
# In instructions: what the model writes around its content
CONTENT_TAGS = re.compile(r"(<(?:response|answer)>)(</(?:response|answer)>)")
CLOSING_TAG = re.compile(r"</([\w:]{2,40})>")
# At the end of a prompt: <think> or <think></think>, [THINK] or [THINK][/THINK]
OPEN_REASONING = re.compile(r"(<([\w:]{1,40})>|\[([A-Z]{2,40})\])\s*(?:</\2>|\[/\3\])?\s*$")


class TemplateProber:
    """Renders probing messages. `prompt`: a question and the generation prompt, with tools unless
    the template fails with any. `reasoning`: the delimiters around it."""

    def __init__(self, render: Render, source: str) -> None:
        self._render, self._source = render, source
        with_tools = render([QUESTION], TOOLS)
        self._tools, self._typed_tools = (TOOLS, TYPED_TOOLS) if with_tools else ([], [])
        self.prompt = with_tools or render([QUESTION])
        self._syntax, self._ends, self._beside_calls = DelimiterSyntax(), list[str](), list[str]()
        self.reasoning: Pair | None = None
        self._message_start = ""
        self._content: Pair | None = None
        render_with_tools = partial(render, tools=self._tools)
        self.history_format = infer_history_format(render_with_tools, self.prompt.count("None"))
        self.message_order = infer_message_order(render_with_tools, self.history_format)
        self._content_text = self._render_message(assistant(content=CONTENT))
        self._reasoning_text = ""  # a message with reasoning and content
        for key in REASONING_KEYS:
            if text := self._render_reasoning(key):
                self._reasoning_text = text
                if self.history_format:
                    self.history_format = replace(self.history_format, reasoning_key=key)
                break
        written = self._reasoning_text.rpartition(QUESTION["content"])[2]
        self._syntax = DelimiterSyntax(find_brackets(written + self.render_calls(ARGUMENTS)))
        self._message_start = self._find_message_start()
        self._removed = self._removed_delimiters(source)
        self.reasoning = self._reasoning_delimiters(source)
        self._content, self._ends = self._content_delimiters()
        self._content = self._content or self._removed[1]
        self._beside_calls = self._delimiters_beside_calls()
        self._ends += self._beside_calls

    def output_format(self, calls: ToolCallFormat | None) -> OutputFormat:
        """Return the format with these calls, or with default ones. Reasoning may close unopened
        where a variable switches it on and off, and where each message has it."""
        inferred = inferred_output_format(
            self.reasoning,
            self._content,
            calls or DEFAULT_TOOL_CALL_FORMAT,
            self._channel_format(calls),
            self._ends,
            self._message_start,
            self._turn_delimiters(),
        )
        on, off = (
            self._render([QUESTION], **dict.fromkeys(SWITCHES, value)) for value in (True, False)
        )
        may_close = on != off or inferred.reasoning_at_end(self._content_text.partition(CONTENT)[0])
        return replace(inferred, may_close_unopened=bool(inferred.reasoning and may_close))

    def _render_message(
        self, message: Message, reasoning_key: str = "reasoning_content", **variables: Any
    ) -> str:
        """Render a question and this message."""
        history_format = replace(
            self.history_format or HistoryFormat(), reasoning_key=reasoning_key
        )
        messages = HistoryAdapter(history_format).adapt([QUESTION, message])
        return self._render(messages, self._typed_tools, add_generation_prompt=False, **variables)

    # ── calls ──

    def tool_call_format(self) -> ToolCallFormat | None:
        """Return None if the template writes no calls, or none in a known style."""
        history = self.history_format
        if history is None or history.calls_in_content:
            return None
        one, two = self._render_with_ids(1), "" if history.one_call else self._render_with_ids(2)
        if NAMES[0] not in one:
            return None
        if NAMES[1] not in two or two.find(NAMES[1]) < two.find(NAMES[0]):
            two = ""
        typed = self.render_calls(TYPED_ARGUMENTS)
        calls = infer_tool_call_format(one, two, typed, self._syntax)
        if calls and self._message_start and not calls.is_list:
            calls = replace(calls, message_start=self._message_start)
        if calls and calls.undelimited and calls.keys and (word := PREFIX_WORD.search(self.prompt)):
            return replace(calls, prefix_word=word[1])  # from the prompt's example of a call
        return calls

    def tool_delimiters(self) -> set[str]:
        """Return the delimiters that a prompt has because of its tools."""
        without_tools = DELIMITER.findall(self._render([QUESTION]))
        return set(DELIMITER.findall(self.prompt)).difference(without_tools)

    def unseen_call_delimiters(self) -> list[Pair]:
        """Return the delimiters of calls that the template does not write: those that a prompt has
        because of its tools, or else the source, named as calls, and those named like the ones
        around results: <|tool_call_start|> like <|tool_response_start|>. Some have no end."""
        named: dict[str, list[str]] = {}
        shown = sorted(self.tool_delimiters(), key=self.prompt.index)
        for text in shown or dict.fromkeys(DELIMITER.findall(self._source)):
            if "call" in (word := EDGE_WORD.sub("", text).lower()):
                named.setdefault(word, []).append(text)
        pairs = [(texts[0], (*texts, "")[1]) for texts in named.values() if len(texts) < 3]
        history = self.history_format
        if history is not None and history.results == "tool":
            result = {"role": "tool", "tool_call_id": IDS[0], "content": CONTENT}
            messages = HistoryAdapter(history).adapt([QUESTION, assistant(ARGUMENTS), result])
            before, _, after = self._render(messages, self._tools).partition(CONTENT)
            opens, closes = self._last_delimiter(before), self._syntax.pattern.match(after.lstrip())
            if closes and (renamed := RESULT_WORD.sub("call", opens)) != opens:
                pairs.append((renamed, RESULT_WORD.sub("call", closes[0])))
        default = DEFAULT_TOOL_CALL_FORMAT.call[0].strip()
        return [pair for pair in dict.fromkeys(pairs) if pair[0] != default]

    def _render_with_ids(self, count: int) -> str:
        """Render calls, with ID in place of their ids."""
        return re.sub("|".join(IDS), ID, self.render_calls(*(ARGUMENTS,) * count))

    def render_calls(self, *arguments: dict[str, Any]) -> str:
        """Return a message's text of calls, with all that stands around them."""
        text = self._render_message(assistant(*arguments)).rstrip()
        without_calls = (self._content_text or self.prompt).rstrip()
        prompt = self._render([QUESTION], self._typed_tools).rstrip()
        starts = [self._syntax.common_start(text, other) for other in (prompt, without_calls)]
        text = text[max(map(len, starts[:1] if self._message_start else starts)) :]
        text = text[: len(text) - len(self._syntax.common_end(text, without_calls))]
        text = JOINED_ARGUMENTS.sub(r", \1", compact_json(text))
        around = *(self.reasoning or ()), *(self._content or ()), *self._beside_calls
        return self._without_delimiters(text, *around)

    def _without_delimiters(self, text: str, *delimiters: str) -> str:
        """Remove delimiters from the beginning of a text: those of empty reasoning or content."""
        if not delimiters:
            return text
        return re.sub(rf"^(?:\s*(?:{'|'.join(map(re.escape, delimiters))})\s*)+", "", text)

    def _last_delimiter(self, text: str) -> str:
        """Return the delimiter at the end of a text, perhaps with a word, as in <|channel>thought;
        "" if there is none."""
        match = re.search(rf"(?:{self._syntax.pattern.pattern})\w*\s*$", text)
        return match[0].strip() if match else ""

    # ── reasoning and content ──

    def _generation_prompt(self) -> str:
        without_prompt = self._render([QUESTION], self._tools, add_generation_prompt=False)
        return self.prompt[len(self._syntax.common_start(self.prompt, without_prompt)) :].strip()

    def _find_message_start(self) -> str:
        """Return the end of the generation prompt that begins each part of a message; "" if none
        does: <|start|>assistant to=self<|message|>THOUGHT<|start|>assistant to=user<|message|>…"""
        prompt = self._generation_prompt()
        for start in (prompt, self._syntax.pattern.split(prompt)[-1].strip()):
            if len(start) > 1 and any(start in between for between in self._between_parts()):
                return start
        return ""

    def _between_parts(self) -> list[str]:
        """Return the text between reasoning and content, and between two calls."""
        content = self._reasoning_text.partition(THOUGHT)[2].partition(CONTENT)[0]
        if self.history_format is None or self.history_format.one_call:
            return [content]
        two = self._render_message(assistant(ARGUMENTS, ARGUMENTS)).partition(NAMES[0])[2]
        return [content, two.partition(TEXT)[2].partition(NAMES[1])[0]]

    def _render_reasoning(self, key: str) -> str:
        """Return a message with reasoning and content, or with a call if only that shows the
        reasoning; "" if nothing does."""
        messages = [assistant(content=CONTENT, reasoning=THOUGHT)]
        if key != REASONING_BLOCKS:
            messages.append(assistant(ARGUMENTS, reasoning=THOUGHT))
        for message in messages:
            text = self._render_message(message, key, enable_thinking=True)
            before, thought, after = text.partition(THOUGHT)
            if thought and not DUMPED_BLOCKS.search(text):
                return before + thought + after.replace(NAMES[0], CONTENT)
        return ""

    def _reasoning_delimiters(self, source: str) -> Pair | None:
        """Return the text around the reasoning; else by the end of a prompt, or by the source."""
        before, _, after = self._reasoning_text.partition(THOUGHT)
        between = after.partition(CONTENT)[0]
        if (start := self._message_start) and start in between and start in before:
            header, ends = before.rpartition(start)[2], self._syntax.pattern.findall(between)
            if header.strip() and header != between.rpartition(start)[2]:
                return header, ends[0]
        opens, closes = self._last_delimiter(before), self._syntax.pattern.search(between)
        before_content = self._last_delimiter(self._content_text.partition(CONTENT)[0])
        if opens and closes:
            if opens != before_content:
                return opens, closes[0]
        elif CONTENT in after and between.strip() and (lead_in := self._lead_in(before)):
            return lead_in, between.strip()
        for variables in ({}, {"enable_thinking": True}, {"enable_thinking": False}):
            if match := OPEN_REASONING.search(self._render([QUESTION], **variables)):
                closing = match[1][0] + "/" + match[1][1:]
                if match[1] != before_content or closing in source:  # else any message has it
                    return match[1], closing
        if self._removed[0] or "</think>" not in source:
            return self._removed[0]
        return "<think>", "</think>"

    def _removed_delimiters(self, source: str) -> tuple[Pair | None, Pair | None]:
        """Return the delimiters in the template's source that it removes from earlier content:
        those of reasoning with what they enclose, those of content alone."""
        reasoning = content = None
        names = [name for name in dict.fromkeys(CLOSING_TAG.findall(source)) if "tool" not in name]
        for name in names[:MAX_TAGS]:
            pair = f"<{name}>", f"</{name}>"
            message = assistant(content=THOUGHT.join(pair) + CONTENT)
            text = self._render([QUESTION, message, QUESTION])
            if THOUGHT not in text:
                reasoning = reasoning or (pair if CONTENT in text else None)
            elif pair[0] not in text and pair[1] not in text:
                content = content or pair
        if content is None and (tags := CONTENT_TAGS.search(source)):
            content = tags[1], tags[2]
        return reasoning, content

    def _lead_in(self, header: str) -> str:
        """Return the words with which the prompt begins reasoning that has no opening delimiter.
        `header`: the text before the reasoning of a message, without these words."""
        prompt = self._render([QUESTION], self._typed_tools, enable_thinking=True)
        words = prompt.removeprefix(header).strip() if prompt.startswith(header) else ""
        return "" if self._syntax.pattern.search(words) else words

    def _content_delimiters(self) -> tuple[Pair | None, list[str]]:
        """Return the delimiters around content, and those that the model writes after them and
        before the one that ends its turn."""
        messages = [QUESTION, assistant(content=CONTENT)]
        text = self._render(messages, add_generation_prompt=False)
        header = self._syntax.common_start(text, self._render([QUESTION]))
        before, _, after = text[len(header) :].partition(CONTENT)
        opens = self._without_delimiters(before, *(self.reasoning or ())).strip()
        ends = self._syntax.pattern.findall(after)
        if start := self._message_start:
            parts = [between.partition(start)[0] for between in self._between_parts()]
            others = [end for part in parts for end in self._syntax.pattern.findall(part)[-1:]]
            before = before.rpartition(start)[2]  # the first message may depend on the prompt's end
            content = (before, ends[0] if ends else "") if before.strip() else None
            return content, list(dict.fromkeys(others))
        if "".join(after.split()) != "".join("".join(ends).split()):
            return None, []
        if not ends or not self._syntax.pattern.fullmatch(opens):
            return None, ends[:-1]
        return (opens, ends[0]), ends[1:-1]

    def _turn_delimiters(self) -> Pair:
        """Return the delimiters that the generation prompt ends with and that end a turn."""
        header, end = self._last_delimiter(self._generation_prompt()), ""
        text = self._render([QUESTION, assistant(content=CONTENT)], add_generation_prompt=False)
        if delimiters := self._syntax.pattern.findall(text.partition(CONTENT)[2]):
            end = delimiters[-1]
        known = *(self.reasoning or ()), *(self._content or ()), *self._ends
        return "" if header in known else header, "" if end in known else end

    def _delimiters_beside_calls(self) -> list[str]:
        """Return the delimiters around content that has calls beside it, where other content has
        none; with calls alone they are empty."""
        text = self._render_message(assistant(ARGUMENTS, content=CONTENT))
        prompt = self._render([QUESTION], self._typed_tools)
        header = self._syntax.common_start(text, prompt)
        before, content, after = text[len(header) :].partition(CONTENT)
        opens, closes = before.strip(), self._syntax.pattern.match(after.lstrip())
        if not content or closes is None or not self._syntax.pattern.fullmatch(opens):
            return []
        words = [EDGE_WORD.sub("", delimiter) for delimiter in (opens, closes[0])]
        is_empty = opens + closes[0] in self._render_message(assistant(ARGUMENTS))
        known = *(self.reasoning or ()), *(self._content or ())
        return (
            [opens, closes[0]] if words[0] == words[1] and is_empty and opens not in known else []
        )

    def _channel_format(self, calls: ToolCallFormat | None) -> ChannelFormat | None:
        """Return a format if reasoning is a message, and each message starts like the generation
        prompt:

        <|start|>assistant<|channel|>analysis<|message|>THOUGHT<|end|><|start|>assistant…"""
        before, _, after = self._reasoning_text.partition(THOUGHT)
        between, _, rest = after.partition(CONTENT)
        if not between or (calls and "=" not in calls.call[0]):
            return None
        start = self._generation_prompt()
        if not start or start not in between:
            return None
        end, _, content_header = between.partition(start)
        headers = before.rpartition(start)[2], content_header
        delimiters = [DELIMITER.findall(header) for header in headers]
        if len(delimiters[0]) != 2 or delimiters[0] != delimiters[1]:
            return None
        channel, body = delimiters[0]
        reasoning, content = (DELIMITER.split(header)[1].strip() for header in headers)
        ends = [*DELIMITER.findall(end), *DELIMITER.findall(rest)[:1]]
        ends += DELIMITER.findall(calls.call[1]) if calls else []
        recipient = calls.call[0].split()[-1] if calls else ""  # the channel may stand before it
        ends = list(dict.fromkeys(ends))
        return ChannelFormat(start, channel, body, tuple(ends), reasoning, content, recipient)


# ── delimiters ──

SENTINELS = frozenset((CONTENT, THOUGHT, TEXT, *NAMES, *IDS, *ARGUMENTS))
BRACKETED_WORD = re.compile(r"([A-Za-z_]+)[^\n]{0,60}")


def find_brackets(text: str) -> tuple[Pair, ...]:
    """Return the pairs of tokens of a template's text between which it writes nothing but words of
    its own, of each at least two: <|open|>response<|sep|>, <|open|>tools<|sep|>."""
    first, *rest = re.split(f"({DELIMITER.pattern})", text)
    tokens, texts = ["", *rest[::2]], [first, *rest[1::2]]
    enclosed: dict[Pair, set[str]] = {}
    for pair, between in zip(pairwise(tokens), texts, strict=False):
        match = BRACKETED_WORD.fullmatch(between)
        enclosed.setdefault(pair, set()).add(match[1] if match else "")
    pairs = {
        pair
        for pair, words in enclosed.items()
        if len(words) > 1 and "" not in words and words.isdisjoint(SENTINELS)
    }
    before, after = ({pair[n] for pair in pairs} for n in (0, 1))
    if any(pair not in pairs for pair in enclosed if pair[0] in before or pair[1] in after):
        return ()
    return tuple(sorted(pairs)) if before.isdisjoint(after) else ()


# ── the format of tool calls ──


# Python's arguments whose comma is lost among a template's tags: (keyone="valueone"keytwo=12
JOINED_ARGUMENTS = re.compile(rf"(?<=[\w\"'\])}}])((?:{'|'.join([*TYPED_ARGUMENTS][1:])})=)")


def compact_json(text: str) -> str:
    """Write the JSON of calls that spans lines on one line, as models write it."""
    parts, position = [], 0
    for start in (match.start() for match in re.finditer(r"[\[{]", text)):
        if start < position:
            continue
        try:
            value, end = json.JSONDecoder().raw_decode(text, start)
        except ValueError:
            continue
        if "\n" in text[start:end] and '"keyone"' in text[start:end]:
            parts += [text[position:start], json.dumps(value, ensure_ascii=False)]
            position = end
    return "".join([*parts, text[position:]])


OBJECT = re.compile(
    r'\{\s*"keyone"(?P<colon>\s*:\s*)"valueone"(?P<comma>\s*,\s*)"keytwo"\s*:\s*12\s*\}'
)
PYTHON = re.compile(
    rf"{NAMES[0]}\((?P<arguments>\s*keyone\s*=\s*(?P<quote>[\"']?){TEXT}(?P=quote)"
    rf"(?P<comma>\s*,\s*)keytwo\s*=\s*(?P<other>[\"']?){NUMBER}(?P=other)\s*)\)"
)
ENTRIES = re.compile(rf"{NAMES[0]}(.*?)keyone(.*?){TEXT}(.*?)keytwo(.*?){NUMBER}(.*)$", re.DOTALL)


class ProbedArguments(NamedTuple):
    """The text of a call's arguments. `before` characters before the name and `after` characters
    after the arguments are part of the call's JSON or Python."""

    text: str
    format: ArgumentFormat
    before: int = 0
    after: int = 0
    keys: Pair | None = None


def infer_tool_call_format(
    one: str, two: str, typed: str, syntax: DelimiterSyntax
) -> ToolCallFormat | None:
    """Return the format of a text with one call and a text with two; `two` is "" if a message has
    at most one call. `typed`: the text of a call with TYPED_ARGUMENTS. None: the style is
    unknown."""
    probe_entries = partial(_probe_entries, typed=typed, syntax=syntax)
    for probe in (_probe_json, _probe_python, probe_entries):
        arguments = probe(one)
        if arguments and (call_format := _tool_call_format(one, two, arguments, syntax)):
            return call_format
    return None


def _probe_json(text: str) -> ProbedArguments | None:
    """{"name": "nameone", "arguments": {"keyone": …}}, or the arguments alone."""
    name = text.index(NAMES[0])
    match = OBJECT.search(text, name)
    if match is None:
        return None
    argument_format = ArgumentFormat("json", match["colon"], match["comma"])
    enclosing = _enclosing_object(text, name, match.end())
    if enclosing is None:
        return ProbedArguments(match[0], argument_format)
    start, end, call = enclosing
    keys = _call_keys(call)
    return keys and ProbedArguments(
        match[0], argument_format, name - start, end - match.end(), keys
    )


def _enclosing_object(text: str, name: int, end: int) -> tuple[int, int, dict[str, Any]] | None:
    """Return the innermost JSON object around a name and what ends at `end`, and its bounds: those
    of the call's object if that wraps it."""
    found = None
    start = text.rfind("{", 0, name)
    while start >= 0:
        try:
            value, length = json.JSONDecoder().raw_decode(text.replace(ID, "i")[start:])
        except ValueError:
            value, length = None, 0
        if isinstance(value, dict) and start + length > end:
            if found and value.get(WRAPPER_KEY) != found[2]:
                break
            found = start, start + length, value if found is None else found[2]
        start = text.rfind("{", 0, start)
    return found


def _call_keys(call: dict[str, Any]) -> Pair | None:
    """Return the keys of name and arguments; "" if the name itself is the arguments' key."""
    if call.get(NAMES[0]) == ARGUMENTS:
        return "", ""
    name = next((key for key, value in call.items() if value == NAMES[0]), None)
    arguments = next((key for key, value in call.items() if value == ARGUMENTS), None)
    return None if name is None or arguments is None else (name, arguments)


def _probe_python(text: str) -> ProbedArguments | None:
    """nameone(keyone="valueone", keytwo=12)"""
    match = PYTHON.search(text)
    if match is None:
        return None
    quotes = "" if match["other"] else match["quote"]
    argument_format = ArgumentFormat("python", comma=match["comma"], quotes=quotes)
    return ProbedArguments(match["arguments"], argument_format, after=len(")"))


def _probe_entries(text: str, typed: str, syntax: DelimiterSyntax) -> ProbedArguments | None:
    """Infer the format from the text around two keys, a string and a number. In

        nameone{keyone:<|"|>valueone<|"|>,keytwo:12}

    the middle is ":", the quotes are the rest around a string, and "," stands before the second key
    and not before the first. In

        nameone<key>keyone</key><value>valueone</value><key>keytwo</key><value>12</value></call>

    the text after both values closes an entry, and the text before both keys opens one. It may
    repeat the key, and the middle may name the type of the value."""
    match = ENTRIES.search(text)
    if match is None:
        return None
    first, to_string, between, middle, rest = match.groups()
    quotes = to_string[len(middle) :]
    types: tuple[Pair, ...] = ()
    if to_string != middle + quotes or not between.startswith(quotes):
        quotes = ""
        middle = _with_type(to_string, middle)
        if not (types := _type_words(middle, typed)):
            return None
    between = between[len(quotes) :]
    with_key = between.replace("keyone", KEY, 1), rest.replace("keytwo", KEY, 1)
    if KEY in with_key[0] and KEY in with_key[1]:
        between, rest = with_key
        opens = syntax.common_end(first, between)
        close = syntax.common_start(between[: len(between) - len(opens)], rest)
    else:
        close = syntax.common_start(between, rest)
        opens = syntax.common_end(first, between[len(close) :])
    comma = between[len(close) : len(between) - len(opens)]
    argument_format = ArgumentFormat(
        "entries",
        comma=comma,
        quotes=quotes,
        open=opens,
        middle=middle,
        close=close,
        types=types,
    )
    argument_format = replace(argument_format, item=_item_key(argument_format, typed))
    start = match.start(1) + len(first) - len(opens)
    end = match.start(5) + len(argument_format.closing("keytwo"))
    return ProbedArguments(text[start:end], argument_format)


def _item_key(argument_format: ArgumentFormat, typed: str) -> str:
    """Return the key of a list's items in a call with TYPED_ARGUMENTS; "" if lists are literals."""
    if KEY not in argument_format.close or argument_format.types:
        return ""
    opens, middle, closes = map(
        re.escape, (argument_format.open, argument_format.middle, argument_format.closing("\4"))
    )
    item = rf"{opens}(\w+){middle}ab{closes}".replace("\4", r"\1")
    match = re.search(rf"keyfive{middle}\s*{item}", typed)
    return match[1] if match else ""


def _with_type(to_string: str, to_number: str) -> str:
    """Put TYPE for the word in which the texts before a string and before a number differ."""
    texts = to_string, to_number
    before = re.sub(r"\w+$", "", commonprefix(texts))  # noqa: RUF071  # no paths
    after = commonprefix([text[: len(before) - 1 : -1] for text in texts])  # noqa: RUF071
    return before + TYPE + re.sub(r"^\w+", "", after[::-1])


def _type_words(middle: str, typed: str) -> tuple[Pair, ...]:
    """Return the words of JSON types in a call with TYPED_ARGUMENTS; none if one has no word."""
    before, _, after = map(re.escape, middle.partition(TYPE))
    words = {}
    for key, json_type in zip(TYPED_ARGUMENTS, TYPES, strict=True):
        if (match := re.search(rf"{key}{before}(\w+){after}", typed)) is None:
            return ()
        words[json_type] = match[1]
    return tuple(words.items())


def _tool_call_format(
    one: str, two: str, arguments: ProbedArguments, syntax: DelimiterSyntax
) -> ToolCallFormat | None:
    """Derive the format from the text around one call, and between two."""
    before, _, rest = one.partition(NAMES[0])
    middle, matched, after = rest.partition(arguments.text)
    if not matched:
        return None
    middle = middle.replace(NAMES[0], NAME)  # some templates repeat it
    start = len(before) - arguments.before
    head, tail = before[start:], after[: arguments.after]
    between, first_index = None, 0
    rest = two.partition(NAMES[0])[2].partition(arguments.text)[2]
    second_before, _, rest = rest.partition(NAMES[1])
    second_middle, matched, last = rest.partition(arguments.text)
    if matched:
        second = len(second_before) - arguments.before
        between = second_before[arguments.after : second]
        second_middle = second_middle.replace(NAMES[1], NAME)
        indexed = _with_index((head, middle), (second_before[second:], second_middle))
        if indexed is None:
            return None
        (head, middle), first_index = indexed
        after = last  # some templates end the section after several calls only
    section, call, separator = split_surroundings(
        before[:start], between, after[arguments.after :], syntax
    )
    return ToolCallFormat(
        section,
        call,
        middle,
        separator,
        arguments.format,
        (head, tail),
        arguments.keys,
        first_index=first_index,
        syntax=syntax,
    )


def _with_index(first: Pair, second: Pair) -> tuple[Pair, int] | None:
    """Put INDEX for the number of the call, and return it with the first call's; None if the texts
    of the first and second call differ in anything else."""
    if first == second:
        return first, 0
    for index in (0, 1):
        one, two = (
            tuple(re.sub(rf"\b{number}\b", INDEX, text) for text in texts)
            for number, texts in ((index, first), (index + 1, second))
        )
        if one == two:
            return (one[0], one[1]), index
    return None


def split_surroundings(
    before: str, between: str | None, after: str, syntax: DelimiterSyntax
) -> tuple[Pair, Pair, str | None]:
    """Split the text before, between and after two calls into section, call and separator."""
    after = after.rstrip()
    if between is None:
        return ("", ""), (before, after), None
    opens = syntax.common_end(before, between)
    between = between[: len(between) - len(opens)]
    closes = syntax.common_start(between, after)
    section = before[: len(before) - len(opens)], after[len(closes) :]
    return section, (opens, closes), between[len(closes) :]
