"""JSON: parse bodies within limits, large ones off the event loop; encode documents.

    bytes → count the values → parse → limits of lists (request_fields.py)

Parsing is one call that holds the interpreter lock, so its cost is limited before: values are
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
from anyio.lowlevel import RunVar

from batching.errors import DeadlineExceeded, InvalidInput

INLINE_BYTES = 1 << 16  # larger JSON is parsed off the event loop
MAX_VALUES = 1_000_000  # keys and values of one body
HEAVY_VALUES = 50_000  # more take tens of milliseconds
_DELIMITERS = b",", b":", b"[", b"{"  # each value and key but the first follows one
_CHUNK_BYTES = 1 << 16  # counted at once
SURROGATE = re.compile("[\ud800-\udfff]")

Document = dict[str, Any]  # a JSON object
EMPTY: tuple[Any, ...] = None, "", []  # a field with such a value counts as absent
Header = tuple[bytes, bytes]  # the name in lower case
A = TypeVar("A")
T = TypeVar("T")
_HEAVY_LIMITER: RunVar[anyio.CapacityLimiter | None] = RunVar("heavy_limiter")  # of an event loop

to_json = msgspec.json.Encoder().encode  # of structs, dicts and lists


class InvalidJson(InvalidInput): ...


class JsonBodyParser:
    """Parse an endpoint's bodies: large ones one at a time, in a thread. Many large bodies at once
    then take no more memory than one, and other endpoints are not slowed down by them.

    Bodies of many values are parsed one at a time in the process, since each holds the interpreter
    lock for long; bodies of fewer values do not wait for them."""

    def __init__(self) -> None:
        self._limiter = anyio.CapacityLimiter(1)

    async def run(
        self, parse: Callable[[bytes], T], body: bytes, deadline: float, blocks: bool = False
    ) -> T:
        """`blocks`: parsing takes long even for a small body."""
        if len(body) <= INLINE_BYTES:
            return await in_thread(parse, body, deadline, None) if blocks else parse(body)

        def parse_unless_heavy(body: bytes) -> tuple[T] | None:
            return None if has_values(body, HEAVY_VALUES) else (parse(body),)

        if result := await in_thread(parse_unless_heavy, body, deadline, self._limiter):
            return result[0]
        return await in_thread(parse, body, deadline, heavy_limiter())


def heavy_limiter() -> anyio.CapacityLimiter:
    """Return the event loop's limiter of bodies with many values."""
    if (limiter := _HEAVY_LIMITER.get(None)) is None:
        limiter = anyio.CapacityLimiter(1)
        _HEAVY_LIMITER.set(limiter)
    return limiter


async def in_thread(
    work: Callable[[A], T], argument: A, deadline: float, limiter: anyio.CapacityLimiter | None
) -> T:
    """Run a function in a pool thread. Raises DeadlineExceeded at the deadline."""
    try:
        with anyio.fail_after(deadline - time.monotonic()):
            return await anyio.to_thread.run_sync(work, argument, limiter=limiter)
    except TimeoutError:
        raise DeadlineExceeded("the body was not parsed within the time limit") from None


def parse_json(body: bytes) -> Document:
    """Return a JSON object. Raises InvalidInput for anything else."""
    document = parse_value(body)
    if not isinstance(document, dict):
        raise InvalidInput("the body must be a JSON object")
    return document


def parse_value(body: bytes, name: str = "the body") -> Any:
    """Return a JSON value. Raises InvalidInput, whose message starts with `name`."""
    if has_values(body, MAX_VALUES):
        raise InvalidInput(f"{name} has more than {MAX_VALUES} JSON values")
    try:
        return orjson.loads(body.removeprefix(BOM_UTF8))
    except orjson.JSONDecodeError as error:
        if not body:
            raise InvalidInput(f"{name} is empty: it must be JSON") from None
        if (param := _lone_surrogate(body)) is not None:
            raise InvalidInput.at(param, "has a lone surrogate: not Unicode text") from None
        raise InvalidJson(f"{name} is not valid JSON: {error}") from None


def read_object(text: str) -> Document:
    """Return the JSON object that a model has written; empty for anything else, such as one that is
    cut short. Lone surrogates, which a model may write and UTF-8 does not have, are replaced."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        try:
            whole = json.dumps(json.loads(text), ensure_ascii=False)
            value = orjson.loads(SURROGATE.sub("\ufffd", whole))
        except (ValueError, RecursionError):
            return {}
    return value if isinstance(value, dict) else {}


def has_values(body: bytes, number: int) -> bool:
    """Return whether JSON has more than a number of keys and values."""
    if len(body) <= number:
        return False
    count = in_string = 0
    for chunk in _without_escapes(body):  # every other quote starts or ends a string
        texts = chunk.split(b'"')
        outside = b"".join(texts[in_string::2])
        count += sum(map(outside.count, _DELIMITERS))
        in_string = (in_string + len(texts) - 1) % 2
        if count >= number:
            return True
    return False


def _without_escapes(body: bytes) -> Iterator[bytes]:
    """Yield chunks of JSON without escaped quotes and backslashes."""
    cut = b""  # the first half of an escape, at the end of a chunk
    for start in range(0, len(body), _CHUNK_BYTES):
        chunk = cut + body[start : start + _CHUNK_BYTES]
        cut = b"\\" if (len(chunk) - len(chunk.rstrip(b"\\"))) % 2 else b""
        chunk = chunk.removesuffix(cut)
        if b"\\" in chunk:
            chunk = chunk.replace(b"\\\\", b"").replace(b'\\"', b"")
        yield chunk


def _lone_surrogate(body: bytes) -> str | None:
    """Return the path of a string with a lone surrogate, which JSON's grammar allows and orjson
    refuses. Long bodies are not searched."""
    if b"\\u" not in body or len(body) > MAX_VALUES:
        return None
    try:
        path = next(_surrogate_paths(json.loads(body)), None)
    except (ValueError, RecursionError):
        return None
    return path and path.removeprefix(".")


def _surrogate_paths(node: Any) -> Iterator[str]:
    if isinstance(node, str):
        if SURROGATE.search(node):
            yield ""
    elif isinstance(node, dict):
        if any(map(SURROGATE.search, node)):
            yield ""
        for key, value in node.items():
            yield from (f".{key[:100]}{path}" for path in _surrogate_paths(value))
    elif isinstance(node, list):
        for n, value in enumerate(node):
            yield from (f"[{n}]{path}" for path in _surrogate_paths(value))
