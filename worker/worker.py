"""The worker: one dedicated thread that loads the models, batches and runs forwards.

All scheduling state (batcher, generator, breakers) belongs to this thread. It is sent items and a
stop through its inbox; a pipeline's outputs go straight to the pool, and one report a batch or
generation step to the event loop:

    load → warm up → (receive → step)* → stopped, or dead with a reason

Encoder batches and generation steps take turns, and each model has a breaker of its own. What is
raised while working on an item fails that item; what belongs to none fails all that its model had
in hand, and the warm-up input tells whether the model still works. Only a lost device ends the
thread.

HTTP, the asyncio queue and pre- and post-processing are not here (see engine.py), nor is what a
generation step does (generation/engine.py).
"""

import logging
import queue
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from batching.batcher import DynamicBatcher
from batching.breaker import Breaker
from batching.errors import (
    ClientGone,
    DeviceLost,
    ItemFailed,
    OnequeueError,
    OutOfMemory,
    WorkerDown,
    WrongResultCount,
)
from batching.request_queue import WorkItem
from worker import heap
from worker.failures import failure_of
from worker.protocol import (
    BatchReport,
    Generator,
    Models,
    Runner,
    Served,
    State,
    StepOutcome,
    served_by,
)

log = logging.getLogger("onequeue.worker")

Outcome = tuple[WorkItem, Any]  # a raw output or an exception


class Listener(Protocol):
    """`outputs` is called on the worker's thread, the others are posted to the event loop."""

    def outputs(self, outcomes: list[Outcome]) -> None: ...
    def on_batch(self, report: BatchReport, failed: list[Outcome]) -> None: ...
    def on_step(self, outcome: StepOutcome) -> None: ...
    def on_rejected(self, items: list[WorkItem]) -> None: ...
    def on_failed(self, outcomes: list[Outcome]) -> None: ...
    def on_breaker(self, served: Served, is_open: bool) -> None: ...
    def on_state(self, state: State, error: Exception | None) -> None: ...


@dataclass(slots=True)
class _Run:
    """Counts over one batch, its bisected parts included."""

    forward_s: float = 0.0
    out_of_memory: int = 0
    fitted: int = 0  # rows of the largest part that went through
    outcomes: list[Outcome] = field(default_factory=list)


class Worker:
    def __init__(
        self,
        load: Callable[[], Models],
        batcher: DynamicBatcher,
        breakers: Mapping[Served, Breaker],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.load = load
        self.batcher = batcher
        self.breakers = breakers
        self.clock = clock
        self.models = Models()
        self.state: State = "loading"
        self.busy_since: float | None = None  # read by the watchdog
        self._in_hand: list[WorkItem] = []  # the encoder batch that is being run
        self._tidy_at: float | None = None  # when memory is handed back, if nothing runs until then
        self.inbox: queue.SimpleQueue[tuple[float, list[WorkItem]] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, name="worker", daemon=True)
        self._post: Callable[..., None] = lambda *args: None
        self._listener: Listener | None = None

    # ── called from other threads ──

    def start(self, listener: Listener, post: Callable[..., None]) -> None:
        """`post(function, *args)` runs a listener's method on the event loop."""
        self._listener, self._post = listener, post
        self.thread.start()

    def submit(self, items: list[WorkItem]) -> None:
        self.inbox.put((self.clock(), items))

    def stop(self) -> None:
        self.inbox.put(None)

    # ── the thread ──

    def _run(self) -> None:
        try:
            self._load()
            while self._receive():
                self._step()
                self._tidy()
        except BaseException as error:
            self._die(error)

    def _load(self) -> None:
        self.models = self.load()
        if self.models.pipeline:
            self.batcher.packs = self.models.pipeline.info.batching == "packed"
        self._enter("warming")
        self.busy_since = self.clock()
        try:
            for served in self.breakers:
                self._warm_up(served)
        except Exception as error:
            raise ItemFailed("the model failed on its warm-up input") from error
        self._rest()
        self._enter("ready")

    def _receive(self) -> bool:
        """Wait for the inbox or for whatever is due first, then empty the inbox."""
        try:
            message = self.inbox.get(timeout=self._wait_s())
            self._tidy_at = self.clock() + heap.IDLE_S  # also when all its inputs were refused
            while True:
                if message is None:
                    return False
                arrived_at, items = message
                for item in items:
                    self._sort_in(item, arrived_at)
                message = self.inbox.get_nowait()
        except queue.Empty:
            return True

    def _sort_in(self, item: WorkItem, arrived_at: float) -> None:
        try:
            if served_by(item.payload) == "generation":
                item.arrived_at = arrived_at
                self._require_generator().add(item)
            else:
                self.batcher.add(item, arrived_at)
        except BaseException as error:
            self._blame(served_by(item.payload), [item], error)

    def _wait_s(self) -> float | None:
        if self._generating:
            return 0.0
        probes = [breaker.probe_at for breaker in self.breakers.values()]
        due = [at for at in (self.batcher.due_at(), self._tidy_at, *probes) if at is not None]
        return max(0.0, min(due) - self.clock()) if due else None

    def _step(self) -> None:
        for served, breaker in self.breakers.items():
            if breaker.is_open:
                self._reject_waiting(served)
                self._probe(served)
        try:
            self._in_hand = []
            self._in_hand = self.batcher.take(self.clock())
            if self._in_hand:
                self._execute(self._in_hand)
        except BaseException as error:
            unanswered = [item for item in self._in_hand if not item.ran]
            self._recover("pipeline", unanswered + self.batcher.clear(), error)
        try:
            if self._generating:
                self._generate()
        except BaseException as error:
            self._recover("generation", self._require_generator().clear(), error)

    def _recover(self, served: Served, items: list[WorkItem], error: BaseException) -> None:
        """An error that belongs to no item, so to all; is it the inputs, or us?"""
        self._blame(served, items, error)
        self._probe(served)

    def _blame(self, served: Served, items: list[WorkItem], error: BaseException) -> None:
        self.busy_since = None
        if isinstance(failure_of(error), DeviceLost):
            raise error
        log.error("failed serves=%s items=%d", served, len(items), exc_info=error)
        error = error.with_traceback(None)  # its frames hold the items
        failures = [failure_of(error) for _ in items]
        self._post(self._require_listener().on_failed, list(zip(items, failures, strict=True)))

    def _tidy(self) -> None:
        """Once nothing has run for a while, what was freed goes back to the system."""
        if self._tidy_at is not None and self.clock() >= self._tidy_at:
            self._tidy_at = None
            heap.hand_back()

    def _rest(self) -> float:
        """A batch or a step has run; says when."""
        now = self.clock()
        self.busy_since = None
        self.batcher.free(now)
        self._tidy_at = now + heap.IDLE_S
        return now

    @property
    def _generating(self) -> bool:
        return self.models.generator is not None and self.models.generator.busy

    def _generate(self) -> None:
        """One generation step, of which the generator has bisected and sorted out the failures."""
        self.busy_since = self.clock()
        outcome = self._require_generator().step()
        self._rest()
        self._post(self._require_listener().on_step, outcome)
        if outcome.deltas:
            self.breakers["generation"].succeeded()
        elif any(isinstance(error, ItemFailed) for _, error in outcome.done):
            self._probe("generation")

    def _execute(self, batch: list[WorkItem]) -> None:
        started = self.busy_since = self.clock()
        for item in batch:
            item.started_at = started
            item.batch_size = len(batch)
        run = _Run()
        self._run_items(batch, run)
        if run.out_of_memory:
            self.batcher.out_of_memory(run.fitted)
        finished = self._rest()
        for item in batch:
            item.finished_at = finished
        listener = self._require_listener()
        succeeded = [o for o in run.outcomes if not isinstance(o[1], Exception)]
        failed = [o for o in run.outcomes if isinstance(o[1], Exception)]
        listener.outputs(succeeded)
        for item, _ in succeeded:
            item.ran = True
        self._post(listener.on_batch, self._report(batch, run), failed)
        if succeeded:
            self.breakers["pipeline"].succeeded()
        elif any(isinstance(outcome, ItemFailed) for _, outcome in failed):
            self._probe("pipeline")  # is it the inputs, or us? the warm-up input tells

    def _run_items(self, items: list[WorkItem], run: _Run) -> None:
        """Run items as one batch; one that raises is halved until only the guilty fail."""
        runner, rows = self._require_runner(), sum(item.rows for item in items)
        started = self.clock()
        try:
            outputs = runner.forward([item.prepared for item in items])
        except BaseException as error:
            # The frames hold what the forward had allocated, and the parts below need it.
            traceback.clear_frames(error.__traceback__)
            failure = failure_of(error)
            if isinstance(failure, DeviceLost):
                raise
            run.out_of_memory += isinstance(failure, OutOfMemory)
            if len(items) == 1:
                log.warning("item failed error=%r", error)
                error.with_traceback(None)
                run.outcomes.append((items[0], failure))
                return
        else:
            run.forward_s += self.clock() - started
            run.fitted = max(run.fitted, rows)
            self.batcher.succeeded(rows)
            run.outcomes += _paired(items, outputs)
            return
        middle = len(items) // 2
        for half in (items[:middle], items[middle:]):
            gone = [item for item in half if not item.open]
            run.outcomes += [(item, ClientGone("the client has gone")) for item in gone]
            if still := [item for item in half if item.open]:
                self._run_items(still, run)

    def _report(self, batch: list[WorkItem], run: _Run) -> BatchReport:
        tokens = sum(item.tokens for item in batch)
        rows = sum(item.rows for item in batch)
        widest = max(item.width for item in batch)
        return BatchReport(
            size=len(batch),
            tokens=tokens,
            padded_tokens=0 if self.batcher.packs else max(0, rows * widest - tokens),
            forward_s=run.forward_s,
            total_s=batch[0].finished_at - batch[0].started_at,
            waits_s=tuple(item.started_at - item.accepted_at for item in batch),
            out_of_memory=run.out_of_memory,
            cap=self.batcher.cap,
            saturated=rows >= self.batcher.cap or bool(len(self.batcher)) or not self.inbox.empty(),
        )

    def _probe(self, served: Served) -> None:
        """Run the warm-up input, if it is time to, and tell the breaker how it went."""
        breaker = self.breakers[served]
        if breaker.probe_at is not None and self.clock() < breaker.probe_at:
            return
        was_open = breaker.is_open
        self.busy_since = self.clock()
        try:
            self._warm_up(served)
        except BaseException as error:
            if isinstance(failure_of(error), DeviceLost):
                raise
            log.error("model failure serves=%s error=%r", served, error)
            breaker.failed(self.clock())
        else:
            breaker.succeeded()
        finally:
            self.busy_since = None
        if breaker.is_open != was_open:
            self._post(self._require_listener().on_breaker, served, breaker.is_open)
        if breaker.is_open:
            self._reject_waiting(served)

    def _warm_up(self, served: Served) -> None:
        if model := self.models.of(served):
            model.warm_up()

    def _reject_waiting(self, served: Served) -> None:
        waiting = self.batcher if served == "pipeline" else self._require_generator()
        if items := waiting.clear():
            self._post(self._require_listener().on_rejected, items)

    def _die(self, error: BaseException) -> None:
        loaded = self.state == "ready"
        self.busy_since = None
        self.state = "dead"
        if isinstance(error, OnequeueError):
            reason: OnequeueError = error
        else:
            said = "the worker has died" if loaded else "the models could not be loaded"
            reason = WorkerDown(said)
            reason.__cause__ = error
        if loaded:  # what could not be loaded is told by whoever starts us
            log.critical("worker down: %s", error, exc_info=reason.__cause__)
        self._post(self._require_listener().on_state, "dead", reason)

    def _enter(self, state: State) -> None:
        self.state = state
        self._post(self._require_listener().on_state, state, None)

    def _require_runner(self) -> Runner:
        assert self.models.pipeline is not None
        return self.models.pipeline

    def _require_generator(self) -> Generator:
        assert self.models.generator is not None
        return self.models.generator

    def _require_listener(self) -> Listener:
        assert self._listener is not None
        return self._listener


def _paired(items: list[WorkItem], outputs: list[Any]) -> list[Outcome]:
    if len(outputs) == len(items):
        return list(zip(items, outputs, strict=True))
    wrong = f"the model gave {len(outputs)} results for {len(items)} inputs"
    log.error("%s", wrong)
    return [(item, WrongResultCount(wrong)) for item in items]
