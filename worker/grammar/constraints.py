"""What one choice may say next: the grammar of its answer or of a call, and when to stop thinking.

    thinking ──▶ answer, by a grammar             (a constraint, or calls that must be made)
    answer, free ──▶ call, by its tool ──▶ answer    (calls that may be made)

Follows the tokens as they are chosen; which phase the text is in, the parser tells. On the
worker's thread.
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
STEP_S = 0.25  # of CPU time on the worker's thread, for what a grammar is asked there at once


@dataclass(frozen=True, slots=True)
class OutputConstraints:
    """What a request asks of its choices, compiled."""

    tokenizer: LLTokenizer | None = None  # where there is a grammar
    answer: Grammar | None = None  # what follows the reasoning, up to the end
    document: bool = False  # the answer is one: nothing in it is a mark
    call: Grammar | None = None  # a call that the model begins by itself; not beside `answer`
    may_think: tuple[int, ...] = ()  # the tokens that begin reasoning in place of the answer
    budget: int | None = None  # tokens of reasoning
    close: tuple[int, ...] = ()  # the tokens that end it
    single_call: bool = False


class GrammarState:
    """Where a choice is in a grammar. The copy of the grammar's matcher is made when it is first
    needed: many choices may wait."""

    def __init__(self, grammar: Grammar) -> None:
        self.grammar = grammar

    @cached_property
    def matcher(self) -> LLMatcher:
        return self.grammar.matcher.deep_copy()

    def in_time(self, run: Callable[[LLMatcher], T]) -> T:
        """On the worker's thread, where the library's limits bound it. What takes long all the
        same is done once: the grammar is not followed any further, here or for another."""
        if self.grammar.slow:
            raise ItemFailed("the grammar of this answer takes too long to be followed")
        started = time.thread_time()
        made = run(self.matcher)
        if time.thread_time() - started > STEP_S:
            self.grammar.slow = True
        return made


class ConstraintState:
    """`parser` is None where the text is nothing but content."""

    def __init__(self, plan: OutputConstraints, parser: OutputParser | None) -> None:
        self.finished = False  # nothing may follow
        self.turned = False  # what was drafted does not know of the last token's effect
        self._plan = plan
        self._parser = parser
        thinking = parser is not None and parser.phase == "reasoning"
        self._phase: Phase = "reasoning" if thinking else "content"  # that the rest here is for
        self._state: GrammarState | None = None
        if plan.answer and not thinking:
            self._state = GrammarState(plan.answer)
        self._may_think = () if thinking else plan.may_think
        self._thought = 0
        self._forced: list[int] = []
        self._limit()

    @property
    def constrains(self) -> bool:
        """Whether the last token is one that a grammar took."""
        return self._state is not None

    def draft(self, looked_up: tuple[int, ...], most: int) -> tuple[int, ...]:
        """Tokens that are sure to come, or those of a draft that may."""
        if self._forced:
            return ()
        if self._state is None:
            return looked_up
        if sure := self._state.in_time(lambda matcher: matcher.compute_ff_tokens()):
            return tuple(sure[:most])
        if not looked_up:
            return ()
        fitting = self._state.in_time(lambda matcher: matcher.validate_tokens(list(looked_up)))
        return looked_up[:fitting]

    def mask(self, drafts: tuple[int, ...] = ()) -> MaskRequest | None:
        """What the next row needs, and those after each draft; None: all tokens may come."""
        self.turned = False
        if self._forced:
            return MaskRequest(only=self._forced[0])
        if state := self._state:
            also = self._may_think[0] if self._may_think else None
            return MaskRequest(state.matcher, drafts, also=also, grammar=state.grammar)
        if self._plan.answer:  # not begun: these are thoughts
            return MaskRequest(None, drafts, no_end=True)
        return None

    def accept(self, token: int) -> None:
        """A token was chosen; its text has not been read yet."""
        if self._forced:
            self._forced.pop(0)
        elif self._may_think and token == self._may_think[0]:
            self._state, self.turned = None, True
            self._forced = [*self._may_think[1:]]
        elif self._state and not self._state.in_time(lambda matcher: matcher.consume_token(token)):
            raise ItemFailed("the grammar of this answer is too complex to be followed any further")
        self._may_think = ()

    def follow(self) -> None:
        """The token's text has been read."""
        if self._parser is not None:
            if self._parser.phase != self._phase:
                self._enter(self._parser.phase, self._parser.phase_text.lstrip())
            if self._phase == "reasoning":
                self._thought += 1
                self._limit()
            if self._plan.single_call and self._parser.calls_finished:
                self.finished = True
        if self._state is not None and self._state.matcher.is_stopped():
            self._state = None
            self.finished = self.finished or self._plan.call is None or self._plan.single_call

    def _enter(self, phase: Phase, begun: str) -> None:
        """`begun`: what has come of the phase already."""
        left, self._phase = self._phase, phase
        if left == "reasoning" and self._plan.answer:
            self._state, self.turned = GrammarState(self._plan.answer), True
            self._takes(begun)
        elif self._plan.call and "call" in (left, phase):
            self._state, self.turned = None, True
            if phase == "call":
                self._state = GrammarState(self._plan.call)
                if not self._takes(begun):
                    self._state = None  # it writes calls in another way than its template

    def _takes(self, begun: str) -> bool:
        """Text that has come already; whether it is of the grammar."""
        assert self._state is not None
        assert self._plan.tokenizer is not None
        tokens = self._plan.tokenizer.tokenize_str(begun, parse_special=True)
        return self._state.in_time(lambda matcher: matcher.try_consume_tokens(tokens)) == len(
            tokens
        )

    def _limit(self) -> None:
        budget, thinking = self._plan.budget, self._phase == "reasoning"
        if thinking and budget is not None and self._thought >= budget and not self._forced:
            self._forced = list(self._plan.close)
            self.turned = True
