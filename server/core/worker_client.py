"""The worker's life as the event loop sees it: its states, whether it is stuck or dead.

    loading → warming → ready → stopped, or dead with a reason

Who waits for what will never come is answered here. What becomes of a request that is served is for
the engine to say.

A request's work items, from the loop to the worker's thread and back to their futures.

    submit → drain task → prepare (pool) → worker: batch, forward → finish (pool) → future
                                         → worker: step, step, … → stream, at the end the future

The loop is not asked in between: a pool hands items to the worker, the worker hands outputs to the
other, and each group of answers, or generation step, is one call into the loop. Every item is
resolved once, on the loop, and let go by its Submission whatever becomes of it. Whether anything is
accepted is not stored but asked: `refusal` looks at the worker as it is.
"""

import asyncio
import contextlib
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Self

from starlette.types import Receive

from batching import errors
from batching.errors import Draining, OnequeueError, WorkerDown
from batching.request_queue import RequestQueue, Stream, WorkItem
from server.core.metrics import MAX_REPORTS, Metrics
from worker.cores import compute_alone
from worker.messages.protocol import BatchReport, Generator, Pending, State, StepOutcome, StepReport
from worker.registry import GenerationModel, Outcome, PipelineModel, SteppedModel
from worker.worker import Model, Worker

log = logging.getLogger("onequeue.worker_client")


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
                self.metrics.on_loaded(model.name, model.loaded.info)
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


log = logging.getLogger("onequeue.worker_client")

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
        compute_alone()
        while (group := self._groups.get()) is not None:
            started = time.perf_counter()
            try:
                self.work(group)
            except BaseException:  # a panic in a tokenizer is none of Exception's
                log.exception("bug in a pool items=%d", len(group))
            item_s = (time.perf_counter() - started) / len(group)
            self.item_s += 0.2 * (item_s - self.item_s)


class WorkerClient(Supervisor):
    def __init__(
        self,
        worker: Worker,
        queue: RequestQueue,
        metrics: Metrics,
        pool_threads: int,
        stuck_after_s: float,
    ) -> None:
        super().__init__(worker, queue, metrics, stuck_after_s)
        self.prepare = Pool("prepare", pool_threads, self._prepare_items)
        self.finish = Pool("finish", pool_threads, self._finish_items)
        self.outputs = self.finish.put
        self.threads = [*self.prepare.threads, *self.finish.threads]

    def start(self) -> None:
        super().start()
        self._drain_task = self.loop.create_task(self._drain_queue())
        self.worker.start(self, self._post)

    def stop(self) -> None:
        super().stop()
        self.prepare.stop()
        self.finish.stop()
        self._drain_task.cancel()

    def _post(self, function: Callable[..., None], *args: Any) -> None:
        """Call a function on the loop, from any thread; nobody is left to call once it closed."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(function, *args)

    def refusal(self, name: str | None = None) -> errors.Refused | None:
        """Why nothing is accepted now, for any model or for one."""
        if self.draining:
            return errors.Draining("the server is stopping", 5)
        if (state := self.worker.state) == "dead":
            return errors.WorkerDown("the model is not being served: the worker is down", 60)
        if self.worker.busy_s > self.stuck_after_s:
            return errors.WorkerDown("the worker is stuck in a forward pass", 60)
        if state != "ready":
            return errors.NotReady(f"the model is {state}", 5)
        if name and (probe_at := self.models[name].breaker.probe_at) is not None:
            wait_s = max(1.0, probe_at - time.monotonic())
            return errors.BreakerOpen("the model keeps failing; it is tried again shortly", wait_s)
        return None

    def submit(
        self,
        name: str,
        payloads: Sequence[Any],
        deadline: float,
        stream: Stream | None = None,
        cache_namespace: bytes = b"",
    ) -> list[WorkItem]:
        """Queue payloads for a model, or raise a Refused; their futures get the answers or the
        errors, and `stream` what is generated, of all of them, as it comes."""
        if (refusal := self.refusal(name)) is not None:
            raise refusal
        model = self.models[name]
        lane = model.lanes[-1] if getattr(payloads[0], "background", False) else model.lane
        return self.queue.accept(payloads, deadline, lane, model, stream, cache_namespace)

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

    def on_step(self, model: SteppedModel[Any], outcome: StepOutcome) -> None:
        now, report = self.queue.clock(), outcome.report
        self._record(model.name, report)
        for item, _ in chain(outcome.deltas, outcome.done):
            if not item.begun:  # those that failed have had their turn too
                item.lane.begin(item)
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
        if len(reports) >= MAX_REPORTS:
            self.metrics.collect()

    def on_rejected(self, items: list[WorkItem]) -> None:
        refusal = self.refusal(items[0].model.name)
        fail(items, refusal or errors.BreakerOpen("the model keeps failing", 1))


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Monotonic seconds, infinite where there is no limit. For work that answers all at once,
    `first` is all there is."""

    first: float  # until an answer begins
    whole: float  # until it has ended


class Submission:
    """Work items for the model of that name in the registry, which keep their places as long as
    the block lasts. Their futures get the answers, DeadlineExceeded, or ClientGone if the client
    leaves. Raises a Refused if they are not accepted. Without `receive` no client waits."""

    def __init__(
        self,
        worker_client: WorkerClient,
        serves: str,
        payloads: Sequence[Any],
        deadlines: Deadlines,
        receive: Receive | None,
        stream: Stream | None = None,
        cache_namespace: bytes = b"",
    ) -> None:
        self.worker_client = worker_client
        self._timer: asyncio.TimerHandle | None = None
        self.items = worker_client.submit(
            serves, payloads, deadlines.first, stream, cache_namespace
        )
        self._expire_at(min(deadlines.first, deadlines.whole))
        if receive:
            worker_client.loop.create_task(self._abort_on_disconnect(receive))  # receive() holds it

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Give the places back; what still runs is aborted."""
        self._expire_at(math.inf)
        self.worker_client.queue.forget(self.items)

    def timing_headers(self) -> list[tuple[bytes, bytes]]:
        """Where the time went, in milliseconds; of several items, the one that took longest."""
        items = self.items
        item = items[0] if len(items) == 1 else max(items, key=lambda item: item.finished_at)
        timing = b"queue;dur=%.2f, batch;dur=%.2f, model;dur=%.2f" % (
            (item.arrived_at - item.accepted_at) * 1e3,
            (item.started_at - item.arrived_at) * 1e3,
            (item.finished_at - item.started_at) * 1e3,
        )
        return [(b"server-timing", timing), (b"x-batch-size", b"%d" % item.batch_size)]

    def _expire_at(self, deadline: float) -> None:
        """From now on this is the time limit."""
        if self._timer:
            self._timer.cancel()
        if deadline < math.inf:
            left_s = deadline - time.monotonic()
            self._timer = self.worker_client.loop.call_later(left_s, self._expire)

    def _expire(self) -> None:
        late = "the request did not finish within its time limit"
        self._fail(errors.DeadlineExceeded(late))

    async def _abort_on_disconnect(self, receive: Receive) -> None:
        """After the answer, when that is reported too, this does nothing."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self._fail(errors.ClientGone("the client has gone"))

    def _fail(self, error: errors.OnequeueError) -> None:
        for item in self.items:
            item.resolve(error)
