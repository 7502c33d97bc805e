"""Iteration-level scheduling: which tokens of which sequences go through the next step.

    waiting ──admit──▶ running: prefill in chunks ──▶ decode a token a step ──▶ finished
       ▲                  │
       └────preempt───────┘   (its blocks are given up, its tokens are computed again later)

Every decoding sequence is in every step. Prompts share the step's budget, so they arrive in chunks
beside running streams: half of it is for the oldest, the rest for who needs least, so that neither
short prompts wait for a long one nor a long one for ever. When blocks run out, the youngest
sequence is put back, so the oldest always gets on and nothing can lock up.

Background sequences come after all others, in the line and in a step, and give way to them; beside
them only some have a part in a step, which would take longer with every one. The oldest counts as
one of the others, so that they too end, one by one at least.

Pure state, owned by the worker thread: no tensors, no clock. Sampling and stop conditions are the
caller's.
"""

import bisect
import itertools
from collections.abc import Callable, Container
from collections.abc import Sequence as Several
from dataclasses import dataclass
from typing import Any

from batching.block_pool import BlockPool, BlockTable, Key
from batching.tokens import Tokens

# When another is admitted, a block for each of those running stays free, but no more than this
# part of all: room to grow, lest the newcomer be put back at once.
RESERVE = 20
# Tokens a step of a prompt whose log-probabilities are wanted: all go onto the vocabulary.
PROJECTED = 128
# Beside others, so many background sequences as there are others, or up to so many in all, are in a
# step: that many take a model hardly longer than one.
FEW = 8


class Sequence:
    """One choice being generated: prompt and output so far, and what of it is in the cache."""

    __slots__ = (
        "awaited", "background", "cached", "computed", "number", "owner", "prompt_len", "reuse",
        "table", "tokens",
    )  # fmt: skip

    def __init__(
        self, owner: Any, prompt: Several[int], reuse: bool = True, background: bool = False
    ) -> None:
        self.owner = owner  # the caller's own; not looked at here
        self.tokens = Tokens(prompt)
        self.prompt_len = len(prompt)
        self.reuse = reuse  # False: every token's output is wanted, so all are computed
        self.computed = 0  # leading tokens whose keys and values are in the cache
        self.cached: int | None = None  # prompt tokens found in the cache at first admission
        self.table: BlockTable | None = None  # None: waiting
        self.awaited: Key | None = None  # the block of its prefix that somebody is computing
        self.background = background  # comes after all that are not
        self.number = -1  # order of arrival

    @property
    def left(self) -> int:
        """Tokens that have not been through the model."""
        return len(self.tokens) - self.computed

    @property
    def rank(self) -> tuple[bool, int]:
        """Who comes first has the lower one."""
        return self.background, self.number


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
        self.waiting: list[Sequence] = []  # by rank
        self.running: list[Sequence] = []  # likewise
        self.preempted = 0  # since the last step
        self.admitted: list[Sequence] = []  # for the first time, in the last step
        self.starved = False  # whether the last step had no room for one not in the background
        # the background one that counts as one of the others
        self._favoured: Sequence | None = None
        self._numbers = itertools.count()

    def add(self, sequence: Sequence) -> None:
        """Its tokens must fit into the pool, however long it gets; the caller sees to that."""
        sequence.number = next(self._numbers)
        _line_up(self.waiting, sequence)

    def remove(self, sequence: Sequence) -> None:
        """It has finished, or nobody waits for it any more."""
        line = self.waiting if sequence.table is None else self.running
        at = bisect.bisect_left(line, sequence.rank, key=lambda each: each.rank)
        if line[at : at + 1] != [sequence]:
            raise ValueError("this sequence is not scheduled")
        del line[at]
        if sequence.table is not None:
            self.pool.close(sequence.table)
            sequence.table = None
        if sequence is self._favoured:
            self._favoured = None

    # ── one step ──

    def schedule(
        self, budget: int, draft: Callable[[Sequence], tuple[int, ...]] = lambda sequence: ()
    ) -> list[Chunk]:
        """The next step's chunks. `budget` is how many prompt tokens it may have."""
        self.preempted = 0
        self.admitted = []
        self._favour()
        most = self._most()
        resting = set(self.running[most:])
        decoding = self._decoding(resting)
        awaited = self._admit_waiting(most)
        decoding = [sequence for sequence in decoding if sequence.table]
        decodes = set(decoding)
        if awaited:
            resting = {sequence for sequence in resting if sequence.left == 1}
        prompts = [each for each in self.running if each not in decodes and each not in resting]
        chunks = _shared(prompts, budget, alike=awaited)
        at_work = {chunk.sequence for chunk in chunks}
        self.starved |= any(not each.background and each not in at_work for each in prompts)
        return [self._decode(sequence, draft) for sequence in decoding] + chunks

    def _favour(self) -> None:
        """If there is background work, one of it counts as if it were none, until it has ended."""
        if self._favoured is not None:
            return
        behind = [each for line in (self.running, self.waiting) for each in line[_firm(line) :][:1]]
        if behind:
            self._favoured = oldest = min(behind, key=lambda each: each.number)
            line = self.running if oldest.table else self.waiting
            line.remove(oldest)
            oldest.background = False
            _line_up(line, oldest)

    def _most(self) -> int:
        """How many sequences a step may have if the last of them is a background one."""
        firm = _firm(self.running)
        if firm + _firm(self.waiting) == (self._favoured is not None):
            return self.max_running  # there are no others
        return max(FEW, 2 * firm)

    def _decoding(self, resting: Container[Sequence]) -> list[Sequence]:
        """Those with one token to go, and room for it."""
        return [
            sequence
            for sequence in list(self.running)
            if sequence.table  # not put back meanwhile, for the sake of an older one
            and sequence.left <= 1
            and sequence not in resting
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
        _line_up(self.waiting, sequence)

    def _admit_waiting(self, most: int) -> bool:
        """In order, as long as there is room, background ones while less than `most` run. True if
        somebody who is not in the background waits for a prefix that is being computed."""
        self.starved = awaited = False
        position = 0
        while position < len(self.waiting):
            sequence = self.waiting[position]
            if sequence.background and (self.preempted or len(self.running) >= most):
                break  # it would rest, or may just have been put back
            firm = len(self.running) if sequence.background else _firm(self.running)
            if firm + position >= self.max_running:  # places are kept for those passed over
                self.starved = not sequence.background
                break
            matched = self._match(sequence)
            if matched is None:
                position += 1  # the rest of its prefix is being computed: wait, let others pass
                awaited |= not sequence.background
            elif self._make_way(sequence, matched, position):
                del self.waiting[position]
            else:
                self.starved = not sequence.background
                break  # nobody overtakes for being smaller
        return awaited

    def _match(self, sequence: Sequence) -> list[int] | None:
        """What there is of its prefix; None: more of it is just being computed. The end of that is
        remembered: to find it again takes as long as the prefix is."""
        if not sequence.reuse:
            return []
        if sequence.awaited is None or not self.pool.computing(sequence.awaited):
            matched, sequence.awaited = self.pool.match(sequence.tokens)
            if sequence.awaited is None:
                return matched
        return None

    def _make_way(self, sequence: Sequence, matched: list[int], kept: int) -> bool:
        """Admit it beside `kept` places for others, if need be instead of background work."""
        while len(self.running) + kept >= self.max_running or not self._admit(sequence, matched):
            if sequence.background or _firm(self.running) == len(self.running):
                return False
            self._preempt(self.running[-1])
        return True

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
        _line_up(self.running, sequence)
        return True

    def advance(self, chunk: Chunk, sampled: Several[int] = ()) -> None:
        """The chunk has run, and the sequence goes on with `sampled`: drafts that were right and
        one token more; nothing if the chunk ends before the sequence does."""
        sequence = chunk.sequence
        assert sequence.table is not None
        sequence.computed = chunk.start + chunk.count + max(0, len(sampled) - 1)
        sequence.tokens.output += sampled
        self.pool.trim(sequence.table, len(sequence.tokens))
        self.pool.register(sequence.table, sequence.tokens, sequence.computed)


def _line_up(line: list[Sequence], sequence: Sequence) -> None:
    bisect.insort(line, sequence, key=lambda each: each.rank)


def _firm(line: list[Sequence]) -> int:
    """How many in a line are not in the background."""
    return bisect.bisect_left(line, True, key=lambda each: each.background)


def _shared(prompts: list[Sequence], budget: int, alike: bool) -> list[Chunk]:
    """Half of the budget for the first, or what it needs of that; the rest for who needs least.
    `alike`: a background one may be computing what others wait for."""
    if not prompts or budget <= 0:
        return []
    first = min(prompts, key=lambda each: each.number) if alike else prompts[0]
    most = {each: each.left if each.reuse else min(each.left, PROJECTED) for each in prompts}
    shares = dict.fromkeys(prompts, 0)
    shares[first] = min(most[first], -(-budget // 2))
    budget -= shares[first]
    for each in sorted(prompts, key=lambda each: (each.background and not alike, each.left)):
        more = min(most[each] - shares[each], budget)
        shares[each] += more
        budget -= more
    return [Chunk(each, each.computed, share) for each, share in shares.items() if share]
