"""Responses with numbered choices, in chunks or whole: chat and text completions."""

import secrets
import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar, Generic, Literal, TypeVar

from msgspec import UNSET, Struct, UnsetType

from server.apis.openai.endpoint import ParsedRequest, ResponseBuilder
from server.apis.openai.models import NamedModel
from server.apis.openai.response_schemas import (
    ChatChoice,
    ChatChunkChoice,
    CompletionChoice,
    CompletionChunk,
    CompletionTokensDetails,
    PromptTokensDetails,
    Usage,
)
from server.core.delta_stream import UsageCounts
from server.http.json import Document
from server.http.sse import data_frame
from worker.messages.deltas import Delta

C = TypeVar("C", bound=ChatChoice | CompletionChoice)
K = TypeVar("K", bound=ChatChunkChoice | CompletionChoice)


class ChoicesBuilder(ResponseBuilder[Delta], Generic[C, K]):
    """Builds a response with choices: `C` whole, `K` in chunks."""

    id_prefix: ClassVar[str]
    chunk_object: ClassVar[Literal["chat.completion.chunk", "text_completion"]]

    def __init__(self, request: ParsedRequest, usage: UsageCounts, model: NamedModel) -> None:
        body, options = request.body, request.body.stream_options
        self.streams = bool(body.stream)
        self.usage = usage
        self.includes_usage = bool(options and options.include_usage)
        self.continuous_usage = bool(options and options.continuous_usage_stats)
        # Keyword arguments of all chunks of a response, and of the response.
        self.head: Document = {
            "id": self.id_prefix + (getattr(body, "request_id", None) or secrets.token_hex(12)),
            "created": int(time.time()),
            "model": body.model,
            "system_fingerprint": None,
        }
        self.returns_ids = bool(body.return_token_ids)
        self.names_ids = bool(body.return_tokens_as_token_ids)  # in place of the tokens' texts
        self.scored = request.inputs[0].sampling.logprobs is not None
        # By choice: a delta without text, whose fields go with the next text.
        self._held: dict[int, Delta] = {}
        # Reused: a chunk is encoded before the next one is built.
        self._chunk = self.chunk([], self._chunk_usage())

    @abstractmethod
    def choice(self, delta: Delta) -> C:
        """Return a whole choice, made of all its deltas."""

    @abstractmethod
    def response(self, choices: list[C], usage: Usage, delta: Delta) -> Struct:
        """Return the response; `delta` is the first choice's."""

    @abstractmethod
    def chunk_choices(self, delta: Delta) -> Iterator[K]:
        """Yield a delta's choices, one per chunk, and remove their log-probabilities from it."""

    def chunk(self, choices: list[K], usage: Usage | UnsetType | None) -> CompletionChunk:
        return CompletionChunk(**self.head, object=self.chunk_object, choices=choices, usage=usage)

    def add(self, delta: Delta) -> Iterator[bytes]:
        """Yield the chunks of a delta; none as long as there is no text."""
        if (held := self._held.pop(delta.choice, None)) is not None:
            held.merge(delta)
            delta = held
        finished = delta.finish_reason is not None
        if delta.parts or finished:
            ids = delta.token_ids
            for choice in self.chunk_choices(delta):
                if self.returns_ids:
                    choice.token_ids, ids = ids, []
                yield self._frame([choice], self._chunk_usage())
            if delta.logprobs and not finished:
                self._held[delta.choice] = Delta(delta.choice, logprobs=delta.logprobs)
        else:
            self._held[delta.choice] = delta

    def finish(self) -> Iterator[bytes]:
        if self.includes_usage:
            yield self._frame([], self._usage())

    def build(self, deltas: Sequence[Delta]) -> Struct:
        choices = [self.choice(delta) for delta in deltas]
        if self.returns_ids:
            for choice, delta in zip(choices, deltas, strict=True):
                choice.token_ids = delta.token_ids
        return self.response(choices, self._usage(), deltas[0])

    def _frame(self, choices: list[K], usage: Usage | UnsetType | None) -> bytes:
        self._chunk.choices, self._chunk.usage = choices, usage
        return data_frame(self._chunk)

    def _chunk_usage(self) -> Usage | UnsetType | None:
        if not self.includes_usage:
            return UNSET
        return self._usage() if self.continuous_usage else None

    def _usage(self) -> Usage:
        usage = self.usage
        return Usage(
            usage.prompt,
            usage.completion,
            usage.prompt + usage.completion,
            PromptTokensDetails(usage.cached, usage.audio or UNSET),
            CompletionTokensDetails(usage.reasoning),
        )
