"""The one queue: admission, places, and the work items on their way to the worker.

A handler has its payloads accepted and awaits their futures; feeders take items off the other
end. All of it runs on the event loop. The bound counts what is accepted and unanswered, wherever
it is by then, so no second, unbounded queue can form. Whose places they are, and how long a
newcomer would wait, is known in lanes.py. Batches are not made here.
"""

import asyncio
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

from batching.errors import ClientGone, DeadlineHopeless, QueueFull
from batching.lanes import Lane


class Stream(Protocol):
    """Where an answer goes that comes in parts: on the event loop, after each step."""

    def push(self, delta: Any) -> None: ...


class WorkItem:
    """A payload, where its answer goes, and what becomes of it. Times are monotonic seconds.

    The answer, or the error, goes to `future`. A generation's text goes to `stream` on its way, and
    the future resolves to None at its end.
    """

    __slots__ = (
        "accepted_at",
        "arrived_at",
        "batch_size",
        "begun",
        "counted",
        "deadline",
        "finished_at",
        "future",
        "key",
        "lane",
        "model",
        "open",
        "payload",
        "prepared",
        "ran",
        "rows",
        "started_at",
        "stream",
        "tokens",
        "width",
    )

    def __init__(
        self,
        payload: Any,
        future: asyncio.Future[Any] | None,
        deadline: float,
        accepted_at: float,
        stream: Stream | None = None,
        model: Any = None,
        lane: Lane | None = None,
    ) -> None:
        self.payload = payload
        self.model = model  # the entry of the registry (worker/models.py) that serves it
        self.lane = lane
        self.begun = False  # its answer has begun, or never will: no longer ahead of others
        self.counted = False  # its lane knows its tokens
        self.future: asyncio.Future[Any] = future  # type: ignore[assignment]  # warm-ups have none
        self.stream: Stream = stream  # type: ignore[assignment]  # pipelines have none
        self.deadline = deadline
        self.accepted_at = accepted_at
        self.open = True  # somebody still waits; other threads only read it
        self.prepared: Any = None
        self.ran = False  # its output is there: only postprocessing is left
        self.rows = 1  # model rows the item needs
        self.tokens = 1  # tokens of all rows together
        self.width = 1  # tokens of the longest row
        self.key: Hashable = None  # items with equal keys may share a batch
        self.arrived_at = self.started_at = self.finished_at = accepted_at
        self.batch_size = 0

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
        if self.pending + count > self.capacity:
            raise QueueFull(
                f"the queue is full: {self.pending} of {self.capacity} places are taken",
                retry_after(expected_s),
            )
        if lane.taken + count > lane.places:
            raise QueueFull(
                f"the {lane.name} is full: {lane.taken} of {lane.places} places are taken",
                retry_after(expected_s),
            )
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
            if item.lane and item in self.waiting:
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
