"""The ASGI application around the routes; read requests and send responses for every endpoint.

    request id → API key, or rules for web pages → route → deadlines → body, within limits → …
    → JSON, or the error envelope → metrics

One ASGI layer instead of Starlette's application and middleware: each layer costs time.
connections.py limits headers, json.py limits JSON, access.py checks API keys, and cross_site.py
refuses requests of other sites' pages.
"""

import contextlib
import itertools
import math
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from batching.errors import ClientGone, Draining, InvalidInput
from server.core.api_keys import Keyring
from server.core.request_context import RequestRecord
from server.core.settings import Settings
from server.core.worker_client import Deadlines, IncomingRequest, WorkerClient
from server.http.access import identify, limit_headers
from server.http.access_log import PROBES, log_request
from server.http.cross_site import CrossSiteRules
from server.http.errors import HttpError, as_client_gone, as_http_error, error_document
from server.http.json import Header, to_json
from server.http.loop_budget import LoopBudget
from server.http.paths import is_anthropic, route_path
from server.http.spool import SpoolBudget
from server.http.transfers import Transfer, TransferBudget

if TYPE_CHECKING:
    from server.core.telemetry import Telemetry

MAX_HEADERS = 256
TOO_MANY_HEADERS = f"there are more than {MAX_HEADERS} headers"
MAX_BODIES = 16  # all bodies together may take this many times MAX_BODY_MB
SEND_BYTES = 1 << 16  # larger responses are sent in pieces of this size
CLOSE = [(b"connection", b"close")]
NOT_STARTED = (
    "the app has not been started, because Starlette runs no lifespan of a mounted app: "
    "pass it to the host, Starlette(lifespan=llm.lifespan), or enter it in the host's own, "
    "async with llm.lifespan()"
)
JSON, NDJSON = b"application/json", b"application/x-ndjson"
NDJSON_TYPES = {f"application/{name}" for name in ("x-ndjson", "jsonl", "jsonlines", "x-jsonlines")}
_COMPRESSED = re.compile("gzip|deflate|br|zstd|compress", re.IGNORECASE)
_PLAIN_ID = re.compile(rb"[!-~]{1,128}")
_PROCESS = secrets.token_hex(4).encode()
_COUNT = itertools.count(1)

EXPOSED_HEADERS = [
    "X-Request-Id",
    "Request-Id",
    "X-Batch-Size",
    "X-Dropped-Tools",
    "X-Ignored-Fields",
    "Server-Timing",
    "Retry-After",
]

Headers = Mapping[bytes, bytes]  # names in lower case
Lifespan = AbstractAsyncContextManager[Mapping[str, Any]]


@dataclass(eq=False)
class Application:
    """The ASGI app: `router` responds or raises, by `routes`. It is served by itself, or mounted in
    another app, which then runs `lifespan`."""

    router: ASGIApp
    routes: Sequence[Route]
    settings: Settings
    worker_client: WorkerClient
    run_mounted: Callable[["Application"], Lifespan]

    def __post_init__(self) -> None:
        settings, self.metrics = self.settings, self.worker_client.metrics
        self.paths = {route.path_format for route in self.routes}  # others are counted as "other"
        # Paths with parameters are counted by their template.
        self._templates: dict[object, str] = {
            route.endpoint: route.path_format for route in self.routes if route.param_convertors
        }
        self.keyring = Keyring(settings)
        self.cross_site = CrossSiteRules(settings)
        self.max_body = int(settings.max_body_mb * 1_000_000)
        self.memory = TransferBudget(MAX_BODIES * self.max_body, "the memory for bodies is in use")
        self.spools = SpoolBudget()
        self.loop_budget = LoopBudget()
        self.logs_requests = False
        self.sends_request_id = True
        self.telemetry: Telemetry | None = None
        self.respond: ASGIApp = self._respond
        if settings.cors_origins:
            self.respond = CORSMiddleware(
                self._respond,
                allow_origins=settings.cors_origins,
                allow_methods=["*"],
                allow_headers=["*"],
                expose_headers=EXPOSED_HEADERS,
            )

    def lifespan(self, host: object = None) -> Lifespan:
        """Return the lifespan of a mounted app: it loads the models, and at the end finishes the
        accepted requests. `host` takes it as its own lifespan, or enters it in that.

        The host keeps its signal handlers, and the process its settings."""
        return self.run_mounted(self)

    def count_body(self, scope: Scope, size: int) -> None:
        """Count bytes that a request holds until its response has been sent. QueueFull if the
        bodies of all requests take too much memory."""
        self.memory.take(scope["transfer"], size)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self  # where Starlette looks for it
        if scope["type"] != "http":
            await self.router(scope, receive, send)
            return
        is_large, request_id = False, _request_id(scope)
        scope["transfer"] = transfer = Transfer()
        scope["record"] = record = RequestRecord(request_id.decode(), received_at=time.monotonic())
        scope["context"] = None  # until the key is known
        scope["send"] = send  # for an event stream's body

        async def send_with_id(message: Message) -> None:
            nonlocal is_large
            if message["type"] == "http.response.start":
                record.status, headers = message["status"], message.get("headers", ())
                length = int(dict(headers).get(b"content-length", 0))
                if is_large := length > SEND_BYTES:
                    transfer.restart()
                    self.memory.hold(transfer, length)
                message["headers"] = [*headers]
                if self.sends_request_id:
                    message["headers"].append((b"x-request-id", request_id))
                if is_anthropic(scope):
                    message["headers"].append((b"request-id", request_id))
                if ignored := scope.get("ignored_fields"):
                    value = ", ".join(ignored).encode()
                    message["headers"].append((b"x-ignored-fields", value))
                if scope["context"]:
                    message["headers"] += limit_headers(scope["context"].key)
                if self.worker_client.terminating or scope.get("body_is_incomplete"):
                    # the next request goes to another process, or would follow the unread body
                    message["headers"] += CLOSE
                scope["started"] = True
            try:
                if is_large and message.get("body"):
                    await send_at_pace(send, transfer, message)
                else:
                    await send(message)
            except (OSError, RuntimeError) as error:
                raise as_client_gone(error) from None

        try:
            await self.respond(scope, receive, send_with_id)
        finally:
            self.memory.release(transfer)
            if parallel := scope.get("parallel"):
                parallel.running -= 1
            path = self._templates.get(scope.get("endpoint"), route_path(scope))
            path = scope.get("counted_as", path)
            endpoint = path if path in self.paths else "other"
            self.metrics.requests.labels(endpoint, record.status).inc()
            self.metrics.latency.labels(endpoint).observe(record.seconds)
            if self.logs_requests:
                log_request(scope)
            if self.telemetry and path in self.paths and path not in PROBES:
                self.telemetry.record_request(scope, path, time.monotonic())

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send a route's response, or the envelope of its exception."""
        try:
            if not self.worker_client.started:
                raise HttpError(503, NOT_STARTED)
            if len(scope["headers"]) > MAX_HEADERS:
                raise HttpError(431, TOO_MANY_HEADERS)
            identify(scope, self.keyring, self.cross_site)
            path = route_path(scope)
            if path not in self.paths and path.count("/") == 1 and is_ndjson(scope):
                # curl -T adds the name of its file to a URL that ends with a slash
                scope["path"] = scope.get("root_path", "") + "/"
            await self.router(scope, receive, send)
        except Exception as error:
            response = count_failure(error, scope)
            if "started" not in scope:
                with contextlib.suppress(ClientGone):
                    document = error_document(response, scope)
                    await send_json(send, document, response.status, response.headers)
            elif not isinstance(error, ClientGone):
                raise  # the server closes the connection: the response is incomplete


def count_failure(error: Exception, scope: Scope) -> HttpError:
    """Count an error in the metrics; return its envelope."""
    app: Application = scope["app"]
    response = as_http_error(error, scope, app.settings.debug)
    error.__traceback__ = None  # whose frames refer to the error, and to the body
    scope["record"].error = str(response)
    if response.kind:
        app.metrics.errors.labels(response.kind, scope["record"].model).inc()
    return response


def _request_id(scope: Scope) -> bytes:
    """Return the client's id if it is printable ASCII, else a new one. It is for logs only."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _PLAIN_ID.fullmatch(value):
            return bytes(value)
    return b"%s-%x" % (_PROCESS, next(_COUNT))


# ── reading ──


def read_headers(scope: Scope) -> tuple[Headers, Deadlines]:
    """Return the headers by name, and the deadlines: the first step of every POST.

    X-Request-Timeout-Ms can only shorten the setting. Raises InvalidInput (400) for an invalid
    one, HttpError (415) for a compressed body, and Draining (503)."""
    app: Application = scope["app"]
    headers, now = dict(scope["headers"]), time.monotonic()
    whole = math.inf
    if (timeout_ms := headers.get(b"x-request-timeout-ms")) is not None:
        if not timeout_ms.isdigit() or len(timeout_ms) > 10 or not int(timeout_ms):
            value = timeout_ms[:20].decode("latin-1")
            accepted = f"must be a positive whole number of at most 10 digits, not {value!r}"
            raise InvalidInput.at("X-Request-Timeout-Ms", accepted)
        whole = now + int(timeout_ms) / 1000
    if _COMPRESSED.search(coding := headers.get(b"content-encoding", b"").decode("latin-1")):
        raise HttpError(415, f"the body must not be compressed: {coding[:50]}", "Content-Encoding")
    if app.worker_client.draining:
        raise Draining("the server is stopping", 5)
    idle_s = app.settings.request_timeout_s
    return headers, Deadlines(min(now + idle_s, whole), whole, idle_s)


async def read_request(scope: Scope, receive: Receive) -> tuple[str, bytes, IncomingRequest]:
    """Return the content type, which may be empty, and the whole body. Raises the errors of
    `read_headers` and `read_body`."""
    headers, deadlines = read_headers(scope)
    body = await read_body(scope, receive, headers, deadlines.first)
    return media_type(headers), body, IncomingRequest(scope, receive, deadlines)


async def read_json_request(scope: Scope, receive: Receive) -> tuple[bytes, IncomingRequest]:
    """Return the unparsed body of a JSON request, and the request.

    Raises, beyond the errors of `read_request`, HttpError (415) for a media type that cannot be
    JSON, and a Refused (503) if no model accepts work now. A single model may still refuse it when
    it is submitted."""
    media, body, incoming = await read_request(scope, receive)
    # a form's content type may be JSON: `curl -d '{…}'` sends it
    if media.partition("/")[0] in ("multipart", "image", "audio", "video"):
        raise HttpError(415, f"Content-Type must be application/json, not {media[:100]!r}")
    if (refusal := scope["app"].worker_client.refusal()) is not None:
        raise refusal
    return body, incoming


async def read_body(scope: Scope, receive: Receive, headers: Headers, deadline: float) -> bytes:
    """Return the whole body.

    Raises HttpError (413) for a large one, HttpError (408) if nothing arrives for BODY_TIMEOUT_S or
    at the deadline, QueueFull if all bodies take too much memory, and ClientGone."""
    app: Application = scope["app"]
    limit, announced = app.max_body, content_length(headers)
    body, more = bytearray(), True  # a list of small chunks would take much more memory
    while more and max(announced, len(body)) <= limit:
        until = min(time.monotonic() + app.settings.body_timeout_s, deadline)
        chunk, more = await receive_until(receive, scope["transfer"], until)
        app.count_body(scope, len(chunk))
        body += chunk
    if more or len(body) > limit:
        raise HttpError(413, f"the body is larger than {limit / 1_000_000:g} MB")
    return bytes(body)


async def receive_until(
    receive: Receive, transfer: Transfer, deadline: float
) -> tuple[bytes, bool]:
    """Return the next chunk of a body, and whether there is more. Raises HttpError (408) at the
    deadline or when the transfer is ended, and ClientGone."""
    try:
        message = await transfer.wait(receive(), deadline - time.monotonic())
    except TimeoutError:
        raise HttpError(408, "the body stopped arriving, or arrived too slowly") from None
    if message["type"] == "http.disconnect":
        raise ClientGone("the client has disconnected")
    body: bytes = message.get("body", b"")
    transfer.moved += len(body)
    return body, message.get("more_body", False)


def is_ndjson(scope: Scope) -> bool:
    """Return whether a request's body has one input per line."""
    for name, value in scope["headers"]:
        if name == b"content-type":
            return media_type({name: value}) in NDJSON_TYPES
    return False


def content_length(headers: Headers) -> int:
    """Return the announced size of a body; 0 if there is none."""
    length = headers.get(b"content-length", b"")
    return int(length[:20]) if length.isdigit() else 0


def media_type(headers: Headers) -> str:
    return headers.get(b"content-type", b"").partition(b";")[0].strip().lower().decode("latin-1")


# ── sending ──


def content_headers(length: int, media: bytes = JSON) -> list[Header]:
    return [(b"content-type", media), (b"content-length", b"%d" % length)]


async def send_json(
    send: Send,
    document: object | bytes,
    status: int = 200,
    headers: Sequence[Header] = (),
    media: bytes = JSON,
) -> None:
    """Send a whole response: a document as JSON, or bytes of a media type."""
    content = document if isinstance(document, bytes) else to_json(document)
    del document  # a client may take long to read the content
    await send_parts(send, [content], headers, status, media)


async def send_parts(
    send: Send,
    parts: Sequence[bytes],
    headers: Sequence[Header],
    status: int = 200,
    media: bytes = JSON,
) -> None:
    """Send a whole response without joining its parts."""
    fields = [*content_headers(sum(map(len, parts)), media), *headers]
    await send({"type": "http.response.start", "status": status, "headers": fields})
    for n, part in enumerate(parts, start=1):
        await send({"type": "http.response.body", "body": part, "more_body": n < len(parts)})


async def send_at_pace(send: Send, transfer: Transfer, message: Message) -> None:
    """Send a part of a large response in pieces, so that its transfer waits where the client does
    not read it. Raises ClientGone when the transfer is ended."""
    body, more = message["body"], message.get("more_body", False)
    for start in range(0, len(body), SEND_BYTES):
        end = start + SEND_BYTES
        piece = {**message, "body": body[start:end], "more_body": more or end < len(body)}
        try:
            await transfer.wait(send(piece))
        except TimeoutError:
            raise ClientGone("the client read the response too slowly") from None
        transfer.moved += len(piece["body"])


class JsonEndpoint:
    """An ASGI app that sends the document, or the response, which `respond` returns."""

    def __init__(self, respond: Callable[[Request], Awaitable[object]]) -> None:
        self.respond = respond

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        content = await self.respond(Request(scope, receive))
        if isinstance(content, Response):
            await content(scope, receive, send)
        else:
            await send_json(send, content)
