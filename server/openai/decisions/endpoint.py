"""`POST /v1/decisions` and `POST /v1/systemone`: questions about one input, and how likely their
answers are.

    body → request → DecisionInput → submit → a delta for each question → probabilities → document

Nothing is generated and nothing streamed: an answer comes whole, within one time limit. `POST /`
with the task `decision` takes the inputs of transformers' pipeline, and runs each as /v1/systemone
would: by the chat model if it is the same, which is loaded once then.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import anyio.to_thread
from starlette.types import Receive, Scope, Send

from batching.errors import InvalidInput
from server.answer_stream import TokenStream, Usage
from server.cache_root import cache_root
from server.engine import Deadlines, Engine
from server.http.json import INLINE_BYTES, Document, Parsing, parse_json, to_json
from server.http.request import Posted, read_json_request, send_json
from server.openai.decisions.systemone import SystemOneRequest
from server.openai.models import ModelNames
from server.openai.params import Body, decode
from server.pipeline import Root
from server.settings import Settings
from worker.architectures import decides_in_its_own_way
from worker.decisions import MOST_QUESTIONS, DecisionInput
from worker.deltas import Delta


class DecisionBody(Body, Protocol):
    cache_salt: str | None

    def decision_input(self) -> DecisionInput: ...

    def document(self, probabilities: Sequence[Sequence[float]], usage: Usage) -> Document: ...


@dataclass(eq=False)
class DecisionEndpoint:
    """A bare ASGI app."""

    engine: Engine
    models: ModelNames
    kind: type[DecisionBody]
    parsing: Parsing = field(init=False, default_factory=Parsing)

    def parse(self, body: bytes) -> tuple[DecisionBody, DecisionInput]:
        """In a pool thread: 400 questions take milliseconds."""
        most = max(MOST_QUESTIONS, self.models.loaded.max_model_len)
        request = decode(parse_json(body), self.kind, self.models.called, most)
        return request, request.decision_input()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, deadlines = await read_json_request(scope, receive)
        request, payload = await self.parsing.run(self.parse, body, deadlines.first, blocks=True)
        deltas, usage = await self.ask(scope, receive, deadlines, request, payload)

        def write() -> bytes:
            return to_json(request.document([each.probabilities for each in deltas], usage))

        large = len(body) > INLINE_BYTES  # so is the answer
        await send_json(send, await anyio.to_thread.run_sync(write) if large else write())

    async def ask(
        self,
        scope: Scope,
        receive: Receive,
        deadlines: Deadlines,
        request: DecisionBody,
        payload: DecisionInput,
    ) -> tuple[list[Delta], Usage]:
        root = cache_root(self.models.id, scope["api_key"], request.cache_salt)
        payloads = [replace(payload, cache_root=root)]
        usage = Usage()
        deadlines = replace(deadlines, whole=deadlines.first)
        given = self.models.serves, payloads, deadlines, usage, receive
        with TokenStream(self.engine, *given) as stream:
            return await stream.collect(), usage


def decides_in_steps(settings: Settings) -> bool:
    """Whether a language model answers `POST /`, and no pipeline of the library."""
    model = settings.pipeline_model
    decides = settings.pipeline_task == "decision" and model != "none"
    return decides and not decides_in_its_own_way(model)


@dataclass(eq=False)
class DecisionRoot(Root):
    decisions: DecisionEndpoint

    async def answer(self, scope: Scope, receive: Receive, send: Send, posted: Posted) -> None:
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
