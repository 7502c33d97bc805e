"""JSON, in and out: bodies read within bounds, answers sent in one way.

    bytes → how many values? → JSON → lists no longer than they may be (openai/params.py)

Parsing is one call that holds the interpreter, so what it may cost is known before: values are
counted without building any.
"""

import json
import re
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import msgspec
import orjson
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from batching.errors import InvalidInput

MOST_VALUES = 1_000_000  # keys and values of one body
_MARKS = b",", b":", b"[", b"{"  # each value and key but the first follows one
_PIECE = 1 << 16  # bytes counted in one go
_SURROGATE = re.compile("[\ud800-\udfff]")

Document = dict[str, Any]  # a JSON object
Header = tuple[bytes, bytes]  # the name in lower case


def to_json(document: object) -> bytes:
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


def parse_json(body: bytes) -> Document:
    """A JSON object; InvalidInput says what is wrong with anything else."""
    check_values(body)
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        if (param := _half_character(body)) is not None:
            raise InvalidInput("has half of a surrogate pair: not Unicode text", param) from None
        raise InvalidInput(f"the body is not valid JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise InvalidInput("the body must be a JSON object")
    return parsed


def check_values(body: bytes) -> None:
    """InvalidInput for JSON of more than MOST_VALUES keys and values."""
    if len(body) <= MOST_VALUES:
        return
    if b"\\" in body:  # then every quote left begins or ends a string
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    count = within = 0  # `within`: 1 in the middle of a string
    for start in range(0, len(body), _PIECE):
        texts = body[start : start + _PIECE].split(b'"')
        outside = b"".join(texts[within::2])
        count += sum(map(outside.count, _MARKS))
        within = (within + len(texts) - 1) % 2
        if count >= MOST_VALUES:
            raise InvalidInput(f"the body has more than {MOST_VALUES} JSON values")


def _half_character(body: bytes) -> str | None:
    """Where a string escapes a lone surrogate, which JSON's grammar allows and Unicode does not.
    Not looked for in long bodies."""
    if b"\\u" not in body or len(body) > MOST_VALUES:
        return None
    try:
        path = next(_halves(json.loads(body)), None)
    except (ValueError, RecursionError):
        return None
    return path and path.removeprefix(".")


def _halves(node: Any) -> Iterator[str]:
    """Their paths, none of which is written before it is known to lead to one."""
    if isinstance(node, str):
        if _SURROGATE.search(node):
            yield ""
    elif isinstance(node, dict):
        if any(map(_SURROGATE.search, node)):
            yield ""
        for key, each in node.items():
            yield from (f".{key[:100]}{path}" for path in _halves(each))
    elif isinstance(node, list):
        for n, each in enumerate(node):
            yield from (f"[{n}]{path}" for path in _halves(each))
