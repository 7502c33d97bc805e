"""A token bucket: a limit of units per minute, with bursts of up to one minute's units.

Work is counted after it has run, when its size is known. The remaining units may therefore become
negative, and refill from there. Pure state: no clock.
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
