"""The requests that a generation engine has in hand, and how they go unfinished.

Each is a work item with its sequences, which the scheduler has as long as they are not over. What
runs them, step by step, is engine.py. On the worker's thread.
"""

import logging
from collections import abc
from collections.abc import Callable
from itertools import chain

from batching.errors import DeviceLost, OnequeueError, OutOfMemory
from batching.request_queue import WorkItem
from batching.scheduler import ContinuousScheduler
from batching.sequence import Chunk, Sequence
from worker.failures import failure_of
from worker.vision.prompt import PicturePrompt

log = logging.getLogger("onequeue.generation")


class Requests:
    """A part of the GenerationEngine. `new_scheduler` makes one with nothing in it."""

    def __init__(self, new_scheduler: Callable[[], ContinuousScheduler]) -> None:
        self.live: dict[WorkItem, list[Sequence]] = {}  # until their end is reported
        self.failed: dict[WorkItem, Exception] = {}  # of them
        self.scheduler = new_scheduler()
        self._new_scheduler = new_scheduler

    def drop(self, item: WorkItem) -> None:
        """Nobody waits for it any more."""
        self._unschedule(item)
        del self.live[item]

    def drop_all(self) -> list[WorkItem]:
        """What was scheduled, and how, may be what is wrong: nothing of it is kept."""
        items = list(self.live)
        for sequence in chain(*self.live.values()):
            sequence.table = None
        self.live.clear()
        self.failed.clear()
        self.scheduler = self._new_scheduler()
        return items

    def fail(self, item: WorkItem, error: BaseException) -> None:
        """It raised while working on this item alone, which is dropped."""
        if isinstance(failure := failure_of(error), DeviceLost):
            raise error
        log.warning("generation failed error=%r", failure.__cause__ or failure)
        error.with_traceback(None)
        self.failed[item] = failure
        self._unschedule(item, broken=True)

    def fail_chunks(self, chunks: abc.Sequence[Chunk], failure: OnequeueError) -> None:
        """They raised together: one alone is guilty, unless there is memory to be had."""
        if isinstance(failure, OutOfMemory) and self.scheduler.give_way():
            return
        if len(chunks) == 1 and chunks[0].runs:
            self.fail(chunks[0].sequence.output.item, failure)

    def fail_pictured(self, prompt: PicturePrompt, error: BaseException) -> None:
        """A picture of the prompt failed, and what it belongs to."""
        for item, sequences in list(self.live.items()):
            if item not in self.failed and any(each.scene is prompt for each in sequences):
                self.fail(item, error)

    def _unschedule(self, item: WorkItem, broken: bool = False) -> None:
        """`broken`: nobody shall take its prefix from the cache."""
        for sequence in self.live[item]:
            if broken and sequence.table:
                self.scheduler.pool.forget(sequence.table)
            if sequence.number >= 0:
                self.scheduler.remove(sequence)
