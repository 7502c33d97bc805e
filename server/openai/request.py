"""The way of a request through HTTP whose answer comes in parts, whatever its endpoint.

    body → parse → images → submit → first delta or refusal → headers → events, or one document

A stream's headers wait for the first delta, so that refusals and early failures are real status
codes; what fails later is an event. What an answer looks like is its Reply's matter.
"""

import hashlib
import logging
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Generic, TypeVar

import orjson
from starlette.types import Receive, Scope, Send

from batching.errors import ClientGone
from server.engine import Engine
from server.http.errors import HttpError, as_http_error
from server.http.json import Document, Parsing
from server.http.request import Deadlines, read_json_request, send_json
from server.http.sse import DONE, EventStream
from server.openai.logprobs import prompt_document
from server.openai.models import ModelNames
from server.openai.params import GenerationRequest
from server.openai.pictures import Pictures
from server.settings import Settings
from server.submission import AnswerStream, TokenStream, Usage
from worker.deltas import Delta
from worker.protocol import Chat, GenerationInput

log = logging.getLogger("onequeue.answers")

_SECRET = secrets.token_bytes(32)  # so that nobody finds a key by its digests
D = TypeVar("D")


class Reply(ABC, Generic[D]):
    """The answer to one request: events while it is made, or one document.

    Events may share parts with later ones: send each before the next is made.
    """

    streams: bool  # it is sent as events
    media = b"application/json"  # of what `whole` gives

    def begin(self, first: Sequence[D]) -> Iterator[Document]:
        """The events before those of the first deltas."""
        return iter(())

    @abstractmethod
    def add(self, delta: D) -> Iterator[Document]:
        """The events of what is new."""

    @abstractmethod
    def finish(self) -> Iterator[Document]:
        """The events after the last delta's."""

    @abstractmethod
    def fail(self, error: HttpError) -> Iterator[Document]:
        """The events of a failure after the start."""

    @abstractmethod
    def whole(self, deltas: Sequence[D]) -> Document | bytes:
        """The answer at once, from all deltas."""

    def frame(self, event: Document) -> bytes:
        """An event as it is sent."""
        return b"data: %b\n\n" % orjson.dumps(event)

    def last_frame(self) -> bytes:
        """What ends a stream, however the request ended."""
        return DONE


R = TypeVar("R", bound=Reply[Any])


@dataclass(eq=False)
class Endpoint(ABC, Generic[R]):
    """A bare ASGI app."""

    settings: Settings
    engine: Engine
    models: ModelNames

    @abstractmethod
    def submit(self, reply: R, deadlines: Deadlines, receive: Receive) -> AnswerStream[Any]:
        """What it asks the model for, on its way; raises a Refused."""

    async def keep(self, reply: R) -> bool:
        """Store an answer before its last event is sent, so that a client can build on it."""
        return False

    async def answer(
        self, scope: Scope, receive: Receive, send: Send, reply: R, deadlines: Deadlines
    ) -> None:
        with self.submit(reply, deadlines, receive) as stream:
            if not reply.streams:
                content = reply.whole(await stream.collect())
                await self.keep(reply)
                return await send_json(send, content, media=reply.media)
            frames = self._frames(scope, reply, stream, await stream.read())
            try:
                await EventStream(send, stream.arrival.set).send_all(frames)
            except ClientGone as error:
                self.engine.metrics.errors.labels("client_gone").inc()
                log.info("stream ended id=%s because=%r", scope["request_id"].decode(), str(error))

    async def _frames(
        self, scope: Scope, reply: R, stream: AnswerStream[Any], first: list[Any]
    ) -> AsyncIterator[bytes | None]:
        """All that a stream says, a failure too; None if the reader was woken."""
        try:
            async for event in events(reply, stream, first):
                yield None if event is None else reply.frame(event)
        except ClientGone:
            raise
        except Exception as error:
            for event in reply.fail(self.failed(error, scope)):
                yield reply.frame(event)
        await self.keep(reply)
        yield reply.last_frame()

    def failed(self, error: Exception, scope: Scope) -> HttpError:
        """Counts a failure; its envelope."""
        envelope = as_http_error(error, scope, self.settings.debug)
        self.engine.metrics.errors.labels(envelope.kind).inc()
        return envelope


async def events(
    reply: Reply[D], stream: AnswerStream[D], deltas: list[D]
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
        if not deltas and stream.unfinished:
            yield None
    for event in reply.finish():
        yield event


class GenerationReply(Reply[Delta]):
    """`payloads` are what it asks the language model for."""

    def __init__(self, payloads: list[GenerationInput], streams: bool) -> None:
        self.payloads = payloads
        self.streams = streams
        self.usage = Usage()


G = TypeVar("G", bound=GenerationReply)


@dataclass(eq=False)
class GenerationEndpoint(Endpoint[G]):
    blocks: ClassVar = False  # whether parsing even a small body would hold up the loop

    pictures: Pictures
    parsing: Parsing = field(init=False, default_factory=Parsing)

    @abstractmethod
    def parse(self, body: bytes) -> G:
        """What is asked for; raises InvalidInput. In a pool thread if the body is large."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, deadlines = await read_json_request(scope, receive, "generation")
        reply = await self.parsing.run(self.parse, body, deadlines.first, self.blocks)
        payloads, reply.payloads = reply.payloads, []
        root = cache_root(self.models.names.id, scope["api_key"], payloads[0].cache_salt)
        for payload in payloads:
            prompt = payload.prompt
            if isinstance(prompt, Chat) and prompt.pictures:
                owned = tuple(replace(each, root=root) for each in prompt.pictures)
                prompt = replace(prompt, pictures=owned)
                prompt = await self.pictures.fetched(scope, receive, prompt, deadlines.first)
            reply.payloads.append(replace(payload, prompt=prompt, cache_root=root))
        await self.answer(scope, receive, send, reply, deadlines)

    def submit(self, reply: G, deadlines: Deadlines, receive: Receive | None) -> TokenStream:
        given = reply.payloads, deadlines, reply.usage, receive
        return TokenStream(self.engine, "generation", *given)


P = TypeVar("P", bound=Any)  # a payload, which has a `cache_root`


def rooted(payloads: Sequence[P], scope: Scope, model: str, salt: str | None) -> list[P]:
    """A request's payloads, which share their prefixes from here on."""
    root = cache_root(model, scope["api_key"], salt or "")
    return [replace(each, cache_root=root) for each in payloads]


def cache_root(model: str, key: bytes, salt: str) -> bytes:
    """Whose prefix cache a request shares: a shared one tells by its times what others have asked.

    16 bytes that say nothing of what they are made of. Without API_KEYS there is one room for all;
    a client's salt makes smaller rooms within that of its key, never larger ones."""
    digest = hashlib.blake2b(digest_size=16, key=_SECRET)
    for part in (model.encode(), key, salt.encode()):
        digest.update(len(part).to_bytes(8))
        digest.update(part)
    return digest.digest()


class ChoicesReply(GenerationReply):
    """Numbered choices, in chunks or together: what chat and text completions have in common."""

    id_prefix: str
    objects: tuple[str, str]  # what the document is called, and a chunk

    def __init__(self, request: GenerationRequest, payloads: list[GenerationInput]) -> None:
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
            told["prompt_logprobs"] = list(map(prompt_document, delta.prompt_logprobs))
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
