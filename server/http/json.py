"""Sending JSON: the one way that answers leave as, whatever their endpoint or status."""

from collections.abc import Sequence
from typing import Any

import msgspec
import orjson
from starlette.types import Send

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
