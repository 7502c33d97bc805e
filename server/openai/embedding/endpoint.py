"""The path of embeddings, reranking and scores: a list of texts, split over several work items.

body → request → payloads, a work item each → outputs → response
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Generic, Literal, NamedTuple, Protocol, TypeVar

import anyio.to_thread
from msgspec import Meta, Struct
from starlette.types import Receive, Scope, Send

from batching.errors import InvalidInput
from server.core.cache_namespace import cache_namespace
from server.core.settings import Settings
from server.core.worker_client import Deadlines, Submission, WorkerClient
from server.http.json import INLINE_BYTES, Document, JsonBodyParser, parse_json
from server.http.request import read_json_request, send_parts
from server.openai.models import ModelGroup, NamedModel
from server.openai.request_fields import ModelRequest, decode
from worker.messages.scoring import (
    MAX_PART_INPUTS,
    EmbeddingInput,
    PartSize,
    ScoringInput,
    Truncation,
)

MAX_INPUTS = 2048
Input = EmbeddingInput | ScoringInput


class TruncationFields(Struct, kw_only=True):
    """The fields about texts that are too long: vLLM's and text-embeddings-inference's."""

    truncate: bool | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1)] | None = None
    truncation_direction: Literal["left", "right", "Left", "Right"] | None = None

    def truncation(self, by_default: bool = False) -> Truncation:
        """Return how to truncate. `by_default`: truncate unless a field forbids it."""
        tokens = self.truncate_prompt_tokens
        if tokens == 0:
            raise InvalidInput.at("truncate_prompt_tokens", "must be -1 or at least 1, not 0")
        truncates = by_default or tokens is not None if self.truncate is None else self.truncate
        max_tokens = tokens if tokens and tokens > 0 else None
        keep_end = (self.truncation_direction or "").lower() == "left"
        return Truncation(truncates, max_tokens, keep_end)


Output = TypeVar("Output", contravariant=True)
Result = TypeVar("Result")


class ScoringBody(ModelRequest, Protocol[Output]):
    cache_salt: str | None

    def payloads(self, max_size: PartSize, kind: str) -> Sequence[Input]:
        """Return the payloads for a kind of model, or raise InvalidInput."""

    def content(self, outputs: Sequence[Output]) -> list[bytes]:
        """Return the response's JSON in parts. In a pool thread for large requests."""


@dataclass(eq=False)
class ScoringEndpoint(Generic[Output]):
    """An ASGI app for one kind of request, to any of the models."""

    settings: Settings
    worker_client: WorkerClient
    models: ModelGroup
    kind: type[ScoringBody[Output]]
    body_parser: JsonBodyParser = field(init=False, default_factory=JsonBodyParser)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, deadlines = await read_json_request(scope, receive)
        task = await self.read(scope, receive, body, deadlines)
        await self.serve(scope, receive, send, task, deadlines)

    async def read(
        self, scope: Scope, receive: Receive, body: bytes, deadlines: Deadlines
    ) -> "ScoringTask[Output]":
        """Return the checked request of a body. Raises InvalidInput."""
        return await self.body_parser.run(self.parse, body, deadlines.first)

    async def serve(
        self,
        scope: Scope,
        receive: Receive | None,
        send: Send,
        task: "ScoringTask[Output]",
        deadlines: Deadlines,
    ) -> None:
        """Submit a request, and send the response."""
        with self.submit(scope, task, deadlines, receive) as submission:
            outputs = [await item.future for item in submission.items]
        content = task.request.content
        if scope["transfer"].held > INLINE_BYTES:
            parts = await anyio.to_thread.run_sync(content, outputs)
        else:
            parts = content(outputs)
        await send_parts(send, parts, submission.timing_headers())

    def submit(
        self,
        scope: Scope,
        parsed: "ScoringTask[Output]",
        deadlines: Deadlines,
        receive: Receive | None,
    ) -> Submission[Output]:
        """Submit the payloads, or raise a Refused."""
        request, model, payloads = parsed
        return Submission(
            self.worker_client,
            model.registry_name,
            payloads,
            deadlines,
            receive,
            scope["context"],
            cache_namespace=cache_namespace(model.id, scope["api_key"], request.cache_salt),
        )

    def parse(self, body: bytes) -> "ScoringTask[Output]":
        """Return a body's request, its model and its payloads. Raises InvalidInput."""
        return self.read_document(parse_json(body))

    def read_document(self, document: Document) -> "ScoringTask[Output]":
        """Return the request, its model and the payloads, each of which fits into a batch.

        Raises InvalidInput, also for more payloads than the queue has slots.
        """
        request = decode(document, self.kind, self.models.id_for)
        model, settings = self.models.find(request.model), self.settings
        max_size = PartSize(
            min(MAX_PART_INPUTS, settings.max_batch_size), settings.max_batch_tokens
        )
        payloads = request.payloads(max_size, model.kind)
        if len(payloads) > settings.max_queue_size:
            slots = f"{len(payloads)} slots of the queue, which has {settings.max_queue_size}"
            raise InvalidInput(f"the inputs are too many or too long together: they need {slots}")
        return ScoringTask(request, model, payloads)


class ScoringTask(NamedTuple, Generic[Result]):
    request: ScoringBody[Result]
    model: NamedModel
    payloads: Sequence[Input]
