"""The access log: one line per request, in place of uvicorn's.

    request id=… method=POST path=/v1/completions status=200 seconds=0.123 client=::1 model=demo …

A background response has a second line at its end. Probes are left out.
`--no-access-log` turns it off.
"""

import logging
from typing import Any

from starlette.types import Scope

from server.core.request_context import RequestRecord
from server.http.paths import route_path

log = logging.getLogger("onequeue.access")

PROBES = ("/health", "/ready", "/ping", "/metrics")


def replace_access_log() -> bool:
    """Silence uvicorn's access log. Return whether it was on."""
    access_log = logging.getLogger("uvicorn.access")
    was_on = access_log.hasHandlers()
    access_log.handlers, access_log.propagate = [], False
    return was_on


def log_request(scope: Scope) -> None:
    """Log a request whose response has ended, with 499 if the client left before one began."""
    if (path := route_path(scope)) in PROBES:
        return
    record, client = scope["record"], scope["client"][0] if scope.get("client") else "unix"
    fields = {"method": scope["method"], "path": path, "status": record.status or 499}
    _log("request", scope, fields | {"seconds": round(record.seconds, 4), "client": client})


def log_background(scope: Scope, response: str, status: str) -> None:
    """Log the end of a background response. `response`: its id."""
    seconds = round(scope["record"].seconds, 4)
    _log("background", scope, {"response": response, "status": status, "seconds": seconds})


def _log(message: str, scope: Scope, fields: dict[str, Any]) -> None:
    """Log a request's id and fields, then its key, model, tokens and error."""
    record: RequestRecord = scope["record"]
    fields = {"id": record.request_id, **fields}
    if scope["context"] and (name := scope["context"].key.name):
        fields["key"] = name
    if record.model:
        fields["model"] = record.model
    if record.prompt_tokens or record.output_tokens:
        fields["prompt_tokens"] = record.prompt_tokens
        fields["output_tokens"] = record.output_tokens
    if record.error:
        fields["error"] = record.error
    log.info(message, extra={"fields": fields})
