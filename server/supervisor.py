"""The worker's life as the event loop sees it: its states, whether it is stuck or dead.

    loading → warming → ready → stopped, or dead with a reason

Who waits for what will never come is answered here. What becomes of a request that is served is for
engine.py to say.
"""

import asyncio
import logging
import threading
from collections.abc import Iterable, Sequence

from batching.errors import Draining, OnequeueError, WorkerDown
from batching.request_queue import RequestQueue, WorkItem
from server.metrics import Metrics
from worker.protocol import State
from worker.worker import Model, Worker

log = logging.getLogger("onequeue.engine")


class Supervisor:
    """A part of the Engine. `threads` prepare and finish what is accepted, once anything is."""

    threads: Sequence[threading.Thread]

    def __init__(
        self, worker: Worker, queue: RequestQueue, metrics: Metrics, stuck_after_s: float
    ) -> None:
        self.worker = worker
        self.models = worker.models
        self.queue = queue
        self.metrics = metrics
        self.stuck_after_s = stuck_after_s
        self.failure: Exception | None = None  # why the worker is dead
        self.draining = False

    def start(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.loaded: asyncio.Future[None] = self.loop.create_future()  # fails if there is no model
        self._look()

    def stop(self) -> None:
        self.draining = True
        self.give_up()
        self.worker.stop()
        for model in self.models.values():
            model.close()
        self._watchdog.cancel()

    def give_up(self) -> None:
        """Answer everything that still waits, wherever it is."""
        fail(self.queue.waiting, Draining("the server has stopped", 5))

    def _abandon(self, reason: str) -> None:
        """Answer what the worker would still have to run; what has run is being finished."""
        fail([i for i in self.queue.waiting if not i.ran], WorkerDown(reason, 60))

    @property
    def stuck(self) -> bool:
        return self.worker.busy_s > self.stuck_after_s

    def _look(self) -> None:
        """Again when a turn may have taken too long; a stuck worker's clients get 503."""
        left_s = self.stuck_after_s - max(0.0, self.worker.busy_s)
        if left_s < 0:
            log.critical("worker stuck for more than seconds=%g", self.stuck_after_s)
            self._abandon("the worker is stuck")
            left_s = self.stuck_after_s
        self._watchdog = self.loop.call_later(left_s + 0.01, self._look)

    # ── what the worker calls, on the loop ──

    def on_breaker(self, model: Model, is_open: bool) -> None:
        self.metrics.breaker_open.labels(model.name).set(is_open)
        level = logging.ERROR if is_open else logging.INFO
        log.log(level, "breaker serves=%s open=%s", model.name, is_open)

    def on_state(self, state: State, error: Exception | None) -> None:
        if state == "warming":
            for model in self.models.values():
                self.metrics.loaded(model.name, model.loaded.info)
            for thread in self.threads:  # torch is there: each makes do with a core
                thread.start()
        elif state == "ready":
            self.loaded.set_result(None)
        elif state == "dead":
            self.failure = error
            self._abandon("the worker has died")
            if error and not self.loaded.done():
                self.loaded.set_exception(error)


def fail(items: Iterable[WorkItem], error: OnequeueError) -> None:
    """Answer what is not answered yet."""
    for item in items:
        item.resolve(error)
