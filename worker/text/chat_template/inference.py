"""Turns and tools that are made up to see what a chat template makes of them.

Their names and values occur nowhere else, so that they are found again in what it writes. The
calls among that are examples: they prove what was learned, if they are read back, and prompts show
them where a template does not show tools itself (chat_template/template.py).

The form of a model's calls, found in a turn with one call and a turn with two.

    <call>nameone{"keyone": "valueone", "keytwo": 12}</call>
    <call>nameone{…}</call>
<call>nametwo{…}</call>

Here a call stands in <call> … </call>, nothing is between its name and its arguments, these are
JSON, and "
" separates calls. Three ways to write arguments are tried, one after another.

The form of a model's answers, learned from its chat template.

    turns made for the purpose (chat_template/inference.py)  --Render-->  texts  --compare-->  forms

The form of calls is found in such texts by chat_template/inference.py, what the template takes of
calls that
were made before by history.py, thoughts and content here. The template renders turns with and
without
calls, thoughts and text, with names and values that occur nowhere else; what stands around those is
the form. There is no table of families, but for <think>, where a template names its end
and shows no thoughts. What is found is proved by reading back what the template has written.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from worker.messages.deltas import Delta
from worker.text import output_format
from worker.text.chat_template.history import (
    BLOCKS,
    QUESTION,
    HistoryAdapter,
    HistoryFormat,
    Message,
    Render,
    call,
    history_format,
)
from worker.text.detokenizer import TextSpan
from worker.text.output_format import ChannelFormat, OutputFormat, inferred_output_format
from worker.text.parser import OutputParser
from worker.text.tool_call_format import (
    DEFAULT_TOOL_CALL_FORMAT,
    DELIMITER,
    ID,
    INDEX,
    ArgumentFormat,
    Pair,
    ToolCallFormat,
    common_end,
    common_start,
)

Example = tuple[str, list[tuple[str, Any]]]  # calls as written, their names and arguments

CONTENT, THOUGHT = "qcontentq", "qthoughtq"
NAMES, IDS = ("nameone", "nametwo"), ("callidone", "callidtwo")
TEXT, NUMBER = "valueone", 12
ARGUMENTS = {"keyone": TEXT, "keytwo": NUMBER}
# One of each type of JSON, and a text that looks like a number.
TYPED = {
    "keyone": "value-1.b",
    "keytwo": 12,
    "keythree": 1.5,
    "keyfour": True,
    "keyfive": ["ab", 2],
    "keysix": {"inner": "c"},
    "keyseven": "7",
}
TYPES = ("string", "integer", "number", "boolean", "array", "object", "string")
TRIED: tuple[tuple[dict[str, Any], ...], ...] = (
    (ARGUMENTS,),
    (ARGUMENTS, ARGUMENTS),
    ({},),
    (TYPED,),
    (TYPED, TYPED),
)
PLACEHOLDERS = {  # of what was made up, in an example that is shown
    **{"nameone": "FUNCTION", "nametwo": "OTHER_FUNCTION", "callidone": "ID"},
    **{"keyone": "PARAMETER", "keytwo": "OTHER", "valueone": "VALUE", "callidtwo": "OTHER_ID"},
}


# ── turns and tools ──


def assistant(*calls: dict[str, Any], content: str = "", thought: str = "") -> Message:
    """A turn, in the API's form, with calls of these arguments."""
    turn: Message = {"role": "assistant", "content": content}
    if thought:
        turn["reasoning_content"] = thought
    if calls:
        made = zip(IDS, NAMES, calls, strict=False)
        turn["tool_calls"] = [call(id, name, arguments) for id, name, arguments in made]
    return turn


def _tool(name: str, types: dict[str, str]) -> dict[str, Any]:
    properties = {key: {"description": "any", "type": type_} for key, type_ in types.items()}
    parameters = {"type": "object", "properties": properties, "required": []}
    function = {"name": name, "description": "any", "parameters": parameters}
    return {"type": "function", "function": function}


TOOLS = [_tool(name, {"keyone": "string", "keytwo": "integer"}) for name in NAMES]
TYPED_TOOLS = [_tool(name, dict(zip(TYPED, TYPES, strict=True))) for name in NAMES]


# ── examples ──


def examples(written: Callable[..., str], form: ToolCallFormat) -> list[Example]:
    """Calls as the template writes them, and the names and arguments that went in."""
    return [
        (written(*tried), [*zip(NAMES, tried, strict=False)])
        for tried in TRIED
        if form.separator is not None or len(tried) == 1
    ]


def shown_calls(examples: Iterable[Example], count: int) -> str:
    """So many calls as a template writes them, to be shown as an example; plain ones if it writes
    none."""
    written = next((text for text, calls in examples if len(calls) == count), "").strip()
    if not written:
        return DEFAULT_TOOL_CALL_FORMAT.render([("FUNCTION", '{"PARAMETER": "VALUE"}')] * count)
    for name, shown in PLACEHOLDERS.items():
        written = written.replace(name, shown)
    return written


def reads_back(form: OutputFormat, examples: Iterable[Example]) -> bool:
    """Whole, and letter by letter."""
    return all(
        _read(form, pieces) == calls for text, calls in examples for pieces in ([text], text)
    )


def _read(form: OutputFormat, pieces: Iterable[str]) -> list[tuple[str | None, Any]] | None:
    """The calls of an answer that is nothing else; None if there is more, or no JSON."""
    parser, made = OutputParser(form, "", True, TYPED_TOOLS), Delta(0)
    for event in [
        event for each in pieces for event in parser.feed(TextSpan(each))
    ] + parser.finish():
        if event.kind != "call" and event.span.text:
            return None
        made.add("call", event.span.text, event.name)
    try:
        return [(part.name, json.loads(part.text)) for part in made.parts]
    except ValueError:
        return None


OBJECT = re.compile(
    r'\{\s*"keyone"(?P<colon>\s*:\s*)"valueone"(?P<comma>\s*,\s*)"keytwo"\s*:\s*12\s*\}'
)
PYTHON = re.compile(
    rf"{NAMES[0]}\((?P<written>\s*keyone\s*=\s*(?P<quote>[\"']?){TEXT}(?P=quote)"
    rf"(?P<comma>\s*,\s*)keytwo\s*=\s*(?P<other>[\"']?){NUMBER}(?P=other)\s*)\)"
)
ENTRIES = re.compile(rf"{NAMES[0]}(.*?)keyone(.*?){TEXT}(.*?)keytwo(.*?){NUMBER}(.*)$", re.DOTALL)


class Found(NamedTuple):
    """Arguments as they are written in a text. So many letters `before` a call's name and `after`
    its arguments are part of its JSON or its Python."""

    written: str
    arguments: ArgumentFormat
    before: int = 0
    after: int = 0
    keys: Pair | None = None


def call_form(one: str, two: str) -> ToolCallFormat | None:
    """`two`: nothing if one call is all there can be. None: not understood."""
    ways = (way(one) for way in (_json, _python, _entries))
    forms = (_form(one, two, found) for found in ways if found)
    return next((form for form in forms if form), None)


def _json(text: str) -> Found | None:
    """{"name": "nameone", "arguments": {"keyone": …}}, or the arguments alone."""
    name = text.index(NAMES[0])
    found = OBJECT.search(text, name)
    if found is None:
        return None
    arguments = ArgumentFormat("json", found["colon"], found["comma"])
    around = _object_around(text, name, found.end())
    if around is None:
        return Found(found[0], arguments)
    start, end, made = around
    keys = _keys(made)
    return keys and Found(found[0], arguments, name - start, end - found.end(), keys)


def _object_around(text: str, name: int, end: int) -> tuple[int, int, dict[str, Any]] | None:
    """The innermost object of JSON with both a name and what ends at `end`."""
    start = text.rfind("{", 0, name)
    while start >= 0:
        try:
            made, length = json.JSONDecoder().raw_decode(text.replace(ID, "i")[start:])
        except ValueError:
            made, length = None, 0
        if isinstance(made, dict) and start + length > end:
            return start, start + length, made
        start = text.rfind("{", 0, start)
    return None


def _keys(made: dict[str, Any]) -> Pair | None:
    """Those of the name and the arguments; "" where the name itself is the arguments' key."""
    if made.get(NAMES[0]) == ARGUMENTS:
        return "", ""
    name = [key for key, value in made.items() if value == NAMES[0]]
    arguments = [key for key, value in made.items() if value == ARGUMENTS]
    return (name[0], arguments[0]) if name and arguments else None


def _python(text: str) -> Found | None:
    """nameone(keyone="valueone", keytwo=12)"""
    found = PYTHON.search(text)
    if found is None:
        return None
    quotes = "" if found["other"] else found["quote"]
    arguments = ArgumentFormat("python", comma=found["comma"], quotes=quotes)
    return Found(found["written"], arguments, after=len(")"))


def _entries(text: str) -> Found | None:
    """What stands around two keys and two values, a text and a number. In

        nameone{keyone:<|"|>valueone<|"|>,keytwo:12}

    the middle is ":", a text's is more by the quotes, and "," is what stands before the second key
    and not before the first. In

        nameone<key>keyone</key><value>valueone</value><key>keytwo</key><value>12</value></call>

    what stands after both values closes an entry, and what stands before both keys opens one."""
    found = ENTRIES.search(text)
    if found is None:
        return None
    first, to_text, between, middle, rest = found.groups()
    quotes = to_text[len(middle) :]
    if to_text != middle + quotes or not between.startswith(quotes):
        return None
    between = between[len(quotes) :]
    close = common_start(between, rest)
    between = between[len(close) :]
    opens = common_end(first, between)
    comma = between[: len(between) - len(opens)]
    texts = {"open": opens, "middle": middle, "close": close}
    arguments = ArgumentFormat("entries", comma=comma, quotes=quotes, **texts)
    start = found.start(1) + len(first) - len(opens)
    return Found(text[start : found.start(5) + len(close)], arguments)


def _form(one: str, two: str, found: Found) -> ToolCallFormat | None:
    """What stands around the call, and between two of them."""
    before, _, rest = one.partition(NAMES[0])
    middle, written, after = rest.partition(found.written)
    if not written:
        return None
    start = len(before) - found.before
    head, tail = before[start:], after[: found.after]
    between = None
    rest = two.partition(NAMES[0])[2].partition(found.written)[2]
    second_before, _, rest = rest.partition(NAMES[1])
    second_middle, written, _ = rest.partition(found.written)
    if written:
        second = len(second_before) - found.before
        between = second_before[found.after : second]
        heads, middles = _counted(head, second_before[second:]), _counted(middle, second_middle)
        if heads is None or middles is None:
            return None
        head, middle = heads, middles
    section, each, separator = split(before[:start], between, after[found.after :])
    return ToolCallFormat(
        section, each, middle, separator, found.arguments, (head, tail), found.keys
    )


def _counted(one: str, other: str) -> str | None:
    """A text of the first call and the second, with INDEX where these are counted; None where they
    differ in something else."""
    if one == other:
        return one
    counted = re.sub(r"\b0\b", INDEX, one)
    return counted if counted == re.sub(r"\b1\b", INDEX, other) else None


def split(before: str, between: str | None, after: str) -> tuple[Pair, Pair, str | None]:
    """Section, call and separator of what stands before, between and after two calls."""
    if between is None:
        return ("", ""), (before, after), None
    opens = common_end(before, between)
    between = between[: len(between) - len(opens)]
    closes = common_start(between, after)
    section = before[: len(before) - len(opens)], after[len(closes) :]
    return section, (opens, closes), between[len(closes) :]


INSTEAD = "taken as JSON in <tool_call>"
SWITCHES = ("enable_thinking", "thinking")  # what templates call it
THOUGHTS_KEYS = ("reasoning_content", "reasoning", "thinking", BLOCKS)
# A word before a list of calls, as in functools[{"name": …
WORD = re.compile(r"([^\s<>\[\]{}\"'`(]{3,40})\[\s*\{\s*\"name\"")
# Thoughts that are shown as the list of blocks that was given: {'type': 'thinking', …
DUMPED = re.compile(rf"\W(?:type|thinking)\W\s*:\s*\W(?:thinking|{THOUGHT})")
# At the end of a text: a mark and perhaps a word, as in <|channel>thought
LAST_MARK = re.compile(rf"(?:{DELIMITER.pattern})\w*\s*$")
# At the end of a prompt: <think> or <think></think>, [THINK] or [THINK][/THINK]
OPENED = re.compile(r"(<([\w:]{1,40})>|\[([A-Z]{2,40})\])\s*(?:</\2>|\[/\3\])?\s*$")


class TemplateProfile(NamedTuple):
    """What is known of a template, as ChatTemplate has it."""

    answers: OutputFormat
    turns: HistoryFormat | None
    shows_tools: bool
    examples: list[Example]
    lacks: list[str]


def learn(
    render: Render, lenient: Render, source: str, response: Mapping[str, Any] | None
) -> TemplateProfile:
    """What the response template says, where there is one; else, what the chat template shows.
    `lenient`: for a template that shows no calls otherwise."""
    learner = TemplateProber(render, source)
    turns, shows_tools = learner.turns, names_tools(learner.asked)
    calls = learner.calls()
    if calls is None and (turns is None or turns.written):
        learner = TemplateProber(lenient, source)
        calls = learner.calls()
    made = examples(learner.written, calls) if calls else []
    lacks = []
    if response:
        answers = replace(output_format.declared_output_format(response), tool_calls=calls)
        if answers.call_delimiters and calls and not reads_back(answers, made):
            answers = replace(answers, tool_calls=None)
            lacks.append("calls: the response template reads others; they are not held to a form")
    else:
        answers = learner.answers(calls)
        if calls is None:
            lacks.append(f"calls: the template writes none that are understood; {INSTEAD}")
        elif not reads_back(answers, made):
            lacks.append(f"calls: those that the template writes are not read back; {INSTEAD}")
        if lacks:
            answers, made = plain_calls(answers), []
    if turns is None:
        lacks.append("turns: the template cannot show calls and their results; refused")
    elif turns.written:
        lacks.append("turns: the template cannot show calls; told in the content")
    if turns and turns.results == "told":
        lacks.append("turns: the template cannot show results; told in the user's words")
    return TemplateProfile(answers, turns, shows_tools, made, lacks)


def plain_calls(form: OutputFormat) -> OutputFormat:
    """With calls as JSON in <tool_call>, in place of those that a template seemed to write."""
    plain = inferred_output_format(form.reasoning, form.content, DEFAULT_TOOL_CALL_FORMAT, None)
    return replace(plain, may_close_unopened=form.may_close_unopened)


def names_tools(text: str) -> bool:
    """Whether the tools of chat_template/inference.py are shown in it."""
    return all(name in text for name in (*NAMES, "keyone"))


class TemplateProber:
    """`turns`: how the template takes calls and thoughts; None: it takes no calls. `thoughts`: the
    marks around them. `asked`: a question, with tools unless the template fails where there are
    any, and the generation prompt."""

    def __init__(self, render: Render, source: str) -> None:
        self._render = render
        with_tools = render([QUESTION], TOOLS)
        self._offered, self._tools = (TOOLS, TYPED_TOOLS) if with_tools else ([], [])
        self.asked = with_tools or render([QUESTION])
        self.turns = history_format(
            lambda turns: render(turns, self._offered), self.asked.count("None")
        )
        self._plain = self._turn(assistant(content=CONTENT))
        self._thinking = ""  # a turn with thoughts and content
        for key in THOUGHTS_KEYS:
            if text := self._shown_thoughts(key):
                self._thinking = text
                self.turns = self.turns and replace(self.turns, thoughts=key)
                break
        self.thoughts = self._thoughts(source)

    def _turn(self, turn: Message, key: str = "reasoning_content", **variables: Any) -> str:
        """A question and this turn, with its thoughts under this key."""
        form = replace(self.turns or HistoryFormat(), thoughts=key)
        messages = HistoryAdapter(form).adapt([QUESTION, turn])
        return self._render(messages, self._tools, add_generation_prompt=False, **variables)

    def answers(self, calls: ToolCallFormat | None) -> OutputFormat:
        """With these calls, or plain ones. Thoughts may be closed that nothing has opened where a
        variable turns thinking on and off."""
        found = (
            self.thoughts,
            self._content(),
            calls or DEFAULT_TOOL_CALL_FORMAT,
            self._channels(calls),
        )
        form = inferred_output_format(*found)
        on, off = (
            self._render([QUESTION], **dict.fromkeys(SWITCHES, way)) for way in (True, False)
        )
        return replace(form, may_close_unopened=form.reasoning is not None and on != off)

    # ── calls ──

    def calls(self) -> ToolCallFormat | None:
        """None where the template writes none, or none that is understood."""
        if self.turns is None or self.turns.written:
            return None
        one, two = self._one_id(1), "" if self.turns.single else self._one_id(2)
        if NAMES[0] not in one:
            return None
        if NAMES[1] not in two or two.find(NAMES[1]) < two.find(NAMES[0]):
            two = ""
        form = call_form(one, two)
        if form and form.undelimited and form.keys and (word := WORD.search(self.asked)):
            return replace(form, prefix_word=word[1])  # as in the prompt's example of a call
        return form

    def _one_id(self, count: int) -> str:
        """So many calls, with ID for each one's."""
        return re.sub("|".join(IDS), ID, self.written(*(ARGUMENTS,) * count))

    def written(self, *arguments: dict[str, Any]) -> str:
        """A turn's calls with these arguments, and all that stands around them."""
        text = self._turn(assistant(*arguments)).rstrip()
        plain = (self._plain or self.asked).rstrip()
        text = text[len(common_start(text, plain)) :]
        text = text[: len(text) - len(common_end(text, plain))]
        if self.thoughts:  # there are none between their marks
            mark = rf"^\s*(?:{'|'.join(map(re.escape, self.thoughts))})\s*"
            text = re.sub(mark, "", re.sub(mark, "", text))
        return text

    # ── thoughts and content ──

    def _shown_thoughts(self, key: str) -> str:
        """A turn with thoughts and content, or a call if only that shows them; nothing where none
        are shown."""
        turns = [assistant(content=CONTENT, thought=THOUGHT)]
        turns += [assistant(ARGUMENTS, thought=THOUGHT)] if key != BLOCKS else []
        texts = (self._turn(turn, key, enable_thinking=True) for turn in turns)
        shown = (text for text in texts if THOUGHT in text and not DUMPED.search(text))
        return next(shown, "").replace(NAMES[0], CONTENT)

    def _thoughts(self, source: str) -> Pair | None:
        """What stands around them; else, what a prompt ends with, or what the source names."""
        before, _, after = self._thinking.partition(THOUGHT)
        opens, closes = LAST_MARK.search(before), DELIMITER.search(after.partition(CONTENT)[0])
        if opens and closes:
            plain = LAST_MARK.search(self._plain.partition(CONTENT)[0])
            if plain is None or plain[0] != opens[0]:
                return opens[0].strip(), closes[0]
        for variables in ({}, {"enable_thinking": True}, {"enable_thinking": False}):
            if found := OPENED.search(self._render([QUESTION], **variables)):
                return found[1], found[1][0] + "/" + found[1][1:]
        return ("<think>", "</think>") if "</think>" in source else None

    def _content(self) -> Pair | None:
        """The marks around it, if there are any."""
        messages = [QUESTION, assistant(content=CONTENT)]
        text = self._render(messages, add_generation_prompt=False)
        before, _, after = text.partition(CONTENT)
        opens, closes = LAST_MARK.search(before), DELIMITER.match(after.lstrip())
        if opens is None or closes is None:
            return None
        mark = opens[0].strip()
        if not DELIMITER.fullmatch(mark) or mark in (self.thoughts or ()):
            return None
        return None if mark in self._render([QUESTION]) else (mark, closes[0])

    def _channels(self, calls: ToolCallFormat | None) -> ChannelFormat | None:
        """Thoughts are a message, and the generation prompt's text stands before each:

        <|start|>assistant<|channel|>analysis<|message|>THOUGHT<|end|><|start|>assistant…"""
        before, _, after = self._thinking.partition(THOUGHT)
        between, _, rest = after.partition(CONTENT)
        if not between or (calls and "=" not in calls.call[0]):
            return None
        unasked = self._render([QUESTION], self._offered, add_generation_prompt=False)
        prompt = self.asked[len(common_start(self.asked, unasked)) :].strip()
        if not prompt or prompt not in between:
            return None
        end, _, content = between.partition(prompt)
        headers = before.rpartition(prompt)[2], content
        marks = [DELIMITER.findall(header) for header in headers]
        if len(marks[0]) != 2 or marks[0] != marks[1]:
            return None
        channel, body = marks[0]
        thinking, told = (DELIMITER.split(header)[1].strip() for header in headers)
        ends = [*DELIMITER.findall(end), *DELIMITER.findall(rest)[:1]]
        ends += DELIMITER.findall(calls.call[1]) if calls else []
        recipient = calls.call[0] if calls else ""
        ends = list(dict.fromkeys(ends))
        return ChannelFormat(prompt, channel, body, tuple(ends), thinking, told, recipient)
