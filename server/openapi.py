"""`GET /openapi.json`: what is mounted, described by the types that requests are read into.

routes → operations (openapi_operations.py) → paths, and schemas of the structs they name
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import orjson
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from server import __version__
from server.middleware import OPEN_PATHS
from server.openapi_answers import Error
from server.openapi_operations import JSON, OPERATIONS, Body, Operation, Schema, root
from server.settings import Settings

PATH = "/openapi.json"
_SCHEMA = "#/components/schemas/{name}"

ERRORS = {
    400: "What was sent is malformed or out of range; `param` names the field",
    401: "A valid API key is needed",
    404: "It is not here",
    405: "The path takes other methods",
    408: "The body stopped arriving",
    413: "The body is too large",
    415: "The body's media type cannot be served",
    500: "The model failed on this input, or the server made a mistake",
    503: "Too busy, loading, failing or stopping: try again later",
    504: "The time limit has passed; the header X-Request-Timeout-Ms shortens it",
}
ERROR_HEADERS = {401: "WWW-Authenticate", 405: "Allow", 503: "Retry-After"}

References = Mapping[type[Struct], Schema]


def route(settings: Settings, task: str, others: Sequence[Route]) -> Route:
    """Serves the document of the other routes and itself."""

    async def answer(request: Request) -> Response:
        return Response(content, media_type=JSON)

    made = Route(PATH, answer)
    content = orjson.dumps(document(settings, task, [*others, made]))
    return made


def document(settings: Settings, task: str, routes: Sequence[Route]) -> dict[str, Any]:
    mounted = {(method, each.path_format) for each in routes for method in each.methods or ()}
    operations = [each for each in (root(task), *OPERATIONS) if (each.method, each.path) in mounted]
    keyed = bool(settings.api_keys)
    references, schemas = _schemas(operations)
    paths: dict[str, dict[str, Any]] = {}
    for each in operations:
        described = _described(each, references, keyed and each.path not in OPEN_PATHS)
        paths.setdefault(each.path, {})[each.method.lower()] = described
    components = {"schemas": schemas, "responses": _errors(references)}
    if keyed:
        components["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "onequeue", "version": __version__},
        "paths": paths,
        "components": components,
    }


def _schemas(operations: Sequence[Operation]) -> tuple[References, dict[str, Any]]:
    """References to the operations' structs, and the schemas they lead to, by name."""
    bodies = [body for each in operations for body in (each.request, each.answer)]
    kinds: list[type[Struct]] = [Error]
    for body in bodies:
        kinds += [kind for kind in body.values() if not isinstance(kind, dict)]
    kinds = list(dict.fromkeys(kinds))
    made, schemas = msgspec.json.schema_components(kinds, ref_template=_SCHEMA)
    references = dict(zip(kinds, made, strict=True))
    for each in operations:
        for name, harmless in each.unimplemented.items():
            if "." in name:
                continue  # a field of a field
            reference = _content(each.request, references)[JSON]["schema"]["$ref"]
            schemas[reference.rpartition("/")[2]]["properties"][name] = {
                "description": "Not implemented: leave it out",
                "enum": [None, *harmless],
            }
    return references, dict(sorted(schemas.items()))


def _described(operation: Operation, references: References, keyed: bool) -> dict[str, Any]:
    content = _content(operation.answer, references)
    responses: dict[str, Any] = {"200": {"description": "The answer", "content": content}}
    for status in sorted({405, 500, *operation.errors, *([401] if keyed else [])}):
        responses[str(status)] = {"$ref": f"#/components/responses/Error{status}"}
    name = re.sub(r"\W+", "_", operation.method.lower() + operation.path).strip("_")
    made: dict[str, Any] = {"operationId": name, "summary": operation.summary}
    made["responses"] = responses
    if operation.request:
        content = _content(operation.request, references)
        made["requestBody"] = {"required": True, "content": content}
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"\{(\w+)\}", operation.path)
    ]
    for name, schema in operation.query.items():
        parameters.append({"name": name, "in": "query", "schema": schema})
    if parameters:
        made["parameters"] = parameters
    if keyed:
        made["security"] = [{"bearer": []}]
    return made


def _content(body: Body, references: References) -> dict[str, Any]:
    return {
        media: {"schema": kind if isinstance(kind, dict) else references[kind]}
        for media, kind in body.items()
    }


def _errors(references: References) -> dict[str, Any]:
    content = _content({JSON: Error}, references)
    made: dict[str, Any] = {}
    for status, meaning in ERRORS.items():
        made[f"Error{status}"] = {"description": meaning, "content": content}
        if name := ERROR_HEADERS.get(status):
            made[f"Error{status}"]["headers"] = {name: {"schema": {"type": "string"}}}
    return made
