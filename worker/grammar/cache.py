"""Grammars that have been compiled, and those that are being tried or were found unusable.

    Grammars.compiled (pool) → get: there, or Unusable, or Pending
                                 └▶ its thread: tried in a child (trial_process.py), compiled,
                                    kept → whoever waits prepares once more

No thread of the pool waits here. One grammar is tried at a time, identical ones once; one that
takes long is put behind those that have not been tried yet, and one that nobody waits for any
longer is left out.
"""

import hashlib
import logging
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from llguidance import LLMatcher, LLTokenizer

from batching.errors import OnequeueError, QueueFull, WorkerDown
from worker.grammar.trial import (
    TOO_LONG,
    TOO_SLOW,
    Unusable,
    compile_grammar,
    notation,
    with_large_stack,
)
from worker.grammar.trial_process import Trials
from worker.protocol import Pending

log = logging.getLogger("onequeue.grammar")

KEPT = 32  # compiled grammars, the ones used last
MOST_BYTES = 512 << 20  # of all that are kept or in use
USES = 200  # of one: copies share what the lexer has learned, which is bounded
REMEMBERED = 1_000  # verdicts
MOST_WAITING, MOST_LONG = 64, 8  # to be tried at first; with more time
PASSING_S = 1.0
QUICK_S, LONG_S = 0.25, 2.0  # CPU time for a trial, at first and at most

T = TypeVar("T")


class Asked(NamedTuple):
    """As `grammar_trial.notation` has it."""

    text: str
    foreign: bool = False
    forcing: bool = True

    @property
    def digest(self) -> bytes:
        told = f"{self.foreign}{self.forcing}{self.text}"
        return hashlib.sha256(told.encode("utf-8", "surrogatepass")).digest()


class Passing(NamedTuple):
    """It may go better next time: told to all who waited, and to who comes right after them."""

    error: OnequeueError
    until: float  # monotonic seconds


@dataclass(eq=False)
class Grammar:
    """One that is ready; copies of its matcher hold answers."""

    matcher: LLMatcher
    size: int = 0  # bytes
    uses: int = 0
    slow: bool = False  # it held up a step


@dataclass(eq=False)
class _Task:
    """None: the tokenizer is to be made."""

    asked: Asked | None
    compiles: bool
    cpu_s: float = QUICK_S
    waiting: list[tuple[Callable[[], bool], Callable[[], None]]] = field(default_factory=list)

    @property
    def wanted(self) -> bool:
        """Somebody may be about to wait."""
        return not self.waiting or any(wanted() for wanted, _ in self.waiting)


class GrammarCache:
    def __init__(self, make: Callable[[], tuple[LLTokenizer, Trials]]) -> None:
        """`make` takes a second for a large vocabulary, and is called with the first grammar."""
        self.tokenizer: LLTokenizer | None = None
        self._make = make
        self._trials: Trials | None = None
        self._lock = threading.Lock()
        self._known: OrderedDict[Asked, Grammar] = OrderedDict()
        self._alive: weakref.WeakSet[Grammar] = weakref.WeakSet()
        self._sizes: OrderedDict[bytes, int] = OrderedDict()  # of those that may be used
        self._refused: OrderedDict[bytes, str | Passing] = OrderedDict()
        self._tasks: dict[Asked | None, _Task] = {}
        self._works = False
        self._closed = False

    # ── in pool threads ──

    def made(self) -> LLTokenizer:
        """Pending until there is one."""
        with self._lock:
            if self.tokenizer is None:
                self._raise_refusal(b"")
                raise self._await(None, False)
            return self.tokenizer

    def get(self, asked: Asked) -> Grammar:
        """Unusable, with the reason; Pending: ask once more when told to."""
        with self._lock:
            known = self._known.pop(asked, None)
            if known and known.slow:
                _remember(self._refused, asked.digest, TOO_SLOW)
            elif known and known.uses < USES:
                known.uses += 1
                self._known[asked] = known
                return known
            self._raise_refusal(asked.digest)
            raise self._await(asked, True)

    def check(self, asked: Asked) -> None:
        """Whether it could be compiled: as `get`, without a grammar."""
        with self._lock:
            digest = asked.digest
            if asked not in self._known and digest not in self._sizes:
                self._raise_refusal(digest)
                raise self._await(asked, False)

    def _raise_refusal(self, digest: bytes) -> None:
        refusal = self._refused.get(digest)
        if isinstance(refusal, Passing):
            if time.monotonic() < refusal.until:
                raise refusal.error
            del self._refused[digest]
            return
        if refusal is not None:
            self._refused.move_to_end(digest)
            raise Unusable(refusal)

    def _await(self, asked: Asked | None, compiles: bool) -> Pending:
        task = self._tasks.get(asked)
        if task is None:
            if len(self._tasks) - self._long >= MOST_WAITING:
                wait_s = QUICK_S * MOST_WAITING + LONG_S
                raise QueueFull("too many grammars wait to be compiled", wait_s)
            task = self._tasks[asked] = _Task(asked, compiles)
        task.compiles |= compiles
        if not self._works and not self._closed:
            try:
                with_large_stack(self._work)  # it waits for the lock
            except RuntimeError as error:
                del self._tasks[asked]
                raise WorkerDown("answers cannot be held to grammars now", 5) from error
            self._works = True
        return Pending(lambda wanted, again: self._join(task, wanted, again))

    def _join(self, task: _Task, wanted: Callable[[], bool], again: Callable[[], None]) -> None:
        with self._lock:
            if self._tasks.get(task.asked) is task:
                task.waiting.append((wanted, again))
                return
        again()  # it has just been done

    def close(self) -> None:
        with self._lock:
            self._closed = True
            trials = self._trials
        if trials:
            trials.close()

    # ── the grammar thread: there while there is something to do ──

    def _work(self) -> None:
        while (task := self._next()) is not None:
            outcome: str | Passing | None
            try:
                if not self._do(task):
                    continue
                outcome = None
            except Unusable as unusable:
                outcome = str(unusable)
            except OnequeueError as error:
                outcome = Passing(error, time.monotonic() + PASSING_S)
            except BaseException as error:  # a panic in the library is no Exception
                if not self._closed:
                    log.exception("bug in the grammar thread")
                down = WorkerDown("answers cannot be held to grammars now", 5)
                down.__cause__ = error
                outcome = Passing(down, time.monotonic() + PASSING_S)
            with self._lock:
                if outcome is not None:
                    _remember(self._refused, task.asked.digest if task.asked else b"", outcome)
                del self._tasks[task.asked]
            for _, again in task.waiting:
                again()

    def _next(self) -> _Task | None:
        with self._lock:
            for gone in [task for task in self._tasks.values() if not task.wanted]:
                del self._tasks[gone.asked]
            if self._tasks and not self._closed:
                return min(self._tasks.values(), key=lambda task: task.cpu_s)
            self._works = False
            return None

    def _do(self, task: _Task) -> bool:
        """False: it is to be tried again, with more time."""
        asked = task.asked
        if asked is None or self._trials is None:
            self.tokenizer, self._trials = self._make()
            if self._closed:
                self._trials.close()
            return asked is None
        assert self.tokenizer is not None
        text, size = None, self._sizes.get(asked.digest)
        if size is None:
            verdict = self._trials.attempt(*asked, task.cpu_s)
            if verdict.reason == TOO_LONG and task.cpu_s < LONG_S:
                if self._long >= MOST_LONG:
                    long = "too many grammars that take long wait to be compiled"
                    raise QueueFull(long, LONG_S * MOST_LONG)
                task.cpu_s = LONG_S
                return False
            if verdict.reason is not None:
                raise Unusable(verdict.reason)
            text, size = verdict.grammar, verdict.size
            if text is None:
                _remember(self._sizes, asked.digest, size)
        if task.compiles:
            self._make_room(size)
            text = notation(*asked) if text is None else text
            made = Grammar(compile_grammar(self.tokenizer, text), size, 1)
            made.matcher.deep_copy().compute_bitmask()  # what its copies need first is shared
            with self._lock:
                self._known[asked] = made
                self._alive.add(made)
        return True

    def _make_room(self, size: int) -> None:
        with self._lock:
            while self._known and (len(self._known) >= KEPT or self._used + size > MOST_BYTES):
                self._known.popitem(last=False)
            if self._used + size > MOST_BYTES:
                raise QueueFull("the grammars in use take all memory there is for them", 5)

    @property
    def _long(self) -> int:
        """How many are to be tried with more time: they keep nobody else out."""
        return sum(task.cpu_s >= LONG_S for task in self._tasks.values())

    @property
    def _used(self) -> int:
        return sum(grammar.size for grammar in self._alive)


def _remember(kept: OrderedDict[bytes, T], digest: bytes, verdict: T) -> None:
    kept[digest] = verdict
    if len(kept) > REMEMBERED:
        kept.popitem(last=False)
