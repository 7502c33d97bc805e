"""Round robin between list requests, so that a short request does not wait for a whole list.

Of all list requests' items, at most `max_running` are queued or running at a time: about the batch
that runs and the next one. As one finishes, the next starts, in fair order. Runs on the event loop.
"""

from collections.abc import Iterable
from typing import Generic, Protocol, TypeVar

from batching.fair_share import FairQueue, WorkOwner


class Cancellable(Protocol):
    open: bool  # False: cancelled

    @property
    def owner(self) -> WorkOwner: ...


T = TypeVar("T", bound=Cancellable)


class RoundRobin(Generic[T]):
    def __init__(self, max_running: int) -> None:
        self.max_running = max_running
        self.running = 0  # items started and not finished
        self._waiting = FairQueue[T]()

    def add(self, items: Iterable[T]) -> list[T]:
        """Queue the items of a request. Return those that start now."""
        for item in items:
            self._waiting.add(item)
        return self._start_next()

    def finish(self) -> list[T]:
        """Record that a started item has finished. Return those that start instead."""
        self.running -= 1
        return self._start_next()

    def _start_next(self) -> list[T]:
        started = []
        while self.running < self.max_running and self._waiting:
            item = next(iter(self._waiting))
            if item.open:
                self._waiting.remove(item)
                self.running += 1
                started.append(item)
            else:
                self._waiting.drop(item)
        return started
