"""Runs batches: one of each client at a time, its lines through their endpoint.

    input file → checked → lines, a window of them in flight → endpoint → results → store.py

A line is a request without a connection: its endpoint reads, submits and builds as for HTTP. Lines
have low priority, count as one request in the shares of the queue, and wait while it is full. When
the server stops, lines in flight are dropped, and run again after the next start.
"""

import asyncio
import contextlib
import logging
import math
import secrets
import sqlite3
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from anyio.to_thread import run_sync
from msgspec import Raw, Struct
from msgspec.json import decode
from starlette.types import Message, Scope

from batching.errors import ClientGone, QueueFull, Refused
from batching.fair_share import Priority, request_share
from server.core.api_keys import NO_KEY, ApiKey
from server.core.request_context import RequestContext, RequestRecord
from server.core.worker_client import Deadlines, WorkerClient
from server.http.access import client_of
from server.http.errors import HttpError
from server.http.json import heavy_limiter, to_json
from server.http.ndjson import LineWindow
from server.http.request import Application, count_failure
from server.http.transfers import Transfer
from server.openai.batches.files import in_store
from server.openai.batches.input_file import CHUNK_BYTES, InputChecker, read_body
from server.openai.batches.store import (
    BatchRecord,
    BatchStore,
    LineResult,
    LineTokens,
    PendingInput,
    StoreFull,
)
from server.openai.endpoint import BodyEndpoint
from server.openai.response_schemas import BatchError, BatchStatus
from server.openai.responses.store import storage_namespace

log = logging.getLogger("onequeue.batches")

MAX_RUNNING = 8  # batches of different clients
PAGE_LINES = 64
PAGE_BYTES = 1 << 20
RETRY_S = 10.0  # after a full disk, and at most after a refusal
SWEEP_S = 60.0
MAX_CRASHES = 3  # of the process in a row, without a result of the batch
UNSERVED_TEXTS = {
    "batch_cancelled": "The batch was cancelled before this line had a result.",
    "batch_expired": "The batch expired before this line had a result.",
}


class LineResponse(Struct):
    status_code: int
    request_id: str
    body: Raw


class LineError(Struct):
    code: str
    message: str


class TokenDetails(Struct, frozen=True):
    cached_tokens: int = 0
    reasoning_tokens: int = 0


class LineUsage(Struct):
    """The usage of a response, as any of the endpoints names it."""

    prompt_tokens: int = 0
    input_tokens: int = 0
    prompt_tokens_details: TokenDetails = TokenDetails()
    input_tokens_details: TokenDetails = TokenDetails()
    completion_tokens: int = 0
    output_tokens: int = 0
    completion_tokens_details: TokenDetails = TokenDetails()
    output_tokens_details: TokenDetails = TokenDetails()

    def counts(self) -> LineTokens:
        inputs = self.prompt_tokens_details, self.input_tokens_details
        outputs = self.completion_tokens_details, self.output_tokens_details
        return LineTokens(
            self.prompt_tokens + self.input_tokens,
            sum(details.cached_tokens for details in inputs),
            self.completion_tokens + self.output_tokens,
            sum(details.reasoning_tokens for details in outputs),
        )


class LineSummary(Struct):
    """The part of a response that the batch counts."""

    model: str | None = None
    usage: LineUsage | None = None


class LineOutput(Struct):
    """A line of an output or an error file."""

    id: str
    custom_id: str
    response: LineResponse | None
    error: LineError | None


class CapturedResponse:
    """The `send` of a line: keeps the response."""

    def __init__(self) -> None:
        self.status = 0
        self.parts: list[bytes] = []

    @property
    def size(self) -> int:
        return sum(map(len, self.parts))

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.parts.append(message.get("body", b""))


class FinishedLine(NamedTuple):
    position: int
    custom_id: str
    request_id: str
    response: CapturedResponse

    def result(self) -> LineResult:
        """Return the line of the output or the error file."""
        content = b"".join(self.response.parts)
        response = LineResponse(self.response.status, self.request_id, Raw(content))
        result = line_result(self.position, self.custom_id, response, None)
        summary = decode(content, type=LineSummary)
        tokens = summary.usage.counts() if summary.usage else LineTokens()
        return result._replace(model=summary.model, tokens=tokens)


def line_result(
    position: int, custom_id: str, response: LineResponse | None, error: LineError | None
) -> LineResult:
    output = LineOutput("batch_req_" + secrets.token_hex(12), custom_id, response, error)
    is_error = response is None or response.status_code != 200
    return LineResult(position, to_json(output) + b"\n", is_error)


async def receive_nothing() -> Message:
    """The `receive` of a line: no client disconnects."""
    await asyncio.get_running_loop().create_future()
    raise AssertionError


class BatchRunner:
    """Owns the batches that have not ended. `start` and `close` run on the event loop."""

    def __init__(
        self,
        worker_client: WorkerClient,
        store: BatchStore,
        endpoints: Mapping[str, BodyEndpoint[Any]],
    ) -> None:
        self.worker_client = worker_client
        self.store = store
        self.endpoints = endpoints  # by path
        self.is_stopping = False
        self.check_turn = asyncio.Lock()  # one input file is checked at a time
        self.runs: dict[str, BatchTask] = {}  # by the batch's id, oldest first

    def start(self, app: Application) -> None:
        self.app = app
        self.worker_client.on_drain.add(self._on_drain)
        for record in self.store.unfinished():
            self.add(record)
        self.worker_client.loaded.add_done_callback(lambda _: self.start_next())
        self._sweeping = asyncio.get_running_loop().create_task(self._sweep())

    def find_key(self, namespace: bytes) -> ApiKey | None:
        """Return the key that a batch was created with; None if it is not valid any more."""
        keys: Iterable[ApiKey] = self.app.keyring if self.app.keyring.required else (NO_KEY,)
        return next((key for key in keys if storage_namespace(key.id) == namespace), None)

    async def close(self) -> None:
        self._on_drain()
        self._sweeping.cancel()
        tasks = [run.task for run in self.runs.values() if run.task]
        await asyncio.gather(self._sweeping, *tasks, return_exceptions=True)
        await run_sync(self.store.close)

    def add(self, record: BatchRecord) -> None:
        """Run a batch when its turn comes."""
        self.runs[record.job.id] = BatchTask(self, record)
        self.start_next()

    def start_next(self) -> None:
        """Start the oldest batches that may run now."""
        loaded = self.worker_client.loaded
        if self.is_stopping or not loaded.done() or loaded.cancelled() or loaded.exception():
            return
        clients = {run.context.client for run in self.runs.values() if run.task}
        for run in self.runs.values():
            is_next = run.context.client not in clients and len(clients) < MAX_RUNNING
            if run.task is None and (is_next or run.end):
                clients.add(run.context.client)
                run.start()

    def on_end(self, run: "BatchTask") -> None:
        del self.runs[run.id]
        self.start_next()

    async def cancel(self, namespace: bytes, id: str) -> None:
        """Cancel a batch, if it has not ended. Raises QueueFull if the disk fails."""
        if (run := self.runs.get(id)) and run.record.namespace == namespace:
            await run.cancel()

    def _on_drain(self) -> None:
        self.is_stopping = True
        for run in self.runs.values():
            run.interrupt()

    async def _sweep(self) -> None:
        while True:
            try:
                await run_sync(self.store.remove_expired)
            except (OSError, sqlite3.Error) as error:
                log.error("expired files not removed error=%.200r", error)
            await asyncio.sleep(SWEEP_S)


class BatchTask:
    """A batch that has not ended. It waits until `start`."""

    def __init__(self, runner: BatchRunner, record: BatchRecord) -> None:
        self.runner, self.store, self.record = runner, runner.store, record
        self.id = record.job.id
        found = runner.find_key(record.namespace)
        self.is_key_valid, key = found is not None, found or NO_KEY
        client, priority = client_of(key, record.address), max(Priority.BATCH, key.priority)
        # all lines count as one request in the shares of the queue
        self.context = RequestContext(client, self.id, None, key.share, priority, True, key)
        self.task: asyncio.Task[None] | None = None
        self.end: Literal["cancelled", "expired"] | None = None  # instead of completed
        if record.job.status == "cancelling":
            self.end = "cancelled"
        self._changed = asyncio.Event()  # there is room in the window, or no more lines start
        self._is_stale = False  # `record` may differ from the stored one
        self._lines: set[asyncio.Task[None]] = set()
        self._finished: list[FinishedLine] = []  # their results are not stored yet
        self._filled = asyncio.Event()  # there are some, or all lines have ended
        self._all_ended = False
        left_s = max(0.0, record.job.expires_at - time.time())
        self.expires = time.monotonic() + left_s
        self._timer = asyncio.get_running_loop().call_later(left_s, self._expire)

    @property
    def is_interrupted(self) -> bool:
        return self.end is not None or self.runner.is_stopping

    def interrupt(self) -> None:
        """Drop the lines in flight."""
        for line in self._lines:
            line.cancel()
        self._changed.set()

    def _expire(self) -> None:
        self.end = self.end or "expired"
        self.interrupt()
        self.runner.start_next()

    async def cancel(self) -> None:
        job = self.record.job
        if self.end is None and job.status in ("validating", "in_progress"):
            self.end = "cancelled"
            job.status, job.cancelling_at = "cancelling", int(time.time())
            self.interrupt()
            try:
                await in_store(self.store.save, self.record)
            finally:
                self.runner.start_next()

    def start(self) -> None:
        self.task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        try:
            while not await self._try():
                self._changed.clear()
                with contextlib.suppress(TimeoutError):  # else interrupted
                    await asyncio.wait_for(self._changed.wait(), RETRY_S)
        except Exception:
            log.exception("bug in a batch id=%s", self.id)
            with contextlib.suppress(OSError, sqlite3.Error):
                await self._finish("failed", [BatchError("server_error", "internal server error")])
        finally:
            self._timer.cancel()
            self.runner.on_end(self)

    async def _try(self) -> bool:
        """Run the batch. Return False if it is to be tried again: the disk has failed, or there is
        no memory for checking its input."""
        try:
            if self._is_stale:
                self.record = await run_sync(self.store.reload, self.record)
                self.record.crashes = 0
                self._is_stale = False
            try:
                await self._advance()
            except StoreFull as error:
                await self._finish("failed", [BatchError("storage_full", str(error))])
        except QueueFull:
            return self.runner.is_stopping
        except (OSError, sqlite3.Error) as error:
            log.error("batch delayed id=%s error=%.200r", self.id, error)
            self._is_stale = True
            return self.runner.is_stopping
        return True

    async def _advance(self) -> None:
        job = self.record.job
        if not self.is_key_valid:
            error = BatchError("invalid_api_key", "the API key of the batch is not valid any more")
            return await self._finish("failed", [error])
        if job.endpoint not in self.runner.endpoints:
            error = BatchError("model_not_found", f"no model serves {job.endpoint} any more")
            return await self._finish("failed", [error])
        if job.status == "validating" and not self.is_interrupted:
            async with self.runner.check_turn:
                errors = await self._check_input()
            if errors:
                return await self._finish("failed", errors)
        if job.status == "in_progress" and not self.is_interrupted:
            self.record.crashes += 1
            if self.record.crashes > MAX_CRASHES:
                reason = f"the server ended {MAX_CRASHES} times while it ran these lines"
                return await self._finish("failed", [BatchError("server_error", reason)])
            await run_sync(self.store.save, self.record)
            await self._serve_lines()
        if self.runner.is_stopping:
            self.record.crashes = 0
            return await run_sync(self.store.save, self.record)
        if self.end is None:
            job.status, job.finalizing_at = "finalizing", int(time.time())
        elif job.request_counts.total:
            await self._fail_unserved("batch_" + self.end)
        await self._finish(self.end or "completed")

    async def _finish(self, status: BatchStatus, errors: Sequence[BatchError] = ()) -> None:
        await run_sync(self.store.finish, self.record, status, errors)
        job = self.record.job
        counts, seconds = job.request_counts, time.time() - (job.in_progress_at or time.time())
        log.info(
            "batch ended id=%s status=%s completed=%d failed=%d seconds=%.1f",
            self.id,
            status,
            counts.completed,
            counts.failed,
            seconds,
        )

    # ── the input file ──

    async def _check_input(self) -> Sequence[BatchError]:
        """Check the input file, and begin to run its lines. Return its errors. Raises QueueFull if
        bodies take too much memory: a line that is checked counts as one."""
        job, path = self.record.job, self.store.path(self.record.job.input_file_id)
        app, transfer, turns = self.runner.app, Transfer(), heavy_limiter()
        checker = InputChecker(job.endpoint, app.max_body)

        def check(offset: int) -> bool:
            with path.open("rb") as file:
                file.seek(offset)
                checker.feed(chunk := file.read(CHUNK_BYTES))
                return len(chunk) == CHUNK_BYTES

        size = (await run_sync(path.stat)).st_size
        app.memory.take(transfer, min(size, app.max_body))
        try:
            offset = 0
            while await run_sync(check, offset, limiter=turns):
                offset += CHUNK_BYTES
                if self.is_interrupted or checker.has_failed:
                    break
            lines = await run_sync(checker.finish, limiter=turns)
        finally:
            app.memory.release(transfer)
        if not checker.errors and not self.is_interrupted:
            await run_sync(self.store.begin, self.record, lines)
        return checker.errors

    def _read_page(self, after: int) -> list[tuple[PendingInput, str, bytes]]:
        """Return the next lines without a result, with their custom_ids and their bodies. In a
        pool thread."""
        page: list[tuple[PendingInput, str, bytes]] = []
        size = 0
        with self.store.path(self.record.job.input_file_id).open("rb") as file:
            for line in self.store.pending(self.record, after, PAGE_LINES):
                size += line.size
                if page and size > PAGE_BYTES:
                    break
                file.seek(line.offset)
                page.append((line, *read_body(file.read(line.size))))
        return page

    # ── lines ──

    async def _serve_lines(self) -> None:
        """Run all lines without a result, until the batch is interrupted."""
        app, job = self.runner.app, self.record.job
        self.endpoint = self.runner.endpoints[job.endpoint]
        model = self.endpoint.models.default.registry_name
        self.lane = self.runner.worker_client.models[model].lane_of(self.context.priority)
        # a line has the time of the batch: only the size of responses shrinks the window
        self._window = LineWindow(request_share(app.settings.max_queue_size), math.inf)
        self._in_flight = self._bytes = 0
        self._finished, self._all_ended = [], False
        writer = asyncio.create_task(self._store_results())
        try:
            after = -1
            while page := await run_sync(self._read_page, after):
                for line, custom_id, body in page:
                    if not await self._wait_for_window(line.size, writer):
                        return
                    self._start_line(line, custom_id, body)
                after = page[-1][0].position
            while self._in_flight and await self._wait_for_change(writer):
                pass
        finally:
            for task in self._lines:
                task.cancel()
            await asyncio.gather(*self._lines, return_exceptions=True)
            self._all_ended = True
            self._filled.set()
            await writer

    def _start_line(self, line: PendingInput, custom_id: str, body: bytes) -> None:
        self._in_flight += 1
        self._bytes += line.size
        task = asyncio.create_task(self._serve_line(line, custom_id, body))
        self._lines.add(task)
        task.add_done_callback(self._lines.discard)

    async def _wait_for_window(self, size: int, writer: "asyncio.Task[None]") -> bool:
        """Wait until another line may start. Return False if none may any more."""
        max_body = self.runner.app.max_body
        while self._in_flight and (
            self._in_flight >= self._window.size or self._bytes + size > max_body
        ):
            if not await self._wait_for_change(writer):
                return False
        return not self.is_interrupted and not writer.done()

    async def _wait_for_change(self, writer: "asyncio.Task[None]") -> bool:
        if self.is_interrupted or writer.done():
            return False
        self._changed.clear()
        await self._changed.wait()
        return not self.is_interrupted and not writer.done()

    async def _serve_line(self, line: PendingInput, custom_id: str, body: bytes) -> None:
        """Run a line until it has a result."""
        started_at = time.monotonic()
        request_id = f"{self.id}-{line.number}"
        while True:
            scope = self._scope(request_id)
            try:
                response = await self._respond(scope, body)
                break
            except (Refused, ClientGone) as refusal:
                wait_s = refusal.retry_after_s or 1.0
                await asyncio.sleep(min(wait_s, RETRY_S))
            finally:
                self.runner.app.memory.release(scope["transfer"])
        self._window.record(time.monotonic() - started_at, response.size)
        self._finished.append(FinishedLine(line.position, custom_id, request_id, response))
        self._bytes -= line.size
        self._filled.set()

    def _scope(self, request_id: str) -> Scope:
        """Return the scope of a line's request."""
        return {
            "type": "http",
            "method": "POST",
            "path": self.record.job.endpoint,
            "headers": [],
            "query_string": b"",
            "app": self.runner.app,
            "context": self.context,
            "record": RequestRecord(received_at=time.monotonic()),
            "request_id": request_id.encode(),
            "transfer": Transfer(),
            "client": (self.record.address, 0),
        }

    async def _wait_for_tokens(self) -> None:
        """Wait until the limit of the key allows tokens."""
        while bucket := self.context.key.tokens:
            if not (wait_s := bucket.wait_s(1, time.monotonic())):
                return
            await asyncio.sleep(wait_s)

    async def _respond(self, scope: Scope, body: bytes) -> CapturedResponse:
        """Return the response to a line's request. Raises a Refused."""
        response = CapturedResponse()
        deadlines = Deadlines(self.expires + RETRY_S, self.expires + RETRY_S)
        try:
            self.runner.app.count_body(scope, len(body))
            request = await self.endpoint.read(scope, receive_nothing, body, deadlines)
            await self._wait_for_tokens()
            await self.runner.worker_client.queue.wait_for_room(self.context, self.lane)
            await self.endpoint.serve(scope, None, response, request, deadlines)
        except (Refused, ClientGone):
            raise
        except Exception as error:
            failure: HttpError = count_failure(error, scope)
            response.status, response.parts = failure.status, [to_json(failure.document)]
        return response

    async def _store_results(self) -> None:
        """Store results as they come, together where several wait, until all lines have ended."""
        try:
            while True:
                await self._filled.wait()
                self._filled.clear()
                if finished := self._finished:
                    self._finished = []
                    results = await run_sync(self._append, finished)
                    self._in_flight -= len(results)
                    self._count(results)
                    self._changed.set()
                elif self._all_ended:
                    return
        finally:
            self._changed.set()

    def _append(self, finished: Sequence[FinishedLine]) -> list[LineResult]:
        """Store the results of lines. In a pool thread."""
        results = [line.result() for line in finished]
        self.store.append(self.record, results)
        return results

    def _count(self, results: Sequence[LineResult]) -> None:
        metric = self.runner.app.metrics.batch_lines
        failed = sum(result.is_error for result in results)
        metric.labels("failed").inc(failed)
        metric.labels("completed").inc(len(results) - failed)

    async def _fail_unserved(self, code: str) -> None:
        """Add the lines without a result to the error file."""
        error = LineError(code, UNSERVED_TEXTS[code])

        def fail_page() -> list[LineResult]:
            page = self._read_page(-1)
            results = [
                line_result(line.position, custom_id, None, error) for line, custom_id, _ in page
            ]
            if results:
                self.store.append(self.record, results)
            return results

        while results := await run_sync(fail_page):
            self._count(results)
