"""What embeddings, reranking and scores of texts have in common: a list, in pieces of a few.

body → request → pieces, a work item each → their answers, end to end → what is sent
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import anyio.to_thread
from starlette.types import Receive, Scope, Send

from batching.errors import InvalidInput
from server.cache_root import cache_root
from server.engine import Engine, Submission
from server.http.json import INLINE_BYTES, Parsing
from server.http.request import read_json_request, send_parts
from server.openai.models import ModelNames, find
from server.openai.params import Body, decode
from server.settings import Settings
from worker.scoring import PIECE, PieceSize

MOST_INPUTS = 2048


class ScoringBody(Body, Protocol):
    cache_salt: str | None


R = TypeVar("R", bound=ScoringBody)


@dataclass(eq=False)
class ScoringEndpoint(ABC, Generic[R]):
    """A bare ASGI app, of the models that requests may name."""

    kind: ClassVar[type[Any]]  # R

    settings: Settings
    engine: Engine
    models: Sequence[ModelNames]
    parsing: Parsing = field(init=False, default_factory=Parsing)

    @abstractmethod
    def pieces_of(self, request: R, serves: str) -> Callable[[PieceSize], Sequence[Any]]:
        """What makes a request's payloads for the model of a name in the registry."""

    @abstractmethod
    def content(self, request: R, outputs: list[Any]) -> list[bytes]:
        """The answer's JSON, of what came of the payloads. In a pool thread if it may be large."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, deadlines = await read_json_request(scope, receive, self.models[0].serves)
        request, names, payloads = await self.parsing.run(self.parse, body, deadlines.first)
        root = cache_root(names.id, scope["api_key"], request.cache_salt)
        payloads = [replace(each, cache_root=root) for each in payloads]
        with Submission(self.engine, names.serves, payloads, deadlines, receive) as work:
            outputs = [await item.future for item in work.items]
        if len(body) > INLINE_BYTES:
            parts = await anyio.to_thread.run_sync(self.content, request, outputs)
        else:
            parts = self.content(request, outputs)
        await send_parts(send, parts, work.timing_headers())

    def parse(self, body: bytes) -> tuple[R, ModelNames, Sequence[Any]]:
        """InvalidInput for more than the queue could ever take, in pieces for which a batch has
        room."""
        request: R = decode(body, self.kind, lambda given: find(self.models, given).id)
        [names] = [each for each in self.models if each.id == request.model]
        settings = self.settings
        size = PieceSize(min(PIECE, settings.max_batch_size), settings.max_batch_tokens)
        made = self.pieces_of(request, names.serves)(size)
        if len(made) > settings.max_queue_size:
            places = f"{len(made)} places; the queue has {settings.max_queue_size}"
            many = f"these inputs are too many or too long together: they need {places}"
            raise InvalidInput(many)
        return request, names, made
