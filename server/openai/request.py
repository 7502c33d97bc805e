"""A request whose answer comes in parts, from its body to its last event, whatever its endpoint.

    body → parse → images → submit → first delta or refusal → headers → events, or one document

A stream's headers wait for the first delta, so that refusals and early failures are real status
codes; what fails later is an event. What an answer looks like is its Reply's matter.
"""

import logging
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar

import orjson
from starlette.types import Receive, Scope, Send

from batching.errors import ClientGone
from server.answer_stream import AnswerStream, TokenStream, Usage
from server.cache_root import cache_root
from server.engine import Deadlines, Engine
from server.http.errors import HttpError, as_http_error
from server.http.json import Document, Parsing
from server.http.request import read_json_request, send_json
from server.http.sse import COMMENT, DONE, EventStream, data_frame
from server.openai.logprobs import prompt_document
from server.openai.models import ModelNames
from server.openai.params import GenerationRequest
from server.openai.pictures import Pictures
from server.settings import Settings
from worker.deltas import Delta, Part
from worker.generation_input import Chat, GenerationInput

log = logging.getLogger("onequeue.answers")

TEXT = secrets.token_hex()  # where a chunk's text goes, in a template; nothing else is like it
D = TypeVar("D")


class Reply(ABC, Generic[D]):
    """The answer to one request: events while it is made, as they are sent, or one document."""

    streams: bool  # it is sent as events
    media = b"application/json"  # of what `whole` gives

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
            first = await stream.read()
            try:
                events = EventStream(scope, send, stream.arrival.set)
                await events.run(partial(self._send, scope, reply, stream, first))
            except ClientGone as error:
                self.engine.metrics.errors.labels("client_gone").inc()
                log.info("stream ended id=%s because=%r", scope["request_id"].decode(), str(error))

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
        self.engine.metrics.errors.labels(envelope.kind).inc()
        return envelope


async def events_of(
    reply: Reply[D], stream: AnswerStream[D], deltas: Sequence[D]
) -> AsyncIterator[bytes]:
    """An answer's events, from its first deltas on; a comment when the connection was idle."""
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
            yield COMMENT
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
        body, deadlines = await read_json_request(scope, receive)
        reply = await self.parsing.run(self.parse, body, deadlines.first, self.blocks)
        salt = reply.payloads[0].cache_salt
        root = cache_root(self.models.id, scope["api_key"], salt)
        reply.payloads = [replace(each, cache_root=root) for each in reply.payloads]
        for n, payload in enumerate(reply.payloads):
            if isinstance(payload.prompt, Chat) and payload.prompt.pictures:
                given = payload.prompt, payload.cache_root, deadlines.first
                fetched = self.pictures.fetched(scope, receive, *given)
                reply.payloads[n] = replace(payload, prompt=await fetched)
        await self.answer(scope, receive, send, reply, deadlines)

    def submit(self, reply: G, deadlines: Deadlines, receive: Receive | None) -> TokenStream:
        given = reply.payloads, deadlines, reply.usage, receive
        return TokenStream(self.engine, "generation", *given)


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
        # Whether chunks of text differ in nothing else; what is around the text, by choice.
        self._alike = not (self.scored or self.tells_ids or self.continuous_usage)
        self._around: dict[int, Sequence[bytes]] = {}

    @abstractmethod
    def choice(self, delta: Delta) -> Document:
        """A choice as a whole, or what a delta adds to it."""

    def choices(self, delta: Delta) -> Iterator[Document]:
        """Choices, one a chunk, that say what a delta adds."""
        yield self.choice(delta)

    def of_prompt(self, delta: Delta) -> Document:
        """What was asked for about a prompt's tokens, of the first delta; as vLLM has it."""
        fields: Document = {}
        if delta.prompt_ids:
            fields["prompt_token_ids"] = delta.prompt_ids
        if delta.prompt_logprobs:
            fields["prompt_logprobs"] = list(map(prompt_document, delta.prompt_logprobs))
        return fields

    def add(self, delta: Delta) -> Iterator[bytes]:
        """None as long as there is no text to show; what goes with it waits."""
        if (held := self.held.pop(delta.choice, None)) is not None:
            held.merge(delta)
            delta = held
        ends, parts = delta.finish_reason is not None, delta.parts
        if self._alike and len(parts) == 1 and parts[0].kind == "content" and not ends:
            before, after = self._around.get(delta.choice) or self._text_chunk(delta.choice)
            yield before + orjson.dumps(parts[0].text) + after
        elif parts or ends:
            ids = delta.token_ids
            for choice in self.choices(delta):
                if self.tells_ids:
                    choice["token_ids"], ids = ids, []
                yield data_frame(self.chunk(choice))
        else:
            self.held[delta.choice] = delta

    def _text_chunk(self, choice: int) -> Sequence[bytes]:
        """What is before and after the text in each of a choice's chunks."""
        [made] = self.choices(Delta(choice, [Part("content", TEXT)]))
        around = data_frame(self.chunk(made)).split(orjson.dumps(TEXT))
        self._around[choice] = around
        return around

    def finish(self) -> Iterator[bytes]:
        if self.includes_usage:
            yield data_frame(self.head | {"choices": [], "usage": self._usage()})

    def fail(self, error: HttpError) -> Iterator[bytes]:
        yield data_frame(error.document)

    def whole(self, deltas: Sequence[Delta]) -> Document:
        choices = [self.choice(delta) for delta in deltas]
        if self.tells_ids:
            for choice, delta in zip(choices, deltas, strict=True):
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
