"""Iteration-level scheduling: which tokens of which sequences go through the next step.

    waiting ──admit──▶ running: prefill in chunks ──▶ decode a token a step ──▶ finished
       ▲                  │
       └────preempt───────┘   (its blocks are given up, its tokens are computed again later)

Every decoding sequence is in every step; what the budget leaves goes to prompts, oldest first, so
long prompts arrive in chunks beside running streams. When blocks run out, the youngest sequence
is put back, so the oldest always gets on and nothing can lock up. Pure state, owned by the worker
thread: no tensors, no clock. Sampling and stop conditions are the caller's.
"""

import bisect
import itertools
from collections.abc import Callable
from collections.abc import Sequence as Several
from dataclasses import dataclass
from typing import Any

from batching.blocks import BlockPool, BlockTable

# When another is admitted, a block for each of those running stays free, but no more than this
# part of all: room to grow, lest the newcomer be put back at once.
RESERVE = 20
# Tokens a step of a prompt whose log-probabilities are wanted: all go onto the vocabulary.
PROJECTED = 128


class Sequence:
    """One choice being generated: prompt and output so far, and what of it is in the cache."""

    __slots__ = ("cached", "computed", "number", "owner", "prompt_len", "reuse", "table", "tokens")

    def __init__(self, owner: Any, prompt: Several[int], reuse: bool = True) -> None:
        self.owner = owner  # the caller's own; not looked at here
        self.tokens = list(prompt)  # prompt and output
        self.prompt_len = len(prompt)
        self.reuse = reuse  # False: every token's output is wanted, so all are computed
        self.computed = 0  # leading tokens whose keys and values are in the cache
        self.cached: int | None = None  # prompt tokens found in the cache at first admission
        self.table: BlockTable | None = None  # None: waiting
        self.number = -1  # order of arrival


@dataclass(frozen=True, slots=True)
class Chunk:
    """A sequence's share of a step: `count` of its tokens from `start` on, then drafted ones.

    If the chunk reaches the sequence's end, its last token and each draft are to be sampled; ask
    before `advance`, which moves the end.
    """

    sequence: Sequence
    start: int
    count: int
    drafts: tuple[int, ...] = ()

    @property
    def reaches_end(self) -> bool:
        return self.start + self.count == len(self.sequence.tokens)

    @property
    def width(self) -> int:
        return self.count + len(self.drafts)


class ContinuousScheduler:
    def __init__(self, pool: BlockPool, max_running: int) -> None:
        self.pool = pool
        self.max_running = max_running
        self.waiting: list[Sequence] = []  # in order of arrival
        self.running: list[Sequence] = []  # likewise
        self.preempted = 0  # since the last step
        self.admitted: list[Sequence] = []  # for the first time, in the last step
        self._numbers = itertools.count()

    def add(self, sequence: Sequence) -> None:
        """Its tokens must fit into the pool, however long it gets; the caller sees to that."""
        sequence.number = next(self._numbers)
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """It has finished, or nobody waits for it any more."""
        if sequence.table is None:
            self.waiting.remove(sequence)
        else:
            self.running.remove(sequence)
            self.pool.close(sequence.table)
            sequence.table = None

    # ── one step ──

    def schedule(
        self, budget: int, draft: Callable[[Sequence], tuple[int, ...]] = lambda sequence: ()
    ) -> list[Chunk]:
        """The next step's chunks. `budget` is how many prompt tokens it may have."""
        self.preempted = 0
        self.admitted = []
        decoding = self._decoding()
        prefills = self._prefills(budget)
        budget -= sum(chunk.count for chunk in prefills)
        admissions = self._admissions(budget)
        return [self._decode(sequence, draft) for sequence in decoding] + prefills + admissions

    def _decoding(self) -> list[Sequence]:
        """Those with one token to go, and room for it."""
        return [
            sequence
            for sequence in list(self.running)
            if sequence.table  # not put back meanwhile, for the sake of an older one
            and sequence.computed + 1 >= len(sequence.tokens)
            and self._make_room(sequence)
        ]

    def _decode(self, sequence: Sequence, draft: Callable[[Sequence], tuple[int, ...]]) -> Chunk:
        """Drafts come last and have their room for this step only: nobody goes without for them."""
        assert sequence.table is not None
        drafts = draft(sequence)
        if not self.pool.grow(sequence.table, len(sequence.tokens) + len(drafts)):
            drafts = ()
        return Chunk(sequence, sequence.computed, 1, drafts)

    def _make_room(self, sequence: Sequence) -> bool:
        """For one more token; False if the sequence is the youngest itself and was put back."""
        while sequence.table and not self.pool.grow(sequence.table, len(sequence.tokens)):
            self._preempt(self.running[-1])
        return sequence.table is not None

    def _preempt(self, sequence: Sequence) -> None:
        assert sequence.table is not None
        self.running.remove(sequence)
        self.pool.close(sequence.table)
        sequence.table = None
        sequence.computed = 0
        self.preempted += 1
        bisect.insort(self.waiting, sequence, key=lambda each: each.number)

    def _prefills(self, budget: int) -> list[Chunk]:
        chunks = []
        for sequence in self.running:
            left = len(sequence.tokens) - sequence.computed
            if left > 1 and budget > 0:
                chunks.append(_next_chunk(sequence, budget))
                budget -= chunks[-1].count
        return chunks

    def _admissions(self, budget: int) -> list[Chunk]:
        chunks: list[Chunk] = []
        position = 0
        while position < len(self.waiting) and budget > 0:
            if len(self.running) + position >= self.max_running:
                break  # places are kept for those that are passed over
            sequence = self.waiting[position]
            matched, in_flight = self.pool.match(sequence.tokens) if sequence.reuse else ([], False)
            if in_flight:
                position += 1  # the rest of its prefix is being computed: wait, let others pass
                continue
            if not self._admit(sequence, matched):
                break  # nobody overtakes for being smaller
            del self.waiting[position]
            chunks.append(_next_chunk(sequence, budget))
            budget -= chunks[-1].count
        return chunks

    def _admit(self, sequence: Sequence, matched: list[int]) -> bool:
        pool = self.pool
        reserve = min(len(self.running), pool.count // RESERVE)
        wanted = pool.blocks_for(len(sequence.tokens)) - len(matched) + pool.unused(matched)
        if wanted + reserve > pool.free:
            return False
        sequence.table = pool.open(sequence.tokens, matched)
        sequence.computed = len(matched) * pool.size
        if sequence.cached is None:
            sequence.cached = sequence.computed
            self.admitted.append(sequence)
        bisect.insort(self.running, sequence, key=lambda each: each.number)
        return True

    def advance(self, chunk: Chunk, sampled: Several[int] = ()) -> None:
        """The chunk has run, and the sequence goes on with `sampled`: drafts that were right and
        one token more; nothing if the chunk ends before the sequence does."""
        sequence = chunk.sequence
        assert sequence.table is not None
        sequence.computed = chunk.start + chunk.count + max(0, len(sampled) - 1)
        sequence.tokens += sampled
        self.pool.trim(sequence.table, len(sequence.tokens))
        self.pool.register(sequence.table, sequence.tokens, sequence.computed)


def _next_chunk(sequence: Sequence, budget: int) -> Chunk:
    left = len(sequence.tokens) - sequence.computed
    most = budget if sequence.reuse else min(budget, PROJECTED)
    return Chunk(sequence, sequence.computed, min(left, most))
