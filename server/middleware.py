"""The app itself, around the routes: request id, API key, errors to envelopes, metrics.

One pure ASGI layer in the place of Starlette's application and its middleware: a short request
pays for each of them. Probes and /metrics need no key, like a load balancer's.
"""

import contextlib
import hmac
import itertools
import re
import secrets
import time

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from batching.errors import ClientGone, QueueFull
from server.engine import Engine
from server.http.errors import HttpError, as_http_error
from server.http.json import send_json, to_json
from server.settings import Settings

BODIES = 16  # of MAX_BODY_MB each may be there at a time
OPEN_PATHS = {"/health", "/ready", "/metrics"}
_PLAIN_ID = re.compile(rb"[!-~]{1,128}")
_PROCESS = secrets.token_hex(4).encode()
_COUNT = itertools.count(1)


class Middleware:
    """`routes` answers or raises. Starlette, too, wants to find the app in the scope."""

    def __init__(
        self, routes: ASGIApp, paths: set[str], settings: Settings, engine: Engine
    ) -> None:
        self.routes = routes
        self.paths = paths  # requests elsewhere are counted together
        self.settings = settings
        self.engine = engine
        self.metrics = engine.metrics
        self.keys = [key.encode() for key in settings.api_keys]
        self.max_body = int(settings.max_body_mb * 1_000_000)
        self.body_bytes = 0  # of all requests that are not answered
        self.answer: ASGIApp = self._answer
        if settings.cors_origins:
            self.answer = Cors(
                self._answer,
                allow_origins=settings.cors_origins,
                allow_methods=["*"],
                allow_headers=["*"],
                expose_headers=["X-Request-Id", "X-Batch-Size", "Server-Timing", "Retry-After"],
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self
        if scope["type"] != "http":
            await self.routes(scope, receive, send)
            return
        started = time.monotonic()
        status = body_bytes = 0
        scope["request_id"] = request_id = _request_id(scope)

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id)]
                scope["begun"] = True
            try:
                await send(message)
            except (OSError, RuntimeError) as error:
                # uvloop's closed transports raise a RuntimeError
                if isinstance(error, RuntimeError) and "closed=True" not in str(error):
                    raise
                raise ClientGone("the client has gone") from error

        async def receive_bounded() -> Message:
            nonlocal body_bytes
            message = await receive()
            if body := message.get("body"):
                more = min(len(body), self.max_body - body_bytes)  # beyond that it is dropped
                if self.body_bytes + more > BODIES * self.max_body:
                    raise QueueFull("the bodies of the requests take all memory there is for them")
                body_bytes += more
                self.body_bytes += more
            return message

        try:
            await self.answer(scope, receive_bounded, send_with_id)
        finally:
            self.body_bytes -= body_bytes
            endpoint = scope.get("counted_as", scope["path"])  # of paths with a name in them
            endpoint = endpoint if endpoint in self.paths else "other"
            self.metrics.request(endpoint, status, time.monotonic() - started)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A route's answer, or the envelope of what it raised."""
        try:
            if self.keys and not self._may_pass(scope):
                needed = "a valid API key is needed: Authorization: Bearer KEY"
                raise HttpError(401, needed, headers=[(b"www-authenticate", b"Bearer")])
            await self.routes(scope, receive, send)
        except Exception as error:
            answer = as_http_error(error, scope, self.settings.debug)
            if answer.kind:
                self.metrics.failed(answer.kind)
            if "begun" not in scope:
                with contextlib.suppress(ClientGone):
                    await send_json(send, answer.document, answer.status, answer.headers)
            elif not isinstance(error, ClientGone):
                raise  # half an answer must not look like a whole one

    def _may_pass(self, scope: Scope) -> bool:
        if scope["path"] in OPEN_PATHS or scope["method"] == "OPTIONS":
            return True
        given = next((v for k, v in scope["headers"] if k == b"authorization"), b"")
        scheme, _, key = given.partition(b" ")
        matches = [hmac.compare_digest(key.strip(), known) for known in self.keys]
        return bool(scheme.lower() == b"bearer" and any(matches))


class Cors(CORSMiddleware):
    """Starlette's, with our envelope for a preflight that is refused."""

    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        if response.status_code < 400:
            return response
        refused = HttpError(400, bytes(response.body).decode())
        return Response(to_json(refused.document), 400, media_type="application/json")


def _request_id(scope: Scope) -> bytes:
    """The client's own id if it is plain, else a new one. For logs only, never a key."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _PLAIN_ID.fullmatch(value):
            return bytes(value)
    return b"%s-%x" % (_PROCESS, next(_COUNT))
