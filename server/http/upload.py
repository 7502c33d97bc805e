"""Uploads: forms with a file, spooled to disk as they arrive, apart from bodies in memory.

    receive → pieces → pool thread: parse, write → Form → … → its file is removed

An upload is read before a place in the queue is taken, so that slow ones fill no queue. What they
take is disk: a file has a limit, all files together another, and an upload must go on arriving.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio
import anyio.to_thread
from python_multipart.multipart import parse_options_header
from starlette.types import Receive, Scope

from batching.errors import InvalidInput, OnequeueError, QueueFull
from server.core.worker_client import Deadlines
from server.http.errors import HttpError, as_http_error
from server.http.form import MAX_FIELD, MOST_PARTS, Form
from server.http.request import (
    BODIES,
    CLOSE,
    Headers,
    begin,
    linger,
    media_type,
    receive_until,
)

PIECE = 1 << 18  # bytes that are parsed and written at a time
SLOWEST = 8_000  # bytes a second that an upload must make on the whole
WRITERS = 4  # threads
FIELDS = MOST_PARTS * MAX_FIELD  # bytes beside the file


@dataclass(eq=False)
class Uploads:
    """Those of an app that are not answered yet."""

    max_mb: float  # of one file
    spooled: int = field(init=False, default=0)  # bytes of all of them

    def __post_init__(self) -> None:
        self.most = int(self.max_mb * 1_000_000)
        self._turns = anyio.CapacityLimiter(WRITERS)

    @asynccontextmanager
    async def form(
        self, scope: Scope, receive: Receive, model: str
    ) -> AsyncIterator[tuple[Form, Deadlines]]:
        """A request's form, its file on disk until the block ends, and the time limits from there
        on: that for the answer to begin counts from the upload's end.

        Raises what `begin` does, a Refused (503) if the model of that name in the registry takes
        nothing now, HttpError 415 for what is no form, 413 and 408, InvalidInput for a form that
        is not well-formed, QueueFull where there is no room on disk, ClientGone."""
        headers, limits = begin(scope)
        app = scope["app"]
        if (refusal := app.worker_client.refusal(model)) is not None:
            raise refusal
        form = Form(boundary_of(headers), self.most)
        try:
            await self._read(form, headers, limits.whole, scope, receive)
            first = min(time.monotonic() + app.settings.request_timeout_s, limits.whole)
            yield form, Deadlines(first, limits.whole)
        finally:
            self.spooled -= form.received
            asyncio.get_running_loop().run_in_executor(None, form.remove)

    async def _read(
        self, form: Form, headers: Headers, deadline: float, scope: Scope, receive: Receive
    ) -> None:
        """The whole body, into the form."""
        settings, began = scope["app"].settings, time.monotonic()
        declared = headers.get(b"content-length", b"")
        if declared.isdigit() and int(declared[:20]) > self.most + FIELDS:
            if headers.get(b"expect", b"").lower() != b"100-continue":  # else it will not be sent
                await linger(receive)
            raise self._too_large()
        piece, more = bytearray(), True
        while more:
            slowest = began + settings.body_timeout_s + form.received / SLOWEST
            until = min(time.monotonic() + settings.body_timeout_s, slowest, deadline)
            data, more = await receive_until(receive, until)
            piece += data
            form.received += len(data)
            self.spooled += len(data)
            try:
                self._check(form)
                if len(piece) >= PIECE or not more:
                    await self._feed(form, bytes(piece))
                    piece.clear()
            except (OnequeueError, HttpError) as error:
                if not more:
                    raise
                await linger(receive)
                answer = as_http_error(error, scope, settings.debug)
                answer.headers = [*answer.headers, *CLOSE]
                raise answer from error
        form.finish()

    def _check(self, form: Form) -> None:
        if form.received > self.most + FIELDS:
            raise self._too_large()
        if self.spooled > BODIES * self.most:
            raise QueueFull("uploads take all the disk that there is for them")

    def _too_large(self) -> HttpError:
        return HttpError(413, f"the file is larger than {self.max_mb:g} MB", headers=CLOSE)

    async def _feed(self, form: Form, piece: bytes) -> None:
        try:
            await anyio.to_thread.run_sync(form.feed, piece, limiter=self._turns)
        except OSError:
            raise QueueFull("the server's disk has no room for the file") from None


def boundary_of(headers: Headers) -> bytes:
    """Of a form's parts; HttpError (415) for what is no form."""
    if (media := media_type(headers)) != "multipart/form-data":
        raise HttpError(415, f"this takes multipart/form-data, not {media[:100]!r}")
    boundary = parse_options_header(headers[b"content-type"])[1].get(b"boundary", b"")
    if not boundary:
        raise InvalidInput("the Content-Type has no boundary: leave it to the client's library")
    return boundary
