"""The path of embeddings, reranking and scores: a list of texts, split over several work items.

body → request → payloads, a work item each → outputs → response
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import anyio.to_thread
from msgspec import Meta, Struct
from starlette.types import Scope, Send

from batching.errors import InvalidInput
from server.apis.openai.endpoint import BodyEndpoint
from server.apis.openai.models import NamedModel
from server.apis.openai.request_fields import Salt, decode
from server.core.worker_client import IncomingRequest, Submission
from server.http.json import INLINE_BYTES, Document, parse_json
from server.http.request import send_parts
from worker.messages.scoring import (
    MAX_PART_INPUTS,
    EmbeddingInput,
    PartSize,
    ScoringInput,
    Truncation,
)

MAX_INPUTS = 2048
Input = EmbeddingInput | ScoringInput


class ScoringRequest(Struct, kw_only=True):
    """A request for vectors or scores. The fields about texts that are too long are vLLM's and
    text-embeddings-inference's."""

    without_effect: ClassVar = frozenset({"user"})
    compares: ClassVar = False  # `content` multiplies vectors, in a thread for any size

    model: str | None = None
    cache_salt: Salt | None = None
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

    def payloads(self, max_size: PartSize, kind: str) -> Sequence[Input]:
        """Return the payloads for a kind of model, or raise InvalidInput."""
        raise NotImplementedError

    def content(self, outputs: Sequence[Any]) -> list[bytes]:
        """Return the response's JSON in parts. In a pool thread for large requests."""
        raise NotImplementedError


class ScoringTask(NamedTuple):
    body: ScoringRequest
    model: NamedModel
    payloads: Sequence[Input]


@dataclass(eq=False)
class ScoringEndpoint(BodyEndpoint[ScoringTask]):
    """An endpoint for one kind of request, to any of the models."""

    kind: type[ScoringRequest]

    async def serve(self, incoming: IncomingRequest, send: Send, request: ScoringTask) -> None:
        with self.submit(incoming, request) as submission:
            outputs = [await item.future for item in submission.items]
        content = request.body.content
        if request.body.compares or incoming.scope["transfer"].held > INLINE_BYTES:
            parts = await anyio.to_thread.run_sync(content, outputs)
        else:
            parts = content(outputs)
        await send_parts(send, parts, submission.timing_headers())

    def submit(self, incoming: IncomingRequest, task: ScoringTask) -> Submission[Any]:
        body, model, payloads = task
        namespace = incoming.scope["context"].cache_namespace(model.id, body.cache_salt)
        inputs = [replace(payload, cache_namespace=namespace) for payload in payloads]
        return Submission(self.worker_client, model.registry_name, inputs, incoming)

    def parse(self, body: bytes, scope: Scope) -> ScoringTask:
        return self.read_document(parse_json(body), scope)

    def read_document(self, document: Document, scope: Scope) -> ScoringTask:
        """Return the request, its model and the payloads, each of which fits into a batch.

        Raises InvalidInput, also for more payloads than the queue has slots."""
        request = decode(document, self.kind, self.models.id_for, scope)
        model, settings = self.models.find(request.model), self.settings
        max_size = PartSize(
            min(MAX_PART_INPUTS, settings.max_batch_size), settings.max_batch_tokens
        )
        payloads = request.payloads(max_size, model.kind)
        if len(payloads) > settings.max_queue_size:
            slots = f"{len(payloads)} slots of the queue, which has {settings.max_queue_size}"
            raise InvalidInput(f"the inputs are too many or too long together: they need {slots}")
        return ScoringTask(request, model, payloads)
