"""The access log: one line per request, in place of uvicorn's.

    request id=… method=POST path=/v1/completions status=200 seconds=0.123 client=::1 model=demo …

A background response has a second line at its end. Probes are left out.
`--no-access-log` turns it off.
"""

import logging
import time
from typing import Any

from starlette.types import Scope

from server.core.log import log_fields
from server.core.request_context import RequestContext
from server.http.paths import route_path

log = logging.getLogger("onequeue.access")

PROBES = ("/health", "/ready", "/ping", "/metrics")


def replace_access_log() -> bool:
    """Silence uvicorn's access log. Return whether it was on."""
    access_log = logging.getLogger("uvicorn.access")
    was_on = access_log.hasHandlers()
    access_log.handlers, access_log.propagate = [], False
    return was_on


def log_request(scope: Scope, context: RequestContext, status: int, started: float) -> None:
    """Log a request whose response has ended. `status`: 0 if the client left before one began."""
    if (path := route_path(scope)) in PROBES:
        return
    address = scope["client"][0] if scope.get("client") else "unix"
    fields: dict[str, Any] = {
        "id": context.request_id,
        "method": scope["method"],
        "path": path,
        "status": status or 499,
        "seconds": round(time.monotonic() - started, 4),
        "client": address,
    }
    _log("request", context, fields)


def log_background(context: RequestContext, response: str, status: str) -> None:
    """Log the end of a background response. `response`: its id."""
    seconds = round(time.monotonic() - context.received_at, 4)
    fields = {"id": context.request_id, "response": response, "status": status, "seconds": seconds}
    _log("background", context, fields)


def _log(message: str, context: RequestContext, fields: dict[str, Any]) -> None:
    """Log a request's fields, then its key, model, tokens and error."""
    if context.key:
        fields["key"] = context.key.name
    if context.model:
        fields["model"] = context.model
    if context.prompt_tokens or context.output_tokens:
        fields["prompt_tokens"] = context.prompt_tokens
        fields["output_tokens"] = context.output_tokens
    if context.error:
        fields["error"] = context.error
    log_fields(log, logging.INFO, message, fields)
