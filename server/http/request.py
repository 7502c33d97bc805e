"""A request's way in and out, whatever its endpoint: the app itself, around the routes.

    id → API key → route → time limits → body, within bounds → … → JSON, or the envelope of what
    was raised → counted

One pure ASGI layer in the place of Starlette's application and its middleware, since each layer
costs every request. Headers are bounded in connections.py, JSON in json.py; access.py decides who
may come in at all.
"""

import asyncio
import contextlib
import itertools
import math
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from prometheus_client import Counter, Histogram
from starlette._utils import get_route_path
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from batching.errors import ClientGone, Draining, InvalidInput, QueueFull
from server.core.settings import Settings
from server.core.worker_client import Deadlines, WorkerClient
from server.http.access import Cors, key_of
from server.http.errors import HttpError, as_client_gone, as_http_error
from server.http.json import Header, to_json

BODIES = 16  # of MAX_BODY_MB each may be there at a time
# A refused body is still read, and dropped, for so long, so that clients get to the answer.
LINGER_S = 5.0
CLOSE = [(b"connection", b"close")]
JSON = b"application/json"
COMPRESSED = (b"gzip", b"deflate", b"br", b"zstd")
_PLAIN_ID = re.compile(rb"[!-~]{1,128}")
_PROCESS = secrets.token_hex(4).encode()
_COUNT = itertools.count(1)

Headers = Mapping[bytes, bytes]  # names in lower case, as ASGI gives them


@dataclass(eq=False)
class Application:
    """`routes`, of which some are `mounted`, answers or raises. Starlette, too, wants to find the
    app in the scope."""

    routes: ASGIApp
    mounted: Sequence[Route]
    settings: Settings
    worker_client: WorkerClient

    def __post_init__(self) -> None:
        settings, self.metrics = self.settings, self.worker_client.metrics
        self.paths = {each.path_format for each in self.mounted}  # others are counted together
        # Paths with a name in them are counted by their template.
        named = [each for each in self.mounted if each.param_convertors]
        self._templates: dict[Any, str] = {each.endpoint: each.path_format for each in named}
        self.keys = [key.encode() for key in settings.api_keys]
        self.max_body = int(settings.max_body_mb * 1_000_000)
        self.body_bytes = 0  # of all requests that are not answered
        self._counters: dict[tuple[str, int], tuple[Counter, Histogram]] = {}
        self.answer: ASGIApp = self._answer
        if settings.cors_origins:
            self.answer = Cors(
                self._answer,
                allow_origins=settings.cors_origins,
                allow_methods=["*"],
                allow_headers=["*"],
                expose_headers=["X-Request-Id", "X-Batch-Size", "Server-Timing", "Retry-After"],
            )

    def count_body(self, scope: Scope, more: int) -> None:
        """Bytes that a request holds, until there is an answer; QueueFull where those of all take
        too much memory."""
        if self.body_bytes + more > BODIES * self.max_body:
            raise QueueFull("the bodies of the requests take all memory there is for them")
        self.body_bytes += more
        scope["body_bytes"] += more

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self
        if scope["type"] != "http":
            await self.routes(scope, receive, send)
            return
        started = time.monotonic()
        status = scope["body_bytes"] = 0
        scope["request_id"] = request_id = _request_id(scope)
        scope["send"] = send  # for what follows a start

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id)]
                scope["begun"] = True
            try:
                await send(message)
            except (OSError, RuntimeError) as error:
                raise as_client_gone(error) from None

        try:
            await self.answer(scope, receive, send_with_id)
        finally:
            self.body_bytes -= scope["body_bytes"]
            path = self._templates.get(scope.get("endpoint"), get_route_path(scope))
            path = scope.get("counted_as", path)
            self._count(path if path in self.paths else "other", status, started)

    def _count(self, endpoint: str, status: int, started: float) -> None:
        if (counters := self._counters.get((endpoint, status))) is None:
            metrics = self.metrics  # whose labels() take longer than counting
            counters = metrics.requests.labels(endpoint, status), metrics.latency.labels(endpoint)
            self._counters[endpoint, status] = counters
        requests, latency = counters
        requests.inc()
        latency.observe(time.monotonic() - started)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A route's answer, or the envelope of what it raised."""
        try:
            scope["api_key"] = key_of(scope, self.keys) if self.keys else b""
            await self.routes(scope, receive, send)
        except Exception as error:
            answer = as_http_error(error, scope, self.settings.debug)
            if answer.kind:
                self.metrics.errors.labels(answer.kind).inc()
            if "begun" not in scope:
                with contextlib.suppress(ClientGone):
                    await send_json(send, answer.document, answer.status, answer.headers)
            elif not isinstance(error, ClientGone):
                raise  # half an answer must not look like a whole one


def _request_id(scope: Scope) -> bytes:
    """The client's own id if it is plain, else a new one. For logs only, never a key."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _PLAIN_ID.fullmatch(value):
            return bytes(value)
    return b"%s-%x" % (_PROCESS, next(_COUNT))


# ── in ──


def begin(scope: Scope) -> tuple[Headers, Deadlines]:
    """How every POST begins: its headers by name, its time limits.

    The header X-Request-Timeout-Ms may only shorten the setting. Raises InvalidInput (400) where
    it is no time, HttpError (415) for a body that is compressed, and Draining (503)."""
    app: Application = scope["app"]
    headers, now = dict(scope["headers"]), time.monotonic()
    whole = math.inf
    if (given := headers.get(b"x-request-timeout-ms")) is not None:
        if not given.isdigit() or len(given) > 10 or not int(given):
            raise InvalidInput("must be a positive whole number", "X-Request-Timeout-Ms")
        whole = now + int(given) / 1000
    if headers.get(b"content-encoding", b"").lower() in COMPRESSED:
        raise HttpError(415, "the body must come as it is, not compressed", "Content-Encoding")
    if app.worker_client.draining:
        raise Draining("the server is stopping", 5)
    return headers, Deadlines(min(now + app.settings.request_timeout_s, whole), whole)


class RequestBody(NamedTuple):
    """A body that is kept in memory."""

    media: str  # its type, in lower case, without parameters; empty if there is none
    body: bytes
    deadlines: Deadlines


async def read_request(scope: Scope, receive: Receive) -> RequestBody:
    """Raises what `begin` and `read_body` do."""
    headers, deadlines = begin(scope)
    body = await read_body(scope, receive, headers, deadlines.first)
    return RequestBody(media_type(headers), body, deadlines)


async def read_json_request(scope: Scope, receive: Receive) -> tuple[bytes, Deadlines]:
    """The body, not parsed yet, and the time limits of a request in JSON.

    Beyond what `read_request` raises: HttpError (415) for a media type that cannot be JSON,
    and a Refused (503) if no model takes anything now. One by itself may when work is submitted."""
    media, body, deadlines = await read_request(scope, receive)
    # curl's form type can be: it is what `curl -d '{…}'` sends
    if media.partition("/")[0] in ("multipart", "image", "audio", "video"):
        raise HttpError(415, f"this takes application/json, not {media[:100]!r}")
    if (refusal := scope["app"].worker_client.refusal()) is not None:
        raise refusal
    return body, deadlines


async def read_body(scope: Scope, receive: Receive, headers: Headers, deadline: float) -> bytes:
    """The whole body; HttpError (413), QueueFull where those of all requests take too much memory,
    ClientGone, or HttpError (408) once nothing has arrived for BODY_TIMEOUT_S, or at the
    deadline."""
    app: Application = scope["app"]
    limit, declared = app.max_body, headers.get(b"content-length", b"")
    announced = int(declared[:20]) if declared.isdigit() else 0
    chunks: list[bytes] = []
    size, more = 0, True
    while more and max(announced, size) <= limit:
        until = min(time.monotonic() + app.settings.body_timeout_s, deadline)
        chunk, more = await receive_until(receive, until)
        chunks.append(chunk)
        app.count_body(scope, len(chunk))
        size += len(chunk)
    if not more and size <= limit:
        return b"".join(chunks)
    waits = not size and headers.get(b"expect", b"").lower() == b"100-continue"
    if more and not waits:  # else nothing more will be sent
        await linger(receive)
    raise HttpError(413, f"the body is larger than {limit / 1_000_000:g} MB", headers=CLOSE)


async def receive_until(receive: Receive, until: float) -> tuple[bytes, bool]:
    """The next of a body, and whether there is more; HttpError (408) at that time, ClientGone."""
    try:
        async with asyncio.timeout(until - time.monotonic()):
            message = await receive()
    except TimeoutError:
        late = "the body stopped arriving, or came too slowly"
        raise HttpError(408, late, headers=CLOSE) from None
    if message["type"] == "http.disconnect":
        raise ClientGone("the client has gone")
    return message.get("body", b""), message.get("more_body", False)


async def linger(receive: Receive) -> None:
    """Read on, for a while, what is sent of a body that is refused."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LINGER_S):
            while (await receive()).get("more_body", False):
                pass


def media_type(headers: Headers) -> str:
    return headers.get(b"content-type", b"").partition(b";")[0].strip().lower().decode("latin-1")


# ── out ──


def content_headers(length: int, media: bytes = JSON) -> list[Header]:
    return [(b"content-type", media), (b"content-length", b"%d" % length)]


async def send_json(
    send: Send,
    document: object | bytes,
    status: int = 200,
    headers: Sequence[Header] = (),
    media: bytes = JSON,
) -> None:
    """A whole answer: `document`, or bytes of a media type, as they are. `headers` come after the
    content's own."""
    content = document if isinstance(document, bytes) else to_json(document)
    await send_parts(send, [content], headers, status, media)


async def send_parts(
    send: Send,
    parts: Sequence[bytes],
    headers: Sequence[Header],
    status: int = 200,
    media: bytes = JSON,
) -> None:
    """A whole answer that comes in parts: large ones need not be joined."""
    fields = [*content_headers(sum(map(len, parts)), media), *headers]
    await send({"type": "http.response.start", "status": status, "headers": fields})
    for n, part in enumerate(parts, start=1):
        await send({"type": "http.response.body", "body": part, "more_body": n < len(parts)})


class JsonEndpoint:
    """A bare ASGI app that sends what `answer` makes of a request."""

    def __init__(self, answer: Callable[[Request], Awaitable[object]]) -> None:
        self.answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, await self.answer(Request(scope, receive)))
