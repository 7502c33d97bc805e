"""`GET /openapi.json`: what is mounted, described by the types that requests are read into.

routes → their operations in the table → paths, and schemas of the structs they name

What answers look like is in openapi_answers.py; what of a request is not implemented, its struct
says itself. A path that is mounted and not in the table, or not as it is there, fails a test.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.routing import Route

from server import __version__
from server import openapi_answers as answers
from server.health import Health, Ready
from server.http.json import JsonEndpoint, to_json
from server.middleware import OPEN_PATHS
from server.openai.chat import ChatRequest
from server.openai.completions import CompletionRequest
from server.openai.models import LoadRequest
from server.openai.responses.request import ResponseRequest
from server.openai.tokenize import DetokenizeRequest, TokenizeRequest
from server.settings import Settings
from worker.tasks import TASKS, Task

PATH = "/openapi.json"
JSON, EVENTS, TEXT = "application/json", "text/event-stream", "text/plain"
COMPONENTS = "#/components"

Schema = dict[str, Any]
Body = Mapping[str, type[Struct] | Schema]  # by media type

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
OF_A_BODY = (400, 408, 413, 415, 503, 504)  # what may become of one


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of a path. `errors` are its statuses beyond 401, 405 and 500."""

    summary: str
    answer: Body
    errors: Sequence[int] = ()
    request: Body = field(default_factory=dict)
    query: Mapping[str, Schema] = field(default_factory=dict)


def read(summary: str, answer: type[Struct], *errors: int, **query: Schema) -> Operation:
    return Operation(summary, {JSON: answer}, errors, query=query)


def ask(summary: str, request: type[Struct], answer: Body) -> Operation:
    """A request in JSON that names a model."""
    return Operation(summary, answer, (*OF_A_BODY, 404), {JSON: request})


def events(description: str) -> Body:
    return {EVENTS: {"description": description}}


CHUNKS = events("With stream: true. Each event is a chunk, the last is [DONE].")
TOLD = events("With stream: true. The last event holds the response.")

OPERATIONS: Mapping[str, Operation] = {
    "POST /v1/chat/completions": ask(
        "The next message of a conversation", ChatRequest, {JSON: answers.ChatCompletion, **CHUNKS}
    ),
    "POST /v1/completions": ask(
        "What follows a text or token ids", CompletionRequest, {JSON: answers.Completion, **CHUNKS}
    ),
    "POST /v1/responses": ask(
        "A model's response to items or a text, stored unless store is false",
        ResponseRequest,
        {JSON: answers.Response, **TOLD},
    ),
    "GET /v1/responses/{id}": read("A response", answers.Response, 400, 404),
    "DELETE /v1/responses/{id}": read("Forget a response", answers.Deleted, 404),
    "GET /v1/responses/{id}/input_items": read(
        "What a response was given, newest first",
        answers.ItemList,
        *(400, 404),
        order={"enum": ["asc", "desc"], "default": "desc"},
        limit={"type": "integer", "minimum": 1, "maximum": 100, "default": 20},
        after={"type": "string", "description": "The id of an item"},
    ),
    "POST /v1/responses/{id}/cancel": read(
        "End a response that runs in the background", answers.Response, 400, 404
    ),
    "GET /v1/models": read("The language model", answers.ModelList, 503),
    "GET /v1/models/{id}": read("A model by its name", answers.Model, 404, 503),
    "POST /tokenize": ask(
        "The token ids of a text or a conversation", TokenizeRequest, {JSON: answers.Tokens}
    ),
    "POST /detokenize": ask("The text of token ids", DetokenizeRequest, {JSON: answers.Prompt}),
    "POST /load_model": ask(
        "An event that says that the model is ready",
        LoadRequest,
        events("One event, a JSON object."),
    ),
    "GET /health": read("Is the process worth keeping", Health, 503),
    "GET /ready": read("Should it get traffic", Ready, 503),
    "GET /metrics": Operation("For Prometheus", {TEXT: {"type": "string"}}),
    "GET /openapi.json": Operation("This document", {JSON: {"type": "object"}}),
}


def route(settings: Settings, task: str, others: Sequence[Route]) -> Route:
    """Serves the document of the other routes and itself."""

    async def answer(request: Request) -> bytes:
        return content

    made = Route(PATH, JsonEndpoint(answer), methods=["GET"])
    content = to_json(document(settings, task, [*others, made]))
    return made


def document(settings: Settings, task: str, routes: Sequence[Route]) -> dict[str, Any]:
    mounted = {f"{method} {each.path_format}" for each in routes for method in each.methods or ()}
    table = {"POST /": pipeline(task), **OPERATIONS}
    operations = {key: each for key, each in table.items() if key in mounted}
    keyed = bool(settings.api_keys)
    paths: dict[str, dict[str, Any]] = {}
    for key, each in operations.items():
        method, path = key.split()
        described = _described(method, path, each, keyed and path not in OPEN_PATHS)
        paths.setdefault(path, {})[method.lower()] = described
    components = {"schemas": _schemas(operations.values()), "responses": _errors()}
    if keyed:
        components["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
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
    return Operation(summary, {JSON: {}}, OF_A_BODY, request)


def _inputs(task: Task) -> Schema:
    one: Schema = {"type": "string", "minLength": 1}
    if task.kind in ("image", "audio"):
        one["description"] = "base64, or a data: URL"
    elif task.kind == "json":
        one = {"type": "object", "required": list(task.json_keys)}
    # A check says what a value must be when it is given one that nothing takes.
    checks = {name: {"description": check(...)} for name, check in task.parameters.items()}
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
    made: dict[str, Any] = {
        "operationId": re.sub(r"\W+", "_", method.lower() + path).strip("_"),
        "summary": operation.summary,
        "responses": {"200": {"description": "The answer", "content": _content(operation.answer)}},
    }
    for status in sorted({405, 500, *operation.errors, *([401] if keyed else [])}):
        made["responses"][str(status)] = {"$ref": f"{COMPONENTS}/responses/Error{status}"}
    if operation.request:
        made["requestBody"] = {"required": True, "content": _content(operation.request)}
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"\{(\w+)\}", path)
    ]
    for name, schema in operation.query.items():
        parameters.append({"name": name, "in": "query", "schema": schema})
    if parameters:
        made["parameters"] = parameters
    if keyed:
        made["security"] = [{"bearer": []}]
    return made


def _content(body: Body) -> dict[str, Any]:
    """Structs are named, and found among the components by that."""
    return {
        media: {"schema": kind if isinstance(kind, dict) else _reference(kind.__name__)}
        for media, kind in body.items()
    }


def _reference(name: str) -> Schema:
    return {"$ref": f"{COMPONENTS}/schemas/{name}"}


def _schemas(operations: Iterable[Operation]) -> dict[str, Any]:
    """Of the operations' structs and those within, by name."""
    kinds: list[type[Struct]] = [answers.Error]
    for each in operations:
        bodies = (*each.request.values(), *each.answer.values())
        kinds += [kind for kind in bodies if not isinstance(kind, dict)]
    template = COMPONENTS + "/schemas/{name}"
    _, schemas = msgspec.json.schema_components(kinds, ref_template=template)
    for kind in kinds:
        for path, harmless in getattr(kind, "unimplemented", {}).items():
            *outer, name = path.split(".")
            schema = schemas[kind.__name__]
            for each in outer:
                [inner] = re.findall(r"/schemas/(\w+)", str(schema["properties"][each]))
                schema = schemas[inner]
            schema["properties"][name] = {
                "description": "Not implemented: leave it out",
                "enum": [None, *harmless],
            }
    return dict(sorted(schemas.items()))


def _errors() -> dict[str, Any]:
    made: dict[str, Any] = {}
    for status, meaning in ERRORS.items():
        made[f"Error{status}"] = {
            "description": meaning,
            "content": _content({JSON: answers.Error}),
        }
        if name := ERROR_HEADERS.get(status):
            made[f"Error{status}"]["headers"] = {name: {"schema": {"type": "string"}}}
    return made
