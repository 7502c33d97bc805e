"""The constraints on one output: the grammar of its content or of a call, and a reasoning budget.

    reasoning ──▶ content, by a grammar                 (a constraint, or required tool calls)
    content, free ──▶ call, by its tool ──▶ content     (optional tool calls)

Follows the sampled tokens; the parser reports the phase of their text. On the worker's thread.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from llguidance import LLMatcher, LLTokenizer

from batching.errors import ItemFailed
from worker.grammar.bitmask import MaskRequest
from worker.grammar.compiler import Grammar
from worker.text.parser import OutputParser, Phase

T = TypeVar("T")
STEP_S = 0.25  # of CPU time on the worker's thread, for one operation on a matcher


@dataclass(frozen=True, slots=True)
class OutputConstraints:
    """The constraints of a request, compiled; shared by its choices."""

    tokenizer: LLTokenizer | None = None  # None without a grammar
    content: Grammar | None = None  # of the text after the reasoning, up to the end
    is_document: bool = False  # the content has no delimiters in it
    call: Grammar | None = None  # of a call that the model starts itself; not with `content`
    reasoning_start: tuple[int, ...] = ()  # tokens with which reasoning may begin the output
    reasoning_end: tuple[int, ...] = ()  # tokens
    reasoning_budget: int | None = None  # tokens
    single_call: bool = False


class GrammarState:
    """The state of one output in a grammar. Copies the grammar's matcher at the first use, since
    many choices may wait."""

    def __init__(self, grammar: Grammar) -> None:
        self.grammar = grammar

    @cached_property
    def matcher(self) -> LLMatcher:
        return self.grammar.matcher.deep_copy()

    def run(self, operation: Callable[[LLMatcher], T]) -> T:
        """Run an operation, which llguidance's limits bound. After one that still took long, the
        grammar is used by no output any more."""
        if self.grammar.too_slow:
            raise ItemFailed("the grammar of this response takes too long to compute a token mask")
        started = time.thread_time()
        result = operation(self.matcher)
        if time.thread_time() - started > STEP_S:
            self.grammar.too_slow = True
        return result


class ConstraintState:
    """The state of one output in its constraints: per token `mask_request`, `accept_token`, and
    `update_phase` once its text is parsed. `parser` is None where all text is content."""

    def __init__(self, constraints: OutputConstraints, parser: OutputParser | None) -> None:
        self.finished = False  # the output must end
        self.drafts_stale = False  # the last token changed the constraints after drafting
        self._constraints = constraints
        self._parser = parser
        reasoning = parser is not None and parser.phase == "reasoning"
        self._phase: Phase = "reasoning" if reasoning else "content"
        self._grammar: GrammarState | None = None
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
        if self._forced:
            return ()
        if self._grammar is None:
            return drafts
        if forced_tokens := self._grammar.run(lambda matcher: matcher.compute_ff_tokens()):
            return tuple(forced_tokens[:limit])
        if not drafts:
            return ()
        valid = self._grammar.run(lambda matcher: matcher.validate_tokens(list(drafts)))
        return drafts[:valid]

    def mask_request(self, drafts: tuple[int, ...] = ()) -> MaskRequest | None:
        """Return the mask of the next token and of those after each draft; None without one."""
        self.drafts_stale = False
        if self._forced:
            return MaskRequest(forced_token=self._forced[0])
        if state := self._grammar:
            extra_token = self._reasoning_start[0] if self._reasoning_start else None
            return MaskRequest(
                state.matcher, drafts, extra_token=extra_token, grammar=state.grammar
            )
        if self._constraints.content:  # still reasoning
            return MaskRequest(None, drafts, forbids_stop=True)
        return None

    def accept_token(self, token: int) -> None:
        """Advance by a sampled token, before its text is parsed."""
        if self._forced:
            self._forced.pop(0)
        elif self._reasoning_start and token == self._reasoning_start[0]:
            self._grammar, self.drafts_stale = None, True
            self._forced = [*self._reasoning_start[1:]]
        elif self._grammar and not self._grammar.run(lambda matcher: matcher.consume_token(token)):
            raise ItemFailed("the grammar of this response has become too complex")
        self._reasoning_start = ()

    def update_phase(self) -> None:
        """Follow the parser, which has parsed the token's text."""
        if self._parser is not None:
            if self._parser.phase != self._phase:
                self._enter(self._parser.phase, self._parser.phase_text.lstrip())
            if self._phase == "reasoning":
                self._reasoning_tokens += 1
                self._apply_budget()
            if self._constraints.single_call and self._parser.calls_finished:
                self.finished = True
        if self._grammar is not None and self._grammar.matcher.is_stopped():
            self._grammar = None
            if self._constraints.call is None or self._constraints.single_call:
                self.finished = True

    def _enter(self, phase: Phase, text: str) -> None:
        """`text`: the phase's text so far."""
        left, self._phase = self._phase, phase
        if left == "reasoning" and self._constraints.content:
            self._grammar, self.drafts_stale = GrammarState(self._constraints.content), True
            self._accept_text(text)
        elif self._constraints.call and "call" in (left, phase):
            self._grammar, self.drafts_stale = None, True
            if phase == "call":
                self._grammar = GrammarState(self._constraints.call)
                if not self._accept_text(text):
                    self._grammar = None  # the model does not write calls like its template

    def _accept_text(self, text: str) -> bool:
        """Advance the grammar by text; return whether it allows all of it."""
        assert self._grammar is not None
        assert self._constraints.tokenizer is not None
        tokens = self._constraints.tokenizer.tokenize_str(text, parse_special=True)
        accepted = self._grammar.run(lambda matcher: matcher.try_consume_tokens(tokens))
        return accepted == len(tokens)

    def _apply_budget(self) -> None:
        budget = self._constraints.reasoning_budget
        if self._phase != "reasoning" or budget is None or self._forced:
            return
        if self._reasoning_tokens >= budget:
            self._forced = list(self._constraints.reasoning_end)
            self.drafts_stale = True
