"""`POST /v1/responses`: items in, items out, whole, in events, or in the background.

    body → request, what it builds on (pool) → submit → deltas → response → store → answer

A response is stored before its end is told, so that whoever hears of it can build on it. One
that runs in the background is kept here until it has ended; looking responses up is done by
lookup.py.
"""

import asyncio
import contextlib
import logging
import math
import sqlite3
from dataclasses import dataclass, replace
from functools import partial

import anyio.to_thread
import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from batching.errors import ClientGone, InvalidInput
from server.engine import Engine
from server.http.body import Parsing, abort_on_disconnect, read_json_request
from server.http.errors import HttpError, as_http_error
from server.http.sse import EventStream
from server.metrics import Metrics
from server.openai.exchange import RunningRequest
from server.openai.models import ModelNames
from server.openai.params import decode
from server.openai.responses.items import documents
from server.openai.responses.output import ResponseOutput
from server.openai.responses.reply import ResponseReply, spend
from server.openai.responses.request import ResponseRequest
from server.openai.responses.store import Document, NotStored, ResponseStore, Stored, TooLarge
from server.settings import Settings
from worker.deltas import Delta
from worker.protocol import Chat, GenerationInput

log = logging.getLogger("onequeue.responses")

PATH = "/v1/responses"
MOST_UNSTORED = 1000
MOST_UNSTORED_BYTES = 64_000_000


@dataclass(slots=True)
class Job:
    """A response that runs in the background."""

    reply: ResponseReply
    exchange: RunningRequest
    task: "asyncio.Task[None]"


class Responses:
    """A bare ASGI app. `close` it once the engine has stopped."""

    def __init__(
        self,
        settings: Settings,
        engine: Engine,
        metrics: Metrics,
        models: ModelNames,
        store: ResponseStore,
    ) -> None:
        self.settings = settings
        self.engine = engine
        self.metrics = metrics
        self.models = models
        self.store = store
        # Answers in the background that `store` could not take.
        self.unstored = ResponseStore(":memory:", MOST_UNSTORED, MOST_UNSTORED_BYTES)
        self.jobs: dict[str, Job] = {}
        self.parsing = Parsing()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, deadlines = await read_json_request(
            scope, receive, self.settings, self.engine, "generation"
        )
        reply, payload = await self.parsing.run(self._prepare, body, deadlines.first, blocks=True)
        if payload.background:  # it begins when there is time for it
            deadlines = replace(deadlines, first=math.inf)
        exchange = RunningRequest(self.engine, self.metrics, [payload], deadlines)
        if payload.background:
            answer = json(reply.document)
            task = self.engine.loop.create_task(self._run(scope, reply, exchange))
            self.jobs[reply.id] = Job(reply, exchange, task)
            await answer(scope, receive, send)
            return
        self.engine.loop.create_task(abort_on_disconnect(receive, exchange.items))
        try:
            if reply.request.stream:
                first = await exchange.read()
                await self._stream(scope, send, reply, exchange, first)
            else:
                for delta in await exchange.collect():
                    spend(reply.add(delta))
                spend(reply.finish(exchange.usage))
                await self._keep(reply)
                await json(reply.document)(scope, receive, send)
        finally:
            exchange.close()

    def _prepare(self, body: bytes) -> tuple[ResponseReply, GenerationInput]:
        """In a pool thread: it may be long, and what it builds on is in the store."""
        request = decode(body, ResponseRequest, self.engine.generator.max_model_len)
        model = self.models.require(request.model)
        request.check()
        most_mb = self.settings.max_body_mb
        look_up = partial(self.store.items, most_bytes=most_mb * 1_000_000)
        try:
            items = documents(request.input, look_up)
        except TooLarge:
            large = f"input: the responses that its items are of exceed {most_mb:g} MB"
            raise InvalidInput(large, "input") from None
        payload = request.generation_input(self._before(request.previous_response_id), items)
        assert isinstance(payload.prompt, Chat)
        output = ResponseOutput(self.engine.call_id, payload.prompt.calls)
        return ResponseReply(request, items, model, output), payload

    def _before(self, id: str | None) -> list[Document]:
        """All items of the conversation that a response ended. As stored, it may be as large as
        it might be if it were sent."""
        if id is None:
            return []
        param, most_mb = "previous_response_id", self.settings.max_body_mb
        try:
            turns = self.store.chain(id, most_mb * 1_000_000)
        except TooLarge:
            raise InvalidInput(f"{param}: its conversation exceeds {most_mb:g} MB", param) from None
        except NotStored as error:
            if error.id in self.jobs:
                raise InvalidInput(f"{param}: {id!r} has not ended", param) from None
            raise not_found(error.id, param) from None
        return [item for turn in turns for item in (*turn.input, *turn.response["output"])]

    async def _stream(
        self,
        scope: Scope,
        send: Send,
        reply: ResponseReply,
        exchange: RunningRequest,
        deltas: list[Delta],
    ) -> None:
        events = EventStream(send, exchange.stream.wake)
        try:
            await events.open()
            try:
                await self._say(events, reply, exchange, deltas)
            except Exception as error:
                if isinstance(error, ClientGone):
                    raise
                self._fail(scope, reply, exchange, error)
            await self._keep(reply)
            await events.end(reply.frame(reply.ended()))
        except ClientGone as error:
            self.metrics.failed("client_gone")
            log.info("stream ended id=%s because=%r", scope["request_id"].decode(), str(error))
        finally:
            events.close()

    async def _say(
        self,
        events: EventStream,
        reply: ResponseReply,
        exchange: RunningRequest,
        deltas: list[Delta],
    ) -> None:
        for event in reply.begin():
            await events.write(reply.frame(event))
        while True:
            for delta in deltas:
                for event in reply.add(delta):
                    await events.write(reply.frame(event))
            if not exchange.unfinished:
                break
            deltas = await exchange.read()
            if not deltas:
                await events.comment()
        for event in reply.finish(exchange.usage):
            await events.write(reply.frame(event))

    async def _run(self, scope: Scope, reply: ResponseReply, exchange: RunningRequest) -> None:
        """In the background: whatever ends it is what its response says."""
        try:
            while exchange.unfinished:
                deltas = await exchange.read()
                spend(reply.begin())
                for delta in deltas:
                    spend(reply.add(delta))
            spend(reply.finish(exchange.usage))
        except ClientGone:
            reply.cancel(exchange.usage)
        except Exception as error:
            self._fail(scope, reply, exchange, error)
        finally:
            exchange.close()
        try:
            if not await self._keep(reply):  # nobody has been given it
                await anyio.to_thread.run_sync(self.unstored.put, reply.stored)
        finally:
            del self.jobs[reply.id]

    def _fail(
        self, scope: Scope, reply: ResponseReply, exchange: RunningRequest, error: Exception
    ) -> None:
        told = as_http_error(error, scope, self.settings.debug)
        self.metrics.failed(told.kind)
        reply.fail(str(told), isinstance(error, InvalidInput), exchange.usage)

    async def _keep(self, reply: ResponseReply) -> bool:
        """Store it if it is to be; where that fails, as on a full disk, it says so itself."""
        if not reply.request.stored:
            return False
        try:
            await anyio.to_thread.run_sync(self.store.put, reply.stored)
        except sqlite3.Error as error:
            log.error("response not stored id=%s error=%r", reply.id, error)
            self.metrics.not_stored.inc()
            reply.document["store"] = False
            return False
        return True

    async def find(self, id: str) -> Stored:
        """A response, ended or in the background; 404 if it is not known."""
        if (job := self.jobs.get(id)) is not None:
            return job.reply.stored
        for store in (self.store, self.unstored):
            with contextlib.suppress(NotStored):
                return await anyio.to_thread.run_sync(store.get, id)
        raise not_found(id, "id")

    async def delete(self, id: str) -> None:
        """404 if it is not known."""
        await self.cancel(id)
        for store in (self.store, self.unstored):
            with contextlib.suppress(NotStored):
                await anyio.to_thread.run_sync(store.delete, id)
                return
        raise not_found(id, "id")

    async def cancel(self, id: str) -> None:
        """End a response in the background, and wait until it has; nothing if there is none."""
        if (job := self.jobs.get(id)) is not None:
            for item in job.exchange.items:
                item.resolve(ClientGone("the response was cancelled"))
            await asyncio.wait([job.task])

    async def close(self) -> None:
        self.engine.give_up()
        if self.jobs:
            await asyncio.wait([job.task for job in self.jobs.values()])
        await anyio.to_thread.run_sync(self.store.close)
        self.unstored.close()


def json(content: object) -> Response:
    return Response(orjson.dumps(content), media_type="application/json")


def not_found(id: str, param: str) -> HttpError:
    return HttpError(404, f"there is no stored response {id[:100]!r}", param)
