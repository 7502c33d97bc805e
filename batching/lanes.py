"""What is accepted for a model, and how long a newcomer would wait for it.

Measured while there is more to do than the model can: a rate measured under light load would be
that of single items, and refuse a burst that one batch could serve. As long as nothing was
measured no wait is expected. On the event loop, but for `prepared`; the caller brings the clock.
"""

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from batching.request_queue import WorkItem

# What is left of a measurement after the next one: about the latest ten count.
KEEP = 0.9


class Lane:
    """One model's work of one kind. Lanes share the queue's places; of them it may take `places`.

    `name` is what a client reads when those are taken.
    """

    def __init__(self, name: str, places: int) -> None:
        self.name = name
        self.places = places
        self.taken = 0  # accepted and unanswered
        self.ahead = 0  # of them, those whose answer has not begun

    def enter(self, count: int) -> None:
        self.taken += count
        self.ahead += count

    def leave(self, item: "WorkItem") -> None:
        """It is answered, or nobody waits for it any more."""
        self.taken -= 1
        if not item.begun:
            item.begun = True
            self.ahead -= 1

    def prepared(self, item: "WorkItem") -> None:
        """Its tokens are known. From any thread."""

    def expected_s(self, now: float) -> float:
        """How long a new item would wait for those ahead of it."""
        raise NotImplementedError


class BatchLane(Lane):
    """Served in batches, which take a time for each token. Those of an item are known once it is
    prepared; before, it counts like the mean."""

    def __init__(self, name: str, places: int) -> None:
        super().__init__(name, places)
        self._prepared: deque[WorkItem] = deque()  # not counted yet; all threads may add
        self._known = 0  # items ahead that are counted
        self._tokens = 0  # theirs
        self._recent = (0.0, 0.0, 0.0)  # items, tokens and seconds of recent batches

    def prepared(self, item: "WorkItem") -> None:
        self._prepared.append(item)

    def record(self, items: int, tokens: int, seconds: float) -> None:
        """Of a batch that was full or kept others waiting."""
        old_items, old_tokens, old_seconds = self._recent
        self._recent = (
            old_items * KEEP + items,
            old_tokens * KEEP + tokens,
            old_seconds * KEEP + seconds,
        )

    def leave(self, item: "WorkItem") -> None:
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


class TurnLane(Lane):
    """Served side by side: a newcomer waits until all before it have had their turn to begin. How
    often somebody begins is measured while others go without."""

    def __init__(self, name: str, places: int) -> None:
        super().__init__(name, places)
        self.begun = 0  # since the last step
        self.starved_since: float | None = None  # or since the last who began meanwhile
        self._turns = 0.0  # recent ones
        self._seconds = 0.0  # that they took together

    def begin(self, item: "WorkItem") -> None:
        """The item's answer begins: from here on it takes its time, but nobody waits for it."""
        item.begun = True
        self.ahead -= 1
        self.begun += 1

    def leave(self, item: "WorkItem") -> None:
        super().leave(item)
        if not self.ahead:
            self.starved_since = None

    def stepped(self, now: float, starved: bool) -> None:
        """A step has ended; who began in it is known. `starved`: others had no room in it."""
        begun, self.begun = self.begun, 0
        if begun and self.starved_since is not None:
            # those who run may end all at once: what counts is how long a round of them takes
            keep = max(KEEP, 1 - 1 / self._running) ** begun
            self._turns = self._turns * keep + begun
            self._seconds = self._seconds * keep + now - self.starved_since
            self.starved_since = now
        if not starved:
            self.starved_since = None
        elif self.starved_since is None:
            self.starved_since = now

    @property
    def _running(self) -> int:
        return max(1, self.taken - self.ahead)

    def expected_s(self, now: float) -> float:
        """Since when nobody has begun counts too: each of those who run has taken so long."""
        turn_s = self._seconds / self._turns if self._turns else 0.0
        if self.starved_since is not None:
            turn_s = max(turn_s, (now - self.starved_since) / self._running)
        return self.ahead * turn_s
