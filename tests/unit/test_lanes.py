"""The expected wait of a new item, with a fake clock."""

import math
from collections import deque
from typing import Any

import pytest

from batching.fair_share import Priority, WorkOwner
from batching.request_queue import BatchLane, Lane, StepLane, WorkItem


def accept(lane: Lane, *tokens: int, client: str | None = None) -> list[WorkItem]:
    """Accept requests of an item each; those of zero tokens are not prepared yet."""
    items = []
    for count in tokens:
        item: WorkItem = WorkItem(None, math.inf, 0.0, owner=WorkOwner(client))
        lane.add(item)
        if count:
            item.tokens = count
            lane.add_prepared(item)
        items.append(item)
    return items


# ── in batches ──


def batches() -> BatchLane:
    return BatchLane("pipeline", 1000)


def test_the_expected_wait_is_zero_before_the_first_measurement() -> None:
    lane = batches()
    accept(lane, 100, 0)
    assert lane.expected_wait_s(0) == 0


def test_the_expected_wait_is_proportional_to_tokens() -> None:
    lane = batches()
    lane.record(items=10, tokens=100, seconds=1.0)
    long, short = accept(lane, 1000, 10)
    assert lane.expected_wait_s(0) == pytest.approx(10.1)
    lane.release(long)
    assert lane.expected_wait_s(0) == pytest.approx(0.1)
    lane.release(short)
    assert lane.expected_wait_s(0) == 0
    assert lane.not_started == 0


def test_an_unprepared_item_counts_as_the_mean() -> None:
    lane = batches()
    lane.record(items=10, tokens=200, seconds=2.0)
    unknown, known = accept(lane, 0, 5)
    assert lane.expected_wait_s(0) == pytest.approx(0.2 + 0.05)
    unknown.tokens = 50
    lane.add_prepared(unknown)
    assert lane.expected_wait_s(0) == pytest.approx(0.5 + 0.05)
    lane.release(unknown)
    lane.release(known)
    (gone,) = accept(lane, 0)
    lane.release(gone)
    lane.add_prepared(gone)  # it was in the pool
    assert lane.expected_wait_s(0) == 0


def test_long_inputs_do_not_change_the_time_per_token() -> None:
    lane = batches()
    for tokens in (32 * 10, 32 * 500, 32 * 10):
        lane.record(32, tokens, tokens / 1000)
        accept(lane, 700)
        assert lane.expected_wait_s(0) == pytest.approx(0.7 * lane.not_started)


def test_the_rate_follows_recent_batches() -> None:
    lane = batches()
    lane.record(10, 10, 1.0)
    for _ in range(60):
        lane.record(10, 10, 2.0)
    accept(lane, 10)
    assert lane.expected_wait_s(0) == pytest.approx(2.0, rel=0.01)


# ── side by side ──


class FakeModel:
    """A model that runs `count` items at a time for `seconds` each; a step takes a second."""

    def __init__(self, count: int, seconds: int) -> None:
        self.lane = StepLane("generation", 1000)
        self.count = count
        self.seconds = seconds
        self.waiting: deque[WorkItem] = deque()
        self.running: dict[WorkItem, int] = {}
        self.now = 0

    def arrive(self, count: int) -> None:
        self.waiting += accept(self.lane, *[1] * count)

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.now += 1
            for item, until in list(self.running.items()):
                if until <= self.now:
                    del self.running[item]
                    self.lane.release(item)
            while self.waiting and len(self.running) < self.count:
                item = self.waiting.popleft()
                self.running[item] = self.now + self.seconds
                self.lane.start(item)
            self.lane.record(self.now, starved=bool(self.waiting))

    def expected_s(self) -> float:
        return self.lane.expected_wait_s(self.now)

    def waited_s(self) -> int:
        """Return how long an item that arrives now waits."""
        start = self.now
        self.arrive(1)
        item = self.waiting[-1]
        while not item.started:
            self.step()
        return self.now - start


def test_the_expected_wait_for_a_full_model_is_about_right() -> None:
    model = FakeModel(2, 20)
    model.arrive(50)
    for _ in range(8):
        model.step(50)
        expected = model.expected_s()
        ahead = model.lane.not_started
        assert 0.5 < expected / (ahead * 10) < 1.5


@pytest.mark.parametrize(("at_once", "every_s"), [(600, 0), (10, 3), (10, 5)])
def test_a_new_item_waits_about_as_long_as_expected(at_once: int, every_s: int) -> None:
    model = FakeModel(64, 40)
    for _ in range(600 // at_once):
        model.arrive(at_once)
        model.step(every_s)
    model.step(60)
    expected = model.expected_s()
    assert 0.5 < expected / model.waited_s() < 2


def test_the_expected_wait_rises_with_the_time_without_starts_and_no_faster() -> None:
    model = FakeModel(2, 100_000)
    model.arrive(10)
    model.step(2)
    for seconds in (10, 100, 1000, 10_000):
        model.step(seconds)
        assert model.expected_s() <= 8 * model.now / 2
    assert model.expected_s() > 8 * 0.4 * model.now


@pytest.mark.parametrize("earlier", [0, 600])
def test_a_slow_first_step_of_a_burst_makes_no_wait_hopeless(earlier: int) -> None:
    model = FakeModel(256, 1)
    model.arrive(earlier)
    model.step(5)
    model.seconds = 40
    model.arrive(6)
    model.step()
    model.arrive(600)
    model.lane.record(model.now, starved=True)
    slow = model.now + 0.5  # the step in which they arrived: 6 run
    assert model.lane.expected_wait_s(slow) == 10.0


def test_one_long_response_does_not_outweigh_many_short_ones() -> None:
    model = FakeModel(32, 2)
    for _ in range(40):
        model.arrive(32)
        model.step()
    usual = model.expected_s() / model.lane.not_started
    model.seconds = 30
    model.step(20)
    assert model.expected_s() / model.lane.not_started < 20 / 32 + usual


def test_light_load_is_not_measured() -> None:
    model = FakeModel(64, 10)
    for _ in range(5):
        model.arrive(1)
        model.step(20)
    model.arrive(60)
    assert model.expected_s() == 0


def test_cancelled_items_do_not_count_and_idle_time_is_not_measured() -> None:
    model = FakeModel(1, 10**9)
    model.arrive(3)
    model.step(50)
    assert model.expected_s() > 0
    for item in [*model.waiting, *model.running]:
        model.lane.release(item)
    assert model.lane.not_started == 0
    model.waiting.clear()
    model.running.clear()
    model.now += 100_000
    model.arrive(5)
    assert model.expected_s() == 0


def test_the_expected_wait_is_zero_while_there_is_room() -> None:
    model = FakeModel(256, 100)
    model.arrive(600)
    model.step(3600)  # idle for most of it
    assert not model.running
    model.arrive(256)
    assert model.expected_s() == 0
    model.arrive(200)  # these have to wait
    expected = model.expected_s()
    assert 200 * 100 / 256 < expected < 200
    model.step(1)
    assert model.expected_s() == pytest.approx(expected, rel=0.1)


def test_room_counts_as_free_while_the_prompts_of_a_round_run() -> None:
    model = FakeModel(256, 100)
    model.arrive(600)
    model.step(1000)
    round_, now = accept(model.lane, *[1] * 200), float(model.now)
    for item in round_:  # one prompt per step: the others have no room
        now += 0.05
        model.lane.record(now, starved=True)
        assert model.lane.expected_wait_s(now) < 10
        model.lane.start(item)


def test_inputs_of_a_list_delay_no_others() -> None:
    lane: Any = StepLane("generation", 100)
    long = WorkOwner("a")
    inputs: list[WorkItem] = [WorkItem(None, math.inf, 0.0, owner=long) for _ in range(30)]
    for item in inputs:
        lane.add(item)
    lane.start(inputs[0])
    lane.record(0, True)
    assert (lane.not_started, lane.expected_wait_s(100, WorkOwner("a"))) == (0, 0)
    (other,) = accept(lane, 1, client="a")
    assert lane.expected_wait_s(100, WorkOwner("a")) == 100  # behind one request
    for item in [*inputs, other]:
        lane.release(item)
    assert (lane.not_started, lane._running) == (0, 0)


@pytest.mark.parametrize("lane", [StepLane("generation", 100), BatchLane("pipeline", 100)])
def test_a_client_does_not_wait_for_the_queue_of_another(lane: Any) -> None:
    queued = accept(lane, *[1] * 20, client="a")
    if isinstance(lane, BatchLane):
        lane.record(1, 1, 1.0)
    else:
        lane.start(queued[0])
        lane.record(0, True)
        lane.start(queued[1])
        lane.record(1, True)
    assert lane.expected_wait_s(1, WorkOwner("a")) >= 18
    assert lane.expected_wait_s(1, WorkOwner("b")) == 0
    accept(lane, 1, client="b")
    assert lane.expected_wait_s(1, WorkOwner("b")) == 2


@pytest.mark.parametrize("lane", [StepLane("generation", 100), BatchLane("pipeline", 100)])
def test_a_flow_does_not_wait_for_the_queue_of_another(lane: Any) -> None:
    queued = accept(lane, *[1] * 20, client="a")
    if isinstance(lane, BatchLane):
        waiting = 20
        lane.record(1, 1, 1.0)
    else:
        waiting = 18
        for n in range(2):
            lane.start(queued[n])
            lane.record(n, True)
    own, others = WorkOwner("a", flow="own"), WorkOwner("a")
    assert lane.expected_wait_s(1, own) == 0
    other: WorkItem = WorkItem(None, math.inf, 0.0, owner=own)
    lane.add(other)
    assert lane.expected_wait_s(1, own) == 2
    assert lane.expected_wait_s(1, others) == waiting + 1
    for item in [other, *queued]:
        lane.release(item)
    assert lane.expected_wait_s(1, others) == 0


def test_classes_wait_for_each_other_by_their_weights() -> None:
    lane: Any = BatchLane("pipeline", 1000)
    lane.record(1, 1, 1.0)
    owners = {p: WorkOwner("a", priority=p) for p in (Priority.INTERACTIVE, Priority.BATCH)}
    for owner in owners.values():
        lane.add(item := WorkItem(None, math.inf, 0.0, owner=owner))
        item.tokens = 80
        lane.add_prepared(item)
    assert lane.expected_wait_s(1, owners[Priority.INTERACTIVE]) == 80 + 10
    assert lane.expected_wait_s(1, owners[Priority.BATCH]) == 80 + 80


def test_a_request_of_many_choices_is_one_item() -> None:
    lane: Any = StepLane("generation", 10)
    first, second, _ = accept(lane, 1, 1, 1)
    lane.start(first)
    lane.record(0, True)
    lane.release(first)
    lane.start(second)
    lane.record(10, True)  # however many sequences run
    assert lane.expected_wait_s(10) == 10
