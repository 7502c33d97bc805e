"""The loop side of the worker: from the queue to the thread and back to the futures.

    submit → drain task → prepare (pool) → worker: batch, forward → finish (pool) → future
                                         → worker: step, step, … → stream, at the end the future

An item knows its model from its submission on. The loop is not asked in between: a pool hands
items to the worker, the worker hands outputs to the other, and each group of answers, or
generation step, is one call into the loop. Every item is resolved here, once.
Whether anything is accepted is not stored but asked: `refusal` looks at the worker as it is.
"""

import asyncio
import contextlib
import logging
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import InitVar, dataclass
from functools import partial
from itertools import chain
from typing import Any

from batching import errors
from batching.request_queue import RequestQueue, Stream, WorkItem
from server.metrics import MOST_REPORTS, Metrics
from worker.cores import compute_alone
from worker.models import GenerationModel, Outcome, PipelineModel
from worker.protocol import BatchReport, Generator, Pending, State, StepOutcome, StepReport
from worker.worker import Model, SteppedModel, Worker

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
        alone = False
        while (group := self._groups.get()) is not None:
            if not alone and (alone := "torch" in sys.modules):
                compute_alone()
            started = time.perf_counter()
            try:
                self.work(group)
            except BaseException:  # a panic in a tokenizer is none of Exception's
                log.exception("bug in a pool items=%d", len(group))
            item_s = (time.perf_counter() - started) / len(group)
            self.item_s += 0.2 * (item_s - self.item_s)


@dataclass(eq=False)
class Engine:
    worker: Worker
    queue: RequestQueue
    metrics: Metrics
    pool_threads: InitVar[int]
    stuck_after_s: float

    def __post_init__(self, pool_threads: int) -> None:
        self.failure: Exception | None = None  # why the worker is dead
        self.draining = False
        self.models = self.worker.models
        self.prepare = Pool("prepare", pool_threads, self._prepare_items)
        self.finish = Pool("finish", pool_threads, self._finish_items)
        self.outputs = self.finish.put
        self._watchdog: asyncio.TimerHandle | None = None

    # ── life ──

    def start(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.loaded: asyncio.Future[None] = self.loop.create_future()  # fails if there is no model
        self._drain_task = self.loop.create_task(self._drain_queue())
        for thread in (*self.prepare.threads, *self.finish.threads):
            thread.start()
        self.worker.start(self, self._post)

    def _post(self, function: Callable[..., None], *args: Any) -> None:
        """Call a function on the loop, from any thread; nobody is left to call once it closed."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(function, *args)

    def give_up(self) -> None:
        """Answer everything that still waits, wherever it is."""
        fail(self.queue.waiting, errors.Draining("the server has stopped", 5))

    def stop(self) -> None:
        self.draining = True
        self.give_up()
        self.worker.stop()
        for model in self.models.values():
            model.close()
        if self._watchdog:
            self._watchdog.cancel()
        self.prepare.stop()
        self.finish.stop()
        self._drain_task.cancel()

    # ── health ──

    @property
    def stuck(self) -> bool:
        return self._busy_s > self.stuck_after_s

    @property
    def _busy_s(self) -> float:
        since = self.worker.busy_since
        return 0.0 if since is None else time.monotonic() - since

    def refusal(self, name: str | None = None) -> errors.Refused | None:
        """Why nothing is accepted now, for any model or for one."""
        if self.draining:
            return errors.Draining("the server is stopping", 5)
        if (state := self.worker.state) == "dead":
            return errors.WorkerDown("the model is not being served: the worker is down", 60)
        if self.stuck:
            return errors.WorkerDown("the worker is stuck in a forward pass", 60)
        if state != "ready":
            return errors.NotReady(f"the model is {state}", 5)
        if name and (probe_at := self.models[name].breaker.probe_at) is not None:
            wait_s = max(1.0, probe_at - time.monotonic())
            return errors.BreakerOpen("the model keeps failing; it is tried again shortly", wait_s)
        return None

    # ── one item ──

    def submit(
        self, name: str, payloads: Sequence[Any], deadline: float, stream: Stream | None = None
    ) -> list[WorkItem]:
        """Queue payloads for a model, or raise a Refused; their futures get the answers or the
        errors, and `stream` what is generated, of all of them, as it comes."""
        if (refusal := self.refusal(name)) is not None:
            raise refusal
        model = self.models[name]
        items = self.queue.accept(payloads, deadline, model.lane_for(payloads[0]), model, stream)
        if self._watchdog is None:
            self._watch(self.stuck_after_s)
        return items

    @property
    def generator(self) -> Generator:
        """The loaded language model; ask after `refusal` only."""
        model = self.models["generation"]
        assert isinstance(model, GenerationModel)
        return model.loaded

    async def _drain_queue(self) -> None:
        while True:
            self.prepare.put(await self.queue.take())

    def _prepare_items(self, items: list[WorkItem]) -> None:
        """In a pool thread: prepare items and send them on to the worker."""
        prepared: list[WorkItem] = []
        failed: list[Outcome] = []
        for item in items:
            if not self._waits(item):
                continue  # its client has left, or its timer answers
            try:
                item.model.loaded.prepare(item)
            except Pending as pending:
                pending.then(partial(self._waits, item), partial(self.prepare.put, [item]))
            except errors.OnequeueError as error:
                failed.append((item, error))
            except MemoryError:
                failed.append((item, errors.OutOfMemory("this input does not fit into memory")))
            except BaseException as error:  # a panic in a tokenizer is no Exception
                log.info("input refused error=%r", error)
                task = item.model.loaded.info.task
                unfit = errors.InvalidInput(f"the input does not fit the task {task}")
                unfit.__cause__ = error
                failed.append((item, unfit))
            else:
                prepared.append(item)
                item.lane.prepared(item)
        self.worker.submit(prepared)
        if failed:
            self._post(self.resolve, failed)

    def _waits(self, item: WorkItem) -> bool:
        return item.open and item.deadline > time.monotonic()

    def _finish_items(self, outcomes: list[Outcome]) -> None:
        """In a pool thread: turn raw outputs into answers."""
        answers: list[Outcome] = []
        for item, raw in outcomes:
            if not item.open:
                continue
            try:
                answers.append((item, item.model.loaded.finish(item, raw)))
            except BaseException as error:
                log.warning("postprocessing failed error=%r", error)
                unprocessed = "the model's output for this input could not be processed"
                failure = errors.ItemFailed(unprocessed)
                failure.__cause__ = error
                answers.append((item, failure))
        self._post(self.resolve, answers)

    # ── what the worker calls: `outputs` on its thread, the rest on the loop ──

    def resolve(self, outcomes: list[Outcome]) -> None:
        for item, outcome in outcomes:
            item.resolve(outcome)

    def on_batch(self, model: PipelineModel, report: BatchReport, failed: list[Outcome]) -> None:
        if report.saturated and report.size:
            model.lane.record(report.size, report.tokens, report.total_s)
        self._record(model.name, report)
        self.resolve(failed)

    def on_step(self, model: SteppedModel, outcome: StepOutcome) -> None:
        now, report = self.queue.clock(), outcome.report
        self._record(model.name, report)
        for item, _ in chain(outcome.deltas, outcome.done):
            if not item.begun:  # those that failed have had their turn too
                model.lane_for(item.payload).begin(item)
        for item, delta in outcome.deltas:
            if item.open and item.stream:
                item.stream.push(delta)
        for lane in model.lanes:  # of the background, all who wait go without
            starved = report.starved if lane is model.lane else lane.ahead > 0
            if lane.begun or starved != (lane.starved_since is not None):
                lane.stepped(now, starved)
        self.resolve(outcome.done)

    def _record(self, serves: str, report: BatchReport | StepReport) -> None:
        reports = self.metrics.reports
        reports.append((serves, report))
        if len(reports) >= MOST_REPORTS:
            self.metrics.collect()

    def on_rejected(self, items: list[WorkItem]) -> None:
        refusal = self.refusal(items[0].model.name)
        fail(items, refusal or errors.BreakerOpen("the model keeps failing", 1))

    def on_breaker(self, model: Model, is_open: bool) -> None:
        self.metrics.breaker_open.labels(model.name).set(is_open)
        level = logging.ERROR if is_open else logging.INFO
        log.log(level, "breaker serves=%s open=%s", model.name, is_open)

    def on_state(self, state: State, error: Exception | None) -> None:
        if state == "warming":
            for model in self.models.values():
                self.metrics.loaded(model.name, model.loaded.info)
        elif state == "ready":
            self.loaded.set_result(None)
        elif state == "dead":
            self.failure = error
            self._abandon("the worker has died")
            if error and not self.loaded.done():
                self.loaded.set_exception(error)

    def _abandon(self, reason: str) -> None:
        """Answer what the worker would still have to run; what has run is being finished."""
        fail([i for i in self.queue.waiting if not i.ran], errors.WorkerDown(reason, 60))

    def _watch(self, delay_s: float) -> None:
        """Look again in `delay_s`, as long as somebody waits; a stuck worker's clients get 503."""

        def look() -> None:
            self._watchdog = None
            if self.stuck:
                log.critical("worker stuck for more than seconds=%g", self.stuck_after_s)
                self._abandon("the worker is stuck")
            elif self.queue.pending:
                self._watch(self.stuck_after_s - self._busy_s + 0.01)

        self._watchdog = self.loop.call_later(delay_s, look)


def fail(items: Iterable[WorkItem], error: errors.OnequeueError) -> None:
    """Answer what is not answered yet."""
    for item in items:
        item.resolve(error)
