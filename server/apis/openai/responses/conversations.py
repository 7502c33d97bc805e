"""`/v1/conversations`: items that are kept, and that the `conversation` of a response continues.

clients, Responses.store_response → ResponseStore.extend → Responses.parse
"""

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, TypeVar

import orjson
from anyio.to_thread import run_sync
from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.types import Scope

from server.apis.openai.models import ModelGroup
from server.apis.openai.request_fields import convert, convert_body, limit_lists
from server.apis.openai.response_schemas import Conversation, Deleted, ItemList
from server.apis.openai.responses.endpoint import (
    counter,
    not_found,
    owner_from,
    return_memory,
)
from server.apis.openai.responses.items import (
    ITEM_FIELDS,
    Item,
    check_ids,
    convert_foreign,
    to_documents,
)
from server.apis.openai.responses.request import Metadata
from server.apis.openai.responses.store import NotStored, ResponseStore, of_conversations
from server.apis.openai.store import ListPage, Owner, encode_page, refusing_disk_errors
from server.http.json import Document, JsonBodyParser, parse_json, to_json
from server.http.operation import JSON, Operation, OperationRoute, routes_of
from server.http.request import read_request

MAX_ADDED = 20  # items of one request, as OpenAI has it

Items = list[Annotated[Item, ITEM_FIELDS]]
T = TypeVar("T")


class NewConversation(Struct):
    items: Annotated[Items, Meta(max_length=MAX_ADDED)] | None = None
    metadata: Metadata | None = None


class ConversationUpdate(Struct):
    metadata: Metadata | None


class NewItems(Struct):
    items: Annotated[Items, Meta(min_length=1, max_length=MAX_ADDED)]


@dataclass(eq=False)
class Conversations:
    """The endpoints of conversations, each of which belongs to the key that has created it."""

    store: ResponseStore
    models: ModelGroup

    def __post_init__(self) -> None:
        self.body_parser = JsonBodyParser()

    def routes(self) -> list[OperationRoute]:
        whole = self.create, self.retrieve, self.update, self.delete
        return routes_of(*whole, self.add_items, self.list_items, self.item, self.remove_item)

    @Operation(
        "POST /v1/conversations",
        "Create a conversation",
        Conversation,
        NewConversation,
        errors=[404],
    )
    async def create(self, request: Request) -> bytes:
        scope = request.scope

        def create(new: NewConversation) -> bytes:
            items, max_bytes = self._documents(new.items or [], scope), scope["app"].max_body
            id = "conv_" + secrets.token_hex(24)
            content = to_json(Conversation(id, int(time.time()), new.metadata or {}))
            namespace, client = owner_from(scope)
            owner = Owner(of_conversations(namespace), client)
            self.store.create_conversation(owner, orjson.loads(content), items, max_bytes)
            return content

        return await self._run(request, create, NewConversation)

    @Operation("GET /v1/conversations/{id}", "A conversation", Conversation)
    async def retrieve(self, request: Request) -> bytes:
        return await self._run(request, lambda: self.store.response(*_key_of(request)))

    @Operation(
        "POST /v1/conversations/{id}",
        "Replace the metadata of a conversation",
        Conversation,
        ConversationUpdate,
    )
    async def update(self, request: Request) -> bytes:
        return await self._run(
            request,
            lambda new: self.store.update(*_key_of(request), {"metadata": new.metadata or {}}),
            ConversationUpdate,
        )

    @Operation("DELETE /v1/conversations/{id}", "Delete a conversation, not its responses", Deleted)
    async def delete(self, request: Request) -> Deleted:
        await self._run(request, lambda: self.store.delete(*_key_of(request)))
        return Deleted(request.path_params["id"], "conversation.deleted", deleted=True)

    @Operation(
        "POST /v1/conversations/{id}/items", "Add items to a conversation", ItemList, NewItems
    )
    async def add_items(self, request: Request) -> bytes:
        def add(new: NewItems) -> bytes:
            items = self._documents(new.items, request.scope)
            self.store.extend(*_key_of(request), items, request.scope["app"].max_body)
            return encode_page(ItemList, items, len(items))

        return await self._run(request, add, NewItems)

    @Operation(
        "GET /v1/conversations/{id}/items", "The items of a conversation", ItemList, query=ListPage
    )
    async def list_items(self, request: Request) -> bytes:
        page = convert(dict(request.query_params), ListPage, strict=False)
        return await self._run(
            request, lambda: self.store.conversation_page(self._count(request), page)
        )

    @Operation("GET /v1/conversations/{id}/items/{item_id}", "An item", {JSON: {}})
    async def item(self, request: Request) -> bytes:
        id = request.path_params["item_id"]
        return await self._run(request, lambda: self.store.item(self._count(request), id))

    @Operation(
        "DELETE /v1/conversations/{id}/items/{item_id}",
        "Remove an item of a conversation",
        Conversation,
    )
    async def remove_item(self, request: Request) -> bytes:
        id = request.path_params["item_id"]
        return await self._run(request, lambda: self.store.remove_item(*_key_of(request), id))

    def _documents(self, items: Items, scope: Scope) -> list[Document]:
        """Return items as they are stored; those that are referred to are of stored responses."""
        namespace = owner_from(scope).namespace
        look_up = partial(self.store.items, namespace, count=counter(scope, "items"))
        documents = to_documents(items, look_up, "items")
        check_ids(documents, (), "items")
        return documents

    def _count(self, request: Request) -> str:
        """Return the id of a conversation whose items the request is about to hold: its bytes are
        counted. Raises NotStored."""
        namespace, id = _key_of(request)
        counter(request.scope)(self.store.size(namespace, id))
        return id

    async def _run(
        self, request: Request, work: Callable[..., T], kind: type[Struct] | None = None
    ) -> T:
        """Call `work` in a pool thread, with the body if it has a kind."""
        scope = request.scope

        def run(body: bytes = b"") -> T:
            arguments = []
            if kind:
                document = parse_json(body)
                convert_foreign(document.get("items"))
                limit_lists(document, kind, self.models.max_entries)
                arguments = [convert_body(document, kind, scope)]
            try:
                with refusing_disk_errors():
                    return work(*arguments)
            except NotStored as error:
                is_whole = error.id == request.path_params.get("id")
                where = ("conversation", "id") if is_whole else ("item", "item_id")
                raise not_found(error.id, *where) from None
            finally:
                return_memory(scope)

        if kind is None:
            return await run_sync(run)
        _, body, incoming = await read_request(scope, request.receive)
        return await self.body_parser.run(run, body, incoming.deadlines.first, blocks=True)


def _key_of(request: Request) -> tuple[bytes, str]:
    """Return the namespace and the id of a conversation."""
    return of_conversations(owner_from(request.scope).namespace), request.path_params["id"]
