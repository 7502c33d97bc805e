"""`/v1/responses/{id}`, its input items, and the end of one that runs in the background."""

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from typing import TypeVar

import anyio.to_thread
from starlette.requests import Request
from starlette.routing import Route

from batching.errors import InvalidInput
from server.http.json import Document, JsonEndpoint
from server.openai.responses.endpoint import Responses, not_found
from server.openai.responses.store import NotStored, ResponseStore, Stored

PATH = "/v1/responses/{id}"
INPUT_PATH = PATH + "/input_items"
CANCEL_PATH = PATH + "/cancel"
MOST_ITEMS = 100

T = TypeVar("T")


class ResponseLookup:
    """Finds what is stored and what runs in the background; 404 for what is neither."""

    def __init__(self, responses: Responses) -> None:
        self.responses = responses

    def routes(self) -> list[Route]:
        return [
            Route(PATH, JsonEndpoint(self.one), methods=["GET", "DELETE"]),
            Route(INPUT_PATH, JsonEndpoint(self.input_items), methods=["GET"]),
            Route(CANCEL_PATH, JsonEndpoint(self.cancel), methods=["POST"]),
        ]

    async def one(self, request: Request) -> Document:
        id = _id(request, PATH)
        if request.method == "DELETE":
            await self.responses.cancel(id)
            await self._in_stores(ResponseStore.delete, id)
            return {"id": id, "object": "response", "deleted": True}
        if request.query_params.get("stream", "false") != "false":
            raise InvalidInput.at("stream", "a stored response is answered whole")
        return (await self._find(id)).response

    async def input_items(self, request: Request) -> Document:
        found = await self._find(_id(request, INPUT_PATH))
        items, more = page(found.input, request.query_params)
        return {
            "object": "list",
            "data": items,
            "first_id": items[0]["id"] if items else None,
            "last_id": items[-1]["id"] if items else None,
            "has_more": more,
        }

    async def cancel(self, request: Request) -> Document:
        id = _id(request, CANCEL_PATH)
        if not (await self._find(id)).response["background"]:
            raise InvalidInput.at("id", "only a response with background: true can be cancelled")
        await self.responses.cancel(id)
        return (await self._find(id)).response

    async def _find(self, id: str) -> Stored:
        if (job := self.responses.jobs.get(id)) is not None:
            if job.reply.document["status"] in ("queued", "in_progress"):
                return job.reply.stored
            await asyncio.wait([job.task])  # it has ended, and is being stored
        return await self._in_stores(ResponseStore.get, id)

    async def _in_stores(self, work: Callable[[ResponseStore, str], T], id: str) -> T:
        for store in (self.responses.store, self.responses.unstored):
            with contextlib.suppress(NotStored):
                return await anyio.to_thread.run_sync(work, store, id)
        raise not_found(id, "id")


def page(items: list[Document], query: Mapping[str, str]) -> tuple[list[Document], bool]:
    """Newest first unless asked otherwise, and whether there are more."""
    order, limit = query.get("order", "desc"), query.get("limit", "20")
    if order not in ("asc", "desc"):
        raise InvalidInput.at("order", "must be asc or desc")
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= MOST_ITEMS):
        raise InvalidInput.at("limit", f"must be a whole number from 1 to {MOST_ITEMS}")
    if order == "desc":
        items = items[::-1]
    start = 0
    if (after := query.get("after")) is not None:
        ids = [item["id"] for item in items]
        if after not in ids:
            raise InvalidInput.at("after", f"there is no input item {after[:100]!r}")
        start = ids.index(after) + 1
    end = start + int(limit)
    return items[start:end], end < len(items)


def _id(request: Request, counted_as: str) -> str:
    """The path's id; whatever it is, requests are counted by the path's template."""
    request.scope["counted_as"] = counted_as
    return str(request.path_params["id"])
