"""Operations, each declared at its endpoint, and their routes.

    @Operation("GET /v1/files", "The files of the key", FileList, query=FilePage)

`GET /openapi.json` (openapi/document.py) describes the operations of the mounted routes.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from msgspec import Struct
from starlette.routing import Route

from server.http.errors import Error
from server.http.request import JsonEndpoint

JSON, EVENTS, TEXT = "application/json", "text/event-stream", "text/plain"
FORM, HTML, NDJSON = "multipart/form-data", "text/html", "application/x-ndjson"

Schema = dict[str, Any]
Body = Mapping[str, Schema]  # by media type
E = TypeVar("E")


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of a path. It decorates the endpoint. A struct is a JSON body.

    Alternatives to the response: `stream` describes events, `others` are media types of text,
    `alternatives` are other structs or schemas. `errors` are the statuses beyond 401, 403, 405,
    421, 500 and those that follow from the declaration: 404 of a path with a parameter and of a
    request with a `model`, 400 of a query, BODY_ERRORS of a request body. `error` is their body."""

    key: str  # method and path
    summary: str
    response: type[Struct] | Body
    request: type[Struct] | Body | None = None
    errors: Sequence[int] = ()
    stream: str | None = None
    query: type[Struct] | None = None
    others: Sequence[str] = ()
    alternatives: Sequence[type[Struct] | Schema] = ()
    error: type[Struct] = Error
    takes_lines: bool = False  # the request may be NDJSON, and its response then is, too

    def __call__(self, endpoint: E) -> E:
        """Add this operation to those of an endpoint."""
        declared: Any = endpoint
        declared.operations = (self, *vars(endpoint).get("operations", ()))
        return endpoint


class OperationRoute(Route):
    """The route of an operation. Its endpoint is an ASGI app, or a function for JsonEndpoint."""

    def __init__(self, operation: Operation, endpoint: Any) -> None:
        method, path = operation.key.split()
        app = JsonEndpoint(endpoint) if inspect.isroutine(endpoint) else endpoint
        super().__init__(path, app, methods=[method])
        self.operation = operation


def routes_of(*endpoints: Any) -> list[OperationRoute]:
    return [OperationRoute(operation, app) for app in endpoints for operation in app.operations]
