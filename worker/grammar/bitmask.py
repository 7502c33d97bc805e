"""The masks of a step's rows: the tokens that grammars allow, computed while the model runs.

    requests of the rows → PendingMask → start → a thread: llguidance, without the GIL → token_mask

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


@dataclass(frozen=True, slots=True)
class MaskRequest:
    """The masks of one output: of its next token, and of those after each draft."""

    matcher: LLMatcher | None = None  # None: all tokens are allowed
    drafts: tuple[int, ...] = ()
    extra_token: int | None = None  # allowed too, in the first row
    forced_token: int | None = None  # the only token that is allowed
    forbids_stop: bool = False  # stop tokens are not allowed
    grammar: Grammar | None = None  # of which the matcher is a copy


class BitmaskComputer:
    def __init__(self, vocab_size: int, stop_token_ids: Sequence[int]) -> None:
        self.vocab_size, self.stop_token_ids = vocab_size, stop_token_ids
        self.executor = LLExecutor(1)
        self._threads = ThreadPoolExecutor(MAX_THREADS, "masks", unpin)
        self._queue: list[PendingMask] = []
        self._computing: set[Grammar | None] = set()
        self._lock = threading.Lock()  # of the queue, and of which masks have begun
        self._started_at = 0.0

    def pending(self, request: MaskRequest) -> "PendingMask":
        return PendingMask(self, request)

    def start(self, masks: Iterable["PendingMask"]) -> None:
        """Compute the masks that no thread has begun in this order, those of slow grammars last.
        Others that wait are dropped."""
        self._started_at = time.monotonic()
        with self._lock:
            waiting = (mask for mask in masks if mask.thread is None)
            self._queue = sorted(waiting, key=lambda mask: mask.is_slow)
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
            mask.compute()
            with self._lock:
                self._computing.discard(mask.request.grammar)

    def _next(self) -> "PendingMask | None":
        """Return the next mask of a grammar that no other thread computes one of."""
        with self._lock:
            free = (m for m in self._queue if m.request.grammar not in self._computing)
            if mask := next(free, None):
                self._queue.remove(mask)
                self._computing.add(mask.request.grammar)
                mask.begin()
            return mask


@dataclass(slots=True, eq=False)
class PendingMask:
    """The masks of one output, which stays as it is until they are computed."""

    computer: BitmaskComputer
    request: MaskRequest
    outcome: Future[Bits] = field(default_factory=Future)
    thread: threading.Thread | None = None  # that computes them; None: none has begun
    begun_s: float = 0.0  # CPU time of the thread when it began

    def __post_init__(self) -> None:
        if self.request.matcher is None:
            self.begin()
            self.compute()

    @property
    def is_slow(self) -> bool:
        """Whether the last mask of its grammar was late."""
        return self.request.grammar is not None and self.request.grammar.is_slow

    @property
    def is_too_slow(self) -> bool:
        """Whether its grammar has taken all of its CPU time, what runs now included."""
        grammar, thread = self.request.grammar, self.thread
        if grammar is None:
            return False
        running_s = cpu_s(thread) - self.begun_s if thread and not self.outcome.done() else 0.0
        grammar.too_slow |= grammar.cpu_s + running_s > MAX_CPU_S
        return grammar.too_slow

    # ── in a thread ──

    def begin(self) -> None:
        thread = threading.current_thread()
        self.begun_s, self.thread = cpu_s(thread), thread

    def compute(self) -> None:
        try:
            bits = self._bits()
        except BaseException as error:  # `token_mask` raises it
            self.outcome.set_exception(error)
            return
        if grammar := self.request.grammar:
            spent_s = cpu_s(threading.current_thread()) - self.begun_s
            grammar.is_slow = spent_s > MAX_WAIT_S
            grammar.cpu_s += spent_s if grammar.is_slow else 0.0
        self.outcome.set_result(bits)

    def _bits(self) -> Bits:
        request, computer = self.request, self.computer
        words = (computer.vocab_size + 31) // 32
        bits: Bits = np.full((1 + len(request.drafts), words), -1, np.int32)
        pointer, stride = bits.ctypes.data, bits.strides[0]
        if request.matcher and request.drafts:
            drafted = [(request.matcher, 0, list(request.drafts))]
            computer.executor.unsafe_compute_mask_ptr_with_draft_token(
                drafted, pointer, stride, len(bits)
            )
        elif request.matcher:
            request.matcher.unsafe_compute_mask_ptr(pointer, stride)
        if request.forced_token is not None:
            bits[:] = 0
        for allowed in (request.forced_token, request.extra_token):
            if allowed is not None:
                bits[0, allowed // 32] |= BIT[allowed % 32]
        for token in computer.stop_token_ids if request.forbids_stop else ():
            bits[:, token // 32] &= ~BIT[token % 32]
        return bits


def cpu_s(thread: threading.Thread) -> float:
    """Return the CPU time of a running thread; monotonic time where the system has none."""
    if sys.platform == "linux" and thread.ident is not None:
        return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
    return time.monotonic()
