"""Circuit breaker for a failing model: pure state, the caller brings the clock.

Closed until `threshold` failures in a row; then open until a probe, allowed after
`cooldown_s`, succeeds. Who probes, and with what, is the worker's affair.
"""


class Breaker:
    def __init__(self, threshold: int = 3, cooldown_s: float = 5.0) -> None:
        self.threshold = threshold
        self.cooldown_s = cooldown_s
        self.failures = 0
        self.probe_at: float | None = None  # monotonic seconds; None while closed

    @property
    def is_open(self) -> bool:
        return self.probe_at is not None

    def succeeded(self) -> None:
        self.failures = 0
        self.probe_at = None

    def failed(self, now: float) -> None:
        self.failures += 1
        if self.failures >= self.threshold:
            self.probe_at = now + self.cooldown_s
