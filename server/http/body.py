"""How requests begin: their time limits, their bodies within bounds, off the loop what is large.

    headers → time limits → not stopping? → body → media type → a model that takes it? → parse

What a body may cost in memory is bounded here and in middleware.py, what its JSON may in json.py.
Each endpoint parses its larger bodies off the loop, one at a time.
"""

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import anyio
import anyio.to_thread
from starlette.types import Receive, Scope

from batching.errors import ClientGone, DeadlineExceeded, Draining, InvalidInput
from batching.request_queue import WorkItem
from server.engine import Engine
from server.http.errors import HttpError
from server.settings import Settings

CLOSE = [(b"connection", b"close")]
# A refused body is still read, and dropped, for so long, so that clients get to the answer.
LINGER_S = 5.0
# Larger JSON is parsed off the event loop.
INLINE_BYTES = 1 << 16

Headers = Mapping[bytes, bytes]  # names in lower case, as ASGI gives them
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Monotonic seconds, infinite where there is no limit. For work that answers all at once,
    `first` is all there is."""

    first: float  # until an answer begins
    whole: float  # until it has ended


async def read_request(
    scope: Scope, receive: Receive, settings: Settings, engine: Engine
) -> tuple[Headers, bytes, Deadlines]:
    """How every POST begins: its headers by name, its whole body, its time limits.

    The header X-Request-Timeout-Ms may only shorten the setting. Raises InvalidInput (400) where
    it is no time, Draining (503) before the body is read, and what `read_body` raises."""
    headers, now = dict(scope["headers"]), time.monotonic()
    whole = math.inf
    if (given := headers.get(b"x-request-timeout-ms")) is not None:
        if not given.isdigit() or len(given) > 10 or not int(given):
            raise InvalidInput("must be a positive whole number", "X-Request-Timeout-Ms")
        whole = now + int(given) / 1000
    deadlines = Deadlines(min(now + settings.request_timeout_s, whole), whole)
    if engine.draining:
        raise Draining("the server is stopping", 5)
    return headers, await read_body(receive, headers, settings, deadlines.first), deadlines


async def read_json_request(
    scope: Scope, receive: Receive, settings: Settings, engine: Engine, name: str
) -> tuple[bytes, Deadlines]:
    """The body, not parsed yet, and the time limits of a request in JSON to a model by name.

    Beyond what `read_request` raises: HttpError (415) for a media type that cannot be JSON,
    and a Refused (503) if the model takes nothing now."""
    headers, body, deadlines = await read_request(scope, receive, settings, engine)
    require_json(headers)
    if (refusal := engine.refusal(name)) is not None:
        raise refusal
    return body, deadlines


async def read_body(
    receive: Receive, headers: Headers, settings: Settings, deadline: float
) -> bytes:
    """The whole body; HttpError (413), ClientGone, or HttpError (408) once nothing has arrived
    for BODY_TIMEOUT_S, or at the deadline."""
    limit = int(settings.max_body_mb * 1_000_000)
    declared = headers.get(b"content-length", b"")
    announced = int(declared[:20]) if declared.isdigit() else 0
    loop, chunks, size = asyncio.get_running_loop(), [], 0
    try:
        async with asyncio.timeout(None) as timer:
            while max(announced, size) <= limit:
                left_s = min(settings.body_timeout_s, deadline - time.monotonic())
                timer.reschedule(loop.time() + left_s)
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone("the client has gone")
                chunks.append(message.get("body", b""))
                size += len(chunks[-1])
                if size <= limit and not message.get("more_body", False):
                    return b"".join(chunks)
    except TimeoutError:
        late = "the body stopped arriving, or came too slowly for the request's time limit"
        raise HttpError(408, late, headers=CLOSE) from None
    if size or headers.get(b"expect", b"").lower() != b"100-continue":  # else it will not be sent
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                while (await receive()).get("more_body", False):
                    pass
    raise HttpError(413, f"the body is larger than {limit / 1_000_000:g} MB", headers=CLOSE)


async def abort_on_disconnect(receive: Receive, items: Sequence[WorkItem]) -> None:
    """Resolve the items once the client leaves; after the answer, when that is reported too, this
    does nothing."""
    while (await receive())["type"] != "http.disconnect":
        pass
    for item in items:
        item.resolve(ClientGone("the client has gone"))


def require_json(headers: Headers) -> None:
    """415 for what cannot be JSON. curl's form type can: it is what `curl -d '{…}'` sends."""
    media = media_type(headers)
    if media.partition("/")[0] in ("multipart", "image", "audio", "video"):
        raise HttpError(415, f"this takes application/json, not {media[:100]!r}")


def media_type(headers: Headers) -> str:
    """In lower case, without its parameters; empty if there is none."""
    return headers.get(b"content-type", b"").partition(b";")[0].strip().lower().decode("latin-1")


class Parsing:
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
