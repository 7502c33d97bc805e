"""`POST /v1/responses`: items in, items out, whole, in events, or in the background.

    body → request, what it builds on (pool) → submit → deltas → response → store → answer

The way of every generation request (openai/request.py), with a store. A response that runs in the
background is read here, by nobody's connection, until it has ended; lookup.py finds it.
"""

import asyncio
import logging
import math
import sqlite3
from dataclasses import dataclass, replace
from functools import partial

import anyio.to_thread
from starlette.types import Receive, Scope, Send

from batching.errors import ClientGone, InvalidInput
from server.engine import Engine
from server.http.body import Deadlines
from server.http.errors import HttpError
from server.http.json import Document, send_json
from server.metrics import Metrics
from server.openai.models import ModelNames
from server.openai.params import decode
from server.openai.request import GenerationEndpoint, events
from server.openai.responses.events import ResponseReply
from server.openai.responses.items import documents
from server.openai.responses.request import ResponseRequest
from server.openai.responses.store import NotStored, ResponseStore, TooLarge
from server.settings import Settings
from server.token_stream import TokenStream

log = logging.getLogger("onequeue.responses")

MOST_UNSTORED = 1000
MOST_UNSTORED_BYTES = 64_000_000


@dataclass(slots=True)
class Job:
    """A response that runs in the background."""

    reply: ResponseReply
    stream: TokenStream
    task: "asyncio.Task[None]"


class Responses(GenerationEndpoint[ResponseReply]):
    """`close` it once the engine has stopped."""

    blocks = True  # what a request builds on is in the store

    def __init__(
        self,
        settings: Settings,
        engine: Engine,
        metrics: Metrics,
        models: ModelNames,
        store: ResponseStore,
    ) -> None:
        super().__init__(settings, engine, metrics, models)
        self.store = store
        # Answers in the background that `store` could not take.
        self.unstored = ResponseStore(":memory:", MOST_UNSTORED, MOST_UNSTORED_BYTES)
        self.jobs: dict[str, Job] = {}

    def parse(self, body: bytes) -> ResponseReply:
        request = decode(body, ResponseRequest, self.engine.generator.max_model_len)
        model = self.models.require(request.model)
        request.check()
        most_mb = self.settings.max_body_mb
        look_up = partial(self.store.items, most_bytes=most_mb * 1_000_000)
        try:
            items = documents(request.input, look_up)
        except TooLarge:
            large = f"the responses that its items are of exceed {most_mb:g} MB"
            raise InvalidInput.at("input", large) from None
        payload = request.generation_input(self._before(request.previous_response_id), items)
        return ResponseReply(request, payload, items, model, self.engine.generator.call_id)

    def _before(self, id: str | None) -> list[Document]:
        """All items of the conversation that a response ended. As stored, it may be as large as
        it might be if it were sent."""
        if id is None:
            return []
        path, most_mb = "previous_response_id", self.settings.max_body_mb
        try:
            turns = self.store.chain(id, most_mb * 1_000_000)
        except TooLarge:
            large = f"its conversation exceeds {most_mb:g} MB"
            raise InvalidInput.at(path, large) from None
        except NotStored as error:
            if error.id in self.jobs:
                raise InvalidInput.at(path, f"{id!r} has not ended") from None
            raise not_found(error.id, path) from None
        return [item for turn in turns for item in (*turn.input, *turn.response["output"])]

    async def answer(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        reply: ResponseReply,
        deadlines: Deadlines,
    ) -> None:
        if not reply.background:
            return await super().answer(scope, receive, send, reply, deadlines)
        # It begins when there is time for it.
        stream = self.submit(reply, replace(deadlines, first=math.inf))
        task = self.engine.loop.create_task(self._run(scope, reply, stream))
        self.jobs[reply.id] = Job(reply, stream, task)
        await send_json(send, reply.document)

    async def _run(self, scope: Scope, reply: ResponseReply, stream: TokenStream) -> None:
        """In the background: whatever ends it is what its response says."""
        try:
            async for _ in events(reply, stream, await stream.read()):
                pass
        except ClientGone:
            reply.cancel()
        except Exception as error:
            reply.fail(self.failed(error, scope))
        finally:
            stream.close()
        try:
            if not await self.keep(reply):  # nobody has been given it
                await anyio.to_thread.run_sync(self.unstored.put, reply.stored)
        finally:
            del self.jobs[reply.id]

    async def keep(self, reply: ResponseReply) -> bool:
        """Where it cannot be stored, as on a full disk, the response says so itself."""
        if not reply.document["store"]:
            return False
        try:
            await anyio.to_thread.run_sync(self.store.put, reply.stored)
        except sqlite3.Error as error:
            log.error("response not stored id=%s error=%r", reply.id, error)
            self.metrics.not_stored.inc()
            reply.document["store"] = False
            return False
        return True

    async def cancel(self, id: str) -> None:
        """End a response in the background, and wait until it has; nothing if there is none."""
        if (job := self.jobs.get(id)) is not None:
            for item in job.stream.items:
                item.resolve(ClientGone("the response was cancelled"))
            await asyncio.wait([job.task])

    async def close(self) -> None:
        self.engine.give_up()
        if self.jobs:
            await asyncio.wait([job.task for job in self.jobs.values()])
        await anyio.to_thread.run_sync(self.store.close)
        self.unstored.close()


def not_found(id: str, param: str) -> HttpError:
    return HttpError(404, f"there is no stored response {id[:100]!r}", param)
