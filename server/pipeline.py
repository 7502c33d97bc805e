"""`POST /`: raw text, image or sound bytes, or JSON, to whatever pipeline is loaded.

The answer is what `pipeline(...)` returns for that input. A list of inputs makes a work item
of each; they are answered together.
"""

import time
from functools import partial
from typing import Any

from starlette.types import Receive, Scope, Send

from batching.errors import InvalidInput
from batching.request_queue import WorkItem
from server.engine import Engine
from server.http.body import Headers, Parsing, abort_on_disconnect, parse_json, read_request
from server.http.errors import HttpError
from server.http.json import send_json
from server.settings import Settings
from worker.decode_budget import RequestBudget
from worker.protocol import PipelineInput
from worker.tasks import TASKS, Task, check_parameters

JSON = "application/json"
FORM = "application/x-www-form-urlencoded"  # what curl says of anything
CURL = "with curl, post a file by --data-binary @FILE: -d leaves out its line breaks"


class Root:
    """The endpoint, as a bare ASGI app: this is the hot path."""

    def __init__(self, settings: Settings, engine: Engine, task_name: str) -> None:
        self.settings = settings
        self.engine = engine
        self.task_name = task_name
        self.parsing = Parsing()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers, body, deadlines = await read_request(scope, receive, self.settings, self.engine)
        deadline, task = deadlines.first, TASKS[self.task_name]
        media = media_type(headers)
        if wrong := wrong_media(media, task):
            raise HttpError(415, f"{self.task_name} {wrong}, not {media[:100]!r}")
        if task.kind == "text" or may_be_json(body, media):
            parse = partial(self.parse, media=media)
            inputs, many = await self.parsing.run(parse, body, deadline)
        else:  # bytes stay as they are
            inputs, many = self.parse(body, media)
        try:
            answers, items = await run(receive, self.engine, inputs, deadline, many)
        except InvalidInput as error:
            if media == FORM and isinstance(inputs[0].inputs, bytes):
                raise InvalidInput(f"{error}; {CURL}", error.param) from error
            raise
        if many and not (task.unwraps_single and len(answers) == 1):
            content = b"[" + b",".join(answers) + b"]"
        else:
            content = answers[0]
        await send_json(send, content, headers=timing_headers(items))

    def parse(self, body: bytes, media: str) -> tuple[list[PipelineInput], bool]:
        """The inputs of a request, and whether they came as a list."""
        name, task = self.task_name, TASKS[self.task_name]
        if not body:
            raise InvalidInput(f"the body is empty: post the {task.kind} itself, or JSON", "inputs")
        document = parse_object(body, media, task) if may_be_json(body, media) else None
        if document is None:
            return [parse_raw(body, name, task)], False
        if "inputs" not in document:
            raise InvalidInput('the object needs a field "inputs"', "inputs")
        parameters = document.get("parameters")
        if parameters is None:
            parameters = {}
        if not isinstance(parameters, dict):
            raise InvalidInput("must be an object", "parameters")
        check_parameters(name, parameters)
        inputs = document["inputs"]
        if not isinstance(inputs, list):
            return [PipelineInput(inputs, parameters)], False
        most = self.settings.max_queue_size
        if not 0 < len(inputs) <= most:
            raise InvalidInput(f"a list takes 1 to {most} inputs, not {len(inputs)}", "inputs")
        if is_chat(inputs):
            return [PipelineInput(inputs, parameters)], False
        budget = RequestBudget()
        return [PipelineInput(each, parameters, budget) for each in inputs], True


def media_type(headers: Headers) -> str:
    return headers.get(b"content-type", b"").partition(b";")[0].strip().lower().decode("latin-1")


def wrong_media(media: str, task: Task) -> str | None:
    """What the task takes, if it is not this content type. curl's form type counts as raw."""
    if media in ("", JSON, FORM):
        return None
    if task.kind == "json":
        return "takes application/json"
    main = "text" if task.kind == "text" else task.kind
    if media == "application/octet-stream" or media.startswith(main + "/"):
        return None
    if task.kind == "audio" and media == "video/webm":
        return None
    return f"takes {main}/…, raw bytes or application/json"


def may_be_json(body: bytes, media: str) -> bool:
    """`curl -d '{…}'` does not say so."""
    return media == JSON or (media == FORM and body[:64].lstrip().startswith(b"{"))


def parse_object(body: bytes, media: str, task: Task) -> dict[str, Any] | None:
    """None for a text that only looks like one."""
    doubtful = media == FORM and task.kind == "text"
    try:
        document = parse_json(body)
    except InvalidInput:
        if doubtful:
            return None
        raise
    return None if doubtful and "inputs" not in document else document


def parse_raw(body: bytes, name: str, task: Task) -> PipelineInput:
    if task.kind == "json":
        keys = ", ".join(f'"{key}": …' for key in task.json_keys)
        raise InvalidInput(f'{name} takes application/json: {{"inputs": {{{keys}}}}}', "inputs")
    if task.required:
        check_parameters(name, {})  # which says how to send them
    return PipelineInput(decode_text(body) if task.kind == "text" else body)


def is_chat(inputs: list[Any]) -> bool:
    """A list of messages is one conversation, not several inputs."""
    return bool(inputs) and all(
        isinstance(m, dict) and {"role", "content"} <= set(m) for m in inputs
    )


def decode_text(body: bytes) -> str:
    try:
        return body.decode()
    except UnicodeDecodeError as error:
        raise InvalidInput(f"the text is not valid UTF-8 at byte {error.start}", "inputs") from None


async def run(
    receive: Receive, engine: Engine, inputs: list[PipelineInput], deadline: float, many: bool
) -> tuple[list[bytes], list[WorkItem]]:
    """Queue the inputs and wait for their answers, the deadline or the client's leaving."""
    items = engine.submit("pipeline", inputs, deadline)
    timer = engine.loop.call_later(deadline - time.monotonic(), engine.expire, items)
    engine.loop.create_task(abort_on_disconnect(receive, items))  # its receive() keeps hold of it
    answers: list[bytes] = []
    try:
        for item in items:
            answers.append(await item.future)  # noqa: PERF401  # its length says which has failed
        return answers, items
    except InvalidInput as error:
        if many and error.param and error.param.startswith("inputs"):
            error.param = f"inputs[{len(answers)}]" + error.param.removeprefix("inputs")
        raise
    finally:
        timer.cancel()
        engine.queue.forget(items)


def timing_headers(items: list[WorkItem]) -> list[tuple[bytes, bytes]]:
    """Where the time went, in milliseconds; of several items, the one that took longest."""
    item = items[0] if len(items) == 1 else max(items, key=lambda item: item.finished_at)
    timing = b"queue;dur=%.2f, batch;dur=%.2f, model;dur=%.2f" % (
        (item.arrived_at - item.accepted_at) * 1e3,
        (item.started_at - item.arrived_at) * 1e3,
        (item.finished_at - item.started_at) * 1e3,
    )
    return [(b"server-timing", timing), (b"x-batch-size", b"%d" % item.batch_size)]
