"""Server-sent events to a client at its own pace.

Each event is one write. An idle connection gets a comment now and then; a client that stops
reading ends the stream. uvicorn's `send` waits while its buffer is full, and returns silently
once the client has left (the watcher of the request notices that).
"""

import asyncio
from collections.abc import AsyncIterator, Callable

from starlette.types import Send

from batching.errors import ClientGone

KEEP_ALIVE_S = 15.0  # silence after which a comment is sent
STALLED_S = 60.0  # one write may wait so long for the client to read

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
DONE = b"data: [DONE]\n\n"
COMMENT = b": keep-alive\n\n"


class EventStream:
    """`wake` is called when the connection has been idle: whoever writes should look up, and
    write a comment. One timer a stream, re-armed only when it fires. Use it in a single task."""

    def __init__(self, send: Send, wake: Callable[[], None]) -> None:
        self._send = send
        self._wake = wake
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._wrote_at = self._loop.time()
        self._writing = self._stalled = False

    async def send_all(self, frames: AsyncIterator[bytes | None]) -> None:
        """Events as they are written, and None where there is nothing but an idle connection.
        ClientGone if the client does not read."""
        await self._send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        self._timer = self._loop.call_later(KEEP_ALIVE_S, self._look)
        try:
            async for frame in frames:
                await self._write(frame or COMMENT)
        finally:
            self._timer.cancel()
        await self._send({"type": "http.response.body", "body": b""})

    async def _write(self, frame: bytes) -> None:
        self._wrote_at = self._loop.time()
        self._writing = True
        try:
            await self._send({"type": "http.response.body", "body": frame, "more_body": True})
        except asyncio.CancelledError:
            if not self._stalled or self._task is None:
                raise
            self._task.uncancel()
            raise ClientGone("the client stopped reading") from None
        finally:
            self._writing = False

    def _look(self) -> None:
        limit_s = STALLED_S if self._writing else KEEP_ALIVE_S
        left_s = self._wrote_at + limit_s - self._loop.time()
        if left_s <= 0:
            if self._writing and self._task:
                self._stalled = True
                self._task.cancel()
                return
            self._wake()
            left_s = KEEP_ALIVE_S
        self._timer = self._loop.call_later(left_s, self._look)
