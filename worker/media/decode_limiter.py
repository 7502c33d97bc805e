"""How many pixels of images and samples of sound are decoded at the same time.

An image of a few hundred kilobytes may unpack into a gigabyte, and each pool thread decodes one:
together they hold no more than the largest image that is taken may have. Torch-free; what is
decoded, and how much it takes, is for inputs.py to say.
"""

import threading
from collections import deque
from dataclasses import dataclass
from typing import Self

from batching.errors import InvalidInput

# A request's inputs, one after another, may take the budget this many times.
TIMES_PER_REQUEST = 16


@dataclass(slots=True)
class RequestLimiter:
    """What the inputs of one request take together."""

    taken: int = 0


class DecodeLimiter:
    """`size` pixels or samples, `taken` of them; shared by all pool threads."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.taken = 0
        self.line: deque[Lease] = deque()  # those that wait, the first in front
        self.changed = threading.Condition()

    def lease(self, request: RequestLimiter | None = None) -> "Lease":
        return Lease(self, request)


@dataclass(slots=True, eq=False)
class Lease:
    """One input's part of the budget, given back at the end."""

    budget: DecodeLimiter
    request: RequestLimiter | None
    taken: int = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        if self.taken:
            with self.budget.changed:
                self.budget.taken -= self.taken
                self.budget.changed.notify_all()

    def take(self, count: int) -> None:
        """Wait, first come first served, for so much; call it once, as two that wait for each
        other's would wait forever. What exceeds the budget waits until it has all of it."""
        assert not self.taken
        budget, most = self.budget, TIMES_PER_REQUEST * self.budget.size
        with budget.changed:
            if self.request:
                self.request.taken += count
                if self.request.taken > most:
                    much = f"the inputs have more than {most} pixels or samples in all: send fewer"
                    raise InvalidInput(much, "inputs")
            count = min(count, budget.size)
            budget.line.append(self)
            try:
                budget.changed.wait_for(
                    lambda: budget.line[0] is self and budget.taken + count <= budget.size
                )
                budget.taken += count
                self.taken = count
            finally:
                budget.line.remove(self)
                budget.changed.notify_all()
