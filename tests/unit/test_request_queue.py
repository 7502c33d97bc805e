"""Slots, waits and what a model's queue dispatches, with simulated steps."""

import asyncio
import math
from collections import deque
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


# ── the queue of a model ──


def item_of(
    client: object = "a",
    chars: int = 39,
    flow: object = None,
    priority: Priority = Priority.INTERACTIVE,
    owner: WorkOwner | None = None,
) -> WorkItem:
    """Return an item of a new request, of ten tokens by default."""
    owner = owner or WorkOwner(client, flow=flow, priority=priority)
    return WorkItem(None, math.inf, 0.0, owner=owner, chars=chars)


def add(queue: FairQueue, count: int, client: object = "a", flow: object = None) -> list[WorkItem]:
    items = [item_of(client, flow=flow) for _ in range(count)]
    for item in items:
        queue.add(item)
    return items


class Model:
    """Runs `capacity` items side by side. A step takes 1 s, and a millisecond for each of the ten
    tokens of a prompt; each item generates `output` tokens."""

    def __init__(self, capacity: int, output: int) -> None:
        self.times = StepTimes()
        self.queue = FairQueue(capacity, lambda: self.times)
        self.output = output
        self.waiting: deque[WorkItem] = deque()
        self.running: list[WorkItem] = []
        self.now = 0.0

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.waiting += self.queue.take()
            prompts = 0
            while self.waiting and len(self.running) < self.queue.capacity:
                self.running.append(item := self.waiting.popleft())
                item.computed = 10
                prompts += 10
            seconds = 1 + prompts / 1000
            self.now += seconds
            self.times.learn(prompts, len(self.running), seconds)
            for item in [*self.running]:
                if not item.started:
                    self.queue.start(item)
                item.generated += 1
                if item.generated == self.output:
                    self.running.remove(item)
                    self.queue.remove(item)

    def wait_of(self, item: WorkItem) -> float:
        """Return how long an item waits that arrives now."""
        start = self.now
        self.queue.add(item)
        while not item.started:
            self.step()
        return self.now - start


def batches(token_s: float = 0.01) -> FairQueue:
    """Return the queue of a model that computes batches, which has run one of ten tokens."""
    times = StepTimes()
    times.learn(10, 0, 10 * token_s)
    queue = FairQueue(8, lambda: times)
    serve(queue, *add(queue, 1))
    return queue


def serve(queue: FairQueue, *items: WorkItem, tokens: int = 10) -> None:
    queue.take()
    for item in items:
        item.computed = tokens
        queue.start(item)
        queue.remove(item)


NEW = WorkOwner("new")


# ── the expected wait ──


def test_nothing_is_expected_before_the_first_measurement_or_without_a_model() -> None:
    queue = FairQueue(8, StepTimes)
    add(queue, 10)
    assert queue.expected_wait_s(NEW) == 0
    assert FairQueue(8).expected_wait_s(NEW) == 0


def test_the_wait_in_batches_is_the_time_of_the_tokens_before() -> None:
    queue = batches(token_s=0.01)
    long, short = item_of(chars=3999), item_of()
    queue.add(long)
    queue.add(short)
    assert queue.expected_wait_s(long.owner) == pytest.approx(10 + 0.1, rel=0.05)
    queue.take()
    queue.remove(long)
    assert queue.expected_wait_s(short.owner) == pytest.approx(0.1, rel=0.05)
    queue.remove(short)
    assert queue.expected_wait_s(NEW) == queue.not_started == 0


def test_tokens_are_expected_by_the_characters_of_late_items() -> None:
    queue = batches(token_s=0.01)
    for _ in range(300):
        serve(queue, *add(queue, 1), tokens=40)
    add(queue, 1)
    assert queue.expected_wait_s(WorkOwner("a")) == pytest.approx(0.4, rel=0.05)


@pytest.mark.parametrize(("capacity", "output"), [(2, 20), (64, 40)])
def test_a_new_item_waits_about_as_long_as_expected(capacity: int, output: int) -> None:
    model = Model(capacity, output)
    add(model.queue, 10 * capacity)
    model.step(2 * output)
    last = item_of()
    expected = model.queue.expected_wait_s(last.owner)
    assert 0.5 < expected / model.wait_of(last) < 2


def test_without_full_slots_only_prompts_delay_others() -> None:
    model = Model(64, 10)
    add(model.queue, 64)
    model.step(20)
    assert model.queue.expected_wait_s(NEW) == 0
    add(model.queue, 40)
    assert model.queue.expected_wait_s(WorkOwner("a")) < 1
    add(model.queue, 40)
    assert model.queue.expected_wait_s(WorkOwner("a")) > 1


@pytest.mark.parametrize("other", [{"client": "b"}, {"flow": "y"}])
def test_a_client_and_a_flow_wait_for_as_much_of_others_as_they_bring(
    other: dict[str, str],
) -> None:
    queue = batches(token_s=0.01)
    add(queue, 20)
    small = item_of(**other)  # type: ignore[arg-type]
    assert queue.expected_wait_s(small.owner) == pytest.approx(0.1, rel=0.1)
    assert queue.expected_wait_s(WorkOwner("a")) == pytest.approx(2, rel=0.1)
    queue.add(small)
    assert queue.expected_wait_s(item_of(**other).owner) == pytest.approx(0.3, 0.1)  # type: ignore[arg-type]


def test_classes_wait_for_each_other_by_their_weights() -> None:
    queue = batches(token_s=0.01)
    for priority in (Priority.INTERACTIVE, Priority.BATCH):
        for _ in range(80):
            queue.add(item_of(priority=priority))
    interactive, batch = (
        queue.expected_wait_s(WorkOwner("a", priority=p))
        for p in (Priority.INTERACTIVE, Priority.BATCH)
    )
    assert interactive == pytest.approx(8 + 1, rel=0.05)
    assert batch == pytest.approx(16, rel=0.05)


# ── the window ──


def test_twice_the_capacity_is_dispatched_and_the_next_as_one_is_answered() -> None:
    queue = FairQueue(4)
    items = add(queue, 20)
    assert queue.take() == items[:8]
    queue.start(items[0])
    assert not queue.take()
    queue.remove(items[0])
    assert queue.take() == items[8:9]
    queue.remove(items[15])  # its client has left
    for item in items[1:9]:
        queue.remove(item)
    assert queue.take() == [*items[9:15], *items[16:18]]


def test_texts_and_choices_of_an_item_take_as_many_places() -> None:
    queue, owner = FairQueue(4), WorkOwner("a")
    for _ in range(4):
        queue.add(large := item_of(owner=owner))
        large.units = 4
    assert len(queue.take()) == 2


def test_prompts_that_have_not_started_take_two_seconds_at_most() -> None:
    queue = batches(token_s=0.11)
    items = add(queue, 8)
    assert queue.take() == items[:2]
    queue.start(items[0])
    assert queue.take() == items[2:3]
    serve(queue, *items[1:3])
    assert queue.take() == items[3:5]
    serve(queue, *items[3:5])
    serve(queue, *items[5:7])
    serve(queue, items[7])
    queue.add(item_of(chars=39_999))
    assert len(queue.take()) == 1, "one item always is"


@pytest.mark.parametrize("other", [{"client": "b"}, {"flow": "y"}, {}])
@pytest.mark.parametrize("measured", [False, True])
def test_a_full_window_lets_a_client_a_flow_and_a_request_have_their_part(
    other: dict[str, str], measured: bool
) -> None:
    queue = batches(token_s=0.055) if measured else FairQueue(8)
    long = WorkOwner("a")
    for _ in range(100):
        queue.add(item_of(owner=long))
    taken = queue.take()
    assert len(taken) == (4 if measured else 16)
    for n in range(12):
        queue.add(small := item_of(**other))  # type: ignore[arg-type]
        passed = queue.take()
        if other:
            assert passed == ([small] if n < (1 if measured else 8) else [])
        elif n == 0:
            assert passed == [small]


def test_an_interactive_item_passes_a_window_that_lower_classes_fill() -> None:
    queue = FairQueue(8)
    for _ in range(100):
        queue.add(item_of(priority=Priority.BACKGROUND))
    assert len(queue.take()) == 16
    queue.add(chat := item_of())
    assert queue.take() == [chat]


def test_many_clients_exceed_the_window_by_a_few_times_only() -> None:
    queue = FairQueue(8)
    for client in range(1000):
        add(queue, 20, client)
        queue.take()
    assert queue._dispatched.total <= sum(16 / holder for holder in range(1, 17))


def test_clients_are_charged_what_has_run_for_them() -> None:
    """Clients that always wait, by the prompt and output tokens of their items."""
    costs = {"short": (10, 10), "long": (10, 190), "cached": (1, 10)}
    queue, got = FairQueue(1), dict.fromkeys(costs, 0)
    for client in costs:
        add(queue, 2000, client)
    served = queue.take()
    for _ in range(1500):
        item = served.pop(0)
        name = str(item.owner.client)
        item.computed, item.generated = costs[name]
        queue.start(item)
        queue.remove(item)
        got[name] += item.computed + item.generated
        served += queue.take()
    assert got["short"] == pytest.approx(got["long"], rel=0.1)
    assert got["short"] == pytest.approx(got["cached"], rel=0.1)


def test_nothing_is_kept_of_items_that_have_left() -> None:
    queue = FairQueue(4)
    for n in range(500):
        items = add(queue, 3, n)
        passed = queue.take()
        for item in passed[::2]:
            queue.start(item)
        for item in items:
            queue.remove(item)
        queue.take()
    assert (queue.not_started, queue._running, bool(queue._order)) == (0, 0, False)
    assert not queue._order._levels
    for held in (queue._dispatched, queue._unstarted, queue._ahead):
        assert (held.total, len(held._holdings)) == (0, 1)


def test_the_lowest_rank_of_a_flow_is_first() -> None:
    """Other flows and clients are served in turn, whatever the rank."""
    queue = FairQueue(1)
    first = add(queue, 3)  # of which the window takes two
    assert queue.take() == first[:2]
    late = item_of(owner=WorkOwner("a", rank=5))
    early = [item_of(owner=WorkOwner("a", rank=-1)) for _ in range(2)]
    other = item_of("b")
    for item in (late, *early, other):
        queue.add(item)
    order = queue.take()  # the other client has its part
    for item in (*first[:2], other):
        queue.start(item)
        queue.remove(item)
        order += queue.take()
    for item in [*early, first[2], late]:
        queue.start(item)
        queue.remove(item)
        order += queue.take()
    assert order == [other, *early, first[2], late]
