"""Search for the batch limits that hold the highest rate within a percentile.

    for each cap: its throughput → bisect the rates below it → the best cap
    → the best wait at its rate → a longer stage at a lower rate, as a margin

A search that has not much time left ends with the longer stage. One that is cancelled leaves the
best stage so far. Pure: a `Measure` (stages.py) runs the stages. Rates are requests per second.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

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


class Measure(Protocol):
    async def __call__(self, limits: BatchLimits, rate: float, seconds: float) -> Stage: ...


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
    on_stage: Callable[[Stage], object] = lambda stage: None
    ends_at: float = math.inf
    clock: Callable[[], float] = time.monotonic
    stages: list[Stage] = field(default_factory=list)
    best: Stage | None = None
    is_confirmed: bool = False

    @property
    def max_stages(self) -> int:
        """How many stages a search has at most, up to the first longer one, which counts for
        CONFIRMATION_STAGES."""
        stages = len(self.caps) * (1 + BISECTIONS) + len(self.waits_ms) - 1
        return stages + CONFIRMATION_STAGES

    async def run(self) -> Stage | None:
        """Return the best stage; None if no rate holds the percentile."""
        for cap in sorted(self.caps, reverse=True):
            await self._find_rate(BatchLimits(cap))
        if self.best is not None:
            await self._find_wait(self.best)
            await self._confirm(self.best)
        return self.best

    def _has_time(self, stages: int) -> bool:
        return self.clock() + stages * self.seconds <= self.ends_at

    async def _stage(self, limits: BatchLimits, rate: float, seconds: float) -> Stage:
        stage = await self.measure(limits, rate, seconds)
        self.stages.append(stage)
        self.on_stage(stage)
        return stage

    async def _find_rate(self, limits: BatchLimits) -> None:
        """Look for a better rate with these limits."""
        if not self._has_time(2 + CONFIRMATION_STAGES):
            return
        ceiling = (await self._stage(limits, 0, self.seconds)).served
        low, high = self.best.rate if self.best else 0.0, ceiling
        if high < low * 1.05:
            return
        for _ in range(BISECTIONS):
            if not self._has_time(1 + CONFIRMATION_STAGES):
                return
            rate = (low + high) / 2
            stage = await self._stage(limits, rate, self.seconds)
            if stage.holds(self.limit_ms):
                low, self.best = rate, stage
            else:
                high = rate

    async def _find_wait(self, best: Stage) -> None:
        for wait_ms in self.waits_ms:
            has_time = self._has_time(1 + CONFIRMATION_STAGES)
            if has_time and wait_ms != best.limits.wait_ms:
                limits = BatchLimits(best.limits.cap, wait_ms)
                stage = await self._stage(limits, best.rate, self.seconds)
                if stage.holds(self.limit_ms) and stage.p95_ms < MARGIN * best.p95_ms:
                    self.best = best = stage

    async def _confirm(self, best: Stage) -> None:
        """Replace the best stage by a longer one that holds the percentile with a margin. If none
        does, there is no best one."""
        rate = best.rate * MARGIN
        for _ in range(MAX_CONFIRMATIONS):
            if not self._has_time(CONFIRMATION_STAGES):
                return
            stage = await self._stage(best.limits, rate, CONFIRMATION_STAGES * self.seconds)
            if stage.holds(MARGIN * self.limit_ms):
                self.best, self.is_confirmed = stage, True
                return
            rate *= BACK_OFF
        self.best = None
