"""The thread tuner uses fewer threads while other processes keep cores busy."""

from collections.abc import Callable
from itertools import pairwise

import pytest

from tests.serving import wait_until
from worker.cores import MIN_INTERVAL_S, CoreProbe, Cores, ThreadTuner

TURN_S = 0.02


class Probe(CoreProbe):
    """Ends with the next turn."""

    def __init__(self, count: int) -> None:
        super().__init__(0)
        self.count = count


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
        self.probes: list[Probe] = []
        self.tuner = ThreadTuner(
            Cores(cores, frozenset(), False, "", requested),
            lambda: self.now,
            lambda: self.cpu,
            self.start_probe,
        )

    def start_probe(self, count: int) -> CoreProbe:
        self.probes.append(Probe(count))
        return self.probes[-1]

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
            if self.probes:
                self.probes[-1].passed = self.cores - others - self.threads >= self.probes[-1].count
            free = (self.cores - others) / self.threads
            self.cpu += TURN_S * (0.97 if free >= 1 else 0.9 * free)
            if not idle:
                self.tuner.end_turn()
        return self.tuner.threads


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Machine]:
    return lambda cores, **options: Machine(monkeypatch, cores, **options)


@pytest.mark.parametrize(
    ("cores", "others", "threads"),
    [(2, 0.0, 2), (2, 0.5, 1), (2, 1.5, 1), (8, 1.0, 7), (8, 2.7, 5), (1, 1.0, 1)],
)
def test_threads_whose_cores_are_taken_are_removed(
    machine: Callable[..., Machine], cores: int, others: float, threads: int
) -> None:
    busy = machine(cores)
    assert busy.turns(10.0, others) == threads


def test_a_thread_is_removed_within_two_seconds(machine: Callable[..., Machine]) -> None:
    two = machine(2)
    assert two.turns(30.0, 0.0) == 2
    assert two.turns(2.0, 1.0) == 1


def test_all_threads_are_back_within_five_seconds(machine: Callable[..., Machine]) -> None:
    for busy_s in (3.0, 8.0, 30.0, 31.7, 33.1):
        eight = machine(8)
        assert eight.turns(busy_s, 4.0) < 8
        assert eight.turns(5.0, 0.0) == 8


def test_a_thread_is_back_once_its_core_is_free(machine: Callable[..., Machine]) -> None:
    eight = machine(8)
    assert eight.turns(20.0, 3.0) == 5
    assert eight.turns(25.0, 1.0) == 7


def test_no_more_threads_are_tried_while_no_core_is_free(
    machine: Callable[..., Machine],
) -> None:
    two = machine(2)
    two.turns(5.0, 1.0)
    two.threads_set.clear()
    two.turns(60.0, 1.0)
    assert two.threads_set == []
    assert 10 < len(two.probes) < 40


def test_trials_that_fail_take_little_of_the_time(
    machine: Callable[..., Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A probe may find a core free that is not: a process may have waited at that moment."""
    two = machine(2)
    two.turns(5.0, 1.0)
    two.threads_set.clear()
    monkeypatch.setattr(Probe, "passed", property(lambda _: True, lambda *_: None), raising=False)
    two.turns(60.0, 1.0)
    started = [at for at, threads in two.threads_set if threads == 2]
    ended = [at for at, threads in two.threads_set if threads == 1]
    trials_s = [end - start for start, end in zip(started, ended, strict=False)]
    assert len(started) > 10
    assert sum(trials_s) < 0.04 * 60


def test_the_number_changes_at_most_once_in_two_seconds(machine: Callable[..., Machine]) -> None:
    two, settled = machine(2), 2
    changes: list[float] = []
    for n in range(200):
        threads = two.turns(0.3, float(n % 30 < 12))
        if threads != settled:
            changes.append(two.now)
            settled = threads
    assert len(changes) > 2
    assert min(b - a for a, b in pairwise(changes)) >= MIN_INTERVAL_S - 0.3


def test_a_moment_of_load_by_other_processes_removes_no_thread(
    machine: Callable[..., Machine],
) -> None:
    two = machine(2)
    for _ in range(20):
        assert two.turns(0.1, 1.0) == 2
        assert two.turns(0.9, 0.0) == 2
    assert two.threads_set == []


def test_load_by_other_processes_while_idle_removes_no_thread(
    machine: Callable[..., Machine],
) -> None:
    two = machine(2)
    two.turns(3.0, 0.0)
    two.turns(20.0, 2.0, idle=True)
    assert two.turns(3.0, 0.0) == 2
    assert two.threads_set == []


def test_a_requested_number_of_threads_is_kept(machine: Callable[..., Machine]) -> None:
    requested = machine(2, requested=True)
    requested.turns(20.0, 2.0)
    assert requested.threads_set == []


def test_without_known_cores_torch_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = Machine(monkeypatch, 2)
    unknown.tuner = ThreadTuner(None, lambda: unknown.now, lambda: unknown.cpu)
    unknown.turns(20.0, 2.0)
    assert unknown.threads_set == []


@pytest.mark.parametrize(("least", "passed"), [(0.0, True), (1.01, False)])
def test_a_probe_passes_if_its_threads_compute_in_enough_of_their_time(
    monkeypatch: pytest.MonkeyPatch, least: float, passed: bool
) -> None:
    monkeypatch.setattr("worker.cores.MIN_PROBE_SHARE", least)
    probe = CoreProbe(2)
    wait_until(lambda: probe.passed is not None)
    assert probe.passed == passed
