"""How many of the cores that a model computes on are free, followed while it serves.

OpenMP's threads meet after each product and spin meanwhile: one that waits for a core which another
process has holds up all, and steps take ten times as long. There fewer threads are quicker.
"""

import logging
import os
import time
from collections.abc import Collection

from worker.cores import Cores, affinity, lines_of, openmp

log = logging.getLogger("onequeue.free_cores")

LOOK_S = 0.5
# A core of which others use more than this part is not free. Beside two threads that spin on two
# cores, one busy process gets two thirds of a core.
TAKEN = 0.6
# So long it has to be before there are fewer threads, or more again.
CROWDED_S, CALM_S = 1.0, 2.0
TICKS_PER_S = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


class FreeCores:
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
