"""The worker: one dedicated thread that loads the models and gives them turns.

    load → warm up → (receive → a turn for each busy model)* → stopped, or dead with a reason

A turn is an encoder batch or a step. All scheduling state belongs to this thread. It is
sent items and a stop through its inbox; a pipeline's outputs go straight to the pool, and one
report a turn to the event loop.

What is raised while working on an item fails that item; what belongs to none fails all that its
model had in hand, and the warm-up input tells whether the model still works, or its breaker opens.
Only a lost device ends the thread. What a batch or a step does is for models.py and the engines
to say; HTTP, the asyncio queue and pre- and post-processing are server/core/worker_client.py's.
"""

import ctypes
import logging
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from batching.errors import DeviceLost, ItemFailed, OnequeueError, WorkerDown
from batching.request_queue import WorkItem
from worker.cores import Cores, ThreadTuner, pin
from worker.error_classification import failure_of
from worker.messages.protocol import BatchReport, State, StepOutcome
from worker.registry import Outcome, PipelineModel, SteppedModel

log = logging.getLogger("onequeue.worker")

Model = PipelineModel | SteppedModel[Any]
STATES: Sequence[State] = ("loading", "warming", "ready")  # in this order

# When nothing has run for so long, what was freed goes back to the system. glibc would keep it, and
# each thread's share apart: after a few large pictures or sounds hundreds of megabytes. With lower
# thresholds (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD) it would hand back every tensor at once, and fetch
# it anew in every layer.
IDLE_S = 5.0
trim_heap = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None


class Listener(Protocol):
    """`outputs` is called on the worker's thread, the others are posted to the event loop."""

    def outputs(self, outcomes: list[Outcome]) -> None: ...
    def resolve(self, outcomes: list[Outcome]) -> None: ...
    def on_batch(
        self, model: PipelineModel, report: BatchReport, failed: list[Outcome]
    ) -> None: ...
    def on_step(self, model: SteppedModel[Any], outcome: StepOutcome) -> None: ...
    def on_rejected(self, items: list[WorkItem]) -> None: ...
    def on_breaker(self, model: Model, is_open: bool) -> None: ...
    def on_state(self, state: State, error: Exception | None) -> None: ...


class Worker:
    _listener: Listener
    _post: Callable[..., None]

    def __init__(
        self,
        models: Sequence[Model],
        clock: Callable[[], float] = time.monotonic,
        cores: Cores | None = None,
    ) -> None:
        self.models = {model.name: model for model in models}
        self.clock = clock
        self.cores = cores  # None: torch's own choice
        self._free_cores = ThreadTuner(cores) if cores else None
        self.dead = False
        self.busy_since = float("inf")
        self._free_since = float("-inf")  # when the last turn ended
        self._tidy_at: float | None = None  # when memory is handed back, if nothing runs until then
        self.inbox: queue.SimpleQueue[list[WorkItem] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, name="worker", daemon=True)

    # ── called from other threads ──

    @property
    def state(self) -> State:
        """That of the model which is furthest behind."""
        if self.dead:
            return "dead"
        return min((model.state for model in self.models.values()), key=STATES.index)

    @property
    def busy_s(self) -> float:
        """How long the turn that runs has taken so far; minus infinity if none does."""
        return self.clock() - self.busy_since

    def start(self, listener: Listener, post: Callable[..., None]) -> None:
        """`post(function, *args)` runs a listener's method on the event loop."""
        self._listener, self._post = listener, post
        self.thread.start()

    def submit(self, items: list[WorkItem]) -> None:
        now = self.clock()
        for item in items:
            item.arrived_at = now
        self.inbox.put(items)

    def stop(self) -> None:
        self.inbox.put(None)

    # ── the thread ──

    def _run(self) -> None:
        try:
            self._settle()
            self._load()
            while self._receive():
                free_cores, now = self._free_cores, self.clock()
                if free_cores and now >= free_cores.look_at:
                    free_cores.follow(now)
                self._take_turns()
                self._tidy()
        except BaseException as error:
            self._die(error)

    def _settle(self) -> None:
        """Before anything computes: OpenMP's threads inherit this one's cores."""
        if cores := self.cores:
            pin(cores)
            kept = ",".join(map(str, sorted(cores.kept))) or "none"
            log.info("compute threads=%d pinned=%s %s", cores.threads, kept, cores.why)

    def _load(self) -> None:
        for model in self.models.values():
            model.load()
        self._post(self._listener.on_state, "warming", None)
        self.busy_since = self.clock()
        try:
            for model in self.models.values():
                model.loaded.warm_up()
        except Exception as error:
            raise ItemFailed("the model failed on its warm-up input") from error
        self._rest()
        for model in self.models.values():
            model.state = "ready"
        self._post(self._listener.on_state, "ready", None)

    def _receive(self) -> bool:
        """Wait for the inbox or for whatever is due first, then empty the inbox."""
        try:
            items = self.inbox.get(timeout=self._wait_s())
            self._tidy_at = self.clock() + IDLE_S  # also when all its inputs were refused
            while items is not None:
                for item in items:
                    self._hand_over(item)
                items = self.inbox.get_nowait()
        except queue.Empty:
            return True
        return False

    def _wait_s(self) -> float | None:
        due = [self._tidy_at]
        for model in self.models.values():
            if model.busy:
                if not isinstance(model, PipelineModel):
                    return 0.0
                due.append(model.due_at(self._free_since))
            due.append(model.breaker.probe_at)
        known = [at for at in due if at is not None]
        return max(0.0, min(known) - self.clock()) if known else None

    def _hand_over(self, item: WorkItem) -> None:
        try:
            item.model.busy = True
            item.model.line.add(item)
        except BaseException as error:
            self._blame(item.model.name, [item], error)

    def _take_turns(self) -> None:
        for model in self.models.values():
            if model.breaker.probe_at is not None:
                self._reject_waiting(model)
                self._probe(model)
            if not model.busy:
                continue
            try:
                if not isinstance(model, PipelineModel):
                    self._run_step(model)
                else:
                    self._run_batch(model)
            except BaseException as error:  # it belongs to no item, so to all
                self._blame(model.name, model.clear(), error)
                self._probe(model)

    def _run_step(self, model: SteppedModel[Any]) -> None:
        """One step, of which the model's engine has bisected and sorted out the failures."""
        self.busy_since = self.clock()
        outcome = model.loaded.step()
        model.busy = model.loaded.busy
        self._rest()
        self._post(self._listener.on_step, model, outcome)
        self._judge(model, bool(outcome.deltas), outcome.done)

    def _run_batch(self, model: PipelineModel) -> None:
        now = self.clock()
        if not (batch := model.take(now, self._free_since)):
            return
        self.busy_since = now
        run = model.run(self.clock)
        finished = self._rest()
        for item in batch:
            item.finished_at = finished
        self._listener.outputs(run.outputs)
        for item, _ in run.outputs:
            item.ran = True
        report = model.report(run, more_wait=not self.inbox.empty())
        self._post(self._listener.on_batch, model, report, run.failed)
        model.batch = []
        self._judge(model, bool(run.outputs or model.unfinished), run.failed)

    def _rest(self) -> float:
        """A turn has ended; says when."""
        now = self._free_since = self.clock()
        self.busy_since = float("inf")
        self._tidy_at = now + IDLE_S
        return now

    def _tidy(self) -> None:
        if self._tidy_at is not None and self.clock() >= self._tidy_at:
            self._tidy_at = None
            if trim_heap is not None:
                trim_heap(0)

    # ── failures ──

    def _judge(self, model: Model, succeeded: bool, outcomes: Sequence[Outcome]) -> None:
        """After a turn in which nothing succeeded: is it the inputs, or the model?"""
        if succeeded:
            if model.breaker.failures:
                model.breaker.succeeded()
        elif any(isinstance(error, ItemFailed) for _, error in outcomes):
            self._probe(model)

    def _blame(self, name: str, items: list[WorkItem], error: BaseException) -> None:
        """Items fail by an error; a lost device is raised."""
        self.busy_since = float("inf")
        if isinstance(failure_of(error), DeviceLost):
            raise error
        log.error("failed serves=%s items=%d", name, len(items), exc_info=error)
        error.with_traceback(None)  # its frames hold the items
        self._post(self._listener.resolve, [(item, failure_of(error)) for item in items])

    def _probe(self, model: Model) -> None:
        """Run the warm-up input, if it is time to; the breaker counts how it went."""
        breaker = model.breaker
        if breaker.probe_at is not None and self.clock() < breaker.probe_at:
            return
        was_open = breaker.is_open
        self.busy_since = self.clock()
        try:
            model.loaded.warm_up()
        except BaseException as error:
            if isinstance(failure_of(error), DeviceLost):
                raise
            log.error("model failure serves=%s error=%r", model.name, error)
            breaker.failed(self.clock())
        else:
            breaker.succeeded()
        finally:
            self.busy_since = float("inf")
        if breaker.is_open != was_open:
            self._post(self._listener.on_breaker, model, breaker.is_open)
        if breaker.is_open:
            self._reject_waiting(model)

    def _reject_waiting(self, model: Model) -> None:
        if model.busy and (items := model.clear()):
            self._post(self._listener.on_rejected, items)

    def _die(self, error: BaseException) -> None:
        loaded = self.state == "ready"
        self.busy_since = float("inf")
        self.dead = True
        if not isinstance(reason := error, OnequeueError):
            down = "the worker has died" if loaded else "the models could not be loaded"
            reason = WorkerDown(down)
            reason.__cause__ = error
        if loaded:  # a failed start is reported by whoever starts us
            log.critical("worker down: %s", error, exc_info=reason.__cause__)
        self._post(self._listener.on_state, "dead", reason)
