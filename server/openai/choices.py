"""Responses with numbered choices, in chunks or whole: chat and text completions.

endpoint.py feeds the deltas of a request to ChoicesResponseBuilder, which both endpoints share. The
ChoiceFormat of an endpoint (chat.py, completions.py) builds its choices.
"""

import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar

from msgspec import UNSET, Struct, UnsetType

from server.core.delta_stream import UsageCounts
from server.http.json import to_json
from server.http.sse import data_frame
from server.openai.endpoint import ParsedRequest, ResponseBuilder
from server.openai.response_schemas import (
    ChatChoice,
    ChatChunkChoice,
    CompletionChoice,
    CompletionTokensDetails,
    PromptTokensDetails,
    Usage,
)
from worker.messages.deltas import Delta, DeltaPart, Kind

TEXT = secrets.token_hex()  # placeholder of the text in the template of a chunk

# Keyword arguments of all chunks of a response, and of the response.
Head = dict[str, Any]
ChunkUsage = Usage | UnsetType | None
# Kinds of a delta's parts whose chunks are made from a template.
TEMPLATE_KINDS = ("content", "reasoning")
C = TypeVar("C", bound=ChatChoice | CompletionChoice)
K = TypeVar("K", bound=ChatChunkChoice | CompletionChoice)


class ChoicesChunk(Protocol[K]):
    choices: list[K]
    usage: ChunkUsage


class ChoiceFormat(Protocol[C, K]):
    """How an endpoint represents choices: `C` whole, `K` in chunks."""

    id_prefix: str

    def choice(self, delta: Delta) -> C:
        """Return a whole choice, made of all its deltas."""

    def response(self, head: Head, choices: list[C], usage: Usage, delta: Delta) -> Struct:
        """Return the response; `delta` is the first choice's."""

    def first_chunks(self, head: Head, usage: ChunkUsage, delta: Delta | None) -> Iterator[Struct]:
        """Yield the chunks before those of the first delta."""

    def chunk_choices(self, delta: Delta) -> Iterator[K]:
        """Yield a delta's choices, one per chunk. Log-probabilities that a choice contains are
        removed from the delta."""

    def chunk(self, head: Head, usage: ChunkUsage) -> ChoicesChunk[K]:
        """Return a chunk without choices."""


class ChoicesResponseBuilder(ResponseBuilder[Delta], Generic[C, K]):
    def __init__(
        self, request: ParsedRequest, usage: UsageCounts, format: ChoiceFormat[C, K]
    ) -> None:
        body, options = request.body, request.body.stream_options
        self.streams = bool(body.stream)
        self.usage = usage
        self.format = format
        self.includes_usage = bool(options and options.include_usage)
        self.continuous_usage = bool(options and options.continuous_usage_stats)
        self.head: Head = {
            "id": format.id_prefix + secrets.token_hex(12),
            "created": int(time.time()),
            "model": body.model,
            "system_fingerprint": None,
        }
        self.returns_ids = bool(body.return_token_ids)
        # By choice: a delta without text, whose fields go with the next text.
        self._held: dict[int, Delta] = {}
        scored = request.inputs[0].sampling.logprobs is not None
        # Whether chunks of a kind differ in their text only. If so, the bytes around the text are
        # encoded once.
        self._only_text = not (scored or self.returns_ids or self.continuous_usage)
        self._templates: dict[tuple[int, str], list[bytes]] = {}
        # Reused: a chunk is encoded before the next one is built.
        self._chunk = format.chunk(self.head, self._chunk_usage())

    def entries(self, delta: Delta) -> int:
        return len(delta.logprobs) + len(delta.prompt_logprobs)

    def start(self, deltas: Sequence[Delta]) -> Iterator[bytes]:
        first = deltas[0] if deltas and self.returns_ids else None
        usage = self._chunk_usage()
        if isinstance(usage, Usage):  # before the first token
            usage.completion_tokens, usage.total_tokens = 0, usage.prompt_tokens
            usage.completion_tokens_details = CompletionTokensDetails(0)
        return map(data_frame, self.format.first_chunks(self.head, usage, first))

    def add(self, delta: Delta) -> Iterator[bytes]:
        """Yield the chunks of a delta; none as long as there is no text."""
        if (held := self._held.pop(delta.choice, None)) is not None:
            held.merge(delta)
            delta = held
        finished, parts = delta.finish_reason is not None, delta.parts
        if (
            self._only_text
            and len(parts) == 1
            and (kind := parts[0].kind) in TEMPLATE_KINDS
            and not finished
        ):
            key = delta.choice, kind
            yield to_json(parts[0].text).join(self._templates.get(key) or self._template(*key))
        elif parts or finished:
            ids = delta.token_ids
            for choice in self.format.chunk_choices(delta):
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
        choices = [self.format.choice(delta) for delta in deltas]
        if self.returns_ids:
            for choice, delta in zip(choices, deltas, strict=True):
                choice.token_ids = delta.token_ids
        return self.format.response(self.head, choices, self._usage(), deltas[0])

    def _template(self, choice: int, kind: Kind) -> list[bytes]:
        """Return the bytes around the occurrences of the text in a choice's chunks."""
        [chunk_choice] = self.format.chunk_choices(Delta(choice, [DeltaPart(kind, TEXT)]))
        frame = self._frame([chunk_choice], self._chunk_usage())
        template = self._templates[choice, kind] = frame.split(to_json(TEXT))
        return template

    def _frame(self, choices: list[K], usage: ChunkUsage) -> bytes:
        self._chunk.choices, self._chunk.usage = choices, usage
        return data_frame(self._chunk)

    def _chunk_usage(self) -> ChunkUsage:
        if not self.includes_usage:
            return UNSET
        return self._usage() if self.continuous_usage else None

    def _usage(self) -> Usage:
        usage = self.usage
        return Usage(
            usage.prompt,
            usage.completion,
            usage.prompt + usage.completion,
            PromptTokensDetails(usage.cached),
            CompletionTokensDetails(usage.reasoning),
        )
