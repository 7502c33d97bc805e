"""Which tokens the rows of a step allow, computed while the model runs.

The bits come from llguidance, in a thread of their own that holds no lock of Python's meanwhile.
A grammar whose mask is not there in time is given up on, with the thread that is at it; another
thread goes on with the rows of the others.
"""

import queue
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import torch
from llguidance import LLExecutor, LLMatcher
from numpy.typing import NDArray

from batching.errors import ItemFailed
from worker.cores import release
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


class BitmaskComputer:
    """`width`: of the model's output. `ends`: the tokens that end a sequence."""

    def __init__(self, width: int, ends: Sequence[int]) -> None:
        self.width, self.ends = width, ends
        self._queue: queue.SimpleQueue[PendingMask | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._stuck: list[threading.Thread] = []

    def begin(self, requests: Sequence[tuple[int, MaskRequest]]) -> "PendingMask | None":
        """For choices by the row that each is at; their drafts' rows follow."""
        if not requests:
            return None
        self._stuck = [thread for thread in self._stuck if thread.is_alive()]
        if len(self._stuck) >= MOST_STUCK and any(each.matcher for _, each in requests):
            raise ItemFailed("answers cannot be held to grammars now: some take all the time")
        starts = [0, *accumulate(each.rows for _, each in requests)]
        bits: Bits = np.full((starts[-1], (self.width + 31) // 32), -1, np.int32)
        pending = PendingMask(self, requests, starts, bits)
        self.put(pending)
        return pending

    def put(self, pending: "PendingMask") -> None:
        if self._thread is None:
            todo: queue.SimpleQueue[PendingMask | None] = queue.SimpleQueue()
            work = todo, LLExecutor(1)
            thread = threading.Thread(target=_work, args=work, name="masks", daemon=True)
            thread.start()  # or it raises, and is tried again with the next step
            self._thread, self._queue = thread, todo
            weakref.finalize(self, todo.put, None)
        self._queue.put(pending)

    def leave_thread(self) -> None:
        """It is stuck in a mask; what comes next is another's."""
        if self._thread:
            self._stuck.append(self._thread)
        self._thread = None


@dataclass(slots=True, eq=False)
class PendingMask:
    """A step's masks on their way. Rows without a matcher allow everything."""

    masks: BitmaskComputer
    requests: Sequence[tuple[int, MaskRequest]]
    starts: Sequence[int]  # rows of bits where each request's begin
    bits: Bits
    at: int = 0  # the request that is being computed
    since: float | None = None  # its thread's CPU time when it was begun; None: it has not been
    thread: threading.Thread | None = None  # that computes; another's work does not count
    outcome: Future[TokenMask] = field(default_factory=Future)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def result(self) -> TokenMask:
        """Waits for no mask longer than PATIENCE_S, also counted from before this call."""
        patience_s = PATIENCE_S
        while not wait([self.outcome], max(0.01, patience_s - self._spent_s())).done:
            if self._give_up(patience_s):
                patience_s = max(LEAST_S, patience_s / 2)
        return self.outcome.result()

    def _spent_s(self) -> float:
        """On the mask that is being computed."""
        thread, since = self.thread, self.since
        return 0.0 if since is None or thread is None else cpu_s(thread) - since

    def _give_up(self, patience_s: float) -> bool:
        """If the current mask is late, the others are computed without it. Its grammar's
        `slow` fails whoever follows it."""
        with self.lock:
            late = self._spent_s() >= patience_s
            if self.outcome.done() or self.at == len(self.requests) or not late:
                return False
            if grammar := self.requests[self.at][1].grammar:
                grammar.slow = True
            self.thread, self.at, self.since = None, self.at + 1, None
        self.masks.leave_thread()
        self.masks.put(self)
        return True

    # ── in the thread ──

    def compute(self, executor: LLExecutor) -> bool:
        """False: it took too long, another thread has taken over."""
        this = self.thread = threading.current_thread()
        try:
            while self.at < len(self.requests):
                self.since = cpu_s(this)
                self._compute_one(executor)
                with self.lock:
                    if self.thread is not this:
                        return False
                    self.at, self.since = self.at + 1, None
            self.outcome.set_result(self._edited())
        except BaseException as error:  # raised where the mask is waited for
            with self.lock:
                if self.thread is not this:
                    return False
                self.outcome.set_exception(error)
        return True

    def _compute_one(self, executor: LLExecutor) -> None:
        request, row = self.requests[self.at][1], self.starts[self.at]
        if request.matcher is None or (request.grammar and request.grammar.slow):
            return
        pointer, stride = self.bits.ctypes.data, self.bits.strides[0]
        if request.drafts:
            drafted = [(request.matcher, row, list(request.drafts))]
            executor.unsafe_compute_mask_ptr_with_draft_token(
                drafted, pointer, stride, len(self.bits)
            )
        else:
            request.matcher.unsafe_compute_mask_ptr(pointer + row * stride, stride)

    def _edited(self) -> TokenMask:
        rows: list[int] = []
        for (row, request), start in zip(self.requests, self.starts, strict=False):
            rows += range(row, row + request.rows)
            bits = self.bits[start : start + request.rows]
            if request.only is not None:
                bits[:] = 0
            for token in (request.only, request.also):
                if token is not None:
                    bits[0, token // 32] |= BIT[token % 32]
            for end in self.masks.ends if request.no_end else ():
                bits[:, end // 32] &= ~BIT[end % 32]
        flat, width = self.bits.view(np.uint8), self.masks.width
        tokens = np.unpackbits(flat, axis=1, count=width, bitorder="little")
        return TokenMask(rows, torch.from_numpy(tokens.view(np.bool_)))


def _work(todo: "queue.SimpleQueue[PendingMask | None]", executor: LLExecutor) -> None:
    release()
    while (pending := todo.get()) is not None and pending.compute(executor):
        del pending  # or the thread would keep alive whoever is to end it


def cpu_s(thread: threading.Thread) -> float:
    """That a running thread has used; the time of day where the system does not tell."""
    if sys.platform == "linux" and thread.ident is not None:
        return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
    return time.monotonic()
