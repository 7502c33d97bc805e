"""The time budget of a batch: it is cut to the rows that run within it, by the times of earlier
batches. Owned by the worker's thread; it has no clock.
"""

from collections.abc import Sequence
from itertools import accumulate

# The longest time that a batch computes while other models have work, and otherwise: a request for
# the same model that arrives meanwhile waits for its end.
MAX_TURN_S, MAX_TURN_ALONE_S = 0.2, 0.3
# A batch of so many tokens, or of one image, is hardly slower per token than a larger one. Without
# work of other models it is not cut.
EFFICIENT_TOKENS = 512
NEW_SHARE = 0.3  # weight of the latest batch in the measured time per token, if it was slower


class TurnBudget:
    """Chooses the number of rows of a batch."""

    def __init__(self) -> None:
        self._token_s = 0.0  # measured; 0: not yet

    def fitting(self, sizes: Sequence[int], max_turn_s: float, layers: int = 1) -> int:
        """Return how many of the first rows run within a turn, at least one. `sizes`: the tokens of
        each row. `layers`: the parts of the batch, each of which may take a turn."""
        min_tokens = EFFICIENT_TOKENS if max_turn_s > MAX_TURN_S else 0
        fits = (
            tokens <= min_tokens or tokens * self._token_s <= max_turn_s * layers
            for tokens in accumulate(sizes)
        )
        return max(1, sum(fits))

    def learn(self, tokens: int, seconds: float) -> None:
        """Record the time of a batch. Most of a small batch's time is reading the weights: short
        ones are ignored, and a faster one replaces what was measured."""
        if self._token_s and 2 * max(seconds, tokens * self._token_s) < MAX_TURN_S:
            return
        token_s = seconds / tokens
        is_slower = 0 < self._token_s < token_s
        self._token_s += (NEW_SHARE if is_slower else 1.0) * (token_s - self._token_s)
