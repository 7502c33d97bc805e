"""A few daemon threads for pre- and post-processing, fed by the group.

Work goes from thread to thread without passing through the event loop, and several items make
one call: on short texts a hop costs more than the work. Images should spread over the threads,
so the size of a group follows the measured cost of an item. What is done leaves before more
is begun.
"""

import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

log = logging.getLogger("onequeue.pool")

# How long one call should take: well above a thread hop, well below a forward pass.
CALL_S = 0.004
MAX_GROUP = 32


class Stage:
    """A function over a list of items, and how long an item takes it."""

    def __init__(self, function: Callable[[list[Any]], None]) -> None:
        self.function = function
        self.item_s = CALL_S / 4

    def run(self, items: list[Any]) -> None:
        started = time.perf_counter()
        self.function(items)
        seconds = max(time.perf_counter() - started, 1e-6)
        self.item_s += 0.2 * (seconds / len(items) - self.item_s)


class Pool:
    """What is waiting here is bounded by the queue's places. A stuck call blocks no exit."""

    def __init__(self, threads: int) -> None:
        self._urgent: deque[tuple[Stage, list[Any]]] = deque()
        self._others: deque[tuple[Stage, list[Any]]] = deque()
        self._tokens: queue.SimpleQueue[bool] = queue.SimpleQueue()  # True: a job is there
        self.threads = [
            threading.Thread(target=self._work, name=f"pool-{n}", daemon=True)
            for n in range(threads)
        ]

    def start(self) -> None:
        for thread in self.threads:
            thread.start()

    def stop(self) -> None:
        for _ in self.threads:
            self._tokens.put(False)

    def put(self, stage: Stage, items: list[Any], urgent: bool = False) -> None:
        """Have `items` go through `stage`, in groups; urgent ones first. From any thread."""
        jobs = self._urgent if urgent else self._others
        size = max(1, min(MAX_GROUP, round(CALL_S / stage.item_s)))
        for first in range(0, len(items), size):
            jobs.append((stage, items[first : first + size]))
            self._tokens.put(True)

    def _work(self) -> None:
        while self._tokens.get():
            stage, items = self._take()
            try:
                stage.run(items)
            except BaseException:  # a panic in a tokenizer is none of Exception's
                log.exception("bug in a pool stage items=%d", len(items))

    def _take(self) -> tuple[Stage, list[Any]]:
        """There are at least as many jobs as tokens taken; other threads may be faster."""
        while True:
            for jobs in (self._urgent, self._others):
                with contextlib.suppress(IndexError):
                    return jobs.popleft()
