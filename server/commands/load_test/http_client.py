"""A small HTTP/1.1 client for load tests: keep-alive connections and chat streams.

It is small so that the load generator takes little CPU time from a server on the same machine. It
speaks HTTP/1.1 to one address, over TLS for https, without proxies or redirects. It passes on event
data as it arrives, so that ChatStream can record the time of each token.
"""

import asyncio
import errno
import json
import ssl
import time
from collections.abc import Callable
from typing import NamedTuple
from urllib.parse import SplitResult

# Below the usual server keep-alive (5 s), so that a request never races the server's close.
MAX_IDLE_S = 2.0
# Errors that a broken or overloaded server can cause, malformed JSON included: counted, not fatal.
FAILURES = (
    OSError,
    EOFError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    asyncio.LimitOverrunError,
)


class StreamError(ValueError):
    """The stream carried an error event."""


class IncompleteStreamError(ValueError):
    """The stream ended without [DONE] or a finish_reason."""


class HttpResponse(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes
    keep_alive: bool


OnData = Callable[[bytes], None]


class Connection:
    """One keep-alive connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.last_used = time.perf_counter()

    @property
    def usable(self) -> bool:
        closed = self.reader.at_eof() or self.reader.exception() or self.writer.is_closing()
        return not closed and time.perf_counter() - self.last_used < MAX_IDLE_S

    async def exchange(self, request: bytes, on_event_data: OnData | None) -> HttpResponse:
        """Write a request and read its response."""
        # No drain(): a server may answer (413, 503) before it has read the whole body.
        self.writer.write(request)
        status = 100
        while status < 200:
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            first, *lines = head[:-4].split("\r\n")
            version, code = first.split(" ", 2)[:2]
            status = int(code)
        headers = {
            name.lower(): value.strip() for name, _, value in (x.partition(":") for x in lines)
        }
        connection = headers.get("connection", "").lower()
        keep_alive = version == "HTTP/1.1" and connection != "close"
        if "text/event-stream" not in headers.get("content-type", ""):
            on_event_data = None
        parts: list[bytes] = []
        if headers.get("transfer-encoding", "").lower() == "chunked":
            await self.read_chunks(on_event_data or parts.append)
        elif "content-length" in headers:
            body = await self.reader.readexactly(int(headers["content-length"]))
            (on_event_data or parts.append)(body)
        elif status not in (204, 304):
            keep_alive = False
            while data := await self.reader.read(65536):
                (on_event_data or parts.append)(data)
        self.last_used = time.perf_counter()
        return HttpResponse(status, headers, b"".join(parts), keep_alive)

    async def read_chunks(self, on_data: OnData) -> None:
        while size := int((await self.reader.readuntil(b"\r\n")).split(b";")[0], 16):
            on_data((await self.reader.readexactly(size + 2))[:-2])
        while await self.reader.readuntil(b"\r\n") != b"\r\n":
            pass


class Client:
    """A pool of keep-alive connections to one address; the most recently used one comes first."""

    def __init__(self, url: SplitResult, headers: dict[str, str]) -> None:
        secure = url.scheme == "https"
        self.host, self.port = url.hostname or "", url.port or (443 if secure else 80)
        self.tls = ssl.create_default_context() if secure else None
        head = f"POST {url.path or '/'}{'?' + url.query if url.query else ''} HTTP/1.1\r\n"
        fields = {"host": url.netloc} | headers
        head += "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        self.head = head.encode("latin-1")
        self.idle: list[Connection] = []

    async def post(self, body: bytes, on_event_data: OnData | None = None) -> HttpResponse:
        while self.idle:
            connection = self.idle.pop()
            if connection.usable:
                break
            connection.writer.transport.abort()
        else:
            opened = await asyncio.open_connection(self.host, self.port, ssl=self.tls)
            connection = Connection(*opened)
        keep_alive = False
        try:
            request = self.head + b"content-length: %d\r\n\r\n" % len(body) + body
            response = await connection.exchange(request, on_event_data)
            keep_alive = response.keep_alive
        finally:
            if keep_alive:
                self.idle.append(connection)
            else:
                connection.writer.transport.abort()
        return response

    def close(self) -> None:
        for connection in self.idle:
            connection.writer.transport.abort()


class ChatStream:
    """Read server-sent chat completion chunks and record the time of each content delta."""

    def __init__(self) -> None:
        self.buffer = b""
        self.times: list[float] = []
        self.first: float | None = None  # chunk's time, with or without content
        self.usage: int | None = None  # completion tokens
        self.prompt_tokens = 0
        self.done = False

    def feed(self, data: bytes) -> None:
        now = time.perf_counter()
        *lines, self.buffer = (self.buffer + data).split(b"\n")
        for line in lines:
            event = line.removeprefix(b"data:").strip()
            if not line.startswith(b"data:") or not event:
                continue
            if event == b"[DONE]":
                self.done = True
                continue
            chunk = json.loads(event)
            self.first = self.first or now
            if chunk.get("error"):
                raise StreamError(json.dumps(chunk["error"]))
            if chunk.get("usage"):
                self.usage = chunk["usage"]["completion_tokens"]
                self.prompt_tokens = chunk["usage"].get("prompt_tokens") or 0
            if any((choice.get("delta") or {}).get("content") for choice in chunk["choices"]):
                self.times.append(now)
            # some servers omit [DONE]
            self.done |= any(choice.get("finish_reason") for choice in chunk["choices"])


def error_name(error: BaseException) -> str:
    name = type(error).__name__
    if type(error) is OSError and error.errno:
        name += f" {errno.errorcode.get(error.errno, error.errno)}"
    return name
