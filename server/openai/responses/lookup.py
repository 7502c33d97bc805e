"""`/v1/responses/{id}`, its input items, and the end of one that runs in the background."""

from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from batching.errors import InvalidInput
from server.openai.responses.endpoint import PATH, Responses, json
from server.openai.responses.store import Document

ONE_PATH = PATH + "/{id}"
INPUT_PATH = ONE_PATH + "/input_items"
CANCEL_PATH = ONE_PATH + "/cancel"
MOST_ITEMS = 100


class ResponseLookup:
    def __init__(self, responses: Responses) -> None:
        self.responses = responses

    def routes(self) -> list[Route]:
        return [
            Route(ONE_PATH, self.one, methods=["GET", "DELETE"]),
            Route(INPUT_PATH, self.input_items),
            Route(CANCEL_PATH, self.cancel, methods=["POST"]),
        ]

    async def one(self, request: Request) -> Response:
        id = _id(request, ONE_PATH)
        if request.method == "DELETE":
            await self.responses.delete(id)
            return json({"id": id, "object": "response", "deleted": True})
        if request.query_params.get("stream", "false") != "false":
            raise InvalidInput("stream: a stored response is answered whole", "stream")
        return json((await self.responses.find(id)).response)

    async def input_items(self, request: Request) -> Response:
        id = _id(request, INPUT_PATH)
        found = (await self.responses.find(id)).input
        items, more = page(found, request.query_params)
        return json(
            {
                "object": "list",
                "data": items,
                "first_id": items[0]["id"] if items else None,
                "last_id": items[-1]["id"] if items else None,
                "has_more": more,
            }
        )

    async def cancel(self, request: Request) -> Response:
        id = _id(request, CANCEL_PATH)
        if not (await self.responses.find(id)).response["background"]:
            raise InvalidInput("id: only a response with background: true can be cancelled", "id")
        await self.responses.cancel(id)
        return json((await self.responses.find(id)).response)


def page(items: list[Document], query: Mapping[str, str]) -> tuple[list[Document], bool]:
    """Newest first unless asked otherwise, and whether there are more."""
    order, limit = query.get("order", "desc"), query.get("limit", "20")
    if order not in ("asc", "desc"):
        raise InvalidInput("order: must be asc or desc", "order")
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= MOST_ITEMS):
        raise InvalidInput(f"limit: must be a whole number from 1 to {MOST_ITEMS}", "limit")
    if order == "desc":
        items = items[::-1]
    start = 0
    if (after := query.get("after")) is not None:
        ids = [item["id"] for item in items]
        if after not in ids:
            raise InvalidInput(f"after: there is no input item {after[:100]!r}", "after")
        start = ids.index(after) + 1
    end = start + int(limit)
    return items[start:end], end < len(items)


def _id(request: Request, counted_as: str) -> str:
    """The path's id; whatever it is, requests are counted by the path's template."""
    request.scope["counted_as"] = counted_as
    return str(request.path_params["id"])
