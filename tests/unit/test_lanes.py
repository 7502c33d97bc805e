"""How long a newcomer would wait, by a clock of the test's own."""

import math
from collections import deque
from typing import Any

import pytest

from batching.request_queue import BatchLane, Lane, StepLane, WorkItem


def entering(lane: Lane, *tokens: int) -> list[WorkItem]:
    """Items that are accepted; those of no tokens have not been prepared yet."""
    made = []
    for count in tokens:
        item: WorkItem = WorkItem(None, math.inf, 0.0)
        lane.used += 1
        lane.not_started += 1
        if count:
            item.tokens = count
            lane.add_prepared(item)
        made.append(item)
    return made


# ── in batches ──


def batches() -> BatchLane:
    return BatchLane("pipeline", 1000)


def test_nothing_is_guessed_before_a_batch_was_measured() -> None:
    lane = batches()
    entering(lane, 100, 0)
    assert lane.expected_wait_s(0) == 0


def test_a_batch_takes_a_time_for_each_token() -> None:
    lane = batches()
    lane.record(items=10, tokens=100, seconds=1.0)
    long, short = entering(lane, 1000, 10)
    assert lane.expected_wait_s(0) == pytest.approx(10.1)
    lane.release(long)
    assert lane.expected_wait_s(0) == pytest.approx(0.1)
    lane.release(short)
    assert lane.expected_wait_s(0) == 0
    assert (lane.used, lane.not_started) == (0, 0)


def test_what_is_not_prepared_counts_like_the_mean() -> None:
    lane = batches()
    lane.record(items=10, tokens=200, seconds=2.0)
    unknown, known = entering(lane, 0, 5)
    assert lane.expected_wait_s(0) == pytest.approx(0.2 + 0.05)
    unknown.tokens = 50
    lane.add_prepared(unknown)
    assert lane.expected_wait_s(0) == pytest.approx(0.5 + 0.05)
    lane.release(unknown)
    lane.release(known)
    (gone,) = entering(lane, 0)
    lane.release(gone)
    lane.add_prepared(gone)  # it was on its way through the pool
    assert lane.expected_wait_s(0) == 0


def test_long_inputs_change_what_a_token_takes_by_nothing() -> None:
    lane = batches()
    for tokens in (32 * 10, 32 * 500, 32 * 10):
        lane.record(32, tokens, tokens / 1000)
        entering(lane, 700)
        assert lane.expected_wait_s(0) == pytest.approx(0.7 * lane.not_started)


def test_the_rate_follows_recent_batches() -> None:
    lane = batches()
    lane.record(10, 10, 1.0)
    for _ in range(60):
        lane.record(10, 10, 2.0)
    entering(lane, 10)
    assert lane.expected_wait_s(0) == pytest.approx(2.0, rel=0.01)


# ── side by side ──


class Places:
    """A model that runs so many at once, each for so long; steps are a second."""

    def __init__(self, count: int, seconds: int) -> None:
        self.lane = StepLane("generation", 1000)
        self.count = count
        self.seconds = seconds
        self.waiting: deque[WorkItem] = deque()
        self.running: dict[WorkItem, int] = {}
        self.now = 0

    def come(self, count: int) -> None:
        self.waiting += entering(self.lane, *[1] * count)

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
        """How long somebody who comes now does wait."""
        started = self.now
        self.come(1)
        mine = self.waiting[-1]
        while not mine.started:
            self.step()
        return self.now - started


def test_full_places_are_waited_for_as_long_as_was_expected() -> None:
    places = Places(2, 20)
    places.come(50)
    for _ in range(8):
        places.step(50)
        expected = places.expected_s()
        ahead = places.lane.not_started
        assert 0.5 < expected / (ahead * 10) < 1.5


@pytest.mark.parametrize(("at_once", "every_s"), [(600, 0), (10, 3), (10, 5)])
def test_a_newcomer_waits_about_as_long_as_is_said(at_once: int, every_s: int) -> None:
    places = Places(64, 40)
    for _ in range(600 // at_once):
        places.come(at_once)
        places.step(every_s)
    places.step(60)
    expected = places.expected_s()
    assert 0.5 < expected / places.waited_s() < 2


def test_while_nobody_begins_the_expectation_rises_with_the_time_and_no_faster() -> None:
    places = Places(2, 100_000)
    places.come(10)
    places.step(2)
    for seconds in (10, 100, 1000, 10_000):
        places.step(seconds)
        assert places.expected_s() <= 8 * places.now / 2
    assert places.expected_s() > 8 * 0.4 * places.now


def test_one_long_answer_does_not_spoil_what_many_short_ones_taught() -> None:
    places = Places(32, 2)
    for _ in range(40):
        places.come(32)
        places.step()
    usual = places.expected_s() / places.lane.not_started
    places.seconds = 30
    places.step(20)
    assert places.expected_s() / places.lane.not_started < 20 / 32 + usual


def test_light_load_teaches_nothing() -> None:
    places = Places(64, 10)
    for _ in range(5):
        places.come(1)
        places.step(20)
    places.come(60)
    assert places.expected_s() == 0


def test_who_gives_up_is_no_longer_ahead_and_what_is_idle_does_not_age() -> None:
    places = Places(1, 10**9)
    places.come(3)
    places.step(50)
    assert places.expected_s() > 0
    for item in [*places.waiting, *places.running]:
        places.lane.release(item)
    assert (places.lane.used, places.lane.not_started) == (0, 0)
    places.waiting.clear()
    places.running.clear()
    places.now += 100_000
    places.come(5)
    assert places.expected_s() == 0


def test_who_finds_a_free_place_waits_for_nobody_whatever_was_measured_before() -> None:
    places = Places(256, 100)
    places.come(600)
    places.step(3600)  # idle for most of it
    assert places.lane.used == 0
    places.come(256)
    assert places.expected_s() == 0
    places.come(200)  # these will have to wait
    expected = places.expected_s()
    assert 200 * 100 / 256 < expected < 200
    places.step(1)
    assert places.expected_s() == pytest.approx(expected, rel=0.1)


def test_places_are_free_too_while_the_prompts_of_a_round_take_their_time() -> None:
    places = Places(256, 100)
    places.come(600)
    places.step(1000)
    round_, now = entering(places.lane, *[1] * 200), float(places.now)
    for item in round_:  # one prompt a step: the others go without
        now += 0.05
        places.lane.record(now, starved=True)
        assert places.lane.expected_wait_s(now) < 10
        places.lane.start(item)


def test_a_request_of_many_choices_is_one_item() -> None:
    lane: Any = StepLane("generation", 10)
    first, second, _ = entering(lane, 1, 1, 1)
    lane.start(first)
    lane.record(0, True)
    lane.release(first)
    lane.start(second)
    lane.record(10, True)  # however many sequences ran
    assert lane.expected_wait_s(10) == 10
