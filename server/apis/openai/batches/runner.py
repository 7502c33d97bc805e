"""Runs batches: their lines, in turns, through their endpoint.

    input file → checked → claimed lines, each in its client's turn → endpoint → results → store.py

A line is a request without a connection: its endpoint reads, submits and builds as for HTTP. Lines
have low priority, count as one request in the shares of the queue, and wait while it is full. Each
process with the store runs lines of all batches. When it stops, its lines in flight are dropped,
and run again by another one or after the next start.
"""

import asyncio
import contextlib
import logging
import secrets
import sqlite3
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from typing import Any, Literal

import anyio
from anyio.abc import TaskGroup
from anyio.to_thread import run_sync
from msgspec import Raw, Struct, ValidationError
from msgspec.json import decode
from starlette.types import Message, Scope

from batching.errors import ClientGone, QueueFull, Refused
from batching.fair_share import Priority
from server.apis.openai.batches.input_file import InputChecker, LineBody
from server.apis.openai.batches.store import (
    CHUNK_BYTES,
    BatchRecord,
    BatchStore,
    LineResult,
    LineTokens,
    PendingInput,
    StoreFull,
)
from server.apis.openai.endpoint import BodyEndpoint
from server.apis.openai.jobs import POLL_S, JobRunner, StoredJob
from server.apis.openai.response_schemas import BatchError, BatchStatus, ResponseError
from server.apis.openai.store import RETRY_S, storage_namespace
from server.core.api_keys import NO_KEY, ApiKey
from server.core.request_context import RequestContext, RequestRecord
from server.core.worker_client import Deadlines, IncomingRequest
from server.http.access import client_of
from server.http.errors import error_document
from server.http.json import heavy_limiter, to_json
from server.http.ndjson import LineWindow
from server.http.request import count_failure
from server.http.transfers import Transfer

log = logging.getLogger("onequeue.batches")

CHECKED_BYTES = 4 * CHUNK_BYTES
CLAIMED_LINES = 16  # at a time: a process that is slow, or ends, holds up few
WINDOW_DIVISOR = 4  # the lines in flight hold at most one divided by this of the queue's slots
MAX_CRASHES = 3  # of the process in a row, without a result of the batch
UNSERVED_TEXTS = {
    "batch_cancelled": "The batch was cancelled before this line had a result.",
    "batch_expired": "The batch expired before this line had a result.",
}


class LineResponse(Struct):
    status_code: int
    request_id: str
    body: Raw


class LineSummary(Struct):
    """The part of a response that the batch counts."""

    model: str | None = None
    usage: dict[str, Any] | None = None

    def tokens(self) -> LineTokens:
        """Return the tokens of the usage, as any of the endpoints names them."""
        usage: dict[str, Any] = {"cached_tokens": 0, "reasoning_tokens": 0}
        for name, value in (self.usage or {}).items():
            usage |= value if name.endswith("_details") else {name: value}
        cached = usage.get("cache_read_input_tokens", 0)  # Anthropic's input has only the others
        return LineTokens(
            usage.get("prompt_tokens", 0) + usage.get("input_tokens", 0) + cached,
            usage["cached_tokens"] + cached,
            usage.get("completion_tokens", 0) + usage.get("output_tokens", 0),
            usage["reasoning_tokens"],
        )


class LineOutput(Struct):
    """A line of an output or an error file."""

    id: str
    custom_id: str
    response: LineResponse | None
    error: ResponseError | None


class CapturedResponse:
    """The `send` of a line: keeps the response."""

    def __init__(self, line: PendingInput, custom_id: str, request_id: str) -> None:
        self.line, self.custom_id, self.request_id = line, custom_id, request_id
        self.status = 0
        self.parts: list[bytes] = []

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.parts.append(message.get("body", b""))

    def result(self) -> LineResult:
        """Return the line of the output or the error file."""
        content = b"".join(self.parts)
        response = LineResponse(self.status, self.request_id, Raw(content))
        result = line_result(self.line.position, self.custom_id, response, None)
        try:
            summary = decode(content, type=LineSummary)
        except ValidationError:  # a list, or a pipeline's own object
            summary = LineSummary()
        return result._replace(model=summary.model, tokens=summary.tokens())


def line_result(
    position: int, custom_id: str, response: LineResponse | None, error: ResponseError | None
) -> LineResult:
    output = LineOutput("batch_req_" + secrets.token_hex(12), custom_id, response, error)
    is_error = response is None or response.status_code != 200
    return LineResult(position, to_json(output) + b"\n", is_error)


class BatchRunner:
    """Gives turns to the batches that have not ended: to the oldest one of each client."""

    def __init__(
        self, jobs: JobRunner, store: BatchStore, endpoints: Mapping[str, BodyEndpoint[Any]]
    ) -> None:
        self.jobs, self.worker_client = jobs, jobs.worker_client
        self.store = store
        self.endpoints = endpoints  # by path
        self.check_turn = asyncio.Lock()  # one input file is checked at a time
        self._waiting: dict[BatchTask, asyncio.Future[None]] = {}  # for a turn
        self._turns = count(1)
        jobs.stores.append(store)
        jobs.on_start.append(self._start)
        jobs.on_poll.append(self._poll)

    @property
    def batches(self) -> "list[BatchTask]":
        return [job for job in self.jobs.jobs.values() if isinstance(job, BatchTask)]

    def _start(self) -> None:
        self.app = self.jobs.app
        self.window = LineWindow(max(1, self.app.settings.max_queue_size // WINDOW_DIVISOR))
        self.worker_client.loaded.add_done_callback(lambda _: self._wake())

    async def _poll(self) -> None:
        """Run the batches that other processes have created, and end those they have cancelled."""
        try:
            records = await run_sync(self.store.unfinished)
        except (OSError, sqlite3.Error):  # JobRunner has logged it
            return
        for record in records:
            self.add(record)
            job = self.jobs.jobs.get(record.job.id)  # none if this process stops
            if job and record.job.status == "cancelling":
                job.abort()

    def add(self, record: BatchRecord) -> None:
        """Run a batch when it is its client's oldest one."""
        if record.job.id not in self.jobs.jobs and not self.jobs.is_stopping:
            batch = BatchTask(self, record)
            self.jobs.run(batch)
            batch.task.add_done_callback(lambda _: self._wake())

    def _wake(self) -> None:
        """Let the batches look again whether they may run, and start lines."""
        for batch in self.batches:
            batch.changed.set()
        self.pass_turns()

    def may_run(self, batch: "BatchTask") -> bool:
        loaded, client = self.worker_client.loaded, batch.context.client
        if not loaded.done() or loaded.cancelled() or loaded.exception():
            return False
        others = [other for other in self.batches if other.context.client == client]
        oldest = min(others, key=lambda other: other.record.number)
        return batch is oldest or batch.end is not None

    async def take_turn(self, batch: "BatchTask", size: int) -> None:
        """Wait until a batch may start a line, which is then in flight."""
        self._waiting[batch] = turn = asyncio.get_running_loop().create_future()
        batch.next_size = size
        try:
            self.pass_turns()
            await turn
        finally:
            self._waiting.pop(batch, None)

    def pass_turns(self) -> None:
        """Let batches start lines while the window, and the memory of one body, has room. Next is
        the batch with the fewest lines in flight, of these the one whose last turn was first."""
        batches = self.batches
        while self._waiting:
            batch = min(self._waiting, key=lambda batch: (batch.in_flight, batch.last_turn))
            in_flight = sum(batch.in_flight for batch in batches)
            size = sum(batch.bytes for batch in batches) + batch.next_size
            if in_flight and (in_flight >= self.window.size or size > self.app.max_body):
                return
            turn = self._waiting.pop(batch)
            if not turn.done():  # else interrupted
                batch.last_turn = next(self._turns)
                batch.in_flight += 1
                batch.bytes += batch.next_size
                turn.set_result(None)


class BatchTask(StoredJob):
    """A batch that has not ended."""

    def __init__(self, runner: BatchRunner, record: BatchRecord) -> None:
        super().__init__(record.job.id, record.namespace)
        self.runner, self.store, self.record = runner, runner.store, record
        keyring, namespace = runner.app.keyring, record.namespace
        keys: Iterable[ApiKey] = keyring if keyring.required else (NO_KEY,)
        found = [key for key in keys if storage_namespace(key.id) == namespace]
        self.is_key_valid, key = bool(found), found[0] if found else NO_KEY
        client, priority = client_of(key, record.address), max(Priority.BATCH, key.priority)
        # all lines count as one request in the shares of the queue
        self.context = RequestContext(client, self.id, None, key.share, priority, True, key=key)
        self.end: Literal["cancelled", "expired"] | None = None  # instead of completed
        self.changed = asyncio.Event()  # it may run, or is interrupted
        self.last_turn = self.next_size = 0
        self.in_flight = self.bytes = 0  # of lines without a stored result
        self._serving: anyio.CancelScope | None = None  # of the lines
        self._line_ended = asyncio.Event()
        self._finished: list[CapturedResponse] = []  # their results are not stored yet
        self._storing = asyncio.Lock()
        left_s = max(0.0, record.job.expires_at - time.time())
        self.expires = time.monotonic() + left_s
        self._timer = asyncio.get_running_loop().call_later(left_s, self._end_early, "expired")

    @property
    def is_interrupted(self) -> bool:
        return self.end is not None or self.runner.jobs.is_stopping

    def drain(self) -> None:
        if self._serving:
            self._serving.cancel()
        self.changed.set()

    def abort(self) -> None:
        self._end_early("cancelled")

    def _end_early(self, end: Literal["cancelled", "expired"]) -> None:
        self.end = self.end or end
        self.drain()

    async def run(self) -> None:
        try:
            while not self.runner.jobs.is_stopping:
                wait_s: float | None = RETRY_S
                if self.runner.may_run(self) and (wait_s := await self._try()) is None:
                    break
                self.changed.clear()
                with contextlib.suppress(TimeoutError):  # else it may run, or is interrupted
                    await asyncio.wait_for(self.changed.wait(), wait_s)
        except Exception:
            log.exception("bug in a batch id=%s", self.id)
            with contextlib.suppress(OSError, sqlite3.Error):
                await self._finish("failed", [BatchError("server_error", "internal server error")])
        finally:
            self._timer.cancel()

    async def _try(self) -> float | None:
        """Run the batch. Return None if it has ended, else the time until the next attempt: other
        processes run its last lines, the disk has failed, or there is no memory for checking its
        input."""
        try:
            try:
                return None if await self._advance() else POLL_S
            except StoreFull as error:
                await self._finish("failed", [BatchError("storage_full", str(error))])
                return None
        except QueueFull:
            pass
        except (OSError, sqlite3.Error) as error:
            log.error("batch delayed id=%s error=%.200r", self.id, error)
        return RETRY_S

    async def _advance(self) -> bool:
        """Take the batch as far as this process can. Return whether it has ended."""
        record = self.record
        if not await run_sync(self.store.reload, record):
            return True  # by another process
        await run_sync(self.store.release, record)  # what an attempt before has left
        if record.job.status == "cancelling":
            self.end = self.end or "cancelled"
        if error := self._reason_to_fail():
            return await self._finish("failed", [error])
        if record.job.status == "validating" and not self.is_interrupted:
            async with self.runner.check_turn:
                if not await run_sync(self.store.claim_check, record):
                    return False
                errors = await self._check_input()
            if errors:
                return await self._finish("failed", errors)
        if record.job.status == "in_progress" and not self.is_interrupted:
            await self._serve_lines()
            await run_sync(self.store.release, record)
        if self.runner.jobs.is_stopping:
            return True
        if self.end:
            await self._fail_unserved("batch_" + self.end)
        if await run_sync(self.store.has_lines, record):
            return False
        return await self._finish(self.end or "completed")

    def _reason_to_fail(self) -> BatchError | None:
        endpoint = self.record.job.endpoint
        if not self.is_key_valid:
            return BatchError("invalid_api_key", "the API key of the batch is not valid any more")
        if endpoint not in self.runner.endpoints:
            return BatchError("model_not_found", f"no model serves {endpoint} any more")
        if self.record.crashes >= MAX_CRASHES:
            reason = f"the server ended {MAX_CRASHES} times while it ran these lines"
            return BatchError("server_error", reason)
        return None

    async def _finish(self, status: BatchStatus, errors: Sequence[BatchError] = ()) -> bool:
        if await run_sync(self.store.finish, self.record, status, errors):
            job = self.record.job
            counts, seconds = job.request_counts, time.time() - (job.in_progress_at or time.time())
            log.info(
                "batch ended id=%s status=%s completed=%d failed=%d seconds=%.1f",
                self.id,
                job.status,
                counts.completed,
                counts.failed,
                seconds,
            )
        return True

    # ── the input file ──

    async def _check_input(self) -> Sequence[BatchError]:
        """Check the input file, and begin to run its lines. Return its errors. Raises QueueFull if
        bodies take too much memory: a line that is checked counts as one."""
        job, input_id = self.record.job, self.record.job.input_file_id
        app, transfer, turns = self.runner.app, Transfer(), heavy_limiter()
        checker = InputChecker(job.endpoint, app.max_body)

        def check(offset: int) -> int:
            checker.feed(piece := self.store.read(input_id, offset, CHECKED_BYTES))
            return len(piece)

        size = await run_sync(self.store.size, input_id)
        app.memory.take(transfer, min(size, app.max_body))
        try:
            offset = 0
            while offset < size:
                offset += await run_sync(check, offset, limiter=turns)
                if self.is_interrupted or checker.has_failed:
                    break
            lines = await run_sync(checker.finish, limiter=turns)
        finally:
            app.memory.release(transfer)
        if not checker.errors and not self.is_interrupted:
            await run_sync(self.store.begin, self.record, lines)
        return checker.errors

    def _read_line(self, line: PendingInput) -> tuple[str, bytes]:
        """Return a line's custom_id and its body. In a pool thread."""
        content = self.store.read(self.record.job.input_file_id, line.offset, line.size)
        checked = decode(content, type=LineBody)
        return checked.custom_id, bytes(checked.body)

    # ── lines ──

    async def _serve_lines(self) -> None:
        """Run lines without a result until the batch is interrupted, or none is left to claim."""
        self.endpoint = self.runner.endpoints[self.record.job.endpoint]
        self._to_start: deque[PendingInput] = deque()
        self._finished, self._retry_at = [], 0.0
        try:
            async with anyio.create_task_group() as lines:
                self._serving = lines.cancel_scope
                await self._start_lines(lines)
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        finally:
            self.in_flight = self.bytes = 0
            self.runner.pass_turns()

    async def _start_lines(self, lines: TaskGroup) -> None:
        """Start each line without a result in its turn, until all have ended."""
        while True:
            if not self._to_start:
                self._to_start += await run_sync(self.store.claim, self.record, CLAIMED_LINES)
            if self._to_start:
                await self._wait_for_turn(self._to_start[0].size)
                lines.start_soon(self._serve_line, self._to_start.popleft())
            elif self.in_flight:  # they may be refused
                self._line_ended.clear()
                await self._line_ended.wait()
            else:
                return

    async def _wait_for_turn(self, size: int) -> None:
        """Wait until a line may start. One that cannot start takes no turn."""
        await asyncio.sleep(self._retry_at - time.monotonic())
        if bucket := self.context.key.tokens:
            while wait_s := bucket.wait_s(1, time.monotonic()):  # noqa: ASYNC110
                await asyncio.sleep(wait_s)
        await self.runner.worker_client.queue.wait_for_room(self.context)
        await self.runner.take_turn(self, size)

    async def _serve_line(self, line: PendingInput) -> None:
        """Run a line, and store its result. One that is refused is started again later."""
        request_id = f"{self.id}-{line.number}"
        custom_id, body = await run_sync(self._read_line, line)
        scope, response = self._scope(request_id), CapturedResponse(line, custom_id, request_id)
        try:
            await self._respond(scope, body, response)
        except (Refused, ClientGone) as refusal:
            wait_s = min(refusal.retry_after_s or 1.0, RETRY_S)
            self._retry_at = time.monotonic() + wait_s
            self._to_start.appendleft(line)
            self._end_turns([line.size])
            return
        finally:
            self.runner.app.memory.release(scope["transfer"])
        self.runner.window.record(sum(map(len, response.parts)))
        self._finished.append(response)
        with anyio.CancelScope(shield=True):  # the work is done
            async with self._storing:  # with the results that have come meanwhile
                if finished := self._finished:
                    self._finished = []
                    results = await run_sync(
                        lambda: self.store.append(self.record, [each.result() for each in finished])
                    )
                    self._end_turns([response.line.size for response in finished])
                    self._count(results)

    def _end_turns(self, sizes: Sequence[int]) -> None:
        self.in_flight -= len(sizes)
        self.bytes -= sum(sizes)
        self._line_ended.set()
        self.runner.pass_turns()

    def _scope(self, request_id: str) -> Scope:
        return {
            "type": "http",
            "method": "POST",
            "path": self.record.job.endpoint,
            "headers": [],
            "query_string": b"",
            "app": self.runner.app,
            "context": self.context,
            "record": RequestRecord(request_id, received_at=time.monotonic()),
            "transfer": Transfer(),
            "client": (self.record.address, 0),
        }

    async def _respond(self, scope: Scope, body: bytes, response: CapturedResponse) -> None:
        """Have the endpoint respond to a line. Raises a Refused."""
        deadlines = Deadlines(self.expires + RETRY_S, self.expires + RETRY_S)
        incoming = IncomingRequest(scope, None, deadlines)
        try:
            self.runner.app.count_body(scope, len(body))
            request = await self.endpoint.read(incoming, body)
            await self.endpoint.serve(incoming, response, request)
        except (Refused, ClientGone):
            raise
        except Exception as error:
            failure = count_failure(error, scope)
            response.status = failure.status
            response.parts = [to_json(error_document(failure, scope))]

    def _count(self, results: Sequence[LineResult]) -> None:
        metric = self.runner.app.metrics.batch_lines
        failed = sum(result.is_error for result in results)
        metric.labels("failed").inc(failed)
        metric.labels("completed").inc(len(results) - failed)

    async def _fail_unserved(self, code: str) -> None:
        """Add the lines without a result to the error file."""
        error = ResponseError(code, UNSERVED_TEXTS[code])

        def fail_page() -> list[LineResult]:
            results = [
                line_result(line.position, self._read_line(line)[0], None, error)
                for line in self.store.claim(self.record, CLAIMED_LINES)
            ]
            return self.store.append(self.record, results) if results else []

        while results := await run_sync(fail_page):
            self._count(results)
