"""The engine of models that run an input at once: pipelines, and embedders and rerankers that are
encoders. A step runs one dynamic batch.

    prepare (pool) → add → step: take a batch, forward → finish (pool)

DynamicBatcher decides which items form a batch and when it is due; a Runner computes it, in several
steps while other models have work. A batch that raises is bisected until only the guilty items
fail. Decoders and speech models have engines of their own.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal

from batching.batcher import DynamicBatcher
from batching.errors import OnequeueError, OutOfMemory
from batching.request_queue import WorkItem
from batching.step_times import StepTimes
from worker.error_classification import run_in_halves
from worker.messages.protocol import (
    ALONE,
    CUT,
    BatchReport,
    Fallback,
    OtherModels,
    Payload,
    Prepared,
    Raw,
    Runner,
    StepOutcome,
)

log = logging.getLogger("onequeue.worker")


@dataclass(slots=True)
class BatchRun(Generic[Raw]):
    """The results of one batch, those of its halves included."""

    outputs: list[tuple[WorkItem, Raw]] = field(default_factory=list)
    failed: list[tuple[WorkItem, Exception | None]] = field(default_factory=list)
    forward_s: float = 0.0
    out_of_memory: int = 0  # forward passes
    largest_rows: int = 0  # rows of the largest part that succeeded


def run_alone(runner: Runner[Payload, Prepared, Raw], payload: Payload) -> object:
    """Run an input through all three stages of a runner; return its response."""
    item: WorkItem[Payload, Prepared] = WorkItem(payload, float("inf"), 0.0)
    runner.prepare(item)
    while (output := runner.forward([item.prepared])[0]) is CUT:
        pass
    return runner.finish(item, output)


class PipelineEngine(Generic[Payload, Prepared, Raw]):
    """Implements Engine of worker.messages.protocol."""

    others: OtherModels = ALONE
    compile_state: Literal["running", "done", "off"] = "off"
    stage = ""
    fallbacks: Sequence[Fallback] = ()

    def __init__(
        self,
        runner: Runner[Payload, Prepared, Raw],
        batcher: DynamicBatcher[WorkItem[Payload, Prepared]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        batcher.packs = runner.info.batching == "packed"
        self.runner = runner
        self.info, self.text_model = runner.info, runner.text_model
        self.batcher = batcher
        self.clock = clock
        self.times = StepTimes()  # of batches
        self._batch: list[WorkItem[Payload, Prepared]] = []  # the one that runs
        self._cut: list[WorkItem[Payload, Prepared]] = []  # items that wait again after the batch
        # start of the time that the next report with items covers; None: of the next step
        self._started_at: float | None = None

    # ── in pool threads ──

    def prepare(self, item: WorkItem[Payload, Prepared]) -> None:
        self.runner.prepare(item)

    def finish(self, item: WorkItem[Payload, Prepared], raw: Raw) -> object:
        return self.runner.finish(item, raw)

    # ── on the worker's thread ──

    def add(self, item: WorkItem[Payload, Prepared]) -> None:
        self.batcher.add(item)

    @property
    def busy(self) -> bool:
        return bool(self.batcher.waiting)

    def due_at(self, idle_since: float) -> float | None:
        return self.batcher.due_at(idle_since)

    def step(self, idle_since: float) -> StepOutcome[object, Raw] | None:
        if not self._take_batch(idle_since):
            return None
        run = self._run_batch()
        finished_at, cut = self.clock(), {*self._cut}
        rows = sum(item.rows for item in self._batch if item not in cut)
        for item in self._batch:
            item.finished_at = finished_at
            item.batch_size = 0 if item in cut else rows
            item.computed = 0 if item in cut else item.tokens
        unfinished = bool(self._cut)
        self.batcher.put_back(self._cut)
        report = self._report(run, finished_at)
        self._batch, self._cut = [], []
        return StepOutcome(report, outputs=run.outputs, done=run.failed, unfinished=unfinished)

    def clear(self) -> list[WorkItem]:
        running: list[WorkItem] = [*self._batch, *self.batcher.clear()]
        self._batch, self._cut, self._started_at = [], [], None
        return list(dict.fromkeys(running))

    def warm_up(self) -> None:
        self.runner.warm_up()

    def close(self) -> None:
        """Do nothing: runners have no threads."""

    # ── a batch ──

    def _take_batch(self, idle_since: float) -> bool:
        now = self.clock()
        self._batch = self.batcher.take(now, idle_since)
        if self._started_at is None or not self._batch:
            self._started_at = now
        for item in self._batch:
            item.started_at = now
        return bool(self._batch)

    def _run_batch(self) -> BatchRun[Raw]:
        run: BatchRun[Raw] = BatchRun()
        self.runner.others = self.others

        def forward(items: Sequence[WorkItem[Payload, Prepared]]) -> None:
            started_at = self._own_time()
            outputs = self.runner.forward([item.prepared for item in items])
            run.forward_s += self._own_time() - started_at
            rows = 0
            for item, output in list(zip(items, outputs, strict=True)):
                if output is CUT:
                    self._cut.append(item)
                else:
                    run.outputs.append((item, output))
                    rows += item.rows
            run.largest_rows = max(run.largest_rows, rows)
            self.batcher.succeeded(rows)

        def failed(items: Sequence[WorkItem], failure: OnequeueError) -> None:
            run.out_of_memory += isinstance(failure, OutOfMemory)
            if len(items) == 1:
                id, cause = items[0].owner.request_id, failure.__cause__ or failure
                log.warning("item failed id=%s error=%.200r", id, cause)
                run.failed.append((items[0], failure))
            else:
                self.others.run_steps()  # the halves are turns of their own

        run_in_halves(self._batch, forward, failed, lambda item: item.open)
        if run.out_of_memory:
            self.batcher.out_of_memory(run.largest_rows)
        return run

    def _own_time(self) -> float:
        """Return the time without the steps of other models."""
        return self.clock() - self.others.total_s

    def _report(self, run: BatchRun[Raw], finished_at: float) -> BatchReport:
        """Measure the batch. An item that it was cut before is counted in the one that runs it."""
        cut, cap = {*self._cut}, self.batcher.cap
        batch = [item for item in self._batch if item not in cut]
        tokens = sum(item.tokens for item in batch)
        rows = sum(item.rows for item in batch)
        widest = max((item.width for item in batch), default=0)
        run_tokens = tokens if self.batcher.packs else rows * widest
        started_at = finished_at if self._started_at is None else self._started_at
        if not cut:
            self._started_at = None
        elif batch:
            self._started_at = finished_at
        total_s = finished_at - started_at
        if batch:
            self.times.learn(run_tokens, 0, total_s)
        return BatchReport(
            size=len(batch),
            tokens=tokens,
            padding=max(0, run_tokens - tokens) / (run_tokens or 1),
            forward_s=run.forward_s,
            total_s=total_s,
            waits_s=tuple(item.started_at - item.accepted_at for item in batch),
            out_of_memory=run.out_of_memory,
            cap=cap,
        )
