"""The worker: one dedicated thread that runs the steps of the models' engines.

    (receive items and jobs → a job → a step of each engine that has one due)* → stopped or dead

All scheduling state belongs to this thread. Its inbox takes items, jobs and a stop. A job is a
forward pass of a model that the loader thread loads (loader.py), its warm-up, or the end of an
engine. The listener gets one outcome per step. A long step lets the other engines run theirs at its
yield points.

An exception inside a step that belongs to one item fails that item, in the engine. Any other
exception fails all items of that model. When a step yields nothing but failures, the warm-up input
probes the model, and failed probes open its breaker. Only a lost device ends the thread. Steps are
defined by the engines; HTTP, the asyncio queue and the pools are in server/core/worker_client.py.
"""

import ctypes
import gc
import logging
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar, cast

from batching.errors import (
    DeviceLost,
    ItemFailed,
    NoRoom,
    NotReady,
    OnequeueError,
    OutOfMemory,
    WorkerDown,
)
from batching.request_queue import WorkItem, request_ids
from batching.step_times import MAX_TURN_ALONE_S, MAX_TURN_S
from worker.cores import Cores, ThreadTuner, pin
from worker.error_classification import failure_of
from worker.load_context import LoadContext, loading
from worker.loader import Job, Loader
from worker.messages.adapters import Adapter
from worker.messages.protocol import OtherModels, StepOutcome
from worker.registry import ServedModel

log = logging.getLogger("onequeue.worker")

# After so long without a step, freed memory goes back to the system. glibc keeps it otherwise, in
# one arena per thread: hundreds of megabytes after a few large images or recordings. With lower
# thresholds (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD) it would return every tensor at once and fetch
# the memory again in every layer.
IDLE_S = 5.0
trim_heap = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None


T = TypeVar("T")


def has_computed(outcome: StepOutcome) -> bool:
    """Return whether the model has computed something for at least one item."""
    return bool(outcome.deltas or outcome.outputs or outcome.unfinished)


class Listener(Protocol):
    """Receives events: `on_step` on the worker's thread, the others on the event loop."""

    def on_step(self, model: ServedModel, outcome: StepOutcome) -> None: ...
    def on_failed(self, items: list[WorkItem], error: OnequeueError) -> None: ...
    def on_rejected(self, items: list[WorkItem]) -> None: ...
    def on_breaker(self, model: ServedModel, is_open: bool) -> None: ...
    def on_dead(self, error: Exception) -> None: ...


@dataclass(eq=False)
class OtherServedModels(OtherModels):
    """The other models of one model."""

    worker: "Worker"
    name: str  # of that model
    total_s: float = 0.0

    @property
    def busy(self) -> bool:
        return bool(self.worker.busy - {self.name})

    @property
    def max_turn_s(self) -> float:
        return MAX_TURN_S if self.busy else MAX_TURN_ALONE_S

    def run_steps(self, in_step: bool = True) -> None:
        started_at = self.worker.clock()
        self.worker.run_other_steps(self.name, in_step)
        self.total_s += self.worker.clock() - started_at

    def run_all_steps(self) -> None:
        self.run_steps(in_step=False)

    def wake(self) -> None:
        self.worker.inbox.put([])


class Worker:
    """`limit_bytes`: of the weights and caches of all models together, None: the free memory."""

    _listener: Listener
    _post: Callable[..., None]

    def __init__(
        self,
        models: Sequence[ServedModel],
        clock: Callable[[], float] = time.monotonic,
        cores: Cores | None = None,
        limit_bytes: int | None = None,
    ) -> None:
        self.models = {model.name: model for model in models}
        self.limit_bytes = limit_bytes
        self.clock = clock
        self.cores = cores  # None: torch's own choice
        self._thread_tuner = ThreadTuner(cores)
        self.busy_since = float("inf")
        self.busy: set[str] = set()  # names of models whose engines have items
        self._failing: set[str] = set()  # of models whose breaker is open
        # Seconds that models have computed. One that becomes busy starts at those of the others.
        self._used_s: dict[str, float] = {}
        self._last_step_s: dict[str, float] = {}
        self._resumed_at: dict[str, float] = {}  # of models in a step
        self._in_step: list[str] = []  # names of models whose steps run, one within the other
        self._idle_since = float("-inf")  # when the last step ended
        self._trim_at: float | None = None  # when memory is returned, if no step runs until then
        self.started = False  # the models that are loaded at the start are ready
        self.inbox: queue.SimpleQueue[list[WorkItem] | Job | None] = queue.SimpleQueue()
        self._jobs: deque[Job] = deque()  # received
        self._accepts_jobs = threading.Lock()  # held while the thread ends
        self._ended = False
        self.loader = Loader()
        self.thread = threading.Thread(target=self._run, name="worker", daemon=True)

    # ── called from other threads ──

    @property
    def busy_s(self) -> float:
        """The duration of the running step so far; minus infinity if none runs."""
        return self.clock() - self.busy_since

    @property
    def remaining_bytes(self) -> int | None:
        """The bytes that the limit leaves; None if there is none."""
        if self.limit_bytes is None:
            return None
        return self.limit_bytes - sum(model.nbytes for model in self.models.values())

    def start(self, listener: Listener, post: Callable[..., None]) -> None:
        """Start the threads. `post(function, *args)` runs a listener's method on the event loop."""
        self._listener, self._post = listener, post
        self.thread.start()
        self.loader.thread.start()

    def end_start(self) -> None:
        """Record that the models of the start are ready."""
        self.started = True
        self.loader.submit(self.loader.end_start)

    def add(self, model: ServedModel) -> None:
        """Register a model that is loaded later."""
        self.models = {**self.models, model.name: model}  # other threads iterate over the old one

    def submit(self, items: list[WorkItem]) -> None:
        now = self.clock()
        for item in items:
            item.arrived_at = now
        self.inbox.put(items)

    def load(self, model: ServedModel, limit: int | None = None) -> "Future[None]":
        """Load a model and warm it up; `limit`: bytes that it may take."""
        return self.loader.submit(partial(self._load, model, limit))

    def measure(self, model: ServedModel) -> "Future[tuple[int, int]]":
        """Return the bytes that a model needs at least, and those that are free."""
        return self.loader.submit(model.measure)

    def load_adapter(
        self, model: ServedModel, adapter: Adapter, context: LoadContext
    ) -> "Future[None]":
        return self.loader.submit(partial(self._load_adapter, model, adapter, context))

    def unload(self, model: ServedModel) -> "Future[None]":
        """Drop a model's engine, which must have no items, and free its memory."""
        return self.loader.submit(partial(self._unload, model))

    def reset_prefix_caches(self) -> None:
        """Drop what no sequence uses, between two steps and before items that arrive later."""
        self.inbox.put(Job(self._drop_cached_prefixes))

    def stop(self) -> None:
        self.loader.stop()
        self.inbox.put(None)

    # ── the loader's thread ──

    def call(self, function: Callable[[], T]) -> T:
        """Return the result of a function that runs on the worker's thread."""
        job = Job(function)
        with self._accepts_jobs:
            if self._ended:
                raise WorkerDown("the worker has ended")
            self.inbox.put(job)
        result: T = job.result.result()
        return result

    def _load(self, model: ServedModel, limit: int | None) -> None:
        model.load(self.call, limit)
        try:
            self.call(partial(self._warm_up, model))
        except BaseException:
            model.close()
            self._unload(model)
            raise

    def _load_adapter(self, model: ServedModel, adapter: Adapter, context: LoadContext) -> None:
        if not model.is_loaded:
            raise NotReady(f"the model {model.title!r} was unloaded", 5)
        with loading(context):
            model.load_adapter(adapter, model.engine)

    def _unload(self, model: ServedModel) -> None:
        if generator := model.generator:
            generator.flush()
        self.call(partial(self._remove, model))
        model.free()
        gc.collect()
        if trim_heap is not None:
            trim_heap(0)

    # ── the thread ──

    def _run(self) -> None:
        try:
            if cores := self.cores:
                pin(cores)  # before any computation: OpenMP's threads inherit this thread's cores
                pinned = ",".join(map(str, sorted(cores.pinned))) or "none"
                log.info("compute threads=%d pinned=%s %s", cores.threads, pinned, cores.why)
            while self._receive(self._wait_s()):
                self._run_steps()
                self._trim_memory()
        except BaseException as error:
            self._die(error)
        finally:
            self._end_jobs()

    def _end_jobs(self) -> None:
        """Fail the jobs that wait, and all later ones."""
        with self._accepts_jobs:
            self._ended = True
            with suppress(queue.Empty):
                while True:
                    if isinstance(job := self.inbox.get_nowait(), Job):
                        self._jobs.append(job)
        for job in self._jobs:
            job.result.set_exception(WorkerDown("the worker has ended"))

    def _warm_up(self, model: ServedModel) -> None:
        """Run a new engine's warm-up input; from then on it takes items."""
        model.engine.others = OtherServedModels(self, model.name)
        self._begin_step()
        try:
            model.engine.warm_up()
        except Exception as error:
            if isinstance(failure_of(error), OutOfMemory):
                raise NoRoom("there is too little memory for its warm-up input") from error
            raise ItemFailed("the model failed on its warm-up input") from error
        model.state = "ready"

    def _remove(self, model: ServedModel) -> None:
        self.busy.discard(model.name)
        self._failing.discard(model.name)
        model.take_engine()

    def _drop_cached_prefixes(self) -> None:
        for model in self.models.values():
            if model.is_loaded and model.engine.info.cache_blocks:
                cast(Any, model.engine).scheduler.pool.drop_cached()

    def _run_job(self) -> None:
        if not self._jobs:
            return
        job = self._jobs.popleft()
        if self.started:  # a start's checks may take longer than a step ever does
            self._begin_step()
        job.run()
        self._end_step()
        error = job.result.exception()
        if error and isinstance(failure_of(error), DeviceLost):
            raise error

    def _receive(self, wait_s: float | None) -> bool:
        """Wait for items, then empty the inbox. False: stop."""
        try:
            items = self.inbox.get(timeout=wait_s)
            self._trim_at = self.clock() + IDLE_S  # also if the pool has refused all of them
            while items is not None:
                if isinstance(items, Job):
                    self._jobs.append(items)
                else:
                    for item in items:
                        self._add(item)
                items = self.inbox.get_nowait()
        except queue.Empty:
            return True
        return False

    def _wait_s(self) -> float | None:
        if self._jobs:
            return 0.0
        due = [self._trim_at]
        due += [self.models[name].engine.due_at(self._idle_since) for name in self.busy]
        due += [self.models[name].breaker.probe_at for name in self._failing]
        times = [at for at in due if at is not None]
        return max(0.0, min(times) - self.clock()) if times else None

    def _add(self, item: WorkItem) -> None:
        if not self.models[item.model].is_loaded:
            return  # unloaded: nothing waits for the item
        try:
            self.models[item.model].engine.add(item)
        except BaseException as error:
            self._fail(item.model, [item], error)
        else:
            if item.model not in self.busy:
                used_s = [self._used_s[name] for name in self.busy]
                self._used_s[item.model] = max(used_s, default=0.0)
            self.busy.add(item.model)

    def run_other_steps(self, running: str, in_step: bool = True) -> None:
        """At a yield point of one model's step, receive items and run a step of each other model.
        Those have yield points too: models whose steps are interrupted (`in_step`) are left out."""
        self._thread_tuner.end_turn()
        self._idle_since = self.clock()  # items that have arrived since have waited for it
        if not self._receive(0.0):
            self.stop()  # after the step
        self._count_time(running)
        outer, self._in_step = self._in_step, [*self._in_step, *([running] if in_step else ())]
        try:
            self._run_steps()
        finally:
            self._in_step = outer
            self._resumed_at[running] = self.clock()
        self._begin_step()

    def _run_steps(self) -> None:
        """Run a job, a step of each engine that has one due, and the probes that are due. Then
        engines of short steps run more, until they have computed as long as the others: else a
        stream would get one token for each batch of another model."""
        self._run_job()
        for name, model in self.models.items():
            if name in self._in_step:
                continue
            if name in self._failing:
                self._reject_waiting(model)
                self._probe(model)
            if name in self.busy:
                self._run_step(model)
        busy = self.busy - {*self._in_step}
        while len(self.busy) > 1 and busy and self.busy - {*self._in_step} <= busy:
            name = min(busy, key=self._used_s.__getitem__)
            used_s = max(self._used_s[other] for other in self.busy)
            if self._used_s[name] + self._last_step_s.get(name, 0.0) > used_s:
                return
            if not self._run_step(self.models[name]):
                return
            if not self._receive(0.0):
                self.stop()  # after the round
                return
            busy &= self.busy

    def _run_step(self, model: ServedModel) -> bool:
        """Return whether the engine had a step due."""
        used_s = self._used_s[model.name]
        self._resumed_at[model.name] = self.clock()
        try:
            return self._try_step(model)
        finally:
            self._count_time(model.name)
            self._last_step_s[model.name] = self._used_s[model.name] - used_s
            if not model.engine.busy:
                self.busy.discard(model.name)

    def _count_time(self, name: str) -> None:
        self._used_s[name] += self.clock() - self._resumed_at[name]

    def _try_step(self, model: ServedModel) -> bool:
        outcome: StepOutcome | None = None
        self._begin_step()
        try:
            outcome = model.engine.step(self._idle_since)
            if outcome is None:
                self.busy_since = float("inf")
                return False
            self._end_step()
            if has_computed(outcome):  # else it may have waited for other threads
                self._thread_tuner.end_turn()
            self._listener.on_step(model, outcome)
        except BaseException as error:  # it belongs to no single item
            results = [*outcome.outputs, *outcome.done] if outcome else []
            items = [*model.engine.clear(), *(item for item, _ in results)]
            self._fail(model.name, items, error)
            self._probe(model)
        else:
            self._update_breaker(model, outcome)
        return True

    def _begin_step(self) -> None:
        self.busy_since = self.clock()
        self._thread_tuner.begin_turn()

    def _end_step(self) -> None:
        self._idle_since = self.clock()
        self.busy_since = float("inf")
        self._trim_at = self._idle_since + IDLE_S

    def _trim_memory(self) -> None:
        if self._trim_at is not None and self.clock() >= self._trim_at:
            self._trim_at = None
            if trim_heap is not None:
                trim_heap(0)

    # ── failures ──

    def _fail(self, name: str, items: list[WorkItem], error: BaseException) -> None:
        """Fail a model's items by an exception. A lost device is raised."""
        self.busy_since = float("inf")
        if isinstance(failure := failure_of(error), DeviceLost):
            raise error
        ids = request_ids(items)
        log.error("failed serves=%s items=%d ids=%s", name, len(items), ids, exc_info=error)
        error.with_traceback(None)  # its frames hold the items
        self._post(self._listener.on_failed, items, failure)

    def _update_breaker(self, model: ServedModel, outcome: StepOutcome) -> None:
        """Update the breaker after a step. If a step has failures only, either the inputs or the
        model may be at fault: a probe decides."""
        succeeded = has_computed(outcome)
        if model.breaker.failures and succeeded:
            model.breaker.succeeded()
        failed = any(isinstance(error, ItemFailed) for _, error in outcome.done)
        if failed and not succeeded:
            self._probe(model)

    def _probe(self, model: ServedModel) -> None:
        """Run the warm-up input, unless the breaker is cooling down, and record the result."""
        breaker = model.breaker
        if breaker.probe_at is not None and self.clock() < breaker.probe_at:
            return
        was_open = breaker.is_open
        self._begin_step()
        try:
            model.engine.warm_up()
        except BaseException as error:
            if isinstance(failure_of(error), DeviceLost):
                raise
            log.error("model failure serves=%s error=%.200r", model.name, error)
            breaker.failed(self.clock())
        else:
            breaker.succeeded()
        finally:
            self.busy_since = float("inf")
        if breaker.is_open != was_open:
            self._post(self._listener.on_breaker, model, breaker.is_open)
        if breaker.is_open:
            self._failing.add(model.name)
            self._reject_waiting(model)
        else:
            self._failing.discard(model.name)

    def _reject_waiting(self, model: ServedModel) -> None:
        if model.name in self.busy:
            self.busy.discard(model.name)
            if items := model.engine.clear():
                self._post(self._listener.on_rejected, items)

    def _die(self, error: BaseException) -> None:
        self.busy_since = float("inf")
        if not isinstance(reason := error, OnequeueError):
            reason = WorkerDown("the worker has died")
            reason.__cause__ = error
        log.critical("worker down: %s", error, exc_info=reason.__cause__)
        self._post(self._listener.on_dead, reason)
