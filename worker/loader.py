"""The loader thread: reads models and lays out their weights, and frees them, one after another.

    submit → load: read, check, pack ──▶ a forward pass: the worker's thread, between two steps
                                     ◀── its result

It uses one core, and the worker as many as are left (cores.py).
"""

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from worker.cores import use_one_core

log = logging.getLogger("onequeue.loader")


@dataclass(slots=True)
class Job:
    """A function to be run on another thread. The result's exception may be a BaseException."""

    function: Callable[[], Any]
    result: "Future[Any]" = field(default_factory=Future)

    def run(self) -> None:
        if not self.result.set_running_or_notify_cancel():
            return  # cancelled, as the server stops
        try:
            value = self.function()
        except BaseException as error:
            self.result.set_exception(error)
        else:
            self.result.set_result(value)


class Loader:
    """A daemon thread: a load that hangs does not block the exit."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, name="loader", daemon=True)

    def submit(self, function: Callable[[], Any]) -> "Future[Any]":
        job = Job(function)
        self._jobs.put(job)
        return job.result

    def stop(self) -> None:
        self._jobs.put(None)

    def _run(self) -> None:
        use_one_core()
        while (job := self._jobs.get()) is not None:
            job.run()
