"""`POST /v1/decisions` and `POST /v1/systemone`: questions about one input, and how likely their
answers are.

    body → request → DecisionInput → submit → a delta for each question → probabilities → document

Nothing is generated and nothing streamed: an answer comes whole, within one time limit.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import anyio.to_thread
from starlette.types import Receive, Scope, Send

from server.answer_stream import TokenStream, Usage
from server.cache_root import cache_root
from server.engine import Deadlines, Engine
from server.http.json import INLINE_BYTES, Document, Parsing, to_json
from server.http.request import read_json_request, send_json
from server.openai.models import ModelNames
from server.openai.params import Body, decode
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
        request = decode(body, self.kind, self.models.names.of, most)
        return request, request.decision_input()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, deadlines = await read_json_request(scope, receive, self.models.serves)
        request, payload = await self.parsing.run(self.parse, body, deadlines.first, blocks=True)
        deltas, usage = await self.ask(scope, receive, deadlines, request, payload)
        write = partial(content_of, request, deltas, usage)
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
        root = cache_root(self.models.names.id, scope["api_key"], request.cache_salt)
        payloads = [replace(payload, cache_root=root)]
        usage = Usage()
        deadlines = replace(deadlines, whole=deadlines.first)
        given = self.models.serves, payloads, deadlines, usage, receive
        with TokenStream(self.engine, *given) as stream:
            return await stream.collect(), usage


def content_of(request: DecisionBody, deltas: Sequence[Delta], usage: Usage) -> bytes:
    return to_json(request.document([each.probabilities for each in deltas], usage))
