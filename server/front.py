"""What every request meets first: request id, API key, metrics, a last resort for bugs.

Pure ASGI around the whole app. Probes and /metrics need no key, like a load balancer's.
"""

import hmac
import itertools
import logging
import re
import secrets
import time
from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.errors import envelope, http_error
from server.metrics import Metrics

log = logging.getLogger("onequeue.front")

OPEN_PATHS = {"/health", "/ready", "/metrics"}
_PLAIN_ID = re.compile(rb"[!-~]{1,128}")
_PROCESS = secrets.token_hex(4).encode()
_COUNT = itertools.count(1)


class Front:
    def __init__(
        self, app: ASGIApp, metrics: Metrics, api_keys: Sequence[str], paths: set[str]
    ) -> None:
        self.app = app
        self.metrics = metrics
        self.keys = [key.encode() for key in api_keys]
        self.paths = paths  # known routes; others are counted together

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = time.monotonic()
        status = 0
        scope["request_id"] = request_id = _request_id(scope)

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"].append((b"x-request-id", request_id))
            await send(message)

        try:
            if self.keys and not self._may_pass(scope):
                refusal = http_error(
                    401, "a valid API key is needed: Authorization: Bearer KEY", None,
                    {"WWW-Authenticate": "Bearer"},
                )  # fmt: skip
                await refusal(scope, receive, send_with_id)
            else:
                await self.app(scope, receive, send_with_id)
        except Exception:
            log.exception("bug id=%s path=%s", request_id.decode(), scope["path"])
            if not status:
                sorry = envelope(500, "the server made a mistake", "server_error", "internal")
                await sorry(scope, receive, send_with_id)
        finally:
            endpoint = scope["path"] if scope["path"] in self.paths else "other"
            self.metrics.request(endpoint, status, time.monotonic() - started)

    def _may_pass(self, scope: Scope) -> bool:
        if scope["path"] in OPEN_PATHS or scope["method"] == "OPTIONS":
            return True
        given = next((v for k, v in scope["headers"] if k == b"authorization"), b"")
        scheme, _, key = given.partition(b" ")
        matches = [hmac.compare_digest(key.strip(), known) for known in self.keys]
        return scheme.lower() == b"bearer" and any(matches)


def _request_id(scope: Scope) -> bytes:
    """The client's own id if it is plain, else a new one. For logs only, never a key."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _PLAIN_ID.fullmatch(value):
            return bytes(value)
    return b"%s-%x" % (_PROCESS, next(_COUNT))
