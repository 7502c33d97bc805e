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
# A core of which others leave less than half is not free, and is again when they have left more for
# so long, whether the model was used meanwhile or not.
CALM_S = 2.0
TICKS_PER_S = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


class FreeCores:
    """Of the worker's thread, which calls `follow` between its turns."""

    def __init__(self, cores: Cores) -> None:
        self._most = self.threads = 1 if cores.asked else cores.threads
        self._cores = cores.kept or affinity(0)
        self._looked_at = float("-inf")
        self._others_s: float | None = None  # what other processes have used of them so far
        self._calm_s = 0.0

    def follow(self, now: float) -> None:
        """Once in a while: compute with as many threads as there are cores free."""
        if self._most == 1 or now < self._looked_at + LOOK_S:
            return
        passed, self._looked_at = now - self._looked_at, now
        busy, before = busy_s(self._cores), self._others_s
        self._others_s = None if busy is None else busy - time.process_time()
        if before is None or self._others_s is None:
            return
        free = len(self._cores) - (self._others_s - before) / passed
        threads = max(1, min(self._most, int(free + 0.5)))
        self._calm_s = self._calm_s + passed if threads > self.threads else 0.0
        if threads < self.threads or self._calm_s >= CALM_S:
            log.debug("compute threads=%d of %d", threads, self._most)
            self.threads, self._calm_s = threads, 0.0
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
