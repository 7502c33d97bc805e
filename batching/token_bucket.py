"""A token bucket: a limit of units per minute, with bursts of up to one minute's units; and a limit
of requests that run at the same time.

Work is counted after it has run, when its size is known. The remaining units may therefore become
negative, and refill from there. Pure state: no clock.

Several processes may share a limit: each exchanges what it has taken for what all have left, about
once a second, and may take its part of that until the next exchange.
"""

import math

EXCHANGE_S = 1.0


class TokenBucket:
    """`now`: monotonic seconds."""

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self.taken = 0.0  # units that no exchange has counted
        self._left = float(per_minute)
        self._at = now
        self._processes = 1
        self._part = math.inf  # units of `_left` that this process may take

    def left(self, now: float) -> float:
        """Return the units that all processes have left, as far as this one knows."""
        refilled = self._left + (now - self._at) * self.per_minute / 60
        return min(float(self.per_minute), refilled)

    def take(self, units: float, now: float) -> None:
        self._left, self._at = self.left(now) - units, now
        self.taken += units
        self._part -= units

    def wait_s(self, units: float, now: float) -> float:
        """Return the time until so many units are left; 0 if they are."""
        wait_s = max(0.0, units - self.left(now)) * 60 / self.per_minute
        return wait_s if wait_s or self._part >= 1 else EXCHANGE_S

    def exchange(self, taken: float, left: float, processes: int, now: float) -> None:
        """All processes have so many units left, after those that this one had taken. It may take
        an equal part of them: what the others leave of theirs is divided again the next time."""
        self.taken -= taken
        self._left, self._at, self._processes = left - self.taken, now, processes
        self._part = math.ceil(left / processes) - self.taken

    def go_alone(self, seconds: float) -> None:
        """No exchange was possible for so long: this process takes its part of the rate. What it
        takes meanwhile counts for the others up to a minute's units."""
        part = self.per_minute / self._processes
        self._part = min(part, self._part + part * seconds / 60)
        self.taken = min(self.taken, part)


class ParallelLimit:
    """`held`: the requests that this process runs, and those that the others leave to it."""

    def __init__(self, limit: int) -> None:
        self.limit, self.running, self.held = limit, 0, 0
        self._processes, self._allowed = 1, limit
        self._has_refused = False  # since the last exchange

    def start(self) -> bool:
        """Count a request that starts to run, and return whether it may."""
        may_run = self.running < self._allowed
        self.running += may_run
        self._has_refused |= not may_run
        return may_run

    def exchange(self, held_by_others: int, processes: int) -> None:
        """Hold an equal part of what no process holds, rounded up after a refusal. A process that
        runs none may run one that it does not hold, so that a small limit is not divided to 0."""
        running = self.running  # requests start and end in another thread
        free = self.limit - held_by_others - running
        part = math.ceil(free / processes) if self._has_refused and free > 0 else free // processes
        self.held = running + max(0, part)
        self._allowed = max(running + part, min(1, free))
        self._processes, self._has_refused = processes, False

    def go_alone(self) -> None:
        """No exchange was possible: this process runs its part of the limit."""
        self._allowed = max(1, self.limit // self._processes)
