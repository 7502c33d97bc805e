"""Server-sent events, at the client's pace.

Each event is one write. An idle connection gets a comment every SSE_KEEPALIVE_S. uvicorn's `send`
waits while its buffer is full, and returns silently once the client has disconnected or
connections.py has disconnected it; the request's disconnect watcher notices that.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

from starlette.types import Scope, Send

from server.http.errors import as_client_gone
from server.http.json import Document, Header, to_json
from server.http.request import SEND_BYTES, send_at_pace

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


def named_frame(document: Document) -> bytes:
    """Return an event that is named by its type."""
    return b"event: %b\ndata: %b\n\n" % (document["type"].encode(), to_json(document))


class EventStream:
    """A response of events. `wake` is called when the connection is idle: it makes the source of
    the events yield a comment."""

    def __init__(
        self, scope: Scope, send: Send, wake: Callable[[], None], headers: Sequence[Header] = ()
    ) -> None:
        self._headers = [*HEADERS, *headers]
        self._keepalive_s = scope["app"].settings.sse_keepalive_s
        self._start = send
        self._send: Send = scope["send"]
        self._scope = scope
        self._wake = wake
        self._loop = asyncio.get_running_loop()

    async def run(self, events: AsyncIterator[bytes]) -> None:
        """Send all events. Raises ClientGone for errors of sending.

        They are sent in a task of their own: in the request's task, each token would resume every
        coroutine up to the server's."""
        await self._start({"type": "http.response.start", "status": 200, "headers": self._headers})
        self._sent_at = self._loop.time()
        self._check_idle()
        try:
            await self._loop.create_task(self._send_all(events))
        except (OSError, RuntimeError) as error:
            raise as_client_gone(error) from None
        finally:
            self._timer.cancel()
        await self._send({"type": "http.response.body", "body": b""})

    async def _send_all(self, events: AsyncIterator[bytes]) -> None:
        async for event in events:
            message = {"type": "http.response.body", "body": event, "more_body": True}
            if len(event) > SEND_BYTES:  # with long instructions
                await send_at_pace(self._send, self._scope["transfer"], message)
            else:
                await self._send(message)
            self._sent_at = self._loop.time()

    def _check_idle(self) -> None:
        now = self._loop.time()
        if (due := self._sent_at + self._keepalive_s) <= now:
            self._wake()
            due = now + self._keepalive_s
        self._timer = self._loop.call_at(due, self._check_idle)
