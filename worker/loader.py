"""The loader thread: reads models and lays out their weights, and frees them, one after another.

A load that is stuck or cancelled keeps its thread, and a new thread runs the next loads. The old
one ends when the load next reports progress (load_context.py).

    submit → load: read, check, pack ──▶ a forward pass: the worker's thread, between two steps
                                     ◀── its result

The models of the start are loaded with all cores, by a thread that ends: OpenMP then forgets its
team (use_one_core). Later the loader uses one core, and the worker as many as are left (cores.py).
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
    """A daemon thread: a load that hangs does not block the exit. Another thread takes its place if
    the load is abandoned."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._running: Future[Any] | None = None
        self._stopped = False
        self.thread = self._new_thread(lambda: None)

    def submit(self, function: Callable[[], Any]) -> "Future[Any]":
        job = Job(function)
        self._jobs.put(job)
        return job.result

    def stop(self) -> None:
        self._stopped = True
        self._jobs.put(None)

    def abandon(self, result: "Future[Any]", may_stop: Callable[[], bool]) -> bool:
        """Leave the thread to a job that runs, and have another one run the next jobs. A job that
        waits is cancelled. False if the job has ended, or if it may not stop."""
        with self._lock:
            if result.cancel():
                return True
            if self._running is not result or not may_stop():
                return False
            if not self._stopped:
                log.warning("a job of the loader thread is abandoned")
                self._replace_thread()
            return True

    def end_start(self) -> None:
        """Have a thread with one core run the next jobs. A job itself."""
        with self._lock:
            self._replace_thread()

    def _replace_thread(self) -> None:
        self._running, self.thread = None, self._new_thread(use_one_core)
        self.thread.start()

    def _new_thread(self, limit_cores: Callable[[], None]) -> threading.Thread:
        return threading.Thread(target=self._run, args=(limit_cores,), name="loader", daemon=True)

    def _run(self, limit_cores: Callable[[], None]) -> None:
        limit_cores()
        while self._set_running(None) and (job := self._jobs.get()) is not None:
            self._set_running(job.result)
            job.run()

    def _set_running(self, result: "Future[Any] | None") -> bool:
        """Return whether this thread is the loader thread, not an abandoned one."""
        with self._lock:
            if is_current := self.thread is threading.current_thread():
                self._running = result
            return is_current
