"""What one choice may say next: the constraint on its answer or on a call, and when to stop
thinking.

    thinking ──▶ answering, held to a grammar        (a constraint, or calls that must be made)
    free ──▶ in a call, held to its tool ──▶ free     (calls that may be made)

Follows the tokens as they are chosen and the reader of their text. On the worker's thread.
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
from worker.text.parser import Reader

T = TypeVar("T")
STEP_S = 0.25  # of CPU time on the worker's thread, for what a grammar is asked there at once


@dataclass(frozen=True, slots=True)
class Plan:
    """What a request asks of its choices, compiled."""

    tokenizer: LLTokenizer | None = None  # where there is a grammar
    answer: Grammar | None = None  # what follows the reasoning, up to the end
    document: bool = False  # the answer is one: nothing in it is a mark
    may_call: bool = False  # or it may be calls instead
    call: Grammar | None = None  # a call that the model begins by itself
    may_think: int | None = None  # a token that begins reasoning in place of the answer
    budget: int | None = None  # tokens of reasoning
    close: tuple[int, ...] = ()  # the tokens that end it
    single_call: bool = False


class Held:
    """A copy of a grammar's matcher, made when it is first needed: many choices may wait."""

    def __init__(self, grammar: Grammar) -> None:
        self.grammar = grammar

    @cached_property
    def matcher(self) -> LLMatcher:
        return self.grammar.matcher.deep_copy()

    def in_time(self, run: Callable[[LLMatcher], T]) -> T:
        """On the worker's thread, where the library's own limits bound it. What takes long all the
        same is done once: the grammar is not followed any further, here or for another."""
        if self.grammar.slow:
            raise ItemFailed("the grammar of this answer takes too long to be followed")
        started = time.thread_time()
        made = run(self.matcher)
        if time.thread_time() - started > STEP_S:
            self.grammar.slow = True
        return made


class Guide:
    """`reader` is None where the text is nothing but content."""

    def __init__(self, plan: Plan, reader: Reader | None) -> None:
        self.finished = False  # nothing may follow
        self.turned = False  # what was drafted does not know of the last token's effect
        self._plan = plan
        self._reader = reader
        self._thinking = reader is not None and reader.thinking  # or about to
        self._entered = self._thinking  # the reader has seen it
        self._calling = False
        self._thought = 0
        self._forced: list[int] = []
        self._held: Held | None = None
        self._may_think = None if self._thinking else plan.may_think
        if plan.answer and not self._thinking:
            self._hold(plan.answer)
        self._limit()

    def draft(self, looked_up: tuple[int, ...], most: int) -> tuple[int, ...]:
        """Tokens that are sure to come, or those of a draft that may."""
        if self._forced:
            return ()
        if self._held is None:
            return looked_up
        if sure := self._held.in_time(lambda matcher: matcher.compute_ff_tokens()):
            return tuple(sure[:most])
        if not looked_up:
            return ()
        fitting = self._held.in_time(lambda matcher: matcher.validate_tokens(list(looked_up)))
        return looked_up[:fitting]

    def wanted(self, drafts: tuple[int, ...]) -> MaskRequest | None:
        """What masks the next rows need; None: all tokens may come."""
        self.turned = False
        if self._forced:
            return MaskRequest(only=self._forced[0])
        if held := self._held:
            return MaskRequest(held.matcher, drafts, also=self._may_think, grammar=held.grammar)
        if self._thinking and self._plan.answer:
            return MaskRequest(None, drafts, no_end=True)
        return None

    def accept(self, token: int) -> None:
        """A token was chosen; its text has not been read yet."""
        if self._forced:
            self._forced.pop(0)
        elif self._may_think is not None and token == self._may_think:
            self._held = self._may_think = None
            self._thinking = self.turned = True
            return
        elif self._held is not None:
            self._consume(self._held, token)
        if self._may_think is not None:
            self._may_think = None
            self._tell_reader()

    def _consume(self, held: Held, token: int) -> None:
        if not held.in_time(lambda matcher: matcher.consume_token(token)):
            raise ItemFailed("the grammar of this answer is too complex to be followed any further")

    def follow(self) -> None:
        """The token's text has been read."""
        if self._reader is not None:
            self._follow_reasoning(self._reader)
            self._follow_calls(self._reader)
        if self._held is not None and self._held.matcher.is_stopped():
            self.finished = self.finished or not self._calling or self._plan.single_call
            self._held = None

    def _hold(self, answer: Grammar) -> None:
        self._held = Held(answer)
        if self._may_think is None:
            self._tell_reader()

    def _tell_reader(self) -> None:
        """The answer begins, and no thoughts."""
        if self._reader is not None:
            self._reader.calls_held = True
            if self._plan.document:
                self._reader.hold(marks=self._plan.may_call)

    def _follow_reasoning(self, reader: Reader) -> None:
        if reader.thinking:
            self._thinking = self._entered = True
            self._thought += 1
            self._limit()
        elif self._entered:
            self._thinking = self._entered = False
            if self._plan.answer:
                begun = reader.since_mark.lstrip()
                self._hold(self._plan.answer)
                self._take(begun)
                self.turned = True

    def _limit(self) -> None:
        budget = self._plan.budget
        if self._thinking and budget is not None and self._thought >= budget and not self._forced:
            self._forced = list(self._plan.close)
            self.turned = True

    def _follow_calls(self, reader: Reader) -> None:
        plan = self._plan
        if plan.single_call and reader.calls_ended:
            self.finished = True
        if plan.call is None or reader.calling == self._calling:
            return
        self._calling, self.turned = reader.calling, True
        self._held = None
        if reader.calling:
            self._held = Held(plan.call)
            if not self._take(reader.since_mark.lstrip()):
                self._held = None  # it writes calls in another way than its template
            reader.calls_held = self._held is not None

    def _take(self, text: str) -> bool:
        """Text that has come already; whether the grammar takes it."""
        if self._held is None or self._plan.tokenizer is None:
            return False
        tokens = self._plan.tokenizer.tokenize_str(text, parse_special=True)
        taken = self._held.in_time(lambda matcher: matcher.try_consume_tokens(tokens))
        return taken == len(tokens)
