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
from server.http.json import to_json
from server.http.request import JsonEndpoint, is_open
from server.openai.audio.endpoint import PATHS as AUDIO_PATHS
from server.openai.audio.request import TranscriptionRequest, TranslationRequest, form_schema
from server.openai.chat import ChatRequest
from server.openai.completions import CompletionRequest
from server.openai.decisions.request import DecisionRequest
from server.openai.decisions.systemone import SystemOneRequest
from server.openai.embeddings import PATHS as EMBEDDING_PATHS
from server.openai.embeddings import EmbeddingRequest
from server.openai.models import LoadRequest, Model, ModelList
from server.openai.responses.request import ResponseRequest
from server.openai.tokenize import DetokenizeRequest, Prompt, TokenizeRequest, Tokens
from server.rerank import PATHS as RERANK_PATHS
from server.rerank import RerankRequest
from server.score import ScoreRequest
from server.settings import Settings
from server.version import ICON_TYPE, Version
from worker.tasks import TASKS, Task

PATH = "/openapi.json"
JSON, EVENTS, TEXT = "application/json", "text/event-stream", "text/plain"
HTML = "text/html"
COMPONENTS = "#/components"

Schema = dict[str, Any]
Body = Mapping[str, Schema]  # by media type


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of a path. A struct alone is a body in JSON; `stream` tells of the events that a
    request may ask for instead, `bare` of what is in the list that it may, `others` are media types
    of texts. `errors` are the
    statuses beyond 401, 405, 500 and what may become of a request's body."""

    summary: str
    answer: type[Struct] | Body
    request: type[Struct] | Body | None = None
    errors: Sequence[int] = ()
    stream: str | None = None
    query: Mapping[str, Schema] = field(default_factory=dict)
    bare: Schema | None = None
    others: Sequence[str] = ()


AUDIO = [f"POST {path}" for path in AUDIO_PATHS]
FORM, SUBTITLES = "multipart/form-data", (TEXT, "application/x-subrip", "text/vtt")
HEARD = "With stream: true. Deltas of the text, then the whole; the last is [DONE]."
CHUNKS = "With stream: true. Each event is a chunk, the last is [DONE]."
RESPONSE_EVENTS = "With stream: true. The last event holds the response."

OPERATIONS: Mapping[str, Operation] = {
    "POST /v1/chat/completions": Operation(
        "The next message of a conversation", answers.ChatCompletion, ChatRequest, [404], CHUNKS
    ),
    "POST /v1/completions": Operation(
        "What follows a text or token ids", answers.Completion, CompletionRequest, [404], CHUNKS
    ),
    "POST /v1/responses": Operation(
        "A model's response to items or a text, stored unless store is false",
        answers.Response,
        ResponseRequest,
        [404],
        RESPONSE_EVENTS,
    ),
    "GET /v1/responses/{id}": Operation("A response", answers.Response, errors=[400, 404]),
    "DELETE /v1/responses/{id}": Operation("Forget a response", answers.Deleted, errors=[404]),
    "GET /v1/responses/{id}/input_items": Operation(
        "What a response was given, newest first",
        answers.ItemList,
        errors=[400, 404],
        query={
            "order": {"enum": ["asc", "desc"], "default": "desc"},
            "limit": {"type": "integer", "minimum": 1, "maximum": 100, "default": 20},
            "after": {"type": "string", "description": "The id of an item"},
        },
    ),
    "POST /v1/responses/{id}/cancel": Operation(
        "End a response that runs in the background", answers.Response, errors=[400, 404]
    ),
    "POST /v1/decisions": Operation(
        "How likely the answers to questions about an input are",
        answers.Decision,
        DecisionRequest,
        [404],
    ),
    "POST /v1/systemone": Operation(
        "The same, of named questions about a state", answers.SystemOne, SystemOneRequest, [404]
    ),
    **dict.fromkeys(
        (f"POST {path}" for path in EMBEDDING_PATHS),
        Operation(
            "The vectors of texts or token ids; of `inputs` as a bare list",
            answers.Embeddings,
            EmbeddingRequest,
            [404],
            bare={"type": "array", "items": {"type": "number"}},
        ),
    ),
    **dict.fromkeys(
        (f"POST {path}" for path in RERANK_PATHS),
        Operation(
            "Documents by relevance to a query; `texts` as a bare list",
            answers.Reranked,
            RerankRequest,
            [404],
            bare={"type": "object", "required": ["index", "score"]},
        ),
    ),
    "POST /v1/score": Operation("How well texts go together", answers.Scores, ScoreRequest, [404]),
    AUDIO[0]: Operation(
        "What a recording says",
        answers.Transcription,
        {FORM: form_schema(TranscriptionRequest)},
        [404],
        HEARD,
        others=SUBTITLES,
    ),
    AUDIO[1]: Operation(
        "What a recording says, in English",
        answers.Transcription,
        {FORM: form_schema(TranslationRequest)},
        [404],
        others=SUBTITLES,
    ),
    "GET /v1/models": Operation("The models", ModelList, errors=[503]),
    "GET /v1/models/{id}": Operation("A model by its name", Model, errors=[404, 503]),
    "POST /tokenize": Operation(
        "The token ids of a text or a conversation", Tokens, TokenizeRequest, [404]
    ),
    "POST /detokenize": Operation("The text of token ids", Prompt, DetokenizeRequest, [404]),
    "POST /load_model": Operation(
        "An event that says that the model is ready",
        {EVENTS: {"description": "One event, a JSON object."}},
        LoadRequest,
        [404],
    ),
    "GET /health": Operation("Is the process worth keeping", Health, errors=[503]),
    "GET /ready": Operation("Should it get traffic", Ready, errors=[503]),
    "GET /ping": Operation("The same as /ready", Ready, errors=[503]),
    "GET /version": Operation("Which server this is", Version),
    "GET /favicon.ico": Operation("Its icon", {ICON_TYPE: {}}),
    "GET /metrics": Operation("For Prometheus", {TEXT: {"type": "string"}}),
    "GET /": Operation(
        "A page for browsers; lines of curl for others",
        {HTML: {"type": "string"}, TEXT: {"type": "string"}},
    ),
    "GET /assets/{name}": Operation("A file of the page", {"*/*": {}}, errors=[404]),
    "GET /openapi.json": Operation("This document", {JSON: {"type": "object"}}),
}


def route(settings: Settings, others: Sequence[Route]) -> Route:
    """Serves the document of the other routes and itself."""

    async def answer(request: Request) -> bytes:
        return content

    made = Route(PATH, JsonEndpoint(answer), methods=["GET"])
    content = to_json(document(settings, [*others, made]))
    return made


def document(settings: Settings, routes: Sequence[Route]) -> dict[str, Any]:
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
        f"Error{status}": {"description": meaning, "content": _content(answers.Error)}
        for status, meaning in answers.ERRORS.items()
    }
    for status, name in answers.ERROR_HEADERS.items():
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
    for name, schema in operation.query.items():
        parameters.append({"name": name, "in": "query", "schema": schema})
    if parameters:
        made["parameters"] = parameters
    errors = {405, 500, *operation.errors}
    if operation.request:
        errors |= answers.OF_A_BODY
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
    bodies = [answers.Error, *(body for each in operations for body in (each.request, each.answer))]
    kinds = [body for body in bodies if isinstance(body, type)]
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
