"""Prompt lookup: what followed the last words before may follow them again.

Drafts are copied from the request's text (prompt and output), cost nothing, and are verified in the
same step by drawing each position's token as without them: the output is the same.
"""

from collections.abc import Sequence

GRAM = 3  # tokens that must agree
DRAFT = 16  # tokens proposed at most
INDEXED = 512  # tokens looked at in one go: a long prompt takes several steps
# Acceptance of a sequence's drafts: as it is taken to be before there were any, how much one token
# says of it, and how much of what was learned is forgotten in a step without drafts.
EXPECTED, NEW_SHARE, FORGOTTEN = 0.5, 0.2, 1 / 128


class NgramDrafter:
    """One sequence's n-grams and where each was last followed by something. `acceptance`: how
    likely a drafted token is right, if those before it are."""

    __slots__ = ("_after", "_indexed", "acceptance")

    def __init__(self) -> None:
        self._after: dict[tuple[int, ...], int] = {}
        self._indexed = GRAM  # n-grams that end before this index are known
        self.acceptance = EXPECTED

    def draft(self, tokens: Sequence[int], most: int) -> tuple[int, ...]:
        """Up to `most` tokens that followed the last GRAM tokens where they were seen last; where
        the text ends before that, it is taken to go round."""
        first, last = self._indexed, min(len(tokens), self._indexed + INDEXED)
        known = tokens[first - GRAM : last]
        for end in range(first, last):
            self._after[tuple(known[end - first : end - first + GRAM])] = end
        self._indexed = max(first, last)
        if most < 1:  # it is tried again in a while
            self.acceptance += FORGOTTEN * (EXPECTED - self.acceptance)
            return ()
        if (at := self._after.get(tuple(tokens[-GRAM:]))) is None:
            return ()
        following = tokens[at : at + min(most, DRAFT)]
        return tuple(following[n % len(following)] for n in range(min(most, DRAFT)))

    def verified(self, drafted: int, accepted: int) -> None:
        """How a draft fared, up to the first token that was wrong."""
        known = (1 - NEW_SHARE) ** accepted
        self.acceptance = 1 - known * (1 - self.acceptance)
        if accepted < drafted:
            self.acceptance *= 1 - NEW_SHARE
