"""`POST /v1/decisions` and `POST /v1/systemone`: the probabilities of answers to questions.

    body → request → DecisionInput → submit → a delta per question → probabilities → response

No token is generated, and a response is never streamed: it has one time limit. `POST /` with the
task `decision` takes the inputs of transformers' pipeline and runs them like /v1/systemone, on the
chat model if both are the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import anyio.to_thread
from starlette.types import Receive, Scope, Send

from server.core.cache_namespace import cache_namespace
from server.core.delta_stream import TokenStream, UsageCounts
from server.core.worker_client import Deadlines, WorkerClient
from server.http.json import INLINE_BYTES, JsonBodyParser, parse_json, to_json
from server.http.request import read_json_request, send_json
from server.openai.models import ModelGroup
from server.openai.request_fields import ModelRequest, decode
from server.openai.response_schemas import Decision, SystemOne
from worker.messages.decisions import MAX_QUESTIONS, DecisionInput
from worker.task_detection import may_have_decision_settings


class DecisionBody(ModelRequest, Protocol):
    cache_salt: str | None

    def decision_input(self) -> DecisionInput: ...

    def response(
        self, probabilities: Sequence[Sequence[float]], usage: UsageCounts
    ) -> Decision | SystemOne: ...


@dataclass(eq=False)
class DecisionEndpoint:
    """An ASGI app for one kind of request."""

    worker_client: WorkerClient
    models: ModelGroup
    kind: type[DecisionBody]
    body_parser: JsonBodyParser = field(init=False, default_factory=JsonBodyParser)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, deadlines = await read_json_request(scope, receive)
        request, decision_input = await self.body_parser.run(
            self.parse, body, deadlines.first, blocks=True
        )
        results = await self.decide(scope, receive, deadlines, request, decision_input)

        def encode() -> bytes:
            return to_json(request.response(*results))

        large = len(body) > INLINE_BYTES  # then the response is large, too
        await send_json(send, await anyio.to_thread.run_sync(encode) if large else encode())

    def parse(self, body: bytes) -> tuple[DecisionBody, DecisionInput]:
        """Return the request and the model's input. In a pool thread: 400 questions take
        milliseconds."""
        max_entries = max(MAX_QUESTIONS, self.models.max_entries)
        request = decode(parse_json(body), self.kind, self.models.id_for, max_entries)
        return request, request.decision_input()

    async def decide(
        self,
        scope: Scope,
        receive: Receive,
        deadlines: Deadlines,
        request: DecisionBody,
        decision_input: DecisionInput,
    ) -> tuple[list[Sequence[float]], UsageCounts]:
        """Return the probabilities of each question's options, in order, and the usage."""
        with self.submit(scope, receive, deadlines, request, decision_input) as stream:
            deltas = await stream.collect()
            return [delta.probabilities for delta in deltas], stream.usage

    def submit(
        self,
        scope: Scope,
        receive: Receive | None,
        deadlines: Deadlines,
        request: DecisionBody,
        decision_input: DecisionInput,
    ) -> TokenStream:
        """Submit a request, or raise a Refused."""
        model = self.models.find(request.model)
        namespace = cache_namespace(model.id, scope["api_key"], request.cache_salt)
        return TokenStream(
            self.worker_client,
            model.registry_name,
            [replace(decision_input, adapter=model.adapter)],
            replace(deadlines, whole=deadlines.first),
            receive,
            scope["context"],
            namespace,
        )


def uses_language_model(task: str, path: str) -> bool:
    """Return whether a language model serves a task of `POST /`, instead of a pipeline."""
    return task == "decision" and not may_have_decision_settings(path)
