"""NDJSON: one input per line of the body, one line of answer or error per line of input, in order.

    chunks → lines (lines.py) → parse → wait for room → submit → results in order → spool.py

The body is read only as fast as its lines are served. A stream has as many inputs in flight as are
expected to start well within the time limit of a line, and at most half of the queue; all of them
count as one request there. Lines of all streams take at most 1 ms of a turn of the event loop.
A stream ends early with an error that names the first line not served.
"""

import asyncio
import time
from collections import deque
from dataclasses import dataclass, replace
from functools import partial
from json import JSONDecoder
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import anyio
from starlette.types import Receive, Scope, Send

from batching.batcher import WINDOW_BATCHES
from batching.errors import ClientGone, Draining, InvalidInput, QueueFull, Refused
from server.core.request_context import RequestContext
from server.core.worker_client import Deadlines, IncomingRequest, Submission, wait_for_disconnect
from server.http.access import check_tokens
from server.http.errors import HttpError
from server.http.json import Document, InvalidJson, JsonBodyParser, parse_value, to_json
from server.http.lines import Line, LineSplitter
from server.http.request import (
    CLOSE,
    NDJSON,
    Application,
    count_failure,
    read_headers,
    receive_until,
)
from server.http.spool import SpooledResponse

HEADERS = [
    (b"content-type", NDJSON),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
    *CLOSE,  # the stream may end before the body
]
# A line should be answered within this part of its time limit.
TARGET_DIVISOR = 4
# Bytes of answers that a stream may have computed and not passed on.
MAX_ANSWER_BYTES = 1 << 25
MEMORY_POLL_S = 0.05
MAX_INVALID = 100  # lines in a row that are not JSON
MAX_ID_CHARS = 256
JOINED_BYTES = 1 << 16  # of a body, in which documents on one line are looked for


P = TypeVar("P")


class LineEndpoint(Protocol[P]):
    body_parser: JsonBodyParser
    parse_blocks: ClassVar[bool]  # parsing takes long even for a short line

    @property
    def model(self) -> str:
        """The model's name in the registry."""

    def parse_line(self, value: str | Document, scope: Scope) -> P:
        """Return the request of a line. Raises InvalidInput. In a pool thread for long lines."""

    def submit(self, incoming: IncomingRequest, request: P) -> Submission[Any]:
        """Submit the request, or raise a Refused."""

    async def content(self, scope: Scope, request: P, work: Any) -> bytes:
        """Return the answer as JSON. `work`: what `submit` has returned."""


@dataclass(slots=True)
class PendingLine(Generic[P]):
    number: int
    size: int  # bytes
    id: str | int | None = None  # the client's
    request: P | None = None
    work: Submission[Any] | None = None  # holds the slots
    error: Exception | None = None

    @property
    def inputs(self) -> int:
        return len(self.work.items) if self.work else 1


class LineWindow:
    """The number of inputs in flight: it grows with each answered line, as far as the memory for
    answers is expected to suffice."""

    def __init__(self, max_inputs: int) -> None:
        self.size = min(2, max_inputs)
        self._max_inputs = max_inputs
        self._answer_bytes = 0.0  # of the largest recent answer

    def record(self, answer_bytes: int) -> None:
        self._answer_bytes = max(answer_bytes, 0.99 * self._answer_bytes)
        fitting = int(MAX_ANSWER_BYTES / max(1.0, self._answer_bytes))
        self.size = max(1, min(self._max_inputs, fitting, self.size + 1))


class LineStream(Generic[P]):
    """The response to a stream of lines. Raises the errors of `read_headers`, a Refused (503) if
    the model accepts nothing now, and ClientGone."""

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, endpoint: LineEndpoint[P]
    ) -> None:
        app: Application = scope["app"]
        _, deadlines = read_headers(scope)
        # of each line, from when it is submitted
        self.limit_s = deadlines.first - time.monotonic()
        if (refusal := app.worker_client.refusal(endpoint.model)) is not None:
            raise refusal
        # all lines count as one request in the shares of the queue
        self.context: RequestContext = replace(scope["context"], is_stream=True)
        scope["context"] = self.context
        self.scope, self.receive, self.endpoint = scope, receive, endpoint
        self.settings, self.memory, self.max_body = app.settings, app.memory, app.max_body
        self.worker_client = app.worker_client
        self.queue, self.loop_budget = app.worker_client.queue, app.loop_budget
        self.model_queue = app.worker_client.models[endpoint.model].queue
        window = WINDOW_BATCHES * self.settings.max_batch_size
        self.window = LineWindow(max(1, min(self.settings.max_queue_size // 2, window)))
        self.transfer = scope["transfer"]
        self.lines = LineSplitter(self.max_body)
        self.response = SpooledResponse(scope, send, HEADERS)
        self.pending: deque[PendingLine[P]] = deque()
        self.inputs = self.bytes = 0  # of the pending lines
        self.next_line = 1  # the first one that is not accepted
        self.invalid = 0  # lines in a row that are not JSON
        self.ended = False  # no more lines are accepted
        self.end_error: Exception | None = None
        self.reading = anyio.CancelScope()
        self.added = asyncio.Event()  # a line is pending, or none follows
        self.answered = asyncio.Event()  # a line is pending no more

    async def run(self) -> None:
        is_complete = False
        self.worker_client.on_drain.add(self._on_drain)
        try:
            async with anyio.create_task_group() as tasks:
                self.transfer.on_lost = tasks.cancel_scope.cancel
                tasks.start_soon(self._read)
                tasks.start_soon(self._answer)
                await self.response.run()
                is_complete = True
                tasks.cancel_scope.cancel()  # the rest of the body is not read
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        finally:
            self.worker_client.on_drain.discard(self._on_drain)
            self.transfer.on_lost = None
            for line in self.pending:
                self._release(line)
            self.response.discard()
        if not is_complete:
            raise ClientGone("the client has disconnected")
        await self.response.finish()

    def _on_drain(self) -> None:
        """Accept no more lines; those that are pending are answered."""
        if not self.ended:
            self._end(Draining("the server is stopping", 5))
            self.reading.cancel()

    # ── reading ──

    async def _read(self) -> None:
        """Accept the lines of the body, then wait for a disconnect. Raises ClientGone."""
        try:
            with self.reading:
                more = True
                while more:
                    until = time.monotonic() + self.settings.body_timeout_s
                    chunk, more = await receive_until(self.receive, self.transfer, until)
                    if not more:
                        self.response.end_body()
                    for line in self.lines.feed(chunk):
                        await self._accept(line)
                    await self._hold()
                for line in self.lines.finish():
                    await self._accept(line)
                self._end(None)
        except ClientGone:
            raise
        except (HttpError, Refused) as error:
            self._end(error)
        # Drop the rest: some clients read the answers only after they have sent everything.
        await wait_for_disconnect(self.receive)
        raise ClientGone("the client has disconnected")

    def _end(self, error: Exception | None) -> None:
        self.ended, self.end_error = True, error
        self.response.end_body()
        self.added.set()

    async def _accept(self, line: Line) -> None:
        """Submit a line, once there is room. Raises a Refused, or HttpError after MAX_INVALID."""
        pending = PendingLine[P](line.number, len(line.content or b""))
        self.next_line = line.number
        await self._wait_for_window(pending)
        await self.loop_budget.wait()
        try:
            pending.request = await self._parse(line, pending)
        except Exception as error:
            pending.error = error
            self.invalid = self.invalid + 1 if isinstance(error, InvalidJson) else 0
            if self.invalid == MAX_INVALID:
                raise HttpError(400, f"{MAX_INVALID} lines in a row are not JSON") from None
        else:
            self.invalid = 0
            check_tokens(self.context.key)
            await self.queue.wait_for_room(self.context)
            first = time.monotonic() + self.limit_s
            incoming = IncomingRequest(self.scope, None, Deadlines(first, first))
            pending.work = self.endpoint.submit(incoming, pending.request)
        self.pending.append(pending)
        self.inputs += pending.inputs
        self.bytes += pending.size
        self.next_line = line.number + 1
        self.added.set()

    async def _parse(self, line: Line, pending: PendingLine[P]) -> P:
        if line.content is None:
            limit = f"{self.max_body / 1_000_000:g} MB"
            raise HttpError(413, f"the line is larger than {limit}")
        deadline = time.monotonic() + self.limit_s
        blocks = self.endpoint.parse_blocks
        parse = partial(self._parse_content, pending=pending)
        return await self.endpoint.body_parser.run(parse, line.content, deadline, blocks)

    def _parse_content(self, content: bytes, pending: PendingLine[P]) -> P:
        try:
            value = parse_value(content, "the line")
        except InvalidJson:
            check_joined_lines(content)
            raise
        if not isinstance(value, str | dict):
            raise InvalidInput("the line must be a JSON string or an object")
        if isinstance(value, dict):
            pending.id = take_id(value)
        return self.endpoint.parse_line(value, self.scope)

    async def _wait_for_window(self, line: PendingLine[P]) -> None:
        while self.pending and (
            self.inputs >= self.window.size
            or self.bytes + line.size > self.max_body
            or self.model_queue.expected_wait_s(self.context) > self.limit_s / TARGET_DIVISOR
        ):
            self.answered.clear()
            await self.answered.wait()

    async def _hold(self) -> None:
        """Count the bytes that the stream holds. Waits for memory; QueueFull at the time limit."""
        until = time.monotonic() + self.limit_s
        while (missing := self.lines.held + self.bytes - self.transfer.held) > 0:
            try:
                self.memory.take(self.transfer, missing)
            except QueueFull:
                if time.monotonic() > until:
                    raise
                await asyncio.sleep(MEMORY_POLL_S)
        self.memory.give_back(self.transfer, -missing)

    # ── answering ──

    async def _answer(self) -> None:
        """Pass on the answers in order, then the error that has ended the stream."""
        while self.pending or not self.ended:
            if not self.pending:
                self.added.clear()
                await self.added.wait()
                continue
            line = self.pending[0]
            await self.loop_budget.wait()
            answer = await self._content(line)
            self.pending.popleft()
            self.inputs -= line.inputs
            self.bytes -= line.size
            self._release(line)
            if line.work:
                self.window.record(len(answer))
            self.answered.set()
            await self.response.put(answer + b"\n")
        if self.end_error:
            await self.response.put(self._error_line(self.end_error, self.next_line) + b"\n")
        self.response.close()

    async def _content(self, line: PendingLine[P]) -> bytes:
        try:
            if line.error:
                raise line.error
            assert line.request is not None
            content = await self.endpoint.content(self.scope, line.request, line.work)
            if line.id is None:
                return content
            return b'{"id":%b,"result":%b}' % (to_json(line.id), content)
        except Exception as error:
            await self.loop_budget.rest()
            return self._error_line(error, line.number, line.id)

    def _error_line(self, error: Exception, number: int, id: str | int | None = None) -> bytes:
        """Return the error envelope with the number of the line, and its id if it has one."""
        response = count_failure(error, self.scope)
        is_last = error is self.end_error
        message = f"{response}: this line and those after it were not served"
        document = response.document
        document["error"] |= {"message": message} if is_last else {}
        document["error"]["line"] = number
        return to_json(document if id is None else {"id": id, **document})

    def _release(self, line: PendingLine[P]) -> None:
        if line.work:
            line.work.close()


def take_id(line: Document) -> str | int | None:
    """Remove the client's id from a line and return it. Raises InvalidInput."""
    id: str | int | None = line.pop("id", None)
    is_short = isinstance(id, str) and len(id) <= MAX_ID_CHARS
    if not (is_short or id is None or type(id) is int):
        reason = f"must be a string of at most {MAX_ID_CHARS} characters, or an integer"
        raise InvalidInput.at("id", reason)
    return id


def check_joined_lines(body: bytes) -> None:
    """Raise InvalidJson for NDJSON without its line breaks, as `curl -d @FILE` sends it: a body
    that starts with two inputs, strings or objects, and nothing between them."""
    if not body.startswith((b"{", b'"')):
        return
    text, end = body[:JOINED_BYTES].decode(errors="replace"), 0
    try:
        for _ in range(2):
            value, end = JSONDecoder().raw_decode(text, end)
            is_input = isinstance(value, str) or (isinstance(value, dict) and "inputs" in value)
            if not (value and is_input):
                return
    except (ValueError, RecursionError):
        return
    command = "--data-binary @FILE -H 'Content-Type: application/x-ndjson'"
    reason = "several JSON documents are on one line; curl -d leaves out the line breaks of a file"
    raise InvalidJson(f"{reason}: send it with {command}")
