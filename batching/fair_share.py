"""Fair shares of clients and requests: in the slots of the queue, and in the order of those that
wait for a pool, a batch or a sequence of their own.

Slots: while others wait, a request gets at most a quarter of them, and a client (an API key; an
address, without keys) at most half, but at least one. Beyond that, slots move from the largest to
the smallest, so that several large requests also leave room for a small one. Alone, a request or a
client uses everything. A key with a share of 3 counts as three clients.

Waiting items are served by weighted deficit round robin in tokens: between classes, then between
the clients of a class by their shares, then between the flows of a client (its conversations). The
requests of a flow take turns, one item each. The quantum is one token. Rounds without a turn are
skipped: the round of the next turn is computed from the tokens already served. An operation costs
O(log n) for n waiting clients, independent of the number of items. Tokens that are served while
nothing waits are not counted.

Pure state: no clock, no thread.
"""

import heapq
import itertools
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Generic, Protocol, TypeVar

REQUEST_DIVISOR = 4
CLIENT_DIVISOR = 2


class Priority(IntEnum):
    """The class of work. Each gives way to those before it."""

    INTERACTIVE = 0
    BATCH = 1
    BACKGROUND = 2


# Of tokens where no class waits behind another for good: in batches. The scheduler has an order.
CLASS_WEIGHTS = {Priority.INTERACTIVE: 64.0, Priority.BATCH: 8.0, Priority.BACKGROUND: 1.0}


@dataclass(frozen=True, slots=True, eq=False)
class WorkOwner:
    """The request that work belongs to. `client`: whose share of the server it counts for."""

    client: Hashable
    request_id: str = ""  # for logs; it may be the client's own
    flow: Hashable = None  # of the client: a conversation or a user
    share: float = 1.0  # of the client, beside others
    priority: Priority = Priority.INTERACTIVE
    is_stream: bool = False  # of inputs, each of which waits for room in the queue


NO_OWNER = WorkOwner(None)  # of all work outside of requests


def request_share(capacity: int) -> int:
    return max(1, capacity // REQUEST_DIVISOR)


def client_share(capacity: int, share: float = 1.0) -> int:
    """Return the units of a client beside another one with a share of 1."""
    return max(1, int(capacity * share / (share + CLIENT_DIVISOR - 1)))


class FairShare:
    """The units of a resource that requests hold."""

    def __init__(self) -> None:
        self.total = 0
        self._requests: dict[Hashable, Counter[WorkOwner]] = {}  # by client; none is zero
        self._clients: Counter[Hashable] = Counter()
        self._client_shares: dict[Hashable, float] = {}  # of these

    def take(self, owner: WorkOwner, units: int = 1) -> None:
        self.total += units
        self._clients[owner.client] += units
        self._client_shares[owner.client] = owner.share
        self._requests.setdefault(owner.client, Counter())[owner] += units

    def give_back(self, owner: WorkOwner, units: int = 1) -> None:
        self.total -= units
        self._clients[owner.client] -= units
        requests = self._requests[owner.client]
        requests[owner] -= units
        if not requests[owner]:
            del requests[owner]
        if not requests:
            del self._requests[owner.client], self._clients[owner.client]
            del self._client_shares[owner.client]

    def of_request(self, owner: WorkOwner) -> int:
        requests = self._requests.get(owner.client)
        return requests[owner] if requests else 0

    def of_client(self, owner: WorkOwner) -> int:
        return self._clients[owner.client]

    def excess(self, owner: WorkOwner, capacity: int) -> tuple[bool, bool]:
        """Return whether another unit would exceed the request's share, and the client's. Those
        that wait are served in this order."""
        return (
            self.of_request(owner) >= request_share(capacity),
            self.of_client(owner) >= client_share(capacity, owner.share),
        )

    def yields_to(self, owner: WorkOwner, capacity: int) -> WorkOwner | None:
        """Return the request that gives up a unit for `owner`, which waits while all units are
        held; None if none has to."""
        request_exceeds, client_exceeds = self.excess(owner, capacity)
        if request_exceeds or not self.total:
            return None
        largest = max(map(self._largest_of, self._requests), key=self.of_request)
        if self.of_request(largest) > request_share(capacity):
            return largest
        client = max(self._requests, key=self._relative)
        more = (self.of_client(owner) + 1) / owner.share
        if not client_exceeds and client != owner.client and self._relative(client) > more:
            return self._largest_of(client)
        if owner.client in self._requests:
            largest = self._largest_of(owner.client)
            if self.of_request(largest) > self.of_request(owner) + 1:
                return largest
        return None

    def _relative(self, client: Hashable) -> float:
        return self._clients[client] / self._client_shares[client]

    def _largest_of(self, client: Hashable) -> WorkOwner:
        requests = self._requests[client]
        return max(requests, key=requests.__getitem__)


class Owned(Protocol):
    @property
    def owner(self) -> WorkOwner: ...


T = TypeVar("T", bound=Owned)


Path = tuple[Hashable, ...]  # of classes, clients and flows
# The round of a key's next turn, its order within the round, and the key.
Entry = tuple[float, int, Hashable]


class _Turn:
    __slots__ = ("order", "round", "waiting", "weight")

    def __init__(self, weight: float, round: float) -> None:
        self.weight = weight
        self.round = round  # of its next turn
        self.order = -1  # among those of the same round
        self.waiting = 0  # items


class _Level:
    """The turns of the classes, of the clients of a class, or of the flows of a client."""

    def __init__(self, orders: Iterator[int]) -> None:
        self.turns: dict[Hashable, _Turn] = {}
        self.heap: list[Entry] = []  # of those that wait; an entry is stale if its turn has changed
        self._orders = orders
        self._now = 0.0  # the round of those that begin to wait
        self._weight = 0.0  # of those that wait
        self.num_waiting = 0

    def enter(self, key: Hashable, weight: float) -> None:
        turn = self.turns.get(key)
        if turn is None:
            turn = self.turns[key] = _Turn(weight, self._now)
        if not turn.waiting:
            turn.round = max(turn.round, self._now)
            turn.weight = weight
            self._weight += weight
            self.num_waiting += 1
            turn.waiting = 1
            self.end_turn(key)
        else:
            turn.waiting += 1

    def leave(self, key: Hashable) -> None:
        turn = self.turns[key]
        turn.waiting -= 1
        if not turn.waiting:
            turn.order = -1
            self._weight -= turn.weight
            self.num_waiting -= 1
            if turn.round <= self._now:
                del self.turns[key]

    def charge(self, key: Hashable, tokens: float, weight: float) -> None:
        turn = self.turns.get(key)
        if turn is None:
            turn = self.turns[key] = _Turn(weight, self._now)
        turn.round += tokens / turn.weight
        self._now += tokens / (self._weight + (0.0 if turn.waiting else turn.weight))
        if turn.waiting:
            self.end_turn(key)
        elif len(self.turns) > 2 * self.num_waiting + 256:  # drop those that have paid
            self.turns = {k: t for k, t in self.turns.items() if t.waiting or t.round > self._now}

    def end_turn(self, key: Hashable) -> None:
        """Let others of the same round come first."""
        turn = self.turns[key]
        turn.order = next(self._orders)
        heapq.heappush(self.heap, (turn.round, turn.order, key))
        while not self.is_current(self.heap[0]):
            heapq.heappop(self.heap)
        if len(self.heap) > 2 * self.num_waiting + 64:
            self.heap = [entry for entry in self.heap if self.is_current(entry)]
            heapq.heapify(self.heap)

    def is_current(self, entry: Entry) -> bool:
        turn = self.turns.get(entry[2])
        return turn is not None and turn.order == entry[1]

    def walk(
        self, items_of: Callable[[Hashable], Iterator[T]], cost: Callable[[T], float]
    ) -> Iterator[T]:
        """Yield items in order, as if each were served. The heap is read, not changed."""
        open_items: dict[Hashable, Iterator[T]] = {}
        frontier: list[tuple[Entry, int]] = [(self.heap[0], 0)] if self.heap else []
        while frontier:
            entry, index = heapq.heappop(frontier)
            round, _, key = entry
            if index >= 0:
                for child in (2 * index + 1, 2 * index + 2):
                    if child < len(self.heap):
                        heapq.heappush(frontier, (self.heap[child], child))
                if not self.is_current(entry):
                    continue
                open_items[key] = items_of(key)
            for item in open_items[key]:
                yield item
                later = round + cost(item) / self.turns[key].weight
                heapq.heappush(frontier, ((later, next(self._orders), key), -1))
                break


class Turns:
    """Whose turn it is among those that wait: the deficits of classes, clients and flows."""

    def __init__(self) -> None:
        self.levels: dict[Path, _Level] = {}
        self._orders = itertools.count()

    def enter(self, owner: WorkOwner, priority: Priority) -> None:
        """Record that an item begins to wait."""
        for before, key, weight in levels_of(owner, priority):
            if (level := self.levels.get(before)) is None:
                level = self.levels[before] = _Level(self._orders)
            level.enter(key, weight)

    def leave(self, owner: WorkOwner, priority: Priority) -> None:
        """Record that an item waits no more."""
        for before, key, _ in levels_of(owner, priority):
            level = self.levels[before]
            level.leave(key)
            if not level.num_waiting:
                del self.levels[before]

    def charge(self, owner: WorkOwner, priority: Priority, tokens: float) -> None:
        """Record tokens that an owner has been served."""
        for before, key, weight in levels_of(owner, priority) if self.levels else ():
            if level := self.levels.get(before):
                level.charge(key, tokens, weight)

    def end_turn(self, owner: WorkOwner, priority: Priority) -> None:
        for before, key, _ in levels_of(owner, priority):
            self.levels[before].end_turn(key)

    def rank(self, owner: WorkOwner, priority: Priority) -> tuple[float, ...]:
        """Return the rounds of the next turns of an owner's client and flow, which wait."""
        client, flow = (priority,), (priority, owner.client)
        turns = self.levels[client].turns[owner.client], self.levels[flow].turns[owner.flow]
        return tuple(turn.round for turn in turns)


def levels_of(owner: WorkOwner, priority: Priority) -> tuple[tuple[Path, Hashable, float], ...]:
    """Return the levels of an owner: its class, client and flow. Each is the path of the level, the
    owner's key in it, and the weight of the key."""
    client = owner.client
    return (
        ((), priority, CLASS_WEIGHTS[priority]),
        ((priority,), client, owner.share),
        ((priority, client), owner.flow, 1.0),
    )


class WaitingWork:
    """The amounts of work that wait, by class, client and flow."""

    def __init__(self) -> None:
        self._amounts = Counter[Path]()  # none is zero
        self._branches = Counter[Path]()  # the clients of a class, or the flows of a client

    def add(self, owner: WorkOwner, amount: int) -> None:
        """Add work of an owner. A negative amount removes some."""
        path = path_of(owner)
        for part in (path, path[:2], path[:1]):
            before = self._amounts[part]
            self._amounts[part] = after = before + amount
            self._branches[part[:-1]] += (after > 0) - (before > 0)
            if not after:
                del self._amounts[part], self._branches[part]

    def ahead(self, owner: WorkOwner) -> float:
        """Return how much is served before more work of an owner: its flow takes turns with the
        others, as do its client and class."""
        path = path_of(owner)
        amount = self._amounts[path]
        for part in (path[:2], path[:1]):
            amount = min(self._amounts[part], self._branches[part] * amount)
        classes = [priority for priority in Priority if self._amounts[(priority,)]]
        turns = sum(map(CLASS_WEIGHTS.__getitem__, classes)) / CLASS_WEIGHTS[owner.priority]
        return min(sum(self._amounts[(priority,)] for priority in classes), turns * amount)


class FairQueue(Generic[T]):
    """Items in fair order. `remove` ends the turn of the item's request, and charges its owner
    `cost`, the item's tokens."""

    def __init__(self, cost: Callable[[T], float] = lambda item: 1.0) -> None:
        self._cost = cost
        self._turns = Turns()
        self._flows: dict[Path, OrderedDict[WorkOwner, OrderedDict[T, None]]] = {}
        self._charged: set[T] = set()  # items that were put back
        self._length = 0

    def add(self, item: T) -> None:
        owner = item.owner
        requests = self._flows.setdefault(path_of(owner), OrderedDict())
        requests.setdefault(owner, OrderedDict())[item] = None
        self._turns.enter(owner, owner.priority)
        self._length += 1

    def put_back(self, items: Sequence[T]) -> None:
        """Add items again, each before the others of its request, and end the turns of these. They
        are not charged again."""
        for item in reversed(items):
            self.add(item)
            self._flows[path_of(item.owner)][item.owner].move_to_end(item, last=False)
        for item in items:
            self._charged.add(item)
            self._flows[path_of(item.owner)].move_to_end(item.owner)
            self._turns.end_turn(item.owner, item.owner.priority)

    def remove(self, item: T) -> None:
        """Remove an item that is served."""
        if item not in self._charged:
            self._turns.charge(item.owner, item.owner.priority, self._cost(item))
        self._flows[path_of(item.owner)].move_to_end(item.owner)
        self.drop(item)

    def drop(self, item: T) -> None:
        """Remove an item that is not wanted any more."""
        owner, path = item.owner, path_of(item.owner)
        items = self._flows[path][owner]
        del items[item]
        self._charged.discard(item)
        self._length -= 1
        if not items:
            del self._flows[path][owner]
        if not self._flows[path]:
            del self._flows[path]
        self._turns.leave(owner, owner.priority)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[T]:
        return self._walk(())

    def _walk(self, path: Path) -> Iterator[T]:
        if level := self._turns.levels.get(path):
            return level.walk(lambda key: self._walk((*path, key)), self._cost_again)
        return in_turn(self._flows.get(path, {}).values())

    def _cost_again(self, item: T) -> float:
        return 0.0 if item in self._charged else self._cost(item)


def path_of(owner: WorkOwner) -> Path:
    return owner.priority, owner.client, owner.flow


def fair_order(items: Iterable[T]) -> Iterator[T]:
    """Yield items in fair order, those of a request in the given order."""
    queue = FairQueue[T]()
    for item in items:
        queue.add(item)
    return iter(queue)


def in_turn(iterables: Iterable[Iterable[T]]) -> Iterator[T]:
    """Yield an item of each iterable in turn, until all are exhausted."""
    iterators = deque[Iterator[T]]()
    unstarted = map(iter, iterables)
    while iterator := next(unstarted, None) or (iterators and iterators.popleft()):
        for item in iterator:
            yield item
            iterators.append(iterator)
            break
