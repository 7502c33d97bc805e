"""`GET /openapi.json`: what is mounted, described by the types that requests are read into."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import orjson
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from server import __version__, chat_request, completion_request
from server import openapi_answers as answers
from server.chat_request import ChatRequest
from server.completion_request import CompletionRequest
from server.detokenize import DetokenizeRequest
from server.front import OPEN_PATHS
from server.load_model import LoadRequest
from server.settings import Settings
from server.tokenize import TokenizeRequest
from worker.tasks import TASKS, Task

PATH = "/openapi.json"
JSON, EVENTS, TEXT = "application/json", "text/event-stream", "text/plain"
_REFERENCE = "#/components/schemas/{name}"

Schema = dict[str, Any]
Body = Mapping[str, type[Struct] | Schema]  # by media type

ERRORS = {
    400: "What was sent is malformed or out of range; `param` names the field",
    401: "A valid API key is needed",
    404: "There is no such model",
    405: "The path takes other methods",
    408: "The body stopped arriving",
    413: "The body is too large",
    415: "The body's media type cannot be served",
    500: "The model failed on this input, or the server made a mistake",
    503: "Too busy, loading, failing or stopping: try again later",
    504: "The time limit has passed; the header X-Request-Timeout-Ms shortens it",
}
ERROR_HEADERS = {401: "WWW-Authenticate", 405: "Allow", 503: "Retry-After"}
POSTED = (400, 408, 413, 415, 503, 504)

STREAM: Schema = {"description": "With stream: true. Each event is a chunk, the last is [DONE]."}


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of a path. 401, 405 and 500 need not be listed in `errors`.

    `unimplemented` are fields of the request that are refused but for null and these values.
    """

    method: str
    path: str
    summary: str
    request: Body
    answer: Body
    errors: tuple[int, ...] = ()
    unimplemented: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)


OPERATIONS = (
    Operation(
        "POST",
        "/v1/chat/completions",
        "The next message of a conversation",
        {JSON: ChatRequest},
        {JSON: answers.ChatCompletion, EVENTS: STREAM},
        (*POSTED, 404),
        chat_request.UNIMPLEMENTED,
    ),
    Operation(
        "POST",
        "/v1/completions",
        "What follows a text or token ids",
        {JSON: CompletionRequest},
        {JSON: answers.Completion, EVENTS: STREAM},
        (*POSTED, 404),
        completion_request.UNIMPLEMENTED,
    ),
    Operation("GET", "/v1/models", "The language model", {}, {JSON: answers.ModelList}, (503,)),
    Operation(
        "GET", "/v1/models/{id}", "A model by its name", {}, {JSON: answers.Model}, (404, 503)
    ),
    Operation(
        "POST",
        "/tokenize",
        "The token ids of a text or a conversation",
        {JSON: TokenizeRequest},
        {JSON: answers.Tokens},
        (*POSTED, 404),
    ),
    Operation(
        "POST",
        "/detokenize",
        "The text of token ids",
        {JSON: DetokenizeRequest},
        {JSON: answers.Prompt},
        (*POSTED, 404),
    ),
    Operation(
        "POST",
        "/load_model",
        "An event that says that the model is ready",
        {JSON: LoadRequest},
        {EVENTS: {"description": "One event, a JSON object"}},
        (*POSTED, 404),
    ),
    Operation("GET", "/health", "Is the process worth keeping", {}, {JSON: answers.Health}, (503,)),
    Operation("GET", "/ready", "Should it get traffic", {}, {JSON: answers.Ready}, (503,)),
    Operation("GET", "/metrics", "For Prometheus", {}, {TEXT: {"type": "string"}}),
    Operation("GET", PATH, "This document", {}, {JSON: {"type": "object"}}),
)


def route(settings: Settings, task: str, others: Sequence[Route]) -> Route:
    """Serves the document of the other routes and itself."""

    async def answer(request: Request) -> Response:
        return Response(content, media_type=JSON)

    made = Route(PATH, answer)
    content = orjson.dumps(document(settings, task, [*others, made]))
    return made


def document(settings: Settings, task: str, routes: Sequence[Route]) -> dict[str, Any]:
    mounted = {(method, each.path_format) for each in routes for method in each.methods or ()}
    operations = [
        each
        for each in (_root(task, TASKS[task]), *OPERATIONS)
        if (each.method, each.path) in mounted
    ]
    keyed = bool(settings.api_keys)
    paths: dict[str, dict[str, Any]] = {}
    for each in operations:
        described = _described(each, keyed and each.path not in OPEN_PATHS)
        paths.setdefault(each.path, {})[each.method.lower()] = described
    components: dict[str, Any] = {"schemas": _schemas(operations), "responses": _errors()}
    made = {
        "openapi": "3.1.0",
        "info": {"title": "onequeue", "version": __version__},
        "paths": paths,
        "components": components,
    }
    if keyed:
        components["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
    return made


def _described(operation: Operation, keyed: bool) -> dict[str, Any]:
    statuses = sorted({405, 500, *operation.errors} | ({401} if keyed else set()))
    responses: dict[str, Any] = {
        "200": {"description": "The answer", "content": _content(operation.answer)}
    }
    for status in statuses:
        responses[str(status)] = {"$ref": f"#/components/responses/Error{status}"}
    name = re.sub(r"\W+", "_", operation.method.lower() + operation.path).strip("_")
    made: dict[str, Any] = {
        "operationId": name,
        "summary": operation.summary,
        "responses": responses,
    }
    if operation.request:
        made["requestBody"] = {"required": True, "content": _content(operation.request)}
    if names := re.findall(r"\{(\w+)\}", operation.path):
        made["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in names
        ]
    if keyed:
        made["security"] = [{"bearer": []}]
    return made


def _content(body: Body) -> dict[str, Any]:
    return {
        media: {"schema": kind if isinstance(kind, dict) else _reference(kind)}
        for media, kind in body.items()
    }


def _reference(kind: type[Struct]) -> Schema:
    return {"$ref": _REFERENCE.format(name=kind.__name__)}


def _schemas(operations: Sequence[Operation]) -> dict[str, Any]:
    bodies = [body for each in operations for body in (each.request, each.answer)]
    kinds = {kind for body in bodies for kind in body.values() if not isinstance(kind, dict)}
    _, made = msgspec.json.schema_components({*kinds, answers.Error}, ref_template=_REFERENCE)
    for operation in operations:
        for name, harmless in operation.unimplemented.items():
            kind = operation.request[JSON]
            assert not isinstance(kind, dict)
            made[kind.__name__]["properties"][name] = {
                "description": "Not implemented: leave it out",
                "enum": [None, *harmless],
            }
    return dict(sorted(made.items()))


def _errors() -> dict[str, Any]:
    made: dict[str, Any] = {}
    content = _content({JSON: answers.Error})
    for status, meaning in ERRORS.items():
        made[f"Error{status}"] = {"description": meaning, "content": content}
        if name := ERROR_HEADERS.get(status):
            made[f"Error{status}"]["headers"] = {name: {"schema": {"type": "string"}}}
    return made


def _root(name: str, task: Task) -> Operation:
    """What `POST /` takes depends on the task."""
    request: dict[str, Schema] = {JSON: _inputs(task)}
    if task.kind == "text" and not task.required:
        request[TEXT] = {"type": "string", "minLength": 1}
    elif task.kind != "json" and not task.required:
        request |= {f"{task.kind}/*": {}, "application/octet-stream": {}}
    summary = f"{name}: what the pipeline returns for an input, or for each of a list"
    return Operation("POST", "/", summary, request, {JSON: {}}, POSTED)


def _inputs(task: Task) -> Schema:
    one: Schema = {"type": "string", "minLength": 1}
    if task.kind in ("image", "audio"):
        one["description"] = "base64, or a data: URL"
    elif task.kind == "json":
        one = {"type": "object", "required": list(task.json_keys)}
    parameters: Schema = {
        "type": "object",
        # a check says what a value must be when it is given one that nothing takes
        "properties": {
            name: {"description": check(...)} for name, check in task.parameters.items()
        },
        "additionalProperties": False,
        "required": list(task.required),
    }
    if not task.required:
        parameters = {"anyOf": [parameters, {"type": "null"}]}
    return {
        "type": "object",
        "properties": {
            "inputs": {"anyOf": [one, {"type": "array", "items": one, "minItems": 1}]},
            "parameters": parameters,
        },
        "required": ["inputs", *(["parameters"] if task.required else [])],
    }
