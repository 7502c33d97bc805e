"""The endpoints of JSON bodies, and the path of a request whose response is made of deltas.

    body → parse → media → submit → first delta or refusal → headers → events, or one document

The headers of a stream wait for the first delta, so refusals and early failures have real status
codes. After SSE_KEEPALIVE_S the stream opens with comments; a later failure is an event. A
ResponseBuilder turns deltas into the response's bytes.
"""

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar, cast

from anyio.to_thread import run_sync
from msgspec import Struct
from starlette.types import Receive, Scope, Send

from batching.errors import ClientGone
from server.apis.openai.media import MediaLoader, check_media
from server.apis.openai.models import ModelGroup, NamedModel, UnknownModel
from server.apis.openai.request_fields import GenerationRequest, decode
from server.core.delta_stream import DeltaStream, TokenStream, UsageCounts
from server.core.settings import Settings
from server.core.worker_client import IncomingRequest, WorkerClient
from server.http.errors import HttpError
from server.http.json import Header, JsonBodyParser, parse_json, to_json
from server.http.request import count_failure, read_json_request, send_json
from server.http.sse import COMMENT, DONE, EventStream, data_frame
from worker.messages.deltas import Delta
from worker.messages.generation import Chat, GenerationInput

# Larger deltas and responses are encoded in a pool thread.
MAX_INLINE_ENTRIES = 64
CHUNKS = "With stream: true. Each event is a chunk, the last is [DONE]."
D = TypeVar("D")


class ResponseBuilder(ABC, Generic[D]):
    """Builds one response from its deltas: server-sent events, or one document.

    `streams`: the client has asked for events. `media_type` is that of a document."""

    streams: bool
    media_type = b"application/json"
    keep_alive = COMMENT  # sent where the connection is idle
    headers: Sequence[Header] = ()  # of the response, beside those of every response

    def entries(self, delta: Any) -> int:
        """Return about how many tokens are encoded for a delta, beside its text."""
        return len(delta.logprobs) + len(getattr(delta, "prompt_logprobs", ()))

    def start(self, deltas: Sequence[D]) -> Iterator[bytes]:
        """Yield the events before those of the first deltas."""
        return iter(())

    @abstractmethod
    def add(self, delta: D) -> Iterator[bytes]:
        """Yield the events of a delta."""

    def finish(self) -> Iterator[bytes]:
        """Yield the events after those of the last delta."""
        return iter(())

    def fail(self, error: HttpError) -> Iterator[bytes]:
        """Yield the events of a failure after the start."""
        yield data_frame(error.document)

    def refuse(self, error: HttpError) -> bytes:
        """Return the events of a failure before the start, which end the stream."""
        return b"".join(self.fail(error)) + self.end()

    def end(self) -> bytes:
        """Return the last event of the stream, after success and failure alike; it may be empty."""
        return DONE

    @abstractmethod
    def build(self, deltas: Sequence[D]) -> Struct | bytes:
        """Return the document, made of all deltas."""


async def respond(
    scope: Scope,
    send: Send,
    stream: DeltaStream[D],
    builder: ResponseBuilder[D],
    before_end: Callable[[], Awaitable[object]] | None = None,
) -> None:
    """Send the response to a request that has been submitted.

    `before_end` is awaited before the last event, or the document, is sent."""
    if not builder.streams:
        deltas = await stream.collect()
        headers = [*stream.timing_headers(), *builder.headers]
        large = sum(map(builder.entries, deltas)) > MAX_INLINE_ENTRIES
        content = await run_sync(builder.build, deltas) if large else builder.build(deltas)
        if before_end:
            await before_end()
        if large and not isinstance(content, bytes):
            content = await run_sync(to_json, content)
        return await send_json(send, content, headers=headers, media=builder.media_type)
    wait_s = scope["app"].settings.sse_keepalive_s
    timer = asyncio.get_running_loop().call_later(wait_s, stream.arrival.set)
    try:
        deltas = await stream.read()
    finally:
        timer.cancel()
    events = _events(scope, stream, builder, deltas, before_end)
    try:
        headers = [*stream.timing_headers(), *builder.headers]
        await EventStream(scope, send, stream.arrival.set, headers).run(events)
    except ClientGone as error:
        count_failure(error, scope)


async def _events(
    scope: Scope,
    stream: DeltaStream[D],
    builder: ResponseBuilder[D],
    deltas: Sequence[D],
    before_end: Callable[[], Awaitable[object]] | None,
) -> AsyncIterator[bytes]:
    """Yield all events, also those of a failure. Raises ClientGone."""
    try:
        while not deltas and stream.unfinished:
            yield COMMENT
            deltas = await stream.read()
    except ClientGone:
        raise
    except Exception as error:
        refusal = count_failure(error, scope)
        scope["record"].status = refusal.status
        yield builder.refuse(refusal)
        return
    try:
        async for event in build_events(builder, stream, deltas):
            yield event
    except ClientGone:
        raise
    except Exception as error:
        for event in builder.fail(count_failure(error, scope)):
            yield event
    if before_end:
        await before_end()
    if last := builder.end():
        yield last


async def build_events(
    builder: ResponseBuilder[D], stream: DeltaStream[D], deltas: Sequence[D]
) -> AsyncIterator[bytes]:
    """Yield the events of a response, from its first deltas on.

    An idle connection gets the builder's `keep_alive`; see EventStream."""
    for event in builder.start(deltas):
        yield event
    while True:
        for delta in deltas:
            events = builder.add(delta)
            if builder.entries(delta) > MAX_INLINE_ENTRIES:
                events = iter(await run_sync(list, events))
            for event in events:
                yield event
        if not stream.unfinished:
            break
        deltas = await stream.read()
        if not deltas and stream.unfinished:
            yield builder.keep_alive
    for event in builder.finish():
        yield event


def consume(events: Iterator[object]) -> None:
    """Build events that are not sent, for their effect on the response."""
    deque(events, maxlen=0)


# ── endpoints ──

R = TypeVar("R")


@dataclass(eq=False)
class BodyEndpoint(ABC, Generic[R]):
    """An ASGI app that takes JSON bodies. Lines of batches are read and served without the app."""

    parse_blocks: ClassVar = False  # parsing takes long, or waits, even for a small body

    settings: Settings
    worker_client: WorkerClient
    models: ModelGroup
    body_parser: JsonBodyParser = field(init=False, default_factory=JsonBodyParser)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, incoming = await read_json_request(scope, receive)
        await self.serve(incoming, send, await self.read(incoming, body))

    @abstractmethod
    def parse(self, body: bytes, scope: Scope) -> R:
        """Return the checked request, or raise InvalidInput. In a pool thread for large bodies."""

    async def read(self, incoming: IncomingRequest, body: bytes) -> R:
        """Return the checked request of a body. Raises InvalidInput."""
        parse, deadline = partial(self.parse, scope=incoming.scope), incoming.deadlines.first
        try:
            return await self.body_parser.run(parse, body, deadline, self.parse_blocks)
        except UnknownModel:
            await self.worker_client.manager.rescan()
        return await self.body_parser.run(parse, body, deadline, self.parse_blocks)

    @abstractmethod
    async def serve(self, incoming: IncomingRequest, send: Send, request: R) -> None:
        """Submit a request, and send the response."""


@dataclass(frozen=True)
class ParsedRequest:
    """A checked body, and one input for each of its prompts."""

    body: GenerationRequest
    inputs: Sequence[GenerationInput]


P = TypeVar("P", bound=ParsedRequest)


@dataclass(eq=False)
class GenerationEndpoint(BodyEndpoint[P]):
    """An endpoint for one kind of request. `make_builder` returns the builder of a response, whose
    usage is counted while its deltas are read."""

    media: MediaLoader
    kind: type[GenerationRequest]
    make_builder: Callable[[P, UsageCounts, NamedModel], ResponseBuilder[Delta]]

    def model_of(self, request: P) -> NamedModel:
        return self.models.find(request.body.model)

    def parse(self, body: bytes, scope: Scope) -> P:
        max_choices = self.settings.max_queue_size
        # A list has prompts, or the tokens of one prompt.
        max_entries = max(max_choices, self.models.max_entries)
        request = decode(parse_json(body), self.kind, self.models.id_for, scope, max_entries)
        parsed: Any = ParsedRequest(request, request.generation_inputs(max_choices))
        return cast(P, parsed)

    async def read(self, incoming: IncomingRequest, body: bytes) -> P:
        """Return the checked request of a body, with the bytes of its media. Raises InvalidInput
        and the errors of fetching."""
        request = await super().read(incoming, body)
        chat = request.inputs[0].prompt  # a chat is the only input of its request
        if not (isinstance(chat, Chat) and chat.media):
            return request
        check_media(chat, self.model_of(request).text_info)
        chat = await self.media.load(incoming, chat)
        return replace(request, inputs=[replace(request.inputs[0], prompt=chat)])

    async def serve(self, incoming: IncomingRequest, send: Send, request: P) -> None:
        with self.submit(incoming, request) as stream:
            builder = self.make_builder(request, stream.usage, self.model_of(request))
            await respond(incoming.scope, send, stream, builder)

    def submit(self, incoming: IncomingRequest, request: P) -> TokenStream:
        model = self.model_of(request)
        context = incoming.scope["context"]
        if request.body.priority and not context.is_stream:  # a batch is one request
            incoming.scope["context"] = replace(context, rank=request.body.priority)
        namespace = incoming.scope["context"].cache_namespace(model.id, request.body.cache_salt)
        inputs = [
            replace(prompt, adapter=model.adapter, cache_namespace=namespace)
            for prompt in request.inputs
        ]
        return TokenStream(self.worker_client, model.registry_name, inputs, incoming)
