"""The registry of models: each is an entry with a name, and shares nothing but the thread.

    name · state · lane (rate, share of the places) · breaker · batcher or generation engine

There are two kinds of entries: pipelines, which are served in batches, and models that are served
in steps: language models and those of speech. Items are submitted to an entry and know it from then
on. Lanes belong to the event loop, which reads breakers; the rest, and the models themselves, to
the worker's thread.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from batching.batcher import DynamicBatcher
from batching.errors import OnequeueError, OutOfMemory, WrongResultCount
from batching.request_queue import BatchLane, StepLane, WorkItem
from batching.round_robin import RoundRobin
from worker.error_classification import run_halves
from worker.messages.protocol import (
    UNFINISHED,
    BatchReport,
    Generator,
    LoadedModel,
    Runner,
    State,
    Stepped,
)

log = logging.getLogger("onequeue.worker")

Outcome = tuple[WorkItem, Any]  # a raw output, an answer or an exception
M = TypeVar("M", bound=LoadedModel)
S = TypeVar("S", bound=Stepped)

# Of a language model's places, background work may take one in so many.
BACKGROUND = 4


class Breaker:
    """Closed until `threshold` failures in a row; then open until a probe, allowed after
    `cooldown_s`, succeeds. Who probes, and with what, is the worker's affair."""

    def __init__(self, threshold: int = 3, cooldown_s: float = 5.0) -> None:
        self.threshold = threshold
        self.cooldown_s = cooldown_s
        self.failures = 0
        self.probe_at: float | None = None  # monotonic seconds; None while closed

    @property
    def is_open(self) -> bool:
        return self.probe_at is not None

    def succeeded(self) -> None:
        self.failures = 0
        self.probe_at = None

    def failed(self, now: float) -> None:
        self.failures += 1
        if self.failures >= self.threshold:
            self.probe_at = now + self.cooldown_s


class ServedModel(Generic[M]):
    """What entries of both kinds have. `name` stands in metrics, logs and /ready."""

    loaded: M  # by the worker's thread, while the state is "loading"
    line: Any  # whose `add` takes its items: a batcher, or the engine that was loaded

    def __init__(self, name: str, load: Callable[[], M]) -> None:
        self.name = name
        self.state: State = "loading"
        self.breaker = Breaker()
        self.busy = False  # there is something to do: looked at before each turn
        self._load: Callable[[], M] = load

    def load(self) -> None:
        self.loaded = self._load()
        self.state, info = "warming", self.loaded.info
        log.info(
            "model loaded task=%s model=%s device=%s dtype=%s parameters=%d batching=%s%s",
            info.task, info.model, info.device, info.dtype, info.parameters,
            info.batching, f" because={info.why!r}" if info.why else "",
        )  # fmt: skip

    def close(self) -> None:
        """Nothing is prepared any longer. On the event loop."""


class SteppedModel(ServedModel[S]):
    """Served in steps, as speech is; its engine decides what waits and what runs."""

    def __init__(self, name: str, load: Callable[[], S], places: int) -> None:
        super().__init__(name, load)
        self.lane = StepLane(name, places)
        self.lanes = [self.lane]

    def load(self) -> None:
        super().load()
        self.line = self.loaded

    def close(self) -> None:
        if self.state != "loading":
            self.loaded.close()

    def clear(self) -> list[WorkItem]:
        """Drop everything, whatever state it is in; its items."""
        self.busy = False
        return self.loaded.clear()


class GenerationModel(SteppedModel[Generator]):
    """A language model. Background work has a lane of its own."""

    def __init__(self, name: str, load: Callable[[], Generator], places: int) -> None:
        super().__init__(name, load, places)
        self.background = StepLane("background", max(1, places // BACKGROUND))
        self.lanes.append(self.background)


@dataclass(slots=True)
class BatchRun:
    """What came of one batch, its halves included."""

    outputs: list[Outcome] = field(default_factory=list)
    failed: list[Outcome] = field(default_factory=list)
    forward_s: float = 0.0
    out_of_memory: int = 0
    fitted: int = 0  # rows of the largest part that went through


class PipelineModel(ServedModel[Runner]):
    """Served in batches."""

    def __init__(
        self,
        name: str,
        load: Callable[[], Runner],
        places: int,
        batcher: DynamicBatcher,
        turns: RoundRobin[WorkItem] | None = None,
    ) -> None:
        super().__init__(name, load)
        self.lane = BatchLane(name, places, turns)
        self.lanes = [self.lane]
        self.line = self.batcher = batcher
        self.batch: list[WorkItem] = []  # the one that runs
        self.unfinished: list[WorkItem] = []  # those of the last that go on with the next
        self._began = 0.0  # what the next report with an item in it is about

    def load(self) -> None:
        super().load()
        self.batcher.packs = self.loaded.info.batching in ("packed", "continuous")

    def clear(self) -> list[WorkItem]:
        """Drop everything, whatever state it is in; the items that have no output yet."""
        begun = [item for item in self.batch if not item.ran] or self.unfinished
        unanswered = begun + self.batcher.clear()
        self.batch, self.unfinished, self.busy = [], [], False
        return unanswered

    def due_at(self, free_since: float) -> float | None:
        """When the next batch should leave; None if nothing is to be done."""
        return free_since if self.unfinished else self.batcher.due_at(free_since)

    def take(self, now: float, free_since: float) -> list[WorkItem]:
        """The next batch, if one is due: whoever goes on, and whoever joins them."""
        self.batch = [item for item in self.unfinished if item.open]
        if not self.batch:
            self._began = now
        self.unfinished = []
        joining = self.batcher.take(now, free_since)
        self.batch += joining
        self.busy = bool(self.batcher.waiting)
        rows = sum(item.rows for item in joining)
        for item in joining:
            item.started_at = now
            item.batch_size = rows
        return self.batch

    def run(self, clock: Callable[[], float]) -> BatchRun:
        """The batch as one; a part that raises is halved until only the guilty fail."""
        run = BatchRun()

        def forward(items: Sequence[WorkItem]) -> None:
            rows, started = sum(item.rows for item in items), clock()
            outputs = self.loaded.forward([item.prepared for item in items])
            run.forward_s += clock() - started
            run.fitted = max(run.fitted, rows)
            self.batcher.succeeded(rows)
            if len(outputs) == len(items):
                run.outputs += zip(items, outputs, strict=True)
                return
            wrong = f"the model gave {len(outputs)} results for {len(items)} inputs"
            log.error("%s", wrong)
            run.failed += [(item, WrongResultCount(wrong)) for item in items]

        def failed(items: Sequence[WorkItem], failure: OnequeueError) -> None:
            run.out_of_memory += isinstance(failure, OutOfMemory)
            if len(items) == 1:
                log.warning("item failed error=%r", failure.__cause__ or failure)
                run.failed.append((items[0], failure))

        try:
            forward(self.batch)
        except BaseException as error:
            run_halves(error, self.batch, forward, failed, lambda item: item.open)
        if run.out_of_memory:
            self.batcher.out_of_memory(run.fitted)
        self.unfinished = [item for item, output in run.outputs if output is UNFINISHED]
        run.outputs = [each for each in run.outputs if each[1] is not UNFINISHED]
        self.busy |= bool(self.unfinished)
        return run

    def report(self, run: BatchRun, more_wait: bool) -> BatchReport:
        """On the batch that has run, for metrics and the rate. Who goes on counts at the end."""
        goes_on, cap = set(self.unfinished), self.batcher.cap
        batch = [item for item in self.batch if item not in goes_on]
        tokens = sum(item.tokens for item in batch)
        rows = sum(item.rows for item in batch)
        widest = max((item.width for item in batch), default=0)
        run_tokens = tokens if self.batcher.packs else rows * widest
        began, finished = self._began, self.batch[0].finished_at
        if batch:
            self._began = finished
        return BatchReport(
            size=len(batch),
            tokens=tokens,
            padding=max(0, run_tokens - tokens) / (run_tokens or 1),
            forward_s=run.forward_s,
            total_s=finished - began,
            waits_s=tuple(item.started_at - item.accepted_at for item in batch),
            out_of_memory=run.out_of_memory,
            cap=cap,
            saturated=rows >= cap or self.busy or more_wait,
        )
