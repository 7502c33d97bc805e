"""The time budget of a batch: while other models have work, it is cut to the rows that run within
it, by the times of earlier batches. Owned by the worker's thread; it has no clock.
"""

from collections.abc import Sequence
from itertools import accumulate

# The longest time that a model computes while other models have work.
MAX_TURN_S = 0.2
NEW_SHARE = 0.3  # weight of the latest batch in the measured time per token


class TurnBudget:
    """Chooses the number of rows of a batch."""

    def __init__(self) -> None:
        self._token_s = 0.0  # measured; 0: not yet

    def fitting(self, sizes: Sequence[int], seconds: float) -> int:
        """Return how many of the first rows run within `seconds`, at least one. `sizes`: the tokens
        of each row."""
        return max(1, sum(total * self._token_s <= seconds for total in accumulate(sizes)))

    def learn(self, tokens: int, seconds: float) -> None:
        """Record the time of a batch. Short ones are ignored: most of a small batch's time is
        reading the weights."""
        if self._token_s and 2 * max(seconds, tokens * self._token_s) < MAX_TURN_S:
            return
        share = NEW_SHARE if self._token_s else 1.0
        self._token_s += share * (seconds / tokens - self._token_s)
