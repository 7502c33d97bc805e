"""The way of a generation request through HTTP, whatever its endpoint.

    body → parse → images → submit → first delta or refusal → headers → events, or one document

A stream's headers wait for the first delta, so that refusals and early failures are real status
codes; what fails later is an event. What an answer looks like is its Reply's matter.
"""

import logging
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Generic, TypeVar

import orjson
from starlette.types import Receive, Scope, Send

from batching.errors import ClientGone
from server.engine import Engine
from server.http.errors import HttpError, as_http_error
from server.http.json import Document, Parsing
from server.http.request import Deadlines, abort_on_disconnect, read_json_request, send_json
from server.http.sse import DONE, EventStream
from server.openai.cache_root import rooted
from server.openai.models import ModelNames
from server.openai.params import GenerationRequest
from server.openai.pictures import Pictures
from server.settings import Settings
from server.token_stream import TokenStream, Usage
from worker.deltas import Delta, TokenLogprob
from worker.protocol import GenerationInput

log = logging.getLogger("onequeue.generation")

LEAST_LOGPROB = -9999.0  # JSON has no minus infinity


class Reply(ABC):
    """The answer to one request: events while it is made, or one document.

    `payloads` are what it asks the model for. Events may share parts with later ones: send each
    before the next is made.
    """

    def __init__(self, payloads: Sequence[GenerationInput], streams: bool) -> None:
        self.payloads = payloads
        self.streams = streams
        self.usage = Usage()

    def begin(self, first: Sequence[Delta]) -> Iterator[Document]:
        """The events before those of the first deltas."""
        return iter(())

    @abstractmethod
    def add(self, delta: Delta) -> Iterator[Document]:
        """The events of what is new."""

    @abstractmethod
    def finish(self) -> Iterator[Document]:
        """The events after the last delta's."""

    @abstractmethod
    def fail(self, error: HttpError) -> Iterator[Document]:
        """The events of a failure after the start."""

    @abstractmethod
    def whole(self, deltas: Sequence[Delta]) -> Document:
        """The answer at once, from one delta a choice."""

    def frame(self, event: Document) -> bytes:
        """An event as it is sent."""
        return b"data: %b\n\n" % orjson.dumps(event)

    def last_frame(self) -> bytes:
        """What ends a stream, however the request ended."""
        return DONE


R = TypeVar("R", bound=Reply)


@dataclass(eq=False)
class GenerationEndpoint(ABC, Generic[R]):
    """A bare ASGI app."""

    blocks: ClassVar = False  # whether parsing even a small body would hold up the loop

    settings: Settings
    engine: Engine
    models: ModelNames
    pictures: Pictures
    parsing: Parsing = field(init=False, default_factory=Parsing)

    @abstractmethod
    def parse(self, body: bytes) -> R:
        """What is asked for; raises InvalidInput. In a pool thread if the body is large."""

    async def keep(self, reply: R) -> bool:
        """Store an answer before its last event is sent, so that a client can build on it."""
        return False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, deadlines = await read_json_request(scope, receive, "generation")
        reply = await self.parsing.run(self.parse, body, deadlines.first, self.blocks)
        payloads = await self.pictures.fetched(scope, receive, reply.payloads, deadlines.first)
        model, salt = self.models.names.id, payloads[0].cache_salt
        reply.payloads = rooted(payloads, scope, model, salt)
        await self.answer(scope, receive, send, reply, deadlines)

    async def answer(
        self, scope: Scope, receive: Receive, send: Send, reply: R, deadlines: Deadlines
    ) -> None:
        stream = TokenStream(self.engine, reply.payloads, deadlines, reply.usage)
        self.engine.loop.create_task(abort_on_disconnect(receive, stream.items))
        try:
            if reply.streams:
                await self._stream(scope, send, reply, stream, await stream.read())
            else:
                document = reply.whole(await stream.collect())
                await self.keep(reply)
                await send_json(send, document)
        finally:
            stream.close()

    def failed(self, error: Exception, scope: Scope) -> HttpError:
        """Counts a failure; its envelope."""
        envelope = as_http_error(error, scope, self.settings.debug)
        self.engine.metrics.errors.labels(envelope.kind).inc()
        return envelope

    async def _stream(
        self, scope: Scope, send: Send, reply: R, stream: TokenStream, first: list[Delta]
    ) -> None:
        connection = EventStream(send, stream.arrival.set)
        try:
            await connection.open()
            try:
                async for event in events(reply, stream, first):
                    if event is None:
                        await connection.comment()
                    else:
                        await connection.write(reply.frame(event))
            except ClientGone:
                raise
            except Exception as error:
                for event in reply.fail(self.failed(error, scope)):
                    await connection.write(reply.frame(event))
            await self.keep(reply)
            await connection.end(reply.last_frame())
        except ClientGone as error:
            self.engine.metrics.errors.labels("client_gone").inc()
            log.info("stream ended id=%s because=%r", scope["request_id"].decode(), str(error))
        finally:
            connection.close()


async def events(
    reply: Reply, stream: TokenStream, deltas: list[Delta]
) -> AsyncIterator[Document | None]:
    """The events of an answer, from the first deltas on; None if the reader was woken."""
    for event in reply.begin(deltas):
        yield event
    while True:
        for delta in deltas:
            for event in reply.add(delta):
                yield event
        if not stream.unfinished:
            break
        deltas = await stream.read()
        if not deltas:
            yield None
    for event in reply.finish():
        yield event


class ChoicesReply(Reply):
    """Numbered choices, in chunks or together: what chat and text completions have in common."""

    id_prefix: str
    objects: tuple[str, str]  # what the document is called, and a chunk

    def __init__(self, request: GenerationRequest, payloads: Sequence[GenerationInput]) -> None:
        super().__init__(payloads, bool(request.stream))
        options = request.stream_options
        self.includes_usage = bool(options and options.include_usage)
        self.continuous_usage = bool(options and options.continuous_usage_stats)
        self.head: Document = {
            "id": self.id_prefix + secrets.token_hex(12),
            "object": self.objects[self.streams],
            "created": int(time.time()),
            "model": request.model,
            "system_fingerprint": None,
        }
        self.scored = payloads[0].sampling.logprobs is not None
        self.tells_ids = payloads[0].token_ids
        self.held: dict[int, Delta] = {}  # by choice: what goes with text that is still to come

    @abstractmethod
    def choice(self, delta: Delta) -> Document:
        """A choice as a whole, or what a delta adds to it."""

    def choices(self, delta: Delta) -> Iterator[Document]:
        """Choices, one a chunk, that say what a delta adds."""
        yield self.choice(delta)

    def of_prompt(self, delta: Delta) -> Document:
        """What was asked for about a prompt's tokens, of the first delta; as vLLM has it."""
        told: Document = {}
        if delta.prompt_ids:
            told["prompt_token_ids"] = delta.prompt_ids
        if delta.prompt_logprobs:
            told["prompt_logprobs"] = list(map(_scored, delta.prompt_logprobs))
        return told

    def add(self, delta: Delta) -> Iterator[Document]:
        """None as long as there is no text to show; what goes with it waits."""
        if (held := self.held.pop(delta.choice, None)) is not None:
            held.merge(delta)
            delta = held
        if not delta.parts and delta.finish_reason is None:
            self.held[delta.choice] = delta
            return
        ids = delta.token_ids
        for choice in self.choices(delta):
            if self.tells_ids:
                choice["token_ids"], ids = ids, []
            yield self.chunk(choice)

    def finish(self) -> Iterator[Document]:
        if self.includes_usage:
            yield self.head | {"choices": [], "usage": self._usage()}

    def fail(self, error: HttpError) -> Iterator[Document]:
        yield error.document

    def whole(self, deltas: Sequence[Delta]) -> Document:
        choices = [self.choice(delta) for delta in deltas]
        for choice, delta in zip(choices, deltas if self.tells_ids else (), strict=False):
            choice["token_ids"] = delta.token_ids
        return self.head | {"choices": choices, "usage": self._usage()}

    def chunk(self, choice: Document) -> Document:
        chunk = self.head | {"choices": [choice]}
        if self.includes_usage:
            chunk["usage"] = self._usage() if self.continuous_usage else None
        return chunk

    def _usage(self) -> Document:
        usage = self.usage
        return {
            "prompt_tokens": usage.prompt,
            "completion_tokens": usage.completion,
            "total_tokens": usage.prompt + usage.completion,
            "prompt_tokens_details": {"cached_tokens": usage.cached},
            "completion_tokens_details": {"reasoning_tokens": usage.reasoning},
        }


def _scored(chosen: TokenLogprob) -> Document | None:
    """A prompt's token and the likeliest in its place, by their ids."""
    if chosen.logprob is None:
        return None
    ranked = [*enumerate(chosen.top, start=1), (chosen.rank, chosen)]
    told: Document = {}
    for rank, each in ranked:
        scored = {"logprob": finite(each.logprob), "rank": rank, "decoded_token": each.text}
        told.setdefault(str(each.token_id), scored)
    return told


def logprob_documents(logprobs: Sequence[TokenLogprob]) -> list[Document]:
    """Tokens, their log-probabilities and the likeliest others, as chat and responses have it."""
    return [
        token_document(each) | {"top_logprobs": [token_document(t) for t in each.top]}
        for each in logprobs
    ]


def token_document(each: TokenLogprob) -> Document:
    """A token and its log-probability."""
    return {"token": each.text, "logprob": finite(each.logprob), "bytes": list(each.raw)}


def finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, LEAST_LOGPROB)
