"""The request queue: admission, slots, and the work items on their way to the worker.

    accept → take (drain task) → prepared, run, resolved elsewhere → release

An accepted item occupies a slot until it is released, wherever it is by then, so no second,
unbounded queue can form. A lane is one kind of work of one model: its share of the slots, and an
estimate of how long a new item would wait. Batches are formed in batcher.py and scheduler.py.
Everything runs on the event loop, except `Lane.add_prepared`.
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from batching.errors import ClientGone, DeadlineHopeless, QueueFull
from batching.round_robin import RoundRobin

# While the items of list requests are served in round robin, list requests leave this fraction
# (1 / RESERVE_DIVISOR) of the slots to requests of one item.
RESERVE_DIVISOR = 4
# The factor of a measurement's weight with each later one: about the latest ten count.
DECAY = 0.9


class Stream(Protocol):
    """Receives a response in parts: on the event loop, after each step."""

    def push(self, delta: Any) -> None: ...


@dataclass(slots=True, eq=False, repr=False)
class WorkItem:
    """One unit of work: a payload, the future of its result, and its state. Times are monotonic
    seconds.

    `future` gets the result or the error. Generated text goes to `stream` on the way, and the
    future then resolves to None at the end.
    """

    payload: Any  # the input type of its model's engine
    deadline: float
    accepted_at: float
    future: "asyncio.Future[Any]" = field(init=False)  # unset in warm-ups, as the next two
    model: str = field(init=False)  # its name in the registry
    lane: "Lane" = field(init=False)
    stream: Stream | None = None  # None: the result comes as a whole
    cache_namespace: bytes = b""  # cached prefixes and images are shared within it alone
    started: bool = False  # the response has started: later items no longer wait for this one
    counted: bool = False  # the lane has counted its tokens
    open: bool = True  # unresolved; written by the event loop, read by all threads
    prepared: Any = None  # set by the engine's `prepare`
    has_output: bool = False  # computed: only postprocessing is left
    rows: int = 1  # model rows
    tokens: int = 1  # tokens of all rows together
    width: int = 1  # tokens of the longest row
    key: Hashable = None  # items with equal keys may share a batch
    arrived_at: float = 0.0  # at the worker, prepared
    started_at: float = 0.0
    finished_at: float = 0.0
    batch_size: int = 0

    def is_alive(self, now: float) -> bool:
        """Return whether the result is still wanted: the item is open and not late."""
        return self.open and self.deadline > now

    def resolve(self, outcome: Any) -> bool:
        """Set the future's result or exception. Return False if the item was resolved before. On
        the event loop only."""
        if not self.open:
            return False
        self.open = False
        if self.future.cancelled():  # with its handler, when the server stops
            return False
        if isinstance(outcome, BaseException):
            self.future.set_exception(outcome)
        else:
            self.future.set_result(outcome)
        return True


class LoadReport(Protocol):
    """The part of a step's report that lanes measure their rate by."""

    @property
    def size(self) -> int: ...  # items

    @property
    def tokens(self) -> int: ...

    @property
    def total_s(self) -> float: ...

    @property
    def saturated(self) -> bool: ...  # other items had to wait


class Lane:
    """One kind of work of one model. All lanes share the queue's slots; this one may use `slots` of
    them. The error text of a full lane contains `name`."""

    def __init__(self, name: str, slots: int) -> None:
        self.name = name
        self.slots = slots
        self.used = 0  # items accepted and not released
        self.not_started = 0  # of them, those whose response has not started

    def release(self, item: WorkItem) -> None:
        """Free the slot of an item, resolved or not."""
        self.used -= 1
        if not item.started:
            self._start(item)

    def start(self, item: WorkItem) -> None:
        """Record that an item's response has started."""

    def _start(self, item: WorkItem) -> None:
        item.started = True
        self.not_started -= 1

    def add_prepared(self, item: WorkItem) -> None:
        """Record that an item's tokens are known. From any thread."""

    def keeps_reserve(self, count: int) -> bool:
        """Return whether a request of `count` items must leave the reserved slots free."""
        return False

    def enqueue(self, items: Sequence[WorkItem], put: Callable[[WorkItem], None]) -> None:
        """Pass a request's items to `put`, at once or over time."""
        for item in items:
            put(item)

    def expected_wait_s(self, now: float) -> float:
        """Return how long a new item would wait for those before it."""
        raise NotImplementedError

    def update(self, now: float, report: LoadReport, inbox_waiting: bool) -> None:
        """Measure the rate by a step's report. `inbox_waiting`: items arrived during the step."""
        raise NotImplementedError


class RequestQueue:
    def __init__(self, capacity: int, clock: Callable[[], float]) -> None:
        self.capacity = capacity
        self.clock = clock
        self.items: set[WorkItem] = set()  # accepted and not released, one slot each
        self._accepted: asyncio.Queue[WorkItem] = asyncio.Queue()
        self.drained = asyncio.Event()  # set while there are no items
        self.drained.set()

    @property
    def pending(self) -> int:
        """The number of items accepted and not released."""
        return len(self.items)

    def accept(
        self,
        payloads: Sequence[Any],
        deadline: float,
        lane: Lane,
        model: str,
        stream: Stream | None = None,
        cache_namespace: bytes = b"",
    ) -> list[WorkItem]:
        """Reserve a slot for each payload and queue all of them, or raise a Refused (503).

        The results arrive at each `item.future`. The caller must `release` the items in the end.
        """
        self._admit(len(payloads), deadline, lane)
        loop, now = asyncio.get_running_loop(), self.clock()
        items = [
            WorkItem(payload, deadline, now, stream=stream, cache_namespace=cache_namespace)
            for payload in payloads
        ]
        for item in items:
            item.future, item.model, item.lane = loop.create_future(), model, lane
        self.items.update(items)
        lane.used += len(items)
        lane.not_started += len(items)
        self.drained.clear()
        lane.enqueue(items, self._accepted.put_nowait)
        return items

    def _admit(self, count: int, deadline: float, lane: Lane) -> None:
        now = self.clock()
        expected_s = lane.expected_wait_s(now)
        retry_after_s = float(max(1, math.ceil(expected_s)))  # whole seconds, for a header
        queue = "queue", self.pending, self.capacity
        for name, used, slots in (queue, (lane.name, lane.used, lane.slots)):
            reserved = slots // RESERVE_DIVISOR if lane.keeps_reserve(count) else 0
            if used + count > slots - reserved:
                message = f"the {name} is full: {used} of {slots} slots are in use"
                raise QueueFull(message, retry_after_s)
        if lane.not_started and now + expected_s > deadline:
            raise DeadlineHopeless(
                f"the {lane.not_started} requests before this one need about {expected_s:.1f} s, "
                "more than this request's time limit",
                retry_after_s,
            )

    async def take(self) -> list[WorkItem]:
        """Wait for an item, then take all that are queued."""
        items = [await self._accepted.get()]
        while not self._accepted.empty():
            items.append(self._accepted.get_nowait())
        return items

    def release(self, items: Sequence[WorkItem]) -> None:
        """Free the slots of items. Unresolved items are cancelled."""
        for item in items:
            if item.open:
                item.resolve(ClientGone("the client has gone"))
            if not item.future.cancelled():
                item.future.exception()  # retrieved: a list's handler reads its first error only
            if item in self.items:
                item.lane.release(item)
        self.items.difference_update(items)
        if not self.items:
            self.drained.set()


class BatchLane(Lane):
    """The lane of a model that is served in batches, whose time is proportional to their tokens.

    An item's tokens are known once it is prepared; before, it counts as the mean. With
    `round_robin`, list requests start a few of their items at a time, each in turn.
    """

    def __init__(
        self, name: str, slots: int, round_robin: RoundRobin[WorkItem] | None = None
    ) -> None:
        super().__init__(name, slots)
        self.round_robin = round_robin
        self._prepared: deque[WorkItem] = deque()  # not counted yet; all threads may append
        self._counted = 0  # items that are prepared and not released
        self._tokens = 0  # of the counted items
        self._recent = (0.0, 0.0, 0.0)  # items, tokens and seconds of recent batches

    def release(self, item: WorkItem) -> None:
        self._count_prepared()
        if item.counted:
            self._counted -= 1
            self._tokens -= item.tokens
        super().release(item)

    def add_prepared(self, item: WorkItem) -> None:
        self._prepared.append(item)

    def _count_prepared(self) -> None:
        while self._prepared:
            item = self._prepared.popleft()
            if not item.started:
                item.counted = True
                self._counted += 1
                self._tokens += item.tokens

    def keeps_reserve(self, count: int) -> bool:
        return count > 1 and self.round_robin is not None and self.round_robin.busy

    def enqueue(self, items: Sequence[WorkItem], put: Callable[[WorkItem], None]) -> None:
        if (round_robin := self.round_robin) is None or len(items) == 1:
            return super().enqueue(items, put)

        def start(item: WorkItem) -> None:
            item.future.add_done_callback(lambda _: round_robin.finish())
            put(item)

        round_robin.add(items, start)

    def expected_wait_s(self, now: float) -> float:
        self._count_prepared()
        items, tokens, seconds = self._recent
        if not tokens:
            return 0.0
        uncounted_tokens = (self.not_started - self._counted) * tokens / items
        return (self._tokens + uncounted_tokens) * seconds / tokens

    def update(self, now: float, report: LoadReport, inbox_waiting: bool) -> None:
        """Ignore batches that kept no other item waiting: they were not as large as they can be."""
        if report.size and (report.saturated or inbox_waiting):
            self.record(report.size, report.tokens, report.total_s)

    def record(self, items: int, tokens: int, seconds: float) -> None:
        old_items, old_tokens, old_s = self._recent
        self._recent = (
            old_items * DECAY + items,
            old_tokens * DECAY + tokens,
            old_s * DECAY + seconds,
        )


class StepLane(Lane):
    """The lane of a model that runs requests side by side: a new one waits until all before it have
    started. How often one starts is measured while others have no room."""

    def __init__(self, name: str, slots: int) -> None:
        super().__init__(name, slots)
        self._started = 0  # items since the last step
        self._starved_since: float | None = None  # or since the last start during starvation
        self._starts = 0.0  # recent ones during starvation
        self._starts_s = 0.0  # their total time
        self._room = 0  # running items when others have no room, as measured lately

    @property
    def _running(self) -> int:
        return self.used - self.not_started

    def release(self, item: WorkItem) -> None:
        super().release(item)
        if not self.not_started:
            self._starved_since = None

    def start(self, item: WorkItem) -> None:
        self._start(item)
        self._started += 1

    def expected_wait_s(self, now: float) -> float:
        """The time since the last start counts too: each running item has taken at least as long.
        An item that finds free room does not wait."""
        start_s = self._starts_s / self._starts if self._starts else 0.0
        if self._starved_since is not None:
            start_s = max(start_s, (now - self._starved_since) / max(1, self._running))
        free = max(0, self._room - self._running)
        return max(0, self.not_started - free) * start_s

    def update(self, now: float, report: LoadReport, inbox_waiting: bool) -> None:
        if self._started or report.saturated != (self._starved_since is not None):
            self.record(now, report.saturated)

    def record(self, now: float, starved: bool) -> None:
        """Measure a step that has ended. `starved`: it had no room for other items."""
        started, self._started = self._started, 0
        if started and self._starved_since is not None:
            # the running items may end all at once: average over a round of them
            decay = max(DECAY, 1 - 1 / max(1, self._running)) ** started
            self._starts = self._starts * decay + started
            self._starts_s = self._starts_s * decay + now - self._starved_since
            self._starved_since = now
        if not starved:
            self._starved_since = None
            return
        if self._starved_since is None:
            self._starved_since = now
        # the room shrinks if items need more of it, or if those that have it are slow to start
        self._room = max(self._running, self._room - started)


class BackgroundLane(StepLane):
    """The lane of low-priority requests: those that wait always count as starved."""

    def update(self, now: float, report: LoadReport, inbox_waiting: bool) -> None:
        starved = self.not_started > 0
        if self._started or starved != (self._starved_since is not None):
            self.record(now, starved)
