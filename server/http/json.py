"""JSON: bodies parsed within bounds, off the loop what is large; documents written.

    bytes → how many values? → JSON → lists no longer than they may be (request_fields.py)

Parsing is one call that holds the interpreter, so what it may cost is known before: values are
counted without building any.
"""

import json
import re
import time
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import anyio
import anyio.to_thread
import msgspec
import orjson

from batching.errors import DeadlineExceeded, InvalidInput

INLINE_BYTES = 1 << 16  # larger JSON is parsed off the event loop
MOST_VALUES = 1_000_000  # keys and values of one body
_MARKS = b",", b":", b"[", b"{"  # each value and key but the first follows one
_PIECE = 1 << 16  # bytes counted in one go
_SURROGATE = re.compile("[\ud800-\udfff]")

Document = dict[str, Any]  # a JSON object
Header = tuple[bytes, bytes]  # the name in lower case
T = TypeVar("T")


def to_json(document: object) -> bytes:
    """By orjson, which knows dicts; structs become such."""
    return orjson.dumps(document, default=msgspec.to_builtins)


class JsonBodyParser:
    """How an endpoint makes requests of bodies: larger ones wait for each other, so that many at
    once take no more memory, and no more from other endpoints, than one does."""

    def __init__(self) -> None:
        self._turn = anyio.CapacityLimiter(1)

    async def run(
        self, parse: Callable[[bytes], T], body: bytes, deadline: float, blocks: bool = False
    ) -> T:
        """`blocks`: whether even a small one would hold up the loop."""
        large = len(body) > INLINE_BYTES
        if not (large or blocks):
            return parse(body)
        return await in_thread(parse, body, deadline, self._turn if large else None)


async def in_thread(
    work: Callable[[bytes], T], body: bytes, deadline: float, turn: anyio.CapacityLimiter | None
) -> T:
    try:
        with anyio.fail_after(deadline - time.monotonic()):
            return await anyio.to_thread.run_sync(work, body, limiter=turn)
    except TimeoutError:
        raise DeadlineExceeded("the body was not read within the time limit") from None


def parse_json(body: bytes) -> Document:
    """A JSON object; InvalidInput says what is wrong with anything else."""
    check_values(body)
    try:
        parsed = orjson.loads(body.removeprefix(BOM_UTF8))
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
