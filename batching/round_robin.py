"""Requests of many items take turns, so that a short one beside them need not wait for them all.

Of all the long requests' items only so many are under way at a time: about what runs and what runs
next. As one ends, the next begins, of each request in turn. What comes beside them queues behind
those few. On the event loop, like the queue that begins them.
"""

from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeVar


class Waited(Protocol):
    open: bool  # somebody still waits for it


T = TypeVar("T", bound=Waited)


class RoundRobin(Generic[T]):
    def __init__(self, most: int) -> None:
        self.most = most  # items under way
        self.under_way = 0
        self._requests: deque[tuple[deque[T], Callable[[T], None]]] = deque()

    @property
    def busy(self) -> bool:
        return self.under_way > 0

    def add(self, items: Iterable[T], begin: Callable[[T], None]) -> None:
        """Items of one request, each to be begun when its turn has come."""
        self._requests.append((deque(items), begin))
        self._begin_more()

    def ended(self) -> None:
        """One that was begun is under way no longer."""
        self.under_way -= 1
        self._begin_more()

    def _begin_more(self) -> None:
        while self.under_way < self.most and self._requests:
            items, begin = self._requests.popleft()
            while items and not items[0].open:
                items.popleft()
            if items:
                self.under_way += 1
                begin(items.popleft())
                self._requests.append((items, begin))
