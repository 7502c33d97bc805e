"""The masks of a step's rows: the tokens that grammars allow, computed while the model runs.

    requests of the rows → start → a thread: llguidance, without the GIL → result: TokenMask

After MAX_MASKS_S in a step no other mask is started: those are deferred, and their outputs get no
token in this step. A grammar whose mask is late is abandoned, together with the thread that
computes it; another thread computes the masks of the other rows.
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
from worker.cores import unpin
from worker.grammar.compiler import Grammar
from worker.model.sampler import TokenMask

Bits = NDArray[np.int32]  # [rows, words], one bit per token
BIT = np.left_shift(np.uint32(1), np.arange(32, dtype=np.uint32)).view(np.int32)
# CPU time for one mask: wall time on a busy machine does not show a slow grammar. Halved after
# each late mask, so that a step waits for about a second in all.
MAX_MASK_S = 0.5
MIN_MASK_S = 0.125
MAX_STUCK_THREADS = 4
MAX_MASKS_S = 0.1  # CPU time of a step's masks after which no other one is started


@dataclass(frozen=True, slots=True)
class MaskRequest:
    """The masks of one output: of its next token, and of those after each draft."""

    matcher: LLMatcher | None = None  # None: all tokens are allowed
    drafts: tuple[int, ...] = ()
    extra_token: int | None = None  # allowed too, in the first row
    forced_token: int | None = None  # the only token that is allowed
    forbids_stop: bool = False  # stop tokens are not allowed
    grammar: Grammar | None = None  # of which the matcher is a copy

    @property
    def rows(self) -> int:
        return 1 + len(self.drafts)


class BitmaskComputer:
    def __init__(self, vocab_size: int, stop_token_ids: Sequence[int]) -> None:
        self.vocab_size, self.stop_token_ids = vocab_size, stop_token_ids
        self._queue: queue.SimpleQueue[PendingMask | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._stuck: list[threading.Thread] = []

    def start(self, requests: Sequence[tuple[int, MaskRequest]]) -> "PendingMask | None":
        """Start computing masks. `requests`: each with the row of its output's next token; the rows
        of its drafts follow. ItemFailed if too many threads are stuck."""
        if not requests:
            return None
        self._stuck = [thread for thread in self._stuck if thread.is_alive()]
        if len(self._stuck) >= MAX_STUCK_THREADS and any(
            request.matcher for _, request in requests
        ):
            raise ItemFailed("constrained decoding is temporarily unavailable: grammars are stuck")
        starts = [0, *accumulate(request.rows for _, request in requests)]
        bits: Bits = np.full((starts[-1], (self.vocab_size + 31) // 32), -1, np.int32)
        pending = PendingMask(self, requests, starts, bits)
        self.enqueue(pending)
        return pending

    def enqueue(self, pending: "PendingMask") -> None:
        if self._thread is None:
            masks: queue.SimpleQueue[PendingMask | None] = queue.SimpleQueue()
            args = masks, LLExecutor(1)
            thread = threading.Thread(target=_work, args=args, name="masks", daemon=True)
            thread.start()  # if it raises, the next step tries again
            self._thread, self._queue = thread, masks
            weakref.finalize(self, masks.put, None)
        self._queue.put(pending)

    def abandon_thread(self) -> None:
        """Leave the stuck thread; the next mask starts another."""
        if self._thread:
            self._stuck.append(self._thread)
        self._thread = None


@dataclass(slots=True, eq=False)
class PendingMask:
    """A step's masks that are being computed. Rows without a matcher allow all tokens."""

    computer: BitmaskComputer
    requests: Sequence[tuple[int, MaskRequest]]
    starts: Sequence[int]  # the first row of bits of each request
    bits: Bits
    current: int = 0  # index of the request that is being computed
    times_s: list[float] = field(default_factory=list)  # CPU time of each computed mask
    deferred: int = 0  # requests at the end that have no mask
    since: float | None = None  # the thread's CPU time when it started the current one
    thread: threading.Thread | None = None  # that computes; results of others are dropped
    outcome: Future[TokenMask] = field(default_factory=Future)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def result(self) -> TokenMask:
        """Wait for the masks, at most MAX_MASK_S for each, counted from its start."""
        limit_s = MAX_MASK_S
        while not wait([self.outcome], max(0.01, limit_s - self._spent_s())).done:
            if self._abandon_late(limit_s):
                limit_s = max(MIN_MASK_S, limit_s / 2)
        return self.outcome.result()

    def _spent_s(self) -> float:
        """CPU time spent on the current mask."""
        thread, since = self.thread, self.since
        return 0.0 if since is None or thread is None else cpu_s(thread) - since

    def _abandon_late(self, limit_s: float) -> bool:
        """Skip the current mask if it is late, and compute the others in another thread. Outputs
        with its grammar fail."""
        with self.lock:
            late = self._spent_s() >= limit_s
            if self.outcome.done() or self.current == len(self.requests) or not late:
                return False
            if grammar := self.requests[self.current][1].grammar:
                grammar.too_slow = True
            self.thread, self.current, self.since = None, self.current + 1, None
            self.times_s.append(0.0)
        self.computer.abandon_thread()
        self.computer.enqueue(self)
        return True

    # ── in the thread ──

    def compute(self, executor: LLExecutor) -> bool:
        """Return False if another thread has taken over."""
        this = self.thread = threading.current_thread()
        try:
            while self.current < len(self.requests):
                started_s = self.since = cpu_s(this)
                self._compute_one(executor)
                with self.lock:
                    if self.thread is not this:
                        return False
                    self.times_s.append(cpu_s(this) - started_s)
                    self.current, self.since = self.current + 1, None
                    if sum(self.times_s) >= MAX_MASKS_S:
                        self.deferred = len(self.requests) - self.current
                        break
            self.outcome.set_result(self._token_mask())
        except BaseException as error:  # `result` raises it
            with self.lock:
                if self.thread is not this:
                    return False
                self.outcome.set_exception(error)
        return True

    def _compute_one(self, executor: LLExecutor) -> None:
        request, row = self.requests[self.current][1], self.starts[self.current]
        if request.matcher is None or (request.grammar and request.grammar.too_slow):
            return
        pointer, stride = self.bits.ctypes.data, self.bits.strides[0]
        if request.drafts:
            drafted = [(request.matcher, row, list(request.drafts))]
            executor.unsafe_compute_mask_ptr_with_draft_token(
                drafted, pointer, stride, len(self.bits)
            )
        else:
            request.matcher.unsafe_compute_mask_ptr(pointer + row * stride, stride)

    def _token_mask(self) -> TokenMask:
        rows: list[int] = []
        for (row, request), start in zip(self.requests, self.starts, strict=False):
            rows += range(row, row + request.rows)
            bits = self.bits[start : start + request.rows]
            if request.forced_token is not None:
                bits[:] = 0
            for allowed in (request.forced_token, request.extra_token):
                if allowed is not None:
                    bits[0, allowed // 32] |= BIT[allowed % 32]
            for token in self.computer.stop_token_ids if request.forbids_stop else ():
                bits[:, token // 32] &= ~BIT[token % 32]
        flat, vocab_size = self.bits.view(np.uint8), self.computer.vocab_size
        tokens = np.unpackbits(flat, axis=1, count=vocab_size, bitorder="little")
        return TokenMask(rows, torch.from_numpy(tokens.view(np.bool_)))


def _work(masks: "queue.SimpleQueue[PendingMask | None]", executor: LLExecutor) -> None:
    unpin()
    while (pending := masks.get()) is not None and pending.compute(executor):
        del pending  # it refers to the computer, whose finalizer ends this thread


def cpu_s(thread: threading.Thread) -> float:
    """Return the CPU time of a running thread; monotonic time where the system has none."""
    if sys.platform == "linux" and thread.ident is not None:
        return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
    return time.monotonic()
