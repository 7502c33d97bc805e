"""The way of a generation request through HTTP, whatever its endpoint.

    body → parse → submit → first delta or refusal → headers → chunks, or one document

A stream's headers wait for the first delta, so that refusals and early failures are real status
codes; what fails later is told in an event.
"""

import logging
from abc import ABC, abstractmethod

from starlette.types import Receive, Scope, Send

from batching.errors import ClientGone
from server.engine import Engine
from server.http.body import Parsing, abort_on_disconnect, read_json_request
from server.http.errors import as_http_error
from server.http.json import to_json
from server.http.sse import EventStream
from server.metrics import Metrics
from server.openai.exchange import RunningRequest
from server.openai.models import ModelNames
from server.openai.reply import Reply
from server.settings import Settings
from worker.deltas import Delta

log = logging.getLogger("onequeue.generation")


class GenerationEndpoint(ABC):
    """A bare ASGI app."""

    def __init__(
        self, settings: Settings, engine: Engine, metrics: Metrics, models: ModelNames
    ) -> None:
        self.settings = settings
        self.engine = engine
        self.metrics = metrics
        self.models = models
        self.parsing = Parsing()

    @abstractmethod
    def parse(self, body: bytes) -> Reply:
        """What is asked for; raises InvalidInput. In a pool thread if the body is large."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, deadlines = await read_json_request(
            scope, receive, self.settings, self.engine, "generation"
        )
        reply = await self.parsing.run(self.parse, body, deadlines.first)
        exchange = RunningRequest(self.engine, self.metrics, reply.payloads, deadlines)
        self.engine.loop.create_task(abort_on_disconnect(receive, exchange.items))
        try:
            if reply.streams:
                first = await exchange.read()
                await self._stream(scope, send, reply, exchange, first)
            else:
                await _whole(send, reply, exchange)
        finally:
            exchange.close()

    async def _stream(
        self, scope: Scope, send: Send, reply: Reply, exchange: RunningRequest, deltas: list[Delta]
    ) -> None:
        events = EventStream(send, exchange.stream.wake)
        request_id = scope["request_id"].decode()
        try:
            await events.open()
            try:
                await self._say(events, reply, exchange, deltas)
            except Exception as error:
                if isinstance(error, ClientGone):
                    raise
                told = as_http_error(error, scope, self.settings.debug)
                self.metrics.failed(told.kind)
                await events.event(to_json(told.document))
            await events.end()
        except ClientGone as error:
            self.metrics.failed("client_gone")
            log.info("stream ended id=%s because=%r", request_id, str(error))
        finally:
            events.close()

    async def _say(
        self, events: EventStream, reply: Reply, exchange: RunningRequest, deltas: list[Delta]
    ) -> None:
        usage = exchange.usage
        for chunk in reply.first_chunks(usage):
            await events.event(chunk)
        while True:
            for delta in deltas:
                for chunk in reply.chunks(delta, usage):
                    await events.event(chunk)
            if not exchange.unfinished:
                break
            deltas = await exchange.read()
            if not deltas:
                await events.comment()
        if reply.includes_usage:
            await events.event(reply.last_chunk(usage))


async def _whole(send: Send, reply: Reply, exchange: RunningRequest) -> None:
    content = reply.whole(await exchange.collect(), exchange.usage)
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(content)),
    ]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": content})
