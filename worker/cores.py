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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger("onequeue.cores")

CGROUPS = Path("/sys/fs/cgroup")
TOPOLOGY = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"

# ThreadTuner measures the cores' use this often.
TUNE_INTERVAL_S = 0.5
# A core is not free if other processes use more than this share of it. Beside two threads that spin
# on two cores, one busy process gets two thirds of a core.
BUSY_SHARE = 0.6
# How long cores must be busy before threads are removed, and free before threads are added.
REMOVE_AFTER_S, ADD_AFTER_S = 1.0, 2.0
TICKS_PER_S = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


@dataclass(frozen=True, slots=True)
class Cores:
    """The cores to compute on."""

    threads: int
    pinned: frozenset[int]  # the worker thread's cores; empty if it is not pinned
    limited: bool  # a quota bounds the process's CPU time
    why: str  # for the log
    requested: bool = False  # the operator has set the number of threads


def find_cores(pin: str, requested: int | None) -> Cores | None:
    """Return the cores for this process; None where there is no affinity (only Linux has it), and
    torch decides. `pin` is on, off or auto; `requested` the operator's number of threads."""
    if not (allowed := affinity(0)):
        return None
    siblings = {core: first_line(TOPOLOGY.format(core)) for core in allowed}
    quota = cpu_quota(CGROUPS, lines_of("/proc/self/cgroup"))
    return choose_cores(allowed, siblings, quota, requested, pin)


def choose_cores(
    allowed: Collection[int],
    siblings: Mapping[int, str],
    quota: float | None,
    requested: int | None,
    pin: str,
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
    pins = pin == "on" or (pin == "auto" and fills)
    reasons = [f"cores={len(allowed)}", f"physical={len(physical)}"]
    reasons += [f"quota={quota:g}"] if quota is not None else []
    reasons += [f"OMP_NUM_THREADS={requested}"] if requested else []
    pinned = frozenset(order[:threads] if pins else ())
    return Cores(threads, pinned, quota is not None, " ".join(reasons), bool(requested))


def one_per_physical_core(allowed: Iterable[int], siblings: Mapping[int, str]) -> list[int]:
    """Return the first allowed core of each physical one."""
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
    torch = sys.modules.get("torch")
    if torch and torch.get_num_threads() > 1 and (set_threads := openmp_set_threads()):
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


def cpu_quota(cgroups: Path, membership: Iterable[str]) -> float | None:
    """Return the CPU time that the process may use, in cores: the least of its cgroup and those
    above, version 2 or 1; None without a limit. `membership`: the lines of /proc/self/cgroup."""
    return min((quota for line in membership for quota in _quotas(cgroups, line)), default=None)


def _quotas(cgroups: Path, line: str) -> Iterator[float]:
    _, controllers, path = line.split(":", 2)
    root = cgroups / controllers
    if controllers and "cpu" not in controllers.split(","):
        return
    group = root / path.strip("/")
    for folder in (group, *group.parents):  # in a container the path may be the host's
        if folder.is_relative_to(root) and (quota := _quota(folder)):
            yield quota


def _quota(folder: Path) -> float | None:
    words = first_line(folder / "cpu.max").split()
    words = words or [first_line(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period")]
    limited = len(words) == 2 and all(word.isdigit() and int(word) for word in words)
    return int(words[0]) / int(words[1]) if limited else None


def first_line(path: str | Path) -> str:
    return next(iter(lines_of(path)), "").strip()


def lines_of(path: str | Path) -> list[str]:
    """Return a file's lines; none if it cannot be read."""
    try:
        return Path(path).read_text(errors="replace").splitlines()
    except OSError:
        return []


# ── while serving ──


class ThreadTuner:
    """Adapts the number of OpenMP threads to the free cores. The worker's thread calls `tune`
    between steps, from `next_at` on."""

    def __init__(self, cores: Cores) -> None:
        self._max_threads = self.threads = 1 if cores.requested else cores.threads
        self._cores = cores.pinned or affinity(0)
        self.next_at = float("-inf" if self._max_threads > 1 else "inf")  # monotonic seconds
        self._last_at = 0.0
        self._busy_s: float | None = None  # total use of the cores, at the last measurement
        self._own_s = 0.0  # this process's
        self._crowded_s = self._free_s = 0.0

    def tune(self, now: float) -> None:
        """Set as many threads as there are free cores."""
        passed, self._last_at, self.next_at = now - self._last_at, now, now + TUNE_INTERVAL_S
        busy_before, self._busy_s = self._busy_s, busy_s(self._cores)
        own_before, self._own_s = self._own_s, time.process_time()
        if busy_before is None or self._busy_s is None:
            return
        own = self._own_s - own_before
        free = len(self._cores) - (self._busy_s - busy_before - own) / passed
        threads = max(1, min(self._max_threads, int(free + BUSY_SHARE)))
        # other processes' use while this one is idle does not predict their use while it computes
        crowded = threads < self.threads and own >= passed / 2
        self._crowded_s = self._crowded_s + passed if crowded else 0.0
        self._free_s = self._free_s + passed if threads > self.threads else 0.0
        if self._crowded_s >= REMOVE_AFTER_S or self._free_s >= ADD_AFTER_S:
            log.debug("compute threads=%d of %d", threads, self._max_threads)
            self.threads, self._crowded_s, self._free_s = threads, 0.0, 0.0
        if (set_threads := openmp_set_threads()) is not None:  # each time: libraries reset it
            set_threads(self.threads)


def busy_s(cores: Collection[int]) -> float | None:
    """Return the seconds that cores have been busy since the system started, without low-priority
    processes (nice), which yield; None if unknown."""
    stat = {line.split()[0]: line.split()[1:] for line in lines_of("/proc/stat") if line.strip()}
    try:
        times = [stat[f"cpu{core}"] for core in cores]
        # user, system, irq, softirq, steal
        return sum(int(time[n]) for time in times for n in (0, 2, 5, 6, 7)) / TICKS_PER_S
    except (KeyError, ValueError, IndexError):
        return None
