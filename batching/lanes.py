"""How long a newcomer would wait: of work that is served in batches, and of work side by side.

On the event loop, but for `prepared`.
"""

from collections import deque
from collections.abc import Callable, Sequence

from batching.request_queue import Lane, WorkItem
from batching.turns import Turns

# What is left of a measurement after the next one: about the latest ten count.
KEEP = 0.9


class BatchLane(Lane):
    """Served in batches, which take a time for each token. Those of an item are known once it is
    prepared; before, it counts like the mean. With `turns`, requests of several items take
    turns."""

    def __init__(self, name: str, places: int, turns: Turns[WorkItem] | None = None) -> None:
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


class TurnLane(Lane):
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
