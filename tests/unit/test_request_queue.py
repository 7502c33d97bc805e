import asyncio
import math
from collections.abc import Sequence
from typing import Any

import pytest

from batching.errors import ClientGone, DeadlineExceeded, DeadlineHopeless, Draining, QueueFull
from batching.fair_share import Priority, WorkOwner
from batching.request_queue import FairQueue, RequestQueue, WorkItem
from batching.step_times import StepTimes
from server.core.worker_client import size_of
from worker.messages.protocol import PipelineInput

pytestmark = pytest.mark.anyio


class Queue(RequestQueue):
    """A queue with one model's and a clock that stands still."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity, lambda: 100.0)
        self.times = StepTimes()
        self.of_model = FairQueue(8, lambda: self.times)

    def admit(
        self,
        payloads: Sequence[Any],
        deadline: float,
        client: str | None = None,
        flow: str | None = None,
        priority: Priority = Priority.INTERACTIVE,
    ) -> list[WorkItem]:
        owner = WorkOwner(client, flow=flow, priority=priority)
        return self.accept(owner, payloads, deadline, self.of_model, "model")

    def admit_each(
        self, count: int, deadline: float, client: str | None = None, flow: str | None = None
    ) -> list[WorkItem]:
        """Admit requests of an input each."""
        return [self.admit([n], deadline, client, flow)[0] for n in range(count)]

    async def measure(self, tokens: int, seconds: float) -> None:
        """Serve an item of so many tokens in so many seconds."""
        self.times = StepTimes()
        self.times.learn(tokens, 0, seconds)
        (item,) = self.admit(["x"], 1e9)
        assert await self.take() == [item]
        item.computed = tokens
        self.start([item])
        self.release([item])


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


async def test_a_list_takes_all_slots_and_leaves_others_their_part() -> None:
    q = queue(8)
    long = q.admit(range(1024), 200)
    bystanders = q.admit_each(4, 200)
    with pytest.raises(QueueFull, match="the queue is full: 8 of 8 slots are in use"):
        q.admit_each(8, 200)
    assert q.pending >= 1024 + len(bystanders)
    q.release(long)
    assert q.admit_each(1, 200)
    q.release(list(q.items))
    assert (q.slots.total, q.pending) == (0, 0)
    assert len(q.admit_each(8, 200)) == 8


@pytest.mark.parametrize("other", [{"client": "b"}, {"client": "a", "flow": "y"}])
async def test_who_has_all_slots_leaves_half_to_another(other: dict[str, str]) -> None:
    q = queue(8)
    many = q.admit_each(8, 200, client="a", flow="x")  # alone, it uses all
    with pytest.raises(QueueFull):
        q.admit_each(2, 200, client="a", flow="x")
    few = q.admit_each(3, 200, **other)
    with pytest.raises(QueueFull):
        q.admit_each(2, 200, **other)
    q.release([*many, *few])
    assert len(q.admit_each(6, 200, **other)) == 6


async def test_a_client_with_many_flows_and_requests_leaves_others_half() -> None:
    q = queue(8)
    for n in range(50):
        try:
            q.admit([n], 200, "a", f"flow {n}")
        except QueueFull:
            break
    assert q.pending < 8 * 3
    assert len(q.admit_each(4, 200, client="b")) == 4


@pytest.mark.parametrize(("needed_s", "retry_after_s"), [(20.0, 20), (0.001, 1), (99.5, 100)])
async def test_retry_after_is_the_time_the_queue_needs(needed_s: float, retry_after_s: int) -> None:
    q = queue(10)
    await q.measure(10, needed_s / 10)
    q.admit(range(10), 1e9)
    with pytest.raises(QueueFull) as refused:
        q.admit_each(10, 1e9)
    assert refused.value.retry_after_s == retry_after_s


async def test_hopeless_deadline_is_refused_at_once_and_only_then() -> None:
    q = queue(100)
    q.release(q.admit(range(10), 101))  # nothing measured yet
    await q.measure(10, 5.0)
    ahead = q.admit(["x"], 1000)
    q.release(q.admit(["x"], 100 + 5.5))
    with pytest.raises(DeadlineHopeless):
        q.admit(["x"], 100 + 4.5)
    q.release(ahead)
    q.admit(["x"], 100.001)  # an empty queue accepts any deadline


async def test_lower_classes_leave_others_most_slots() -> None:
    q = queue(8)
    q.admit(range(100), math.inf, priority=Priority.BACKGROUND)
    with pytest.raises(QueueFull, match="the background is full: 2 of 2 slots are in use"):
        q.admit(["c"], math.inf, "b", priority=Priority.BACKGROUND)
    assert len(q.admit_each(7, 200)) == 7
    with pytest.raises(QueueFull, match="the queue is full"):
        q.admit_each(2, 200)


async def test_items_that_await_a_model_join_its_queue_in_order() -> None:
    q = queue(8)
    first = q.accept(WorkOwner("a"), range(3), 200, q.of_model, "model", awaits_model=True)
    second = q.accept(WorkOwner("b"), ["x"], 200, q.of_model, "model", awaits_model=True)
    assert (await q.take(), q.awaiting["model"], q.awaiting_slots.total) == ([], 4, 4)
    q.release(first[:1])
    assert (q.awaiting["model"], q.awaiting_slots.total) == (3, 3)
    q.has_model("model", q.of_model)
    assert await q.take() == [first[1], second[0], first[2]]
    assert (q.awaiting["model"], q.awaiting_slots.total) == (0, 0)


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


def test_size_of_zero_shot_counts_the_pair_of_each_label() -> None:
    payload = PipelineInput("ten chars.", {"candidate_labels": ["a", "bc"]})
    assert size_of(payload) == (1, 2 * 10 + 3)
    assert size_of(PipelineInput("ten chars.")) == (1, 10)
