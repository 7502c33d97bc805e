"""The thread tuner uses fewer threads while other processes keep cores busy."""

import time
from collections.abc import Callable
from itertools import pairwise

import pytest

from worker.cores import MIN_INTERVAL_S, Cores, ThreadTuner, affinity, idle_time

TURN_S = 0.02


class Machine:
    """A machine of `cores` cores, some of which other processes use. The worker's thread computes
    in the share of a turn in which each thread of its team has a core."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, cores: int, requested: bool = False
    ) -> None:
        self.now = 100.0
        self.cpu = 0.0
        self.threads_set: list[tuple[float, int]] = []
        monkeypatch.setattr("worker.cores.openmp_set_threads", lambda: self.set_threads)
        self.cores, self.threads = cores, cores
        self.process = self.idle_s = 0.0
        self.tells_idle = True
        self.tuner = ThreadTuner(
            Cores(cores, frozenset(), False, "", requested),
            lambda: self.now,
            lambda: self.cpu,
            lambda: self.process,
            lambda: self.idle_s if self.tells_idle else None,
        )

    def set_threads(self, threads: int) -> None:
        if threads != self.threads:
            self.threads_set.append((self.now, threads))
        self.threads = threads

    def turns(self, seconds: float, others: float, idle: bool = False) -> int:
        """Run turns, or nothing, beside processes that use `others` cores. Return the number of
        threads that the tuner has settled on."""
        end = self.now + seconds
        while self.now < end:
            if not idle:
                self.tuner.begin_turn()
            self.now += TURN_S
            free = (self.cores - others) / self.threads
            used = 0.0 if idle else min(self.threads, self.cores - others)
            self.process += TURN_S * used
            self.idle_s += TURN_S * max(0.0, self.cores - others - used)
            self.cpu += TURN_S * (0.97 if free >= 1 else 0.9 * free)
            if not idle:
                self.tuner.end_turn()
        return self.tuner.threads


MakeMachine = Callable[..., Machine]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> MakeMachine:
    return lambda cores, **options: Machine(monkeypatch, cores, **options)


@pytest.mark.parametrize(
    ("cores", "phases"),  # seconds, cores of others, threads
    [
        (2, [(10.0, 0.15, 2)]),
        (2, [(10.0, 0.5, 1)]),
        (2, [(10.0, 1.5, 1)]),
        (8, [(10.0, 1.0, 7)]),
        (8, [(10.0, 2.7, 5)]),
        (1, [(10.0, 1.0, 1)]),
        (2, [(30.0, 0.0, 2), (3.0, 1.0, 1)]),  # a thread is removed within three seconds
        (8, [(20.0, 3.0, 5), (25.0, 1.0, 7)]),  # and is back once its core is free
    ],
)
def test_threads_whose_cores_are_taken_are_removed(
    machine: MakeMachine, cores: int, phases: list[tuple[float, float, int]]
) -> None:
    busy = machine(cores)
    for seconds, others, threads in phases:
        assert busy.turns(seconds, others) == threads


def test_all_threads_are_back_within_five_seconds(machine: MakeMachine) -> None:
    for busy_s in (3.0, 8.0, 30.0, 31.7, 33.1):
        eight = machine(8)
        assert eight.turns(busy_s, 4.0) < 8
        assert eight.turns(5.0, 0.0) == 8


@pytest.mark.parametrize(("before", "others"), [(1.0, 1.0), (2.0, 1.2)])
def test_no_more_threads_are_tried_while_no_core_is_free(
    machine: MakeMachine, before: float, others: float
) -> None:
    """With two others on two cores the process gets half of the time, and nothing is idle."""
    two = machine(2)
    two.turns(5.0, before)
    two.threads_set.clear()
    two.turns(60.0, others)
    assert two.threads_set == []


def test_trials_that_fail_take_little_of_the_time(machine: MakeMachine) -> None:
    """Where the system does not tell the idle time, trials alone show free cores."""
    two = machine(2)
    two.tells_idle = False
    two.turns(5.0, 1.0)
    two.threads_set.clear()
    two.turns(60.0, 1.0)
    started = [at for at, threads in two.threads_set if threads == 2]
    ended = [at for at, threads in two.threads_set if threads == 1]
    trials_s = [end - start for start, end in zip(started, ended, strict=False)]
    assert len(started) > 10
    assert sum(trials_s) < 0.1 * 60


def test_the_number_changes_at_most_once_in_two_seconds(machine: MakeMachine) -> None:
    two, settled = machine(2), 2
    changes: list[float] = []
    for n in range(200):
        threads = two.turns(0.3, float(n % 30 < 12))
        if threads != settled:
            changes.append(two.now)
            settled = threads
    assert len(changes) > 2
    assert min(b - a for a, b in pairwise(changes)) >= MIN_INTERVAL_S - 0.3


def test_a_moment_of_load_by_other_processes_removes_no_thread(machine: MakeMachine) -> None:
    for busy_s in (0.1, 1.0):
        two = machine(2)
        for _ in range(20):
            assert two.turns(busy_s, 1.0) == 2
            assert two.turns(3.0 - busy_s, 0.0) == 2
        assert two.threads_set == []


def test_load_by_other_processes_while_idle_removes_no_thread(machine: MakeMachine) -> None:
    two = machine(2)
    two.turns(3.0, 0.0)
    two.turns(20.0, 2.0, idle=True)
    assert two.turns(3.0, 0.0) == 2
    assert two.threads_set == []


def test_a_requested_number_of_threads_is_kept(machine: MakeMachine) -> None:
    requested = machine(2, requested=True)
    requested.turns(20.0, 2.0)
    assert requested.threads_set == []


def test_without_known_cores_torch_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = Machine(monkeypatch, 2)
    unknown.tuner = ThreadTuner(None, lambda: unknown.now, lambda: unknown.cpu)
    unknown.turns(20.0, 2.0)
    assert unknown.threads_set == []


def test_the_idle_time_of_the_cores_is_at_most_that_since_the_start() -> None:
    cores = affinity(0)
    first = idle_time(cores)
    assert first
    assert 0 < first < 1.05 * len(cores) * time.clock_gettime(time.CLOCK_BOOTTIME)
    assert (idle_time(cores) or 0) >= first
    assert idle_time([]) is None
