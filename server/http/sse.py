"""Server-sent events to a client at its own pace.

Each event is one write. An idle connection gets a comment now and then; a client that stops
reading ends the stream. uvicorn's `send` waits while its buffer is full, and returns silently
once the client has left (the watcher of the request notices that).
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Self

import orjson
from starlette.types import Scope, Send

from batching.errors import ClientGone
from server.http.errors import as_client_gone
from server.http.json import Document

LOOK_S = 10.0  # who has sent nothing since the last look sends a comment
STALLED_S = 60.0  # one write may wait so long for the client to read

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
        self._looks = 0  # in a row that found nothing sent

    async def run(self, sending: Callable[[Self], Coroutine[None, None, None]]) -> None:
        """The coroutine sends all events. It runs in a task of its own: resuming it, token by
        token, would resume every caller up to the server's. ClientGone if the client does not
        read."""
        await self._start({"type": "http.response.start", "status": 200, "headers": HEADERS})
        self._task = self._loop.create_task(sending(self))
        self._timer = self._loop.call_later(LOOK_S, self._look, self.sent)
        try:
            await self._task
        except asyncio.CancelledError:
            if self._stalled:
                raise ClientGone("the client stopped reading") from None
            raise
        except (OSError, RuntimeError) as error:
            raise as_client_gone(error) from None
        finally:
            self._timer.cancel()
        await self._send({"type": "http.response.body", "body": b""})

    @property
    def _stalled(self) -> bool:
        return self._looks * LOOK_S >= STALLED_S

    def _look(self, sent: int) -> None:
        """`sent`: at the last look. Who sends nothing although woken waits for the client."""
        self._looks = self._looks + 1 if self.sent == sent else 0
        if self._stalled:
            self._task.cancel()
        elif self._looks:
            self._wake()
        self._timer = self._loop.call_later(LOOK_S, self._look, self.sent)
