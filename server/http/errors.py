"""HTTP statuses and the error envelope, by exception class.

    {"error": {"message", "type", "param", "code"}}
    {"type": "error", "error": {"type", "message"}, "request_id"}    below /v1/messages

HTTP-level errors are raised as an HttpError; `as_http_error` converts all other exceptions.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Annotated, Any

from msgspec import Meta, Struct
from starlette.exceptions import HTTPException
from starlette.types import Scope

from batching import errors
from server.http.json import Document, Header
from server.http.paths import is_anthropic, route_path

log = logging.getLogger("onequeue.errors")

MAX_MESSAGE = 4000
MAX_PARAM = 200

# POST paths that need a model, by the setting that names it.
PATHS_BY_SETTING: Mapping[str, Sequence[str]] = {
    "PIPELINE_MODEL": ["/"],
    "CHAT_MODEL": [
        "/v1/chat/completions",
        "/v1/chat/completions/input_tokens",
        "/apply-template",
        "/v1/completions",
        "/v1/responses",
        "/v1/responses/input_tokens",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/infill",
        "/v1/decisions",
        "/v1/systemone",
    ],
    "EMBEDDING_MODEL": ["/v1/embeddings", "/embed", "/embed_all", "/embed_sparse", "/similarity"],
    "RERANK_MODEL": ["/rerank", "/v1/rerank", "/v2/rerank"],
    "RERANK_MODEL or EMBEDDING_MODEL": ["/v1/score", "/score"],
    "CHAT_MODEL, EMBEDDING_MODEL or RERANK_MODEL": ["/tokenize", "/detokenize", "/decode"],
    "PIPELINE_TASK=text-classification": ["/predict"],
    "PIPELINE_TASK=text-to-audio": ["/v1/audio/speech"],
    "TRANSCRIPTION_MODEL or CHAT_MODEL": ["/v1/audio/transcriptions", "/v1/audio/translations"],
}
SETTING_FOR_PATH = {path: name for name, paths in PATHS_BY_SETTING.items() for path in paths}

# What to use instead of paths of other servers, and of those below them, that have no route here.
PATHS_BY_REPLACEMENT: Mapping[str, Sequence[str]] = {
    "POST /v1/chat/completions": ["/api/chat", "/v1/edits"],
    "POST /v1/completions": ["/api/generate", "/completion", "/generate", "/generate_stream"],
    "POST /v1/embeddings": ["/api/embed", "/api/embeddings", "/embedding", "/v2/embed"],
    "POST /tokenize: give the client the folder of the tokenizer": ["/tokenizer_info"],
    "GET /models": ["/api/ps", "/api/show", "/api/tags", "/info", "/props", "/slots"],
    "POST / with PIPELINE_TASK=text-classification": ["/classify", "/v1/moderations"],
    "another server: no images are generated here": ["/sdapi", "/v1/images"],
}
REPLACEMENT_FOR_PATH = {path: use for use, paths in PATHS_BY_REPLACEMENT.items() for path in paths}

BATCH_PATHS = ("/v1/files", "/v1/batches")

# The parameter of /v1/messages for conversations that the server stores, and the details of its
# refusal, at which Anthropic's SDK sends the whole conversation instead.
THREAD = "thread"
NO_THREADS = {"error_code": "thread_unsupported_request", "unsupported": [THREAD]}

# exception class, or its nearest base: (status, type, code)
RESPONSE_BY_ERROR: Mapping[type[Exception], tuple[int, str, str]] = {
    errors.InvalidInput: (400, "invalid_request_error", "invalid_value"),
    errors.ContextExceeded: (400, "invalid_request_error", "context_length_exceeded"),
    errors.QueueFull: (503, "overloaded_error", "queue_full"),
    errors.DeadlineHopeless: (503, "overloaded_error", "deadline_hopeless"),
    errors.NotReady: (503, "unavailable_error", "not_ready"),
    errors.Draining: (503, "unavailable_error", "draining"),
    errors.BreakerOpen: (503, "unavailable_error", "breaker_open"),
    errors.WorkerDown: (503, "unavailable_error", "worker_down"),
    errors.DeadlineExceeded: (504, "timeout_error", "deadline_exceeded"),
    errors.ItemFailed: (500, "server_error", "item_failed"),
    errors.OutOfMemory: (500, "server_error", "out_of_memory"),
    errors.ClientGone: (499, "invalid_request_error", "client_gone"),  # not received
}

# status of an HttpError: (type, code)
RESPONSE_BY_STATUS: Mapping[int, tuple[str, str]] = {
    400: ("invalid_request_error", "invalid_request"),
    401: ("authentication_error", "invalid_api_key"),
    403: ("permission_error", "origin_not_allowed"),
    404: ("invalid_request_error", "not_found"),
    405: ("invalid_request_error", "method_not_allowed"),
    408: ("timeout_error", "body_timeout"),
    413: ("invalid_request_error", "body_too_large"),
    415: ("invalid_request_error", "unsupported_media_type"),
    421: ("invalid_request_error", "host_not_allowed"),
    429: ("requests", "rate_limit_exceeded"),
    431: ("invalid_request_error", "headers_too_large"),
    500: ("server_error", "internal"),
    503: ("unavailable_error", "not_ready"),
}

ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class ErrorDetails(Struct):
    message: str
    type: str
    param: Annotated[str | None, Meta(description="The field with the error: messages[0].content")]
    code: str


class Error(Struct):
    error: ErrorDetails


class HttpError(Exception):
    """A 4xx or 5xx response. `type` and `code` default to those of the status.

    `kind` is the label in the errors metric; an empty one is not counted. Names of `headers` are in
    lower case."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        headers: Sequence[Header] = (),
        *,
        type: str | None = None,
        code: str | None = None,
        kind: str | None = None,
    ) -> None:
        super().__init__(message[:MAX_MESSAGE])
        default = ("invalid_request_error", "http_error")
        default_type, default_code = RESPONSE_BY_STATUS.get(status, default)
        self.status = status
        self.type, self.code = type or default_type, code or default_code
        self.kind = default_code if kind is None else kind
        self.param = param and param[:MAX_PARAM]  # it may quote keys of the client's JSON
        self.headers = headers

    @property
    def document(self) -> Document:
        error = {"message": str(self), "type": self.type, "param": self.param, "code": self.code}
        return {"error": error}


def as_http_error(error: Exception, scope: Scope, debug: bool) -> HttpError:
    """Return the response for an exception that a route raised, and log the server's own errors.

    The chained cause is shown in debug mode only."""
    if isinstance(error, HttpError):
        return error
    if isinstance(error, HTTPException):
        return _from_routing(error, scope)
    request_id, cause = scope["record"].request_id, error.__cause__
    if not isinstance(error, errors.OnequeueError):
        log.error("bug id=%s path=%.200r", request_id, scope["path"], exc_info=error)
        return HttpError(500, "internal server error")
    known = next(base for base in type(error).__mro__ if base in RESPONSE_BY_ERROR)
    status, type_, code = RESPONSE_BY_ERROR[known]
    message, headers = str(error), []
    if status == 500:
        log.error("request failed id=%s error=%.200r", request_id, cause)
    if debug and cause is not None:
        message += f" ({cause!r})"
    if error.retry_after_s is not None:
        headers = [(b"retry-after", b"%d" % math.ceil(error.retry_after_s))]
    param = getattr(error, "param", None)
    return HttpError(status, message, param, headers, type=type_, code=code, kind=code)


def error_document(error: HttpError, scope: Scope) -> Document:
    """Return the envelope that clients of the path read."""
    if is_anthropic(scope):
        return anthropic_document(error, scope["record"].request_id)
    return error.document


def anthropic_document(error: HttpError, request_id: str | None = None) -> Document:
    """Return Anthropic's envelope; `request_id` is left out in events."""
    default = "invalid_request_error" if error.status < 500 else "api_error"
    type_ = ANTHROPIC_TYPES.get(error.status, default)
    document: Document = {"type": "error", "error": {"type": type_, "message": str(error)}}
    if error.param == THREAD:
        document["error"]["details"] = NO_THREADS
    return document if request_id is None else {**document, "request_id": request_id}


def as_client_gone(error: OSError | RuntimeError) -> Exception:
    """Convert the error of sending to a closed connection: an OSError of servers, a RuntimeError of
    uvloop's transports. Return any other error as it is."""
    if isinstance(error, RuntimeError) and "closed=True" not in str(error):
        return error
    client_gone = errors.ClientGone("the client has disconnected")
    client_gone.__cause__ = error
    return client_gone


def _from_routing(error: HTTPException, scope: Scope) -> HttpError:
    """Convert an error of Starlette's router: no such route, or method not allowed."""
    path = route_path(scope)[:200]
    message = {
        404: f"there is no route {path}",
        405: f"{path} does not take {scope['method'][:20]}",
    }.get(error.status_code, error.detail)
    if scope["method"] == "POST" and (setting := SETTING_FOR_PATH.get(path)):
        message += f": it needs {setting}"
    elif path.startswith(BATCH_PATHS) and not scope["app"].settings.has_batches:
        message += ": it needs BATCH_DIR or STORE"
    elif error.status_code == 404:
        message += f": {_path_hint(path, scope['app'].routes)}"
    elif error.headers:
        message += f", but {_allowed(scope)}"
    headers = [(b"allow", _allowed(scope).encode())] if error.headers else []
    return HttpError(error.status_code, message, None, headers, kind="routing")


def _allowed(scope: Scope) -> str:
    """Return the methods of a path. Its routes have one each; the first is in the scope."""
    routes = scope["app"].routes
    paths = {route.path for route in routes if route.endpoint is scope["endpoint"]}
    methods = [route.methods for route in routes if route.path in paths]
    return ", ".join(sorted(set().union(*methods)))


def _path_hint(path: str, routes: Sequence[Any]) -> str:
    """Return the route that is meant by an unknown path, or where all are listed."""
    parents = accumulate(path.split("/"), "{}/{}".format)
    if use := next(filter(None, map(REPLACEMENT_FOR_PATH.get, parents)), None):
        return f"use {use}"

    def is_known(path: str) -> bool:
        return path in SETTING_FOR_PATH or any(route.path_regex.match(path) for route in routes)

    if is_known(versioned := f"/v1{path}"):
        return f"/v1 is missing. The path is {versioned}; a client's base URL ends in /v1"
    for meant in (path.rstrip("/"), path.removeprefix("/v1"), f"{path}/completions"):
        if meant not in ("", "/", path, "/v1/completions") and is_known(meant):
            return f"the path is {meant}"
    return "GET /docs lists the routes; a client's base URL ends in /v1"
