"""Search for the batch limits that hold the highest rate within a percentile.

    for each cap: its throughput → bisect the rates below it → the best cap
    → the best wait at its rate → a longer stage at a lower rate, as a margin

A search that has not much time left ends with the longer stage. One that is cancelled leaves the
best stage so far. Pure: a `Measure` runs the stages. Rates are requests per second.
"""

import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

CAPS = (256, 64, 32, 16, 8, 4, 1)  # largest first: smaller ones that cannot be better are skipped
WAITS_MS = (1.0, 0.0, 5.0)  # the default first: another must be clearly better
BISECTIONS = 4
MARGIN = 0.9  # share of the best rate to recommend; also of the p95 that another wait must beat
BACK_OFF = 0.85
MAX_CONFIRMATIONS = 8
CONFIRMATION_STAGES = 4  # a stage that confirms lasts as long as so many others


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """`cap`: rows of a batch, or concurrent sequences of a language model."""

    cap: int
    wait_ms: float = WAITS_MS[0]


@dataclass(frozen=True, slots=True)
class Stage:
    """The measurements of one stage. Percentiles are in milliseconds."""

    limits: BatchLimits
    rate: float  # offered; 0 in a closed loop
    served: float  # 2xx responses per second
    p50_ms: float
    p95_ms: float
    failed: int  # responses other than 2xx

    def holds(self, limit_ms: float) -> bool:
        return not self.failed and self.p95_ms <= limit_ms


Measure: TypeAlias = Callable[[BatchLimits, float, float], Awaitable[Stage]]  # rate, seconds


@dataclass(eq=False)
class Search:
    """Find the highest rate whose 95th percentile stays within `limit_ms`.

    `best` is the best stage so far, with a margin once it `is_confirmed`. `ends_at` is a time of
    `clock`, which bounds the stages, but not responses that take longer."""

    measure: Measure
    limit_ms: float
    seconds: float  # per stage
    caps: Sequence[int] = CAPS
    waits_ms: Sequence[float] = WAITS_MS
    ends_at: float = math.inf
    clock: Callable[[], float] = time.monotonic
    best: Stage | None = None
    is_confirmed: bool = False

    @property
    def max_stages(self) -> int:
        """The most stages of a search; the first longer one counts for CONFIRMATION_STAGES."""
        stages = len(self.caps) * (1 + BISECTIONS) + len(self.waits_ms) - 1
        return stages + CONFIRMATION_STAGES

    async def run(self) -> Stage | None:
        """Return the best stage; None if no rate holds the percentile. Raises TimeoutError if there
        is no time for any stage."""
        if not self._has_time(2 + CONFIRMATION_STAGES):
            raise TimeoutError
        for cap in sorted(self.caps, reverse=True):
            await self._find_rate(BatchLimits(cap))
        if self.best is not None:
            await self._find_wait(self.best)
            await self._confirm(self.best)
        return self.best

    def _has_time(self, stages: int) -> bool:
        return self.clock() + stages * self.seconds <= self.ends_at

    async def _find_rate(self, limits: BatchLimits) -> None:
        """Look for a better rate with these limits."""
        if not self._has_time(2 + CONFIRMATION_STAGES):
            return
        high = (await self.measure(limits, 0, self.seconds)).served
        low = self.best.rate if self.best else 0.0
        for _ in range(BISECTIONS if high >= low * 1.05 else 0):
            if not self._has_time(1 + CONFIRMATION_STAGES):
                return
            stage = await self.measure(limits, (low + high) / 2, self.seconds)
            if stage.holds(self.limit_ms):
                low, self.best = stage.rate, stage
            else:
                high = stage.rate

    async def _find_wait(self, best: Stage) -> None:
        for wait_ms in self.waits_ms:
            has_time = self._has_time(1 + CONFIRMATION_STAGES)
            if has_time and wait_ms != best.limits.wait_ms:
                limits = BatchLimits(best.limits.cap, wait_ms)
                stage = await self.measure(limits, best.rate, self.seconds)
                if stage.holds(self.limit_ms) and stage.p95_ms < MARGIN * best.p95_ms:
                    self.best = best = stage

    async def _confirm(self, best: Stage) -> None:
        """Replace the best stage by a longer one that holds the percentile with a margin. If none
        does, there is no best one."""
        rate = best.rate * MARGIN
        for _ in range(MAX_CONFIRMATIONS):
            if not self._has_time(CONFIRMATION_STAGES):
                return
            stage = await self.measure(best.limits, rate, CONFIRMATION_STAGES * self.seconds)
            if stage.holds(MARGIN * self.limit_ms):
                self.best, self.is_confirmed = stage, True
                return
            rate *= BACK_OFF
        self.best = None
