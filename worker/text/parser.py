"""A model's output, as it is generated, split into content, reasoning and tool calls.

    feed(span) → events … finish() → events; `phase`: of the text at the end

Follows the delimiters of an OutputFormat from phase to phase and returns each stretch of text as
soon as its phase is certain. White space around reasoning and calls is dropped, except between two
stretches of content. An invalid call is content.

transformers' chat_parsing.ResponseParser is no replacement: it follows response templates alone,
and its events lack their tokens.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple, TypeAlias

from worker.messages.deltas import Kind
from worker.text.detokenizer import TextSpan
from worker.text.output_format import (
    CALL,
    CONTENT,
    MAX_PENDING,
    MAX_UNCERTAIN,
    REASONING,
    Delimiter,
    Match,
    OutputFormat,
    may_be_tool,
)
from worker.text.tool_call_parser import (
    BufferedCallParser,
    JsonCallParser,
    ToolCallParser,
    ToolCallPart,
    continues_json,
    parameter_types,
)

Phase: TypeAlias = Literal["content", "reasoning", "call"]
TEXT_KINDS: dict[str, Kind] = {CONTENT: "content", REASONING: "reasoning"}  # by phase
OTHER_CHARS = frozenset("é文\ue000")  # for all that are not ASCII and stand in no pattern
PROBED_CHARS = frozenset(map(chr, range(128))) | OTHER_CHARS
SLICE = 512  # characters of the prefix that are parsed at once


class OutputEvent(NamedTuple):
    kind: Kind | Literal["reasoning_end"]  # "reasoning_end": what was content so far is reasoning
    span: TextSpan
    name: str | None = None  # of a call that starts


class OutputParser:
    """Parses one output. `calls_started` and `calls_finished` count its calls."""

    def __init__(
        self, output_format: OutputFormat, prefix: str, allows_calls: bool,
        tools: Sequence[Mapping[str, Any]] = (), is_document: bool = False,
        allows_call: Callable[[str], bool] | None = None,
    ) -> None:  # fmt: skip
        """`prefix`: the part of the output that the prompt has. Without `allows_calls`, the text of
        a call is content. `is_document`: constrained content has no delimiters in it, except of
        calls that come before it."""
        self.calls_started = self.calls_finished = 0
        self._calls_before = 0, 0  # both, before the last text
        self._allows_call = allows_call  # whether the text of a call in reasoning is one
        self._format = output_format
        self._tools = {tool["function"]["name"]: parameter_types(tool) for tool in tools}
        self._allows_calls = allows_calls
        calls = output_format.call_delimiters if allows_calls else ()
        self._delimiters = [*calls, *output_format.delimiters]
        self._active = list[Delimiter]()
        self._enter(output_format.initial_phase)
        self._is_document = is_document
        self._constrained = False  # the last text was, by a grammar
        self._only_first = False  # delimiters count only before any content
        self._may_close = output_format.may_close_unopened  # reasoning may end that nothing opened
        self._has_content = False
        self._after_delimiter = False  # white space here is dropped
        self._text_after_delimiter = ""  # that came with the last delimiter
        self._buffer = TextSpan("")  # may be the beginning of a delimiter
        self._space = TextSpan("")  # may be the last before a delimiter
        self._between = TextSpan("")  # white space of the content before a delimiter
        self._call: ToolCallParser | None = None
        self._call_text = TextSpan("")  # of the open call, with its delimiters
        self._reasoning_space: TextSpan | None = None  # before a call that began in reasoning
        # the length of the call's text up to its arguments, and that text as the format has it
        self._call_prefix = 0, ""
        self._triggered: str | None = None  # the text after a call's trigger
        self._prefix_events: list[OutputEvent] = []  # of a call that the prompt has begun
        if prefix:
            slices = (prefix[start : start + SLICE] for start in range(0, len(prefix), SLICE))
            events = [event for text in slices for event in self.feed(TextSpan(text))]
            if self._call and self._call.started:
                starts = [n for n, event in enumerate(events) if event.name is not None]
                self._prefix_events = events[starts[-1] :]
            self.calls_started, self.calls_finished = int(bool(self._prefix_events)), 0
            self._may_close = output_format.may_close_unopened
            if output_format.lead_in and prefix.strip() == output_format.lead_in:
                self._prefix_events = events
            else:
                self._space = TextSpan("")

    def fork(self) -> "OutputParser":
        """Return a parser in the same state, for another output of the same prompt."""
        shared = (self._format, self._tools, self._delimiters, self._active, self._allows_call)
        return copy.deepcopy(self, {id(value): value for value in shared})

    @property
    def phase(self) -> Phase:
        call = self._call
        # Undelimited JSON is no call before the name.
        undecided = isinstance(call, JsonCallParser) and not call.started
        undecided = undecided and self._format.undelimited_calls
        if (self._inside == CALL and not undecided) or self._triggered is not None:
            return "call"
        return "reasoning" if self._inside == REASONING else "content"

    @property
    def trailing_space(self) -> str:
        """White space at the end of the content, unless a call may follow, which drops it."""
        pending = self._after_delimiter or self._buffer.text or self._allows_calls
        ends_content = self._inside == CONTENT and self._has_content and not pending
        return self._space.text if ends_content else ""

    @property
    def phase_text(self) -> str:
        """The text so far of a phase that has just started; a call's delimiter is the format's."""
        length, call_prefix = self._call_prefix
        if self._inside == CALL:
            return call_prefix + (self._call_text.text + self._buffer.text)[length:]
        if self._triggered is not None and self._format.tool_calls:
            return self._format.tool_calls.trigger + self._triggered
        return self._text_after_delimiter

    @property
    def pending_text(self) -> str:
        """Text of the content that may be the beginning of a call, without words before it."""
        if self.phase != "content":
            return ""
        return (self._call_text.text + self._buffer.text)[self._call_prefix[0] * bool(self._call) :]

    def refuse_call(self, events: list[OutputEvent]) -> list[OutputEvent]:
        """Make the call that has begun with the last text content. `events`: of that text."""
        events = [event for event in events if event.kind != "call"]
        self.calls_started, self.calls_finished = self._calls_before
        text, self._call, self._call_text = self._call_text, None, TextSpan("")
        text.append(self._buffer)
        self._buffer, self._triggered, self._after_delimiter = TextSpan(""), None, False
        self._enter(CONTENT)
        self._resume_content(events)
        return [*events, OutputEvent("content", text)]

    def feed(self, span: TextSpan, constrained: bool = False) -> list[OutputEvent]:
        """Return the events that are certain now. `constrained`: a grammar constrains the text, so
        that a call's strings end where they should."""
        self._constrained = constrained
        self._calls_before = self.calls_started, self.calls_finished
        if constrained and self._is_document:
            self._is_document = self._has_content = self._after_delimiter = False
            self._only_first = True
            if not (self._allows_calls or self._format.content):
                self._delimiters = []
                self._enter(self._inside)
        if self.is_plain(span.text):
            events, self._prefix_events, self._triggered = self._prefix_events, [], None
            self._emit_text(TEXT_KINDS[self._inside], span, events)
            return events
        self._buffer.append(span)
        events = self._parse(ended=False)
        text = self._buffer.text if self._inside == CONTENT else ""
        after = (delimiter.after_trigger(text) for delimiter in (self._active if text else ()))
        self._triggered = next((rest for rest in after if rest is not None), None)
        return events

    def is_plain(self, text: str) -> bool:
        """Return whether this text, if it follows, is content or reasoning in which no delimiter
        can begin, as most tokens are."""
        chars = self._first_chars
        if chars is None or self._buffer.text or not chars.isdisjoint(text):
            return False
        is_within_line = self._has_content and not self._after_delimiter
        return not self._has_line_starts or (is_within_line and "\n" not in self._space.text + text)

    def finish(self) -> list[OutputEvent]:
        """Return the events of the pending text, without a partial delimiter of a call."""
        text, after_call = self._buffer.text, self._after_delimiter and self.calls_finished > 0
        ends = [each.partial_start(text, after_call, self._tools) for each in self._active if text]
        may_call = self._format.undelimited_calls and self._allows_calls and not self._has_content
        if may_call and self._format.may_become_call(text, self._tools):
            ends.append(0)
        self._buffer = self._buffer.take(min(ends, default=len(text)))
        events = self._parse(ended=True)
        kind = TEXT_KINDS.get(self._inside)
        if kind and self._space.text and not self._after_delimiter:
            events.append(OutputEvent(kind, self._space))
        if self._call is not None:
            self._end_call(events, cut=True)
        return events

    def _parse(self, ended: bool) -> list[OutputEvent]:
        events, self._prefix_events = self._prefix_events, []
        while True:
            first, length = self._first_delimiter(ended)
            call_ended = self._emit(self._buffer.take(length), events)
            if first is not None:
                delimiter, match = first
                if (in_string := self._in_string(delimiter, match, ended)) is None:
                    return events
                self._follow(delimiter, match, in_string, events)
            elif not call_ended:
                return events

    # ── delimiters ──

    def _first_delimiter(self, ended: bool) -> tuple[tuple[Delimiter, Match] | None, int]:
        """Return the first certain delimiter in the pending text, and the length of the text before
        it and before anything that may become a delimiter. `ended`: no more text comes."""
        text, phase = self._buffer.text, self._inside
        first: tuple[Delimiter, Match] | None = None
        uncertain: tuple[Delimiter, Match] | None = None
        pending = len(text)
        for delimiter in self._active:
            pattern = delimiter.pattern
            if (chars := first_chars(pattern)) and chars.isdisjoint(text):
                continue
            match = pattern.search(text, partial=not ended)
            while match is not None and not self._counts(delimiter, match):
                retry = (delimiter.known_tool or delimiter.line_start) and not match.partial
                start = match.end() + (not match.group())
                match = pattern.search(text, start, partial=not ended) if retry else None
            if match is None:
                continue
            extendable = delimiter.extendable or not match.group()
            if not ended and (match.partial or (extendable and match.end() == len(text))):
                pending = min(pending, match.start())
            elif not match.group() and delimiter.next_phase == phase:
                continue
            elif delimiter.next_phase == CALL and phase == REASONING:
                uncertain = uncertain or (delimiter, match)
            elif first is None or match.start() < first[1].start():
                first = delimiter, match
        if first is not None and first[1].start() < pending:
            return first, first[1].start()
        max_pending = MAX_PENDING
        if first is None and uncertain is not None:
            # A call inside reasoning counts only if the reasoning never closes.
            start = uncertain[1].start()
            if ended and (self._allows_call is None or self._allows_call(text[start:].strip())):
                return uncertain, start
            pending, max_pending = min(pending, len(text) if ended else start), MAX_UNCERTAIN
        return None, pending if len(text) - pending < max_pending else len(text)

    def _counts(self, delimiter: Delimiter, match: Match) -> bool:
        """Return whether this occurrence is a delimiter, not a mention in the content."""
        if delimiter.known_tool and not match.partial and match["name"] not in self._tools:
            return False
        if delimiter.name_first and not may_be_tool(match.string, self._tools, match.start()):
            return False
        if delimiter.after_call:
            before = self._buffer.text[: match.start()]
            return self._after_delimiter and self.calls_finished > 0 and not before.strip()
        if delimiter.line_start and self._inside == CONTENT:
            before = self._space.text + self._buffer.text[: match.start()]
            length = len(before.rstrip())
            after_text = length or (self._has_content and not self._after_delimiter)
            return not after_text or "\n" in before[length:]
        only_first = self._only_first or delimiter.only_first
        if not only_first or self._inside != self._format.initial_phase:
            return True
        return not self._has_content and not self._buffer.text[: match.start()].strip()

    def _in_string(self, delimiter: Delimiter, match: Match, ended: bool) -> bool | None:
        """Return whether a delimiter is part of a value in a call, or of a string in its JSON that
        continues after it. None: more text is needed."""
        if self._call is None or not self._call.in_string:
            return False
        if isinstance(self._call, BufferedCallParser):
            return self._constrained or delimiter.next_phase == CALL
        rest = self._buffer.text[len(match.group()) :]
        continues = self._constrained or continues_json(rest)
        return False if continues is None and (ended or len(rest) > MAX_UNCERTAIN) else continues

    def _follow(
        self, delimiter: Delimiter, match: Match, in_string: bool, events: list[OutputEvent]
    ) -> None:
        """Enter the delimiter's next phase, unless it is part of a string."""
        if self._inside == CALL == delimiter.next_phase and not in_string:
            self._end_call(events)  # the delimiter of the next call is found again
            return
        taken = self._buffer.take(len(match.group()))
        if in_string:
            self._emit(taken, events)
            return
        if self._inside == CALL:
            self._call_text.append(taken)
            self._end_call(events)
            if self._inside == REASONING:  # the call was invalid
                return
        elif self._inside == CONTENT and self._has_content:
            self._between.append(self._space)
            closes_reasoning = REASONING in delimiter.phases and delimiter.next_phase == CONTENT
            if self._may_close and closes_reasoning:
                events.append(OutputEvent("reasoning_end", TextSpan("")))
                self._has_content, self._between = False, TextSpan("")
        self._may_close = False
        self._reasoning_space = self._space if self._inside == REASONING else None
        self._space = TextSpan("")
        self._text_after_delimiter = self._buffer.text
        self._after_delimiter = True
        self._enter(delimiter.next_phase)
        if delimiter.make_parser is not None:
            groups = match.groupdict()
            self._call, self._call_text = delimiter.make_parser(groups, self._tools), taken
            if delimiter.line_start:  # no delimiter ends it
                self._active = []
            name, calls = groups.get("name"), self._format.tool_calls
            call_prefix = calls.call_prefix(name) if name and calls else ""
            replaces = call_prefix or self._format.undelimited_calls
            self._call_prefix = (len(taken.text) if replaces else 0), call_prefix
            self._emit_call(TextSpan(""), events)

    def _enter(self, phase: str) -> None:
        self._inside = phase
        self._active = [each for each in self._delimiters if phase in each.phases]
        line_starts = [each for each in self._active if each.line_start and phase == CONTENT]
        self._has_line_starts = bool(line_starts)
        # of text: those of all other delimiters; None: one may begin with any
        self._first_chars: frozenset[str] | None = None
        chars = [first_chars(each.pattern) for each in self._active if each not in line_starts]
        if phase in TEXT_KINDS and all(chars):
            self._first_chars = frozenset().union(*chars)

    # ── content and reasoning ──

    def _emit(self, span: TextSpan, events: list[OutputEvent]) -> bool:
        """Add the events of this text; return whether it ends a call without a delimiter."""
        if self._call is not None:
            return self._emit_call(span, events)
        if kind := TEXT_KINDS.get(self._inside):
            self._emit_text(kind, span, events)
        return False

    def _emit_text(self, kind: Kind, span: TextSpan, events: list[OutputEvent]) -> None:
        if length := len(span.text.rstrip()):
            if self._space.text or length < len(span.text):
                shown, self._space = self._space, span
                shown.append(span.take(length))
            else:
                shown = span
            if self._after_delimiter and not (kind == "content" and self._has_content):
                shown.take(len(shown.text) - len(shown.text.lstrip()))
            if kind == "content":
                self._resume_content(events)
            events.append(OutputEvent(kind, shown))
            self._after_delimiter = False
        else:
            self._space.append(span)

    def _resume_content(self, events: list[OutputEvent]) -> None:
        """Add the white space before a delimiter within the content."""
        if self._between.text:
            events.append(OutputEvent("content", self._between))
            self._between = TextSpan("")
        self._has_content = True

    # ── calls ──

    def _emit_call(self, span: TextSpan, events: list[OutputEvent]) -> bool:
        call, taken = self._call, span
        assert call is not None
        had_started = call.started
        parts = call.feed(span.text, delimited=bool(self._active))
        if ends := call.rest > 0:
            taken = span.take(len(span.text) - call.rest)
            span.append(self._buffer)
            self._buffer = span
        if not (had_started and len(self._call_text.text) > MAX_PENDING):
            self._call_text.append(taken)
        for part in parts:
            unknown = part.name is not None and part.name not in self._tools
            if self._format.undelimited_calls and unknown:
                # It only looked like a call: parse it again, as content.
                self._call_text.append(self._buffer)
                self._buffer, self._call_text, self._call = self._call_text, TextSpan(""), None
                self._enter(CONTENT)
                self._resume_content(events)
                return True
            events.append(self._call_event(part))
        if ends:
            self._after_delimiter = True
            self._end_call(events)
        return ends

    def _call_event(self, part: ToolCallPart) -> OutputEvent:
        self.calls_started += part.name is not None
        return OutputEvent("call", TextSpan(part.arguments), part.name)

    def _end_call(self, events: list[OutputEvent], cut: bool = False) -> None:
        call, self._call = self._call, None
        assert call is not None
        text, self._call_text = self._call_text, TextSpan("")
        self._enter(CONTENT)
        parts = call.close(cut)
        if self._format.undelimited_calls and any(part.name not in self._tools for part in parts):
            parts = []
        events += map(self._call_event, parts)
        if parts or call.started:
            self.calls_finished += 1
        elif not (
            cut and call.may_continue and self._format.may_become_call(text.text, self._tools)
        ):
            self._after_delimiter = False
            if self._reasoning_space is not None:
                self._enter(REASONING)
                events.append(OutputEvent("reasoning", self._reasoning_space))
                events.append(OutputEvent("reasoning", text))
                return
            self._resume_content(events)
            events.append(OutputEvent("content", text))


@lru_cache(maxsize=1024)
def first_chars(pattern: Any) -> frozenset[str]:
    """Return the characters that a match of a delimiter may begin with; empty: any."""
    own = {*pattern.pattern}
    chars = {char for char in PROBED_CHARS | own if pattern.match(char, partial=True)}
    return frozenset(chars if chars.isdisjoint(OTHER_CHARS - own) else ())
