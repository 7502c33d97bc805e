"""Uploads: forms with a file, spooled to disk while they arrive.

    receive → chunks → pool thread: parse, write (form.py) → Form → … → its file is removed

An upload is read before it takes a slot of the queue, so slow uploads do not fill the queue. They
take disk space: one file is limited, all files together are, and an upload needs a minimum speed.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from anyio import CapacityLimiter, to_thread
from python_multipart.multipart import parse_options_header
from starlette.types import Receive, Scope

from batching.errors import InvalidInput
from server.core.worker_client import Deadlines
from server.http.errors import HttpError
from server.http.form import MAX_FIELD_BYTES, MAX_PARTS, Form
from server.http.request import (
    MAX_BODIES,
    Headers,
    content_length,
    media_type,
    read_headers,
    receive_until,
)
from server.http.transfers import Transfer, TransferBudget

CHUNK_BYTES = 1 << 18  # parsed and written at once
MIN_BYTES_PER_S = 8_000  # average speed of an upload
WRITER_THREADS = 4
MAX_CONTENT_TYPE = 1000  # bytes of the header that are read
MAX_FIELDS_BYTES = MAX_PARTS * MAX_FIELD_BYTES  # beside the file


@dataclass(eq=False)
class Uploads:
    """The uploads of an app whose requests have no response yet."""

    max_mb: float  # of one file
    folder: str | None = None  # of the files; None: that of temporary files

    def __post_init__(self) -> None:
        self.max_bytes = int(self.max_mb * 1_000_000)
        message = "the disk space for uploads is in use"
        self.spool = TransferBudget(MAX_BODIES * self.max_bytes, message)
        self._threads = CapacityLimiter(WRITER_THREADS)

    @asynccontextmanager
    async def form(
        self, scope: Scope, receive: Receive, model: str | None = None
    ) -> AsyncIterator[tuple[Form, Deadlines]]:
        """Yield a request's form and its deadlines; the file is on disk until the block ends. The
        deadline of the first result counts from the end of the upload.

        Raises the errors of `read_headers`, a Refused (503) if `model`, by its name in the
        registry, accepts nothing now, HttpError (415) for another content type, HttpError (413 and
        408), InvalidInput for a malformed form, QueueFull for a full disk, ClientGone."""
        headers, deadlines = read_headers(scope)
        app = scope["app"]
        if model and (refusal := app.worker_client.refusal(model)) is not None:
            raise refusal
        form = Form(boundary_from(headers), self.max_bytes, self.folder)
        transfer = Transfer()
        try:
            await self._read(form, transfer, headers, deadlines.whole, scope, receive)
            first = min(time.monotonic() + deadlines.idle_s, deadlines.whole)
            yield form, replace(deadlines, first=first)
        finally:
            self.spool.release(transfer)
            asyncio.get_running_loop().run_in_executor(None, form.remove)

    async def _read(
        self,
        form: Form,
        transfer: Transfer,
        headers: Headers,
        deadline: float,
        scope: Scope,
        receive: Receive,
    ) -> None:
        settings, started = scope["app"].settings, time.monotonic()
        too_large = HttpError(413, f"the file is larger than {self.max_mb:g} MB")
        limit, received = self.max_bytes + MAX_FIELDS_BYTES, 0
        if content_length(headers) > limit:
            raise too_large
        chunk, more = bytearray(), True
        while more:
            slowest = started + settings.body_timeout_s + received / MIN_BYTES_PER_S
            until = min(time.monotonic() + settings.body_timeout_s, slowest, deadline)
            data, more = await receive_until(receive, transfer, until)
            chunk += data
            received += len(data)
            if received > limit:
                raise too_large
            self.spool.take(transfer, len(data))
            if len(chunk) >= CHUNK_BYTES or not more:
                await to_thread.run_sync(form.feed, bytes(chunk), limiter=self._threads)
                chunk.clear()
        form.finish()


def boundary_from(headers: Headers) -> bytes:
    """Return the boundary of a form's parts. HttpError (415) for another content type."""
    if (media := media_type(headers)) != "multipart/form-data":
        raise HttpError(415, f"Content-Type must be multipart/form-data, not {media[:100]!r}")
    media_and_options = headers[b"content-type"][:MAX_CONTENT_TYPE]
    boundary = parse_options_header(media_and_options)[1].get(b"boundary", b"")
    if not boundary:
        raise InvalidInput("the Content-Type has no boundary: let the client's library set it")
    return boundary
