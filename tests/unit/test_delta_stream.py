"""A DeltaStream gives all deltas, or ends with the error of the request."""

import asyncio
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from batching.errors import ItemFailed
from batching.request_queue import RequestQueue, StepLane
from server.core.delta_stream import DeltaStream
from server.core.request_context import RequestContext
from server.core.worker_client import Deadlines


@asynccontextmanager
async def streaming() -> AsyncIterator[DeltaStream[str]]:
    """Of one item, without a worker."""
    queue, loop = RequestQueue(10, time.monotonic), asyncio.get_running_loop()

    def submit(
        name: str,
        payloads: list[str],
        deadline: float,
        stream: Any,
        cache_namespace: bytes,
        *_: Any,
    ) -> Any:
        return queue.accept(payloads, deadline, StepLane(name, 10), name, stream, cache_namespace)

    model = SimpleNamespace(served_name="fake")
    worker_client: Any = SimpleNamespace(loop=loop, queue=queue, submit=submit, models={"x": model})
    deadlines, context = Deadlines(math.inf, math.inf), RequestContext("")
    with DeltaStream[str](worker_client, "x", ["a"], deadlines, None, context) as stream:
        yield stream


def test_collect_returns_all_deltas() -> None:
    async def collected() -> list[str]:
        async with streaming() as stream:
            whole = asyncio.create_task(stream.collect())
            for part in ("one", "two"):
                stream.push(part)
                await asyncio.sleep(0)
            stream.push("three")
            stream.items[0].resolve(None)
            return await whole

    assert asyncio.run(collected()) == ["one", "two", "three"]


def test_collect_raises_a_failure_after_some_deltas() -> None:
    async def collected() -> None:
        async with streaming() as stream:
            whole = asyncio.create_task(stream.collect())
            stream.push("one")
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            stream.push("two")
            stream.items[0].resolve(ItemFailed("late"))
            with pytest.raises(ItemFailed):
                await whole

    asyncio.run(collected())


def test_read_returns_the_deltas_before_a_failure() -> None:
    async def read() -> None:
        async with streaming() as stream:
            stream.push("one")
            stream.items[0].resolve(ItemFailed("late"))
            await asyncio.sleep(0)
            assert await stream.read() == ["one"]
            assert stream.unfinished
            with pytest.raises(ItemFailed):
                await stream.read()

    asyncio.run(read())
