"""`POST /`: raw text, image or audio bytes, a form with one, or JSON, for the loaded pipeline.

    body → inputs → a work item per input (worker_client.py) → results → JSON

A result is the return value of `pipeline(...)` as JSON; a list of inputs gets a list of results.
The worker's side is worker/pipeline.
"""

from collections.abc import Container
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from batching.errors import InvalidInput
from server.core.settings import Settings
from server.core.worker_client import Submission, WorkerClient
from server.http.access import client_of
from server.http.errors import HttpError
from server.http.form import Form
from server.http.json import INLINE_BYTES, JsonBodyParser, in_thread, parse_json, parse_value
from server.http.request import RequestBody, read_request, send_json
from server.http.upload import boundary_from
from server.openai.decisions.endpoint import DecisionEndpoint
from server.openai.decisions.systemone import SystemOneRequest
from server.openai.request_fields import decode
from worker.media.decode_limiter import RequestLimiter
from worker.messages.decisions import DecisionInput
from worker.messages.protocol import PipelineInput
from worker.tasks import TASKS, check_parameters

JSON = "application/json"
FORM = "application/x-www-form-urlencoded"  # the type that curl -d sends
MULTIPART = "multipart/form-data"  # the type that curl -F sends
CURL_HINT = "with curl, post a file by --data-binary @FILE: -d leaves out its line breaks"


@dataclass(eq=False)
class PipelineEndpoint:
    """An ASGI app for all methods of `/`; `page` serves GET. POST is the server's hot path."""

    settings: Settings
    worker_client: WorkerClient
    page: ASGIApp

    def __post_init__(self) -> None:
        self.task_name = self.settings.pipeline_task
        self.task = TASKS[self.task_name]
        self.body_parser = JsonBodyParser()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != "POST":
            return await self.page(scope, receive, send)
        request_body = await read_request(scope, receive)
        self.check_media(request_body.media)
        await self.respond(scope, receive, send, request_body)

    async def respond(
        self, scope: Scope, receive: Receive, send: Send, request_body: RequestBody
    ) -> None:
        media, body, deadlines = request_body
        if media == MULTIPART:
            parse_form = partial(self.parse_form, boundary=boundary_from(dict(scope["headers"])))
            inputs, is_list = [await in_thread(parse_form, body, deadlines.first, None)], False
        elif len(body) > INLINE_BYTES and (self.task.kind == "text" or may_be_json(body, media)):
            parse = partial(self.parse, media=media)
            inputs, is_list = await self.body_parser.run(parse, body, deadlines.first)
        else:  # raw bytes need no parsing
            inputs, is_list = self.parse(body, media)
        results: list[bytes] = []
        try:
            work: Submission[bytes] = Submission(
                self.worker_client,
                "pipeline",
                inputs,
                deadlines,
                receive,
                client=client_of(scope),
            )
            with work:
                for item in work.items:
                    results.append(await item.future)  # noqa: PERF401  # its length is the failed index
        except InvalidInput as error:
            if is_list and error.param and error.param.startswith("inputs"):
                error.param = f"inputs[{len(results)}]" + error.param.removeprefix("inputs")
            if media == FORM and isinstance(inputs[0].inputs, bytes):
                raise InvalidInput(f"{error}; {CURL_HINT}", error.param) from error
            raise
        if not is_list or (self.task.unwraps_single and len(results) == 1):
            content = results[0]
        else:
            content = b"[" + b",".join(results) + b"]"
        await send_json(send, content, headers=work.timing_headers())

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
            accepted = f"{kind}/…, application/octet-stream, {MULTIPART} or {JSON}"
        message = f"Content-Type of {self.task_name} must be {accepted}, not {media[:100]!r}"
        raise HttpError(415, message)

    def parse(self, body: bytes, media: str) -> tuple[list[PipelineInput], bool]:
        """Return the inputs of a request, and whether it has a list of them."""
        if not body:
            message = f"the body is empty: post raw {self.task.kind}, or JSON"
            raise InvalidInput(message, "inputs")
        document = self.parse_document(body, media) if may_be_json(body, media) else None
        if document is None:
            return [self.parse_raw(body, {})], False
        if isinstance(document, list):
            document = {"inputs": document}
        if not isinstance(document, dict):
            raise InvalidInput("the body must be a JSON object with inputs, or a list of inputs")
        if "inputs" not in document:
            raise InvalidInput.at("inputs", "is required")
        self.check_keys(document)
        parameters = document.get("parameters")
        if parameters is None:
            parameters = {}
        if not isinstance(parameters, dict):
            kind = type(parameters).__name__
            raise InvalidInput.at("parameters", f"must be an object, not {kind}")
        check_parameters(self.task_name, parameters)
        inputs, max_inputs = document["inputs"], self.settings.max_queue_size
        if isinstance(inputs, list) and not 0 < len(inputs) <= max_inputs:
            accepted = f"a list must have 1 to {max_inputs} entries, not {len(inputs)}"
            raise InvalidInput.at("inputs", accepted)
        if not isinstance(inputs, list) or is_conversation(inputs):
            return [PipelineInput(inputs, parameters)], False
        limiter = RequestLimiter()
        return [PipelineInput(item, parameters, limiter) for item in inputs], True

    def check_keys(self, keys: Container[str]) -> None:
        """Raise InvalidInput for a parameter beside `inputs`. Other keys are ignored: clients of
        Hugging Face send some."""
        for name in self.task.parameters:
            if name in keys:
                put = f'put it under "parameters": {{"{name}": …}}'
                reason = f"is a parameter of {self.task_name}; {put}"
                raise InvalidInput.at(name, reason)

    def parse_document(self, body: bytes, media: str) -> Any:
        """Return the JSON value, or None if the body is a raw text that starts with a brace."""
        may_be_text = media == FORM and self.task.kind == "text"
        try:
            document = parse_value(body)
        except InvalidInput:
            if may_be_text:
                return None
            raise
        return None if may_be_text and "inputs" not in document else document

    def parse_form(self, body: bytes, boundary: bytes) -> PipelineInput:
        """Return the input of a form. Writes its file to disk: runs in a pool thread."""
        form = Form(boundary, len(body))
        try:
            form.feed(body)
            form.finish()
            self.check_keys(form.fields)
            texts, parameters = form.fields.get("inputs", []), form.fields.get("parameters", ["{}"])
            if len(texts) + form.has_file != 1:
                one = "must have one input: a file (-F file=@PATH) or a text (-F inputs=TEXT)"
                raise InvalidInput(f"the form {one}", "inputs")
            try:
                [given] = map(parse_json, map(str.encode, parameters))
            except (InvalidInput, ValueError):
                reason = f"must be one JSON object, not {', '.join(parameters)[:100]!r}"
                raise InvalidInput.at("parameters", reason) from None
            if form.has_file:
                return self.parse_raw(Path(form.path).read_bytes(), given)
            check_parameters(self.task_name, given)
            return PipelineInput(texts[0], given)
        finally:
            form.remove()

    def parse_raw(self, body: bytes, parameters: dict[str, Any]) -> PipelineInput:
        task = self.task
        if task.kind == "json":
            keys = ", ".join(f'"{key}": …' for key in task.json_keys)
            example = f'{{"inputs": {{{keys}}}}}'
            raise InvalidInput(f"{self.task_name} takes JSON: {example}", "inputs")
        check_parameters(self.task_name, parameters)
        if task.kind != "text":
            return PipelineInput(body, parameters)
        try:
            return PipelineInput(body.decode(), parameters)
        except UnicodeDecodeError as error:
            message = f"{self.task_name} takes text; byte {error.start} is not valid UTF-8"
            raise InvalidInput(message, "inputs") from None


@dataclass(eq=False)
class DecisionPipelineEndpoint(PipelineEndpoint):
    """`POST /` with the task decision, by a language model."""

    decisions: DecisionEndpoint

    async def respond(
        self, scope: Scope, receive: Receive, send: Send, request_body: RequestBody
    ) -> None:
        media, body, deadlines = request_body
        parse = partial(self.parse_requests, media=media)
        requests, is_list = await self.body_parser.run(parse, body, deadlines.first, blocks=True)
        answers = []
        for request, payload in requests:
            results = await self.decisions.decide(scope, receive, deadlines, request, payload)
            answers.append(request.response(*results).answers)
        await send_json(send, answers if is_list else answers[0])

    def parse_requests(
        self, body: bytes, media: str
    ) -> tuple[list[tuple[SystemOneRequest, DecisionInput]], bool]:
        """Return the requests, and whether the body has a list of them. Runs in a pool thread."""
        inputs, is_list = self.parse(body, media)
        paths = [f"inputs[{n}]" if is_list else "inputs" for n in range(len(inputs))]
        return list(map(self._request, paths, inputs)), is_list

    def _request(self, path: str, payload: PipelineInput) -> tuple[SystemOneRequest, DecisionInput]:
        if not isinstance(payload.inputs, dict) or "model" in payload.inputs:
            message = f"{self.task_name} takes an object with state and questions, without model"
            raise InvalidInput(message, path)
        try:
            request = decode(payload.inputs, SystemOneRequest, self.decisions.model.id_for)
            return request, request.decision_input()
        except InvalidInput as error:
            error.param = f"{path}.{error.param}" if error.param else path
            raise


def may_be_json(body: bytes, media: str) -> bool:
    """Return whether a body is JSON, by its media type, or by its first character: `curl -d '{…}'`
    sends JSON as a form."""
    return media == JSON or (media == FORM and body[:64].lstrip().startswith(b"{"))


def is_conversation(inputs: list[Any]) -> bool:
    """Return whether a list is one input, the messages of a chat."""
    return all(isinstance(item, dict) and {"role", "content"} <= set(item) for item in inputs)
