"""Connections, below ASGI: what they may cost before there is a request to answer.

uvicorn's parsers wait for the end of a header as long as it takes, and httptools keeps all of it.
Here a header, and what stands between the chunks of a body, is bounded in bytes and a header in
time too, and whatever is refused gets the envelope. uvicorn may have chosen its protocol classes
before it imports the app, so those classes are made to give ours. Bodies are read in request.py.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from server.http.errors import HttpError
from server.http.json import to_json
from server.http.request import LINGER_S, Application, content_headers

MAX_HEAD = 64_000  # bytes of a header with its request line, or between two pieces of a body
# So many bytes of an answer that waits to be read a client takes within so long, or is given up.
LEAST_READ = 64_000
STALLED_S = 60.0
MOST_AHEAD = 100  # requests of a connection that wait behind another
APP = "onequeue"  # where the lifespan's state has the app


class LimitedProtocol(asyncio.Protocol):
    """Mixed into a protocol of uvicorn's: a time limit for headers and for reading an answer, and
    refusals that are no request's answer. What has been refused is read no further."""

    app_state: dict[str, Any]
    cycle: Any  # the latest request and its answer
    loop: asyncio.AbstractEventLoop
    server_state: ServerState
    transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.middleware: Application = self.app_state[APP]
        self.limit_s = self.middleware.settings.body_timeout_s
        self.begun = False  # something of the next request is there
        self.refused = False
        self.timer: asyncio.TimerHandle | None = None
        self.reading: asyncio.TimerHandle | None = None  # while an answer waits to be read
        self._time_header()

    def data_received(self, data: bytes) -> None:
        if self.refused:
            return
        self.begun = True
        super().data_received(data)
        self._time_header()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self.timer, self.reading):
            if timer:
                timer.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._time_reading()

    def resume_writing(self) -> None:
        if self.reading:
            self.reading.cancel()
        super().resume_writing()

    def _time_reading(self) -> None:
        left = self.transport.get_write_buffer_size()
        self.reading = self.loop.call_later(STALLED_S, self._check_reading, left)

    def _check_reading(self, before: int) -> None:
        if self.transport.get_protocol() is not self:
            return  # it has become a websocket
        if self.transport.get_write_buffer_size() > before - LEAST_READ:
            self.transport.abort()  # close() would wait until all is read
        else:
            self._time_reading()

    def send_400_response(self, msg: str) -> None:
        self.refuse(HttpError(400, "this is not valid HTTP"))

    @property
    def unanswered(self) -> bool:
        """There is a request without its whole answer."""
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def answering(self) -> bool:
        """An answer is under way, into which nothing may be written."""
        return self.unanswered and self.cycle.response_started

    def refuse(self, error: HttpError) -> None:
        """Answer and close; what still comes is dropped for a while, so that it is read."""
        self.refused = True
        self._stop_timer()
        if self.answering:
            self.transport.close()
            return
        content = to_json(error.document)
        headers = [*self.server_state.default_headers, *content_headers(len(content))]
        lines = [b"%b: %b\r\n" % header for header in [*headers, (b"connection", b"close")]]
        self.transport.write(STATUS_LINE[error.status] + b"".join(lines) + b"\r\n" + content)
        if self.unanswered:
            self.cycle.disconnected = True  # nobody reads what the app may still say
            self.cycle.waiting_for_100_continue = False
            self.cycle.message_event.set()
        else:
            self.middleware.metrics.requests.labels("other", error.status).inc()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.timer = self.loop.call_later(LINGER_S, self.transport.close)

    def _time_header(self) -> None:
        """While no request is there to be answered, time runs for the next one's header."""
        if self.refused:
            return
        if self.unanswered:
            self.begun = False
            self._stop_timer()
        elif self.timer is None:
            self.timer = self.loop.call_later(self.limit_s, self._header_is_late)

    def _header_is_late(self) -> None:
        if self.transport.get_protocol() is not self:
            return  # it has become a websocket
        if self.begun:
            late = f"the header did not arrive within {self.limit_s:g} s"
            self.refuse(HttpError(408, late, code="header_timeout"))
        else:
            self.transport.close()

    def _stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class LimitedHttpTools(LimitedProtocol, HttpToolsProtocol):
    """httptools bounds nothing. It is fed no more at once than may be unended."""

    unended = 0  # bytes since the last whole header, piece of a body or end of one
    in_head = True

    def data_received(self, data: bytes) -> None:
        at = 0
        while at < len(data) and not self.refused:
            piece = data[at : at + MAX_HEAD - self.unended]
            at += len(piece)
            self.unended += len(piece)
            super().data_received(piece)
            if self.unended >= MAX_HEAD:
                large = f"the header is larger than {MAX_HEAD // 1000} kB"
                self.refuse(HttpError(431, large))

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self.unended, self.in_head = 0, False
        if len(self.pipeline) > MOST_AHEAD:
            self.refused = True
            self.transport.close()

    def on_body(self, body: bytes) -> None:
        self.unended = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self.unended, self.in_head = 0, True

    @property
    def answering(self) -> bool:
        """Requests are parsed ahead: what is wrong may lie behind one that waits or runs."""
        return bool(self.pipeline or (self.in_head and self.unanswered) or super().answering)


class LimitedH11(LimitedProtocol, H11Protocol):
    """h11 takes no more than 16 kB of a header."""


OURS: dict[Any, Any] = {HttpToolsProtocol: LimitedHttpTools, H11Protocol: LimitedH11}


def limit_connections() -> None:
    """From now on uvicorn's protocol classes give ours, for apps that say so in their state."""

    def make(cls: Any, *_: Any, app_state: Any = (), **__: Any) -> Any:
        return object.__new__(OURS.get(cls, cls) if APP in app_state else cls)

    for theirs in OURS:
        theirs.__new__ = make
