"""`GET /openapi.json`: what is mounted, described by the types that requests are read into.

routes → their operations in the table → paths, and schemas of the structs they name

The table is in operations.py, what answers look like in response_schemas.py; what of a
request is not implemented, its struct says itself. A path that is mounted and not in the table, or
not as it is there, fails a test.
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
from server.http.json import to_json
from server.http.request import JsonEndpoint
from server.openai import response_schemas as schemas
from server.openapi.operations import EVENTS, JSON, OPERATIONS, TEXT, Body, Operation, Schema
from worker.tasks import TASKS, Task

PATH = "/openapi.json"
COMPONENTS = "#/components"


def openapi_route(settings: Settings, others: Sequence[Route]) -> Route:
    """Serves the document of the other routes and itself, made when it is first asked for."""

    @cache
    def content() -> bytes:
        return to_json(build_document(settings, [*others, made]))

    async def answer(request: Request) -> bytes:
        return await anyio.to_thread.run_sync(content)

    made = Route(PATH, JsonEndpoint(answer), methods=["GET"])
    return made


def build_document(settings: Settings, routes: Sequence[Route]) -> dict[str, Any]:
    mounted = {f"{method} {each.path_format}" for each in routes for method in each.methods or ()}
    table = {"POST /": pipeline(settings.pipeline_task), **OPERATIONS}
    operations = {key: each for key, each in table.items() if key in mounted}
    keyed = bool(settings.api_keys)
    paths: dict[str, dict[str, Any]] = {}
    for key, each in operations.items():
        method, path = key.split()
        described = _described(method, path, each, keyed and not is_open(method, path))
        paths.setdefault(path, {})[method.lower()] = described
    errors: dict[str, Any] = {
        f"Error{status}": {"description": meaning, "content": _content(schemas.Error)}
        for status, meaning in schemas.ERRORS.items()
    }
    for status, name in schemas.ERROR_HEADERS.items():
        errors[f"Error{status}"]["headers"] = {name: {"schema": {"type": "string"}}}
    components = {"schemas": _schemas(operations.values()), "responses": errors}
    if keyed:
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


def pipeline(name: str) -> Operation:
    """What `POST /` takes depends on the task."""
    task = TASKS[name]
    request: dict[str, Schema] = {JSON: _inputs(task)}
    if task.kind == "text" and not task.required:
        request[TEXT] = {"type": "string", "minLength": 1}
    elif task.kind != "json" and not task.required:
        request |= {f"{task.kind}/*": {}, "application/octet-stream": {}}
    summary = f"{name}: what the pipeline returns for an input, or for each of a list"
    return Operation(summary, {JSON: {}}, request)


def _inputs(task: Task) -> Schema:
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
    inputs = {"anyOf": [one, {"type": "array", "items": one, "minItems": 1}]}
    return {
        "type": "object",
        "properties": {"inputs": inputs, "parameters": parameters},
        "required": ["inputs", *(["parameters"] if task.required else [])],
    }


def _described(method: str, path: str, operation: Operation, keyed: bool) -> dict[str, Any]:
    content = _content(operation.answer)
    if operation.bare:
        bare = {"type": "array", "items": operation.bare}
        content[JSON] = {"schema": {"anyOf": [content[JSON]["schema"], bare]}}
    content |= {media: {"schema": {"type": "string"}} for media in operation.others}
    if operation.stream:
        content[EVENTS] = {"schema": {"description": operation.stream}}
    made: dict[str, Any] = {
        "operationId": re.sub(r"\W+", "_", method.lower() + path).strip("_"),
        "summary": operation.summary,
        "responses": {"200": {"description": "The answer", "content": content}},
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
        made["parameters"] = parameters
    errors = {405, 500, *operation.errors}
    if operation.request:
        errors |= schemas.OF_A_BODY
        if "model" in getattr(operation.request, "__struct_fields__", ()):
            errors.add(404)
        made["requestBody"] = {"required": True, "content": _content(operation.request)}
    if keyed:
        errors.add(401)
        made["security"] = [{"bearer": []}, {"key": []}]
    for status in sorted(errors):
        made["responses"][str(status)] = {"$ref": f"{COMPONENTS}/responses/Error{status}"}
    return made


def _content(body: type[Struct] | Body) -> dict[str, Any]:
    """Structs are named, and found among the components by that."""
    if isinstance(body, type):
        return {JSON: {"schema": {"$ref": f"{COMPONENTS}/schemas/{body.__name__}"}}}
    return {media: {"schema": schema} for media, schema in body.items()}


def _schemas(operations: Iterable[Operation]) -> dict[str, Any]:
    """Of the operations' structs and those within, by name."""
    bodies = [
        schemas.Error,
        *(body for each in operations for body in (each.request, each.answer)),
    ]
    kinds = [body for body in bodies if isinstance(body, type)]
    template = COMPONENTS + "/schemas/{name}"
    _, components = msgspec.json.schema_components(kinds, ref_template=template)
    for kind in kinds:
        for path, harmless in getattr(kind, "unimplemented", {}).items():
            *outer, name = path.split(".")
            schema = components[kind.__name__]
            for each in outer:
                [inner] = re.findall(r"/schemas/(\w+)", str(schema["properties"][each]))
                schema = components[inner]
            schema["properties"][name] = {
                "description": "Not implemented: leave it out",
                "enum": [None, *harmless],
            }
    return dict(sorted(components.items()))
