"""The constraints on one output: the grammar of its content or of a call, and a reasoning budget.

    reasoning ──▶ content, by a grammar                 (a constraint, or required tool calls)
    content, free ──▶ call, by its tool ──▶ content     (optional tool calls)

A call of a strict tool is constrained from the token that completes its beginning. Text that only
the parser takes for a call, not the grammar, is content then.

Follows the sampled tokens; the parser reports the phase of their text. On the worker's thread.
"""

from dataclasses import dataclass
from functools import cached_property

from llguidance import LLMatcher, LLTokenizer

from batching.errors import ItemFailed
from worker.grammar.bitmask import PendingMask
from worker.grammar.compiler import Grammar
from worker.text.parser import OutputParser, Phase


@dataclass(frozen=True, slots=True)
class OutputConstraints:
    """The constraints of a request, compiled; shared by its choices."""

    tokenizer: LLTokenizer | None = None  # None without a grammar
    content: Grammar | None = None  # of the text after the reasoning, up to the end
    is_document: bool = False  # the content has no delimiters in it
    call: Grammar | None = None  # of a call that the model starts itself; not with `content`
    # Where a tool is strict: the texts that begin a call, and a grammar of text and then a call.
    beginnings: tuple[str, ...] = ()
    text_or_call: Grammar | None = None
    undelimited_calls: bool = False  # nothing but calls follows a call
    reasoning_start: tuple[int, ...] = ()  # tokens with which reasoning may begin the output
    reasoning_end: tuple[int, ...] = ()  # tokens
    reasoning_budget: int | None = None  # tokens
    single_call: bool = False

    @property
    def is_strict(self) -> bool:
        """Whether a call that the model starts itself must match its grammar."""
        return self.text_or_call is not None

    def allows_call(self, text: str) -> bool:
        """Return whether the grammar of calls allows all of a text."""
        assert self.call
        return GrammarState(self.call).accept_text(self, text)

    def start(self, parser: OutputParser | None) -> "ConstraintState":
        """Return the state of an output that has not begun."""
        return ConstraintState(self, parser)


class GrammarState:
    """The state of one output in a grammar. Copies the grammar's matcher at the first use, since
    many choices may wait."""

    def __init__(self, grammar: Grammar) -> None:
        self.grammar = grammar

    @cached_property
    def matcher(self) -> LLMatcher:
        return self.grammar.matcher.deep_copy()

    def accept_text(self, constraints: OutputConstraints, text: str) -> bool:
        """Advance by a text; return whether all of it is allowed."""
        assert constraints.tokenizer is not None
        tokens = constraints.tokenizer.tokenize_str(text, parse_special=True)
        return self.matcher.try_consume_tokens(tokens) == len(tokens)


class ConstraintState:
    """The state of one output in its constraints: per token `mask`, `accept_token`, and
    `update_phase` once its text is parsed. `parser` is None where all text is content."""

    def __init__(self, constraints: OutputConstraints, parser: OutputParser | None) -> None:
        self.finished = False  # the output must end
        self.drafts_stale = False  # the last token changed the constraints after drafting
        self._constraints = constraints
        self._parser = parser
        reasoning = parser is not None and parser.phase == "reasoning"
        self._phase: Phase = "reasoning" if reasoning else "content"
        self._grammar: GrammarState | None = None
        self._beginning: GrammarState | None = None  # of text that may be the beginning of a call
        self._calls_finished = 0
        if constraints.content and not reasoning:
            self._grammar = GrammarState(constraints.content)
        self._reasoning_start = () if reasoning else constraints.reasoning_start
        self._reasoning_tokens = 0
        self._forced: list[int] = []
        self._apply_budget()

    @property
    def is_constrained(self) -> bool:
        """Whether a grammar allowed the last token, and constrains the next."""
        return self._grammar is not None

    def draft(self, drafts: tuple[int, ...], limit: int) -> tuple[int, ...]:
        """Return at most `limit` tokens that the grammar forces, or else the drafts it allows."""
        if self._forced or self._beginning:
            return ()
        if self._grammar is None:
            return drafts
        if forced_tokens := self._grammar.matcher.compute_ff_tokens():
            return tuple(forced_tokens[:limit])
        if not drafts:
            return ()
        valid = self._grammar.matcher.validate_tokens(list(drafts))
        return drafts[:valid]

    def mask(self, drafts: tuple[int, ...] = ()) -> PendingMask | None:
        """Return the mask of the next token and of those after each draft; None without one."""
        self.drafts_stale = False
        if self._forced:
            return PendingMask(forced_token=self._forced[0])
        if state := self._grammar or self._beginning:
            extra_token = self._reasoning_start[0] if self._reasoning_start else None
            return PendingMask(
                state.matcher, drafts, extra_token=extra_token, grammar=state.grammar
            )
        if self._constraints.content:  # still reasoning
            return PendingMask(None, drafts, forbids_stop=True)
        return None

    def accept_token(self, token: int) -> None:
        """Advance by a sampled token, before its text is parsed."""
        if self._forced:
            self._forced.pop(0)
        elif self._reasoning_start and token == self._reasoning_start[0]:
            self._grammar, self.drafts_stale = None, True
            self._forced = [*self._reasoning_start[1:]]
        elif self._grammar and not self._grammar.matcher.consume_token(token):
            raise ItemFailed("the grammar of this response has become too complex")
        self._reasoning_start = ()

    def begins_wrong_call(self) -> bool:
        """Return whether the text parsed just now begins a call that a strict grammar refuses."""
        parser = self._parser
        if not (self._constraints.is_strict and parser and self._grammar is None):
            return False
        began = parser.phase == "call" and self._call_is_new(parser)
        ended = parser.phase != "call" and parser.calls_finished > self._calls_finished
        if began:
            return not self._constraints.allows_call(parser.phase_text.lstrip())
        return ended and self._phase != "call"

    def _call_is_new(self, parser: OutputParser) -> bool:
        return self._phase != "call" or parser.calls_finished > self._calls_finished

    def update_phase(self, text: str) -> None:
        """Follow the parser, which has parsed the token's text."""
        if parser := self._parser:
            if parser.phase != self._phase or (
                parser.phase == "call" and self._call_is_new(parser)
            ):
                self._enter(parser.phase, parser.phase_text.lstrip())
            self._calls_finished = parser.calls_finished
            if self._phase == "reasoning":
                self._reasoning_tokens += 1
                self._apply_budget()
            if self._constraints.single_call and parser.calls_finished:
                self.finished = True
        if self._grammar is not None and self._grammar.matcher.is_stopped():
            self._grammar = None
            ends = self._constraints.is_strict and self._constraints.undelimited_calls
            if self._constraints.call is None or self._constraints.single_call or ends:
                self.finished = True
        self._beginning = None
        if text and self._constraints.is_strict and self._grammar is None:
            self._constrain_beginning()

    def _constrain_beginning(self) -> None:
        """Constrain the next token if the text may be the beginning of a call: it must not complete
        the beginning otherwise than the grammar allows."""
        if self._parser is None or not (text := self._parser.pending_text):
            return
        starts = (0,) if self._constraints.undelimited_calls else range(len(text))
        beginnings = self._constraints.beginnings
        ends = (text[n:] for n in starts if any(b.startswith(text[n:]) for b in beginnings))
        if (end := next(ends, None)) is None:
            return
        assert self._constraints.text_or_call
        state = GrammarState(self._constraints.text_or_call)
        if state.accept_text(self._constraints, end):
            self._beginning, self.drafts_stale = state, True

    def _enter(self, phase: Phase, text: str) -> None:
        """`text`: the phase's text so far."""
        left, self._phase = self._phase, phase
        if left == "reasoning" and self._constraints.content:
            self._grammar, self.drafts_stale = GrammarState(self._constraints.content), True
            self._grammar.accept_text(self._constraints, text)
        elif self._constraints.call and "call" in (left, phase):
            self._grammar, self.drafts_stale = None, True
            if phase == "call":
                grammar = GrammarState(self._constraints.call)
                # else the model does not write calls like its template
                self._grammar = grammar if grammar.accept_text(self._constraints, text) else None

    def _apply_budget(self) -> None:
        budget = self._constraints.reasoning_budget
        if self._phase != "reasoning" or budget is None or self._forced:
            return
        if self._reasoning_tokens >= budget:
            self._forced = list(self._constraints.reasoning_end)
            self.drafts_stale = True
