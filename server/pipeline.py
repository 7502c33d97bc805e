"""`POST /`: raw text, image or sound bytes, or JSON, to whatever pipeline is loaded.

    body → inputs, a work item each → their answers, or the deadline, or the client leaves

The answer is what `pipeline(...)` returns for that input; those of a list are answered together.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from batching.errors import InvalidInput
from server.core.settings import Settings
from server.core.worker_client import Submission, WorkerClient
from server.http.errors import HttpError
from server.http.json import INLINE_BYTES, Document, JsonBodyParser, parse_json
from server.http.request import RequestBody, read_request, send_json
from server.openai.decisions.endpoint import DecisionEndpoint
from server.openai.decisions.systemone import SystemOneRequest
from server.openai.request_fields import decode
from worker.media.decode_limiter import RequestLimiter
from worker.messages.decisions import DecisionInput
from worker.messages.protocol import PipelineInput
from worker.tasks import TASKS, check_parameters

JSON = "application/json"
FORM = "application/x-www-form-urlencoded"  # what curl -d sends, whatever it is
CURL = "with curl, post a file by --data-binary @FILE: -d leaves out its line breaks"


@dataclass(eq=False)
class PipelineEndpoint:
    """All methods of `/`, as a bare ASGI app: `page` answers GET. This is the hot path."""

    settings: Settings
    worker_client: WorkerClient
    page: ASGIApp

    def __post_init__(self) -> None:
        self.task_name = self.settings.pipeline_task
        self.task = TASKS[self.task_name]
        self.parsing = JsonBodyParser()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != "POST":
            return await self.page(scope, receive, send)
        posted = await read_request(scope, receive)
        self.check_media(posted.media)
        await self.answer(scope, receive, send, posted)

    async def answer(self, scope: Scope, receive: Receive, send: Send, posted: RequestBody) -> None:
        media, body, deadlines = posted
        if len(body) > INLINE_BYTES and (self.task.kind == "text" or may_be_json(body, media)):
            parse = partial(self.parse, media=media)
            inputs, is_list = await self.parsing.run(parse, body, deadlines.first)
        else:  # bytes stay as they are
            inputs, is_list = self.parse(body, media)
        answers: list[bytes] = []
        try:
            with Submission(self.worker_client, "pipeline", inputs, deadlines, receive) as work:
                for item in work.items:
                    answers.append(await item.future)  # noqa: PERF401  # its length says which failed
        except InvalidInput as error:
            if is_list and error.param and error.param.startswith("inputs"):
                error.param = f"inputs[{len(answers)}]" + error.param.removeprefix("inputs")
            if media == FORM and isinstance(inputs[0].inputs, bytes):
                raise InvalidInput(f"{error}; {CURL}", error.param) from error
            raise
        if not is_list or (self.task.unwraps_single and len(answers) == 1):
            content = answers[0]
        else:
            content = b"[" + b",".join(answers) + b"]"
        await send_json(send, content, headers=work.timing_headers())

    def check_media(self, media: str) -> None:
        """415 for a content type that the task does not take. curl's form type counts as raw."""
        kind, takes = self.task.kind, JSON
        if media in ("", JSON, FORM):
            return
        if kind != "json":
            if media == "application/octet-stream" or media.startswith(kind + "/"):
                return
            if kind == "audio" and media == "video/webm":
                return
            takes = f"{kind}/…, raw bytes or {JSON}"
        raise HttpError(415, f"{self.task_name} takes {takes}, not {media[:100]!r}")

    def parse(self, body: bytes, media: str) -> tuple[list[PipelineInput], bool]:
        """The inputs of a request, and whether they came as a list."""
        if not body:
            empty = f"the body is empty: post the {self.task.kind} itself, or JSON"
            raise InvalidInput(empty, "inputs")
        document = self.parse_object(body, media) if may_be_json(body, media) else None
        if document is None:
            return [self.parse_raw(body)], False
        if "inputs" not in document:
            raise InvalidInput('the object needs a field "inputs"', "inputs")
        parameters = document.get("parameters")
        if parameters is None:
            parameters = {}
        if not isinstance(parameters, dict):
            raise InvalidInput("must be an object", "parameters")
        check_parameters(self.task_name, parameters)
        inputs, most = document["inputs"], self.settings.max_queue_size
        if isinstance(inputs, list) and not 0 < len(inputs) <= most:
            raise InvalidInput(f"a list takes 1 to {most} inputs, not {len(inputs)}", "inputs")
        if not isinstance(inputs, list) or is_conversation(inputs):
            return [PipelineInput(inputs, parameters)], False
        budget = RequestLimiter()
        return [PipelineInput(each, parameters, budget) for each in inputs], True

    def parse_object(self, body: bytes, media: str) -> Document | None:
        """None for a text that only looks like one."""
        doubtful = media == FORM and self.task.kind == "text"
        try:
            document = parse_json(body)
        except InvalidInput:
            if doubtful:
                return None
            raise
        return None if doubtful and "inputs" not in document else document

    def parse_raw(self, body: bytes) -> PipelineInput:
        task = self.task
        if task.kind == "json":
            keys = ", ".join(f'"{key}": …' for key in task.json_keys)
            example = f'{{"inputs": {{{keys}}}}}'
            raise InvalidInput(f"{self.task_name} takes application/json: {example}", "inputs")
        if task.required:
            check_parameters(self.task_name, {})
        if task.kind != "text":
            return PipelineInput(body)
        try:
            return PipelineInput(body.decode())
        except UnicodeDecodeError as error:
            wrong = f"{self.task_name} takes text; this is not valid UTF-8 at byte {error.start}"
            raise InvalidInput(wrong, "inputs") from None


@dataclass(eq=False)
class DecisionPipelineEndpoint(PipelineEndpoint):
    decisions: DecisionEndpoint

    async def answer(self, scope: Scope, receive: Receive, send: Send, posted: RequestBody) -> None:
        media, body, deadlines = posted
        read = partial(self.read, media=media)
        asked, is_list = await self.parsing.run(read, body, deadlines.first, blocks=True)
        answers = []
        for request, payload in asked:
            deltas, usage = await self.decisions.ask(scope, receive, deadlines, request, payload)
            document = request.document([each.probabilities for each in deltas], usage)
            answers.append(document["answers"])
        await send_json(send, answers if is_list else answers[0])

    def read(
        self, body: bytes, media: str
    ) -> tuple[list[tuple[SystemOneRequest, DecisionInput]], bool]:
        """In a pool thread."""
        inputs, is_list = self.parse(body, media)
        paths = [f"inputs[{n}]" if is_list else "inputs" for n in range(len(inputs))]
        return [self._request(*each) for each in zip(paths, inputs, strict=True)], is_list

    def _request(self, path: str, given: Any) -> tuple[SystemOneRequest, DecisionInput]:
        if not isinstance(given.inputs, dict) or "model" in given.inputs:
            raise InvalidInput(f"{self.task_name} takes an object of state and questions", path)
        try:
            request = decode(given.inputs, SystemOneRequest, self.decisions.models.called)
            return request, request.decision_input()
        except InvalidInput as error:
            error.param = f"{path}.{error.param}" if error.param else path
            raise


def may_be_json(body: bytes, media: str) -> bool:
    """By its media type, or by how it begins: `curl -d '{…}'` sends JSON as a form."""
    return media == JSON or (media == FORM and body[:64].lstrip().startswith(b"{"))


def is_conversation(inputs: list[Any]) -> bool:
    """A list of messages is one input, not several."""
    return all(isinstance(each, dict) and {"role", "content"} <= set(each) for each in inputs)
