"""Sending JSON: the one way that answers leave as, whatever their endpoint or status."""

from collections.abc import Sequence

import orjson
from starlette.types import Send


async def send_json(
    send: Send,
    document: object | bytes,
    status: int = 200,
    headers: Sequence[tuple[bytes, bytes]] = (),
) -> None:
    """A whole answer: `document` by orjson, or bytes that are JSON already, as they are.

    `headers` come after the content type and length; names in lower case."""
    content = document if isinstance(document, bytes) else orjson.dumps(document)
    fields = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(content)),
        *headers,
    ]
    await send({"type": "http.response.start", "status": status, "headers": fields})
    await send({"type": "http.response.body", "body": content})
