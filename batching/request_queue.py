"""The one queue: admission, places, and the work items on their way to the worker.

A handler has its payloads accepted and awaits their futures; feeders take items off the other
end. All of it runs on the event loop. The bound counts what is accepted and unanswered, wherever
it is by then, so no second, unbounded queue can form. Whose places they are, and how long a
newcomer would wait, is known in lanes.py. Batches are not made here.
"""

import asyncio
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from batching.errors import ClientGone, DeadlineHopeless, QueueFull
from batching.lanes import Lane


class Stream(Protocol):
    """Where an answer goes that comes in parts: on the event loop, after each step."""

    def push(self, delta: Any) -> None: ...


@dataclass(slots=True, eq=False, repr=False)
class WorkItem:
    """A payload, where its answer goes, and what becomes of it. Times are monotonic seconds.

    The answer, or the error, goes to `future`. A generation's text goes to `stream` on its way, and
    the future resolves to None at its end.
    """

    payload: Any
    future: Any  # an asyncio.Future; warm-ups have none
    deadline: float
    accepted_at: float
    stream: Any = None  # a Stream; pipelines have none
    model: Any = None  # the entry of the registry (worker/models.py) that serves it
    lane: Any = None  # a Lane
    begun: bool = False  # its answer has begun, or never will: no longer ahead of others
    counted: bool = False  # its lane knows its tokens
    open: bool = True  # somebody still waits; other threads only read it
    prepared: Any = None
    ran: bool = False  # its output is there: only postprocessing is left
    rows: int = 1  # model rows the item needs
    tokens: int = 1  # tokens of all rows together
    width: int = 1  # tokens of the longest row
    key: Hashable = None  # items with equal keys may share a batch
    arrived_at: float = 0.0  # prepared, and at the worker
    started_at: float = 0.0
    finished_at: float = 0.0
    batch_size: int = 0

    def resolve(self, outcome: Any) -> bool:
        """Answer the item, once: True if this was the answer, False if it had one. Loop only."""
        if not self.open:
            return False
        self.open = False
        if self.future.cancelled():  # its handler was, with the whole server
            return False
        if isinstance(outcome, BaseException):
            self.future.set_exception(outcome)
        else:
            self.future.set_result(outcome)
        return True


class RequestQueue:
    def __init__(self, capacity: int, clock: Callable[[], float]) -> None:
        self.capacity = capacity
        self.clock = clock
        self.waiting: set[WorkItem] = set()  # accepted and unanswered, one place each
        self._accepted: asyncio.Queue[WorkItem] = asyncio.Queue()
        self._settled = asyncio.Event()
        self._settled.set()

    def _admit(self, count: int, deadline: float, lane: Lane) -> None:
        now = self.clock()
        expected_s = lane.expected_s(now)
        whole = "queue", self.pending, self.capacity
        for name, taken, places in (whole, (lane.name, lane.taken, lane.places)):
            if taken + count > places:
                full = f"the {name} is full: {taken} of {places} places are taken"
                raise QueueFull(full, retry_after(expected_s))
        if lane.ahead and now + expected_s > deadline:
            raise DeadlineHopeless(
                f"the {lane.ahead} requests ahead need about {expected_s:.1f} s, "
                "longer than this request may take",
                retry_after(expected_s),
            )

    def accept(
        self,
        payloads: Sequence[Any],
        deadline: float,
        lane: Lane,
        model: Any = None,
        stream: Stream | None = None,
    ) -> list[WorkItem]:
        """Take a place for each payload and queue them, or raise a Refused (503) at once.

        Each answer arrives at its `item.future`; the caller must `forget` the items in the end.
        """
        self._admit(len(payloads), deadline, lane)
        loop, now = asyncio.get_running_loop(), self.clock()
        items = [
            WorkItem(payload, loop.create_future(), deadline, now, stream, model, lane)
            for payload in payloads
        ]
        self.waiting.update(items)
        lane.enter(len(items))
        self._settled.clear()
        for item in items:
            self._accepted.put_nowait(item)
        return items

    def forget(self, items: Sequence[WorkItem]) -> None:
        """The handler is done with the items, answered or not: their places are free again."""
        for item in items:
            if item.open:
                item.resolve(ClientGone("the client has gone"))
            if not item.future.cancelled():
                item.future.exception()  # seen: a list's second failure is nobody's news
            if item in self.waiting:
                item.lane.leave(item)
        self.waiting.difference_update(items)
        if not self.waiting:
            self._settled.set()

    @property
    def pending(self) -> int:
        """Accepted and unanswered."""
        return len(self.waiting)

    async def take(self) -> list[WorkItem]:
        """Wait for an item, then take all that are there."""
        items = [await self._accepted.get()]
        while not self._accepted.empty():
            items.append(self._accepted.get_nowait())
        return items

    def resolve_all(self, make_error: Callable[[], Exception]) -> None:
        """Answer everything that still waits, wherever it is."""
        for item in self.waiting:
            item.resolve(make_error())

    async def settled(self) -> None:
        """Return once nothing accepted is unanswered."""
        await self._settled.wait()


def retry_after(expected_s: float) -> float:
    """Whole seconds for a Retry-After header: the time the queue needs, at least 1."""
    return float(max(1, math.ceil(expected_s)))
