"""`/v1/responses`: generate a response, whole, streamed or in the background; `/{id}`: read it.

    body → request, previous items (pool) → submit → deltas → response → store → client

The path of every generation request (openai/endpoint.py), with a store. A background response is
read by a task of its own, without a connection, until it has ended.
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
from server.core.delta_stream import TokenStream, UsageCounts
from server.core.worker_client import Deadlines
from server.http.errors import HttpError
from server.http.json import Document, parse_json
from server.http.request import JsonEndpoint, send_json
from server.openai.endpoint import GenerationEndpoint, build_events
from server.openai.request_fields import convert, decode
from server.openai.response_schemas import Deleted, ItemList
from server.openai.responses.events import ResponsesBuilder
from server.openai.responses.items import to_documents
from server.openai.responses.request import ParsedResponseRequest, ResponseRequest
from server.openai.responses.store import NotStored, ResponseStore, Stored, TooLarge

log = logging.getLogger("onequeue.responses")

PATH = "/v1/responses/{id}"
MAX_FALLBACK_RESPONSES = 1000
MAX_FALLBACK_BYTES = 64_000_000

T = TypeVar("T")


class BackgroundJob(NamedTuple):
    """A response that is generated in the background."""

    builder: ResponsesBuilder
    items: list[WorkItem]
    task: "asyncio.Task[None]"


class Page(Struct):
    """The query of a response's input items."""

    order: Literal["asc", "desc"] = "desc"
    limit: Annotated[int, Meta(ge=1, le=100)] = 20
    after: Annotated[str | None, Meta(description="The id of an item")] = None

    def select(self, items: list[Document]) -> tuple[list[Document], bool]:
        """Return the page's items, and whether there are more."""
        items, start = items[:: -1 if self.order == "desc" else 1], 0
        if self.after is not None:
            ids = [item["id"] for item in items]
            if self.after not in ids:
                raise InvalidInput.at("after", f"there is no input item {self.after[:100]!r}")
            start = ids.index(self.after) + 1
        end = start + self.limit
        return items[start:end], end < len(items)


@dataclass(eq=False)
class Responses(GenerationEndpoint[ParsedResponseRequest]):
    """The app itself takes new requests; `routes` find responses, stored or in the background.

    Call `close` after the worker client has stopped.
    """

    parse_blocks = True  # previous items are read from the store

    store: ResponseStore

    def __post_init__(self) -> None:
        # Background responses that could not be written to `store`.
        self.fallback_store = ResponseStore(":memory:", MAX_FALLBACK_RESPONSES, MAX_FALLBACK_BYTES)
        self.jobs: dict[str, BackgroundJob] = {}

    def routes(self) -> list[Route]:
        return [
            Route(PATH, JsonEndpoint(self.retrieve_or_delete), methods=["GET", "DELETE"]),
            Route(PATH + "/input_items", JsonEndpoint(self.input_items), methods=["GET"]),
            Route(PATH + "/cancel", JsonEndpoint(self.cancel), methods=["POST"]),
        ]

    # ── a new response ──

    def parse(self, body: bytes) -> ParsedResponseRequest:
        max_entries = self.worker_client.generator.text_model.max_model_len
        request = decode(parse_json(body), ResponseRequest, self.model.id_for, max_entries)
        max_mb = self.settings.max_body_mb
        look_up = partial(self.store.items, max_bytes=max_mb * 1_000_000)
        try:
            items = to_documents(request.input, look_up)
        except TooLarge:
            reason = f"the stored responses with its items exceed {max_mb:g} MB"
            raise InvalidInput.at("input", reason) from None
        previous = self._previous_items(request.previous_response_id)
        return ParsedResponseRequest(request, [request.generation_input(previous, items)], items)

    def _previous_items(self, id: str | None) -> list[Document]:
        """Return all items of the conversation that ends with a response.

        A stored conversation may be as large as a request body.
        """
        if id is None:
            return []
        path, max_mb = "previous_response_id", self.settings.max_body_mb
        try:
            chain = self.store.chain(id, max_mb * 1_000_000)
        except TooLarge:
            raise InvalidInput.at(path, f"its conversation exceeds {max_mb:g} MB") from None
        except NotStored as error:
            if error.id in self.jobs:
                raise InvalidInput.at(path, f"{id!r} is still being generated") from None
            raise _not_found(error.id, path) from None
        return [item for stored in chain for item in (*stored.input, *stored.response["output"])]

    def builder(self, request: ParsedResponseRequest, usage: UsageCounts) -> ResponsesBuilder:
        return ResponsesBuilder(request, usage, self.worker_client.generator)

    async def serve(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        request: ParsedResponseRequest,
        deadlines: Deadlines,
    ) -> None:
        if request.body.background:
            return await send_json(send, self._start_job(scope, request, deadlines).response)
        with self.submit(scope, request, deadlines, receive) as stream:
            builder = self.builder(request, stream.usage)
            before_end = partial(self._store_response, builder)
            await self.respond(scope, send, stream, builder, before_end)

    def _start_job(
        self, scope: Scope, request: ParsedResponseRequest, deadlines: Deadlines
    ) -> ResponsesBuilder:
        """Submit a request that waits for its first token without a limit."""
        stream = self.submit(scope, request, replace(deadlines, first=math.inf), None)
        builder = self.builder(request, stream.usage)
        task = self.worker_client.loop.create_task(self._run_job(scope, builder, stream))
        self.jobs[builder.response.id] = BackgroundJob(builder, stream.items, task)
        return builder

    async def _run_job(self, scope: Scope, builder: ResponsesBuilder, stream: TokenStream) -> None:
        """Generate a response without a connection; errors become its status."""
        with stream:
            try:
                async for _ in build_events(builder, stream, await stream.read()):
                    pass  # events are built for their effect on the response
            except ClientGone:
                builder.abort("cancelled")
            except Exception as error:
                builder.fail(self.count_failure(error, scope))
        try:
            if not await self._store_response(builder):  # the client has no other way to get it
                await anyio.to_thread.run_sync(lambda: self.fallback_store.put(builder.stored))
        finally:
            del self.jobs[builder.response.id]

    async def _store_response(self, builder: ResponsesBuilder) -> bool:
        """Store a response; if that fails, as on a full disk, the response has `store: false`."""
        if not builder.response.store:
            return False
        try:
            await anyio.to_thread.run_sync(lambda: self.store.put(builder.stored))
        except sqlite3.Error as error:
            log.error("response not stored id=%s error=%r", builder.response.id, error)
            self.worker_client.metrics.not_stored.inc()
            builder.response.store = False
            return False
        return True

    async def close(self) -> None:
        self.worker_client.cancel_all()
        if self.jobs:
            await asyncio.wait([job.task for job in self.jobs.values()])
        await anyio.to_thread.run_sync(self.store.close)
        self.fallback_store.close()

    # ── a response by its id ──

    async def retrieve_or_delete(self, request: Request) -> Document | Deleted:
        id = request.path_params["id"]
        if request.method == "DELETE":
            await self._cancel_job(id)
            await self._in_stores(ResponseStore.delete, id)
            return Deleted(id, "response", deleted=True)
        if request.query_params.get("stream", "false") != "false":
            raise InvalidInput.at("stream", "must be false: a stored response is sent whole")
        return (await self._find(id)).response

    async def input_items(self, request: Request) -> ItemList:
        stored = await self._find(request.path_params["id"])
        page = convert(dict(request.query_params), Page, strict=False)
        items, has_more = page.select(stored.input)
        first_id = items[0]["id"] if items else None
        last_id = items[-1]["id"] if items else None
        return ItemList("list", items, first_id, last_id, has_more)

    async def cancel(self, request: Request) -> Document:
        id = request.path_params["id"]
        if not (await self._find(id)).response["background"]:
            raise InvalidInput.at("id", "only a response with background: true can be cancelled")
        await self._cancel_job(id)
        return (await self._find(id)).response

    async def _cancel_job(self, id: str) -> None:
        """Cancel a background response, if there is one, and wait until it has ended."""
        if (job := self.jobs.get(id)) is not None:
            for item in job.items:
                item.resolve(ClientGone("the response was cancelled"))
            await asyncio.wait([job.task])

    async def _find(self, id: str) -> Stored:
        if (job := self.jobs.get(id)) is not None:
            if job.builder.response.status in ("queued", "in_progress"):
                return job.builder.stored
            await asyncio.wait([job.task])  # it has ended, and is being stored
        return await self._in_stores(ResponseStore.get, id)

    async def _in_stores(self, work: Callable[[ResponseStore, str], T], id: str) -> T:
        for store in (self.store, self.fallback_store):
            with contextlib.suppress(NotStored):
                return await anyio.to_thread.run_sync(work, store, id)
        raise _not_found(id, "id")


def _not_found(id: str, param: str) -> HttpError:
    return HttpError(404, f"there is no stored response {id[:100]!r}", param)
