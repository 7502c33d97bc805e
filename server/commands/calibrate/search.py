"""The search for settings: which rate holds a percentile, and with which knobs.

    for each cap: its throughput → rates below it, halving the doubt → the best cap
    → the wait that is best at its rate → a longer stage at a rate with room to spare

Pure: what a stage is like is measured by whom it is given (load.py). Rates are requests a second.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

CAPS = (256, 64, 32, 16, 8, 4, 1)  # from the largest: what cannot be better is left out
WAITS_MS = (1.0, 0.0, 5.0)  # the default first: others must be better than it
HALVINGS = 4
ROOM = 0.9  # of the best rate: another day is not the same
BACK_OFF = 0.85
TRIES = 8


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """`cap`: rows of a batch, or sequences that run at a time."""

    cap: int
    wait_ms: float = WAITS_MS[0]


@dataclass(frozen=True, slots=True)
class Stage:
    """What one stage was like. Percentiles in milliseconds."""

    knobs: BatchLimits
    rate: float  # that was offered; 0: as many clients as the cap, each with one request
    served: float  # answers a second
    p50_ms: float
    p95_ms: float
    failed: int  # answers other than 2xx

    def holds(self, limit_ms: float) -> bool:
        return not self.failed and self.p95_ms <= limit_ms


class Measure(Protocol):
    async def __call__(self, knobs: BatchLimits, rate: float, seconds: float) -> Stage: ...


@dataclass(eq=False)
class Search:
    """Finds the highest rate whose 95th percentile stays within `limit_ms`."""

    measure: Measure
    limit_ms: float
    seconds: float  # of a stage
    caps: Sequence[int] = CAPS
    waits_ms: Sequence[float] = WAITS_MS
    tell: Callable[[Stage], None] = lambda stage: None
    stages: list[Stage] = field(default_factory=list)

    async def run(self) -> Stage | None:
        """The stage that stands for what was found; None if no rate holds the percentile."""
        best: Stage | None = None
        for cap in sorted(self.caps, reverse=True):
            best = await self._best_rate(BatchLimits(cap), best)
        if best is None:
            return None
        return await self._confirm(await self._best_wait(best))

    async def _stage(self, knobs: BatchLimits, rate: float, seconds: float) -> Stage:
        stage = await self.measure(knobs, rate, seconds)
        self.stages.append(stage)
        self.tell(stage)
        return stage

    async def _best_rate(self, knobs: BatchLimits, best: Stage | None) -> Stage | None:
        """The better of `best` and what these knobs hold."""
        ceiling = (await self._stage(knobs, 0, self.seconds)).served
        low, high = best.rate if best else 0.0, ceiling
        if high < low * 1.05:
            return best
        for _ in range(HALVINGS):
            rate = (low + high) / 2
            stage = await self._stage(knobs, rate, self.seconds)
            if stage.holds(self.limit_ms):
                low, best = rate, stage
            else:
                high = rate
        return best

    async def _best_wait(self, best: Stage) -> Stage:
        for wait_ms in self.waits_ms:
            if wait_ms != best.knobs.wait_ms:
                knobs = BatchLimits(best.knobs.cap, wait_ms)
                stage = await self._stage(knobs, best.rate, self.seconds)
                if stage.holds(self.limit_ms) and stage.p95_ms < ROOM * best.p95_ms:
                    best = stage
        return best

    async def _confirm(self, best: Stage) -> Stage | None:
        rate = best.rate * ROOM
        for _ in range(TRIES):
            stage = await self._stage(best.knobs, rate, 4 * self.seconds)
            if stage.holds(ROOM * self.limit_ms):
                return stage
            rate *= BACK_OFF
        return None
