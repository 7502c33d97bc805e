"""Exception → HTTP status and envelope: one table, one shape.

    {"error": {"message", "type", "param", "code"}}

Internals (the chained cause) are added to the message only in debug mode.
"""

import logging
import math
from collections.abc import Mapping

import orjson
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Scope

from batching.errors import (
    BreakerOpen,
    ClientGone,
    DeadlineExceeded,
    DeadlineHopeless,
    DeviceLost,
    Draining,
    InvalidInput,
    ItemFailed,
    NotReady,
    OnequeueError,
    OutOfMemory,
    QueueFull,
    WorkerDown,
    WrongResultCount,
)

log = logging.getLogger("onequeue.errors")

MAX_MESSAGE = 4000
MAX_PARAM = 200

# exception: (status, type, code)
TABLE: Mapping[type[Exception], tuple[int, str, str]] = {
    InvalidInput: (400, "invalid_request_error", "invalid_value"),
    QueueFull: (503, "overloaded_error", "queue_full"),
    DeadlineHopeless: (503, "overloaded_error", "deadline_hopeless"),
    NotReady: (503, "unavailable_error", "not_ready"),
    Draining: (503, "unavailable_error", "draining"),
    BreakerOpen: (503, "unavailable_error", "breaker_open"),
    WorkerDown: (503, "unavailable_error", "worker_down"),
    DeviceLost: (503, "unavailable_error", "worker_down"),
    DeadlineExceeded: (504, "timeout_error", "deadline_exceeded"),
    ItemFailed: (500, "server_error", "item_failed"),
    OutOfMemory: (500, "server_error", "out_of_memory"),
    WrongResultCount: (500, "server_error", "wrong_result_count"),
    ClientGone: (499, "invalid_request_error", "client_gone"),  # nobody reads it
}

HTTP_CODES = {
    400: ("invalid_request_error", "invalid_request"),
    401: ("authentication_error", "invalid_api_key"),
    404: ("invalid_request_error", "not_found"),
    405: ("invalid_request_error", "method_not_allowed"),
    408: ("timeout_error", "body_timeout"),
    413: ("invalid_request_error", "body_too_large"),
    415: ("invalid_request_error", "unsupported_media_type"),
    431: ("invalid_request_error", "headers_too_large"),
}


def envelope(
    status: int,
    message: str,
    type_: str,
    code: str,
    param: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    param = param and param[:MAX_PARAM]  # it may quote the client's own keys
    error = {"message": message[:MAX_MESSAGE], "type": type_, "param": param, "code": code}
    body = orjson.dumps({"error": error})
    return Response(body, status, headers, media_type="application/json")


def http_error(
    status: int, message: str, param: str | None = None, headers: Mapping[str, str] | None = None
) -> Response:
    return envelope(status, message, *HTTP_CODES[status], param, headers)


class AnsweredEarly(Exception):
    """Raised with the response that ends a request: 408, 413, 415."""

    def __init__(self, response: Response) -> None:
        super().__init__(response.status_code)
        self.response = response


def to_response(
    error: Exception, scope: Scope, request_id: str, debug: bool
) -> tuple[Response, str]:
    """The envelope for whatever a route raised, and its kind for metrics. Bugs are logged."""
    if isinstance(error, AnsweredEarly):
        return error.response, HTTP_CODES[error.response.status_code][1]
    if isinstance(error, HTTPException):
        return _routing_error(error, scope), "routing"
    if not isinstance(error, OnequeueError):
        log.error("bug id=%s path=%r", request_id, scope["path"], exc_info=error)
        return envelope(500, "the server made a mistake", "server_error", "internal"), "internal"
    status, type_, code = TABLE[type(error)]
    if status == 500:
        log.error("request failed id=%s error=%r", request_id, error.__cause__)
    message = str(error)
    if debug and error.__cause__ is not None:
        message += f" ({error.__cause__!r})"
    headers = None
    if error.retry_after_s is not None:
        headers = {"Retry-After": str(math.ceil(error.retry_after_s))}
    return envelope(status, message, type_, code, getattr(error, "param", None), headers), code


def _routing_error(error: HTTPException, scope: Scope) -> Response:
    """Starlette's own: no such route, method not allowed."""
    path = scope["path"][:200]
    message = {
        404: f"there is no {path} here",
        405: f"{path} does not take {scope['method'][:20]}",
    }.get(error.status_code, error.detail)
    type_, code = HTTP_CODES.get(error.status_code, ("invalid_request_error", "http_error"))
    return envelope(error.status_code, message, type_, code, None, error.headers)
