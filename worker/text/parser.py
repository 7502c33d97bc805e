"""An answer's text, as it comes, as what it is: content, reasoning, calls.

    feed(piece) → events … finish() → events; `phase` tells what the text is in the middle of

Follows an OutputFormat's marks from phase to phase, and gives each stretch of text as soon as it is
certain what it belongs to. White space around reasoning and calls belongs to nobody, but for that
between two stretches of content. A call that makes no sense is content.

The library's chat_parsing.ResponseParser follows response templates alone, and tells no event's
tokens: so this one reads all forms, and leaves a response template's fields to the library.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

from worker.messages.deltas import Kind
from worker.text.detokenizer import TextSpan
from worker.text.output_format import (
    ANSWER,
    CALL,
    MAX_DOUBTFUL,
    MAX_PENDING,
    THINKING,
    Delimiter,
    Match,
    OutputFormat,
    first_delimiter,
)
from worker.text.tool_call_parser import (
    BodyParser,
    CallParser,
    CallPart,
    goes_on_as_json,
    types_of_parameters,
)

Phase: TypeAlias = Literal["answer", "thinking", "call"]
KINDS: dict[str, Kind] = {ANSWER: "content", THINKING: "reasoning"}
SLICE = 512  # characters of what the prompt has begun that are looked through at once


class Event(NamedTuple):
    kind: Kind | Literal["end of thoughts"]  # that nothing had opened
    piece: TextSpan
    name: str | None = None  # of a call that begins


class Parser:
    """`begun`: what the prompt has already written of the answer. `calls`: whether there may be
    any; if not, what looks like one is content. `document`: an answer that is constrained is one:
    nothing in it is a mark, unless calls come before everything else."""

    def __init__(
        self, form: OutputFormat, begun: str, calls: bool,
        tools: Sequence[Mapping[str, Any]] = (), document: bool = False,
    ) -> None:  # fmt: skip
        self.calls_begun = self.calls_ended = 0
        self._form = form
        self._tools = {tool["function"]["name"]: types_of_parameters(tool) for tool in tools}
        self._calls = calls
        self._marks = [*form.call_marks, *form.marks] if calls else [*form.marks]
        self._enter(form.begins)
        self._document = document
        self._constrained = self._first_only = False  # or a mark counts only before all else
        self._may_close = form.may_close  # thoughts that nothing has opened
        self._has_content = self._after_mark = False  # after a mark, white space is nobody's
        self._since_mark = ""  # what came with the last mark, after it
        self._buffer = TextSpan("")  # may be the beginning of a mark
        self._space = TextSpan("")  # may be the last before a mark
        self._between = TextSpan("")  # white space of the content that a mark has interrupted
        self._call: CallParser | BodyParser | None = None
        self._call_text = TextSpan("")  # of the call that is open, with its marks
        self._thought: TextSpan | None = None  # white space before it, where it began in thoughts
        self._opening = 0, ""  # the length of its first mark, and how the form has that
        self._triggered: str | None = None  # a mark is not whole, but sure to begin a call
        self._retold: list[Event] = []  # of a call that the prompt has begun
        if begun:
            slices = (begun[at : at + SLICE] for at in range(0, len(begun), SLICE))
            events = [event for each in slices for event in self.feed(TextSpan(each))]
            if self._call and self._call.begun:
                names = [n for n, event in enumerate(events) if event.name is not None]
                self._retold = events[names[-1] :]
            self.calls_begun, self.calls_ended = int(bool(self._retold)), 0
            self._space, self._may_close = TextSpan(""), form.may_close

    def sibling(self) -> "Parser":
        """Another answer to the same prompt, as far as this one has been read."""
        shared = (self._form, self._tools, self._marks, self._watched)
        return copy.deepcopy(self, {id(each): each for each in shared})

    @property
    def phase(self) -> Phase:
        call = self._call  # without a mark, JSON is no call before it has the name of one
        doubtful = self._form.unmarked and isinstance(call, CallParser) and not call.begun
        calling = (self._inside == CALL and not doubtful) or self._triggered is not None
        return "call" if calling else "thinking" if self._inside == THINKING else "answer"

    @property
    def trailing(self) -> str:
        """White space at the content's end, where no call may come that it would stand before."""
        ends = self._has_content and not (self._after_mark or self._buffer.text or self._calls)
        return self._space.text if ends and self._inside == ANSWER else ""

    @property
    def begun(self) -> str:
        """What has come of the phase that has just begun; a call's mark as the form has it."""
        written, shown = self._opening
        if self._inside == CALL:
            return shown + (self._call_text.text + self._buffer.text)[written:]
        if self._triggered is not None and self._form.calls:
            return self._form.calls.trigger + self._triggered
        return self._since_mark

    def feed(self, piece: TextSpan, constrained: bool = False) -> list[Event]:
        """What is certain now. `constrained`: to a grammar, so that the strings of a call end
        where they should."""
        self._constrained = constrained
        if constrained and self._document:
            self._document = self._has_content = self._after_mark = False
            self._first_only = True
            if not (self._calls or self._form.content):
                self._marks = []
                self._enter(self._inside)
        self._buffer.append(piece)
        events = self._parse(ended=False)
        text = self._buffer.text if self._inside == ANSWER else ""
        begun = (mark.begun_in(text) for mark in (self._watched if text else ()))
        self._triggered = next((rest for rest in begun if rest is not None), None)
        return events

    def finish(self) -> list[Event]:
        """What was pending, at the end; but not the beginning of a call's mark."""
        text, follows = self._buffer.text, self._after_mark and self.calls_ended > 0
        cuts = [mark.cut_in(text, follows) for mark in self._watched if text]
        unmarked = self._form.unmarked and self._calls and not self._has_content
        if unmarked and self._form.may_call(text, self._tools):
            cuts.append(0)
        self._buffer = self._buffer.take(min(cuts, default=len(text)))
        events = self._parse(ended=True)
        self._emit_space(events)
        if self._call is not None:
            self._end_call(events, cut=True)
        return events

    def _parse(self, ended: bool) -> list[Event]:
        events, self._retold = self._retold, []
        while True:
            mark, certain = first_delimiter(
                self._watched, self._buffer.text, self._inside, self._counts, ended
            )
            stopped = self._emit(self._buffer.take(certain), events)
            if mark is not None:
                if (quoted := self._quoted(mark[1], ended)) is None:
                    return events
                self._follow_mark(*mark, quoted, events)
            elif not stopped:
                return events

    # ── marks ──

    def _counts(self, mark: Delimiter, match: Match) -> bool:
        """Some marks are marks only before everything else, lest they are seen in the content."""
        if mark.known and not match.partial and match["name"] not in self._tools:
            return False
        if mark.apart and self._inside == ANSWER:
            before = self._space.text + self._buffer.text[: match.start()]
            said = len(before.rstrip()) or (self._has_content and not self._after_mark)
            return not said or "\n" in before[len(before.rstrip()) :]
        if self._inside != self._form.begins or not (self._first_only or mark.leads):
            return True
        return not self._has_content and not self._buffer.text[: match.start()].strip()

    def _quoted(self, match: Match, ended: bool) -> bool | None:
        """Whether a mark is part of a value in a call, or of a string in its JSON, which then goes
        on as JSON after that. None: it is not known yet."""
        if self._call is None or not self._call.quoted:
            return False
        if isinstance(self._call, BodyParser):
            return self._constrained
        rest = self._buffer.text[len(match.group()) :]
        goes_on = self._constrained or goes_on_as_json(rest)
        return False if goes_on is None and (ended or len(rest) > MAX_DOUBTFUL) else goes_on

    def _follow_mark(
        self, mark: Delimiter, match: Match, quoted: bool, events: list[Event]
    ) -> None:
        """One stretch ends with a mark, another begins; unless it is in a string."""
        taken = self._buffer.take(len(match.group()))
        if quoted:
            self._emit(taken, events)
            return
        if self._inside == CALL:
            self._call_text.append(taken)
            self._end_call(events)
            if self._inside == THINKING:  # it was none
                return
        elif self._inside == ANSWER and self._has_content:
            self._between.append(self._space)
            if self._may_close and THINKING in mark.within and mark.to == ANSWER:
                events.append(Event("end of thoughts", TextSpan("")))
                self._has_content, self._between = False, TextSpan("")
        self._may_close = False
        self._thought = self._space if self._inside == THINKING else None
        self._space = TextSpan("")
        self._since_mark = self._buffer.text
        self._after_mark = True
        self._enter(mark.to)
        if mark.parser is not None:
            found = match.groupdict()
            self._call, self._call_text = mark.parser(found, self._tools), taken
            name, calls = found.get("name"), self._form.calls
            shown = calls.begun(name) if name and calls else ""
            self._opening = (len(taken.text) if shown else 0), shown
            self._emit_call(TextSpan(""), events)

    def _enter(self, phase: str) -> None:
        self._inside = phase
        self._watched: list[Delimiter] = [mark for mark in self._marks if phase in mark.within]

    # ── events ──

    def _emit(self, piece: TextSpan, events: list[Event]) -> bool:
        """Whether a call has ended with this text, without a mark."""
        if self._call is not None:
            return self._emit_call(piece, events)
        if kind := KINDS.get(self._inside):
            self._emit_text(kind, piece, events)
        return False

    def _emit_text(self, kind: Kind, piece: TextSpan, events: list[Event]) -> None:
        if bare := len(piece.text.rstrip()):
            shown, self._space = self._space, piece
            shown.append(piece.take(bare))
            if self._after_mark and not (kind == "content" and self._has_content):
                shown.take(len(shown.text) - len(shown.text.lstrip()))
            if kind == "content":
                self._go_on(events)
            events.append(Event(kind, shown))
            self._after_mark = False
        else:
            self._space.append(piece)

    def _go_on(self, events: list[Event]) -> None:
        """With content, and the white space that a mark has kept from it."""
        if self._between.text:
            events.append(Event("content", self._between))
            self._between = TextSpan("")
        self._has_content = True

    def _emit_space(self, events: list[Event]) -> None:
        """The end of the text is not between anything."""
        if self._space.text and not self._after_mark and (kind := KINDS.get(self._inside)):
            events.append(Event(kind, self._space))

    # ── calls ──

    def _emit_call(self, piece: TextSpan, events: list[Event]) -> bool:
        call, taken = self._call, piece
        assert call is not None
        known = call.begun
        parts = call.feed(piece.text, marked=bool(self._watched))
        if ends := call.left > 0:
            taken = piece.take(len(piece.text) - call.left)
            piece.append(self._buffer)
            self._buffer = piece
        if not (known and len(self._call_text.text) > MAX_PENDING):
            self._call_text.append(taken)
        for part in parts:
            if self._form.unmarked and part.name is not None and part.name not in self._tools:
                # What began like a call is none: it is read again, as content.
                self._call_text.append(self._buffer)
                self._buffer, self._call_text, self._call = self._call_text, TextSpan(""), None
                self._enter(ANSWER)
                self._go_on(events)
                return True
            events.append(self._told(part))
        if ends:
            self._after_mark = True
            self._end_call(events)
        return ends

    def _told(self, part: CallPart) -> Event:
        self.calls_begun += part.name is not None
        return Event("call", TextSpan(part.arguments), part.name)

    def _end_call(self, events: list[Event], cut: bool = False) -> None:
        call, self._call = self._call, None
        assert call is not None
        whole, self._call_text = self._call_text, TextSpan("")
        self._enter(ANSWER)
        calls = call.close(cut)
        if self._form.unmarked and any(part.name not in self._tools for part in calls):
            calls = []
        events += map(self._told, calls)
        if calls or call.begun:
            self.calls_ended += 1
        elif not (cut and call.may_go_on and self._form.may_call(whole.text, self._tools)):
            self._after_mark = False
            if self._thought is not None:
                self._enter(THINKING)
                events += [Event("reasoning", self._thought), Event("reasoning", whole)]
                return
            self._go_on(events)
            events.append(Event("content", whole))
