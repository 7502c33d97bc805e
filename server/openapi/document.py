"""`GET /openapi.json`: the mounted routes, described by the structs of requests and responses.

    routes → their operations (http/operation.py) → paths, and schemas of their structs

Parameters that are not implemented are listed by the struct of a request. descriptions.json has the
meaning of each other field of a request, by its name or by `STRUCT.name`.
"""

import re
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import anyio.to_thread
import msgspec
import orjson
from msgspec import Struct
from starlette.requests import Request

from server import __version__
from server.http.access import is_open
from server.http.cross_site import SAFE_METHODS
from server.http.json import EMPTY, to_json
from server.http.operation import EVENTS, JSON, NDJSON, Body, Operation, OperationRoute, Schema

COMPONENTS = "#/components"
DESCRIPTIONS: Mapping[str, str] = orjson.loads(
    Path(__file__).with_name("descriptions.json").read_bytes()
)
# The tag of an operation, by the beginning of its path; "Server" for all others.
TAGS: Mapping[str, tuple[str, ...]] = {
    "Chat and completions": ("/v1/chat", "/v1/completions", "/infill", "/apply-template"),
    "Responses": ("/v1/responses", "/v1/conversations"),
    "Messages": ("/v1/messages",),
    "Pipelines": ("/predict",),
    "Embeddings and vectors": ("/v1/embeddings", "/embed", "/similarity"),
    "Rerank and score": ("/rerank", "/v1/rerank", "/v2/rerank", "/v1/score", "/score"),
    "Audio": ("/v1/audio",),
    "Decisions": ("/v1/decisions", "/v1/systemone"),
    "Tokens": ("/tokenize", "/detokenize", "/decode"),
    "Files and batches": ("/v1/files", "/v1/batches"),
    "Models": ("/models", "/v1/models", "/load_model", "/info", "/v1/load_", "/v1/unload_"),
}
LINES = "One line per line of the request: its response, or an error with the number of the line"
DOCUMENT = Operation("GET /openapi.json", "This document", {JSON: {"type": "object"}})
ERRORS = {
    400: "The request is malformed, or a value is out of range; `param` names the field",
    401: "The API key is missing or invalid",
    403: "A web page of another origin sent the request: see CORS_ORIGINS",
    404: "The resource does not exist",
    405: "The path does not support this method",
    408: "The request body stopped arriving",
    413: "The request body is too large",
    415: "The media type of the request body is not supported",
    421: "The Host header is not a name of this machine: see ALLOWED_HOSTS",
    500: "The model failed on this input, or the server has a bug",
    503: "The server is overloaded, loading, failing or shutting down: retry later",
    504: "The time limit has passed; the header X-Request-Timeout-Ms shortens it",
}
ERROR_HEADERS = {401: "WWW-Authenticate", 405: "Allow", 503: "Retry-After"}
BODY_ERRORS = {400, 408, 413, 415, 503, 504}  # of any endpoint that reads a body


def openapi_route(has_keys: bool, others: Sequence[OperationRoute]) -> OperationRoute:
    """Return a route that serves the document of the other routes and itself."""

    @cache
    def content(root_path: str) -> bytes:
        document = build_document(has_keys, [*others, route])
        return to_json(document | {"servers": [{"url": root_path or "/"}]})

    async def respond(request: Request) -> bytes:
        return await anyio.to_thread.run_sync(content, request.scope.get("root_path", ""))

    route = OperationRoute(DOCUMENT, respond)
    return route


def build_document(has_keys: bool, routes: Sequence[OperationRoute]) -> dict[str, Any]:
    operations = [route.operation for route in routes]
    error_kinds = list(dict.fromkeys(operation.error for operation in operations))
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        method, _ = route.operation.key.split()
        document = _operation_document(method, route.path_format, route.operation, has_keys)
        paths.setdefault(route.path_format, {})[method.lower()] = document
    errors: dict[str, Any] = {
        f"{kind.__name__}{status}": {"description": meaning, "content": _content(kind)}
        for kind in error_kinds
        for status, meaning in ERRORS.items()
    }
    for kind in error_kinds:
        for status, name in ERROR_HEADERS.items():
            headers = {name: {"schema": {"type": "string"}}}
            errors[f"{kind.__name__}{status}"]["headers"] = headers
    components = {"schemas": _schemas(operations), "responses": errors}
    if has_keys:
        components["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
    used = {_tag(operation.key) for operation in operations}
    return {
        "openapi": "3.1.0",
        "info": {"title": "onequeue", "version": __version__},
        "tags": [{"name": name} for name in (*TAGS, "Server") if name in used],
        "paths": paths,
        "components": components,
    }


def _operation_document(
    method: str, path: str, operation: Operation, has_keys: bool
) -> dict[str, Any]:
    content = _content(operation.response)
    if operation.alternatives:
        kinds = [operation.response, *operation.alternatives]
        content[JSON] = {"schema": {"anyOf": list(map(_schema, kinds))}}
    content |= {media: {"schema": {"type": "string"}} for media in operation.others}
    if operation.takes_lines:
        content[NDJSON] = {"schema": {"type": "string", "description": LINES}}
    if operation.stream:
        content[EVENTS] = {"schema": {"description": operation.stream}}
    document: dict[str, Any] = {
        "tags": [_tag(operation.key)],
        "operationId": re.sub(r"\W+", "_", method.lower() + path).strip("_"),
        "summary": operation.summary,
        "responses": {"200": {"description": "The response", "content": content}},
    }
    errors = {405, 500, *operation.errors}
    parameters: list[Schema] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"\{(\w+)\}", path)
    ]
    if parameters or "model" in getattr(operation.request, "__struct_fields__", ()):
        errors.add(404)
    if query := operation.query:
        errors.add(400)
        _, components = msgspec.json.schema_components([query])
        for name, schema in components[query.__name__]["properties"].items():
            parameters.append({"name": name, "in": "query", "schema": schema})
    if parameters:
        document["parameters"] = parameters
    if operation.request:
        errors |= BODY_ERRORS
        body = _content(operation.request)
        if operation.takes_lines:
            lines = "One input per line: a JSON string, or an object as in a JSON body"
            body[NDJSON] = {"schema": {"type": "string", "description": lines}}
        document["requestBody"] = {"required": True, "content": body}
    if not has_keys:
        errors |= {421} if method in SAFE_METHODS else {403, 421}
    elif not is_open(method, path):
        errors.add(401)
        document["security"] = [{"bearer": []}, {"key": []}]
    for status in sorted(errors):
        reference = f"{COMPONENTS}/responses/{operation.error.__name__}{status}"
        document["responses"][str(status)] = {"$ref": reference}
    return document


def _tag(key: str) -> str:
    if key == "POST /":
        return "Pipelines"
    _, path = key.split()
    return next((tag for tag, paths in TAGS.items() if path.startswith(paths)), "Server")


def _schema(kind: Any) -> Schema:
    """Return a schema as it is, and a struct as a reference to its component."""
    return {"$ref": f"{COMPONENTS}/schemas/{kind.__name__}"} if isinstance(kind, type) else kind


def _content(body: type[Struct] | Body) -> dict[str, Any]:
    """Return the content of a body, by media type."""
    by_media = {JSON: body} if isinstance(body, type) else body
    return {media: {"schema": _schema(kind)} for media, kind in by_media.items()}


def _schemas(operations: Sequence[Operation]) -> dict[str, Any]:
    """Return the schemas of the operations' structs and of those within them, by name."""
    bodies = [(o.error, o.request, o.response, *o.alternatives) for o in operations]
    kinds = [body for body in chain(*bodies) if isinstance(body, type)]
    template = COMPONENTS + "/schemas/{name}"
    _, components = msgspec.json.schema_components(kinds, ref_template=template)
    for operation in operations:
        if isinstance(kind := operation.request, type):
            for name, schema in components[kind.__name__]["properties"].items():
                by_kind = DESCRIPTIONS.get(f"{kind.__name__}.{name}", DESCRIPTIONS.get(name))
                schema.setdefault("description", by_kind)
    for kind in kinds:
        for path, accepted in getattr(kind, "unimplemented", {}).items():
            *outer, name = path.split(".")
            schema = components[kind.__name__]
            for field in outer:
                [inner] = re.findall(r"/schemas/(\w+)", str(schema["properties"][field]))
                schema = components[inner]
            schema["properties"][name] = {
                "description": "Not implemented: leave it out",
                "enum": [*EMPTY, *(value for value in accepted if value not in EMPTY)],
            }
    return dict(sorted(components.items()))
