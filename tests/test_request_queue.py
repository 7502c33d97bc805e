import asyncio
import math

import pytest

from batching.errors import (
    ClientGone,
    DeadlineExceeded,
    DeadlineHopeless,
    Draining,
    QueueFull,
)
from batching.request_queue import RequestQueue, retry_after

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def queue(capacity: int = 2) -> RequestQueue:
    return RequestQueue(capacity, lambda: 100.0)


async def test_places_are_bounded_and_come_back() -> None:
    q = queue(2)
    first, second = q.accept(["a"], 200), q.accept(["b"], 200)
    with pytest.raises(QueueFull):
        q.accept(["c"], 200)
    assert q.pending == 2
    q.forget(first)
    q.accept(["c"], 200)
    q.forget(second)
    assert q.pending == 1


async def test_a_list_is_accepted_whole_or_not_at_all() -> None:
    q = queue(3)
    q.accept(["a", "b"], 200)
    with pytest.raises(QueueFull):
        q.accept(["c", "d"], 200)
    assert q.pending == 2


async def test_retry_after_is_the_time_the_queue_needs() -> None:
    q = queue(10)
    q.pipeline.record(items=10, tokens=10, seconds=20.0)
    q.accept(range(10), 1000)
    with pytest.raises(QueueFull) as refused:
        q.accept(["x"], 1000)
    assert refused.value.retry_after_s == 20
    assert retry_after(0.001) == 1
    assert retry_after(99.5) == 100


async def test_hopeless_deadline_is_refused_at_once_and_only_then() -> None:
    q = queue(100)
    ahead = q.accept(range(10), 101)  # nothing measured yet: no guess
    q.pipeline.record(items=10, tokens=10, seconds=5.0)
    q.forget(q.accept(["x"], 100 + 5.1))
    with pytest.raises(DeadlineHopeless):
        q.accept(["x"], 100 + 4.9)
    q.forget(ahead)
    q.accept(["x"], 100.001)  # an empty queue is never hopeless: it measures anew


async def test_the_background_has_a_quarter_of_the_places_and_is_nobodys_wait() -> None:
    q = queue(8)
    behind = q.accept(["a", "b"], math.inf, q.background)
    with pytest.raises(QueueFull, match="background"):
        q.accept(["c"], math.inf, q.background)
    assert (q.background.ahead, q.generation.ahead) == (2, 0)
    q.accept(range(6), 200, q.generation)
    with pytest.raises(QueueFull):
        q.accept(["x"], 200, q.generation)
    q.forget(behind[:1])
    q.accept(["c"], math.inf, q.background)


async def test_items_resolve_once() -> None:
    q = queue()
    (item,) = q.accept(["x"], 200)
    assert item.resolve(DeadlineExceeded("late"))
    assert not item.resolve("answer")
    with pytest.raises(DeadlineExceeded):
        await item.future
    q.forget([item])
    assert not q.waiting


async def test_forgotten_items_count_as_gone() -> None:
    q = queue()
    (item,) = q.accept(["x"], 200)
    q.forget([item])
    assert not item.open
    assert isinstance(item.future.exception(), ClientGone)


async def test_take_hands_out_all_there_is_in_order() -> None:
    q = queue(10)
    items = q.accept(range(5), 200)
    assert await q.take() == items


async def test_settled_waits_for_the_last_place() -> None:
    q = queue(10)
    await q.settled()
    (item,) = q.accept(["x"], 200)
    waiting = asyncio.create_task(q.settled())
    await asyncio.sleep(0)
    assert not waiting.done()
    q.resolve_all(lambda: Draining("stopping"))
    assert isinstance(item.future.exception(), Draining)
    q.forget([item])
    await waiting
