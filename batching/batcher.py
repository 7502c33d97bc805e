"""The dynamic batcher: which waiting items form the next batch, and when it leaves.

A single deadline counts from the acceptance of the batch's first item, its preparation included;
a full batch, or one that waited while the worker was busy, leaves at once. The oldest item is
always in the next batch; the others have the same key. Packed models take them in order of
arrival, padding ones those nearest in length out of a bounded window. Owned by the worker thread;
no clock inside.
"""

from collections import OrderedDict
from collections.abc import Hashable
from itertools import islice

from batching.request_queue import WorkItem

# How many batches' worth of waiting items are looked at for some of similar length.
WINDOW_BATCHES = 4
# Batches near the cap that must succeed before a cap halved by out-of-memory is doubled again.
GROW_AFTER = 8


class DynamicBatcher:
    def __init__(self, max_size: int, max_tokens: int, max_wait_s: float) -> None:
        self.max_size = max_size  # rows
        self.max_tokens = max_tokens
        self.max_wait_s = max_wait_s
        self.packs = True  # tokens add up; otherwise every row costs as much as the longest
        self.cap = max_size  # rows allowed now: max_size unless memory ran out
        self._successes = 0
        # ordered dicts: a plain one takes ever longer to find its first key after deletions
        self._groups: dict[Hashable, OrderedDict[WorkItem, None]] = {}
        self.waiting: OrderedDict[WorkItem, None] = OrderedDict()

    def add(self, item: WorkItem) -> None:
        self.waiting[item] = None
        self._groups.setdefault(item.key, OrderedDict())[item] = None

    def due_at(self, free_since: float) -> float | None:
        """When the next batch should leave; None if nothing waits. The worker was busy until
        `free_since`: what was accepted before has waited enough."""
        oldest = next(iter(self.waiting), None)
        if oldest is None:
            return None
        if oldest.accepted_at <= free_since or self._is_full(oldest.key):
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

    def take(self, now: float, free_since: float) -> list[WorkItem]:
        """The next batch, if one is due. Items nobody waits for are dropped on the way."""
        while (due := self.due_at(free_since)) is not None and due <= now:
            oldest = next(iter(self.waiting))
            if not _alive(oldest, now):
                self._drop(oldest)
                continue
            batch = self._choose(oldest, now)
            for item in batch:
                self._drop(item)
            return batch
        return []

    def _choose(self, oldest: WorkItem, now: float) -> list[WorkItem]:
        candidates = islice(self._groups[oldest.key], WINDOW_BATCHES * self.max_size)
        window = [item for item in candidates if _alive(item, now)]
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
                    break  # first come, first served: nobody overtakes
                continue
            batch.append(item)
            rows, widest, total = new_rows, new_widest, new_total
        return batch

    def _drop(self, item: WorkItem) -> None:
        del self.waiting[item]
        group = self._groups[item.key]
        del group[item]
        if not group:
            del self._groups[item.key]

    def clear(self) -> list[WorkItem]:
        """Take out everything, in order of arrival."""
        items = list(self.waiting)
        self.waiting.clear()
        self._groups.clear()
        return items

    def out_of_memory(self, fitted: int) -> None:
        """A batch did not fit, parts of up to `fitted` rows did; 0: only single items failed."""
        if fitted:
            self.cap = min(self.cap, fitted)
            self._successes = 0

    def succeeded(self, rows: int) -> None:
        """Enough batches near a lowered cap went through: let it grow back."""
        if self.cap == self.max_size or rows * 2 <= self.cap:
            return
        self._successes += 1
        if self._successes >= GROW_AFTER:
            self.cap = min(self.max_size, self.cap * 2)
            self._successes = 0


def _alive(item: WorkItem, now: float) -> bool:
    return item.open and item.deadline > now
