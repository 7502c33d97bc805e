"""How a model writes its answers: the marks between thoughts, calls and content.

A mark leads from one phase of an answer to another; parser.py follows them. What learning.py finds
in a chat template becomes marks here, and a response template does in response_template.py.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import regex

from worker.text.call_form import ID, INDEX, MARK, PLAIN_CALLS, VARIABLE, CallForm, Pair
from worker.text.call_parser import BodyParser, CallParser, Tools

Match: TypeAlias = Any  # of the regex package
MakeReader = Callable[[Match, Tools], "CallParser | BodyParser"]

ANSWER, THINKING, CALL, NOBODY = "answer", "thinking", "call", "nobody"
NAME = r"(?P<name>[^\s<>\[\]{}()\"'`,]{1,128}?)"


class Mark(NamedTuple):
    """What leads from a phase to another."""

    within: frozenset[str]  # the phases it is looked for in
    to: str
    pattern: Any  # of the regex package
    grows: bool = True  # a match at the end of a text may become longer
    first: frozenset[str] = frozenset()  # characters that begin it; none: they are not known
    reader: MakeReader | None = None  # of the calls that it opens
    leads: bool = False  # it counts only before everything else
    trigger: Any = None  # a pattern: with this, no matter what follows, a call has begun


def mark(within: Sequence[str], to: str, literal: str) -> Mark:
    pattern = regex.compile(regex.escape(literal))
    return Mark(frozenset(within), to, pattern, False, frozenset(literal[0]))


def opening(within: Sequence[str], to: str, text: str) -> Mark:
    """A mark with a word after it, which may be left out: what follows then shows that."""
    [bare] = MARK.findall(text)[:1]
    word = text.removeprefix(bare)
    if not word:
        return mark(within, to, bare)
    other = "|".join(f"(?={word[:n]}[^{letter}])" for n, letter in enumerate(word))
    pattern = regex.compile(f"{regex.escape(bare)}(?:{word}|{other})")
    return Mark(frozenset(within), to, pattern, False, frozenset(bare[0]))


@dataclass(frozen=True, slots=True)
class Channels:
    """Messages in an answer, each with a header that says what it is: where one starts, the mark
    before its channel, the one that ends the header, and those that end the message."""

    start: str
    channel: str
    body: str
    ends: tuple[str, ...]
    thinking: str  # the channel of thoughts
    content: str
    recipient: str  # what stands before a function's name


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """`thoughts`, `content`: what opens and closes them, content seldom. `calls` is None where it
    is not known how they are written: then they are read, if `marks` tell them, but not held to
    a grammar."""

    marks: tuple[Mark, ...]
    call_marks: tuple[Mark, ...] = ()  # those that count where calls may be made
    thoughts: Pair | None = None
    content: Pair | None = None
    calls: CallForm | None = None
    unmarked: bool = False  # calls begin with their JSON or their name, before everything else
    start: str = ""  # what may stand before content and calls, where thoughts are a message
    may_close: bool = False  # thoughts that nothing has opened: a switch turns them on and off
    begins: str = ANSWER  # the phase
    texts: tuple[str, ...] = ()  # of the marks, and of what quotes arguments

    @property
    def reads_calls(self) -> bool:
        return bool(self.call_marks)

    @property
    def only_calls(self) -> bool:
        """Without calls an answer is nothing but text."""
        return self.begins == ANSWER and not self.marks

    def thoughts_in(self, prompt: str) -> str:
        """The marks of thoughts that a prompt ends with: they have begun, or are over."""
        if self.thoughts is None:
            return ""
        opens, closes = (text.strip() for text in self.thoughts)
        start = prompt.rfind(opens)
        tail = prompt[start:] if start >= 0 else ""
        rest = tail.replace(closes, "").replace(opens, "")
        return "" if rest.strip() else tail

    def ends_thoughts(self, text: str) -> bool:
        """Whether the mark that does so is in it."""
        return self.thoughts is not None and self.thoughts[1].strip() in text

    def shows(self, token: str) -> bool:
        """Whether a special token is part of a mark, or quotes arguments."""
        return len(token) > 2 and any(token in text for text in self.texts)


def learned(
    thoughts: Pair | None, content: Pair | None, calls: CallForm | None, channels: Channels | None
) -> AnswerForm:
    """The form of what has been found in a chat template."""
    marks: list[Mark] = []
    call_marks: list[Mark] = []
    pairs = [pair for pair in (thoughts, content) if pair]
    texts = [text for pair in pairs for text in pair]
    if channels:
        marks, call_marks = _channel_marks(channels, calls)
        thoughts = channels.channel + channels.thinking + channels.body, channels.ends[0]
        content = channels.channel + channels.content + channels.body, channels.ends[0]
        texts += [channels.start, channels.channel, channels.body, *channels.ends]
    else:
        if calls:
            call_marks = _call_marks(calls)
        for pair, to in ((thoughts, THINKING), (content, ANSWER)):
            if pair:
                marks.append(opening([ANSWER, to], to, pair[0]))
                marks.append(mark([ANSWER, to], ANSWER, pair[1]))
    if calls:
        texts += [*calls.section, *calls.call, calls.middle, calls.separator or ""]
        form = calls.arguments
        texts += [form.open, form.middle, form.close, form.quotes]
    unmarked = calls is not None and calls.unmarked and channels is None
    return AnswerForm(
        tuple(marks),
        tuple(call_marks),
        thoughts,
        content,
        calls,
        unmarked,
        start=channels.start if channels else "",
        texts=tuple(filter(None, texts)),
    )


def _call_marks(form: CallForm) -> list[Mark]:
    before, opens = form.opens
    closes, after = form.closes
    may_stand = "".join(rf"(?:{flexible(text)}\s*)?" for text in before)
    if form.unmarked:
        marker = rf"(?:{regex.escape(form.marker)}\s*+)?" if form.marker else ""
        # None begins with space: a long run of it would be looked through from each of its places.
        begins = r"(?:\[\s*+)?\{\s*+\"" if form.keys else r"\[\s*+[^\W\d][\w.-]*+\("
        pattern = rf"(?:<\|\w{{1,40}}\|>\s*+)?{marker}(?={begins})"
    elif form.is_list:
        pattern = may_stand + flexible(opens)
    else:
        before_id, id_, after_id = form.middle.strip().rpartition(ID)
        may_come = f"(?:{flexible(before_id + id_)})?" if id_ and after_id else ""
        middle = may_come + flexible(after_id) or r"(?=[\s<])"
        pattern = rf"{may_stand}{flexible(opens)}\s*{NAME}\s*{middle}"
    first = frozenset(text[0] for text in (*before, opens) if text)
    found = regex.compile(pattern, regex.DOTALL)
    within = frozenset((ANSWER,) if form.unmarked else (ANSWER, THINKING))
    trigger = None if form.is_list else regex.compile(flexible(form.trigger.strip()))
    reader = _reader(form)
    made = [Mark(within, CALL, found, False, first, reader, form.unmarked, trigger)]
    if closes:
        found = regex.compile(flexible(closes), regex.DOTALL)
        made.append(Mark(frozenset((CALL,)), ANSWER, found, False, frozenset(closes[0])))
    return made + [mark([ANSWER], ANSWER, text) for text in after]


def _channel_marks(form: Channels, calls: CallForm | None) -> tuple[list[Mark], list[Mark]]:
    """A header is one mark; the first that matches tells what its message is."""
    start, channel, body = (regex.escape(each) for each in (form.start, form.channel, form.body))
    header = rf"(?:(?!{body}).){{0,200}}?"
    to = regex.escape(form.recipient.split("=")[0].strip() + "=")
    function = rf"{regex.escape(form.recipient.strip())}(?P<name>[\w.-]{{1,128}}){header}{body}"
    thoughts = rf"{channel}\s*{regex.escape(form.thinking)}(?:(?!{channel}|{body}).){{0,100}}{body}"
    within = frozenset((ANSWER, THINKING, NOBODY))
    firsts = frozenset((form.start[0], form.channel[0]))

    def headed(phase: str, rest: str, reader: MakeReader | None = None) -> Mark:
        begins = rf"(?:{start}|(?={channel})){header}"
        pattern = regex.compile(begins + rest, regex.DOTALL)
        return Mark(within, phase, pattern, False, firsts, reader)

    others = headed(NOBODY, rf"{to}(?!assistant){header}{body}")
    ends = regex.compile("|".join(map(regex.escape, form.ends)))
    first = frozenset(end[0] for end in form.ends)
    end = Mark(within | {CALL}, ANSWER, ends, False, first)
    marks = [others, headed(THINKING, thoughts), headed(ANSWER, body), end]
    if calls is None:
        return marks, []
    begun = regex.compile(function, regex.DOTALL)  # the prompt has the header's start
    reader = _reader(calls)
    call = headed(CALL, function, reader)
    return marks, [call, Mark(frozenset((ANSWER,)), CALL, begun, False, frozenset(), reader, True)]


def flexible(text: str) -> str:
    """As a pattern, in which any space stands for the text's, and anything for an index or id."""
    parts = re.split(rf"([{INDEX}{ID}]|\s+)", text)
    return "".join(
        VARIABLE[part] if part in VARIABLE else r"\s*" if part.isspace() else regex.escape(part)
        for part in parts
        if part
    )


def _reader(form: CallForm) -> MakeReader:
    def make(match: Match, tools: Tools) -> CallParser | BodyParser:
        name = match.groupdict().get("name")
        if form.keys is not None:
            return CallParser(*form.keys)
        if form.arguments.style == "json":
            return CallParser("", "", name)
        return BodyParser(form, name, tools)

    return make


# What calls look like where a model must make some and its form is unknown.
PLAIN = learned(("<think>", "</think>"), None, PLAIN_CALLS, None)
