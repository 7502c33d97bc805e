"""The pools that prepare inputs and finish answers: a few threads each, beside the worker's."""

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from worker.cores import compute_alone

log = logging.getLogger("onequeue.engine")

# How long one call of a pool should take: well above a thread hop, well below a forward pass.
CALL_S = 0.004
MAX_GROUP = 32


class Pool:
    """A few daemon threads that do one thing: a stuck call blocks no exit, and what is done leaves
    however much is to be begun. Several items make one call, as on short texts a hop between
    threads costs more than the work; images spread over the threads."""

    def __init__(self, name: str, threads: int, work: Callable[[list[Any]], None]) -> None:
        self.work = work
        self.item_s = CALL_S / 4  # measured
        self._groups: queue.SimpleQueue[list[Any] | None] = queue.SimpleQueue()
        names = (f"pool-{name}-{n}" for n in range(threads))
        self.threads = [threading.Thread(target=self._run, name=n, daemon=True) for n in names]

    def put(self, items: list[Any]) -> None:
        """From any thread."""
        size = max(1, min(MAX_GROUP, round(CALL_S / self.item_s)))
        for first in range(0, len(items), size):
            self._groups.put(items[first : first + size])

    def stop(self) -> None:
        for _ in self.threads:
            self._groups.put(None)

    def _run(self) -> None:
        while (group := self._groups.get()) is not None:
            compute_alone()
            started = time.perf_counter()
            try:
                self.work(group)
            except BaseException:  # a panic in a tokenizer is none of Exception's
                log.exception("bug in a pool items=%d", len(group))
            item_s = (time.perf_counter() - started) / len(group)
            self.item_s += 0.2 * (item_s - self.item_s)
