"""`/v1/responses`: generate a response, whole, streamed or in the background; `/{id}`: read it.

    body → request, previous items (pool) → submit → deltas → response → store → client

The path of every generation request (endpoint.py), with a store. A background response is a job
(jobs.py) until it has ended; a streamed one is read from the store (event_stream.py).
"""

import asyncio
import contextlib
import logging
import math
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, TypeVar

import anyio.from_thread
import orjson
from anyio.to_thread import run_sync
from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.types import Scope, Send

from batching.errors import ClientGone, Draining, InvalidInput, QueueFull
from batching.fair_share import Priority
from server.apis.openai.database import SqliteDatabase
from server.apis.openai.endpoint import GenerationEndpoint, build_events, respond
from server.apis.openai.jobs import JobRunner, StoredJob
from server.apis.openai.request_fields import convert, decode
from server.apis.openai.response_schemas import Deleted, InputTokens, ItemList
from server.apis.openai.responses.event_stream import StoredEvents
from server.apis.openai.responses.events import Response, ResponsesBuilder
from server.apis.openai.responses.items import check_ids, convert_foreign, to_documents
from server.apis.openai.responses.request import ParsedResponseRequest, ResponseRequest
from server.apis.openai.responses.store import (
    Count,
    NotStored,
    ResponseStore,
    Stored,
    of_conversations,
)
from server.apis.openai.store import (
    ListPage,
    Owner,
    encode_page,
    in_store,
    owner_of,
    refusing_disk_errors,
)
from server.apis.openai.tokenize import PromptEndpoint
from server.core.delta_stream import TokenStream
from server.core.worker_client import IncomingRequest
from server.http.access import address_of
from server.http.access_log import log_background
from server.http.errors import HttpError
from server.http.json import INLINE_BYTES, Document, parse_json, to_json
from server.http.operation import JSON, Operation, OperationRoute, routes_of
from server.http.request import MAX_BODIES, count_failure, send_json
from server.http.transfers import Transfer, TransferBudget
from worker.worker import trim_heap

log = logging.getLogger("onequeue.responses")

COUNT_TOKENS = Operation(
    "POST /v1/responses/input_tokens",
    "The number of tokens of a response's input",
    InputTokens,
    ResponseRequest,
)
COMPACT_PATH = "/v1/responses/compact"
UNFINISHED = "queued", "in_progress"
ADDED = "completed", "incomplete"  # to a conversation
TRIM_BYTES = 4_000_000  # that a request holds; trimming takes milliseconds
BACKGROUND_SHARE = 4  # inputs of background responses take a quarter of the memory for bodies
MAX_FALLBACK_RESPONSES = 1000
MAX_FALLBACK_BYTES = 64_000_000
MAX_EVENT_BYTES = 16_000_000  # of one response
POLL_S = 0.1  # how often the end of a response that another process generates is looked for

T = TypeVar("T")


class BackgroundJob(StoredJob):
    """A response that is generated in the background."""

    def __init__(
        self,
        endpoint: "Responses",
        scope: Scope,
        stream: TokenStream,
        builder: ResponsesBuilder,
        transfer: Transfer,
    ) -> None:
        self.owner = owner_from(scope)
        super().__init__(builder.response.id, self.owner.namespace)
        self.endpoint, self.scope, self.stream = endpoint, scope, stream
        self.builder, self.transfer = builder, transfer
        self.stored = asyncio.Event()  # in the store, from its beginning
        self.readers: set[asyncio.Event] = set()  # each is set when an event is added
        self.last_event = b""  # once the response has ended
        self._keeps_events = builder.streams
        self._count = self._event_bytes = 0  # of kept events

    def abort(self) -> None:
        for item in self.stream.items:
            item.resolve(ClientGone("the response was cancelled"))

    async def run(self) -> None:
        """Generate the response; errors become its status."""
        builder, stream, scope = self.builder, self.stream, self.scope
        store = partial(self.endpoint.store_response, self.owner, builder)
        with stream:
            try:
                await store(is_generating=True)
                for event in builder.queue() if builder.streams else ():
                    await self._keep(event)
                self.stored.set()
                events = build_events(builder, stream, await stream.read())
                first = await anext(events, b"")
                await store(is_generating=True)  # in progress
                await self._keep(first)
                async for event in events:  # built for their effect on the response, too
                    await self._keep(event)
            except ClientGone:
                builder.abort("cancelled")
            except Exception as error:
                builder.fail(count_failure(error, scope))
        if scope["app"].logs_requests:
            log_background(scope, builder.response.id, builder.response.status)
        try:
            await store()
        finally:
            self.stored.set()
            self.last_event = builder.end()
            self._wake_readers()
            self.endpoint.background_memory.release(self.transfer)

    @property
    def store(self) -> ResponseStore:
        """The store with the response and its events."""
        endpoint = self.endpoint
        return endpoint.store if self.builder.response.store else endpoint.fallback_store

    async def _keep(self, event: bytes) -> None:
        """Add an event to the store, unless there are too many: the last one has the response."""
        if not self._keeps_events or event in (b"", self.builder.keep_alive):
            return
        try:
            self._event_bytes += len(event)
            if self._event_bytes > MAX_EVENT_BYTES:
                raise QueueFull(f"they exceed {MAX_EVENT_BYTES} bytes")
            if not self.store.database.is_shared:
                self.endpoint.background_memory.take(self.transfer, len(event))
            await run_sync(self.store.add_event, self.id, self._count, event)
        except (QueueFull, OSError, sqlite3.Error) as error:
            self._keeps_events = False
            log.warning("further events not stored id=%s error=%.200r", self.id, error)
        self._count += 1
        self._wake_readers()

    def _wake_readers(self) -> None:
        for reader in self.readers:
            reader.set()


STREAM = Meta(description="Send the events of a response created with background and stream")
AFTER = Meta(ge=0, description="The sequence number of the last event that was received")


class Retrieval(Struct):
    stream: Annotated[bool, STREAM] = False
    starting_after: Annotated[int, AFTER] | None = None


@Operation(
    "POST /v1/responses",
    "A model's response to items or a text, stored unless store is false",
    Response,
    ResponseRequest,
    stream="With stream: true. The last event has the response.",
)
@dataclass(eq=False)
class Responses(GenerationEndpoint[ParsedResponseRequest]):
    """The app itself takes new requests; methods find responses, stored or in the background."""

    parse_blocks = True  # previous items are read from the store

    store: ResponseStore
    jobs: JobRunner

    def __post_init__(self) -> None:
        # Background responses that are not stored, or could not be written to `store`.
        bounds = MAX_FALLBACK_RESPONSES, MAX_FALLBACK_BYTES
        self.fallback_store = ResponseStore(SqliteDatabase(":memory:"), *bounds)
        self.jobs.stores += self.store, self.fallback_store
        self.max_conversation = int(self.settings.max_body_mb * 1_000_000)
        # Background responses hold their input for long: it does not count as a request's.
        limit = MAX_BODIES * self.max_conversation // BACKGROUND_SHARE
        message = "the memory for background responses is in use"
        self.background_memory = TransferBudget(limit, message)

    def routes(self) -> list[OperationRoute]:
        count = PromptEndpoint(self, InputTokens)
        by_id = self.retrieve_or_delete, self.input_items, self.cancel
        return [OperationRoute(COUNT_TOKENS, count), *routes_of(self, refuse_compaction, *by_id)]

    # ── a new response ──

    @refusing_disk_errors()
    def parse(self, body: bytes, scope: Scope) -> ParsedResponseRequest:
        max_entries = self.models.max_entries
        document = parse_json(body)
        convert_foreign(document.get("input"))
        request = decode(document, ResponseRequest, self.models.id_for, scope, max_entries)
        namespace = owner_from(scope).namespace
        look_up = partial(self.store.items, namespace, count=counter(scope, "input"))
        items = to_documents(request.input, look_up)
        previous = self._previous_items(request, scope)
        if request.conversation:
            check_ids(items, previous, "input")
        tools = request.callable_tools([*previous, *items])
        if tools.dropped:
            id, names = scope["record"].request_id, ", ".join(tools.dropped)
            log.warning("tools dropped id=%s types=%s: they are not run here", id, names)
        prompt = request.generation_input(previous, items, tools)
        parsed = ParsedResponseRequest(request, [prompt], items, tools)
        return_memory(scope)
        return parsed

    def _previous_items(self, request: ResponseRequest, scope: Scope) -> list[Document]:
        """Return all items that the request continues: those of a conversation, or of a response
        and those before it."""
        path = "conversation" if request.conversation else "previous_response_id"
        namespace, id = owner_from(scope).namespace, request.previous_response_id
        count, chain = counter(scope, path), list[Stored]()
        try:
            if conversation_id := request.conversation_id:
                read = self.store.conversation
                return read(of_conversations(namespace), conversation_id, count)
            if id is not None:
                chain = self.store.chain(namespace, id, count)
        except NotStored as error:
            kind = "conversation" if request.conversation else "stored response"
            raise not_found(error.id, kind, path) from None
        for stored in chain:
            status = stored.response["status"]
            if status in UNFINISHED:
                raise InvalidInput.at(path, f"{id!r} is still being generated")
            if status == "failed":
                raise InvalidInput.at(path, "is a response that failed, or continues one")
            if "conversation" in stored.response:
                reason = "is, or continues, a response of a conversation: send `conversation`"
                raise InvalidInput.at(path, reason)
        return [item for stored in chain for item in stored.items]

    async def serve(
        self, incoming: IncomingRequest, send: Send, request: ParsedResponseRequest
    ) -> None:
        scope = incoming.scope
        if request.body.background:
            job = self._start_job(incoming, request)
            response, headers = to_json(job.builder.response), job.builder.headers
            await job.stored.wait()
            if not job.builder.streams:
                return await send_json(send, response, headers=headers)
            assert incoming.receive
            events = StoredEvents(job.store, job.namespace, job.id, -1, job, headers)
            return await events(scope, incoming.receive, send)
        with self.submit(incoming, request) as stream:
            builder = ResponsesBuilder(request, stream.usage, self.model_of(request))
            before_end = partial(self.store_response, owner_from(scope), builder)
            await respond(scope, send, stream, builder, before_end)

    def _start_job(
        self, incoming: IncomingRequest, request: ParsedResponseRequest
    ) -> BackgroundJob:
        """Submit a request without a time limit but the client's own."""
        scope, transfer = incoming.scope, Transfer()
        deadlines = replace(incoming.deadlines, first=math.inf, idle_s=math.inf)
        self.background_memory.take(transfer, scope["transfer"].held)
        scope["context"] = replace(scope["context"], priority=Priority.BACKGROUND)
        try:
            stream = self.submit(IncomingRequest(scope, None, deadlines), request)
        except BaseException:
            self.background_memory.release(transfer)
            raise
        builder = ResponsesBuilder(request, stream.usage, self.model_of(request))
        job = BackgroundJob(self, scope, stream, builder, transfer)
        self.jobs.run(job)
        return job

    async def store_response(
        self, owner: Owner, builder: ResponsesBuilder, is_generating: bool = False
    ) -> None:
        """Store a response, and its items in its conversation. If that fails, as on a full disk, it
        has `store: false`, or `conversation: null`. A client that cannot get one from the
        background from the store has no other way."""
        if builder.response.status in ADDED and (reference := builder.response.conversation):
            namespace, max_bytes = of_conversations(owner.namespace), self.max_conversation

            def extend() -> None:
                stored = builder.stored
                response = (owner, stored) if builder.response.store else None
                self.store.extend(namespace, reference.id, stored.items, max_bytes, response)

            try:
                await run_sync(extend)
                if builder.response.store:
                    return
            except (NotStored, InvalidInput, OSError, sqlite3.Error) as error:
                log.warning("conversation not extended id=%s error=%.200r", reference.id, error)
                builder.response.conversation = None
        if builder.response.store:
            try:
                put = self.store.put
                await run_sync(lambda: put(owner, builder.stored, is_generating))
                return
            except (OSError, sqlite3.Error) as error:
                log.error("response not stored id=%s error=%.200r", builder.response.id, error)
                self.worker_client.metrics.not_stored.inc()
                builder.response.store = False
            try:  # its earlier state
                await run_sync(self.store.delete, owner.namespace, builder.response.id)
            except NotStored:
                pass
            except (OSError, sqlite3.Error):
                self.store.lose(builder.response.id)
        if builder.response.background:
            put = self.fallback_store.put
            await run_sync(lambda: put(owner, builder.stored, is_generating))

    # ── a response by its id ──

    @Operation(
        "GET /v1/responses/{id}",
        "A response",
        Response,
        stream="With stream=true, those after the event of number starting_after.",
        query=Retrieval,
    )
    @Operation("DELETE /v1/responses/{id}", "Delete a response", Deleted)
    async def retrieve_or_delete(self, request: Request) -> bytes | Deleted | StoredEvents:
        scope, id = request.scope, request.path_params["id"]
        if request.method == "DELETE":
            await self._cancel(owner_from(scope), id)
            await self._in_stores(ResponseStore.delete, scope, id)
            return Deleted(id, "response", deleted=True)
        query = convert(dict(request.query_params), Retrieval, strict=False)
        if query.stream:
            return await self._follow(scope, id, query.starting_after)
        if query.starting_after is not None:
            raise InvalidInput.at("starting_after", "requires stream: true")
        read = partial(ResponseStore.response, count=counter(scope))
        return await self._in_stores(read, scope, id)

    async def _follow(self, scope: Scope, id: str, starting_after: int | None) -> StoredEvents:
        """Return the events of a background response, of any process."""
        after = -1 if starting_after is None else starting_after
        namespace = owner_from(scope).namespace
        job = self.jobs.find(BackgroundJob, namespace, id)

        def find(store: ResponseStore, namespace: bytes, id: str) -> ResponseStore:
            store.events(namespace, id, after)
            return store

        store = await self._in_stores(find, scope, id)
        return StoredEvents(store, namespace, id, after, job)

    @Operation(
        "GET /v1/responses/{id}/input_items",
        "The input items of a response, newest first",
        ItemList,
        query=ListPage,
    )
    async def input_items(self, request: Request) -> bytes:
        scope, id = request.scope, request.path_params["id"]
        page = convert(dict(request.query_params), ListPage, strict=False)

        return await self._in_stores(
            lambda store, *key: encode_items(store.get(*key, counter(scope)).input, page), scope, id
        )

    @Operation(
        "POST /v1/responses/{id}/cancel", "Cancel a background response", Response, errors=[400]
    )
    async def cancel(self, request: Request) -> bytes:
        scope, id = request.scope, request.path_params["id"]
        await self._cancel(owner_from(scope), id)

        def read(store: ResponseStore, namespace: bytes, id: str) -> bytes:
            content = store.response(namespace, id, counter(scope))
            if not orjson.loads(content)["background"]:
                reason = "only a response with background: true can be cancelled"
                raise InvalidInput.at("id", reason)
            return content

        return await self._in_stores(read, scope, id)

    async def _cancel(self, owner: Owner, id: str) -> None:
        """Cancel a background response of any process, if there is one, and wait for its end."""
        if job := self.jobs.find(BackgroundJob, owner.namespace, id):
            job.abort()
            await asyncio.wait([job.task])
            return
        is_generating = partial(self.store.is_generating, owner.namespace, id)
        await in_store(self.store.cancel, owner.namespace, id)
        while await in_store(is_generating):  # by another process
            if self.worker_client.terminating:
                raise Draining("the server is stopping", 5)
            await asyncio.sleep(POLL_S)

    async def _in_stores(
        self, work: Callable[[ResponseStore, bytes, str], T], scope: Scope, id: str
    ) -> T:
        """Return the result of `work`, which runs in a pool thread."""
        namespace = owner_from(scope).namespace

        def run(store: ResponseStore) -> T:
            result = work(store, namespace, id)
            return_memory(scope)
            return result

        for store in (self.fallback_store, self.store):
            with contextlib.suppress(NotStored), refusing_disk_errors():
                return await run_sync(run, store)
        raise not_found(id, "stored response", "id")


@Operation(
    f"POST {COMPACT_PATH}", "Refused: compaction is not implemented", {JSON: {}}, errors=[400]
)
async def refuse_compaction(request: Request) -> bytes:
    reason = "is not implemented: send the items themselves, or a summary that a response writes"
    raise InvalidInput(f"{COMPACT_PATH} {reason}")


def encode_items(items: list[Document], page: ListPage) -> bytes:
    """Return a page of a response's input items as JSON."""
    items, start = items[:: -1 if page.order == "desc" else 1], 0
    if page.after is not None:
        ids = [item["id"] for item in items]
        if page.after not in ids:
            raise InvalidInput.at("after", f"there is no input item {page.after[:100]!r}")
        start = ids.index(page.after) + 1
    return encode_page(ItemList, items[start : start + page.limit + 1], page.limit)


def owner_from(scope: Scope) -> Owner:
    return owner_of(scope["context"].key.id, address_of(scope))


def counter(scope: Scope, param: str = "") -> Count:
    """Return a function for a pool thread: it counts stored bytes that a request is about to hold,
    and raises QueueFull if there is no memory for them. Items that a parameter refers to may be as
    large as a body: else InvalidInput."""
    max_bytes = scope["app"].max_body if param else math.inf
    left, uncounted = max_bytes, 0

    def count(size: int) -> None:
        nonlocal left, uncounted
        left, uncounted = left - size, uncounted + size
        if left < 0:
            raise InvalidInput.at(param, f"the stored items exceed {max_bytes / 1_000_000:g} MB")
        if uncounted > INLINE_BYTES:  # a conversation may have thousands of small responses
            size, uncounted = uncounted, 0
            anyio.from_thread.run_sync(scope["app"].count_body, scope, size)

    return count


def return_memory(scope: Scope) -> None:
    """Return to the system what reading large bodies and stored responses has freed, in a pool
    thread: the allocator keeps as much as the requests hold."""
    if trim_heap is not None and scope["transfer"].held >= TRIM_BYTES:
        trim_heap(0)


def not_found(id: str, kind: str, param: str) -> HttpError:
    return HttpError(404, f"there is no {kind} {id[:100]!r}", param)
