"""What sequences try in a step besides the token that is sure: as much as pays, of what their own
text or their grammar proposes. Each draft must bring more than it costs: what a row costs, and how
many tokens a second there are, is learned from the times of steps. Drafts are verified in the same
step by drawing each position's token as without them: the output is the same. On the worker's
thread.
"""

from collections import abc

from batching.sequence import Chunk, Sequence

# Rows of a step, drafts included: what one reading of the weights serves.
MOST_ROWS = {"cpu": 32, "cuda": 64}
KEPT = 0.995  # of what was learned, with each step
# Until steps of different sizes have shown it, a row adds this part of a step's time.
ROW_SHARE = 0.02
GRAM = 3  # tokens that must agree
DRAFT = 16  # tokens proposed at most
INDEXED = 512  # tokens looked at in one go: a long prompt takes several steps
# Acceptance of a sequence's drafts: as it is taken to be before there were any, how much one token
# says of it, and how much of what was learned is forgotten in a step without drafts.
EXPECTED, NEW_SHARE, FORGOTTEN = 0.5, 0.2, 1 / 128


class NgramDrafter:
    """Prompt lookup: what followed the last words before may follow them again. One sequence's
    n-grams, of prompt and output, and where each was last followed by something. `acceptance`: how
    likely a drafted token is right, if those before it are."""

    __slots__ = ("_after", "_indexed", "acceptance")

    def __init__(self) -> None:
        self._after: dict[tuple[int, ...], int] = {}
        self._indexed = GRAM  # n-grams that end before this index are known
        self.acceptance = EXPECTED

    def draft(self, tokens: abc.Sequence[int], most: int) -> tuple[int, ...]:
        """Up to `most` tokens that followed the last GRAM tokens where they were seen last; where
        the text ends before that, it is taken to go round."""
        if most < 1:  # it is tried again in a while
            self.acceptance += FORGOTTEN * (EXPECTED - self.acceptance)
            return ()
        first, last = self._indexed, min(len(tokens), self._indexed + INDEXED)
        known = tokens[first - GRAM : last]
        for end in range(first, last):
            self._after[tuple(known[end - first : end - first + GRAM])] = end
        self._indexed = max(first, last)
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


class Speculation:
    """`begin` a step, then `draft` for each sequence in it; once it is launched, `waits_for`, and
    once it has landed, `verified` and `learn`."""

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

    def learn(self, rows: int, tokens: int, seconds: float) -> None:
        """A step without prompts had so many rows and gave so many tokens."""
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

    def draft(self, sequence: Sequence) -> tuple[int, ...]:
        """For the step that is being scheduled; nothing after a token that is only promised."""
        if sequence.drafter is None or sequence.promised:
            return ()
        output = sequence.output
        most = min(self.room(), sequence.max_tokens - output.count - 1)
        worth = self.worth(sequence.drafter.acceptance, most)
        drafts: tuple[int, ...] = sequence.drafter.draft(sequence.tokens, worth)
        drafts = output.guide.draft(drafts, most) if output.guide else drafts
        self.take(len(drafts))
        return drafts

    def waits_for(self, chunk: Chunk) -> bool:
        """Whether the next draft takes the tokens that this chunk gives. It is told by those before
        them: where words come again, they mostly go on to."""
        sequence, drafter = chunk.sequence, chunk.sequence.drafter
        if not (drafter and chunk.to_sample and chunk.runs):
            return False
        if chunk.drafts or sequence.output.guide:
            return True
        return bool(drafter.draft(sequence.tokens, self.worth(drafter.acceptance, self.room())))

    def verified(self, chunk: Chunk, kept: int) -> dict[str, int]:
        """A chunk's drafts have run, and so many tokens came of it; what is counted of that."""
        drafted, accepted = len(chunk.drafts), max(0, kept - 1)
        chunk.sequence.drafter.verified(drafted, accepted)
        return {"drafted": drafted, "accepted": accepted}
