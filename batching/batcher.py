"""The dynamic batcher: which waiting items form the next batch, and when it is due.

One deadline counts from the acceptance of the oldest item, its preparation included. A full batch,
or one that waited while the worker was busy, is due at once. Classes, clients, flows and requests
have their items in a batch in turn (fair_share.py); of one request, in order of arrival. The first
item is always in the next batch; the others have the same key. Packed models take them in this
order; padded models take those nearest in length out of a bounded window. Owned by the worker's
thread; it has no clock.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from itertools import islice
from typing import Generic

from typing_extensions import TypeVar

from batching.fair_share import FairQueue
from batching.request_queue import WorkItem

# The window in which padded models look for items of similar length, in full batches.
WINDOW_BATCHES = 4
# Batches near the cap that must succeed before a cap halved by out-of-memory is doubled again.
GROW_AFTER = 8

Item = TypeVar("Item", bound=WorkItem, default=WorkItem)


def tokens_of(item: WorkItem) -> int:
    return item.tokens


class DynamicBatcher(Generic[Item]):
    """`max_size`: rows of a batch. `max_tokens`: of a batch. `max_wait_s`: of its oldest item."""

    def __init__(self, max_size: int, max_tokens: int, max_wait_s: float) -> None:
        self.max_size = max_size
        self.max_tokens = max_tokens
        self.max_wait_s = max_wait_s
        self.packs = True  # tokens add up; otherwise each row costs as much as the longest
        self.cap = max_size  # rows allowed now: below max_size after out-of-memory
        self._successes = 0
        # an ordered dict: finding a plain dict's first key gets slower with each deletion
        self.waiting: OrderedDict[Item, None] = OrderedDict()
        self._in_turn = FairQueue[Item](tokens_of)
        self._groups: dict[Hashable, FairQueue[Item]] = {}  # by key

    def add(self, item: Item) -> None:
        self.waiting[item] = None
        self._in_turn.add(item)
        self._groups.setdefault(item.key, FairQueue(tokens_of)).add(item)

    def put_back(self, items: Sequence[Item]) -> None:
        """Add items of the last batch, all of one key, that it was cut before, in its order."""
        for item in reversed(items):
            self.waiting[item] = None
            self.waiting.move_to_end(item, last=False)
        self._in_turn.put_back(items)
        if items:
            self._groups.setdefault(items[0].key, FairQueue(tokens_of)).put_back(items)

    def due_at(self, idle_since: float) -> float | None:
        """Return when the next batch is due; None if nothing waits. The worker was busy until
        `idle_since`: items accepted before have waited long enough."""
        oldest = next(iter(self.waiting), None)
        if oldest is None:
            return None
        if oldest.accepted_at <= idle_since or self._is_full(oldest.key):
            return oldest.accepted_at
        return oldest.accepted_at + self.max_wait_s

    def _is_full(self, key: Hashable) -> bool:
        rows = tokens = 0
        for item in self._groups[key]:
            rows += item.rows
            tokens += item.tokens
            if rows >= self.cap or tokens >= self.max_tokens:
                return True
        return False

    def take(self, now: float, idle_since: float) -> list[Item]:
        """Remove and return the next batch, if one is due. Cancelled and late items are dropped."""
        while (due_at := self.due_at(idle_since)) is not None and due_at <= now:
            first = next(iter(self._in_turn))
            if not first.is_alive(now):
                self._remove(first, FairQueue.drop)
                continue
            batch = self._choose(first, now)
            for item in batch:
                self._remove(item, FairQueue.remove)
            return batch
        return []

    def _choose(self, first: Item, now: float) -> list[Item]:
        candidates = islice(self._groups[first.key], WINDOW_BATCHES * self.max_size)
        window = [item for item in candidates if item.is_alive(now)]
        if not self.packs:
            window.sort(key=lambda item: abs(item.width - first.width))
        batch, rows, total = [first], first.rows, first.tokens
        widest = first.width
        for item in window:
            if item is first:
                continue
            new_rows = rows + item.rows
            new_widest = max(widest, item.width)
            new_total = total + item.tokens
            cost = new_total if self.packs else new_rows * new_widest
            if new_rows > self.cap or cost > self.max_tokens:
                if self.packs:
                    break  # a smaller item does not overtake
                continue
            batch.append(item)
            rows, widest, total = new_rows, new_widest, new_total
        return batch

    def _remove(self, item: Item, remove: Callable[[FairQueue[Item], Item], None]) -> None:
        del self.waiting[item]
        remove(self._in_turn, item)
        group = self._groups[item.key]
        remove(group, item)
        if not group:
            del self._groups[item.key]

    def clear(self) -> list[Item]:
        """Remove all items and return them in order of arrival."""
        items = list(self.waiting)
        self.waiting.clear()
        self._in_turn = FairQueue(tokens_of)
        self._groups.clear()
        return items

    def out_of_memory(self, largest_rows: int) -> None:
        """Lower the cap after a batch that did not fit. `largest_rows`: rows of its largest part
        that did; 0 if none did, and the items themselves are too large."""
        if largest_rows:
            self.cap = min(self.cap, largest_rows)
            self._successes = 0

    def succeeded(self, rows: int) -> None:
        """Count a batch that fitted; enough of them near a lowered cap raise it again."""
        if self.cap == self.max_size or rows * 2 <= self.cap:
            return
        self._successes += 1
        if self._successes >= GROW_AFTER:
            self.cap = min(self.max_size, self.cap * 2)
            self._successes = 0
