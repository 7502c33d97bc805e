"""The request queue: admission, slots, and the work items on their way to the worker.

    accept → take (drain task) → prepared, run, resolved elsewhere → release

An accepted item occupies a slot until it is released, wherever it is by then, so no second,
unbounded queue can form. Slots are shared fairly (fair_share.py): inputs of a list wait for free
ones inside their request. A lane is one kind of work of one model: its part of the slots, and an
estimate of how long a new item would wait. Batches are formed in batcher.py and scheduler.py.
Everything runs on the event loop, except `Lane.add_prepared`.
"""

import asyncio
import math
from collections import Counter, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Never, Protocol, cast

from typing_extensions import TypeVar

from batching.errors import ClientGone, DeadlineHopeless, QueueFull
from batching.fair_share import NO_OWNER, FairQueue, FairShare, WaitingWork, WorkOwner
from batching.round_robin import RoundRobin

# The factor of a measurement's weight with each later one: about the latest ten count.
DECAY = 0.9
MAX_EXTRAPOLATION = 20  # from the time in which starts were measured to an expected wait
MAX_IDS = 20

# Of a work item. The queue does not read them: a bare WorkItem has objects and takes any stream.
Payload = TypeVar("Payload", covariant=True, default=object)
Prepared = TypeVar("Prepared", covariant=True, default=object)
Result = TypeVar("Result", covariant=True, default=object)
Delta = TypeVar("Delta", contravariant=True, default=Never)


class Stream(Protocol[Delta]):
    """Receives a response in parts: on the event loop, after each step."""

    def push(self, delta: Delta) -> None: ...


@dataclass(slots=True, eq=False, repr=False)
class WorkItem(Generic[Payload, Prepared, Result, Delta]):
    """One unit of work: a payload, the future of its result, and its state. Times are monotonic
    seconds.

    `future` gets the result or the error. Generated text goes to `stream` on the way, and the
    future then resolves to None at the end.
    """

    payload: Payload  # an input of its model's engine
    deadline: float
    accepted_at: float
    future: "asyncio.Future[Result]" = field(init=False)  # unset in warm-ups, as the next two
    model: str = field(init=False)  # its name in the registry
    lane: "Lane" = field(init=False)
    stream: Stream[Delta] | None = None  # None: the result is one whole
    owner: WorkOwner = NO_OWNER
    started: bool = False  # the response has started: later items no longer wait for this one
    in_lane: bool = False  # the lane counts it: it does not wait inside its request
    counted: int = 0  # tokens that the lane counts: the mean, until they are known
    awaits_model: bool = False  # accepted while its model was not loaded, until it is
    open: bool = True  # unresolved; written by the event loop, read by all threads
    prepared: Prepared = field(init=False)  # set by the engine's `prepare`
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

    def push(self, delta: object) -> None:
        """Hand a delta to the stream, if the item has one and is open. On the event loop only."""
        if self.open and self.stream:
            self.stream.push(cast(Delta, delta))  # its engine's

    def resolve(self, outcome: object) -> bool:
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
            self.future.set_result(cast(Result, outcome))  # its engine's
        return True


def request_ids(items: Sequence[WorkItem]) -> str:
    """Return the ids of the items' requests for a log line: the first MAX_IDS of them."""
    ids = [*dict.fromkeys(item.owner.request_id for item in items)]
    return ",".join(ids[:MAX_IDS]) + (",…" if len(ids) > MAX_IDS else "")


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


class Slots:
    """The slots of a queue, or of a lane's part of it. The error text of full ones contains `name`.

    Flows share the slots of their client: one that holds fewer than another gets slots of it. An
    item that another one yields its slot to, and inputs of a list that find none, take the next
    free ones in fair order. An item may run without a slot: since clients gain slots up to their
    share only, at most a few times as many items are accepted as there are slots.
    """

    def __init__(self, name: str, capacity: int) -> None:
        self.name = name
        self.capacity = capacity
        self._shares = FairShare()
        self._holders: dict[WorkOwner, dict[WorkItem, None]] = {}
        self._flows: Counter[tuple[Hashable, Hashable]] = Counter()  # slots of clients' flows
        self._others = FairQueue[WorkItem]()  # accepted, without a slot

    @property
    def used(self) -> int:
        return self._shares.total

    def has_room(self, owner: WorkOwner) -> bool:
        """Return whether a request finds a slot, free or yielded."""
        return self.used < self.capacity or self._yielding(owner) is not None

    def _yielding(self, owner: WorkOwner) -> WorkOwner | None:
        return self._shares.yields_to(owner, self.capacity) or self._of_larger_flow(owner)

    def _of_larger_flow(self, owner: WorkOwner) -> WorkOwner | None:
        """Return the youngest request of its client's largest flow, if that holds more than its own
        flow would with another slot."""
        of_client = [flow for flow in self._flows if flow[0] == owner.client]
        largest = max(of_client, key=self._flows.__getitem__, default=flow_of(owner))
        request_exceeds, _ = self._shares.excess(owner, self.capacity)
        if request_exceeds or self._flows[largest] <= self._flows[flow_of(owner)] + 1:
            return None
        return next(other for other in reversed(self._holders) if flow_of(other) == largest)

    def add(self, items: Sequence[WorkItem]) -> None:
        """Add a request's items, which has room."""
        owner = items[0].owner
        if self.used >= self.capacity and (other := self._yielding(owner)):
            latest = next(reversed(self._holders[other]))
            self._free(latest)
            self._others.add(latest)
        for item in items:
            if self.used < self.capacity:
                self._hold(item)
            else:
                self._others.add(item)

    def remove(self, item: WorkItem) -> None:
        if item not in self._holders.get(item.owner, ()):
            self._others.drop(item)
            return
        self._free(item)
        if self._others and self.used < self.capacity:
            following = next(iter(self._others))
            self._others.remove(following)
            self._hold(following)

    def _hold(self, item: WorkItem) -> None:
        self._shares.take(item.owner)
        self._flows[flow_of(item.owner)] += 1
        self._holders.setdefault(item.owner, {})[item] = None

    def _free(self, item: WorkItem) -> None:
        self._shares.give_back(item.owner)
        flow, items = flow_of(item.owner), self._holders[item.owner]
        self._flows[flow] -= 1
        if not self._flows[flow]:
            del self._flows[flow]
        del items[item]
        if not items:
            del self._holders[item.owner]


def flow_of(owner: WorkOwner) -> tuple[Hashable, Hashable]:
    return owner.client, owner.flow


class Lane:
    """One kind of work of one model. All lanes share the queue's slots; this one may use `slots` of
    them. With `round_robin`, a few inputs of lists are started at a time."""

    def __init__(
        self, name: str, slots: int, round_robin: RoundRobin[WorkItem] | None = None
    ) -> None:
        self.slots = Slots(name, slots)
        self.round_robin = round_robin
        self.not_started = 0  # items or requests whose response has not started

    def enqueue(self, items: Sequence[WorkItem], put: Callable[[WorkItem], None]) -> None:
        """Pass a request's items to `put`, at once or over time."""
        round_robin = self.round_robin if len(items) > 1 else None

        def start(started: Sequence[WorkItem]) -> None:
            for item in started:
                if round_robin:
                    item.future.add_done_callback(lambda _: start(round_robin.finish()))
                self.add(item)
                put(item)

        start(round_robin.add(items) if round_robin else items)

    def add(self, item: WorkItem) -> None:
        """Count an item that is passed on."""
        item.in_lane = True

    def start(self, item: WorkItem) -> None:
        """Record that an item's response has started."""
        item.started = True

    def release(self, item: WorkItem) -> None:
        """Stop counting an item, resolved or not."""

    def add_prepared(self, item: WorkItem) -> None:
        """Record that an item's tokens are known. From any thread."""

    def expected_wait_s(self, now: float, owner: WorkOwner = NO_OWNER) -> float:
        """Return how long a new item of an owner would wait for those before it."""
        raise NotImplementedError

    def update(self, now: float, report: LoadReport, inbox_waiting: bool) -> None:
        """Measure the rate by a step's report. `inbox_waiting`: items arrived during the step."""
        raise NotImplementedError


class RequestQueue:
    def __init__(self, capacity: int, clock: Callable[[], float]) -> None:
        self.slots = Slots("queue", capacity)
        self.clock = clock
        self.items: set[WorkItem] = set()  # accepted and not released
        self._accepted: asyncio.Queue[WorkItem] = asyncio.Queue()
        self.uses: Counter[str] = Counter()  # items of each model, by its name in the registry
        self.awaiting: Counter[str] = Counter()  # those of them that await the model
        self.on_unused: Callable[[str], object] = lambda model: None  # no item uses it any more
        self.on_released: Callable[[WorkItem], object] = lambda item: None
        self.drained = asyncio.Event()  # set while there are no items
        self.drained.set()
        self._waiting_for_room: list[asyncio.Future[None]] = []

    @property
    def pending(self) -> int:
        """The number of items accepted and not released."""
        return len(self.items)

    def accept(
        self,
        owner: WorkOwner,
        payloads: Sequence[object],
        deadline: float,
        lane: Lane,
        model: str,
        stream: Stream[Never] | None = None,
        awaits_model: bool = False,
    ) -> list[WorkItem[object, object, Result]]:
        """Reserve a slot, queue all payloads of a request, or raise a Refused (503). A stream of
        inputs has waited for room.

        The results arrive at each `item.future`. The caller must `release` the items in the end.
        """
        if not owner.is_stream:
            self._admit(owner, deadline, lane)
        loop, now = asyncio.get_running_loop(), self.clock()
        items: list[WorkItem[object, object, Result]] = [
            WorkItem(payload, deadline, now, stream, owner) for payload in payloads
        ]
        for item in items:
            item.future, item.model, item.lane = loop.create_future(), model, lane
            item.awaits_model = awaits_model
        self.uses[model] += len(items)
        self.awaiting[model] += awaits_model * len(items)
        self.items.update(items)
        self.slots.add(items)
        lane.slots.add(items)
        self.drained.clear()
        lane.enqueue(items, self._accepted.put_nowait)
        return items

    async def wait_for_room(self, owner: WorkOwner, lane: Lane) -> None:
        """Wait until a request finds a slot. New requests do not wait behind it."""
        while not (self.slots.has_room(owner) and lane.slots.has_room(owner)):
            freed = asyncio.get_running_loop().create_future()
            self._waiting_for_room.append(freed)
            await freed

    def _admit(self, owner: WorkOwner, deadline: float, lane: Lane) -> None:
        now = self.clock()
        expected_s = lane.expected_wait_s(now, owner)
        retry_after_s = float(max(1, math.ceil(expected_s)))  # whole seconds, for a header
        for slots in (self.slots, lane.slots):
            if not slots.has_room(owner):
                message = f"the {slots.name} is full: {slots.used} of {slots.capacity} slots"
                raise QueueFull(f"{message} are in use", retry_after_s)
        if expected_s and now + expected_s > deadline:
            raise DeadlineHopeless(
                f"the {lane.not_started} requests before this one need about {expected_s:.1f} s, "
                "more than this request's time limit",
                retry_after_s,
            )

    def has_model(self, model: str) -> None:
        """Record that the items of a model await it no more."""
        del self.awaiting[model]
        for item in self.items:
            if item.model == model:
                item.awaits_model = False

    def _stop_using(self, item: WorkItem) -> None:
        self.uses[item.model] -= 1
        self.awaiting[item.model] -= item.awaits_model
        if self.uses[item.model] == self.awaiting[item.model]:
            self.on_unused(item.model)

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
                self.slots.remove(item)
                item.lane.slots.remove(item)
                if item.in_lane:
                    item.lane.release(item)
                self.items.discard(item)
                self._stop_using(item)
                self.on_released(item)
        waiting, self._waiting_for_room = self._waiting_for_room, []
        for freed in waiting:
            if not freed.done():
                freed.set_result(None)
        if not self.items:
            self.drained.set()


class BatchLane(Lane):
    """The lane of a model that is served in batches, whose time is proportional to their tokens.

    An item's tokens are known once it is prepared; before, it counts as the mean. Batches are
    shared fairly: a flow waits for as much work of the others as it has itself before a new item.
    """

    def __init__(
        self, name: str, slots: int, round_robin: RoundRobin[WorkItem] | None = None
    ) -> None:
        super().__init__(name, slots, round_robin)
        self._prepared: deque[WorkItem] = deque()  # not counted yet; all threads may append
        self._tokens = WaitingWork()
        self._recent = (0.0, 0.0, 0.0)  # items, tokens and seconds of recent batches

    def add(self, item: WorkItem) -> None:
        super().add(item)
        self.not_started += 1
        items, tokens, _ = self._recent
        self._count(item, round(tokens / items) if items else 1)

    def release(self, item: WorkItem) -> None:
        self._count_prepared()
        self.not_started -= 1
        self.start(item)
        self._count(item, 0)

    def add_prepared(self, item: WorkItem) -> None:
        self._prepared.append(item)

    def _count(self, item: WorkItem, tokens: int) -> None:
        self._tokens.add(item.owner, tokens - item.counted)
        item.counted = tokens

    def _count_prepared(self) -> None:
        while self._prepared:
            item = self._prepared.popleft()
            if not item.started:
                self._count(item, item.tokens)

    def expected_wait_s(self, now: float, owner: WorkOwner = NO_OWNER) -> float:
        self._count_prepared()
        _, tokens, seconds = self._recent
        return self._tokens.ahead(owner) * seconds / tokens if tokens else 0.0

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
    started. How often one starts is measured while others have no room.

    A request has started with its first item: the rest does not delay others. Requests of a flow
    wait for as many of each other one as are before them."""

    def __init__(
        self, name: str, slots: int, round_robin: RoundRobin[WorkItem] | None = None
    ) -> None:
        super().__init__(name, slots, round_robin)
        self._items: Counter[WorkOwner] = Counter()  # of each request
        self._not_started: set[WorkOwner] = set()  # requests
        self._waiting = WaitingWork()  # the number of these
        self._started = 0  # requests since the last step
        self._starved_since: float | None = None  # or since the last start during starvation
        self._starts = 0.0  # recent ones during starvation
        self._starts_s = 0.0  # their total time
        self._starved_s = 0.0  # all time of starvation up to the last start
        self._room = 0  # running requests when others have no room, as measured lately

    @property
    def _running(self) -> int:
        return len(self._items) - self.not_started

    def add(self, item: WorkItem) -> None:
        super().add(item)
        if item.owner not in self._items:
            self._not_started.add(item.owner)
            self._waiting.add(item.owner, 1)
            self.not_started += 1
        self._items[item.owner] += 1

    def start(self, item: WorkItem) -> None:
        super().start(item)
        if self._leave_waiting(item.owner):
            self._started += 1

    def release(self, item: WorkItem) -> None:
        self._items[item.owner] -= 1
        if not self._items[item.owner]:
            del self._items[item.owner]
            self._leave_waiting(item.owner)
            if not self.not_started:
                self._starved_since = None

    def _leave_waiting(self, owner: WorkOwner) -> bool:
        if owner not in self._not_started:
            return False
        self._not_started.remove(owner)
        self._waiting.add(owner, -1)
        self.not_started -= 1
        return True

    def expected_wait_s(self, now: float, owner: WorkOwner = NO_OWNER) -> float:
        """Return the estimated wait of an owner's next item. The time since the last start counts
        too: each running request has taken at least as long. With free room nothing waits. Both
        estimates are bounded by the time that was measured: the first steps of a burst are slow."""
        ahead = max(0.0, self._waiting.ahead(owner) - max(0, self._room - self._running))
        start_s = self._starts_s / self._starts if self._starts else 0.0
        since_s = 0.0 if self._starved_since is None else now - self._starved_since
        return max(
            min(ahead * start_s, MAX_EXTRAPOLATION * self._starved_s),
            min(ahead * since_s / max(1, self._running), MAX_EXTRAPOLATION * since_s),
        )

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
            self._starved_s += now - self._starved_since
            self._starved_since = now
        if not starved:
            self._starved_since = None
            return
        if self._starved_since is None:
            self._starved_since = now
        # the room shrinks if items need more of it, or if those that have it are slow to start
        self._room = max(self._running, self._room - started)


class LowPriorityLane(StepLane):
    """The lane of a class below the interactive one: those that wait always count as starved."""

    def update(self, now: float, report: LoadReport, inbox_waiting: bool) -> None:
        starved = self.not_started > 0
        if self._started or starved != (self._starved_since is not None):
            self.record(now, starved)
