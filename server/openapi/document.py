"""`GET /openapi.json`: the mounted routes, described by the structs of requests and responses.

    routes → their operations in the table → paths, and schemas of their structs

The table is in operations.py, the structs of responses in openai/response_schemas.py. Parameters
that are not implemented are listed by the struct of a request. A test compares table and routes.
"""

import re
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import anyio.to_thread
import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.routing import Route

from server import __version__
from server.core.settings import Settings
from server.http.access import is_open
from server.http.cross_site import SAFE_METHODS
from server.http.json import to_json
from server.http.request import JsonEndpoint
from server.openai import response_schemas as schemas
from server.openapi.operations import (
    EVENTS,
    FORM,
    JSON,
    LINES,
    NDJSON,
    OPERATIONS,
    TEXT,
    Body,
    Operation,
    Schema,
)
from worker.tasks import TASKS, Task

PATH = "/openapi.json"
COMPONENTS = "#/components"


def openapi_route(settings: Settings, others: Sequence[Route]) -> Route:
    """Return a route that serves the document of the other routes and itself."""

    @cache
    def content(root_path: str) -> bytes:
        document = build_document(settings, [*others, route])
        return to_json(document | {"servers": [{"url": root_path or "/"}]})

    async def respond(request: Request) -> bytes:
        return await anyio.to_thread.run_sync(content, request.scope.get("root_path", ""))

    route = Route(PATH, JsonEndpoint(respond), methods=["GET"])
    return route


def build_document(settings: Settings, routes: Sequence[Route]) -> dict[str, Any]:
    mounted = {
        f"{method} {route.path_format}" for route in routes for method in route.methods or ()
    }
    table = {"POST /": pipeline_operation(settings.pipeline_task), **OPERATIONS}
    operations = {key: operation for key, operation in table.items() if key in mounted}
    has_keys = settings.has_keys
    error_kinds = list(dict.fromkeys(operation.error for operation in operations.values()))
    paths: dict[str, dict[str, Any]] = {}
    for key, operation in operations.items():
        method, path = key.split()
        requires_key = has_keys and not is_open(method, path)
        document = _operation_document(method, path, operation, requires_key)
        if not has_keys:
            statuses = {421} if method in SAFE_METHODS else {403, 421}
            _add_errors(document, statuses, operation.error)
        paths.setdefault(path, {})[method.lower()] = document
    errors: dict[str, Any] = {
        f"{kind.__name__}{status}": {"description": meaning, "content": _content(kind)}
        for kind in error_kinds
        for status, meaning in schemas.ERRORS.items()
    }
    for kind in error_kinds:
        for status, name in schemas.ERROR_HEADERS.items():
            headers = {name: {"schema": {"type": "string"}}}
            errors[f"{kind.__name__}{status}"]["headers"] = headers
    components = {"schemas": _schemas(operations.values()), "responses": errors}
    if has_keys:
        components["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
    return {
        "openapi": "3.1.0",
        "info": {"title": "onequeue", "version": __version__},
        "paths": paths,
        "components": components,
    }


def pipeline_operation(name: str) -> Operation:
    """Return the operation `POST /` of a task."""
    task = TASKS[name]
    request: dict[str, Schema] = {JSON: _pipeline_schema(task)}
    if task.kind == "text" and not task.required:
        request[TEXT] = {"type": "string", "minLength": 1}
    elif task.kind != "json" and not task.required:
        request |= {f"{task.kind}/*": {}, "application/octet-stream": {}}
    if task.kind != "json":
        request[FORM] = _pipeline_form(task)
    summary = f"The output of the {name} pipeline for an input, or for each of a list"
    return Operation(summary, {JSON: {}}, request, takes_lines=True)


def _pipeline_schema(task: Task) -> Schema:
    one: Schema = {"type": "string", "minLength": 1}
    if task.kind in ("image", "audio"):
        one["description"] = "base64, or a data: URL"
    elif task.kind == "json":
        one = {"type": "object", "required": list(task.json_keys)}
    checks = {name: {"description": check(object())} for name, check in task.parameters.items()}
    parameters: Schema = {
        "type": "object",
        "properties": checks,
        "additionalProperties": False,
        "required": list(task.required),
    }
    if not task.required:
        parameters = {"anyOf": [parameters, {"type": "null"}]}
    several: Schema = {"type": "array", "items": one, "minItems": 1}
    document: Schema = {
        "type": "object",
        "properties": {
            "inputs": {"anyOf": [one, several]},
            "parameters": parameters,
            "on_error": {
                "enum": ["all", "item"],
                "description": "of a list: item puts an error in place of the result of an input",
            },
        },
        "required": ["inputs", *(["parameters"] if task.required else [])],
    }
    return document if task.required else {"anyOf": [document, several]}


def _pipeline_form(task: Task) -> Schema:
    """Return the schema of a form with a file or a text."""
    fields: Schema = {
        "file": {"type": "string", "format": "binary", "description": "With a file name"},
        "inputs": {"type": "string", "minLength": 1},
        "parameters": {"type": "string", "description": "A JSON object"},
    }
    required = ["parameters"] if task.required else []
    one = [{"required": ["file"]}, {"required": ["inputs"]}]
    return {"type": "object", "properties": fields, "required": required, "oneOf": one}


def _operation_document(
    method: str, path: str, operation: Operation, requires_key: bool
) -> dict[str, Any]:
    content = _content(operation.response)
    alternatives = [_content(struct)[JSON]["schema"] for struct in operation.alternatives]
    if operation.bare:
        alternatives.append({"type": "array", "items": operation.bare})
    if alternatives:
        content[JSON] = {"schema": {"anyOf": [content[JSON]["schema"], *alternatives]}}
    content |= {media: {"schema": {"type": "string"}} for media in operation.others}
    if operation.takes_lines:
        content[NDJSON] = {"schema": {"type": "string", "description": LINES}}
    if operation.stream:
        content[EVENTS] = {"schema": {"description": operation.stream}}
    document: dict[str, Any] = {
        "operationId": re.sub(r"\W+", "_", method.lower() + path).strip("_"),
        "summary": operation.summary,
        "responses": {"200": {"description": "The response", "content": content}},
    }
    parameters: list[Schema] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"\{(\w+)\}", path)
    ]
    if query := operation.query:
        _, components = msgspec.json.schema_components([query])
        for name, schema in components[query.__name__]["properties"].items():
            parameters.append({"name": name, "in": "query", "schema": schema})
    if parameters:
        document["parameters"] = parameters
    errors = {405, 500, *operation.errors}
    if operation.request:
        errors |= schemas.BODY_ERRORS
        if "model" in getattr(operation.request, "__struct_fields__", ()):
            errors.add(404)
        body = _content(operation.request)
        if operation.takes_lines:
            lines = "One input per line: a JSON string, or an object as in a JSON body"
            body[NDJSON] = {"schema": {"type": "string", "description": lines}}
        document["requestBody"] = {"required": True, "content": body}
    if requires_key:
        errors.add(401)
        document["security"] = [{"bearer": []}, {"key": []}]
    _add_errors(document, errors, operation.error)
    return document


def _add_errors(document: dict[str, Any], statuses: set[int], kind: type[Struct]) -> None:
    for status in sorted(statuses):
        reference = f"{COMPONENTS}/responses/{kind.__name__}{status}"
        document["responses"][str(status)] = {"$ref": reference}


def _content(body: type[Struct] | Body) -> dict[str, Any]:
    """Return the content of a body, by media type. A struct is a reference to a component."""
    if isinstance(body, type):
        return {JSON: {"schema": {"$ref": f"{COMPONENTS}/schemas/{body.__name__}"}}}
    return {media: {"schema": schema} for media, schema in body.items()}


def _schemas(operations: Iterable[Operation]) -> dict[str, Any]:
    """Return the schemas of the operations' structs and of those within them, by name."""
    bodies = [
        body
        for operation in operations
        for body in (
            operation.error,
            operation.request,
            operation.response,
            *operation.alternatives,
        )
    ]
    kinds = [body for body in bodies if isinstance(body, type)]
    template = COMPONENTS + "/schemas/{name}"
    _, components = msgspec.json.schema_components(kinds, ref_template=template)
    for kind in kinds:
        for path, accepted in getattr(kind, "unimplemented", {}).items():
            *outer, name = path.split(".")
            schema = components[kind.__name__]
            for field in outer:
                [inner] = re.findall(r"/schemas/(\w+)", str(schema["properties"][field]))
                schema = components[inner]
            schema["properties"][name] = {
                "description": "Not implemented: leave it out",
                "enum": [None, *accepted],
            }
    return dict(sorted(components.items()))
