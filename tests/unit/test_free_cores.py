"""Fewer threads compute while other processes keep cores busy, and all again when they are gone."""

import os
import sys
from collections.abc import Callable

import pytest

from worker.cores import CALM_S, LOOK_S, TICKS_PER_S, Cores, ThreadTuner, busy_s


class Machine:
    """Of some cores, of which other processes use so many."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cores: int) -> None:
        self.now = self.busy = self.own = 0.0
        self.told: list[int] = []
        monkeypatch.setattr("worker.cores.busy_s", lambda cores: self.busy)
        monkeypatch.setattr("worker.cores.time.process_time", lambda: self.own)
        monkeypatch.setattr("worker.cores.openmp", lambda: self.told.append)
        self.cores = Cores(cores, frozenset(range(cores)), False, "")
        self.free = ThreadTuner(self.cores)

    def threads(self, others: float, looks: int = 1) -> int:
        """After so many looks; the process itself uses what is left."""
        for _ in range(looks):
            self.now += LOOK_S
            self.busy += LOOK_S * self.cores.threads
            self.own += LOOK_S * (self.cores.threads - others)
            if self.now >= self.free.look_at:
                self.free.follow(self.now)
        return self.told[-1] if self.told else self.free.threads


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Machine]:
    return lambda cores: Machine(monkeypatch, cores)


@pytest.mark.parametrize(
    ("cores", "others", "threads"),
    [(2, 0.0, 2), (2, 0.5, 2), (2, 0.7, 1), (2, 1.5, 1), (8, 1.0, 7), (8, 2.7, 5), (1, 1.0, 1)],
)
def test_a_thread_for_each_core_of_which_others_leave_enough(
    machine: Callable[[int], Machine], cores: int, others: float, threads: int
) -> None:
    assert machine(cores).threads(others, looks=3) == threads


def test_threads_come_back_when_it_has_been_calm_for_a_while(
    machine: Callable[[int], Machine],
) -> None:
    two, calm = machine(2), int(CALM_S / LOOK_S)
    assert two.threads(0.0, looks=3) == 2
    assert two.threads(1.0, looks=2) == 1
    assert two.threads(0.0, looks=calm - 1) == 1
    assert two.threads(1.0) == 1
    assert two.threads(0.0, looks=calm - 1) == 1
    assert two.threads(0.0) == 2


def test_others_that_are_busy_for_a_moment_take_no_thread(
    machine: Callable[[int], Machine],
) -> None:
    two = machine(2)
    assert two.threads(0.0, looks=3) == 2
    for _ in range(5):
        assert two.threads(1.0) == 2
        assert two.threads(0.0) == 2


def test_others_that_are_busy_while_nothing_is_served_take_no_thread(
    machine: Callable[[int], Machine],
) -> None:
    two = machine(2)
    assert two.threads(0.0, looks=3) == 2
    assert two.threads(2.0, looks=20) == 2


def test_the_number_that_the_operator_asked_for_stays(
    monkeypatch: pytest.MonkeyPatch, machine: Callable[[int], Machine]
) -> None:
    asked = machine(2)
    asked.free = ThreadTuner(Cores(2, frozenset({0, 1}), False, "", asked=True))
    asked.threads(2.0, looks=3)
    assert not asked.told


def test_where_nothing_can_be_known_nothing_changes(
    monkeypatch: pytest.MonkeyPatch, machine: Callable[[int], Machine]
) -> None:
    blind = machine(2)
    monkeypatch.setattr("worker.cores.busy_s", lambda cores: None)
    blind.threads(2.0, looks=3)
    assert not blind.told


@pytest.mark.skipif(sys.platform != "linux", reason="/proc/stat is Linux's")
def test_what_is_used_of_cores_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = os.sched_getaffinity(0)
    before = busy_s(cores)
    assert before is not None
    assert before > 0
    assert busy_s({4096}) is None
    lines = ["cpu  9 9 9 9 9 9 9 9 9 9", "cpu0 100 7 20 900 50 3 4 5 0 0", "intr 1"]
    monkeypatch.setattr("worker.cores.lines_of", lambda path: lines)
    assert busy_s({0}) == 132 / TICKS_PER_S
