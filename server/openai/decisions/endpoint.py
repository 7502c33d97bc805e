"""`POST /v1/decisions` and `POST /v1/systemone`: questions about one input, and how likely their
answers are.

    body → request → DecisionInput → submit → a delta for each question → probabilities → document

Nothing is generated and nothing streamed: an answer comes whole, within one time limit. `POST /`
with the task `decision` takes the inputs of transformers' pipeline, and runs each as /v1/systemone
would: by the chat model if it is the same, which is loaded once then.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import anyio.to_thread
from starlette.types import Receive, Scope, Send

from server.core.answer_stream import TokenStream, UsageCounts
from server.core.cache_namespace import cache_namespace
from server.core.settings import Settings
from server.core.worker_client import Deadlines, WorkerClient
from server.http.json import INLINE_BYTES, Document, JsonBodyParser, parse_json, to_json
from server.http.request import read_json_request, send_json
from server.openai.models import ModelNames
from server.openai.request_fields import Body, decode
from worker.messages.decisions import MAX_QUESTIONS, DecisionInput
from worker.messages.deltas import Delta
from worker.task_detection import decides_in_its_own_way


class DecisionBody(Body, Protocol):
    cache_salt: str | None

    def decision_input(self) -> DecisionInput: ...

    def document(
        self, probabilities: Sequence[Sequence[float]], usage: UsageCounts
    ) -> Document: ...


@dataclass(eq=False)
class DecisionEndpoint:
    """A bare ASGI app."""

    worker_client: WorkerClient
    models: ModelNames
    kind: type[DecisionBody]
    parsing: JsonBodyParser = field(init=False, default_factory=JsonBodyParser)

    def parse(self, body: bytes) -> tuple[DecisionBody, DecisionInput]:
        """In a pool thread: 400 questions take milliseconds."""
        most = max(MAX_QUESTIONS, self.models.text_model.max_model_len)
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
    ) -> tuple[list[Delta], UsageCounts]:
        namespace = cache_namespace(self.models.id, scope["api_key"], request.cache_salt)
        usage = UsageCounts()
        deadlines = replace(deadlines, whole=deadlines.first)
        given = self.models.serves, [payload], deadlines, usage, receive, namespace
        with TokenStream(self.worker_client, *given) as stream:
            return await stream.collect(), usage


def decides_in_steps(settings: Settings) -> bool:
    """Whether a language model answers `POST /`, and no pipeline of the library."""
    model = settings.pipeline_model
    decides = settings.pipeline_task == "decision" and model != "none"
    return decides and not decides_in_its_own_way(model)
