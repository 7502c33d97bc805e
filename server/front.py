"""The app itself, around the routes: request id, API key, errors to envelopes, metrics.

One pure ASGI layer in the place of Starlette's application and its middleware, which cost a short
request more than the queue does. Probes and /metrics need no key, like a load balancer's.
"""

import hmac
import itertools
import logging
import re
import secrets
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.errors import http_error, to_response
from server.metrics import Metrics
from server.settings import Settings
from worker.engine import Engine

log = logging.getLogger("onequeue.front")

OPEN_PATHS = {"/health", "/ready", "/metrics"}
_PLAIN_ID = re.compile(rb"[!-~]{1,128}")
_PROCESS = secrets.token_hex(4).encode()
_COUNT = itertools.count(1)


class Front:
    """`routes` answers or raises; endpoints find this object as `request.app`."""

    def __init__(
        self, routes: ASGIApp, paths: set[str], settings: Settings, engine: Engine, metrics: Metrics
    ) -> None:
        self.routes = routes
        self.paths = paths  # requests elsewhere are counted together
        self.settings = settings
        self.engine = engine
        self.metrics = metrics
        self.keys = [key.encode() for key in settings.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self
        if scope["type"] != "http":
            await self.routes(scope, receive, send)
            return
        started = time.monotonic()
        status = 0
        request_id = _request_id(scope)

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id)]
            await send(message)

        try:
            if self.keys and not self._may_pass(scope):
                refusal = http_error(
                    401, "a valid API key is needed: Authorization: Bearer KEY", None,
                    {"WWW-Authenticate": "Bearer"},
                )  # fmt: skip
                await refusal(scope, receive, send_with_id)
            else:
                await self.routes(scope, receive, send_with_id)
        except Exception as error:
            if status:  # too late for an envelope: the connection is closed instead
                raise
            response = to_response(error, scope, request_id.decode(), self.settings.debug)
            await response(scope, receive, send_with_id)
        finally:
            endpoint = scope["path"] if scope["path"] in self.paths else "other"
            self.metrics.request(endpoint, status, time.monotonic() - started)

    def _may_pass(self, scope: Scope) -> bool:
        if scope["path"] in OPEN_PATHS or scope["method"] == "OPTIONS":
            return True
        given = next((v for k, v in scope["headers"] if k == b"authorization"), b"")
        scheme, _, key = given.partition(b" ")
        matches = [hmac.compare_digest(key.strip(), known) for known in self.keys]
        return bool(scheme.lower() == b"bearer" and any(matches))


def _request_id(scope: Scope) -> bytes:
    """The client's own id if it is plain, else a new one. For logs only, never a key."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _PLAIN_ID.fullmatch(value):
            return bytes(value)
    return b"%s-%x" % (_PROCESS, next(_COUNT))
