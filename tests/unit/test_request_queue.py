import asyncio
import math
from collections.abc import Sequence
from typing import Any

import pytest

from batching.errors import (
    ClientGone,
    DeadlineExceeded,
    DeadlineHopeless,
    Draining,
    QueueFull,
)
from batching.fair_share import Priority, WorkOwner
from batching.request_queue import BatchLane, Lane, RequestQueue, WorkItem
from batching.round_robin import RoundRobin
from tests.fake_generator import FakeGenerator
from worker.registry import language_model

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Queue(RequestQueue):
    """A queue with a default lane and a clock that stands still."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity, lambda: 100.0)
        self.lane = BatchLane("pipeline", capacity)

    def admit(
        self,
        payloads: Sequence[Any],
        deadline: float,
        lane: Lane | None = None,
        client: str | None = None,
        flow: str | None = None,
    ) -> list[WorkItem]:
        owner = WorkOwner(client, flow=flow)
        return self.accept(owner, payloads, deadline, lane or self.lane, "model")

    def admit_each(
        self,
        count: int,
        deadline: float,
        lane: Lane | None = None,
        client: str | None = None,
        flow: str | None = None,
    ) -> list[WorkItem]:
        """Admit requests of an input each."""
        return [self.admit([n], deadline, lane, client, flow)[0] for n in range(count)]


def queue(capacity: int = 2) -> Queue:
    return Queue(capacity)


async def test_slots_are_limited_and_can_be_reused() -> None:
    q = queue(2)
    first, second = q.admit(["a"], 200), q.admit(["b"], 200)
    with pytest.raises(QueueFull):
        q.admit(["c"], 200)
    assert q.pending == 2
    q.release(first)
    q.admit(["c"], 200)
    q.release(second)
    assert q.pending == 1


@pytest.mark.parametrize("capacity", [4, 8, 1024])
async def test_a_list_uses_all_slots_and_yields_them(capacity: int) -> None:
    q = queue(capacity)
    long = q.admit(range(1024), 200)
    assert q.slots.used == capacity
    assert await q.take() == long
    bystanders = q.admit_each(capacity // 2, 200)
    another = q.admit(range(1024), 200)
    with pytest.raises(QueueFull):
        q.admit_each(capacity, 200)
    assert q.slots.used == capacity
    assert q.pending >= 2048 + len(bystanders)
    assert another[0] in q.slots._holders[another[0].owner]
    q.release(list(q.items))
    assert (q.slots.used, q.lane.slots.used, q.pending) == (0, 0, 0)
    assert len(q.admit_each(capacity, 200)) == capacity


async def test_inputs_of_lists_take_free_slots_in_turn() -> None:
    q = queue(4)
    singles = q.admit_each(3, 200)
    first, second = q.admit(range(3), 200, client="a"), q.admit(range(3), 200, client="b")
    assert q.slots.used == 4
    q.release(singles)
    assert q.slots._shares.of_request(first[0].owner) == 2
    assert q.slots._shares.of_request(second[0].owner) == 2


async def test_one_slot_is_never_shared() -> None:
    q = queue(1)
    (single,) = q.admit_each(1, 200, client="a")
    with pytest.raises(QueueFull):
        q.admit_each(1, 200, client="b")
    q.release([single])
    assert q.admit_each(1, 200, client="b")


async def test_a_client_with_all_slots_yields_up_to_half() -> None:
    q = queue(8)
    many = q.admit_each(8, 200, client="a")  # alone, it uses all
    with pytest.raises(QueueFull):
        q.admit_each(1, 200, client="a")
    few = q.admit_each(4, 200, client="b")
    with pytest.raises(QueueFull):
        q.admit_each(1, 200, client="b")
    q.release(few[:1])
    with pytest.raises(QueueFull):  # an item of its own has the slot again
        q.admit_each(1, 200, client="a")
    assert q.slots._shares.of_client(many[0].owner) == 5
    assert q.admit_each(1, 200, client="b")


async def test_a_flow_with_all_slots_yields_up_to_half_to_others_of_its_client() -> None:
    q = queue(8)
    many = q.admit_each(8, 200, client="a", flow="x")  # alone, it uses all
    few = q.admit_each(4, 200, client="a", flow="y")
    for flow in "xy":
        with pytest.raises(QueueFull):
            q.admit_each(1, 200, client="a", flow=flow)
    assert q.admit_each(4, 200, client="b")
    assert q.slots._shares.of_client(many[0].owner) == 4  # no flow gains the client a slot
    q.release([*q.items])
    assert not q.slots._flows
    assert len(q.admit_each(8, 200, client="a", flow="y")) == 8
    assert not few[0].open


async def test_a_flow_gains_its_request_no_more_than_a_quarter() -> None:
    q = queue(8)
    q.admit_each(6, 200, client="a", flow="x")
    (first, *_) = q.admit(range(9), 200, client="a", flow="y")
    assert q.slots._flows["a", "y"] == 2
    assert not q.slots.has_room(first.owner)


async def test_lists_start_a_few_items_at_a_time_in_turn() -> None:
    q, lane = queue(8), BatchLane("long", 8, RoundRobin(2))
    first = q.admit(range(4), 200, lane)
    second = q.admit(range(2), 200, lane, client="b")
    assert await q.take() == first[:2]
    assert lane.not_started == 2
    for item, following in ((first[0], first[2]), (first[1], second[0]), (first[2], first[3])):
        item.resolve("result")
        await asyncio.sleep(0)
        assert await q.take() == [following]
    q.release(first)
    await asyncio.sleep(0)
    assert await q.take() == second[1:]
    q.release(second)
    assert lane.not_started == 0


@pytest.mark.parametrize(("needed_s", "retry_after_s"), [(20.0, 20), (0.001, 1), (99.5, 100)])
async def test_retry_after_is_the_time_the_queue_needs(needed_s: float, retry_after_s: int) -> None:
    q = queue(10)
    q.lane.record(items=10, tokens=10, seconds=needed_s)
    q.admit_each(10, 1000)
    with pytest.raises(QueueFull) as refused:
        q.admit(["x"], 1000)
    assert refused.value.retry_after_s == retry_after_s


async def test_hopeless_deadline_is_refused_at_once_and_only_then() -> None:
    q = queue(100)
    ahead = q.admit(range(10), 101)  # nothing measured yet
    q.lane.record(items=10, tokens=10, seconds=5.0)
    q.release(q.admit(["x"], 100 + 5.1))
    with pytest.raises(DeadlineHopeless):
        q.admit(["x"], 100 + 4.9)
    q.release(ahead)
    q.admit(["x"], 100.001)  # an empty queue accepts any deadline


async def test_background_requests_have_a_quarter_of_the_slots_and_delay_no_others() -> None:
    q, model = queue(8), language_model("generation", FakeGenerator, 8, 8)
    background = model.lane_of(Priority.BACKGROUND)
    behind = q.admit_each(2, math.inf, background)
    with pytest.raises(QueueFull, match="background"):
        q.admit(["c"], math.inf, background)
    assert (background.not_started, model.lane.not_started) == (2, 0)
    q.admit_each(6, 200, model.lane)
    with pytest.raises(QueueFull):
        q.admit(["x"], 200, model.lane)
    q.release(behind[:1])
    q.admit(["c"], math.inf, background)


async def test_a_lane_may_have_a_part_of_the_slots() -> None:
    q, small = queue(8), BatchLane("small", 2)
    items = q.admit_each(2, 200, small)
    with pytest.raises(QueueFull, match="the small is full: 2 of 2 slots are in use"):
        q.admit(["c"], 200, small)
    q.admit_each(6, 200)
    q.release(items)
    q.admit(["c"], 200, small)


async def test_items_resolve_once() -> None:
    q = queue()
    (item,) = q.admit(["x"], 200)
    assert item.resolve(DeadlineExceeded("late"))
    assert not item.resolve("result")
    with pytest.raises(DeadlineExceeded):
        await item.future
    q.release([item])
    assert not q.items


async def test_released_items_are_cancelled() -> None:
    q = queue()
    (item,) = q.admit(["x"], 200)
    q.release([item])
    assert not item.open
    assert isinstance(item.future.exception(), ClientGone)


async def test_take_returns_all_items_in_order() -> None:
    q = queue(10)
    items = q.admit(range(5), 200)
    assert await q.take() == items


async def test_drained_is_set_when_the_last_slot_is_free() -> None:
    q = queue(10)
    await q.drained.wait()
    (item,) = q.admit(["x"], 200)
    waiting = asyncio.create_task(q.drained.wait())
    await asyncio.sleep(0)
    assert not waiting.done()
    item.resolve(Draining("stopping"))
    await asyncio.sleep(0)
    assert not waiting.done()
    q.release([item])
    await waiting
