"""Sending JSON: the one way that answers leave as, whatever their endpoint or status."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
import orjson
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

Document = dict[str, Any]  # a JSON object
Header = tuple[bytes, bytes]  # the name in lower case


def to_json(document: Any) -> bytes:
    """By orjson, which knows dicts; structs become such."""
    return orjson.dumps(document, default=msgspec.to_builtins)


def json_headers(content: bytes) -> list[Header]:
    return [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(content))]


async def send_json(
    send: Send, document: object | bytes, status: int = 200, headers: Sequence[Header] = ()
) -> None:
    """A whole answer: `document`, or bytes that are JSON already, as they are. `headers` come after
    the content's own."""
    content = document if isinstance(document, bytes) else to_json(document)
    fields = [*json_headers(content), *headers]
    await send({"type": "http.response.start", "status": status, "headers": fields})
    await send({"type": "http.response.body", "body": content})


class JsonEndpoint:
    """A bare ASGI app that sends what `answer` makes of a request."""

    def __init__(self, answer: Callable[[Request], Awaitable[object]]) -> None:
        self.answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, await self.answer(Request(scope, receive)))
