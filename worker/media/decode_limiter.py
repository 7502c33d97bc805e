"""A limit on the pixels and audio samples that are decoded at the same time.

An image of a few hundred kilobytes may unpack into a gigabyte, and each pool thread decodes one.
All threads together hold no more than the largest accepted image. Callers decide how much an input
takes. No torch.
"""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from batching.errors import InvalidInput

# A request's inputs, one after another, may take the limiter's size this many times.
SIZES_PER_REQUEST = 16


@dataclass(slots=True)
class RequestLimiter:
    """Counts the pixels or samples of one request's inputs."""

    taken: int = 0


class DecodeLimiter:
    """`size` pixels or samples, `taken` of them; shared by all pool threads."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.taken = 0
        self.queue: deque[Lease] = deque()  # waiting, the next one first
        self.changed = threading.Condition()

    def lease(
        self, request: RequestLimiter | None = None, is_wanted: Callable[[], bool] = lambda: True
    ) -> "Lease":
        return Lease(self, request, is_wanted)


@dataclass(slots=True, eq=False)
class Lease:
    """One input's share of the limiter, returned at the end of the block. Decoding ends once not
    `is_wanted()`."""

    limiter: DecodeLimiter
    request: RequestLimiter | None
    is_wanted: Callable[[], bool]
    taken: int = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        if self.taken:
            with self.limiter.changed:
                self.limiter.taken -= self.taken
                self.limiter.changed.notify_all()

    def take(self, count: int) -> None:
        """Wait for `count` pixels or samples, first come, first served; a larger count takes the
        whole limiter. Once per lease only: two leases that hold some and wait for more would
        deadlock. Raises InvalidInput if the request has taken too much."""
        assert not self.taken
        limiter, request_limit = self.limiter, SIZES_PER_REQUEST * self.limiter.size
        with limiter.changed:
            if self.request:
                self.request.taken += count
                if self.request.taken > request_limit:
                    much = f"the inputs have more than {request_limit} pixels or samples in all"
                    raise InvalidInput(f"{much}: send fewer", "inputs")
            count = min(count, limiter.size)
            limiter.queue.append(self)
            try:
                limiter.changed.wait_for(
                    lambda: limiter.queue[0] is self and limiter.taken + count <= limiter.size
                )
                limiter.taken += count
                self.taken = count
            finally:
                limiter.queue.remove(self)
                limiter.changed.notify_all()
