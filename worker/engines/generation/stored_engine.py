"""A generation engine whose prefixes outlive it on disk (prefix_store.py).

A sequence whose prefix is read waits in the scheduler's queue. While nothing else is to be done no
step is due, until the end of the read wakes the worker's thread.
"""

from collections.abc import Callable
from itertools import chain

from batching.request_queue import WorkItem
from batching.scheduler import ContinuousScheduler
from batching.sequence import Sequence
from worker.engines.generation.engine import GenerationEngine
from worker.engines.generation.input_processor import GenerationItem, InputProcessor, Output
from worker.engines.generation.prefix_store import PrefixStore
from worker.messages.adapters import Adapter
from worker.messages.deltas import DeltaSource
from worker.messages.protocol import StepOutcome, StepReport
from worker.model.paged_runner import PagedRunner


class StoredEngine(GenerationEngine):
    """`prefixes`: those on disk."""

    def __init__(
        self,
        runner: PagedRunner,
        input_processor: InputProcessor,
        new_scheduler: Callable[[], ContinuousScheduler],
        speculates: bool,
        prefixes: PrefixStore,
    ) -> None:
        self.prefixes = prefixes

        def new_stored_scheduler() -> ContinuousScheduler:
            scheduler = new_scheduler()
            scheduler.begin_read, scheduler.save = prefixes.begin_read, prefixes.save
            return scheduler

        super().__init__(runner, input_processor, new_stored_scheduler, speculates)
        prefixes.start(self.times, lambda: self.others.wake())
        self._rests = False  # until a read ends

    def prepare(self, item: GenerationItem) -> None:
        super().prepare(item)
        self.prefixes.refresh()

    def load_adapter(self, adapter: Adapter) -> None:
        super().load_adapter(adapter)
        self.prefixes.add_adapter(adapter.weights)

    def add(self, item: GenerationItem) -> None:
        self._rests = False
        super().add(item)

    def _new_sequence(self, output: Output) -> Sequence:
        sequence, namespace = super()._new_sequence(output), output.request.cache_namespace
        sequence.disk_key = self.prefixes.key_of(namespace, sequence.form, sequence.adapter)
        return sequence

    def due_at(self, idle_since: float) -> float | None:
        return None if self._rests else super().due_at(idle_since)

    def step(  # type: ignore[override]  # none is due while only reads are left
        self, idle_since: float = 0.0
    ) -> StepOutcome[DeltaSource] | None:
        for sequence, seconds in self.prefixes.finish_reads(self.scheduler.pool):
            self._rests = False
            if output := self._outputs.get(sequence):
                output.item.read_s = seconds
        if self._rests:
            return None
        outcome = super().step(idle_since)
        report = outcome.report
        assert isinstance(report, StepReport)
        is_idle = not (report.prefill_tokens or report.decode_tokens or outcome.done)
        self._rests = is_idle and self.prefixes.is_reading and not self._others_wait()
        return outcome

    def _others_wait(self) -> bool:
        """Return whether a later step has something to do before a read ends."""
        encoder = self._encoder_scheduler
        is_encoding = bool(encoder and encoder.waiting(self.scheduler))
        return is_encoding or bool(self._in_flight or self._pending_masks)

    def _report(self) -> StepReport:
        self._counts += self.prefixes.take_counts()
        return super()._report()

    def clear(self) -> list[WorkItem]:
        self._rests = False
        self.prefixes.cancel()
        return super().clear()

    def flush(self) -> None:
        for sequence in chain(*self.live.values()):
            self.prefixes.save(self.scheduler.pool, sequence)
        self.prefixes.close()
