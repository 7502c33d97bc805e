"""Which cores a model computes on: how many threads, and which cores the worker's thread keeps.

    those the process may run on → one a physical core → no more than the cgroup's quota pays for

OpenMP's threads meet after each product, so the slowest holds up all: two on one physical core, or
more than the quota gives time to, are slower than fewer.

How many of the cores that a model computes on are free, followed while it serves.

OpenMP's threads meet after each product and spin meanwhile: one that waits for a core which another
process has holds up all, and steps take ten times as long. There fewer threads are quicker.
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

GROUPS = Path("/sys/fs/cgroup")
TOPOLOGY = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"


@dataclass(frozen=True, slots=True)
class Cores:
    """`threads` compute; `kept` are the cores that the worker's thread stays on, none if it is
    not pinned; `metered`: a quota bounds the time that they may use; `asked`: the operator said how
    many threads."""

    threads: int
    kept: frozenset[int]
    metered: bool
    why: str
    asked: bool = False


def find_cores(pin: str, asked: int | None) -> Cores | None:
    """Of this process; `pin` is on, off or auto, `asked` how many threads the operator wants. None
    where there is no affinity, as anywhere but on Linux: torch chooses."""
    if not (allowed := affinity(0)):
        return None
    siblings = {core: _line(TOPOLOGY.format(core)) for core in allowed}
    return choose_cores(allowed, siblings, quota(GROUPS, lines_of("/proc/self/cgroup")), asked, pin)


def choose_cores(
    allowed: Collection[int],
    siblings: Mapping[int, str],
    quota: float | None,
    asked: int | None,
    pin: str,
) -> Cores:
    """`siblings`: each core's with what it shares a physical core, as the kernel writes it.

    `auto` pins where the threads fill all physical cores and there are more cores than threads.
    Where there are fewer threads, by a quota or as asked, another process with as many would choose
    the same cores.
    """
    physical = one_each(allowed, siblings)
    paid = len(physical) if quota is None else max(1, int(quota))
    threads = asked or min(len(physical), paid)
    fill = threads == len(physical) < len(allowed)
    order = [*physical, *sorted(set(allowed) - set(physical))]
    pinned = pin == "on" or (pin == "auto" and fill)
    reasons = [f"cores={len(allowed)}", f"physical={len(physical)}"]
    reasons += [f"quota={quota:g}"] if quota is not None else []
    reasons += [f"OMP_NUM_THREADS={asked}"] if asked else []
    kept = frozenset(order[:threads] if pinned else ())
    return Cores(threads, kept, quota is not None, " ".join(reasons), bool(asked))


def one_each(allowed: Iterable[int], siblings: Mapping[int, str]) -> list[int]:
    """The first allowed core of each physical one."""
    first: dict[str, int] = {}
    for core in sorted(allowed):
        first.setdefault(siblings[core] or str(core), core)
    return list(first.values())


# ── the calling thread ──


def pin(cores: Cores) -> None:
    """Keep to the cores. OpenMP's threads, and all others it starts from here on, inherit them."""
    if cores.kept:
        _go_to(cores.kept)


def release() -> None:
    """For a thread that a pinned one has started: go where the main thread may."""
    if (whole := affinity(os.getpid())) != affinity(0):
        _go_to(whole)


def _go_to(cores: Collection[int]) -> None:
    """This thread, unless the system forbids it or has taken the cores away."""
    try:
        os.sched_setaffinity(0, cores)
    except OSError as error:
        log.warning("a thread stays on its cores: %s", error)


def compute_alone() -> None:
    """For a thread beside the worker's, before what it does with torch, if that has been loaded.

    Otherwise it would get an OpenMP team of its own with its first large tensor. libgomp, which
    then has more threads than cores, lets none of them spin for long any more, the worker's
    neither: steps of a small model took twice the time from there on.
    """
    torch = sys.modules.get("torch")
    if torch and torch.get_num_threads() > 1 and (set_threads := openmp()):
        set_threads(1)


def openmp() -> Callable[[int], object] | None:
    """What sets how many threads a team of the calling thread has, where torch has loaded OpenMP.

    torch's own function sets that also for whoever has not computed yet, and for the worker's
    thread as soon as it computes by a library that is loaded later, as compiled code is.
    """
    with suppress(OSError, AttributeError):
        set_threads: Callable[[int], object] = ctypes.CDLL(None).omp_set_num_threads
        return set_threads
    return None


def affinity(thread: int) -> set[int]:
    """Cores that a thread may run on; 0 is this one. Empty where that cannot be known."""
    return os.sched_getaffinity(thread) if hasattr(os, "sched_getaffinity") else set()


# ── what the control group pays for ──


def quota(groups: Path, membership: Iterable[str]) -> float | None:
    """Cores' worth of time, by cgroup version 2 or 1, the least of the group and those above it;
    None: no limit. `membership`: the lines of /proc/self/cgroup."""
    return min((share for line in membership for share in _shares(groups, line)), default=None)


def _shares(groups: Path, line: str) -> Iterator[float]:
    _, controllers, path = line.split(":", 2)
    root = groups / controllers
    if controllers and "cpu" not in controllers.split(","):
        return
    place = root / path.strip("/")
    for folder in (place, *place.parents):  # in a container the path may be the host's
        if folder.is_relative_to(root) and (share := _share(folder)):
            yield share


def _share(folder: Path) -> float | None:
    words = _line(folder / "cpu.max").split()
    words = words or [_line(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period")]
    limited = len(words) == 2 and all(word.isdigit() and int(word) for word in words)
    return int(words[0]) / int(words[1]) if limited else None


def _line(path: str | Path) -> str:
    return next(iter(lines_of(path)), "").strip()


def lines_of(path: str | Path) -> list[str]:
    try:
        return Path(path).read_text(errors="replace").splitlines()
    except OSError:
        return []


LOOK_S = 0.5
# A core of which others use more than this part is not free. Beside two threads that spin on two
# cores, one busy process gets two thirds of a core.
TAKEN = 0.6
# So long it has to be before there are fewer threads, or more again.
CROWDED_S, CALM_S = 1.0, 2.0
TICKS_PER_S = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


class ThreadTuner:
    """Of the worker's thread, which calls `follow` between its turns, from `look_at` on."""

    def __init__(self, cores: Cores) -> None:
        self._most = self.threads = 1 if cores.asked else cores.threads
        self._cores = cores.kept or affinity(0)
        self.look_at = float("-inf" if self._most > 1 else "inf")  # monotonic seconds
        self._looked_at = 0.0
        self._busy_s: float | None = None  # what has been used of the cores so far
        self._own_s = 0.0  # what this process has
        self._crowded_s = self._calm_s = 0.0

    def follow(self, now: float) -> None:
        """Compute with as many threads as there are cores free."""
        passed, self._looked_at, self.look_at = now - self._looked_at, now, now + LOOK_S
        before, self._busy_s = self._busy_s, busy_s(self._cores)
        own_before, self._own_s = self._own_s, time.process_time()
        if before is None or self._busy_s is None:
            return
        own = self._own_s - own_before
        free = len(self._cores) - (self._busy_s - before - own) / passed
        threads = max(1, min(self._most, int(free + TAKEN)))
        # what others use while this process hardly computes says nothing of when it does
        crowded = threads < self.threads and own >= passed / 2
        self._crowded_s = self._crowded_s + passed if crowded else 0.0
        self._calm_s = self._calm_s + passed if threads > self.threads else 0.0
        if self._crowded_s >= CROWDED_S or self._calm_s >= CALM_S:
            log.debug("compute threads=%d of %d", threads, self._most)
            self.threads, self._crowded_s, self._calm_s = threads, 0.0, 0.0
        if (set_threads := openmp()) is not None:  # each time: a library that is loaded may have
            set_threads(self.threads)


def busy_s(cores: Collection[int]) -> float | None:
    """The seconds that these have not been idle since the system began, without those of processes
    that give way (nice); None where that cannot be known."""
    found = {line.split()[0]: line.split()[1:] for line in lines_of("/proc/stat") if line.strip()}
    try:
        times = [found[f"cpu{core}"] for core in cores]
        # user, system, irq, softirq, steal
        return sum(int(time[n]) for time in times for n in (0, 2, 5, 6, 7)) / TICKS_PER_S
    except (KeyError, ValueError, IndexError):
        return None
