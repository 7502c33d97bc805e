"""Speculation: drafted tokens, from a sequence's own text, its grammar or n-grams of other outputs.

A sequence gets as many drafts as gain more than they cost, by the times of steps (step_times.py).
Drafts are verified in the same step, by sampling each position's token as without them: the output
does not change. On the worker's thread.
"""

from collections import OrderedDict, abc
from typing import Any

from batching.sequence import Chunk, Sequence
from batching.step_times import ROW_SHARE, StepTimes
from worker.engines.generation.output import SequenceOutput

MAX_ROWS = {"cpu": 32, "cuda": 64}  # of a step, drafts included: one reading of the weights
DECAY = 0.98  # of the tokens and seconds that were counted, with each step
NGRAM = 2  # tokens that must match
MAX_DRAFT = 16  # tokens of a draft
MAX_INDEXED = 512  # tokens indexed by one call: a long prompt takes several steps
# Acceptance of a sequence's drafts: before the first one; the weight of each verified token; and
# how much of the difference to the first value is regained with a step without drafts.
INITIAL_ACCEPTANCE, NEW_SHARE, RECOVERY = 0.5, 0.2, 1 / 128
MAX_NGRAMS = 100_000  # of an NgramTable, about 30 MB
# Of a token in the table: its first probability, the one at which another token replaces it, and
# the weight of each new token.
INITIAL_PROBABILITY, MIN_PROBABILITY, TOKEN_SHARE = 0.3, 0.1, 0.1


class Speculation:
    """Drafts of all sequences of an engine. In a step: `begin_step`, then `draft` for each
    sequence that decodes; once it is launched, `waits_for`; with its results, `record_verified` and
    `learn`."""

    def __init__(self, device_type: str, times: StepTimes) -> None:
        self._times = times
        self._max_rows = MAX_ROWS[device_type]
        self._free_rows = self._undrafted = 0  # rows for drafts, sequences without a draft yet
        self._drafters: dict[Sequence, NgramDrafter] = {}
        # Other devices would wait for a step's results before the next step, for drafts' sake.
        self._table = NgramTable() if device_type == "cpu" else None
        self._drafted: set[Sequence] = set()  # in this step
        self._tokens = self._seconds = 0.0  # of recent steps without prompts

    def add(self, sequence: Sequence) -> None:
        self._drafters[sequence] = NgramDrafter()

    def remove(self, sequence: Sequence) -> None:
        self._drafters.pop(sequence, None)
        self._drafted.discard(sequence)

    # ── a step ──

    def begin_step(self, sequences: int) -> None:
        self._free_rows, self._undrafted = max(0, self._max_rows - sequences), sequences
        self._drafted.clear()

    def draft(self, sequence: Sequence, output: SequenceOutput) -> tuple[int, ...]:
        """Return drafts for the step that is being scheduled: none behind a placeholder."""
        drafter = self._drafters.get(sequence)
        if drafter is None or sequence.has_placeholder:
            return ()
        self._drafted.add(sequence)
        limit = min(self.allot_rows(), sequence.max_tokens - output.tokens - 1)
        drafts = drafter.draft(sequence.tokens, self.worthwhile(drafter.acceptance, limit))
        drafter.has_drafted = bool(drafts)
        if self._table:
            self._table.learn(sequence, drafter)
            drafts = drafts or self._table.draft(sequence, limit, self.min_gain)
        if output.constraints:
            drafts = output.constraints.draft(drafts, limit)
        self._free_rows -= len(drafts)
        return drafts

    def waits_for(self, chunk: Chunk, output: SequenceOutput) -> bool:
        """Return whether the sequence's next draft needs the tokens that this chunk samples. Where
        no draft was computed in this step, a match of the tokens before them decides: repeated text
        mostly continues."""
        drafter = self._drafters.get(chunk.sequence)
        if not (drafter and chunk.to_sample and chunk.is_active):
            return False
        if chunk.drafts or output.constraints:
            return True
        if chunk.sequence in self._drafted:
            return False
        limit = self.worthwhile(drafter.acceptance, self.allot_rows())
        return bool(drafter.draft(chunk.sequence.tokens, limit))

    def record_verified(self, chunk: Chunk, appended: int) -> dict[str, int]:
        """Record that a chunk with drafts has run and `appended` tokens of it were kept. Return
        the counts of a StepReport."""
        drafted, accepted = len(chunk.drafts), max(0, appended - 1)
        drafter = self._drafters.get(chunk.sequence)
        if drafter and drafter.has_drafted:
            drafter.record_verified(drafted, accepted)
        return {"drafted": drafted, "accepted": accepted}

    def learn(self, tokens: int, seconds: float) -> None:
        """Record the output tokens and the time of a step without prompts."""
        self._tokens = DECAY * self._tokens + tokens
        self._seconds = DECAY * self._seconds + seconds

    # ── the number of drafts ──

    def allot_rows(self) -> int:
        """Allot an equal share of the rows that are left for drafts to the next sequence. Return
        its size; rows that it does not take are left to later sequences."""
        share = -(-self._free_rows // max(1, self._undrafted))
        self._undrafted -= 1
        return share

    def worthwhile(self, acceptance: float, limit: int) -> int:
        """Return how many drafts gain more than they cost, at most `limit`. `acceptance`: the
        probability that each is right if those before it are."""
        min_gain, probability, count = self.min_gain, acceptance, 0
        while count < limit and probability > min_gain:
            count, probability = count + 1, probability * acceptance
        return count

    @property
    def min_gain(self) -> float:
        """Tokens that a row must gain: as many as are generated in the time that it adds."""
        if not self._seconds:
            return ROW_SHARE
        return self._times.row_s * self._tokens / self._seconds


class NgramDrafter:
    """Prompt lookup: the tokens that followed the last n-gram before may follow it again. Indexes
    one sequence's n-grams, of prompt and output, by their last occurrence. `acceptance`: the
    learned probability that a drafted token is right if those before it are."""

    __slots__ = ("_after", "_indexed", "acceptance", "has_drafted", "learned")

    def __init__(self) -> None:
        self._after: dict[tuple[int, ...], int] = {}  # n-gram → index of the token behind it
        self._indexed = NGRAM  # n-grams that end before this index are in it
        self.acceptance = INITIAL_ACCEPTANCE
        self.has_drafted = False  # the drafts of the last step
        self.learned = 0  # tokens before this index are in the NgramTable, or belong to the prompt

    def draft(self, tokens: abc.Sequence[int], limit: int) -> tuple[int, ...]:
        """Return up to `limit` tokens that followed the last NGRAM tokens where these last occurred
        before. If the text ends within them, they are repeated."""
        if limit < 1:  # recovers, so that drafting is tried again later
            self.acceptance += RECOVERY * (INITIAL_ACCEPTANCE - self.acceptance)
            return ()
        first, last = self._indexed, min(len(tokens), self._indexed + MAX_INDEXED)
        new = tokens[first - NGRAM : last]
        for end in range(first, last):
            self._after[tuple(new[end - first : end - first + NGRAM])] = end
        self._indexed = max(first, last)
        if (start := self._after.get(tuple(tokens[-NGRAM:]))) is None:
            return ()
        count = min(limit, MAX_DRAFT)
        following = tokens[start : start + count]
        return tuple(following[n % len(following)] for n in range(count))

    def record_verified(self, drafted: int, accepted: int) -> None:
        """Learn from a verified draft: `accepted` of its tokens were right, then one was wrong."""
        remaining = (1 - NEW_SHARE) ** accepted
        self.acceptance = 1 - remaining * (1 - self.acceptance)
        if accepted < drafted:
            self.acceptance *= 1 - NEW_SHARE


class NgramTable:
    """Tokens that mostly follow one or two others in the outputs of a cache namespace, and the
    probability of each. Prompts are not in it."""

    def __init__(self) -> None:
        self._next = OrderedDict[tuple[Any, ...], tuple[int, float]]()

    def learn(self, sequence: Sequence, drafter: NgramDrafter) -> None:
        """Learn the output tokens that are new since the last call."""
        space, tokens = sequence.cache_namespace, sequence.tokens
        for end in range(max(2, sequence.prompt_len, drafter.learned), len(tokens)):
            before, last, new = tokens[end - 2 : end + 1]
            for ngram in ((space, before, last), (space, last)):
                token, probability = self._next.pop(ngram, (new, INITIAL_PROBABILITY))
                probability += TOKEN_SHARE * ((token == new) - probability)
                if probability < MIN_PROBABILITY:
                    token, probability = new, INITIAL_PROBABILITY
                self._next[ngram] = token, probability
        drafter.learned = len(tokens)
        while len(self._next) > MAX_NGRAMS:
            self._next.popitem(last=False)

    def draft(self, sequence: Sequence, limit: int, min_gain: float) -> tuple[int, ...]:
        """Return up to `limit` tokens, all of them right with a probability above `min_gain`."""
        space, probability, drafts = sequence.cache_namespace, 1.0, list[int]()
        before, last = (-1, *sequence.tokens[-2:])[-2:]
        while len(drafts) < limit:
            found = self._next.get((space, before, last)) or self._next.get((space, last))
            if found is None or (probability := probability * found[1]) <= min_gain:
                break
            before, last = last, found[0]
            drafts.append(last)
        return tuple(drafts)
