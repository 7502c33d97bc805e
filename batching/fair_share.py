"""Fair shares of clients and requests: the one rule that the queue, the batcher, the scheduler and
the grammar compiler follow.

While others wait, a request gets at most a quarter of a resource, and a client (an API key; an
address, without keys) at most half of it, but at least one unit. Beyond that, units move from the
largest to the smallest, so that several large requests also leave room for a small one. Alone, a
request or a client uses everything. Pure state: no clock, no thread.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from enum import IntEnum
from typing import Generic, NamedTuple, Protocol, TypeVar

REQUEST_DIVISOR = 4
CLIENT_DIVISOR = 2


class Priority(IntEnum):
    """The class of work. Each gives way to those before it."""

    INTERACTIVE = 0
    BATCH = 1
    BACKGROUND = 2


class WorkOwner(NamedTuple):
    """The client and the request that work belongs to."""

    client: Hashable
    request: Hashable  # unique among those of all clients
    request_id: str = ""  # for logs; it may be the client's own


NO_OWNER = WorkOwner(None, None)  # of all work outside of requests


def request_share(capacity: int) -> int:
    return max(1, capacity // REQUEST_DIVISOR)


def client_share(capacity: int) -> int:
    return max(1, capacity // CLIENT_DIVISOR)


class FairShare:
    """The units of a resource that requests hold."""

    def __init__(self) -> None:
        self.total = 0
        self._requests: dict[Hashable, Counter[WorkOwner]] = {}  # by client; none is zero
        self._clients: Counter[Hashable] = Counter()

    def take(self, owner: WorkOwner, units: int = 1) -> None:
        self.total += units
        self._clients[owner.client] += units
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
            self.of_client(owner) >= client_share(capacity),
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
        client = max(self._requests, key=self._clients.__getitem__)
        if not client_exceeds and self._clients[client] > self.of_client(owner) + 1:
            return self._largest_of(client)
        if owner.client in self._requests:
            largest = self._largest_of(owner.client)
            if self.of_request(largest) > self.of_request(owner) + 1:
                return largest
        return None

    def _largest_of(self, client: Hashable) -> WorkOwner:
        requests = self._requests[client]
        return max(requests, key=requests.__getitem__)


class Owned(Protocol):
    @property
    def owner(self) -> WorkOwner: ...


T = TypeVar("T", bound=Owned)


class FairQueue(Generic[T]):
    """Items in fair order: of each client in turn one item, and of a client one of each request in
    turn. `remove` ends the turn of the item's request."""

    def __init__(self) -> None:
        self._clients: OrderedDict[Hashable, OrderedDict[WorkOwner, OrderedDict[T, None]]]
        self._clients = OrderedDict()
        self._length = 0

    def add(self, item: T) -> None:
        requests = self._clients.setdefault(item.owner.client, OrderedDict())
        requests.setdefault(item.owner, OrderedDict())[item] = None
        self._length += 1

    def put_back(self, items: Sequence[T]) -> None:
        """Add items again, each before the others of its request, and end the turns of these."""
        for item in reversed(items):
            self.add(item)
            self._clients[item.owner.client][item.owner].move_to_end(item, last=False)
        for item in items:
            self._clients[item.owner.client].move_to_end(item.owner)
            self._clients.move_to_end(item.owner.client)

    def remove(self, item: T) -> None:
        client, requests = item.owner.client, self._clients[item.owner.client]
        items = requests[item.owner]
        del items[item]
        self._length -= 1
        requests.move_to_end(item.owner)
        self._clients.move_to_end(client)
        if not items:
            del requests[item.owner]
        if not requests:
            del self._clients[client]

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[T]:
        return in_turn(in_turn(requests.values()) for requests in self._clients.values())


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
