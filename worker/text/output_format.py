"""Marks in an answer's text: each leads from one phase of it to another; parser.py follows them.

How a model writes its answers: the marks between thoughts, calls and content.

What chat_template/inference.py finds in a chat template becomes marks here (output_format.py), and
a response template
does in output_format.py.

A response template, which a tokenizer may carry, as the form of answers that it tells.

Its fields are phases of an answer, which open and close. The library compiles it, and reads what
is in a call's field; where fields begin and end is followed by parser.py, which needs no whole
answer for that.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import regex
from transformers.utils.chat_parsing.content_parsers import process_field
from transformers.utils.chat_parsing.response_templates import (
    ResponseTemplateField,
    load_response_template,
)

from worker.text.tool_call_format import (
    ID,
    INDEX,
    MARK,
    PLAIN_CALLS,
    VARIABLE,
    Pair,
    ToolCallFormat,
)
from worker.text.tool_call_parser import BodyParser, CallParser, Calls, Tools, body_parser, value

Match: TypeAlias = Any  # of the regex package
# Of the groups of the match that opens calls, and the tools that may be called.
MakeParser = Callable[[dict[str, str], Tools], CallParser | BodyParser]

ANSWER, THINKING, CALL, NOBODY = "answer", "thinking", "call", "nobody"
LEAST_OF_MARK = 3  # characters of one, which are not shown if no more come
MAX_PENDING = 4096  # characters that may become a mark; then they are what they are
MAX_DOUBTFUL = 8192  # from a call in open thoughts on, or from the end of a call in a string


class Delimiter(NamedTuple):
    """What leads from a phase to another."""

    within: frozenset[str]  # the phases it is looked for in
    to: str
    pattern: Any  # of the regex package
    grows: bool = False  # a match at the end of a text may become longer
    first: frozenset[str] = frozenset()  # characters that begin it; none: they are not known
    parser: MakeParser | None = None  # of the calls that it opens
    leads: bool = False  # it counts only before everything else
    trigger: Any = None  # a pattern: with this, no matter what follows, a call has begun
    known: bool = False  # it counts only with the name of a tool
    apart: bool = False  # within content it counts only at the start of a line

    def begun_in(self, text: str) -> str | None:
        """What follows the part of it by which it is clear that a call begins."""
        match = self.trigger and self.trigger.search(text)
        return text[match.end() :] if match else None

    def cut_in(self, text: str, follows: bool) -> int:
        """Where the beginning of a call's mark starts that a text ends in, cut short, and that is
        not shown; where the text `follows` calls, of any mark. Its length if there is none."""
        if (self.to != CALL or self.leads) and not follows:
            return len(text)
        match = self.pattern.search(text, partial=True)
        alone = match and follows and not text[: match.start()].strip()
        cut = match and match.partial and len(match.group()) >= (alone or LEAST_OF_MARK)
        return int(match.start()) if cut else len(text)


def first_delimiter(
    marks: Iterable[Delimiter],
    text: str,
    inside: str,
    counts: Callable[[Delimiter, Match], bool],
    ended: bool,
) -> tuple[tuple[Delimiter, Match] | None, int]:
    """The first mark that is certain, and how much of the text stands before it or before anything
    that may become one. `inside`: the phase."""
    best: tuple[Delimiter, Match] | None = None
    doubtful: tuple[Delimiter, Match] | None = None
    pending = len(text)
    for mark in marks:
        if mark.first and mark.first.isdisjoint(text):
            continue
        match = mark.pattern.search(text, partial=not ended)
        while match is not None and not counts(mark, match):
            others = (mark.known or mark.apart) and not match.partial
            match = mark.pattern.search(text, match.end(), partial=not ended) if others else None
        if match is None:
            continue
        may_grow = mark.grows or not match.group()
        if not ended and (match.partial or (may_grow and match.end() == len(text))):
            pending = min(pending, match.start())
        elif not match.group() and mark.to == inside:
            continue
        elif mark.to == CALL and inside == THINKING:
            doubtful = doubtful or (mark, match)
        elif best is None or match.start() < best[1].start():
            best = mark, match
    if best is not None and best[1].start() < pending:
        return best, best[1].start()
    longest = MAX_PENDING
    if best is None and doubtful is not None:
        # A call in open thoughts is one if they are never closed.
        if ended:
            return doubtful, doubtful[1].start()
        pending, longest = min(pending, doubtful[1].start()), MAX_DOUBTFUL
    return None, pending if len(text) - pending < longest else len(text)


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
class OutputFormat:
    """`thoughts`, `content`: what opens and closes them, content seldom. `calls` is None where it
    is not known how they are written: then they are read, if `marks` tell them, but not held to
    a grammar."""

    marks: tuple[Delimiter, ...]
    call_marks: tuple[Delimiter, ...] = ()  # those that count where calls may be made
    thoughts: Pair | None = None
    content: Pair | None = None
    calls: ToolCallFormat | None = None
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


def learned_output_format(
    thoughts: Pair | None,
    content: Pair | None,
    calls: ToolCallFormat | None,
    channels: Channels | None,
) -> OutputFormat:
    """The form of what has been found in a chat template."""
    if channels:
        form = _in_channels(channels, calls)
    else:
        marks: list[Delimiter] = []
        for pair, to in ((thoughts, THINKING), (content, ANSWER)):
            if pair:
                marks += [_opening(to, pair[0]), _mark((ANSWER, to), ANSWER, pair[1])]
        call_marks = _call_marks(calls) if calls else []
        unmarked = calls is not None and calls.unmarked
        form = OutputFormat(tuple(marks), tuple(call_marks), thoughts, content, calls, unmarked)
    texts = [*form.texts, *(thoughts or ()), *(content or ())]
    if calls:
        entry = calls.arguments
        texts += [*calls.section, *calls.call, calls.middle, calls.separator or ""]
        texts += [entry.open, entry.middle, entry.close, entry.quotes]
    return replace(form, texts=tuple(filter(None, texts)))


def _mark(within: Iterable[str], to: str, text: str) -> Delimiter:
    return Delimiter(
        frozenset(within), to, regex.compile(regex.escape(text)), first=frozenset(text[0])
    )


def _opening(to: str, text: str) -> Delimiter:
    """A mark with a word after it, as in <|channel>thought: the word may be left out, where what
    follows shows that."""
    [bare] = MARK.findall(text)[:1]
    word = text.removeprefix(bare)
    if not word:
        return _mark((ANSWER, to), to, bare)._replace(apart=to == THINKING)  # or it is a mention
    other = "|".join(f"(?={word[:n]}[^{letter}])" for n, letter in enumerate(word))
    pattern = regex.compile(f"{regex.escape(bare)}(?:{word}|{other})")
    return Delimiter(frozenset((ANSWER, to)), to, pattern, first=frozenset(bare[0]))


def _call_marks(form: ToolCallFormat) -> list[Delimiter]:
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
    opening = Delimiter(
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
        made.append(Delimiter(frozenset((CALL,)), ANSWER, closing, first=frozenset(closes[0])))
    return made + [_mark((ANSWER,), ANSWER, text) for text in after]


def _in_channels(form: Channels, calls: ToolCallFormat | None) -> OutputFormat:
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

    def headed(phase: str, header: str, parser: MakeParser | None = None) -> Delimiter:
        pattern = regex.compile(rf"(?:{start}|(?={channel})){header}", regex.DOTALL)
        trigger = regex.compile(recipient) if parser else None
        return Delimiter(within, phase, pattern, first=firsts, parser=parser, trigger=trigger)

    others = headed(NOBODY, rf"{before_to}{to}(?!assistant){rest}")
    ends = regex.compile("|".join(map(regex.escape, form.ends)))
    first = frozenset(end[0] for end in form.ends)
    end = Delimiter(within | {CALL}, ANSWER, ends, first=first)
    call_marks: list[Delimiter] = []
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
    return OutputFormat(
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


def _call_parser(
    form: ToolCallFormat, found: dict[str, str], tools: Tools
) -> CallParser | BodyParser:
    name = found.get("name")
    if form.keys is not None:
        return CallParser(*form.keys)
    if form.arguments.style == "json":
        return CallParser("", "", name)
    return body_parser(form, name, tools)


# What calls look like where a model must make some and its form is unknown.
PLAIN = learned_output_format(("<think>", "</think>"), None, PLAIN_CALLS, None)


CALLS, CONTENT = "tool_calls", "content"
REASONING = ("reasoning_content", "reasoning", "thinking")
PHASES = {CALLS: CALL, CONTENT: ANSWER, **dict.fromkeys(REASONING, THINKING)}


def declared_output_format(spec: Mapping[str, Any]) -> OutputFormat:
    """ValueError or TypeError where it is none."""
    raw = {name: dict(each) for name, each in spec["fields"].items()}
    for each in raw.values():
        # Space before a mark is nobody's in any case, and looking for it takes long.
        for key in ("open_pattern", "close_pattern"):
            if key in each:
                each[key] = each[key].removeprefix(r"\s*")
    template = load_response_template({**spec, "fields": raw})
    begins = _phase(template.implicit) if template.implicit else NOBODY
    marks: list[Delimiter] = []
    call_marks: list[Delimiter] = []
    texts: list[str] = []
    thoughts: Pair | None = None
    for name, field in template.fields.items():
        made = _marks(field, begins, _phase(name))
        (call_marks if name == CALLS else marks).extend(made)
        texts += [mark.pattern.pattern.replace("\\", "") for mark in made]
        texts += [text for pair in field.content_args.get("string_delims", ()) for text in pair]
        if _phase(name) == THINKING and field.open_literals and field.close_literals:
            thoughts = field.open_literals[0], field.close_literals[0]
    return OutputFormat(
        tuple(marks),
        tuple(call_marks),
        thoughts,
        unmarked=any(mark.leads for mark in call_marks),
        begins=begins,
        texts=tuple(texts),
    )


def _phase(field: str) -> str:
    return PHASES.get(field, f"{NOBODY} {field}")


def _marks(field: ResponseTemplateField, outside: str, phase: str) -> list[Delimiter]:
    """What opens a field, and what closes it."""
    made = []
    for pattern, literals, within, to in (
        (field.open_re, field.open_literals, outside, phase),
        (field.close_re, field.close_literals, phase, outside),
    ):
        if pattern is None:
            continue
        if literals is None and (alone := literal(pattern.pattern)):
            literals = [alone]
        grows = literals is None or any(
            one != other and one.startswith(other) for one in literals for other in literals
        )
        first = frozenset(text[0] for text in literals or ())
        parser = partial(_declared_call_parser, field) if phase == to == CALL else None
        # No mark stands before calls: they begin with their JSON.
        leads = bool(parser and (m := pattern.search('{"name": "x"')) and not m.group())
        made.append(Delimiter(frozenset((within,)), to, pattern, grows, first, parser, leads))
    return made


def _declared_call_parser(
    field: ResponseTemplateField, captured: dict[str, str], tools: Tools
) -> CallParser | BodyParser:
    """Of what is in a field. `captured`: by the pattern that opens it."""
    shape = field.transform.get("function") if isinstance(field.transform, dict) else None
    if field.content == "json" and not field.content_args and shape == "{content}":
        return CallParser("name", "arguments")
    if field.content == "json" and not field.content_args and isinstance(shape, dict):
        name, arguments = str(shape.get("name")), str(shape.get("arguments"))
        if arguments == "{content}":
            return CallParser("", "", captured.get(name.strip("{}")) or "")
        return CallParser(*(key.strip("{}").removeprefix("content.") for key in (name, arguments)))

    def read(text: str, cut: bool) -> Calls:
        try:
            made = process_field(text, field, captured)
            calls = [each["function"] for each in (made if isinstance(made, list) else [made])]
            return [(each["name"], typed(**each)) for each in calls]
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError("no calls") from error

    def typed(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        declared, quoted = tools.get(name, {}), field.content == "json"

        def made(key: str, each: Any) -> Any:
            types = declared.get(key)
            if types is None or not isinstance(each, str) or (quoted and "string" in types):
                return each
            return value(each, types)

        return {key: made(key, each) for key, each in arguments.items()}

    return BodyParser(read)


def literal(pattern: str) -> str | None:
    """The one text that a pattern stands for."""
    if re.search(r"(?<!\\)(?:\\\\)*[.^$*+?{}\[\]|()]|\\[A-Za-z0-9]", pattern):
        return None
    return re.sub(r"\\(.)", r"\1", pattern)
