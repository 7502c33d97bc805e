"""`POST /`: raw text, image or audio bytes, a form with one, or JSON, for the loaded pipeline.

    body → inputs → a work item per input (worker_client.py) → results → JSON

A result is the return value of `pipeline(...)` as JSON; a list of inputs gets a list of results.
Each line of an NDJSON body is a request (ndjson.py). The worker's side is worker/engines/pipeline.
"""

from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol
from urllib.parse import parse_qsl

import msgspec
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from batching.errors import InvalidInput, ItemFailed
from server.apis.openai.endpoint import BodyEndpoint
from server.apis.openai.models import NamedModel
from server.core.settings import Settings
from server.core.worker_client import IncomingRequest, Submission, WorkerClient
from server.http.errors import HttpError
from server.http.form import Form
from server.http.ignored_fields import ignore_fields
from server.http.json import (
    INLINE_BYTES,
    Document,
    JsonBodyParser,
    in_thread,
    parse_json,
    parse_value,
    to_json,
)
from server.http.ndjson import LineEndpoint, LineStream, check_joined_lines
from server.http.operation import FORM as MULTIPART
from server.http.operation import JSON, TEXT, Operation, Schema
from server.http.request import count_failure, is_ndjson, read_request, send_json
from server.http.upload import boundary_from
from worker.media.decode_limiter import RequestLimiter
from worker.messages.protocol import PipelineInput
from worker.tasks import TASKS, Task, check_parameters

FORM = "application/x-www-form-urlencoded"  # the type that curl -d sends
CURL_HINT = "with curl, post a file by --data-binary @FILE: -d leaves out its line breaks"
BODY_FIELDS = "inputs", "parameters", "on_error", "model"
MAX_QUERY_NAMES = 64


class PipelineRequest(NamedTuple):
    inputs: list[PipelineInput]
    is_list: bool = False
    keeps_errors: bool = False  # the error of an input takes the place of its result


def pipeline_operation(name: str) -> Operation:
    task = TASKS[name]
    request: dict[str, Schema] = {JSON: _pipeline_schema(task)}
    if task.kind == "text" and not task.required:
        request[TEXT] = {"type": "string", "minLength": 1}
    elif task.kind != "json" and not task.required:
        request |= {f"{task.kind}/*": {}, "application/octet-stream": {}}
    if task.kind != "json":
        request[MULTIPART] = _pipeline_form(task)
    summary = f"The output of the {name} pipeline for an input, or for each of a list"
    query = msgspec.defstruct("Query", [(name, Any, msgspec.UNSET) for name in task.parameters])
    return Operation("POST /", summary, {JSON: {}}, request, query=query, takes_lines=True)


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


class ModelEndpoint(LineEndpoint[Any], Protocol):
    parser: "PipelineInputParser"

    async def respond(self, incoming: IncomingRequest, send: Send, body: bytes, media: str) -> None:
        """Send the response to a whole body that is no NDJSON."""


class NamedBody(msgspec.Struct):
    model: object = None


@dataclass(eq=False)
class PipelineModels(BodyEndpoint[tuple[ModelEndpoint, bytes]]):
    """An ASGI app for `POST /`: the endpoint of the model that `?model=` or the header X-Model
    names responds; without a name, the first. The body of a batch's line names its model."""

    endpoints: Mapping[NamedModel, ModelEndpoint]

    def __post_init__(self) -> None:
        self.first = next(iter(self.endpoints.values()))

    def find(self, name: object) -> ModelEndpoint:
        return self.first if name is None else self.endpoints[self.models.find(str(name))]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        query = read_query(scope["query_string"]) if scope["query_string"] else {}
        name = query.pop("model", None)
        endpoint = self.find(Headers(scope=scope).get("x-model", name))
        endpoint.parser.check_query(query, scope)
        if is_ndjson(scope):
            return await LineStream(scope, receive, send, endpoint).run()
        media, body, incoming = await read_request(scope, receive)
        await endpoint.respond(incoming, send, body, media)

    def parse(self, body: bytes, scope: Scope) -> tuple[ModelEndpoint, bytes]:
        if len(self.endpoints) == 1:
            return self.first, body
        return self.find(msgspec.json.decode(body, type=NamedBody).model), body

    async def serve(
        self, incoming: IncomingRequest, send: Send, request: tuple[ModelEndpoint, bytes]
    ) -> None:
        endpoint, body = request
        await endpoint.respond(incoming, send, body, JSON)


def read_query(query: bytes) -> dict[str, str]:
    """Return the values of a query by name. Raises InvalidInput for too many names, one that occurs
    twice, and text that is not UTF-8."""
    limits: Any = {"keep_blank_values": True, "max_num_fields": MAX_QUERY_NAMES, "errors": "strict"}
    try:
        pairs = parse_qsl(query.decode(), **limits)
    except ValueError:
        reason = f"the query must have at most {MAX_QUERY_NAMES} names, and be UTF-8"
        raise InvalidInput(reason) from None
    values = dict(pairs)
    if len(values) < len(pairs):
        raise InvalidInput("the query has a name twice")
    return values


def _json_or_text(text: str) -> Any:
    try:
        return parse_value(text.encode())
    except InvalidInput:
        return text


@dataclass(eq=False)
class PipelineInputParser:
    """Parses bodies of `POST /` into a pipeline's inputs. `names`: what requests may name the
    model, if they choose one of several."""

    settings: Settings
    names: Container[str | None] | None = None

    def __post_init__(self) -> None:
        self.task_name = self.settings.pipeline_task
        self.task = TASKS[self.task_name]

    def check_media(self, media: str) -> None:
        """Raise HttpError (415) for a content type that the task does not take. A form's content
        type, curl's default, counts as raw."""
        kind, accepted = self.task.kind, JSON
        if media in ("", JSON, FORM):
            return
        if kind != "json":
            if media in (MULTIPART, "application/octet-stream") or media.startswith(kind + "/"):
                return
            if kind == "audio" and media == "video/webm":
                return
            accepted = f"{kind}/…, application/octet-stream, {MULTIPART}, {JSON}"
        accepted += " or application/x-ndjson"
        message = f"Content-Type of {self.task_name} must be {accepted}, not {media[:100]!r}"
        raise HttpError(415, message)

    def check_query(self, query: Mapping[str, str], scope: Scope) -> None:
        """Check the parameters in the query, once for all lines of a body: each value is JSON, or a
        text if it is not. Raises InvalidInput."""
        if query:
            scope["parameters"] = {name: _json_or_text(text) for name, text in query.items()}
            check_parameters(self.task_name, scope["parameters"], self.task.required)

    def parameters_of(self, own: object, scope: Scope) -> dict[str, Any]:
        """Return the parameters of an input: those of the query, and its own, which take
        precedence. Raises InvalidInput."""
        own = {} if own is None else own
        if not isinstance(own, dict):
            kind = type(own).__name__
            raise InvalidInput.at("parameters", f"must be an object, not {kind}")
        defaults: dict[str, Any] = scope.get("parameters", {})
        check_parameters(self.task_name, own, defaults)
        return {**defaults, **own}

    def parse(self, body: bytes, media: str, scope: Scope) -> PipelineRequest:
        """Return a request's inputs. Raises InvalidInput."""
        if not body:
            message = f"the body is empty: post raw {self.task.kind}, or JSON"
            raise InvalidInput(message, "inputs")
        document = self.parse_document(body, media) if may_be_json(body, media) else None
        if document is None:
            if media == FORM:
                check_joined_lines(body)
            return PipelineRequest([self.parse_raw(body, None, scope)])
        if isinstance(document, list):
            document = {"inputs": document}
        if not isinstance(document, dict):
            raise InvalidInput("the body must be a JSON object with inputs, or a list of inputs")
        return self.read_document(document, scope)

    def read_document(self, document: Document, scope: Scope) -> PipelineRequest:
        """Return the inputs of a JSON object. Raises InvalidInput, also for the name of another
        model: the body is read after the choice."""
        name = document.get("model")
        if self.names is not None and name is not None and str(name) not in self.names:
            chosen = "must be the model that ?model= or the header X-Model names"
            raise InvalidInput.at("model", f"{chosen}, not {str(name)[:50]!r}")
        if "inputs" not in document:
            raise InvalidInput.at("inputs", "is required")
        self.check_keys(document)
        given = (name for name, value in document.items() if value is not None)
        if ignored := [name for name in given if name not in BODY_FIELDS]:
            ignore_fields(ignored, scope)
        parameters = self.parameters_of(document.get("parameters"), scope)
        on_error = document.get("on_error", "all")
        if on_error not in ("all", "item"):
            reason = f"must be 'all' or 'item', not {str(on_error)[:50]!r}"
            raise InvalidInput.at("on_error", reason)
        inputs, max_inputs = document["inputs"], self.settings.max_queue_size
        if isinstance(inputs, list) and not 0 < len(inputs) <= max_inputs:
            accepted = f"a list must have 1 to {max_inputs} entries, not {len(inputs)}"
            raise InvalidInput.at("inputs", accepted)
        if not isinstance(inputs, list) or is_conversation(inputs):
            return PipelineRequest([PipelineInput(inputs, parameters)])
        limiter = RequestLimiter()
        items = [PipelineInput(item, parameters, limiter) for item in inputs]
        return PipelineRequest(items, is_list=True, keeps_errors=on_error == "item")

    def read_line(self, value: str | Document, scope: Scope) -> PipelineRequest:
        return self.read_document({"inputs": value} if isinstance(value, str) else value, scope)

    def check_keys(self, keys: Container[str]) -> None:
        """Raise InvalidInput for a parameter beside `inputs`."""
        for name in self.task.parameters:
            if name in keys:
                put = f'put it under "parameters": {{"{name}": …}}'
                reason = f"is a parameter of {self.task_name}; {put}"
                raise InvalidInput.at(name, reason)

    def parse_document(self, body: bytes, media: str) -> Any:
        """Return the JSON value, or None if the body is a raw text that begins as JSON does. A form
        is JSON if it has inputs, or texts only: these are hardly meant as one text."""
        may_be_text = media == FORM and self.task.kind == "text"
        try:
            document = parse_value(body)
        except InvalidInput:
            if may_be_text:
                return None
            check_joined_lines(body)
            raise
        if may_be_text and not (isinstance(document, dict) and "inputs" in document):
            texts = document.values() if isinstance(document, dict) else document
            if not (texts and all(isinstance(value, str) for value in texts)):
                return None
        if document is None:
            raise InvalidInput("the body must be a JSON object with inputs, or a list of inputs")
        return document

    def parse_form(self, body: bytes, boundary: bytes, scope: Scope) -> PipelineInput:
        """Return the input of a form. Writes its file to disk: runs in a pool thread."""
        form = Form(boundary, len(body))
        try:
            form.feed(body)
            form.finish()
            self.check_keys(form.fields)
            ignore_fields((name for name in form.fields if name not in BODY_FIELDS), scope)
            texts, parameters = form.fields.get("inputs", []), form.fields.get("parameters", ["{}"])
            if len(texts) + form.has_file != 1:
                one = "must have one input: a file (-F file=@PATH) or a text (-F inputs=TEXT)"
                raise InvalidInput(f"the form {one}", "inputs")
            try:
                [values] = map(parse_json, map(str.encode, parameters))
            except (InvalidInput, ValueError):
                reason = f"must be one JSON object, not {', '.join(parameters)[:100]!r}"
                raise InvalidInput.at("parameters", reason) from None
            if form.has_file:
                return self.parse_raw(Path(form.path).read_bytes(), values, scope)
            return PipelineInput(texts[0], self.parameters_of(values, scope))
        finally:
            form.remove()

    def parse_raw(self, body: bytes, own: object, scope: Scope) -> PipelineInput:
        task = self.task
        if task.kind == "json":
            keys = ", ".join(f'"{key}": …' for key in task.json_keys)
            example = f'{{"inputs": {{{keys}}}}}'
            raise InvalidInput(f"{self.task_name} takes JSON: {example}", "inputs")
        parameters = self.parameters_of(own, scope)
        if task.kind != "text":
            return PipelineInput(body, parameters)
        try:
            return PipelineInput(body.decode(), parameters)
        except UnicodeDecodeError as error:
            message = f"{self.task_name} takes text; byte {error.start} is not valid UTF-8"
            raise InvalidInput(message, "inputs") from None


@dataclass(eq=False)
class PipelineEndpoint:
    """`POST /` of one model, the server's hot path. `model`: its name in the registry."""

    parser: PipelineInputParser
    worker_client: WorkerClient
    model: str
    body_parser: JsonBodyParser = field(init=False, default_factory=JsonBodyParser)

    async def respond(self, incoming: IncomingRequest, send: Send, body: bytes, media: str) -> None:
        parser, scope, deadline = self.parser, incoming.scope, incoming.deadlines.first
        parser.check_media(media)
        if media == MULTIPART:
            boundary = boundary_from(dict(scope["headers"]))
            parse_form = partial(parser.parse_form, boundary=boundary, scope=scope)
            payload = await in_thread(parse_form, body, deadline, None)
            request = PipelineRequest([payload])
        elif len(body) > INLINE_BYTES and (parser.task.kind == "text" or may_be_json(body, media)):
            parse = partial(parser.parse, media=media, scope=scope)
            request = await self.body_parser.run(parse, body, deadline)
        else:  # raw bytes need no parsing
            request = parser.parse(body, media, scope)
        try:
            with self.submit(incoming, request) as work:
                content = await self.content(scope, request, work)
        except InvalidInput as error:
            if media == FORM and isinstance(request.inputs[0].inputs, bytes):
                raise InvalidInput(f"{error}; {CURL_HINT}", error.param) from error
            raise
        await send_json(send, content, headers=work.timing_headers())

    def submit(self, incoming: IncomingRequest, request: PipelineRequest) -> Submission[bytes]:
        return Submission(self.worker_client, self.model, request.inputs, incoming)

    async def content(
        self, scope: Scope, request: PipelineRequest, work: Submission[bytes]
    ) -> bytes:
        """Return the results as JSON. Raises the error of an input, unless it takes its place."""
        results: list[bytes] = []
        for n, item in enumerate(work.items):
            try:
                results.append(await item.future)
            except (InvalidInput, ItemFailed) as error:
                if isinstance(error, InvalidInput) and request.is_list:
                    locate_in_list(error, n)
                if not request.keeps_errors:
                    raise
                results.append(to_json(count_failure(error, scope).document))
        task, first = self.parser.task, request.inputs[0]
        if request.is_list:
            is_bare = task.unwraps_single and len(results) == 1
        else:  # the response to a text is a list of one, unless `top_k` makes it one
            wraps = task.wraps_string and isinstance(first.inputs, str)
            is_bare = not wraps or "top_k" in first.parameters
        return results[0] if is_bare else b"[" + b",".join(results) + b"]"

    # ── LineEndpoint of ndjson.py ──

    parse_blocks: ClassVar[bool] = False

    def parse_line(self, value: str | Document, scope: Scope) -> PipelineRequest:
        return self.parser.read_line(value, scope)


def locate_in_list(error: InvalidInput, n: int) -> None:
    """Add an input's index in a list to the path that its error has, also in the message."""
    param, message = error.param, str(error)
    if param and param.startswith("inputs"):
        error.param = f"inputs[{n}]" + param.removeprefix("inputs")
        if message.startswith(f"{param}: "):
            error.args = (error.param + message.removeprefix(param),)


def may_be_json(body: bytes, media: str) -> bool:
    """Return whether a body is JSON, by its type or start: `curl -d '{…}'` sends it as a form."""
    return media == JSON or (media == FORM and body[:64].lstrip().startswith((b"{", b"[")))


def is_conversation(inputs: list[Any]) -> bool:
    """Return whether a list is one input, the messages of a chat."""
    return all(isinstance(item, dict) and {"role", "content"} <= set(item) for item in inputs)
