"""The grammars of llguidance that constrain answers.

    a pool thread asks → a Grammar, a refusal, or Pending: ask again when called back
    the grammar thread: tried in a child (sandbox.py) → compiled → kept → who waits is called back
    a Grammar → a copy for each choice (constraints.py) → what a step's rows allow (bitmask.py)

One grammar is tried at a time, identical ones once; one that takes long is put behind those that
have not been tried yet, and one that nobody waits for any longer is left out.
"""

import hashlib
import logging
import re
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

from llguidance import LLMatcher, LLTokenizer
from transformers import PreTrainedTokenizerBase

from batching.errors import InvalidInput, OnequeueError, QueueFull, WorkerDown
from worker.grammar import lark, sandbox
from worker.grammar.sandbox import GrammarSandbox, Unusable
from worker.messages.generation import Constraint
from worker.messages.protocol import Pending

log = logging.getLogger("onequeue.grammar")

KEPT = 32  # compiled grammars, the ones used last
MOST_BYTES = 512 << 20  # of all that are kept or in use
USES = 200  # of one: copies share what the lexer has learned, which is bounded
REMEMBERED = 1_000  # verdicts
MOST_WAITING, MOST_LONG = 64, 8  # to be tried at first; with more time
PASSING_S = 1.0
QUICK_S, LONG_S = 0.25, 2.0  # CPU time for a trial, at first and at most
UNFIT = "answers cannot be constrained with this model's tokenizer"
DOWN = "answers cannot be held to grammars now"

T = TypeVar("T")


@dataclass(eq=False)
class Grammar:
    """One that is ready; copies of its matcher hold answers."""

    matcher: LLMatcher
    size: int = 0  # bytes
    uses: int = 0
    slow: bool = False  # it held up a step


@dataclass(eq=False)
class _Task:
    """A grammar to be tried, as `to_lark` takes it; or the tokenizer to be made (no digest)."""

    text: str = ""
    foreign: bool = False
    forcing: bool = True
    compiles: bool = False  # or is only to be tried
    digest: bytes = b""  # verdicts are kept by it
    cpu_s: float = QUICK_S
    waiting: list[tuple[Callable[[], bool], Callable[[], None]]] = field(default_factory=list)

    @property
    def wanted(self) -> bool:
        """Somebody may be about to wait."""
        return not self.waiting or any(wanted() for wanted, _ in self.waiting)


class Grammars:
    """The grammars of one tokenizer. `rows`: the width of the model's output. The library's
    tokenizer takes a second for a large vocabulary, and is made with the first grammar."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, rows: int, ends: Sequence[int]) -> None:
        self._pretrained, self._rows, self._ends = tokenizer, rows, list(ends)
        self._made: tuple[LLTokenizer, GrammarSandbox] | None = None
        self._lock = threading.Lock()
        self._kept: OrderedDict[bytes, Grammar] = OrderedDict()
        self._alive: weakref.WeakSet[Grammar] = weakref.WeakSet()
        self._sizes: OrderedDict[bytes, int] = OrderedDict()  # of those that may be used
        # With the time, in monotonic seconds, until which an error holds that may pass: it is
        # raised to all who waited, and to who comes right after them.
        self._refused: OrderedDict[bytes, tuple[str | OnequeueError, float]] = OrderedDict()
        self._tasks: dict[bytes, _Task] = {}
        self._works = self._closed = False

    # ── in pool threads: all raise InvalidInput with the reason, or Pending ──

    def matcher(self, constraint: Constraint, before: str = "") -> Grammar:
        """`before`: what may stand before the answer, in the notation."""
        rule = lark.rule(constraint)
        if constraint.kind == "grammar":
            return self.compiled(rule, constraint.param, foreign=True)
        written = f"start: {before}answer\nanswer: {rule}" if before else f"start: {rule}"
        return self.compiled(written, constraint.param)

    def compiled(self, grammar: str, param: str, foreign: bool = False) -> Grammar:
        """`foreign`: in a client's notation, perhaps GBNF; else in Lark's."""
        task = self._task(grammar, param, foreign, compiles=True)
        with self._lock:
            known = self._kept.pop(task.digest, None)
            if known and known.slow:
                _remember(self._refused, task.digest, (sandbox.TOO_SLOW, 0.0))
            elif known and known.uses < USES:
                known.uses += 1
                self._kept[task.digest] = known
                return known
            raise self._refusal(task, param) or self._enqueue(task)

    def check(self, grammar: str, param: str) -> None:
        """Whether it could be compiled."""
        task = self._task(grammar, param, False, compiles=False)
        with self._lock:
            if task.digest not in self._sizes:
                raise self._refusal(task, param) or self._enqueue(task)

    def tokenizer(self, param: str) -> LLTokenizer:
        with self._lock:
            if self._made is None:
                raise self._refusal(_Task(), param) or self._enqueue(_Task())
            return self._made[0]

    def quoted(self, text: str) -> str:
        """A text in Lark's notation; special tokens stand by their ids."""
        parts = self._marks.split(text) if self._special else [text]
        return " ".join(
            f"<[{self._special[part]}]>" if part in self._special else lark.literal(part)
            for part in parts
            if part
        )

    @cached_property
    def _special(self) -> dict[str, int]:
        """The tokens that no text of a grammar stands for."""
        made = self.tokenizer("tools")
        added = self._pretrained.get_added_vocab()
        return {token: id_ for token, id_ in added.items() if made.is_special_token(id_)}

    @cached_property
    def _marks(self) -> re.Pattern[str]:
        longest_first = sorted(self._special, key=len, reverse=True)
        return re.compile(f"({'|'.join(map(re.escape, longest_first))})")

    def _task(self, grammar: str, param: str, foreign: bool, compiles: bool) -> _Task:
        lark.check_length(grammar, param)
        self.tokenizer(param)
        plain = grammar.replace("\\", "")
        # What stands for a special token would be forced as its text, and then not be taken.
        forcing = not any(mark in plain for mark in self._special)
        key = f"{foreign}{forcing}{grammar}".encode("utf-8", "surrogatepass")
        return _Task(grammar, foreign, forcing, compiles, hashlib.sha256(key).digest())

    def _refusal(self, task: _Task, param: str) -> OnequeueError | None:
        refusal, until = self._refused.get(task.digest, (None, 0.0))
        if isinstance(refusal, str):
            self._refused.move_to_end(task.digest)
            unfit = InvalidInput(f"{param}: {refusal}", param)
            return lark.unusable(refusal, param) if task.digest else unfit
        return refusal if time.monotonic() < until else None

    def _enqueue(self, asked: _Task) -> Pending:
        task = self._tasks.get(asked.digest)
        if task is None:
            if len(self._tasks) - self._long >= MOST_WAITING:
                wait_s = QUICK_S * MOST_WAITING + LONG_S
                raise QueueFull("too many grammars wait to be compiled", wait_s)
            task = self._tasks[asked.digest] = asked
        task.compiles |= asked.compiles
        if not self._works and not self._closed:
            try:
                sandbox.with_large_stack(self._work)  # it waits for the lock
            except RuntimeError as error:
                del self._tasks[asked.digest]
                raise WorkerDown(DOWN, 5) from error
            self._works = True
        return Pending(lambda wanted, again: self._join(task, wanted, again))

    def _join(self, task: _Task, wanted: Callable[[], bool], again: Callable[[], None]) -> None:
        with self._lock:
            if self._tasks.get(task.digest) is task:
                task.waiting.append((wanted, again))
                return
        again()  # it has just been done

    def close(self) -> None:
        self._closed = True
        if self._made:
            self._made[1].close()

    # ── the grammar thread: there while there is something to do ──

    def _work(self) -> None:
        while (task := self._next()) is not None:
            refusal: str | OnequeueError | None = None
            try:
                if not self._do(task):
                    continue
            except Unusable as unusable:
                refusal = str(unusable)
            except OnequeueError as error:
                refusal = error
            except BaseException as error:  # a panic in the library is no Exception
                if not self._closed:
                    log.exception("bug in the grammar thread")
                refusal = WorkerDown(DOWN, 5)
                refusal.__cause__ = error
            with self._lock:
                if refusal is not None:
                    until = time.monotonic() + PASSING_S
                    _remember(self._refused, task.digest, (refusal, until))
                del self._tasks[task.digest]
            for _, again in task.waiting:
                again()

    def _next(self) -> _Task | None:
        with self._lock:
            for gone in [task for task in self._tasks.values() if not task.wanted]:
                del self._tasks[gone.digest]
            if self._tasks and not self._closed:
                return min(self._tasks.values(), key=lambda task: task.cpu_s)
            self._works = False
            return None

    def _do(self, task: _Task) -> bool:
        """False: it is to be tried again, with more time."""
        if not task.digest or self._made is None:
            self._make_tokenizer()
            return True
        tokenizer, trials = self._made
        lark, size = None, self._sizes.get(task.digest)
        if size is None:
            verdict = trials.attempt(task.text, task.foreign, task.forcing, task.cpu_s)
            if verdict.reason == sandbox.TOO_LONG and task.cpu_s < LONG_S:
                if self._long >= MOST_LONG:
                    long = "too many grammars that take long wait to be compiled"
                    raise QueueFull(long, LONG_S * MOST_LONG)
                task.cpu_s = LONG_S
                return False
            if verdict.reason is not None:
                raise Unusable(verdict.reason)
            lark, size = verdict.lark, verdict.size
            if not task.foreign:  # those are read in the child each time
                _remember(self._sizes, task.digest, size)
        if task.compiles:
            self._make_room(size)
            lark = lark or sandbox.to_lark(task.text, task.foreign, task.forcing)
            made = Grammar(sandbox.compile_grammar(tokenizer, lark), size, 1)
            made.matcher.deep_copy().compute_bitmask()  # what its copies need first is shared
            with self._lock:
                self._kept[task.digest] = made
                self._alive.add(made)
        return True

    def _make_tokenizer(self) -> None:
        """Here and in the child, at the same time."""
        try:
            text = self._pretrained.backend_tokenizer.to_str()
            trials = GrammarSandbox(text, self._rows, self._ends)
            trials.start()
            made = LLTokenizer(text, n_vocab=self._rows, eos_token=self._ends or None)
        except (OSError, MemoryError):
            raise
        except BaseException:  # a panic in the library is no Exception
            raise Unusable(UNFIT) from None
        self._made = made, trials
        if self._closed:
            trials.close()

    def _make_room(self, size: int) -> None:
        with self._lock:
            while self._kept and (len(self._kept) >= KEPT or self._used + size > MOST_BYTES):
                self._kept.popitem(last=False)
            if self._used + size > MOST_BYTES:
                raise QueueFull("the grammars in use take all memory there is for them", 5)

    @property
    def _long(self) -> int:
        """How many are to be tried with more time: they keep nobody else out."""
        return sum(task.cpu_s >= LONG_S for task in list(self._tasks.values()))

    @property
    def _used(self) -> int:
        return sum(grammar.size for grammar in self._alive)


def _remember(kept: OrderedDict[bytes, T], digest: bytes, verdict: T) -> None:
    kept[digest] = verdict
    if len(kept) > REMEMBERED:
        kept.popitem(last=False)
