"""The CPU cores that models compute on: how many threads, and on which cores.

    cores the process may run on → one per physical core → at most what the cgroup's quota allows

OpenMP's threads synchronize after each product, so the slowest delays all: two threads on one
physical core, or more threads than the quota has CPU time for, are slower than fewer. ThreadTuner
lowers the number further while other processes use the cores: OpenMP's threads spin while they
wait, and a thread whose core is taken makes a step ten times as long.
"""

import ctypes
import logging
import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from worker.cgroups import cgroup_folders, lines_of

log = logging.getLogger("onequeue.cores")

TOPOLOGY = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"

# There are too many threads if the worker's thread computes in less than this share of its turns.
# Beside a load tester it computes in 0.8 to 0.95, where two threads give 1.5 times one; beside a
# process that fills a core in 0.55 to 0.72, where they give half.
MIN_CPU_SHARE = 0.8
# As many threads are tried as the process computes on cores or has idle ones, rounded up from here.
MIN_LAST_CORE = 0.75
# The time of turns that a decision is based on, and the least for ending a trial of more threads. A
# thread is removed if two windows in a row show too many: short bursts of others cost less than it.
WINDOW_S, TRIAL_S = 1.0, 0.3
# The interval after a change of the number of threads, and after a trial that fails.
MIN_INTERVAL_S, MAX_INTERVAL_S = 2.0, 3.5


@dataclass(frozen=True, slots=True)
class Cores:
    """The cores to compute on."""

    threads: int
    pinned: frozenset[int]  # the worker thread's cores; empty if it is not pinned
    limited: bool  # a quota bounds the process's CPU time
    why: str  # for the log
    requested: bool = False  # the operator has set the number of threads


def find_cores(pinning: str, requested: int | None) -> Cores | None:
    """Return the cores for this process; None where there is no affinity (only Linux has it), and
    torch decides. `pinning` is on, off or auto; `requested` the operator's number of threads."""
    if not (allowed := affinity(0)):
        return None
    siblings = {core: first_line(TOPOLOGY.format(core)) for core in allowed}
    quota = cpu_quota(Path("/proc/self"))
    return choose_cores(allowed, siblings, quota, requested, pinning)


def choose_cores(
    allowed: Collection[int],
    siblings: Mapping[int, str],
    quota: float | None,
    requested: int | None,
    pinning: str,
) -> Cores:
    """Choose the number of threads and the pinned cores.

    `siblings` has each core's hyperthreads, in the kernel's format. `auto` pins where the threads
    fill all physical cores and there are more cores than threads. With fewer threads, by a quota or
    as requested, another process of the same settings would choose the same cores.
    """
    physical = one_per_physical_core(allowed, siblings)
    affordable = len(physical) if quota is None else max(1, int(quota))
    threads = requested or min(len(physical), affordable)
    fills = threads == len(physical) < len(allowed)
    order = [*physical, *sorted(set(allowed) - set(physical))]
    pins = pinning == "on" or (pinning == "auto" and fills)
    reasons = [f"cores={len(allowed)}", f"physical={len(physical)}"]
    reasons += [f"quota={quota:g}"] if quota is not None else []
    reasons += [f"OMP_NUM_THREADS={requested}"] if requested else []
    pinned = frozenset(order[:threads] if pins else ())
    return Cores(threads, pinned, quota is not None, " ".join(reasons), bool(requested))


def one_per_physical_core(allowed: Iterable[int], siblings: Mapping[int, str]) -> list[int]:
    first: dict[str, int] = {}
    for core in sorted(allowed):
        first.setdefault(siblings[core] or str(core), core)
    return list(first.values())


# ── the calling thread ──


def pin(cores: Cores) -> None:
    """Pin the calling thread. OpenMP's threads, and all that it starts later, inherit the cores."""
    if cores.pinned:
        _set_affinity(cores.pinned)


def unpin() -> None:
    """Give a thread that a pinned one has started the cores of the main thread."""
    if (main := affinity(os.getpid())) != affinity(0):
        _set_affinity(main)


def _set_affinity(cores: Collection[int]) -> None:
    """Pin the calling thread, if the system allows it and still has the cores."""
    try:
        os.sched_setaffinity(0, cores)
    except OSError as error:
        log.warning("a thread stays on its cores: %s", error)


def use_one_core() -> None:
    """Limit the calling thread's use of torch to one core, if torch is loaded.

    Without this the thread gets an OpenMP team of its own with its first large tensor. libgomp then
    has more threads than cores and lets none of them spin for long, the worker's neither: steps of
    a small model took twice the time.
    """
    get_threads = getattr(sys.modules.get("torch"), "get_num_threads", None)  # torch may be loading
    if get_threads and get_threads() > 1 and (set_threads := openmp_set_threads()):
        set_threads(1)


def openmp_set_threads() -> Callable[[int], object] | None:
    """Return OpenMP's function that sets the team size of the calling thread, if OpenMP is loaded.

    torch's own function also sets it for threads that have not computed yet, and for the worker's
    thread once it computes in a library that is loaded later, as compiled code is.
    """
    with suppress(OSError, AttributeError):
        set_threads: Callable[[int], object] = ctypes.CDLL(None).omp_set_num_threads
        return set_threads
    return None


def affinity(thread: int) -> set[int]:
    """Return the cores that a thread may run on; 0 is the calling one. Empty if unknown."""
    return os.sched_getaffinity(thread) if hasattr(os, "sched_getaffinity") else set()


# ── the cgroup's quota ──


def cpu_quota(process: Path) -> float | None:
    """Return the CPU time that a process may use, in cores: the least of its control group and
    those above, version 2 or 1; None without a limit. `process`: its folder in /proc."""
    return min(filter(None, map(_quota, cgroup_folders(process, "cpu"))), default=None)


def _quota(folder: Path) -> float | None:
    words = first_line(folder / "cpu.max").split()
    words = words or [first_line(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period")]
    limited = len(words) == 2 and all(word.isdigit() and int(word) for word in words)
    return int(words[0]) / int(words[1]) if limited else None


def first_line(path: str | Path) -> str:
    return next(iter(lines_of(path)), "").strip()


# ── while serving ──


def idle_time(cores: Collection[int]) -> float | None:
    """Return the seconds that the cores have been idle since the system started, summed up; None
    if the system does not tell."""
    names = {f"cpu{core}" for core in cores}
    lines = (line.split() for line in lines_of("/proc/stat"))
    ticks = sum(int(line[4]) + int(line[5]) for line in lines if line and line[0] in names)
    return ticks / os.sysconf("SC_CLK_TCK") if ticks else None


class ThreadTuner:
    """Adapts the number of OpenMP threads to the cores that other processes leave free.

    There are too many while the worker's thread waits in its turns: for a core, or for a thread of
    its team that waits for one. More are tried once the time in which the process computes and
    that in which its cores are idle suffice for them: a turn of too many threads takes many times
    as long. All methods run on the worker's thread."""

    def __init__(
        self,
        cores: Cores | None,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.thread_time,
        process_clock: Callable[[], float] = time.process_time,
        idle_clock: Callable[[], float | None] | None = None,
    ) -> None:
        """`cores`: None where torch decides."""
        self._max_threads = self.threads = cores.threads if cores and not cores.requested else 1
        self._trial = 0  # a larger number of threads that is tried; 0: none
        self._next_at = 0.0  # when the number may change
        self._was_crowded = False  # in the turns before the last decision
        self._clock, self._cpu_clock, self._process_clock = clock, cpu_clock, process_clock
        usable = cores.pinned if cores and cores.pinned else affinity(0)
        self._idle_clock = idle_clock or partial(idle_time, usable)
        self._began_at = self._cpu_at = 0.0  # of the turn that runs
        self._wall_s = self._cpu_s = 0.0  # of the turns since the last decision
        # the last reading: when, and the seconds that the process has computed or could have
        self._usable: tuple[float, float] | None = None

    def begin_turn(self) -> None:
        self._began_at, self._cpu_at = self._clock(), self._cpu_clock()

    def end_turn(self) -> None:
        """Decide on the number of threads once enough turns are measured."""
        if self._max_threads == 1:
            return
        now = self._clock()
        self._wall_s += now - self._began_at
        self._cpu_s += self._cpu_clock() - self._cpu_at
        crowded = self._cpu_s < MIN_CPU_SHARE * self._wall_s
        if self._wall_s < (TRIAL_S if self._trial and crowded else WINDOW_S):
            return
        self._decide(now, crowded)
        self._was_crowded = crowded
        self._wall_s = self._cpu_s = 0.0
        log.debug("compute threads=%d of %d", self._trial or self.threads, self._max_threads)
        if (set_threads := openmp_set_threads()) is not None:  # each time: libraries reset it
            set_threads(self._trial or self.threads)

    def _decide(self, now: float, crowded: bool) -> None:
        """Remove a thread, or begin or end a trial of more."""
        if self._trial:
            self.threads, self._trial = self.threads if crowded else self._trial, 0
            self._next_at = now + (MAX_INTERVAL_S if crowded else MIN_INTERVAL_S)
        elif now < self._next_at:
            pass
        elif crowded and self._was_crowded and self.threads > 1:
            self.threads -= 1
            self._next_at, self._usable = now + MIN_INTERVAL_S, None
        elif self.threads < self._max_threads and (more := self._affordable(now)) > self.threads:
            self._trial = more

    def _affordable(self, now: float) -> int:
        """Return the number of threads that there are cores for, since the last call."""
        if (idle_s := self._idle_clock()) is None:
            return self._max_threads  # the trial shows it
        usable_s = self._process_clock() + idle_s
        before, self._usable = self._usable, (now, usable_s)
        if before is None:
            return self.threads
        cores = (usable_s - before[1]) / (now - before[0])
        return min(self._max_threads, int(cores + 1 - MIN_LAST_CORE))
