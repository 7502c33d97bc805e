"""Fair sharing between classes, clients, flows and requests: of slots, and of the order of service.

Shares counts the units of a resource that requests hold: slots of the queue, items that are
released to a model, tokens that wait. Where all of a resource is taken, a class, a client, a flow
or a request that holds less than its part beside others still gets a unit. The second holder of
units then adds half of the resource at most, the third a third, and so on: a few times as many
units as there are may be held. Alone, a request uses everything. A key with a share of 3 counts as
three clients.

FairOrder is weighted fair queueing in tokens: between classes, between the clients of a class by
their shares, between the flows of a client (its conversations), and between the requests of a flow
with the same rank; a lower rank is first. Each has a clock that advances by the tokens that it is
served, divided by its weight; the smallest clock is next. A client that was idle gets no credit for
that time. An operation costs O(log n) for n clients that wait, independent of the number of items.

Pure state: no time, no thread.
"""

import heapq
import itertools
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Generic, Protocol, TypeVar


class Priority(IntEnum):
    """The class of work. Each gives way to those before it."""

    INTERACTIVE = 0
    BATCH = 1
    BACKGROUND = 2


# Of tokens, in the queue, where no class starves another. The scheduler serves classes in order.
CLASS_WEIGHTS = {Priority.INTERACTIVE: 64.0, Priority.BATCH: 8.0, Priority.BACKGROUND: 1.0}

Path = tuple[Hashable, ...]  # of a class, a client, a flow or a request
CLIENT_LEVEL = 2  # the length of a client's path
_numbers = itertools.count()


@dataclass(frozen=True, slots=True, eq=False)
class WorkOwner:
    """The request that work belongs to. `client`: whose share of the server it counts for."""

    client: Hashable
    request_id: str = ""  # for logs; it may be the client's own
    flow: Hashable = None  # of the client: a conversation or a user
    share: float = 1.0  # of the client, beside others
    priority: Priority = Priority.INTERACTIVE
    is_stream: bool = False  # of inputs, each of which waits for room in the queue
    rank: int = 0  # of the request in its flow
    # The paths of its class, client, flow and request, with their weights.
    levels: tuple[tuple[Path, float], ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        path = self.priority, self.client, self.flow, (self.rank, next(_numbers))
        weights = CLASS_WEIGHTS[self.priority], self.share, 1.0, 1.0
        levels = tuple((path[: n + 1], weight) for n, weight in enumerate(weights))
        object.__setattr__(self, "levels", levels)  # it is frozen


NO_OWNER = WorkOwner(None)  # of all work outside of requests


@dataclass(slots=True)
class _Holding:
    """What a class, a client, a flow or a request holds."""

    units: float = 0.0
    items: int = 0
    weights: float = 0.0  # of those below it


class Shares:
    """The units of a resource that requests hold, an amount for each of their items."""

    def __init__(self) -> None:
        self._holdings: dict[Path, _Holding] = {(): _Holding()}

    @property
    def total(self) -> float:
        return self._holdings[()].units

    def take(self, owner: WorkOwner, units: float = 1) -> None:
        self._add(owner, units, 1)

    def give_back(self, owner: WorkOwner, units: float = 1) -> None:
        self._add(owner, -units, -1)

    def _add(self, owner: WorkOwner, units: float, items: int) -> None:
        holding = self._holdings[()]
        holding.units += units
        holding.items += items
        if not holding.items:
            self._holdings = {(): _Holding()}
            return
        for path, weight in owner.levels:
            above, known = holding, self._holdings.get(path)
            if known is None:
                known = self._holdings[path] = _Holding()
                above.weights += weight
            holding = known
            holding.units += units
            holding.items += items
            if not holding.items:
                del self._holdings[path]
                above.weights -= weight

    def of(self, path: Path) -> float:
        """Return the units of a class, a client, a flow or a request."""
        holding = self._holdings.get(path)
        return holding.units if holding else 0.0

    def parts(self, owner: WorkOwner) -> Iterator[tuple[Path, float, float]]:
        """Yield the path of an owner's class, client, flow and request, where others beside it hold
        units: the units that it holds, and its part of the resource."""
        above: _Holding | None = self._holdings[()]
        part = 1.0
        for path, weight in owner.levels:
            if above is None:
                return  # it is alone from here on
            holding = self._holdings.get(path)
            if above.items > (holding.items if holding else 0):
                part *= weight / (above.weights + (0.0 if holding else weight))
                yield path, holding.units if holding else 0.0, part
            above = holding

    def has_room(self, owner: WorkOwner, capacity: float) -> bool:
        """Return whether a unit is free, or within the owner's part."""
        return self.total < capacity or any(
            held + 1 <= part * capacity for _, held, part in self.parts(owner)
        )

    def ahead(self, owner: WorkOwner, units: float) -> float:
        """Return how many of the units that are held are served before so many more of an owner:
        its request takes turns with others, as do its flow, its client and its class."""
        paths = owner.levels
        holdings = [self._holdings.get(path) or _Holding() for path, _ in paths]
        amount = holdings[-1].units + units
        for n in reversed(range(len(paths))):
            weight = paths[n][1]
            above = holdings[n - 1] if n else self._holdings[()]
            weights = above.weights + (0.0 if holdings[n].items else weight)
            amount = min(above.units + units, amount * weights / weight)
        return amount - units


class Owned(Protocol):
    @property
    def owner(self) -> WorkOwner: ...


T = TypeVar("T", bound=Owned)


@dataclass(eq=False, slots=True)
class _Clock:
    weight: float
    time: float
    order: int = -1  # among those of the same time
    waiting: int = 0  # items


class _Level:
    """The clocks of the classes, of the clients of a class, of the flows of a client, or of the
    requests of a flow."""

    def __init__(self, orders: Iterator[int]) -> None:
        self.clocks: dict[Path, _Clock] = {}
        # of those that wait; an entry is stale if its clock has changed
        self._heap: list[tuple[int, float, int, Path]] = []
        self._orders = orders
        self._now = 0.0  # the time of those that begin to wait
        self._weight = 0.0  # of those that wait
        self.num_waiting = 0

    def enter(self, path: Path, weight: float) -> None:
        clock = self.clocks.setdefault(path, _Clock(weight, self._now))
        clock.waiting += 1
        if clock.waiting == 1:
            clock.time = max(clock.time, self._now)
            clock.weight = weight
            self._weight += weight
            self.num_waiting += 1
            self._push(path, clock)

    def leave(self, path: Path) -> None:
        clock = self.clocks[path]
        clock.waiting -= 1
        if not clock.waiting:
            clock.order = -1
            self._weight -= clock.weight
            self.num_waiting -= 1
            if clock.time <= self._now:
                del self.clocks[path]

    def charge(self, path: Path, tokens: float, weight: float) -> None:
        clock = self.clocks.setdefault(path, _Clock(weight, self._now))
        clock.time += tokens / clock.weight
        self._now += tokens / (self._weight + (0.0 if clock.waiting else clock.weight))
        if clock.waiting:
            self._push(path, clock)
        elif len(self.clocks) > 2 * self.num_waiting + 256:  # drop those that have paid
            self.clocks = {p: c for p, c in self.clocks.items() if c.waiting or c.time > self._now}

    def first(self) -> Path:
        """Return the path of the smallest clock of those that wait."""
        while not self._is_current(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][3]

    def _push(self, path: Path, clock: _Clock) -> None:
        """Put a clock behind others of the same rank and time."""
        clock.order = next(self._orders)
        rank = path[3][0] if len(path) > 3 else 0  # type: ignore[index]  # of a request
        heapq.heappush(self._heap, (rank, clock.time, clock.order, path))
        if len(self._heap) > 2 * self.num_waiting + 64:
            self._heap = [entry for entry in self._heap if self._is_current(entry)]
            heapq.heapify(self._heap)

    def _is_current(self, entry: tuple[int, float, int, Path]) -> bool:
        clock = self.clocks.get(entry[3])
        return clock is not None and clock.order == entry[2]


class FairOrder(Generic[T]):
    def __init__(self) -> None:
        self._levels: dict[Path, _Level] = {}  # by the path above
        # of requests; an ordered dict: finding a plain dict's first key gets slower with deletions
        self._items: dict[Path, OrderedDict[T, None]] = {}
        self._orders = itertools.count()

    def add(self, item: T) -> None:
        for path, weight in item.owner.levels:
            if (level := self._levels.get(path[:-1])) is None:
                level = self._levels[path[:-1]] = _Level(self._orders)
            level.enter(path, weight)
        self._items.setdefault(path, OrderedDict())[item] = None

    def remove(self, item: T) -> None:
        for path, _ in item.owner.levels:
            level = self._levels[path[:-1]]
            level.leave(path)
            if not level.num_waiting:
                del self._levels[path[:-1]]
        items = self._items[path]
        del items[item]
        if not items:
            del self._items[path]

    def charge(self, owner: WorkOwner, tokens: float) -> None:
        """Advance the clocks of an owner by the tokens it was served, on the levels where some
        item waits."""
        for path, weight in owner.levels:
            if level := self._levels.get(path[:-1]):
                level.charge(path, tokens, weight)

    def waits(self, path: Path) -> bool:
        """Return whether an item of a class, a client, a flow or a request waits."""
        level = self._levels.get(path[:-1])
        clock = level.clocks.get(path) if level else None
        return clock is not None and clock.waiting > 0

    def first(self, path: Path = ()) -> T:
        """Return the next item, or that of a class, a client, a flow or a request that waits."""
        while level := self._levels.get(path):
            path = level.first()
        return next(iter(self._items[path]))

    def __bool__(self) -> bool:
        return bool(self._items)


def in_turn(items: Iterable[T], level: int = 0) -> Iterator[T]:
    """Yield items of classes, of their clients, flows and requests in turn, in the given order."""
    if level == len(NO_OWNER.levels):
        return iter(items)
    groups: dict[Path, list[T]] = {}
    for item in items:
        groups.setdefault(item.owner.levels[level][0], []).append(item)
    return alternate(in_turn(group, level + 1) for group in groups.values())


def alternate(iterables: Iterable[Iterable[T]]) -> Iterator[T]:
    """Yield an item of each iterable in turn, until all are exhausted."""
    iterators = deque(map(iter, iterables))
    while iterators:
        for item in iterators[0]:
            yield item
            iterators.append(iterators[0])
            break
        iterators.popleft()
