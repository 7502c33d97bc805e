"""The thread tuner uses fewer threads while other processes keep cores busy."""

import os
import sys
from collections.abc import Callable

import pytest

from worker.cores import ADD_AFTER_S, TICKS_PER_S, TUNE_INTERVAL_S, Cores, ThreadTuner, busy_s


class Machine:
    """A machine of `cores` cores, some of which other processes use."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cores: int) -> None:
        self.now = self.busy = self.own = 0.0
        self.set: list[int] = []
        monkeypatch.setattr("worker.cores.busy_s", lambda cores: self.busy)
        monkeypatch.setattr("worker.cores.time.process_time", lambda: self.own)
        monkeypatch.setattr("worker.cores.openmp_set_threads", lambda: self.set.append)
        self.cores = Cores(cores, frozenset(range(cores)), False, "")
        self.tuner = ThreadTuner(self.cores)

    def threads(self, others: float, measurements: int = 1) -> int:
        """Return the threads after some measurements; this process uses all cores that are left."""
        for _ in range(measurements):
            self.now += TUNE_INTERVAL_S
            self.busy += TUNE_INTERVAL_S * self.cores.threads
            self.own += TUNE_INTERVAL_S * (self.cores.threads - others)
            if self.now >= self.tuner.next_at:
                self.tuner.tune(self.now)
        return self.set[-1] if self.set else self.tuner.threads


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Machine]:
    return lambda cores: Machine(monkeypatch, cores)


@pytest.mark.parametrize(
    ("cores", "others", "threads"),
    [(2, 0.0, 2), (2, 0.5, 2), (2, 0.7, 1), (2, 1.5, 1), (8, 1.0, 7), (8, 2.7, 5), (1, 1.0, 1)],
)
def test_each_core_with_enough_free_time_gets_a_thread(
    machine: Callable[[int], Machine], cores: int, others: float, threads: int
) -> None:
    assert machine(cores).threads(others, measurements=3) == threads


def test_threads_return_once_cores_have_been_free_for_a_while(
    machine: Callable[[int], Machine],
) -> None:
    two, steps = machine(2), int(ADD_AFTER_S / TUNE_INTERVAL_S)
    assert two.threads(0.0, measurements=3) == 2
    assert two.threads(1.0, measurements=2) == 1
    assert two.threads(0.0, measurements=steps - 1) == 1
    assert two.threads(1.0) == 1
    assert two.threads(0.0, measurements=steps - 1) == 1
    assert two.threads(0.0) == 2


def test_a_moment_of_load_by_other_processes_removes_no_thread(
    machine: Callable[[int], Machine],
) -> None:
    two = machine(2)
    assert two.threads(0.0, measurements=3) == 2
    for _ in range(5):
        assert two.threads(1.0) == 2
        assert two.threads(0.0) == 2


def test_load_by_other_processes_while_idle_removes_no_thread(
    machine: Callable[[int], Machine],
) -> None:
    two = machine(2)
    assert two.threads(0.0, measurements=3) == 2
    assert two.threads(2.0, measurements=20) == 2


def test_a_requested_number_of_threads_is_kept(
    monkeypatch: pytest.MonkeyPatch, machine: Callable[[int], Machine]
) -> None:
    requested = machine(2)
    requested.tuner = ThreadTuner(Cores(2, frozenset({0, 1}), False, "", requested=True))
    requested.threads(2.0, measurements=3)
    assert not requested.set


def test_an_unknown_load_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, machine: Callable[[int], Machine]
) -> None:
    blind = machine(2)
    monkeypatch.setattr("worker.cores.busy_s", lambda cores: None)
    blind.threads(2.0, measurements=3)
    assert not blind.set


@pytest.mark.skipif(sys.platform != "linux", reason="/proc/stat is Linux's")
def test_the_busy_time_of_cores_is_read_from_proc_stat(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = os.sched_getaffinity(0)
    before = busy_s(cores)
    assert before is not None
    assert before > 0
    assert busy_s({4096}) is None
    lines = ["cpu  9 9 9 9 9 9 9 9 9 9", "cpu0 100 7 20 900 50 3 4 5 0 0", "intr 1"]
    monkeypatch.setattr("worker.cores.lines_of", lambda path: lines)
    assert busy_s({0}) == 132 / TICKS_PER_S
