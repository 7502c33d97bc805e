"""Server-sent events, at the client's pace.

Each event is one write. An idle connection gets a comment now and then. uvicorn's `send` waits
while its buffer is full, and returns silently once the client has disconnected or connections.py
has disconnected it; the request's disconnect watcher notices that.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Self

from starlette.types import Scope, Send

from server.http.errors import as_client_gone
from server.http.json import to_json

KEEP_ALIVE_S = 10.0  # a stream without an event in this interval sends a comment

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
DONE = b"data: [DONE]\n\n"
COMMENT = b": keep-alive\n\n"


def data_frame(document: object) -> bytes:
    """Return an event without a name."""
    return b"data: %b\n\n" % to_json(document)


class EventStream:
    """A response of events. `wake` is called when the connection is idle: it makes the sending
    coroutine send a comment."""

    def __init__(self, scope: Scope, send: Send, wake: Callable[[], None]) -> None:
        self.sent = 0  # events; the sender counts them
        self._start = send
        self._send: Send = scope["send"]
        self._wake = wake
        self._loop = asyncio.get_running_loop()

    async def run(self, sending: Callable[[Self], Coroutine[None, None, None]]) -> None:
        """Run the coroutine that sends all events. Raises ClientGone for errors of sending.

        It runs in its own task: resuming it for each token would resume every caller up to the
        server's."""
        await self._start({"type": "http.response.start", "status": 200, "headers": HEADERS})
        self._timer = self._loop.call_later(KEEP_ALIVE_S, self._check_idle, self.sent)
        try:
            await self._loop.create_task(sending(self))
        except (OSError, RuntimeError) as error:
            raise as_client_gone(error) from None
        finally:
            self._timer.cancel()
        await self._send({"type": "http.response.body", "body": b""})

    def _check_idle(self, sent_before: int) -> None:
        if self.sent == sent_before:
            self._wake()
        self._timer = self._loop.call_later(KEEP_ALIVE_S, self._check_idle, self.sent)
