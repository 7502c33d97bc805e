"""Round robin between list requests, so that a short request does not wait for a whole list.

Of all list requests' items, at most `max_running` are queued or running at a time: about the batch
that runs and the next one. As one finishes, the next starts, from each request in turn. Runs on the
event loop.
"""

from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeVar


class Cancellable(Protocol):
    open: bool  # False: cancelled


T = TypeVar("T", bound=Cancellable)


class RoundRobin(Generic[T]):
    def __init__(self, max_running: int) -> None:
        self.max_running = max_running
        self.running = 0  # items started and not finished
        self._requests: deque[tuple[deque[T], Callable[[T], None]]] = deque()

    @property
    def busy(self) -> bool:
        return self.running > 0

    def add(self, items: Iterable[T], start: Callable[[T], None]) -> None:
        """Queue the items of one request; `start` is called with each when its turn comes."""
        self._requests.append((deque(items), start))
        self._start_next()

    def finish(self) -> None:
        """Record that a started item has finished."""
        self.running -= 1
        self._start_next()

    def _start_next(self) -> None:
        while self.running < self.max_running and self._requests:
            items, start = self._requests.popleft()
            while items and not items[0].open:
                items.popleft()
            if items:
                self.running += 1
                start(items.popleft())
                self._requests.append((items, start))
