"""Which cores a model computes on: how many threads, and which cores the worker's thread keeps.

    those the process may run on → one a physical core → no more than the cgroup's quota pays for

OpenMP's threads meet after each product, so the slowest holds up all: two on one physical core, or
more than the quota gives time to, are slower than fewer.
"""

import ctypes
import logging
import os
import sys
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
