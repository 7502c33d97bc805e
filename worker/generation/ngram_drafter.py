"""Prompt lookup: what followed the last words before may follow them again.

Drafts are copied from the request's text (prompt and output), cost nothing, and are verified in the
same step by drawing each position's token as without them: the output is the same.
"""

from collections.abc import Sequence

GRAM = 3  # tokens that must agree
DRAFT = 6  # tokens proposed at most
INDEXED = 512  # tokens looked at in one go: a long prompt takes several steps
# A sequence whose drafts are mostly wrong is asked less and less often.
PATIENCE = 4
LONGEST_PAUSE = 64


class NgramDrafter:
    """One sequence's n-grams and where each was last followed by something."""

    __slots__ = ("_after", "_indexed", "_misses", "_pause")

    def __init__(self) -> None:
        self._after: dict[tuple[int, ...], int] = {}
        self._indexed = GRAM  # n-grams that end before this index are known
        self._misses = 0
        self._pause = 0

    def draft(self, tokens: Sequence[int], most: int) -> tuple[int, ...]:
        """Up to `most` tokens that followed the last GRAM tokens where they were seen last."""
        first, last = self._indexed, min(len(tokens), self._indexed + INDEXED)
        known = tokens[first - GRAM : last]
        for end in range(first, last):
            self._after[tuple(known[end - first : end - first + GRAM])] = end
        self._indexed = max(first, last)
        if self._pause:
            self._pause -= 1
            return ()
        if most < 1 or (at := self._after.get(tuple(tokens[-GRAM:]))) is None:
            return ()
        return tuple(tokens[at : at + min(most, DRAFT)])

    def verified(self, drafted: int, accepted: int) -> None:
        """How a draft fared: a model that keeps disagreeing is left in peace for a while."""
        self._misses = 0 if 2 * accepted >= drafted else self._misses + 1
        if self._misses >= PATIENCE:
            self._pause = min(LONGEST_PAUSE, 2 ** (self._misses - PATIENCE + 2))
