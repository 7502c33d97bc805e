"""How many drafted tokens a sequence has in a step: each must bring more than it costs. What a row
costs, and how many tokens a second there are, is learned from the times of steps; no clock here.
"""

# Rows of a step, drafts included: what one reading of the weights serves.
MOST_ROWS = {"cpu": 32, "cuda": 64}
KEPT = 0.995  # of what was learned, with each step
# Until steps of different sizes have shown it, a row adds this part of a step's time.
ROW_SHARE = 0.02


class DraftBudget:
    """For each step `begin`, then `room`, `worth` and `take` for each sequence, and `learn`."""

    def __init__(self, device_type: str) -> None:
        self._most = MOST_ROWS[device_type]
        self._free = self._to_come = 0  # rows for drafts, sequences that may ask for them
        # sums over steps: how many, tokens, rows, seconds, rows², rows · seconds
        self._sums = [0.0] * 6

    def begin(self, sequences: int) -> None:
        self._free, self._to_come = max(0, self._most - sequences), sequences

    def room(self) -> int:
        """Rows that the next sequence may have for drafts."""
        share = -(-self._free // max(1, self._to_come))
        self._to_come -= 1
        return share

    def worth(self, acceptance: float, most: int) -> int:
        """How many drafts bring more than they cost, each being right with this likelihood if those
        before it are."""
        least, likely, count = self.least_gain, acceptance, 0
        while count < most and likely > least:
            count, likely = count + 1, likely * acceptance
        return count

    def take(self, drafts: int) -> None:
        self._free -= drafts

    def learn(self, prompt: int, rows: int, tokens: int, seconds: float) -> None:
        """A step had so many rows and gave so many tokens; one with prompt tokens says nothing."""
        if prompt:
            return
        new = (1, tokens, rows, seconds, rows * rows, rows * seconds)
        self._sums = [KEPT * old + added for old, added in zip(self._sums, new, strict=True)]

    @property
    def least_gain(self) -> float:
        """How many tokens a row must bring: as many as there are in the time that it adds."""
        steps, tokens, rows, seconds, squares, products = self._sums
        if not steps:
            return ROW_SHARE
        # the line through the steps' times, with some weight on what is taken to be so
        spread, together = squares - rows * rows / steps, products - rows * seconds / steps
        row_s = max(0.0, (together + ROW_SHARE * seconds / steps) / (spread + 1))
        return row_s * tokens / seconds if seconds else 0.0
