"""What embeddings, reranking and scores of texts have in common: a list, in pieces of a few.

body → request → pieces, a work item each → their answers, end to end → what is sent
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Literal, Protocol

import anyio.to_thread
from msgspec import Meta, Struct
from starlette.types import Receive, Scope, Send

from batching.errors import InvalidInput
from server.core.cache_namespace import cache_namespace
from server.core.settings import Settings
from server.core.worker_client import Submission, WorkerClient
from server.http.json import INLINE_BYTES, JsonBodyParser, parse_json
from server.http.request import read_json_request, send_parts
from server.openai.models import ModelNames, id_of
from server.openai.request_fields import Body, decode
from worker.messages.scoring import MAX_PART_INPUTS, PartSize, Truncation

MOST_INPUTS = 2048


class Truncatable(Struct, kw_only=True):
    """A request whose texts may be too long, with what clients of vLLM and of
    text-embeddings-inference say about that."""

    truncate: bool | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1)] | None = None
    truncation_direction: Literal["left", "right", "Left", "Right"] | None = None

    def truncation(self, cuts: bool = False) -> Truncation:
        """`cuts`: whether they are cut where nothing is said."""
        tokens = self.truncate_prompt_tokens
        if tokens == 0:
            raise InvalidInput.at("truncate_prompt_tokens", "must be -1 or at least 1, not 0")
        cuts = cuts or tokens is not None if self.truncate is None else self.truncate
        kept = tokens if tokens and tokens > 0 else None
        return Truncation(cuts, kept, (self.truncation_direction or "").lower() == "left")


class ScoringBody(Body, Protocol):
    cache_salt: str | None

    def payloads(self, most: PartSize, serves: str) -> Sequence[Any]:
        """Pieces for the model of a name in the registry; InvalidInput."""

    def content(self, outputs: list[Any]) -> list[bytes]:
        """The answer's JSON, of what came of the payloads. In a pool thread if it may be large."""


@dataclass(eq=False)
class ScoringEndpoint:
    """A bare ASGI app, of the models that requests of this `kind` may name."""

    settings: Settings
    worker_client: WorkerClient
    models: Sequence[ModelNames]
    kind: type[ScoringBody]
    parsing: JsonBodyParser = field(init=False, default_factory=JsonBodyParser)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, deadlines = await read_json_request(scope, receive)
        request, names, payloads = await self.parsing.run(self.parse, body, deadlines.first)
        namespace = cache_namespace(names.id, scope["api_key"], request.cache_salt)
        submission = Submission(
            self.worker_client,
            names.serves,
            payloads,
            deadlines,
            receive,
            cache_namespace=namespace,
        )
        with submission as work:
            outputs = [await item.future for item in work.items]
        if len(body) > INLINE_BYTES:
            parts = await anyio.to_thread.run_sync(request.content, outputs)
        else:
            parts = request.content(outputs)
        await send_parts(send, parts, work.timing_headers())

    def parse(self, body: bytes) -> tuple[ScoringBody, ModelNames, Sequence[Any]]:
        """InvalidInput for more than the queue could ever take, in pieces for which a batch has
        room."""
        request = decode(parse_json(body), self.kind, partial(id_of, self.models))
        [names] = [each for each in self.models if each.id == request.model]
        settings = self.settings
        size = PartSize(min(MAX_PART_INPUTS, settings.max_batch_size), settings.max_batch_tokens)
        made = request.payloads(size, names.serves)
        if len(made) > settings.max_queue_size:
            places = f"{len(made)} places; the queue has {settings.max_queue_size}"
            many = f"these inputs are too many or too long together: they need {places}"
            raise InvalidInput(many)
        return request, names, made
