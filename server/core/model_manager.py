"""Loads models when requests name them, and unloads them: when idle, or to make room.

    unloaded → loading → warming → ready → (finishes what runs) → unloading → unloaded
                  ├────────┴────▶ failed ── the next request, after a back-off ──▶ loading
                  └─ an operator unloads it ──▶ unloaded

Items of a model that is not loaded are accepted, and join its queue when it is ready. Models are
loaded one after another, those of the start first: if one of them fails, so does the start.
Everything runs on the event loop; the work is done by the worker's loader thread
(worker/loader.py).
"""

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from batching.errors import NoRoom, NotReady, OnequeueError, QueueFull, WorkerDown
from batching.fair_share import WorkOwner
from batching.request_queue import RequestQueue, WorkItem
from server.core.metrics import Metrics
from server.core.settings import Settings
from worker.load_context import LoadProgress, LoadStopped
from worker.registry import ServedModel
from worker.worker import Worker

log = logging.getLogger("onequeue.models")
T = TypeVar("T")

# Items that await models may hold 1 / AWAITING_DIVISOR of the queue's slots.
AWAITING_DIVISOR = 4
# The time from a failed load to the next, doubled with each failure.
MIN_BACKOFF_S, MAX_BACKOFF_S = 5.0, 300.0
GB = 1e9
AWAIT_MODEL = object()  # payload of an item that ends when its model is ready


@dataclass(eq=False)
class Residency:
    """A model, and how it is loaded and unloaded."""

    model: ServedModel
    queued: bool = False  # to be loaded, or being loaded
    load: "asyncio.Task[None] | None" = None  # the last one
    requested: bool = False  # to be loaded by an operator: also if no item awaits it
    # finishes what runs, and is unloaded then
    departure: "asyncio.Task[None] | None" = None
    used_at: float = 0.0
    load_started_at: float = 0.0
    failure: str = ""  # of the last load
    failures: int = 0  # in a row
    retry_at: float = 0.0
    timer: asyncio.TimerHandle | None = None  # of the idle model
    watchers: set[asyncio.Event] = field(default_factory=set)  # set with each change
    unused: asyncio.Event = field(default_factory=asyncio.Event)  # set when what ran has finished

    def notify(self) -> None:
        for watcher in self.watchers:
            watcher.set()

    @property
    def is_loading(self) -> bool:
        return self.queued or self.model.state in ("loading", "warming")

    @property
    def is_ready(self) -> bool:
        return self.model.state == "ready" and self.departure is None

    def progress_text(self, now: float) -> str:
        """Return how far the load is, for the error of a request that has waited for it."""
        if self.model.state == "loading" and self.load_started_at:
            return f"loading for {now - self.load_started_at:.1f} s ({self.model.progress})"
        return {"warming": "warming up", "failed": "to be loaded again"}.get(
            self.model.state, "to be loaded"
        )


async def no_models() -> None:
    """Find no further models."""


class ModelManager:
    """Loads and unloads the models of a worker."""

    def __init__(
        self, worker: Worker, queue: RequestQueue, metrics: Metrics, settings: Settings
    ) -> None:
        self.worker = worker
        self.queue = queue
        self.metrics = metrics
        self.idle_s = settings.model_idle_s  # 0: unused models are never unloaded
        self.load_timeout_s = settings.load_timeout_s
        self.models = {name: Residency(model) for name, model in worker.models.items()}
        self.rescan: Callable[[], Awaitable[None]] = no_models  # adds further models
        self._loads: deque[Residency] = deque()
        self._task: asyncio.Task[None] | None = None
        queue.on_unused = self._on_unused

    def add(self, model: ServedModel) -> None:
        """Register a model that is loaded when a request names it."""
        self.worker.add(model)
        self.models[model.name] = Residency(model)

    def start(self, on_loaded: Callable[[], None], on_failed: Callable[[Exception], None]) -> None:
        """Load the models of the start. `on_loaded`: after each load; `on_failed`: one of these has
        failed."""
        self._on_loaded, self._on_start_failed = on_loaded, on_failed
        for entry in self.models.values():
            if entry.model.at_start:
                self.request_load(entry)

    def stop(self) -> None:
        if self._task:
            self._task.cancel()
        for entry in self.models.values():
            self._stop_timer(entry)

    # ── requests ──

    def refusal(self, name: str) -> NotReady | None:
        """Return the reason for refusing a model whose load has failed, until it is tried again."""
        entry = self.models[name]
        left_s = entry.retry_at - time.monotonic()
        if entry.model.state != "failed" or left_s <= 0:
            return None
        return NotReady(self._failure_text(entry), math.ceil(left_s))

    def admit(self, name: str, owner: WorkOwner) -> bool:
        """Return whether items of a model await it, and have it loaded then. Raises QueueFull if
        too many items await models."""
        entry = self.models[name]
        entry.used_at = time.monotonic()
        self._stop_timer(entry)
        if entry.is_ready:
            return False
        self._want(entry)
        capacity = max(1, self.queue.capacity // AWAITING_DIVISOR)
        if not self.queue.awaiting_slots.has_room(owner, capacity):
            awaiting = min(capacity, self.queue.awaiting.total())
            raise QueueFull(
                f"the model {entry.model.title!r} is {entry.progress_text(time.monotonic())}, and "
                f"{awaiting} of {capacity} slots for requests that await models are in use", 5.0
            )  # fmt: skip
        return True

    def late_text(self, item: WorkItem) -> str:
        """Return the end of the error of an item whose time is up; empty if it has its model."""
        if not item.awaits_model:
            return ""
        entry = self.models[item.model]
        return f": the model {entry.model.title!r} is {entry.progress_text(time.monotonic())}"

    # ── loading ──

    def _want(self, entry: Residency) -> None:
        """Have a model loaded, unless it is being loaded."""
        if not entry.queued:
            entry.queued = True
            entry.model.progress = LoadProgress()  # not that of an earlier load
            self._loads.append(entry)
            if self._task is None or self._task.done():
                self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        while self._loads:
            entry = self._loads.popleft()
            load = entry.load = asyncio.get_running_loop().create_task(self._load(entry))
            try:
                await asyncio.wait({load})
            finally:
                load.cancel()  # the server stops
            if load.cancelled():
                self._on_cancelled(entry)
            elif error := load.exception():
                entry.queued = False
                if entry.model.at_start and not self.worker.started:
                    return self._fail_start(entry, error)
                self._on_failed(entry, error)

    async def result(
        self,
        future: "Future[T]",
        progress_at: Callable[[], float],
        may_stop: Callable[[], bool],
        timeout_s: float = math.inf,
    ) -> T:
        """Return the result of a job of the loader thread. Leave the thread to the job if it makes
        no progress for `timeout_s`, or the caller is cancelled. Raises LoadStopped."""
        job = asyncio.wrap_future(future)
        started_at = time.monotonic()
        left_s = timeout_s
        try:
            while True:
                wait_s = min(left_s, timeout_s)  # left_s is infinite while files are downloaded
                await asyncio.wait({job}, timeout=wait_s if wait_s < math.inf else None)
                if job.done():
                    return job.result()
                left_s = max(started_at, progress_at()) + timeout_s - time.monotonic()
                if left_s <= 0:
                    if self.worker.loader.abandon(future, may_stop):
                        limit = f"{timeout_s:g} s (LOAD_TIMEOUT_S)"
                        raise LoadStopped(f"it made no progress for {limit}")
                    left_s = math.inf  # it has ended, or warms up
        except asyncio.CancelledError:
            if not self.worker.loader.abandon(future, may_stop):
                await asyncio.wait({job})
            raise
        finally:
            job.cancel()

    async def _load(self, entry: Residency) -> None:
        model = entry.model
        if entry.departure:  # it is unloaded first
            await asyncio.shield(entry.departure)
        if not (entry.requested or self.queue.awaiting[model.name]):
            entry.queued = False  # all clients have left
            return
        entry.load_started_at = time.monotonic()
        loop = asyncio.get_running_loop()
        model.on_progress = partial(loop.call_soon_threadsafe, entry.notify)
        model.state = "loading"
        if self.worker.started:
            await self._make_room(entry, *await self._measure(model))
        while True:
            try:
                future = self.worker.load(model, self.worker.remaining_bytes)
                await self.result(
                    future, lambda: model.progress_at, model.stop_load, self.load_timeout_s
                )
                break
            except NoRoom as error:  # caches and forwards need more than the weights
                if (other := self._next_to_leave(entry)) is None:
                    raise
                reason = str(error)
            # outside the handler: the error's frames hold the weights
            log.info("load again serves=%s unloads=%s: %s", model.name, other.model.name, reason)
            model.state = "loading"
            await asyncio.shield(self._leave(other))
        log.info(
            "ready serves=%s seconds=%.1f", model.name, time.monotonic() - entry.load_started_at
        )
        entry.queued = entry.requested = False
        entry.failures, entry.failure = 0, ""
        assert model.info, "the load has set it"
        self.metrics.on_loaded(model.name, model.info)
        if not (self.worker.started or any(other.model.at_start for other in self._loads)):
            self.worker.end_start()
            for name in self.models:  # idle since now
                self._on_unused(name)
        self._on_loaded()
        for item in self._waiting(model):
            if item.payload is AWAIT_MODEL:
                item.resolve(None)
        self.queue.has_model(model.name, model.queue)
        entry.notify()
        if not self.queue.uses[model.name]:
            self._on_unused(model.name)

    def _fail_start(self, entry: Residency, error: BaseException) -> None:
        if isinstance(error, LoadStopped):
            error = LoadStopped(f"the model {entry.model.title!r} could not be loaded: {error}")
        if not isinstance(failure := error, OnequeueError):
            failure = WorkerDown("the models could not be loaded")
            failure.__cause__ = error
        self._on_start_failed(failure)

    def _on_failed(self, entry: Residency, error: BaseException) -> None:
        """Fail the items that await a model, and those alone."""
        model, now = entry.model, time.monotonic()
        entry.requested = False
        model.state = "failed"
        entry.failure = self._reason(entry, error)
        wait_s = min(MAX_BACKOFF_S, MIN_BACKOFF_S * 2**entry.failures)
        entry.failures, entry.retry_at = entry.failures + 1, now + wait_s
        log.error("load failed serves=%s retry_s=%g: %s", model.name, wait_s, error, exc_info=error)
        self.metrics.loads.labels(model.name, "failed").inc()
        self._fail_waiting(entry, NotReady(self._failure_text(entry), wait_s))

    def _on_cancelled(self, entry: Residency) -> None:
        """Fail the items that await a model whose load an operator has ended."""
        model = entry.model
        entry.queued = entry.requested = False
        if model.state == "ready":
            self._leave(entry)
        elif model.state in ("loading", "warming"):
            model.state = "unloaded"
        log.info("load cancelled serves=%s", model.name)
        self._fail_waiting(entry, NotReady(f"the model {model.title!r} was unloaded", 5))

    def _fail_waiting(self, entry: Residency, failure: NotReady) -> None:
        for item in self._waiting(entry.model):
            item.resolve(failure)
        entry.notify()

    def _waiting(self, model: ServedModel) -> list[WorkItem]:
        items = self.queue.items
        return [item for item in items if item.model == model.name and item.awaits_model]

    def _reason(self, entry: Residency, error: BaseException) -> str:
        """Return the reason without the model's name, and without its path: clients see neither."""
        if not isinstance(error, OnequeueError):
            return "see the server's log"
        reason, named, rest = str(error).partition(" could not be loaded for ")
        reason = rest.partition(": ")[2] if named else reason
        path = entry.model.path
        return reason.replace(path, entry.model.title) if path else reason

    def _failure_text(self, entry: Residency) -> str:
        return f"the model {entry.model.title!r} could not be loaded: {entry.failure}"

    # ── memory ──

    async def _make_room(self, entry: Residency, needed: int, free: int) -> None:
        """Unload models until there is room for one: the least recently used first, idle ones
        before busy ones, which finish what runs. Raises NoRoom if pinned models leave none."""
        while True:
            remaining = self.worker.remaining_bytes
            room = free if remaining is None else min(free, remaining)
            if needed <= room:
                return
            if (other := self._next_to_leave(entry)) is None:
                raise NoRoom(
                    f"it needs {needed / GB:.2f} GB, {max(0, room) / GB:.2f} GB are left and no "
                    "model can be unloaded"
                )
            await asyncio.shield(self._leave(other))
            needed, free = await self._measure(entry.model)

    async def _measure(self, model: ServedModel) -> tuple[int, int]:
        future = self.worker.measure(model)
        return await self.result(future, lambda: 0.0, lambda: True, self.load_timeout_s)

    def _next_to_leave(self, entry: Residency) -> Residency | None:
        """Return the model that is unloaded first to make room for one; none at the start."""
        loaded = [
            other
            for other in self.models.values()
            if other is not entry and other.model.state == "ready" and not other.model.pin
            if self.worker.started
        ]
        return min(loaded, key=self._eviction_order, default=None)

    def _eviction_order(self, entry: Residency) -> tuple[bool, bool, float]:
        return entry.departure is None, self.queue.uses[entry.model.name] > 0, entry.used_at

    # ── unloading ──

    def _leave(self, entry: Residency) -> "asyncio.Task[None]":
        """Unload a model that is ready, once what runs on it has finished. New items await it."""
        if entry.departure is None:
            self._stop_timer(entry)
            entry.departure = asyncio.get_running_loop().create_task(self._depart(entry))
        return entry.departure

    async def _depart(self, entry: Residency) -> None:
        model = entry.model
        try:
            while self.queue.uses[model.name] > self.queue.awaiting[model.name]:
                entry.unused.clear()
                await entry.unused.wait()
            model.close()
            model.state = "unloading"
            await asyncio.wrap_future(self.worker.unload(model))
            model.state = "unloaded"
            self.metrics.on_unloaded(model.name)
            log.info("unloaded serves=%s", model.name)
        finally:
            entry.departure = None
            entry.notify()

    def _on_unused(self, name: str) -> None:
        entry = self.models[name]
        entry.unused.set()
        self._stop_timer(entry)
        if self.idle_s and not entry.model.pin and entry.is_ready and self.worker.started:
            loop = asyncio.get_running_loop()
            entry.timer = loop.call_later(self.idle_s, self._unload_idle, entry)

    def _stop_timer(self, entry: Residency) -> None:
        if entry.timer:
            entry.timer.cancel()
            entry.timer = None

    def _unload_idle(self, entry: Residency) -> None:
        if entry.is_ready and not self.queue.uses[entry.model.name]:
            self._leave(entry)

    # ── operators ──

    def request_load(self, entry: Residency) -> None:
        """Load a model, also within the back-off after a failure."""
        if not entry.is_ready:
            entry.requested = True
            self._want(entry)

    def request_unload(self, entry: Residency) -> None:
        """Unload a model that is ready, once its work has finished; end the load of another."""
        if entry in self._loads:
            self._loads.remove(entry)
            self._on_cancelled(entry)
        elif entry.queued and entry.load:
            if not entry.load.cancelling():  # a second cancel would not wait for the loader
                entry.load.cancel()
        else:
            self._leave(entry)
