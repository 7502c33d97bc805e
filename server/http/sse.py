"""Server-sent events to a client at its own pace.

Each event is one write. An idle connection gets a comment now and then; a client that stops
reading ends the stream. uvicorn's `send` waits while its buffer is full, and returns silently
once the client has left (the watcher of the request notices that).
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine

import orjson
from starlette.types import Scope, Send

from batching.errors import ClientGone
from server.http.errors import as_client_gone
from server.http.json import Document

KEEP_ALIVE_S = 15.0  # silence after which a comment is sent
STALLED_S = 60.0  # one write may wait so long for the client to read

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
DONE = b"data: [DONE]\n\n"
COMMENT = b": keep-alive\n\n"

Write = Callable[[bytes], Awaitable[None]]


def data_frame(document: Document) -> bytes:
    """An event without a name."""
    return b"data: %b\n\n" % orjson.dumps(document)


class EventStream:
    """`wake` is called when the connection has been idle, so that whoever waits for something to
    write writes a comment. One timer a stream, re-armed only when it fires."""

    def __init__(self, scope: Scope, send: Send, wake: Callable[[], None]) -> None:
        self._start = send
        self._send: Send = scope["send"]
        self._wake = wake
        self._loop = asyncio.get_running_loop()
        self._wrote_at = self._loop.time()
        self._writing = self._stalled = False

    async def send_all(self, write: Callable[[Write], Coroutine[None, None, None]]) -> None:
        """All that the coroutine writes. It runs in a task of its own: resuming it, token by token,
        would resume every caller up to the server's. ClientGone if the client does not read."""
        await self._start({"type": "http.response.start", "status": 200, "headers": HEADERS})
        self._task = self._loop.create_task(write(self._write))
        self._timer = self._loop.call_later(KEEP_ALIVE_S, self._look)
        try:
            await self._task
        finally:
            self._timer.cancel()
        await self._send({"type": "http.response.body", "body": b""})

    async def _write(self, frame: bytes) -> None:
        self._wrote_at = self._loop.time()
        self._writing = True
        try:
            await self._send({"type": "http.response.body", "body": frame, "more_body": True})
        except asyncio.CancelledError:
            if self._stalled:
                raise ClientGone("the client stopped reading") from None
            raise
        except (OSError, RuntimeError) as error:
            raise as_client_gone(error) from None
        finally:
            self._writing = False

    def _look(self) -> None:
        limit_s = STALLED_S if self._writing else KEEP_ALIVE_S
        left_s = self._wrote_at + limit_s - self._loop.time()
        if left_s <= 0:
            if self._writing:
                self._stalled = True
                self._task.cancel()
                return
            self._wake()
            left_s = KEEP_ALIVE_S
        self._timer = self._loop.call_later(left_s, self._look)
