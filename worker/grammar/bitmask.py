"""Which tokens the rows of a step allow, computed while the model runs.

The bits come from llguidance, in a thread of their own that holds no lock of Python's meanwhile.
A grammar whose mask is not there in time is given up on, with the thread that is at it; another
thread goes on with the rows of its mates.
"""

import queue
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from llguidance import LLExecutor, LLMatcher
from numpy.typing import NDArray

from batching.errors import ItemFailed
from worker.grammar.compiler import Grammar
from worker.model.sampler import TokenMask

Bits = NDArray[np.int32]  # [rows, words], a bit a token
BIT = np.left_shift(np.uint32(1), np.arange(32, dtype=np.uint32)).view(np.int32)
# Of CPU time for one mask: a machine that is busy, or stood still, says nothing about a grammar.
# Less for each that is late after another, so that a step waits for about a second of it in all.
PATIENCE_S = 0.5
LEAST_S = 0.125
MOST_STUCK = 4  # threads


@dataclass(frozen=True, slots=True)
class MaskRequest:
    """What the row that a choice is at allows, and those after each drafted token: what its
    matcher says, or any token."""

    matcher: LLMatcher | None = None
    drafts: tuple[int, ...] = ()
    also: int | None = None  # may come as well, in the first row
    only: int | None = None  # nothing else may come
    no_end: bool = False  # it may not end here
    grammar: Grammar | None = None  # whose copy the matcher is

    @property
    def rows(self) -> int:
        return 1 + len(self.drafts)


@dataclass(slots=True)
class _Run:
    """A step's masks, and how far they are. What no matcher has said allows everything."""

    wanted: Sequence[tuple[int, MaskRequest]]
    bits: Bits
    width: int
    ends: Sequence[int]
    at: int = 0  # the one that is being computed
    since: float | None = None  # its thread's CPU time when it was begun; None: it has not been
    row: int = 0  # its first
    given_up: bool = False
    allowed: TokenMask | None = None
    error: BaseException | None = None
    done: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self) -> None:
        self.since = cpu_s(threading.current_thread())

    def next(self) -> None:
        self.row += self.wanted[self.at][1].rows
        self.at += 1
        self.since = None


class Masks:
    """`width`: of the model's output. `ends`: the tokens that end a sequence."""

    def __init__(self, width: int, ends: Sequence[int]) -> None:
        self._width, self._ends = width, ends
        self._runs: queue.SimpleQueue[_Run | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._stuck: list[threading.Thread] = []

    def begin(self, wanted: Sequence[tuple[int, MaskRequest]]) -> "Begun | None":
        """For choices by the row that each is at; their drafts' rows follow."""
        if not wanted:
            return None
        self._stuck = [thread for thread in self._stuck if thread.is_alive()]
        if len(self._stuck) >= MOST_STUCK and any(each.matcher for _, each in wanted):
            raise ItemFailed("answers cannot be held to grammars now: some take all the time")
        rows = sum(each.rows for _, each in wanted)
        bits: Bits = np.full((rows, (self._width + 31) // 32), -1, np.int32)
        run = _Run(wanted, bits, self._width, self._ends)
        self._put(run)
        return Begun(self, run)

    def spent_s(self, run: _Run) -> float:
        """On the mask that it is at."""
        since = run.since
        return 0.0 if since is None or self._thread is None else cpu_s(self._thread) - since

    def give_up(self, run: _Run, patience_s: float) -> _Run:
        """If the mask that it is at is late, the others are computed without it. Whoever follows
        the late one's grammar is told by its `slow`."""
        with run.lock:
            late = self.spent_s(run) >= patience_s
            if run.done.is_set() or run.at == len(run.wanted) or not late:
                return run
            run.given_up = True
        if grammar := run.wanted[run.at][1].grammar:
            grammar.slow = True
        if self._thread:
            self._stuck.append(self._thread)
        self._thread = None
        rest = replace(
            run, since=None, given_up=False, lock=threading.Lock(), done=threading.Event()
        )
        rest.next()
        self._put(rest)
        return rest

    def _put(self, run: _Run) -> None:
        if self._thread is None:
            runs: queue.SimpleQueue[_Run | None] = queue.SimpleQueue()
            work = _work, (runs, LLExecutor(1))
            thread = threading.Thread(target=work[0], args=work[1], name="masks", daemon=True)
            thread.start()  # or it raises, and is tried again with the next step
            self._thread, self._runs = thread, runs
            weakref.finalize(self, runs.put, None)
        self._runs.put(run)


def cpu_s(thread: threading.Thread) -> float:
    """That a running thread has used; the time of day where the system does not tell."""
    if sys.platform == "linux" and thread.ident is not None:
        return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
    return time.monotonic()


# ── the thread ──


def _work(runs: "queue.SimpleQueue[_Run | None]", executor: LLExecutor) -> None:
    while (run := runs.get()) is not None:
        try:
            while run.at < len(run.wanted):
                run.begin()
                _compute(run, executor)
                with run.lock:
                    if run.given_up:
                        return  # another thread has taken over
                    run.next()
            run.allowed = _allowed(run)
        except BaseException as error:  # told where it is waited for
            run.error = error
        run.done.set()


def _compute(run: _Run, executor: LLExecutor) -> None:
    each, bits = run.wanted[run.at][1], run.bits
    if each.matcher is None or (each.grammar and each.grammar.slow):
        return
    if each.drafts:
        drafted = [(each.matcher, run.row, list(each.drafts))]
        where = bits.ctypes.data, bits.strides[0], len(bits)
        executor.unsafe_compute_mask_ptr_with_draft_token(drafted, *where)
    else:
        row = bits.ctypes.data + run.row * bits.strides[0]
        each.matcher.unsafe_compute_mask_ptr(row, bits.strides[0])


def _allowed(run: _Run) -> TokenMask:
    at, bits = 0, run.bits
    for _, each in run.wanted:
        _edit(bits[at : at + each.rows], each, run.ends)
        at += each.rows
    rows = [first + n for first, each in run.wanted for n in range(each.rows)]
    tokens = np.unpackbits(bits.view(np.uint8), axis=1, count=run.width, bitorder="little")
    return TokenMask(rows, torch.from_numpy(tokens.view(np.bool_)))


def _edit(bits: Bits, each: MaskRequest, ends: Sequence[int]) -> None:
    if each.only is not None:
        bits[:] = 0
    for token in (each.only, each.also):
        if token is not None:
            bits[0, token // 32] |= BIT[token % 32]
    for end in ends if each.no_end else ():
        bits[:, end // 32] &= ~BIT[end % 32]


@dataclass(slots=True)
class Begun:
    masks: Masks
    run: _Run

    def result(self) -> TokenMask:
        """Waits for no mask longer than PATIENCE_S, also counted from before this call."""
        patience_s = PATIENCE_S
        while not self.run.done.wait(max(0.01, patience_s - self.masks.spent_s(self.run))):
            rest = self.masks.give_up(self.run, patience_s)
            patience_s = patience_s if rest is self.run else max(LEAST_S, patience_s / 2)
            self.run = rest
        if self.run.error is not None:
            raise self.run.error
        assert self.run.allowed is not None
        return self.run.allowed
