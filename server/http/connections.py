"""Limits of a connection below ASGI: sizes and times that hold before there is a request.

uvicorn's parsers wait for the end of a header without a limit, and httptools keeps all of it. These
subclasses limit the size of a header and of the bytes between the chunks of a body, and the time
for a header and for the client's reading of a response. Refusals have the error envelope.
request.py limits bodies. A response before the end of a body ends the connection. Near the limit of
open files, connections that wait for a request are closed.
"""

import asyncio
import resource
import sys
import time
from collections import Counter
from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import h11
import uvicorn
from httptools import HttpRequestParser
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from server.http.access import network_of
from server.http.errors import HttpError
from server.http.json import to_json
from server.http.request import MAX_HEADERS, TOO_MANY_HEADERS, Application, content_headers
from server.http.transfers import Transfer

MAX_HEADER_BYTES = 64_000  # with the request line; also between two chunks of a body
# A client that reads less than this of a waiting response within STALLED_S is disconnected.
MIN_READ_BYTES = 64_000
STALLED_S = 60.0
MAX_PARSE_S = 0.001  # after a read that took longer to parse, as chunks of a few bytes do,
REST_FACTOR = 40  # nothing is read from the connection for this many times as long
# What arrives of a refused body is dropped for this long: else the client may miss the response.
LINGER_S = 10.0
DROP_INTERVAL_S = 0.005  # between two reads of input that is dropped
FRAMING = b"content-length", b"transfer-encoding"
MAX_PIPELINED = 100  # requests of a connection that wait behind another
# The part of the open files that connections may take; bodies, responses and models need others.
CONNECTIONS_SHARE = 0.75
APP_STATE = "onequeue"  # key of the app in the lifespan's state


class ReadControl(FlowControl):
    """Keeps reading paused while a connection rests, or has requests behind an unfinished one."""

    def __init__(self, protocol: "LimitedProtocol") -> None:
        super().__init__(protocol.transport)
        self._protocol = protocol

    def resume_reading(self) -> None:
        if not (self._protocol.has_pipelined or self._protocol.is_resting):
            super().resume_reading()


class LimitedProtocol(asyncio.Protocol):
    """Mix-in for a uvicorn protocol: time limits, and refusals of malformed requests.

    After a refusal, or a response to a part of a request, further input is dropped."""

    app_state: dict[str, Any]
    client: tuple[str, int] | None
    config: uvicorn.Config
    connections: set[Any]  # of the server, also of other protocols
    cycle: Any  # uvicorn's latest request and response
    has_pipelined: bool  # whether input waits for the response to an earlier request
    flow: FlowControl
    loop: asyncio.AbstractEventLoop
    scope: Any  # of the latest request
    server_state: ServerState
    transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.flow = ReadControl(self)
        self.application: Application = self.app_state[APP_STATE]
        self.header_limit_s = self.application.settings.body_timeout_s
        self.started = False  # a part of the next request has arrived
        self.drops_input = self.is_resting = False
        self.header_timer: asyncio.TimerHandle | None = None
        self.read_timer: asyncio.TimerHandle | None = None  # while a response waits to be read
        self.response_transport = SimpleNamespace(  # of uvicorn's responses
            write=self.transport.write, is_closing=self.transport.is_closing, close=self._close
        )
        self.peer, self.waits_since = self._peer(), self.loop.time()
        self._time_header()
        limit = int(CONNECTIONS_SHARE * resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        if 0 < limit < len(self.connections):  # -1 is no limit
            close_waiting(self.connections, limit)

    def data_received(self, data: bytes) -> None:
        if self.drops_input:
            self._rest(DROP_INTERVAL_S)
            return
        started = time.thread_time()
        self._parse(data)
        if (seconds := time.thread_time() - started) > MAX_PARSE_S:
            self._rest(REST_FACTOR * seconds)

    def _parse(self, data: bytes) -> None:
        self.started = True
        super().data_received(data)
        self._time_header()

    def _rest(self, seconds: float) -> None:
        self.is_resting = True
        self.flow.pause_reading()
        self.loop.call_later(seconds, self._end_rest)

    def _end_rest(self) -> None:
        self.is_resting = False
        # `receive` resumes then
        is_full = self.has_open_request and len(self.cycle.body) > HIGH_WATER_LIMIT
        if not is_full and not self.transport.is_closing():
            self.flow.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self.header_timer, self.read_timer):
            if timer:
                timer.cancel()
        super().connection_lost(exc)
        if (transfer := self._transfer) and transfer.on_lost:
            transfer.on_lost()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._time_reading()

    def resume_writing(self) -> None:
        if self.read_timer:
            self.read_timer.cancel()
        super().resume_writing()

    def _time_reading(self) -> None:
        unread = self.transport.get_write_buffer_size()
        self.read_timer = self.loop.call_later(STALLED_S, self._check_reading, unread)

    def _check_reading(self, unread_before: int) -> None:
        if self.transport.get_protocol() is not self:
            return  # upgraded to a websocket
        may_stall = (transfer := self._transfer) and transfer.may_stall
        unread = self.transport.get_write_buffer_size()
        if unread > unread_before - MIN_READ_BYTES and not may_stall:
            self.transport.abort()  # close() would wait until the client reads all
        else:
            self._time_reading()

    def send_400_response(self, msg: str) -> None:
        self.refuse(HttpError(400, "this is not valid HTTP"))

    @property
    def _transfer(self) -> Transfer | None:
        """The transfer of the latest request, unless it has been answered."""
        return self.cycle.scope.get("transfer") if self.has_open_request else None

    def _peer(self) -> bytes | int:
        """Return the client's address, or an id of the connection where clients may share one."""
        trusted = getattr(self.config.loaded_app, "trusted_hosts", ())  # proxies
        if self.client is None or self.client[0] in trusted:
            return id(self)
        return network_of(self.client[0])

    @property
    def has_open_request(self) -> bool:
        """Whether a request has no complete response yet."""
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def is_responding(self) -> bool:
        """Whether a response is being written, so that no refusal may be written into it."""
        return self.has_open_request and self.cycle.response_started

    @property
    def has_unread_body(self) -> bool:
        """Whether the latest request has a complete response before the end of its body."""
        return self.cycle is not None and self.cycle.response_complete and self.cycle.more_body

    def on_response_complete(self) -> None:
        self.waits_since = self.loop.time()
        super().on_response_complete()  # type: ignore[misc]  # of uvicorn's protocol
        if self.has_unread_body and not self.transport.is_closing():
            self._linger()

    def _close(self) -> None:
        """Close the connection for a response, or let `on_response_complete` do so."""
        if not self.has_unread_body:
            self.transport.close()

    def _linger(self) -> None:
        """Close after LINGER_S. Until then input is read and dropped, since closing with unread
        input would reset the connection before the client has the response."""
        self.drops_input = True
        self._stop_header_timer()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.header_timer = self.loop.call_later(LINGER_S, self.transport.close)

    def refuse(self, error: HttpError) -> None:
        if self.drops_input:
            return
        if self.is_responding:
            self.drops_input = True
            self.transport.close()
            return
        content = to_json(error.document)
        headers = [*self.server_state.default_headers, *content_headers(len(content))]
        lines = [b"%b: %b\r\n" % header for header in [*headers, (b"connection", b"close")]]
        self.transport.write(STATUS_LINE[error.status] + b"".join(lines) + b"\r\n" + content)
        if self.has_open_request:
            self.cycle.disconnected = True  # the app's response is dropped
            self.cycle.waiting_for_100_continue = False
            self.cycle.message_event.set()
        else:
            self.application.metrics.requests.labels("other", error.status).inc()
        self._linger()

    def _time_header(self) -> None:
        """Run the header timer while no request is being served."""
        if self.drops_input:
            return
        if self.has_open_request:
            self.started = False
            self._stop_header_timer()
        elif self.header_timer is None:
            self.header_timer = self.loop.call_later(self.header_limit_s, self._on_late_header)

    def _on_late_header(self) -> None:
        if self.transport.get_protocol() is not self:
            return  # upgraded to a websocket
        if self.started:
            message = f"the header did not arrive within {self.header_limit_s:g} s"
            self.refuse(HttpError(408, message, code="header_timeout"))
        else:
            self.transport.close()

    def _stop_header_timer(self) -> None:
        if self.header_timer is not None:
            self.header_timer.cancel()
            self.header_timer = None


class LimitedHttpTools(LimitedProtocol, HttpToolsProtocol):
    """httptools has no limits: at most MAX_HEADER_BYTES are fed to it before it has parsed them."""

    unparsed = 0  # bytes since the last complete header, chunk of a body, or end of a body
    in_header = True
    fed = b""  # what the parser is reading

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.body = bytearray()  # parsed, and not given to the request yet

    def _parse(self, data: bytes) -> None:
        start = 0
        while start < len(data) and not self.drops_input:
            chunk = data[start : start + MAX_HEADER_BYTES - self.unparsed]
            start += len(chunk)
            self.unparsed += len(chunk)
            self.fed = chunk
            super()._parse(chunk)
            self.fed = b""
            self._give_body()
            if self.unparsed >= MAX_HEADER_BYTES:
                message = f"the header is larger than {MAX_HEADER_BYTES // 1000} kB"
                self.refuse(HttpError(431, message))

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        if len(self.headers) > MAX_HEADERS:
            self.refuse(HttpError(431, TOO_MANY_HEADERS))
            raise ValueError(TOO_MANY_HEADERS)  # ends the parser

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self.unparsed, self.in_header = 0, False
        self.scope["body_is_incomplete"] = True
        if self.cycle:  # else the request asks for a websocket
            self.cycle.transport = self.response_transport
        if len(self.pipeline) > MAX_PIPELINED:
            self.drops_input = True
            self.transport.close()

    def on_body(self, body: bytes) -> None:
        """Collect the chunks of a body that arrive together: some clients send one byte in each."""
        self.unparsed = 0
        self.body += body

    def _give_body(self) -> None:
        if self.body:
            super().on_body(bytes(self.body))
            self.body.clear()

    def _unsupported_upgrade_warning(self) -> None:
        """Read on as HTTP/1.1. Java's HttpClient asks for HTTP/2 and sends the body at once.

        The parser has skipped the body: another one reads it behind a header with its length. The
        connection ends with the response."""
        error: Any = sys.exception()  # of the parser, with the place where it has stopped
        lines = [b"%b: %b\r\n" % header for header in self.headers if header[0] in FRAMING]
        self.cycle.keep_alive = False
        callbacks = SimpleNamespace(
            on_body=self.on_body, on_message_complete=self.on_message_complete
        )
        self.parser = HttpRequestParser(callbacks)
        self.parser.feed_data(b"POST / HTTP/1.1\r\n" + b"".join(lines) + b"\r\n")
        HttpToolsProtocol.data_received(self, self.fed[error.args[0] :])

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade() and not self._should_upgrade():
            return  # see `_unsupported_upgrade_warning`
        self._give_body()
        super().on_message_complete()
        self.scope["body_is_incomplete"] = False
        self.unparsed, self.in_header = 0, True

    @property
    def has_pipelined(self) -> bool:  # type: ignore[override]
        return bool(self.pipeline)

    @property
    def is_responding(self) -> bool:
        """Requests are parsed ahead: the error may be behind one that waits or runs."""
        pending = self.pipeline or (self.in_header and self.has_open_request)
        return bool(pending or super().is_responding)


class LimitedH11(LimitedProtocol, H11Protocol):
    """h11 itself limits a header to 16 kB."""

    def handle_events(self) -> None:
        super().handle_events()
        if self.cycle:
            self.cycle.transport = self.response_transport
            self.cycle.scope["body_is_incomplete"] = self.cycle.more_body
        if not self.has_open_request:  # the rest of a header may be unread
            self.flow.resume_reading()

    @property
    def has_pipelined(self) -> bool:  # type: ignore[override]
        return self.conn.their_state is h11.DONE and self.conn.trailing_data[0] != b""


def close_waiting(connections: Collection[Any], limit: int) -> None:
    """Close connections that wait for a request, if more than `limit` are open: those of the
    address with the most before others, and of these the longest waiting.

    A few more are closed, so that this does not run for each further connection."""
    opened = [each for each in connections if not each.transport.is_closing()]
    if (excess := len(opened) - limit) <= 0:
        return
    limited = [each for each in opened if isinstance(each, LimitedProtocol)]
    waiting = [each for each in limited if not each.has_open_request or each.cycle.more_body]
    waiting.sort(key=lambda each: each.waits_since, reverse=True)
    counts = Counter[bytes | int]()
    ranks = dict[LimitedProtocol, int]()  # among those of its address, from the latest
    for protocol in waiting:
        counts[protocol.peer] += 1
        ranks[protocol] = counts[protocol.peer]
    waiting.sort(key=lambda each: ranks[each])
    for protocol in waiting[-excess - limit // 32 :]:
        protocol.transport.close()


LIMITED: dict[type[asyncio.Protocol], type[asyncio.Protocol]] = {
    HttpToolsProtocol: LimitedHttpTools,
    H11Protocol: LimitedH11,
}


def limit_connections(config: uvicorn.Config) -> None:
    """Replace uvicorn's protocol class by its limited subclass, before the server listens.

    uvicorn's own command takes no protocol class, so the lifespan does this. A program that runs
    uvicorn off the main thread passes `http=LimitedHttpTools` to its `uvicorn.Config`."""
    protocol = config.http_protocol_class
    config.http_protocol_class = LIMITED.get(protocol, protocol)
