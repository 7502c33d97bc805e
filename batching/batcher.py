"""The dynamic batcher: which waiting items form the next batch, and when it is due.

One deadline counts from the acceptance of the oldest item, its preparation included. A full batch,
or one that waited while the worker was busy, is due at once. Classes, clients, flows and requests
have their items in a batch in turn, those first that were served the longest ago; of one request,
in order of arrival. The first item is always in the next batch; the others have the same key.
Packed models take them in this order; padded models take those nearest in length out of a bounded
window. Owned by the worker's thread; it has no clock.
"""

import itertools
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from itertools import islice
from typing import Generic

from typing_extensions import TypeVar

from batching.fair_share import in_turn
from batching.request_queue import WorkItem

# The window in which padded models look for items of similar length, in full batches.
WINDOW_BATCHES = 4
# Batches near the cap that must succeed before a cap halved by out-of-memory is doubled again.
GROW_AFTER = 8

Item = TypeVar("Item", bound=WorkItem, default=WorkItem)


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
        self._rows = Counter[Hashable]()  # of the items that wait, by key, as the next
        self._tokens = Counter[Hashable]()
        self._served = dict[Hashable, int]()  # the last batch of clients and requests that wait
        self._batches = itertools.count(1)

    def add(self, item: Item) -> None:
        self.waiting[item] = None
        self._rows[item.key] += item.rows
        self._tokens[item.key] += item.tokens

    def put_back(self, items: Sequence[Item]) -> None:
        """Add items of the last batch, all of one key, that it was cut before, in its order."""
        for item in reversed(items):
            self.add(item)
            self.waiting.move_to_end(item, last=False)

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
        return self._rows[key] >= self.cap or self._tokens[key] >= self.max_tokens

    def take(self, now: float, idle_since: float) -> list[Item]:
        """Remove and return the next batch, if one is due. Cancelled and late items are dropped."""
        while (due_at := self.due_at(idle_since)) is not None and due_at <= now:
            if gone := [item for item in self.waiting if not item.is_alive(now)]:
                self._remove(gone)
                continue
            batch = self._choose()
            self._remove(batch)
            number, waiting = next(self._batches), [item.owner for item in self.waiting]
            served = [owner for item in batch for owner in (item.owner, item.owner.client)]
            kept = {*waiting, *(owner.client for owner in waiting)}
            self._served |= dict.fromkeys(served, number)
            self._served = {key: n for key, n in self._served.items() if key in kept}
            return batch
        return []

    def _in_order(self) -> Iterator[Item]:
        def place(item: Item) -> tuple[int, int, int]:
            owner, served = item.owner, self._served
            return owner.priority, served.get(owner.client, 0), served.get(owner, 0)

        return in_turn(sorted(self.waiting, key=place))

    def _choose(self) -> list[Item]:
        in_order = self._in_order()
        first = next(in_order)
        same_key = (item for item in in_order if item.key == first.key)
        window = list(islice(same_key, WINDOW_BATCHES * self.max_size))
        if not self.packs:
            window.sort(key=lambda item: abs(item.width - first.width))
        batch, rows, total = [first], first.rows, first.tokens
        widest = first.width
        for item in window:
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

    def _remove(self, items: Sequence[Item]) -> None:
        for item in items:
            del self.waiting[item]
            self._rows[item.key] -= item.rows
            self._tokens[item.key] -= item.tokens
            if not self._rows[item.key]:
                del self._rows[item.key], self._tokens[item.key]

    def clear(self) -> list[Item]:
        """Remove all items and return them in order of arrival."""
        items = list(self.waiting)
        self._remove(items)
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
