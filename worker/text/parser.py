"""An answer's text, as it comes, as what it is: content, reasoning, calls.

    feed(piece) → events … finish() → events; `phase` tells what the text is in the middle of

Reads by a response template as `tokenizer.parse_response` does, but gives each stretch of text
as soon as it is certain what it belongs to. White space around reasoning and calls belongs to
nobody. A call that makes no sense is content.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

from worker.protocol import Kind
from worker.text.answer_form import CALLS, CONTENT, REASONING, AnswerForm, Mark
from worker.text.call_parser import CallParser, call_parser, whole_calls
from worker.text.detokenizer import Piece

Match: TypeAlias = Any  # of the regex package
Phase: TypeAlias = Literal["answer", "thinking", "call"]
MAX_PENDING = 4096  # characters that may become a mark; then they are what they are


class Event(NamedTuple):
    kind: Kind
    piece: Piece
    name: str | None = None  # of a call that begins


class Parser:
    """`begun`: what the prompt has already written of the answer. `calls`: whether there may be
    any; if not, what looks like one is content. `document`: an answer that is constrained is one:
    nothing in it is a mark, unless calls come before everything else."""

    def __init__(
        self,
        form: AnswerForm,
        begun: str,
        calls: bool,
        tools: Sequence[Mapping[str, Any]] = (),
        document: bool = False,
    ) -> None:
        self.calls_begun = self.calls_ended = 0
        self._form = form
        self._tools: list[Any] = [dict(tool) for tool in tools]
        outside = [field for field in form.template.fields.values() if field.open_re is None]
        self._outside = outside[0] if outside else None
        self._inside = self._outside
        self._calls = calls
        self._marks_outside = [m for name, m in form.opens.items() if calls or name != CALLS]
        if self._outside and (end := form.closes.get(self._outside.name)):
            self._marks_outside.append(end)
        self._document = document
        self._constrained = False
        self._first_only = False  # a mark counts only where nothing stands before it
        self._empty_first = form.unmarked  # likewise a mark that has no text
        self._has_content = False
        self._after_mark = False  # white space is nobody's
        self._since_mark = ""  # what came with the last mark, after it
        self._buffer = Piece("")  # may be the beginning of a mark
        self._space = Piece("")  # may be the last before a mark
        self._call: CallParser | None = None  # None: calls are parsed as a whole
        self._call_text = Piece("")  # of the call that is open, with its marks
        self._opening = 0  # how much of it is the first mark
        self._retold: list[Event] = []  # of a call that the prompt has begun
        if begun:
            events = self.feed(Piece(begun))
            if self.phase == "call" and self._call and self._call.begun:
                names = [n for n, event in enumerate(events) if event.name is not None]
                self._retold = events[names[-1] :]
            self.calls_begun, self.calls_ended = int(bool(self._retold)), 0
            self._space = Piece("")

    def sibling(self) -> "Parser":
        """Another answer to the same prompt, as far as this one has been read."""
        made = copy.copy(self)
        made._call = self._call and self._call.sibling()
        made._buffer, made._space = Piece(self._buffer.text), Piece("")
        made._call_text = Piece(self._call_text.text)
        made._retold = [*self._retold]
        return made

    @property
    def phase(self) -> Phase:
        name = self._inside.name if self._inside else ""
        return "thinking" if name in REASONING else "call" if name == CALLS else "answer"

    @property
    def begun(self) -> str:
        """Of the phase that has just begun: what has come of it, a call with its mark."""
        if self.phase == "call":
            return self._call_text.text + self._buffer.text
        return self._since_mark

    def feed(self, piece: Piece, constrained: bool = False) -> list[Event]:
        """What is certain now. `constrained`: to a grammar, so that the strings of a call end
        where they should."""
        self._constrained = constrained
        if constrained and self._document:
            self._document = self._has_content = self._after_mark = False
            self._first_only = True
            if not self._calls:
                self._marks_outside = []
        self._buffer.append(piece)
        return self._parse(ended=False)

    def finish(self) -> list[Event]:
        """What was pending, at the end."""
        events = self._parse(ended=True)
        self._emit_space(events)
        if self.phase == "call" and not self._cut_short:
            self._end_call(events)
        return events

    @property
    def _cut_short(self) -> bool:
        """Whether the open call is one as far as it goes, but has no name yet."""
        opening = self._call_text.text[self._opening :].lstrip()[:1]
        return self._call is not None and not self._call.begun and opening in ("", "{", "[")

    def _parse(self, ended: bool) -> list[Event]:
        events, self._retold = self._retold, []
        while True:
            mark, certain = self._next_mark(ended)
            self._emit(self._buffer.take(certain), events)
            if mark is None:
                return events
            self._turn(*mark, events)

    # ── marks ──

    def _next_mark(self, ended: bool) -> tuple[tuple[Mark, Match] | None, int]:
        """The first mark that is certain, and how much of the buffer stands before it or before
        anything that may become one."""
        text = self._buffer.text
        best: tuple[Mark, Match] | None = None
        pending = len(text)
        for mark in self._marks():
            if mark.first and mark.first.isdisjoint(text):
                continue
            match = mark.pattern.search(text, partial=not ended)
            if match is None or not self._counts(match):
                continue
            may_grow = mark.grows or not match.group()
            if not ended and (match.partial or (may_grow and match.end() == len(text))):
                pending = min(pending, match.start())
            elif not match.group() and mark.field is self._outside:
                continue
            elif best is None or match.start() < best[1].start():
                best = mark, match
        if best is not None and best[1].start() < pending:
            return best, best[1].start()
        return None, pending if len(text) - pending < MAX_PENDING else len(text)

    def _counts(self, match: Match) -> bool:
        """Some marks are marks only before everything else, lest they are seen in the content."""
        if self._inside is not self._outside:
            return True
        if not (self._first_only or (self._empty_first and not match.group())):
            return True
        return not self._has_content and not self._buffer.text[: match.start()].strip()

    def _marks(self) -> list[Mark]:
        if self._inside is self._outside or self._inside is None:
            return self._marks_outside
        end = self._form.closes.get(self._inside.name)
        return [end] if end else []

    def _turn(self, mark: Mark, match: Match, events: list[Event]) -> None:
        """One stretch ends with a mark, another begins."""
        taken = self._buffer.take(len(match.group()))
        calling = self.phase == "call"
        if calling and self._constrained and self._call and self._call.quoted:
            self._emit(taken, events)  # a text that looks like one
            return
        self._space = Piece("")
        self._since_mark = self._buffer.text
        self._after_mark = True
        if self._inside is not self._outside:
            if calling:
                self._call_text.append(taken)
                self._end_call(events)
            self._inside = self._outside
        elif mark.field is not self._outside:
            self._inside = mark.field
            if self.phase == "call":
                self._call, self._call_text = call_parser(mark.field, match), taken
                self._opening = len(taken.text)
                self._emit_call("", events)

    # ── events ──

    def _emit(self, piece: Piece, events: list[Event]) -> None:
        name = self._inside.name if self._inside else ""
        if name == CALLS:
            known = self._call is not None and self._call.begun
            if not (known and len(self._call_text.text) > MAX_PENDING):
                self._call_text.append(piece)
            self._emit_call(piece.text, events)
        elif name == CONTENT or name in REASONING:
            self._emit_text("content" if name == CONTENT else "reasoning", piece, events)

    def _emit_text(self, kind: Kind, piece: Piece, events: list[Event]) -> None:
        if bare := len(piece.text.rstrip()):
            shown, self._space = self._space, piece
            shown.append(piece.take(bare))
            if self._after_mark:
                shown.take(len(shown.text) - len(shown.text.lstrip()))
            events.append(Event(kind, shown))
            self._after_mark = False
            self._has_content = self._has_content or kind == "content"
        else:
            self._space.append(piece)

    def _emit_space(self, events: list[Event]) -> None:
        """The end of the text is not between anything."""
        if self._space.text and not self._after_mark and self.phase != "call":
            events.append(
                Event("reasoning" if self.phase == "thinking" else "content", self._space)
            )
        self._space = Piece("")

    # ── calls ──

    def _emit_call(self, text: str, events: list[Event]) -> None:
        if self._call is not None:
            for name, arguments in self._call.feed(text):
                self.calls_begun += name is not None
                events.append(Event("call", Piece(arguments), name))

    def _end_call(self, events: list[Event]) -> None:
        whole, self._call_text = self._call_text, Piece("")
        calls = []
        if self._call is None:
            calls = whole_calls(whole.text, self._form.template, self._tools)
        for name, arguments in calls:
            self.calls_begun += 1
            events += [Event("call", Piece(""), name), Event("call", Piece(arguments))]
        if calls or (self._call and self._call.begun):
            self.calls_ended += 1
        else:
            events.append(Event("content", whole))
            self._after_mark = False
