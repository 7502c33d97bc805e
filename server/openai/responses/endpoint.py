"""`/v1/responses`: items in, items out, whole, in events, or in the background; `{id}`: once more.

    body → request, what it builds on (pool) → submit → deltas → response → store → answer

The way of every generation request (openai/request.py), with a store. A response that runs in the
background is read here, by nobody's connection, until it has ended.
"""

import asyncio
import contextlib
import logging
import math
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Literal, NamedTuple, TypeVar

import anyio.to_thread
from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from batching.errors import ClientGone, InvalidInput
from batching.request_queue import WorkItem
from server.core.answer_stream import TokenStream
from server.core.worker_client import Deadlines
from server.http.errors import HttpError
from server.http.json import Document, parse_json
from server.http.request import JsonEndpoint, send_json
from server.openai.endpoint import GenerationEndpoint, events_of
from server.openai.request_fields import convert, decode
from server.openai.responses.events import ResponsesResponseBuilder
from server.openai.responses.items import documents
from server.openai.responses.request import ResponseRequest
from server.openai.responses.store import NotStored, ResponseStore, Stored, TooLarge

log = logging.getLogger("onequeue.responses")

PATH = "/v1/responses/{id}"
MOST_UNSTORED = 1000
MOST_UNSTORED_BYTES = 64_000_000

T = TypeVar("T")


class Job(NamedTuple):
    """A response that runs in the background."""

    reply: ResponsesResponseBuilder
    items: list[WorkItem]
    task: "asyncio.Task[None]"


class Page(Struct):
    """Which of a response's input items are asked for: newest first unless asked otherwise."""

    order: Literal["asc", "desc"] = "desc"
    limit: Annotated[int, Meta(ge=1, le=100)] = 20
    after: Annotated[str | None, Meta(description="The id of an item")] = None

    def of(self, items: list[Document]) -> tuple[list[Document], bool]:
        """Some of the items, and whether there are more."""
        items, start = items[:: -1 if self.order == "desc" else 1], 0
        if self.after is not None:
            ids = [item["id"] for item in items]
            if self.after not in ids:
                raise InvalidInput.at("after", f"there is no input item {self.after[:100]!r}")
            start = ids.index(self.after) + 1
        end = start + self.limit
        return items[start:end], end < len(items)


@dataclass(eq=False)
class Responses(GenerationEndpoint[ResponsesResponseBuilder]):
    """Bodies are posted here; `routes` find responses, 404 for one that neither is stored nor runs
    in the background. `close` it once the worker client has stopped."""

    blocks = True  # what a request builds on is in the store

    store: ResponseStore

    def __post_init__(self) -> None:
        # Answers in the background that `store` could not take.
        self.unstored = ResponseStore(":memory:", MOST_UNSTORED, MOST_UNSTORED_BYTES)
        self.jobs: dict[str, Job] = {}

    def routes(self) -> list[Route]:
        return [
            Route(PATH, JsonEndpoint(self.one), methods=["GET", "DELETE"]),
            Route(PATH + "/input_items", JsonEndpoint(self.input_items), methods=["GET"]),
            Route(PATH + "/cancel", JsonEndpoint(self.cancelled), methods=["POST"]),
        ]

    # ── a new one ──

    def parse(self, body: bytes) -> ResponsesResponseBuilder:
        most = self.worker_client.generator.max_model_len
        request = decode(parse_json(body), ResponseRequest, self.models.called, most)
        most_mb = self.settings.max_body_mb
        look_up = partial(self.store.items, most_bytes=most_mb * 1_000_000)
        try:
            items = documents(request.input, look_up)
        except TooLarge:
            large = f"the responses that its items are of exceed {most_mb:g} MB"
            raise InvalidInput.at("input", large) from None
        payload = request.generation_input(self._before(request.previous_response_id), items)
        return ResponsesResponseBuilder(request, payload, items, self.worker_client.generator)

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
            raise _not_found(error.id, path) from None
        return [item for turn in turns for item in (*turn.input, *turn.response["output"])]

    async def answer(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        reply: ResponsesResponseBuilder,
        deadlines: Deadlines,
    ) -> None:
        if not reply.payloads[0].background:
            return await super().answer(scope, receive, send, reply, deadlines)
        deadlines = replace(deadlines, first=math.inf)  # it begins when there is time for it
        stream = self.submit(reply, deadlines, None)
        task = self.worker_client.loop.create_task(self._run(scope, reply, stream))
        self.jobs[reply.id] = Job(reply, stream.items, task)
        await send_json(send, reply.document)

    async def _run(
        self, scope: Scope, reply: ResponsesResponseBuilder, stream: TokenStream
    ) -> None:
        """In the background: whatever ends it is what its response says."""
        with stream:
            try:
                async for _ in events_of(reply, stream, await stream.read()):
                    pass  # nobody is sent any
            except ClientGone:
                reply.break_off("cancelled")
            except Exception as error:
                reply.fail(self.failed(error, scope))
        try:
            if not await self.keep(reply):  # the client has no other way to it
                await anyio.to_thread.run_sync(self.unstored.put, reply.stored)
        finally:
            del self.jobs[reply.id]

    async def keep(self, reply: ResponsesResponseBuilder) -> bool:
        """Where it cannot be stored, as on a full disk, the response says so itself."""
        if not reply.document["store"]:
            return False
        try:
            await anyio.to_thread.run_sync(self.store.put, reply.stored)
        except sqlite3.Error as error:
            log.error("response not stored id=%s error=%r", reply.id, error)
            self.worker_client.metrics.not_stored.inc()
            reply.document["store"] = False
            return False
        return True

    async def close(self) -> None:
        self.worker_client.cancel_all()
        if self.jobs:
            await asyncio.wait([job.task for job in self.jobs.values()])
        await anyio.to_thread.run_sync(self.store.close)
        self.unstored.close()

    # ── one that there is ──

    async def one(self, request: Request) -> Document:
        id = request.path_params["id"]
        if request.method == "DELETE":
            await self._cancel(id)
            await self._in_stores(ResponseStore.delete, id)
            return {"id": id, "object": "response", "deleted": True}
        if request.query_params.get("stream", "false") != "false":
            raise InvalidInput.at("stream", "a stored response is answered whole")
        return (await self._find(id)).response

    async def input_items(self, request: Request) -> Document:
        found = await self._find(request.path_params["id"])
        items, more = convert(dict(request.query_params), Page, strict=False).of(found.input)
        return {
            "object": "list",
            "data": items,
            "first_id": items[0]["id"] if items else None,
            "last_id": items[-1]["id"] if items else None,
            "has_more": more,
        }

    async def cancelled(self, request: Request) -> Document:
        id = request.path_params["id"]
        if not (await self._find(id)).response["background"]:
            raise InvalidInput.at("id", "only a response with background: true can be cancelled")
        await self._cancel(id)
        return (await self._find(id)).response

    async def _cancel(self, id: str) -> None:
        """End a response in the background, and wait until it has; nothing if there is none."""
        if (job := self.jobs.get(id)) is not None:
            for item in job.items:
                item.resolve(ClientGone("the response was cancelled"))
            await asyncio.wait([job.task])

    async def _find(self, id: str) -> Stored:
        if (job := self.jobs.get(id)) is not None:
            if job.reply.document["status"] in ("queued", "in_progress"):
                return job.reply.stored
            await asyncio.wait([job.task])  # it has ended, and is being stored
        return await self._in_stores(ResponseStore.get, id)

    async def _in_stores(self, work: Callable[[ResponseStore, str], T], id: str) -> T:
        for store in (self.store, self.unstored):
            with contextlib.suppress(NotStored):
                return await anyio.to_thread.run_sync(work, store, id)
        raise _not_found(id, "id")


def _not_found(id: str, param: str) -> HttpError:
    return HttpError(404, f"there is no stored response {id[:100]!r}", param)
