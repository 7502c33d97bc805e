"""Search for the batch limits that hold the highest rate within a percentile.

    for each cap: its throughput → bisect the rates below it → the best cap
    → the best wait at its rate → a longer stage at a lower rate, as a margin

Pure: a `Measure` (stages.py) runs the stages. Rates are requests per second.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

CAPS = (256, 64, 32, 16, 8, 4, 1)  # largest first: smaller ones that cannot be better are skipped
WAITS_MS = (1.0, 0.0, 5.0)  # the default first: another must be clearly better
BISECTIONS = 4
MARGIN = 0.9  # share of the best rate to recommend; also of the p95 that another wait must beat
BACK_OFF = 0.85
MAX_CONFIRMATIONS = 8


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
    """Find the highest rate whose 95th percentile stays within `limit_ms`."""

    measure: Measure
    limit_ms: float
    seconds: float  # per stage
    caps: Sequence[int] = CAPS
    waits_ms: Sequence[float] = WAITS_MS
    on_stage: Callable[[Stage], None] = lambda stage: None
    stages: list[Stage] = field(default_factory=list)

    async def run(self) -> Stage | None:
        """Return the stage that confirmed the best limits; None if no rate holds the percentile."""
        best: Stage | None = None
        for cap in sorted(self.caps, reverse=True):
            best = await self._best_rate(BatchLimits(cap), best)
        if best is None:
            return None
        return await self._confirm(await self._best_wait(best))

    async def _stage(self, limits: BatchLimits, rate: float, seconds: float) -> Stage:
        stage = await self.measure(limits, rate, seconds)
        self.stages.append(stage)
        self.on_stage(stage)
        return stage

    async def _best_rate(self, limits: BatchLimits, best: Stage | None) -> Stage | None:
        """Return the better one of `best` and the best stage with these limits."""
        ceiling = (await self._stage(limits, 0, self.seconds)).served
        low, high = best.rate if best else 0.0, ceiling
        if high < low * 1.05:
            return best
        for _ in range(BISECTIONS):
            rate = (low + high) / 2
            stage = await self._stage(limits, rate, self.seconds)
            if stage.holds(self.limit_ms):
                low, best = rate, stage
            else:
                high = rate
        return best

    async def _best_wait(self, best: Stage) -> Stage:
        for wait_ms in self.waits_ms:
            if wait_ms != best.limits.wait_ms:
                limits = BatchLimits(best.limits.cap, wait_ms)
                stage = await self._stage(limits, best.rate, self.seconds)
                if stage.holds(self.limit_ms) and stage.p95_ms < MARGIN * best.p95_ms:
                    best = stage
        return best

    async def _confirm(self, best: Stage) -> Stage | None:
        """Return a longer stage that holds the percentile with a margin."""
        rate = best.rate * MARGIN
        for _ in range(MAX_CONFIRMATIONS):
            stage = await self._stage(best.limits, rate, 4 * self.seconds)
            if stage.holds(MARGIN * self.limit_ms):
                return stage
            rate *= BACK_OFF
        return None
