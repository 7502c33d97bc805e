"""What a request is given in parts is whole, or ends with what went wrong."""

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
from server.core.worker_client import Deadlines


@asynccontextmanager
async def streaming() -> AsyncIterator[DeltaStream[str]]:
    """Of one item, without a worker."""
    queue, loop = RequestQueue(10, time.monotonic), asyncio.get_running_loop()

    def submit(
        name: str, payloads: list[str], deadline: float, stream: Any, cache_namespace: bytes
    ) -> Any:
        return queue.accept(payloads, deadline, StepLane(name, 10), name, stream, cache_namespace)

    worker_client: Any = SimpleNamespace(loop=loop, queue=queue, submit=submit)
    with DeltaStream[str](worker_client, "x", ["a"], Deadlines(math.inf, math.inf), None) as stream:
        yield stream


def test_a_whole_answer_has_all_parts() -> None:
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


def test_parts_before_a_failure_are_no_whole_answer() -> None:
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


def test_a_failure_is_read_after_the_parts_before_it() -> None:
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
