"""A rate limit: a number of units a minute, of which those of one minute may be used at once.

Work whose size is known later is counted when it has run, so what is left may be negative: a debt,
which the next minutes pay off. Pure state: no clock.
"""


class TokenBucket:
    """`now`: monotonic seconds."""

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._left = float(per_minute)
        self._at = now

    def left(self, now: float) -> float:
        refilled = self._left + (now - self._at) * self.per_minute / 60
        return min(float(self.per_minute), refilled)

    def take(self, units: float, now: float) -> None:
        self._left, self._at = self.left(now) - units, now

    def wait_s(self, units: float, now: float) -> float:
        """Return the time until so many units are left; 0 if they are."""
        return max(0.0, units - self.left(now)) * 60 / self.per_minute
