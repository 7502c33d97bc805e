"""The one queue: admission, places, and the work items on their way to the worker.

A handler has its payloads accepted and awaits their futures; feeders take items off the other
end. The bound counts what is accepted and unanswered, wherever it is by then, so no second,
unbounded queue can form. A lane is what is accepted for one model, and says how long a newcomer
would wait for it; the kinds of them are in request_queue.py. All runs on the event loop, but for
`Lane.prepared`. Batches are not made here.

How long a newcomer would wait: of work that is served in batches, and of work side by side.

On the event loop, but for `prepared`.
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from batching.errors import ClientGone, DeadlineHopeless, QueueFull
from batching.round_robin import RoundRobin

# Where requests of several items take turns, and some are there, more of them leave one in so many
# places to requests of one item.
RESERVE = 4


class Stream(Protocol):
    """Where an answer goes that comes in parts: on the event loop, after each step."""

    def push(self, delta: Any) -> None: ...


class ServingModel(Protocol):
    """The entry of the registry (worker/registry.py) that an item is for."""

    name: str
    loaded: Any  # a Runner or a Generator
    line: Any
    busy: bool


@dataclass(slots=True, eq=False, repr=False)
class WorkItem:
    """A payload, where its answer goes, and what becomes of it. Times are monotonic seconds.

    The answer, or the error, goes to `future`. A generation's text goes to `stream` on its way, and
    the future resolves to None at its end.
    """

    payload: Any
    deadline: float
    accepted_at: float
    future: "asyncio.Future[Any]" = field(init=False)  # warm-ups have none, nor a model or a lane
    model: ServingModel = field(init=False)
    lane: "Lane" = field(init=False)
    stream: Stream | None = None  # pipelines have none
    cache_namespace: bytes = b""  # cached prefixes and images are shared within it alone
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


class Lane:
    """One model's work of one kind. Lanes share the queue's places; of them it may take `places`.
    `name` is what a client reads when those are taken."""

    def __init__(self, name: str, places: int) -> None:
        self.name = name
        self.places = places
        self.taken = 0  # accepted and unanswered
        self.ahead = 0  # of them, those whose answer has not begun

    def leave(self, item: WorkItem) -> None:
        """It is answered, or nobody waits for it any more."""
        self.taken -= 1
        if not item.begun:
            Lane.begin(self, item)

    def begin(self, item: WorkItem) -> None:
        """Its answer begins: from here on it takes its time, but nobody waits for it."""
        item.begun = True
        self.ahead -= 1

    def prepared(self, item: WorkItem) -> None:
        """Its tokens are known. From any thread."""

    def leaves_free(self, count: int) -> bool:
        """Whether a request of so many items may not take the last places."""
        return False

    def hand_on(self, items: Sequence[WorkItem], to: Callable[[WorkItem], None]) -> None:
        """A request's items, now or when it is their turn."""
        for item in items:
            to(item)

    def expected_s(self, now: float) -> float:
        """How long a new item would wait for those ahead of it."""
        raise NotImplementedError


class RequestQueue:
    def __init__(self, capacity: int, clock: Callable[[], float]) -> None:
        self.capacity = capacity
        self.clock = clock
        self.waiting: set[WorkItem] = set()  # accepted and unanswered, one place each
        self._accepted: asyncio.Queue[WorkItem] = asyncio.Queue()
        self.settled = asyncio.Event()  # nothing accepted is unanswered
        self.settled.set()

    def _admit(self, count: int, deadline: float, lane: Lane) -> None:
        now = self.clock()
        expected_s = lane.expected_s(now)
        retry_after_s = float(max(1, math.ceil(expected_s)))  # whole seconds, for a header
        whole = "queue", self.pending, self.capacity
        for name, taken, places in (whole, (lane.name, lane.taken, lane.places)):
            kept = places // RESERVE if lane.leaves_free(count) else 0
            if taken + count > places - kept:
                full = f"the {name} is full: {taken} of {places} places are taken"
                raise QueueFull(full, retry_after_s)
        if lane.ahead and now + expected_s > deadline:
            raise DeadlineHopeless(
                f"the {lane.ahead} requests ahead need about {expected_s:.1f} s, "
                "longer than this request may take",
                retry_after_s,
            )

    def accept(
        self,
        payloads: Sequence[Any],
        deadline: float,
        lane: Lane,
        model: ServingModel,
        stream: Stream | None = None,
        cache_namespace: bytes = b"",
    ) -> list[WorkItem]:
        """Take a place for each payload and queue them, or raise a Refused (503) at once.

        Each answer arrives at its `item.future`; the caller must `forget` the items in the end.
        """
        self._admit(len(payloads), deadline, lane)
        loop, now = asyncio.get_running_loop(), self.clock()
        items = [
            WorkItem(payload, deadline, now, stream=stream, cache_namespace=cache_namespace)
            for payload in payloads
        ]
        for item in items:
            item.future, item.model, item.lane = loop.create_future(), model, lane
        self.waiting.update(items)
        lane.taken += len(items)
        lane.ahead += len(items)
        self.settled.clear()
        lane.hand_on(items, self._accepted.put_nowait)
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
            self.settled.set()

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


# What is left of a measurement after the next one: about the latest ten count.
KEEP = 0.9


class BatchLane(Lane):
    """Served in batches, which take a time for each token. Those of an item are known once it is
    prepared; before, it counts like the mean. With `turns`, requests of several items take
    turns."""

    def __init__(self, name: str, places: int, turns: RoundRobin[WorkItem] | None = None) -> None:
        super().__init__(name, places)
        self.turns = turns
        self._prepared: deque[WorkItem] = deque()  # not counted yet; all threads may add
        self._known = 0  # items ahead that are counted
        self._tokens = 0  # theirs
        self._recent = (0.0, 0.0, 0.0)  # items, tokens and seconds of recent batches

    def prepared(self, item: WorkItem) -> None:
        self._prepared.append(item)

    def leaves_free(self, count: int) -> bool:
        return count > 1 and self.turns is not None and self.turns.busy

    def hand_on(self, items: Sequence[WorkItem], to: Callable[[WorkItem], None]) -> None:
        if (turns := self.turns) is None or len(items) == 1:
            return super().hand_on(items, to)

        def begin(item: WorkItem) -> None:
            item.future.add_done_callback(lambda _: turns.ended())
            to(item)

        turns.add(items, begin)

    def record(self, items: int, tokens: int, seconds: float) -> None:
        """Of a batch that was full or kept others waiting."""
        old_items, old_tokens, old_s = self._recent
        self._recent = old_items * KEEP + items, old_tokens * KEEP + tokens, old_s * KEEP + seconds

    def leave(self, item: WorkItem) -> None:
        self._count_prepared()
        if item.counted:
            self._known -= 1
            self._tokens -= item.tokens
        super().leave(item)

    def expected_s(self, now: float) -> float:
        self._count_prepared()
        items, tokens, seconds = self._recent
        if not tokens:
            return 0.0
        unknown = (self.ahead - self._known) * tokens / items
        return (self._tokens + unknown) * seconds / tokens

    def _count_prepared(self) -> None:
        while self._prepared:
            item = self._prepared.popleft()
            if not item.begun:
                item.counted = True
                self._known += 1
                self._tokens += item.tokens


class StepLane(Lane):
    """Served side by side: a newcomer waits until all before it have had their turn to begin. How
    often somebody begins is measured while others go without."""

    def __init__(self, name: str, places: int) -> None:
        super().__init__(name, places)
        self.begun = 0  # since the last step
        self.starved_since: float | None = None  # or since the last who began meanwhile
        self._turns = 0.0  # recent ones
        self._seconds = 0.0  # that they took together
        self._full = 0  # how many run when others have no room, as seen lately

    def begin(self, item: WorkItem) -> None:
        super().begin(item)
        self.begun += 1

    def leave(self, item: WorkItem) -> None:
        super().leave(item)
        if not self.ahead:
            self.starved_since = None

    def stepped(self, now: float, starved: bool) -> None:
        """A step has ended; who began in it is known. `starved`: others had no room in it."""
        begun, self.begun = self.begun, 0
        if begun and self.starved_since is not None:
            # those who run may end all at once: what counts is how long a round of them takes
            keep = max(KEEP, 1 - 1 / max(1, self._running)) ** begun
            self._turns = self._turns * keep + begun
            self._seconds = self._seconds * keep + now - self.starved_since
            self.starved_since = now
        if not starved:
            self.starved_since = None
            return
        if self.starved_since is None:
            self.starved_since = now
        # fewer do if each needs more room, or if those who have it are slow to begin
        self._full = max(self._running, self._full - begun)

    @property
    def _running(self) -> int:
        return self.taken - self.ahead

    def expected_s(self, now: float) -> float:
        """Since when nobody has begun counts too: each of those who run has taken so long. Whoever
        finds a free place waits for nobody."""
        turn_s = self._seconds / self._turns if self._turns else 0.0
        if self.starved_since is not None:
            turn_s = max(turn_s, (now - self.starved_since) / max(1, self._running))
        free = max(0, self._full - self._running)
        return max(0, self.ahead - free) * turn_s
