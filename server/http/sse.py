"""Server-sent events to a client at its own pace.

Each event is one write. An idle connection gets a comment now and then. uvicorn's `send` waits
while its buffer is full, and returns silently once the client has left or been given up
(connections.py); the watcher of the request notices that.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Self

import orjson
from starlette.types import Scope, Send

from server.http.errors import as_client_gone
from server.http.json import Document

LOOK_S = 10.0  # who has sent nothing since the last look sends a comment

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
DONE = b"data: [DONE]\n\n"
COMMENT = b": keep-alive\n\n"


def data_frame(document: Document) -> bytes:
    """An event without a name."""
    return b"data: %b\n\n" % orjson.dumps(document)


class EventStream:
    """`wake` is called when the connection has been idle, so that whoever waits for something to
    send sends a comment."""

    def __init__(self, scope: Scope, send: Send, wake: Callable[[], None]) -> None:
        self.sent = 0  # events: whoever sends one counts it
        self._start = send
        self._send: Send = scope["send"]
        self._wake = wake
        self._loop = asyncio.get_running_loop()

    async def run(self, sending: Callable[[Self], Coroutine[None, None, None]]) -> None:
        """The coroutine sends all events. It runs in a task of its own: resuming it, token by
        token, would resume every caller up to the server's. ClientGone by what sending raises."""
        await self._start({"type": "http.response.start", "status": 200, "headers": HEADERS})
        self._timer = self._loop.call_later(LOOK_S, self._look, self.sent)
        try:
            await self._loop.create_task(sending(self))
        except (OSError, RuntimeError) as error:
            raise as_client_gone(error) from None
        finally:
            self._timer.cancel()
        await self._send({"type": "http.response.body", "body": b""})

    def _look(self, sent: int) -> None:
        """`sent`: at the last look."""
        if self.sent == sent:
            self._wake()
        self._timer = self._loop.call_later(LOOK_S, self._look, self.sent)
