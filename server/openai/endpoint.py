"""A request whose answer comes in parts, from its body to its last event, whatever its endpoint.

    body → parse → images → submit → first delta or refusal → headers → events, or one document

A stream's headers wait for the first delta, so that refusals and early failures are real status
codes; what fails later is an event. What an answer looks like is its Reply's matter.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar

from anyio.to_thread import run_sync as in_thread
from starlette.types import Receive, Scope, Send

from batching.errors import ClientGone
from server.core.answer_stream import AnswerStream, TokenStream, UsageCounts
from server.core.cache_namespace import cache_namespace
from server.core.settings import Settings
from server.core.worker_client import Deadlines, WorkerClient
from server.http.errors import HttpError, as_http_error
from server.http.json import Document, JsonBodyParser, to_json
from server.http.request import read_json_request, send_json
from server.http.sse import COMMENT, DONE, EventStream
from server.openai.images import ImageLoader
from server.openai.models import ModelNames
from worker.messages.deltas import Delta
from worker.messages.generation import Chat, GenerationInput

log = logging.getLogger("onequeue.answers")

# Documents of an answer, or of a delta: more are made off the event loop.
INLINE_DOCUMENTS = 64
D = TypeVar("D")


class ResponseBuilder(ABC, Generic[D]):
    """The answer to one request: events while it is made, as they are sent, or one document."""

    streams: bool  # it is sent as events
    media = b"application/json"  # of what `whole` gives

    @abstractmethod
    def documents(self, delta: D) -> int:
        """About how many a delta becomes: tokens' log-probabilities, segments of speech."""

    def begin(self, first: Sequence[D]) -> Iterator[bytes]:
        """The events before those of the first deltas."""
        return iter(())

    @abstractmethod
    def add(self, delta: D) -> Iterator[bytes]:
        """The events of what is new."""

    @abstractmethod
    def finish(self) -> Iterator[bytes]:
        """The events after the last delta's."""

    @abstractmethod
    def fail(self, error: HttpError) -> Iterator[bytes]:
        """The events of a failure after the start."""

    def last(self) -> bytes:
        """What ends a stream, however the request ended."""
        return DONE

    @abstractmethod
    def whole(self, deltas: Sequence[D]) -> Document | bytes:
        """The answer at once, from all deltas."""


R = TypeVar("R", bound=ResponseBuilder[Any])


@dataclass(eq=False)
class Endpoint(ABC, Generic[R]):
    """A bare ASGI app."""

    settings: Settings
    worker_client: WorkerClient
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
                return await self._send_whole(send, reply, await stream.collect())
            first = await stream.read()
            try:
                events = EventStream(scope, send, stream.arrival.set)
                await events.run(partial(self._send, scope, reply, stream, first))
            except ClientGone as error:
                self.worker_client.metrics.errors.labels("client_gone").inc()
                log.info("stream ended id=%s because=%r", scope["request_id"].decode(), str(error))

    async def _send_whole(self, send: Send, reply: R, deltas: list[Any]) -> None:
        large = sum(map(reply.documents, deltas)) > INLINE_DOCUMENTS
        content = await in_thread(reply.whole, deltas) if large else reply.whole(deltas)
        await self.keep(reply)
        if large and not isinstance(content, bytes):
            content = await in_thread(to_json, content)
        await send_json(send, content, media=reply.media)

    async def _send(
        self, scope: Scope, reply: R, stream: AnswerStream[Any], first: list[Any], to: EventStream
    ) -> None:
        """All events of a stream, a failure's too. What sending raises is the connection's."""
        send: Send = scope["send"]
        async for event in self._events(scope, reply, stream, first):
            await send({"type": "http.response.body", "body": event, "more_body": True})
            to.sent += 1

    async def _events(
        self, scope: Scope, reply: R, stream: AnswerStream[Any], first: list[Any]
    ) -> AsyncIterator[bytes]:
        try:
            async for event in events_of(reply, stream, first):
                yield event
        except ClientGone:
            raise
        except Exception as error:
            for event in reply.fail(self.failed(error, scope)):
                yield event
        await self.keep(reply)
        yield reply.last()

    def failed(self, error: Exception, scope: Scope) -> HttpError:
        """Counts a failure; its envelope."""
        envelope = as_http_error(error, scope, self.settings.debug)
        self.worker_client.metrics.errors.labels(envelope.kind).inc()
        return envelope


async def events_of(
    reply: ResponseBuilder[D], stream: AnswerStream[D], deltas: Sequence[D]
) -> AsyncIterator[bytes]:
    """An answer's events, from its first deltas on; a comment when the connection was idle."""
    for event in reply.begin(deltas):
        yield event
    while True:
        for delta in deltas:
            events = reply.add(delta)
            if reply.documents(delta) > INLINE_DOCUMENTS:
                events = iter(await in_thread(list, events))
            for event in events:
                yield event
        if not stream.unfinished:
            break
        deltas = await stream.read()
        if not deltas and stream.unfinished:
            yield COMMENT
    for event in reply.finish():
        yield event


class GenerationResponseBuilder(ResponseBuilder[Delta]):
    """`payloads` are what it asks the language model for."""

    def __init__(self, payloads: list[GenerationInput], streams: bool) -> None:
        self.payloads = payloads
        self.streams = streams
        self.usage = UsageCounts()
        self.cache_namespace = b""

    def documents(self, delta: Delta) -> int:
        return len(delta.logprobs) + len(delta.prompt_logprobs)


G = TypeVar("G", bound=GenerationResponseBuilder)


@dataclass(eq=False)
class GenerationEndpoint(Endpoint[G]):
    blocks: ClassVar = False  # whether parsing even a small body would hold up the loop

    images: ImageLoader
    parsing: JsonBodyParser = field(init=False, default_factory=JsonBodyParser)

    @abstractmethod
    def parse(self, body: bytes) -> G:
        """What is asked for; raises InvalidInput. In a pool thread if the body is large."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, deadlines = await read_json_request(scope, receive)
        reply = await self.parsing.run(self.parse, body, deadlines.first, self.blocks)
        salt = reply.payloads[0].cache_salt
        reply.cache_namespace = cache_namespace(self.models.id, scope["api_key"], salt)
        for n, payload in enumerate(reply.payloads):
            if isinstance(payload.prompt, Chat) and payload.prompt.images:
                fetched = self.images.fetched(scope, receive, payload.prompt, deadlines.first)
                reply.payloads[n] = replace(payload, prompt=await fetched)
        await self.answer(scope, receive, send, reply, deadlines)

    def submit(self, reply: G, deadlines: Deadlines, receive: Receive | None) -> TokenStream:
        given = reply.payloads, deadlines, reply.usage, receive, reply.cache_namespace
        return TokenStream(self.worker_client, "generation", *given)
