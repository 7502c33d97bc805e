"""What the OpenAPI document says of each endpoint: an entry for each method of a path."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from msgspec import Struct

from server import openapi_answers as answers
from server.openai import chat_request, completion_request
from server.openai.chat_request import ChatRequest
from server.openai.completion_request import CompletionRequest
from server.openai.detokenize import DetokenizeRequest
from server.openai.load_model import LoadRequest
from server.openai.responses import request
from server.openai.responses.request import ResponseRequest
from server.openai.tokenize import TokenizeRequest
from worker.tasks import TASKS, Task

JSON, EVENTS, TEXT = "application/json", "text/event-stream", "text/plain"

Schema = dict[str, Any]
Body = Mapping[str, type[Struct] | Schema]  # by media type

STREAM: Schema = {"description": "With stream: true. Each event is a chunk, the last is [DONE]."}
RESPONSE_STREAM: Schema = {"description": "With stream: true. The last event holds the response."}
ITEMS_QUERY: Mapping[str, Schema] = {
    "order": {"enum": ["asc", "desc"], "default": "desc"},
    "limit": {"type": "integer", "minimum": 1, "maximum": 100, "default": 20},
    "after": {"type": "string", "description": "The id of an item"},
}
POSTED = (400, 408, 413, 415, 503, 504)  # what may become of a body


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of a path. `errors` are its statuses beyond 401, 405 and 500.

    `unimplemented` are fields of a JSON request that are refused but for null and these values.
    """

    method: str
    path: str
    summary: str
    request: Body
    answer: Body
    errors: tuple[int, ...] = ()
    unimplemented: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    query: Mapping[str, Schema] = field(default_factory=dict)


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
    Operation(
        "POST",
        "/v1/responses",
        "A model's response to items or a text, stored unless store is false",
        {JSON: ResponseRequest},
        {JSON: answers.Response, EVENTS: RESPONSE_STREAM},
        (*POSTED, 404),
        request.UNIMPLEMENTED,
    ),
    Operation("GET", "/v1/responses/{id}", "A response", {}, {JSON: answers.Response}, (400, 404)),
    Operation(
        "DELETE", "/v1/responses/{id}", "Forget a response", {}, {JSON: answers.Deleted}, (404,)
    ),
    Operation(
        "GET",
        "/v1/responses/{id}/input_items",
        "What a response was given, newest first",
        {},
        {JSON: answers.ItemList},
        (400, 404),
        query=ITEMS_QUERY,
    ),
    Operation(
        "POST",
        "/v1/responses/{id}/cancel",
        "End a response that runs in the background",
        {},
        {JSON: answers.Response},
        (400, 404),
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
        {EVENTS: {"description": "One event, a JSON object."}},
        (*POSTED, 404),
    ),
    Operation("GET", "/health", "Is the process worth keeping", {}, {JSON: answers.Health}, (503,)),
    Operation("GET", "/ready", "Should it get traffic", {}, {JSON: answers.Ready}, (503,)),
    Operation("GET", "/metrics", "For Prometheus", {}, {TEXT: {"type": "string"}}),
    Operation("GET", "/openapi.json", "This document", {}, {JSON: {"type": "object"}}),
)


def root(name: str) -> Operation:
    """What `POST /` takes depends on the task."""
    task = TASKS[name]
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
        "properties": {
            name: {"description": check.words} for name, check in task.parameters.items()
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
