"""A DeltaStream gives all deltas, or ends with the error of the request."""

import asyncio
import math
import time
import tracemalloc
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from batching.errors import ItemFailed
from batching.fair_share import WorkOwner
from batching.request_queue import FairQueue, RequestQueue
from server.core.delta_stream import DeltaStream, TokenStream
from server.core.request_context import RequestContext, RequestRecord
from server.core.worker_client import (
    FEW_READERS,
    MAX_WOKEN,
    Deadlines,
    IncomingRequest,
    Submission,
    WorkerClient,
)
from tests.fake_generator import DeltaQueue
from worker.messages.deltas import MAX_UNREAD, Delta, DeltaPart

pytestmark = pytest.mark.anyio

NO_LIMITS = Deadlines(math.inf, math.inf)


@asynccontextmanager
async def streaming() -> AsyncIterator[DeltaStream[str]]:
    """Of one item, without a worker."""
    with DeltaStream[str](client_of(), "x", ["a"], incoming()) as stream:
        yield stream


def incoming() -> IncomingRequest:
    scope = {"context": RequestContext(b""), "record": RequestRecord()}
    return IncomingRequest(scope, None, NO_LIMITS)


def client_of(**more: Any) -> Any:
    """Return a WorkerClient without a worker."""
    queue, loop = RequestQueue(10, time.monotonic), asyncio.get_running_loop()

    def submit(
        owner: WorkOwner, name: str, payloads: list[str], deadline: float, stream: Any
    ) -> Any:
        return queue.accept(owner, payloads, deadline, FairQueue(10), name, stream)

    model = SimpleNamespace(served_name="fake")
    return SimpleNamespace(loop=loop, queue=queue, submit=submit, models={"x": model}, **more)


async def test_the_header_and_the_record_have_the_times_of_the_first_input_and_the_last() -> None:
    with Submission[None](client_of(), "x", ["a", "b"], incoming()) as work:
        for item, at in zip(work.items, (30.0, 20.0), strict=True):
            item.accepted_at, item.arrived_at = 10.0, at
            item.started_at, item.finished_at = at + 1, at + 2
    record, [(_, timing), _] = work.record, work.timing_headers()
    stages = record.accepted_at, record.prepared_at, record.started_at, record.ended_at
    assert stages == (10, 20, 21, 32)
    assert timing == b"queue;dur=10000.00, batch;dur=1000.00, model;dur=11000.00"


@pytest.mark.parametrize("error", [None, ItemFailed("late")])
async def test_collect_returns_all_deltas_or_raises_the_failure(error: Exception | None) -> None:
    async with streaming() as stream:
        whole = asyncio.create_task(stream.collect())
        for part in ("one", "two"):
            stream.push(part)
            await asyncio.sleep(0)
        stream.push("three")
        stream.items[0].resolve(error)
        if error:
            with pytest.raises(ItemFailed):
                await whole
        else:
            assert await whole == ["one", "two", "three"]


async def test_read_returns_the_deltas_before_a_failure() -> None:
    async with streaming() as stream:
        stream.push("one")
        stream.items[0].resolve(ItemFailed("late"))
        await asyncio.sleep(0)
        assert await stream.read() == ["one"]
        assert stream.unfinished
        with pytest.raises(ItemFailed):
            await stream.read()


async def test_few_readers_wake_at_once_and_many_together() -> None:
    client, timers = WorkerClient.__new__(WorkerClient), list[Any]()
    later: Any = SimpleNamespace(call_later=lambda seconds, wake: timers.append(wake))
    client.loop, client.readers, client._to_wake = later, FEW_READERS, {}
    one, two = asyncio.Event(), asyncio.Event()
    client.wake_reader(one.set)
    assert one.is_set()
    one.clear()
    client.readers += 1
    for arrival in (one, two, one):
        client.wake_reader(arrival.set)
    assert not one.is_set()
    assert len(timers) == 1
    timers.pop()()
    assert one.is_set()
    assert two.is_set()
    one.clear()
    client.wake_reader(one.set)
    assert len(timers) == 1


def test_many_readers_wake_in_groups_between_which_the_loop_serves_others() -> None:
    client, due = WorkerClient.__new__(WorkerClient), list[Any]()
    loop: Any = SimpleNamespace(
        call_later=lambda seconds, wake: due.append(wake),
        call_soon=lambda wake, *arguments: due.append(partial(wake, *arguments)),
    )
    client.loop, client.readers, client._to_wake = loop, FEW_READERS + 1, {}
    arrivals = [asyncio.Event() for _ in range(2 * MAX_WOKEN + 1)]
    for arrival in arrivals:
        client.wake_reader(arrival.set)
    for woken in (MAX_WOKEN, 2 * MAX_WOKEN, len(arrivals)):
        due.pop()()
        assert [arrival.is_set() for arrival in arrivals].count(True) == woken
    assert not due


def token_stream(client: Any, choices: int) -> TokenStream:
    histogram: Any = SimpleNamespace(observe=lambda seconds: None)
    metric = SimpleNamespace(labels=lambda model: histogram)
    client.metrics = SimpleNamespace(first_token=metric, per_token=metric)
    payload: Any = SimpleNamespace(n=choices)
    return TokenStream(client, "x", [payload], incoming())


async def test_the_first_and_the_last_token_of_a_stream_do_not_wait() -> None:
    waiting = list[Callable[[], None]]()
    client = client_of(readers=0, wake_reader=waiting.append)
    with token_stream(client, choices=1) as stream:
        reading = asyncio.create_task(stream.read())
        await asyncio.sleep(0)
        assert client.readers == 1
        choice = DeltaQueue(0)
        choice.push(Delta(0, tokens=1))
        stream.push(choice)
        assert [delta.tokens for delta in await reading] == [1]
        assert not waiting
        for _ in range(2):
            choice.push(Delta(0, tokens=1))
            stream.push(choice)
        assert len(set(waiting)) == 1
        assert not stream.arrival.is_set()
        choice.push(Delta(0, tokens=1, finish_reason="stop"))
        stream.push(choice)
        stream.items[0].resolve(None)
        assert [delta.tokens for delta in await stream.read()] == [3]
    assert client.readers == 0


async def test_a_reader_that_has_read_its_deltas_does_not_wake() -> None:
    """With nothing to read it would send a comment, as on an idle connection."""
    waiting = list[Callable[[], None]]()
    client = client_of(readers=0, wake_reader=waiting.append)
    with token_stream(client, choices=2) as stream:
        one, two = DeltaQueue(0), DeltaQueue(1)
        one.push(Delta(0, tokens=1))
        stream.push(one)
        await stream.read()
        one.push(Delta(0, tokens=1))
        two.push(Delta(1, tokens=1, finish_reason="stop"))
        stream.push(one)
        stream.push(two)
        assert [delta.choice for delta in await stream.read()] == [0, 1]
        waiting.pop()()
        assert not stream.arrival.is_set()
        one.push(Delta(0, tokens=1))
        stream.push(one)
        waiting.pop()()
        assert stream.arrival.is_set()
        await stream.read()
        one.push(Delta(0, tokens=1))
        stream.push(one)
        assert len(stream.take()) == 1
        stream.push(one)  # of a token that was read meanwhile
        waiting.pop()()
        assert not waiting
        assert not stream.arrival.is_set()
        one.push(Delta(0, tokens=1))
        stream.push(one)
        one.push(Delta(0, tokens=1, finish_reason="stop"))
        stream.take()  # before the push
        stream.push(one)
        assert stream.arrival.is_set()
        assert not await stream.read()
        assert not stream.unfinished


async def test_a_text_that_cannot_be_written_for_a_slow_reader_wakes_it() -> None:
    def fail() -> Delta:
        raise ItemFailed("no text")

    client = client_of(readers=0, wake_reader=lambda wake: wake())
    with token_stream(client, choices=1) as stream:
        choice = DeltaQueue(0)
        choice.push(Delta(0, tokens=1))
        stream.push(choice)
        await stream.read()
        reading = asyncio.create_task(stream.read())
        await asyncio.sleep(0)
        for _ in range(MAX_UNREAD):
            choice.push(Delta(0, tokens=1))
        choice.take_delta = fail  # type: ignore[method-assign]  # as a decoder that raises
        stream.push(choice)
        with pytest.raises(ItemFailed):
            await asyncio.wait_for(reading, 1)


async def test_a_response_that_is_read_before_its_item_ends_has_an_end() -> None:
    """The worker ends the item with its step, which may still run when the last token is read."""
    with token_stream(client_of(readers=0), choices=1) as stream:
        choice = DeltaQueue(0)
        choice.push(Delta(0, tokens=2, finish_reason="stop"))
        stream.push(choice)
        assert [delta.tokens for delta in await stream.read()] == [2]
        assert not stream.unfinished
    record = stream.record
    assert record.ended_at >= record.first_token_at > 0
    assert record.per_token_s >= 0


async def test_a_choice_with_many_unread_tokens_is_written_alone() -> None:
    with token_stream(client_of(readers=0), choices=2) as stream:
        choices = DeltaQueue(0), DeltaQueue(1)
        for choice, tokens in zip(choices, (MAX_UNREAD - 1, MAX_UNREAD), strict=True):
            for _ in range(tokens):
                choice.push(Delta(choice.choice, tokens=1))
            stream.push(choice)
        assert [choice.unread for choice in choices] == [MAX_UNREAD - 1, 0]


async def test_text_that_is_not_read_yet_is_not_copied_with_each_token() -> None:
    tracemalloc.start()
    unread = Delta(0)
    for text in ("字" * 1_000_000, *["字"] * 100):  # CPython does so once the code is warm
        unread.merge(Delta(0, [DeltaPart("content", text)]))
    before, _ = tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    unread.merge(Delta(0, [DeltaPart("content", "字a")]))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert unread.text == "字" * 1_000_101 + "a"
    assert peak - before < 100_000
