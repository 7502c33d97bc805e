"""The dynamic batcher: which waiting items form the next batch, and when it is due.

One deadline counts from the acceptance of the oldest item, its preparation included. A full batch,
or one that waited while the worker was busy, is due at once. The oldest item is always in the next
batch; the others have the same key. Packed models take items in order of arrival; padded models
take those nearest in length out of a bounded window. Owned by the worker's thread; it has no clock.
"""

from collections import OrderedDict
from collections.abc import Hashable
from itertools import islice

from batching.request_queue import WorkItem

# The window in which padded models look for items of similar length, in full batches.
WINDOW_BATCHES = 4
# Batches near the cap that must succeed before a cap halved by out-of-memory is doubled again.
GROW_AFTER = 8


class DynamicBatcher:
    """`max_size`: rows of a batch. `max_tokens`: of a batch. `max_wait_s`: of its oldest item."""

    def __init__(self, max_size: int, max_tokens: int, max_wait_s: float) -> None:
        self.max_size = max_size
        self.max_tokens = max_tokens
        self.max_wait_s = max_wait_s
        self.packs = True  # tokens add up; otherwise each row costs as much as the longest
        self.cap = max_size  # rows allowed now: below max_size after out-of-memory
        self._successes = 0
        # ordered dicts: finding a plain dict's first key gets slower with each deletion
        self._groups: dict[Hashable, OrderedDict[WorkItem, None]] = {}
        self.waiting: OrderedDict[WorkItem, None] = OrderedDict()

    def add(self, item: WorkItem) -> None:
        self.waiting[item] = None
        self._groups.setdefault(item.key, OrderedDict())[item] = None

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

    def take(self, now: float, idle_since: float) -> list[WorkItem]:
        """Remove and return the next batch, if one is due. Cancelled and late items are dropped."""
        while (due_at := self.due_at(idle_since)) is not None and due_at <= now:
            oldest = next(iter(self.waiting))
            if not oldest.is_alive(now):
                self._remove(oldest)
                continue
            batch = self._choose(oldest, now)
            for item in batch:
                self._remove(item)
            return batch
        return []

    def _choose(self, oldest: WorkItem, now: float) -> list[WorkItem]:
        candidates = islice(self._groups[oldest.key], WINDOW_BATCHES * self.max_size)
        window = [item for item in candidates if item.is_alive(now)]
        if not self.packs:
            window.sort(key=lambda item: abs(item.width - oldest.width))
        batch, rows, total = [oldest], oldest.rows, oldest.tokens
        widest = oldest.width
        for item in window:
            if item is oldest:
                continue
            new_rows = rows + item.rows
            new_widest = max(widest, item.width)
            new_total = total + item.tokens
            cost = new_total if self.packs else new_rows * new_widest
            if new_rows > self.cap or cost > self.max_tokens:
                if self.packs:
                    break  # first come, first served
                continue
            batch.append(item)
            rows, widest, total = new_rows, new_widest, new_total
        return batch

    def _remove(self, item: WorkItem) -> None:
        del self.waiting[item]
        group = self._groups[item.key]
        del group[item]
        if not group:
            del self._groups[item.key]

    def clear(self) -> list[WorkItem]:
        """Remove all items and return them in order of arrival."""
        items = list(self.waiting)
        self.waiting.clear()
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
