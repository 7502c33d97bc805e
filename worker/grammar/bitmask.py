"""The masks of a step's rows: the tokens that grammars allow, computed while the model runs.

    PendingMask of each row → start → a thread: llguidance, without the GIL → token_mask

A step waits for its masks for MAX_WAIT_S. Outputs of a grammar that is not ready then get no token,
and sit out the steps until it is: the copies of a grammar share a lock. A step does not wait for a
grammar whose last mask was late. The CPU time of late masks counts as the grammar's.
"""

import sys
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

import numpy as np
import torch
from llguidance import LLExecutor, LLMatcher
from numpy.typing import NDArray

from worker.cores import unpin
from worker.grammar.compiler import MAX_CPU_S, Grammar
from worker.model.sampler import TokenMask

Bits = NDArray[np.int32]  # [rows, words], one bit per token
BIT = np.left_shift(np.uint32(1), np.arange(32, dtype=np.uint32)).view(np.int32)
MAX_WAIT_S = 0.05  # of a step for its masks, from their start
MAX_THREADS = 4  # one computes the masks of a step; each late one keeps its own


class BitmaskComputer:
    def __init__(self, vocab_size: int, stop_token_ids: Sequence[int]) -> None:
        self.vocab_size, self.stop_token_ids = vocab_size, stop_token_ids
        self.executor = LLExecutor(1)
        self._threads = ThreadPoolExecutor(MAX_THREADS, "masks", unpin)
        self._queue: list[PendingMask] = []
        self._computing: set[Grammar | None] = set()
        self._lock = threading.Lock()  # of the queue, and of which masks have begun
        self._started_at = 0.0

    def start(self, masks: Sequence["PendingMask"]) -> None:
        """Compute masks without a matcher; then, in a thread, the others that none has begun in
        this order, those of slow grammars last. Others that wait are dropped."""
        for mask in masks:
            if mask.matcher is None and mask.thread is None:
                mask.begin()
                mask.compute(self)
        self._started_at = time.monotonic()
        with self._lock:
            waiting = (mask for mask in masks if mask.thread is None)
            self._queue = sorted(waiting, key=lambda mask: mask.is_slow)
        if self._queue:
            self._threads.submit(self._work)

    def wait(self, masks: Iterable["PendingMask"]) -> None:
        """Wait for masks, but for those of slow grammars, until MAX_WAIT_S after their start."""
        in_time = [mask.outcome for mask in masks if not mask.is_slow]
        wait(in_time, max(0.0, self._started_at + MAX_WAIT_S - time.monotonic()))

    def wait_for_one(self, masks: Iterable["PendingMask"]) -> None:
        """Wait until a mask is ready, at most MAX_WAIT_S."""
        late = [mask.outcome for mask in masks if not mask.outcome.done()]
        wait(late, MAX_WAIT_S, FIRST_COMPLETED)

    def token_mask(self, masks: Sequence[tuple[int, int, "PendingMask"]]) -> TokenMask:
        """Return masks that are ready, each with the first of its rows and their number."""
        rows = [row + n for row, count, _ in masks for n in range(count)]
        bits = np.concatenate([mask.outcome.result()[:count] for _, count, mask in masks])
        tokens = np.unpackbits(
            bits.view(np.uint8), axis=1, count=self.vocab_size, bitorder="little"
        )
        return TokenMask(rows, torch.from_numpy(tokens.view(np.bool_)))

    # ── in the threads ──

    def _work(self) -> None:
        while mask := self._next():
            mask.compute(self)
            with self._lock:
                self._computing.discard(mask.grammar)

    def _next(self) -> "PendingMask | None":
        """Return the next mask of a grammar that no other thread computes one of."""
        with self._lock:
            free = (mask for mask in self._queue if mask.grammar not in self._computing)
            if mask := next(free, None):
                self._queue.remove(mask)
                self._computing.add(mask.grammar)
                mask.begin()
            return mask


@dataclass(slots=True, eq=False)
class PendingMask:
    """The masks of one output: of its next token, and of those after each draft. The output stays
    as it is until they are computed."""

    matcher: LLMatcher | None = None  # None: all tokens are allowed
    drafts: tuple[int, ...] = ()
    extra_token: int | None = None  # allowed too, in the first row
    forced_token: int | None = None  # the only token that is allowed
    forbids_stop: bool = False  # stop tokens are not allowed
    grammar: Grammar | None = None  # of which the matcher is a copy
    outcome: Future[Bits] = field(default_factory=Future, init=False)
    # that computes them; None: none has begun
    thread: threading.Thread | None = field(default=None, init=False)
    begun_s: float = field(default=0.0, init=False)  # CPU time of the thread when it began

    @property
    def is_slow(self) -> bool:
        """Whether the last mask of its grammar was late."""
        return self.grammar is not None and self.grammar.is_slow

    @property
    def is_too_slow(self) -> bool:
        """Whether its grammar has taken all of its CPU time, what runs now included."""
        grammar, thread = self.grammar, self.thread
        if grammar is None:
            return False
        running_s = cpu_s(thread) - self.begun_s if thread and not self.outcome.done() else 0.0
        grammar.too_slow |= grammar.cpu_s + running_s > MAX_CPU_S
        return grammar.too_slow

    # ── in a thread ──

    def begin(self) -> None:
        thread = threading.current_thread()
        self.begun_s, self.thread = cpu_s(thread), thread

    def compute(self, computer: BitmaskComputer) -> None:
        try:
            bits = self._bits(computer)
        except BaseException as error:  # `token_mask` raises it
            self.outcome.set_exception(error)
            return
        if grammar := self.grammar:
            spent_s = cpu_s(threading.current_thread()) - self.begun_s
            grammar.is_slow = spent_s > MAX_WAIT_S
            grammar.cpu_s += spent_s if grammar.is_slow else 0.0
        self.outcome.set_result(bits)

    def _bits(self, computer: BitmaskComputer) -> Bits:
        words = (computer.vocab_size + 31) // 32
        bits: Bits = np.full((1 + len(self.drafts), words), -1, np.int32)
        pointer, stride = bits.ctypes.data, bits.strides[0]
        if self.matcher and self.drafts:
            drafted = [(self.matcher, 0, list(self.drafts))]
            computer.executor.unsafe_compute_mask_ptr_with_draft_token(
                drafted, pointer, stride, len(bits)
            )
        elif self.matcher:
            self.matcher.unsafe_compute_mask_ptr(pointer, stride)
        if self.forced_token is not None:
            bits[:] = 0
        for allowed in (self.forced_token, self.extra_token):
            if allowed is not None:
                bits[0, allowed // 32] |= BIT[allowed % 32]
        for token in computer.stop_token_ids if self.forbids_stop else ():
            bits[:, token // 32] &= ~BIT[token % 32]
        return bits


def cpu_s(thread: threading.Thread) -> float:
    """Return the CPU time of a running thread; monotonic time where the system has none."""
    if sys.platform == "linux" and thread.ident is not None:
        return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
    return time.monotonic()
