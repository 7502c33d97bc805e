"""How a model writes its answers: the marks between thoughts, calls and content.

What learning.py finds in a chat template becomes marks here (marks.py), and a response template
does in response_template.py.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial

import regex

from worker.text.call_form import ID, INDEX, MARK, PLAIN_CALLS, VARIABLE, CallForm, Pair
from worker.text.call_parser import BodyParser, CallParser, body_parser
from worker.text.marks import ANSWER, CALL, NOBODY, THINKING, MakeParser, Mark
from worker.text.parameter_types import Tools

TOOL = r"[\w.:/-]{1,128}+"  # any name that a request may give one
NAME = r"(?P<name>[^\s<>\[\]{}()\"'`,]{1,128}?)"


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

    def ends_thoughts(self, text: str) -> bool:
        """Whether the mark that does so is in it."""
        return self.thoughts is not None and self.thoughts[1].strip() in text

    def thoughts_in(self, prompt: str) -> str:
        """The marks of thoughts that a prompt ends with: they have begun, or are over."""
        if self.thoughts is None:
            return ""
        opens, closes = (text.strip() for text in self.thoughts)
        start = prompt.rfind(opens)
        tail = prompt[start:] if start >= 0 else ""
        rest = tail.replace(closes, "").replace(opens, "")
        return "" if rest.strip() else tail

    def may_call(self, text: str, names: Iterable[str]) -> bool:
        """Whether a call's text that is cut short may go on as one: without a mark, its beginning
        tells."""
        if not self.unmarked:
            return True
        if not (self.calls and text.strip()):
            return False
        named, keys = f"(?:{'|'.join(map(regex.escape, names))})", self.calls.keys
        call = rf"{named}\(" if keys is None else rf'\{{\s*+"{named}"'
        if keys and keys[0]:
            call = rf'\{{\s*+"{keys[0]}"\s*+:\s*+"{named}"'
        before = rf"\s*+(?:<\|\w{{1,40}}\|>\s*+)?(?:{regex.escape(self.calls.marker)}\s*+)?"
        whole = regex.compile(rf"{before}(?:\[\s*+)?{call}.*", regex.DOTALL)
        return whole.fullmatch(text, partial=True) is not None

    def shows(self, token: str) -> bool:
        """Whether a special token is part of a mark, or quotes arguments."""
        return len(token) > 2 and any(token in text for text in self.texts)


def learned_form(
    thoughts: Pair | None, content: Pair | None, calls: CallForm | None, channels: Channels | None
) -> AnswerForm:
    """The form of what has been found in a chat template."""
    if channels:
        form = _in_channels(channels, calls)
    else:
        marks: list[Mark] = []
        for pair, to in ((thoughts, THINKING), (content, ANSWER)):
            if pair:
                marks += [_opening(to, pair[0]), _mark((ANSWER, to), ANSWER, pair[1])]
        call_marks = _call_marks(calls) if calls else []
        unmarked = calls is not None and calls.unmarked
        form = AnswerForm(tuple(marks), tuple(call_marks), thoughts, content, calls, unmarked)
    texts = [*form.texts, *(thoughts or ()), *(content or ())]
    if calls:
        entry = calls.arguments
        texts += [*calls.section, *calls.call, calls.middle, calls.separator or ""]
        texts += [entry.open, entry.middle, entry.close, entry.quotes]
    return replace(form, texts=tuple(filter(None, texts)))


def _mark(within: Iterable[str], to: str, text: str) -> Mark:
    return Mark(frozenset(within), to, regex.compile(regex.escape(text)), first=frozenset(text[0]))


def _opening(to: str, text: str) -> Mark:
    """A mark with a word after it, as in <|channel>thought: the word may be left out, where what
    follows shows that."""
    [bare] = MARK.findall(text)[:1]
    word = text.removeprefix(bare)
    if not word:
        return _mark((ANSWER, to), to, bare)._replace(apart=to == THINKING)  # or it is a mention
    other = "|".join(f"(?={word[:n]}[^{letter}])" for n, letter in enumerate(word))
    pattern = regex.compile(f"{regex.escape(bare)}(?:{word}|{other})")
    return Mark(frozenset((ANSWER, to)), to, pattern, first=frozenset(bare[0]))


def _call_marks(form: CallForm) -> list[Mark]:
    """What opens a call, with its name if that comes next; what closes it; marks that follow."""
    before, opens = form.opens
    closes, after = form.closes
    may_stand = "".join(rf"(?:{_flexible(text)}\s*)?" for text in before)
    if form.unmarked:
        marker = rf"(?:{regex.escape(form.marker)}\s*+)?" if form.marker else ""
        # None begins with space: a long run of it would be looked through from each of its places.
        begins = r"(?:\[\s*+)?\{\s*+\"" if form.keys else rf"\[\s*+{TOOL}\("
        pattern = rf"(?:<\|\w{{1,40}}\|>\s*+)?{marker}(?={begins})"
    elif form.is_list:
        pattern = may_stand + _flexible(opens)
    else:
        before_id, id_, after_id = form.middle.strip().rpartition(ID)
        may_come = f"(?:{_flexible(before_id + id_)})?" if id_ and after_id else ""
        middle = may_come + _flexible(after_id) or r"(?=[\s<])"
        pattern = rf"{may_stand}{_flexible(opens)}\s*{NAME}\s*{middle}"
    opening = Mark(
        frozenset((ANSWER,) if form.unmarked else (ANSWER, THINKING)),
        CALL,
        regex.compile(pattern, regex.DOTALL),
        first=frozenset(text[0] for text in (*before, opens) if text),
        parser=partial(_call_parser, form),
        leads=form.unmarked,
        trigger=None if form.is_list else regex.compile(_flexible(form.trigger.strip())),
    )
    made = [opening]
    if closes:
        closing = regex.compile(_flexible(closes), regex.DOTALL)
        made.append(Mark(frozenset((CALL,)), ANSWER, closing, first=frozenset(closes[0])))
    return made + [_mark((ANSWER,), ANSWER, text) for text in after]


def _in_channels(form: Channels, calls: CallForm | None) -> AnswerForm:
    """A header is one mark; the first that matches tells what its message is. None of its parts
    gives back what it took: whatever else stands there is looked through once."""
    start, channel, body = (regex.escape(each) for each in (form.start, form.channel, form.body))
    recipient = regex.escape(form.recipient.strip())
    to = regex.escape(form.recipient.split("=")[0].strip() + "=")
    rest = rf"(?:(?!{body}).){{0,200}}+{body}"
    thoughts = rf"{channel}\s*{regex.escape(form.thinking)}"
    before_to, before_thoughts = (rf"(?:(?!{body}|{end}).){{0,200}}+" for end in (to, thoughts))
    thoughts += rf"(?:(?!{channel}|{body}).){{0,100}}+{body}"
    within = frozenset((ANSWER, THINKING, NOBODY))
    firsts = frozenset((form.start[0], form.channel[0]))

    def headed(phase: str, header: str, parser: MakeParser | None = None) -> Mark:
        pattern = regex.compile(rf"(?:{start}|(?={channel})){header}", regex.DOTALL)
        trigger = regex.compile(recipient) if parser else None
        return Mark(within, phase, pattern, first=firsts, parser=parser, trigger=trigger)

    others = headed(NOBODY, rf"{before_to}{to}(?!assistant){rest}")
    ends = regex.compile("|".join(map(regex.escape, form.ends)))
    first = frozenset(end[0] for end in form.ends)
    end = Mark(within | {CALL}, ANSWER, ends, first=first)
    call_marks: list[Mark] = []
    if calls:
        read = partial(_call_parser, calls)
        for before in (recipient, to):  # some leave out that it is one of the functions
            function = rf"{before}(?P<name>{TOOL}){rest}"
            mark = headed(CALL, before_to + function, read)._replace(known=before != recipient)
            begun = regex.compile(function, regex.DOTALL)  # the prompt has the header's start
            at_once = mark._replace(
                within=frozenset((ANSWER,)), pattern=begun, first=frozenset(), leads=True
            )
            call_marks += [mark, at_once]
    return AnswerForm(
        (others, headed(THINKING, before_thoughts + thoughts), headed(ANSWER, rest), end),
        tuple(call_marks),
        (form.channel + form.thinking + form.body, form.ends[0]),
        (form.channel + form.content + form.body, form.ends[0]),
        calls,
        start=form.start,
        texts=(form.start, form.channel, form.body, *form.ends),
    )


def _flexible(text: str) -> str:
    """As a pattern, in which any space stands for the text's, and anything for an index or id."""
    parts = re.split(rf"([{INDEX}{ID}]|\s+)", text)
    return "".join(
        VARIABLE[part] if part in VARIABLE else r"\s*" if part.isspace() else regex.escape(part)
        for part in parts
        if part
    )


def _call_parser(form: CallForm, found: dict[str, str], tools: Tools) -> CallParser | BodyParser:
    name = found.get("name")
    if form.keys is not None:
        return CallParser(*form.keys)
    if form.arguments.style == "json":
        return CallParser("", "", name)
    return body_parser(form, name, tools)


# What calls look like where a model must make some and its form is unknown.
PLAIN = learned_form(("<think>", "</think>"), None, PLAIN_CALLS, None)
