"""The event loop's side of the worker: work items go out, results come back to their futures.

    submit → drain task → prepare (pool) → worker: step → finish (pool) → future
                                         → worker: step, step, … → stream, then the future

The event loop is not involved in between: a pool hands items to the worker, the worker hands raw
outputs to the other pool, and each group of results, or each step, is one call into the loop. Every
item is resolved once, on the loop, and released by its Submission in any case. `refusal` decides
whether anything is accepted by reading the worker's state; nothing is cached. A watchdog fails the
items of a stuck worker.
"""

import asyncio
import contextlib
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Generic, NamedTuple, Never, Self, TypeVar

from starlette.types import Receive, Scope

from batching import errors
from batching.errors import OnequeueError
from batching.fair_share import WorkOwner
from batching.request_queue import RequestQueue, Result, Stream, WorkItem
from server.core.metrics import Metrics
from server.core.model_manager import ModelManager
from server.core.request_context import RequestContext, RequestRecord
from server.core.settings import Settings
from worker.cores import use_one_core
from worker.messages.decisions import DecisionInput
from worker.messages.generation import Chat, GenerationInput
from worker.messages.protocol import Pending, PipelineInput, StepOutcome
from worker.messages.scoring import EmbeddingInput, ScoringInput
from worker.registry import ServedModel
from worker.tasks import TASKS
from worker.worker import Worker

log = logging.getLogger("onequeue.worker_client")

# The target duration of one call in a pool: well above a thread switch, well below a forward pass.
CALL_S = 0.004
MAX_GROUP = 32
# While more streams are read, their readers wake together, so many seconds after the first delta or
# so many for each of them: an event costs the loop as much for several tokens as for one.
FEW_READERS, WAKE_INTERVAL_S, READER_INTERVAL_S = 32, 0.02, 0.0002
MAX_WOKEN = 16  # readers before the loop serves others
# A longer text takes a pool thread more than 0.1 s.
LONG_CHARS = 1 << 17
RawOutput = tuple[WorkItem, object]
T = TypeVar("T")


class Pool(Generic[T]):
    """A few daemon threads that run one function on groups of items.

    Daemon threads: a stuck call does not block the exit. A thread switch costs more than the work
    on a short text, so several items share a call; images, which take long, spread over the
    threads."""

    def __init__(self, name: str, threads: int, work: Callable[[list[T]], None]) -> None:
        self.work = work
        self.item_s = CALL_S / 4  # measured
        self._inbox: queue.SimpleQueue[list[T]] = queue.SimpleQueue()
        self._stopped = False
        names = (f"pool-{name}-{n}" for n in range(threads))
        self.threads = [threading.Thread(target=self._run, name=n, daemon=True) for n in names]

    @property
    def group_size(self) -> int:
        return max(1, min(MAX_GROUP, round(CALL_S / self.item_s)))

    def put(self, items: list[T]) -> None:
        """Queue items. From any thread."""
        size = self.group_size
        for first in range(0, len(items), size):
            self._inbox.put(items[first : first + size])

    def stop(self) -> None:
        self._stopped = True
        self._inbox.put([])

    def _run(self) -> None:
        use_one_core()
        while True:
            group = self._inbox.get()
            if self._stopped:
                self._inbox.put([])  # for another thread
                return
            started = time.perf_counter()
            try:
                self.work(group)
            except BaseException:  # a panic in a Rust library is not an Exception
                log.exception("bug in a pool items=%d", len(group))
            item_s = (time.perf_counter() - started) / len(group)
            self.item_s += 0.2 * (item_s - self.item_s)


class WorkerClient:
    """Submits work to the worker's thread and resolves its results. `start` and `stop` run on the
    event loop, as do all methods without another note."""

    loop: asyncio.AbstractEventLoop
    loaded: asyncio.Future[None]  # resolved when the models are ready; fails if loading does
    _drain_task: asyncio.Task[None]
    _watchdog: asyncio.TimerHandle

    def __init__(
        self,
        worker: Worker,
        queue: RequestQueue,
        metrics: Metrics,
        settings: Settings,
        pool_threads: int,
    ) -> None:
        self.worker = worker
        self.queue = queue
        self.metrics = metrics
        self.stuck_after_s = settings.stuck_after_s
        self.failure: Exception | None = None  # of the worker, or of a model of the start
        self.started = False
        self.terminating = False  # a signal to stop has arrived
        self.draining = False  # new requests are refused
        self.on_drain: set[Callable[[], None]] = set()  # of streams that accept inputs
        self.readers = 0  # of streams of tokens
        self._to_wake: dict[Callable[[], None], None] = {}  # in order; a reader once
        self.prepare = Pool("prepare", pool_threads, self._prepare_items)
        self.decode = Pool("decode", pool_threads, self._prepare_items)
        self.finish: Pool[RawOutput] = Pool("finish", pool_threads, self._finish_items)
        self.manager = ModelManager(worker, queue, metrics, settings)

    def start(self) -> None:
        self.started = True
        self.loop = asyncio.get_running_loop()
        self.loaded = self.loop.create_future()
        self._check_stuck()
        self._drain_task = self.loop.create_task(self._drain_queue())
        self.worker.start(self, self._post)
        self.manager.start(self._on_loaded, self.on_dead)

    def stop(self) -> None:
        self.start_draining()
        self.cancel_all()
        self.manager.stop()
        self.worker.stop()
        for model in self.models.values():
            model.close()
        self._watchdog.cancel()
        self.prepare.stop()
        self.decode.stop()
        self.finish.stop()
        self._drain_task.cancel()

    def start_draining(self) -> None:
        """Refuse new requests, and further inputs of streams."""
        self.draining = True
        for stop in list(self.on_drain):
            stop()

    def cancel_all(self) -> None:
        """Fail all items with Draining, in whatever state they are."""
        fail_all(self.queue.items, errors.Draining("the server has stopped", 5))

    def _post(self, function: Callable[..., None], *args: object) -> None:
        """Call a function on the event loop, from any thread. Nothing happens once it is closed."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(function, *args)

    def wake_reader(self, wake: Callable[[], None]) -> None:
        """Call the function that wakes a stream's reader, at once or with those of others."""
        if self.readers <= FEW_READERS:
            wake()
            return
        if not self._to_wake:
            interval_s = max(WAKE_INTERVAL_S, self.readers * READER_INTERVAL_S)
            self.loop.call_later(interval_s, self._wake_readers)
        self._to_wake[wake] = None

    def _wake_readers(self) -> None:
        to_wake, self._to_wake = [*self._to_wake], {}
        self._wake_groups(to_wake)

    def _wake_groups(self, to_wake: list[Callable[[], None]]) -> None:
        for wake in to_wake[:MAX_WOKEN]:
            wake()
        if others := to_wake[MAX_WOKEN:]:
            self.loop.call_soon(self._wake_groups, others)

    # ── requests ──

    @property
    def models(self) -> Mapping[str, ServedModel]:
        return self.worker.models

    def refusal(self, name: str | None = None) -> errors.Refused | None:
        """Return the reason for refusing all requests now, or those of one model."""
        if self.draining:
            return errors.Draining("the server is stopping", 5)
        if self.failure:
            return errors.WorkerDown("the model is not being served: the worker is down", 60)
        if self.stuck:
            return errors.WorkerDown("the worker is stuck in a forward pass", 60)
        if not self.worker.started:
            models = [self.models[name]] if name else self.models.values()
            if all(model.state != "ready" for model in models):
                return errors.NotReady("the model is loading", 5)
        if name and (probe_at := self.models[name].breaker.probe_at) is not None:
            wait_s = max(1.0, probe_at - time.monotonic())
            return errors.BreakerOpen("the model keeps failing; it is tried again shortly", wait_s)
        return self.manager.refusal(name) if name else None

    def submit(
        self,
        owner: WorkOwner,
        name: str,
        payloads: Sequence[object],
        deadline: float,
        stream: Stream[Never] | None = None,
    ) -> list[WorkItem[object, object, Result]]:
        """Queue a request's payloads for a model, or raise a Refused. The items' futures get the
        results or errors; `stream` gets the deltas of all of them."""
        if (refusal := self.refusal(name)) is not None:
            raise refusal
        awaits, queue = self.manager.admit(name, owner), self.models[name].queue
        return self.queue.accept(owner, payloads, deadline, queue, name, stream, awaits)

    async def _drain_queue(self) -> None:
        while True:
            self._put(await self.queue.take())

    def _put(self, items: list[WorkItem]) -> None:
        """Have items prepared, from any thread: images, audio and long texts in threads of
        their own, so that short texts do not wait for them."""
        large = {item for item in items if self._is_large(item)}
        self.decode.put([item for item in items if item in large])
        self.prepare.put([item for item in items if item not in large])

    def _is_large(self, item: WorkItem) -> bool:
        payload = item.payload
        is_pipeline = isinstance(payload, PipelineInput)
        if is_pipeline and TASKS[task_of(self.models[item.model])].kind != "text":
            return True
        prompt = getattr(payload, "prompt", None)
        media = prompt.media if isinstance(prompt, Chat) else getattr(payload, "assets", None)
        return bool(media) or item.chars > LONG_CHARS

    # ── in pool threads ──

    def _prepare_items(self, items: list[WorkItem]) -> None:
        """Prepare items and send them on to the worker."""
        prepared: list[WorkItem] = []
        failed: list[tuple[WorkItem, OnequeueError]] = []
        for item in items:
            if not is_alive(item):
                continue
            model = self.models[item.model]
            try:
                model.engine.prepare(item)
            except Pending as pending:
                pending.then(item.owner, partial(is_alive, item), partial(self._put, [item]))
            except OnequeueError as error:
                failed.append((item, error.with_traceback(None)))  # whose frames refer to `failed`
            except MemoryError:
                failed.append((item, errors.OutOfMemory("this input does not fit into memory")))
            except BaseException as error:  # a panic in a Rust library is not an Exception
                log.info("input refused id=%s error=%.200r", item.owner.request_id, error)
                failure = errors.InvalidInput(f"the input does not fit the task {task_of(model)}")
                failure.__cause__ = error
                failed.append((item, failure))
            else:
                prepared.append(item)
        self.worker.submit(prepared)
        if failed:
            self._post(resolve_outcomes, failed)

    def _finish_items(self, outputs: list[RawOutput]) -> None:
        responses: list[tuple[WorkItem, object]] = []
        for item, raw in outputs:
            if not item.open:
                continue
            try:
                responses.append((item, self.models[item.model].engine.finish(item, raw)))
            except BaseException as error:
                id = item.owner.request_id
                log.warning("postprocessing failed id=%s error=%.200r", id, error)
                message = "the model's output for this input could not be processed"
                failure = errors.ItemFailed(message)
                failure.__cause__ = error
                responses.append((item, failure))
        self._post(resolve_outcomes, responses)

    # ── the worker's events (worker.worker.Listener) ──

    def on_step(self, model: ServedModel, outcome: StepOutcome) -> None:
        """On the worker's thread: pass raw outputs to the pool, the rest to the event loop."""
        if outcome.outputs:
            self.finish.put(outcome.outputs)
            for item, _ in outcome.outputs:
                item.has_output = True
        self._post(self._record_step, model, outcome)

    def _record_step(self, model: ServedModel, outcome: StepOutcome) -> None:
        reports = self.metrics.reports
        reports.append((model.name, outcome.report))
        if len(reports) >= self.metrics.max_reports:
            self.metrics.collect()
        started = chain(outcome.deltas, outcome.outputs, outcome.done)
        self.queue.start(item for item, _ in started)
        for item, delta in outcome.deltas:
            item.push(delta)
        resolve_outcomes(outcome.done)

    def on_failed(self, items: list[WorkItem], error: OnequeueError) -> None:
        fail_all(items, error)

    def on_rejected(self, items: list[WorkItem]) -> None:
        refusal = self.refusal(items[0].model)
        fail_all(items, refusal or errors.BreakerOpen("the model keeps failing", 1))

    def on_breaker(self, model: ServedModel, is_open: bool) -> None:
        self.metrics.breaker_open.labels(model.name).set(is_open)
        level = logging.ERROR if is_open else logging.INFO
        log.log(level, "breaker serves=%s open=%s", model.name, is_open)

    def on_dead(self, error: Exception) -> None:
        self.failure = error
        self._abandon("the worker has died")
        if not self.loaded.done():
            self.loaded.set_exception(error)

    def _on_loaded(self) -> None:
        for thread in (*self.prepare.threads, *self.decode.threads, *self.finish.threads):
            if not thread.ident:  # after torch was imported: each limits itself to one core
                thread.start()
        if self.worker.started and not self.loaded.done():
            self.loaded.set_result(None)

    # ── a stuck worker ──

    @property
    def stuck(self) -> bool:
        return self.worker.busy_s > self.stuck_after_s

    def _check_stuck(self) -> None:
        """Fail the items of a stuck worker. Check again when a step may have become too long."""
        left_s = self.stuck_after_s - max(0.0, self.worker.busy_s)
        if left_s < 0:
            log.critical("worker stuck for more than seconds=%g", self.stuck_after_s)
            self._abandon("the worker is stuck")
            left_s = self.stuck_after_s
        self._watchdog = self.loop.call_later(left_s + 0.01, self._check_stuck)

    def _abandon(self, reason: str) -> None:
        """Fail the items that the worker has not computed; the pool finishes the others."""
        waiting = [item for item in self.queue.items if not item.has_output]
        fail_all(waiting, errors.WorkerDown(reason, 60))


def task_of(model: ServedModel) -> str:
    return model.info.task if model.info else model.kind


def size_of(payload: object) -> tuple[int, int]:
    """Return the numbers of a payload's texts or choices, and of their characters."""
    match payload:
        case EmbeddingInput(inputs=texts):
            return len(texts), sum(len(text) for text in texts if isinstance(text, str))
        case ScoringInput(pairs=pairs):
            return len(pairs), sum(len(query) + len(document) for query, document in pairs)
        case GenerationInput(n=n):
            return n, count_chars(payload)
    return 1, count_chars(payload)


def count_chars(payload: object) -> int:
    match payload:
        case PipelineInput(inputs=str(text), parameters={"candidate_labels": [*labels]}):
            return sum(len(text) + len(label) for label in labels)  # a pair of each
        case PipelineInput(inputs=str(text)) | GenerationInput(prompt=str(text)):
            return len(text)
        case PipelineInput(inputs=dict(pair)):
            return sum(len(text) for text in pair.values() if isinstance(text, str))
        case GenerationInput(prompt=Chat(messages=messages)) | DecisionInput(messages=messages):
            contents = [message.get("content") for message in messages]
            parts = [part for content in contents if isinstance(content, list) for part in content]
            values = [*contents, *(part.get("text") for part in parts)]
            return sum(len(value) for value in values if isinstance(value, str))
    return 0


def is_alive(item: WorkItem) -> bool:
    return item.is_alive(time.monotonic())


def resolve_outcomes(outcomes: Iterable[tuple[WorkItem, object]]) -> None:
    """Resolve items with their own results or errors."""
    for item, outcome in outcomes:
        item.resolve(outcome)


def fail_all(items: Iterable[WorkItem], error: OnequeueError) -> None:
    for item in items:
        item.resolve(error)


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Monotonic seconds, infinite where there is no limit."""

    first: float  # for the response; of a stream of deltas for the first step
    whole: float  # for its end
    idle_s: float = math.inf  # the longest time without progress after the first step


NO_DEADLINES = Deadlines(math.inf, math.inf)


class IncomingRequest(NamedTuple):
    """A request as its endpoint gets it. `receive` is None where no client may disconnect."""

    scope: Scope
    receive: Receive | None
    deadlines: Deadlines


async def wait_for_disconnect(receive: Receive) -> None:
    """Wait until the client disconnects; what it still sends is dropped."""
    while (await receive())["type"] != "http.disconnect":
        pass


@dataclass(eq=False)
class Submission(Generic[Result]):
    """A request's work items: a context manager that holds their slots.

    Their futures get the results of the model's engine, DeadlineExceeded, or ClientGone if the
    client disconnects. Raises a Refused if the items are not accepted."""

    worker_client: WorkerClient
    model: str
    payloads: Sequence[object]
    incoming: IncomingRequest
    items: list[WorkItem[object, object, Result]] = field(init=False)
    _limit: float = field(init=False)
    _timer: asyncio.TimerHandle | None = field(init=False, default=None)
    _watching: "asyncio.Task[None] | None" = field(init=False, default=None)

    def __post_init__(self) -> None:
        scope, receive, deadlines = self.incoming
        self.context: RequestContext = scope["context"]
        self.record: RequestRecord = scope["record"]
        client, model = self.worker_client, self.model
        self.items = client.submit(
            self.context, model, self.payloads, deadlines.first, self._stream()
        )
        self.record.model = client.models[model].served_name
        self._expire_at(min(deadlines.first, deadlines.whole))
        if receive:
            self._watching = client.loop.create_task(self._abort_on_disconnect(receive))

    def _stream(self) -> Stream[Never] | None:
        """Return the stream that gets the deltas of the items."""
        return None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the slots and abort the items that still run."""
        self._expire_at(math.inf)
        if self._watching:
            self._watching.cancel()
            self._watching = None  # its error will refer to this
        self._record_times()
        self._record_tokens()
        self.worker_client.queue.release(self.items)

    def _record_times(self) -> None:
        """Record the times of the items that have reached the model."""
        record = self.record
        record.accepted_at = record.accepted_at or self.items[0].accepted_at
        for item in self.items:
            if at := item.arrived_at:
                record.prepared_at = min(record.prepared_at or at, at)
            record.read_s = max(record.read_s, item.read_s)
            if at := item.started_at:
                record.started_at = min(record.started_at or at, at)
                record.ended_at = max(record.ended_at, item.finished_at)

    def _record_tokens(self) -> None:
        tokens = sum(item.tokens for item in self.items if item.started_at)
        self.record.prompt_tokens += tokens
        self.context.use_tokens(tokens)

    def timing_headers(self) -> list[tuple[bytes, bytes]]:
        """Return the time per stage in milliseconds: until the first item was prepared, until the
        first batch started, and until the last one ended; and the size of the largest batch. Empty
        if no item has reached the model. To be called once it is closed."""
        if not (ended_at := self.record.ended_at):
            return []
        batch_size = max(item.batch_size for item in self.items)
        return [self.record.timing_header(ended_at), (b"x-batch-size", b"%d" % batch_size)]

    def _expire_at(self, deadline: float) -> None:
        if self._timer:
            self._timer.cancel()
        self._limit = deadline
        if deadline < math.inf:
            left_s = deadline - time.monotonic()
            self._timer = self.worker_client.loop.call_later(left_s, self._expire)

    def _expire(self) -> None:
        message = "the request did not finish within its time limit"
        late = self.worker_client.manager.late_text(self.items[0])
        self._fail(errors.DeadlineExceeded(message + late))

    async def _abort_on_disconnect(self, receive: Receive) -> None:
        """Cancel the items on a disconnect. After the response this has no effect."""
        await wait_for_disconnect(receive)
        self._fail(errors.ClientGone("the client has gone"))

    def _fail(self, error: errors.OnequeueError) -> None:
        for item in self.items:
            item.resolve(error)
