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

A step may be scheduled while the one before it runs. The tokens that this will give are promised to
the sequences meanwhile, and are others' to find in the cache once they are known.

Pure state, owned by the worker thread: no tensors, no clock. Sampling and stop conditions are the
caller's.

How many prompt tokens a step takes: as many as pay, few enough not to stall streams. Learned
from the times of steps; no clock here.
"""

import bisect
import itertools
from collections import abc

from batching.block_pool import BlockPool
from batching.sequence import Chunk, Sequence

# When another is admitted, a block for each of those running stays free, but no more than this
# part of all: room to grow, lest the newcomer be put back at once.
RESERVE = 20
# Tokens a step of a prompt whose log-probabilities are wanted: all go onto the vocabulary.
PROJECTED = 128
# The same where each step of such a prompt runs the whole of it.
PROJECTED_WHOLE = 512
# Beside others, so many background sequences as there are others, or up to so many in all, are in a
# step: that many take a model hardly longer than one.
SMALL_STEP = 8

Draft = abc.Callable[[Sequence], tuple[int, ...]]


class ContinuousScheduler:
    """`whole_prompts`: they do not come in chunks, for a model runner that keeps no blocks."""

    def __init__(self, pool: BlockPool, max_running: int, whole_prompts: bool = False) -> None:
        self.pool = pool
        self._most_running = self.max_running = max_running
        self.whole_prompts = whole_prompts
        self.waiting: list[Sequence] = []  # who comes first in front
        self.running: list[Sequence] = []  # likewise
        self.preempted = 0  # since the last step
        self.admitted: list[Sequence] = []  # for the first time, in the last step
        self.starved = False  # whether the last step had no room for one not in the background
        self._promoted: Sequence | None = None  # from the background, to be one of the others
        self._ended = False  # whether one has since the last step
        self._numbers = itertools.count()

    def add(self, sequence: Sequence) -> None:
        """Its tokens must fit into the pool, however long it gets; the caller sees to that."""
        sequence.number = next(self._numbers)
        bisect.insort(self.waiting, sequence)

    def remove(self, sequence: Sequence) -> None:
        """It has finished, or nobody waits for it any more."""
        line = self.waiting if sequence.table is None else self.running
        at = bisect.bisect_left(line, sequence)
        if line[at : at + 1] != [sequence]:
            raise ValueError("this sequence is not scheduled")
        del line[at]
        self._close(sequence)
        sequence.number = -1
        self._ended = True
        if sequence is self._promoted:
            self._promoted = None

    def _close(self, sequence: Sequence) -> None:
        """Its blocks may be given out at once, even if a step that runs writes to them: what writes
        to them next runs after it."""
        if sequence.promised:
            sequence.tokens.pop()  # the same is drawn when it is computed again
        if sequence.table is not None:
            self.pool.close(sequence.table)
            sequence.table = None
            sequence.computed = 0

    # ── one step ──

    def schedule(self, budget: int, draft: Draft | None = None) -> list[Chunk]:
        """The next step's chunks. `budget` is how many prompt tokens it may have; `draft` proposes
        a sequence's next tokens."""
        self.preempted, self.admitted = 0, []
        if self._ended:  # there is more memory than when it was short
            self.max_running = min(self._most_running, 2 * self.max_running)
            self._ended = False
        limit = self._background_limit() if self._promote() else self.max_running
        resting = set(self.running[limit:])  # background sequences that have no part in this step
        resting.update(each for each in self.running if not each.left)  # nor those about to end
        begun = [each for each in self.running[:limit] if each.left == 1]
        decoding = [each for each in begun if self._make_room(each)]
        prefix_awaited = self._admit_waiting(limit)
        decoding = [each for each in decoding if each.table]
        if prefix_awaited:  # a background sequence may be computing it
            resting = {each for each in resting if each.left <= 1}
        idle = resting.union(decoding)
        prompts = [each for each in self.running if each not in idle]
        chunks = self._prefill(prompts, budget, prefix_awaited) if prompts else []
        prefilled = {chunk.sequence for chunk in chunks}
        self.starved |= any(not each.background and each not in prefilled for each in prompts)
        return [self._decode(each, draft) for each in decoding if each.table] + chunks

    def _promote(self) -> bool:
        """The oldest background sequence counts as one of the others until it has ended. Whether
        there is any."""
        lines = [line for line in (self.running, self.waiting) if line and line[-1].background]
        if lines and self._promoted is None:
            behind = [line[_foreground(line)] for line in lines]
            self._promoted = oldest = min(behind, key=lambda each: each.number)
            line = self.running if oldest.table else self.waiting
            line.remove(oldest)
            oldest.background = False
            bisect.insort(line, oldest)
        return bool(lines)

    def _background_limit(self) -> int:
        """How many sequences a step may have if the last of them is a background one."""
        running = _foreground(self.running)
        if running + _foreground(self.waiting) == (self._promoted is not None):
            return self.max_running  # there are no others
        return max(SMALL_STEP, 2 * running)

    def _decode(self, sequence: Sequence, draft: Draft | None) -> Chunk:
        """Drafts come last and have their room for this step only: nobody goes without for them.
        Drafting may remove sequences."""
        drafts, table = draft(sequence) if draft else (), sequence.table
        if drafts and not (table and self.pool.grow(table, len(sequence.tokens) + len(drafts))):
            drafts = ()
        return Chunk(sequence, sequence.computed, 1, drafts)

    def _make_room(self, sequence: Sequence) -> bool:
        """For one more token; False if it waits now, for that of an older one or as the youngest
        itself."""
        tokens, size = len(sequence.tokens), self.pool.size
        while (table := sequence.table) and tokens > len(table.blocks) * size:
            if not self.pool.grow(table, tokens):
                self._preempt(self.running[-1])
        return table is not None

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._close(sequence)
        self.preempted += 1
        bisect.insort(self.waiting, sequence)

    # ── who is admitted ──

    def _admit_waiting(self, limit: int) -> bool:
        """In order, as long as there is room; background ones while less than `limit` run. True if
        one that is not in the background waits for a prefix that is being computed."""
        self.starved = prefix_awaited = False
        position = 0
        while position < len(self.waiting):
            sequence = self.waiting[position]
            if sequence.background and (self.preempted or len(self.running) >= limit):
                break  # it would rest, or may just have been put back
            ahead = len(self.running) if sequence.background else _foreground(self.running)
            if ahead + position >= self.max_running:  # places are kept for those passed over
                self.starved = not sequence.background
                break
            if sequence.multimodal and not sequence.multimodal.ready:
                position += 1  # its pictures come first: let others pass
                continue
            matched = self._match(sequence)
            if matched is None:
                position += 1  # the rest of its prefix is being computed: wait, let others pass
                prefix_awaited |= not sequence.background
            elif self._make_way(sequence, matched, position):
                del self.waiting[position]
            else:
                self.starved = not sequence.background
                break  # nobody overtakes for being smaller
        return prefix_awaited

    def _match(self, sequence: Sequence) -> list[int] | None:
        """Blocks that hold its prefix; None: more of it is just being computed. The end of that is
        remembered: to find it again takes as long as the prefix is."""
        if sequence.scores_prompt:
            return []
        if sequence.awaited not in self.pool.computing:
            matched, sequence.awaited = self.pool.match(sequence.contents, sequence.root)
            if sequence.awaited is None:
                return matched
        return None

    def _make_way(self, sequence: Sequence, matched: list[int], kept: int) -> bool:
        """Admit it beside `kept` places for others, if need be instead of background sequences."""
        while len(self.running) + kept >= self.max_running or not self._admit(sequence, matched):
            if sequence.background or _foreground(self.running) == len(self.running):
                return False
            self._preempt(self.running[-1])
        return True

    def _admit(self, sequence: Sequence, matched: list[int]) -> bool:
        reserve = min(len(self.running), self.pool.count // RESERVE)
        sequence.table = self.pool.open(sequence.contents, matched, reserve, sequence.root)
        if sequence.table is None:
            return False
        sequence.computed = len(matched) * self.pool.size
        if sequence.cached is None:
            sequence.cached = sequence.computed
            sequence.tokens = sequence.tokens.copy()  # from here on it adds to them
            self.admitted.append(sequence)
        bisect.insort(self.running, sequence)
        return True

    # ── which of their prompts' tokens ──

    def _prefill(self, prompts: list[Sequence], budget: int, prefix_awaited: bool) -> list[Chunk]:
        """The prompts' chunks. Where a prefix is awaited that a background sequence may be
        computing, those count like all others."""
        if budget <= 0:
            return []
        ranked = sorted(prompts, key=lambda each: each.number) if prefix_awaited else prompts
        most_scored = PROJECTED_WHOLE if self.whole_prompts else PROJECTED
        most = {e: min(e.left, most_scored) if e.scores_prompt else e.left for e in prompts}
        shares = dict.fromkeys(prompts, 0)
        if self.whole_prompts:  # one at least; more as long as all, padded to the longest, fit
            longest = itertools.accumulate((len(each.tokens) for each in ranked), max)
            fitting = sum(n * tokens <= budget for n, tokens in enumerate(longest, 1))
            shares |= {each: most[each] for each in ranked[: max(1, fitting)]}
        else:
            shares[ranked[0]] = min(most[ranked[0]], -(-budget // 2))
            budget -= shares[ranked[0]]
            for each in sorted(
                prompts, key=lambda e: (e.background and not prefix_awaited, e.left)
            ):
                more = min(most[each] - shares[each], budget)
                shares[each] += more
                budget -= more
        return [_chunk(each, share) for each, share in shares.items() if share]

    # ── after the step ──

    def promise(self, chunks: abc.Sequence[Chunk]) -> None:
        """They are running without drafts, and their sequences may be scheduled again, unless they
        must end, each with the token that its row of the step's draws is to give."""
        row = 0
        for chunk in chunks:
            sequence = chunk.sequence
            longest = sequence.prompt_len + sequence.max_tokens
            if chunk.runs:
                sequence.computed = chunk.start + chunk.count
                if chunk.reaches_end and len(sequence.tokens) + 1 < longest:
                    sequence.tokens.append(-1 - row)
            row += chunk.to_sample

    def advance(self, chunk: Chunk, sampled: abc.Sequence[int] = ()) -> None:
        """The chunk has run, and the sequence goes on with `sampled`: drafts that were right and
        one token more; nothing if the chunk ends before the sequence does."""
        sequence = chunk.sequence
        assert sequence.table is not None
        if sequence.scores_prompt:
            sequence.scored = max(sequence.scored, chunk.to_score.stop)
        sequence.computed = chunk.start + chunk.count + max(0, len(sampled) - 1)
        if sampled:
            if sequence.promised:
                sequence.tokens.pop()
            sequence.tokens += sampled
        if chunk.drafts:
            self.pool.trim(sequence.table, len(sequence.tokens))
        if sequence.computed // self.pool.size > sequence.table.registered:
            self.pool.register(sequence.table, sequence.contents, sequence.computed)

    def give_way(self) -> bool:
        """Memory is short: the younger half of those that run waits, and no more run until one has
        ended. False if that frees nothing, as the pool's memory is all reserved, or one runs."""
        if not self.whole_prompts or len(self.running) < 2:
            return False
        self.max_running = len(self.running) // 2
        while len(self.running) > self.max_running:
            self._preempt(self.running[-1])
        return True


def _chunk(sequence: Sequence, share: int) -> Chunk:
    """Of about so many tokens: parts that are seen in both directions stay whole."""
    start, multimodal = sequence.computed, sequence.multimodal
    return Chunk(sequence, start, multimodal.align_chunk(start, share) if multimodal else share)


def _foreground(line: list[Sequence]) -> int:
    """How many in a line are not in the background."""
    return bisect.bisect_left(line, True, key=lambda each: each.background)


# Prompt tokens of a step; where prompts run whole, with their padding.
MOST = {"cpu": 2048, "cuda": 8192}
MOST_WHOLE = {"cpu": 4096, "cuda": 32768}
# No more than make a step so much longer, but at least so many while somebody streams, and so many
# while nobody does.
LONGER_S, LEAST = 0.3, 32
LEAST_ALONE = {"cpu": 512, "cuda": 8192}
NEW_SHARE = 0.3  # of the latest step in what was learned of their times


class PrefillBudget:
    """How many prompt tokens a step takes, learned from the steps' times: as many as pay, few
    enough not to stall streams. What a prompt token adds is what counts, not its share of the
    whole: a small step is mostly the weights being read, and must not shrink for that."""

    def __init__(self, device_type: str, whole_prompts: bool = False) -> None:
        self._most = (MOST_WHOLE if whole_prompts else MOST)[device_type]
        self._least_alone = self._most if whole_prompts else LEAST_ALONE[device_type]
        self.decode_s = 0.0  # the last step without prompts: whoever times it says so
        self._token_s = 0.0  # what a prompt token adds

    def prompt_tokens(self, streaming: bool, spent_s: float = 0.0) -> int:
        """For the next step, which is so much longer already."""
        left_s = max(0.0, LONGER_S - spent_s)
        fitting = int(left_s / self._token_s) if self._token_s else 0
        least = LEAST if streaming and self._token_s else self._least_alone
        return min(self._most, max(least, fitting))

    def learn(self, prompt: int, others: int, seconds: float) -> None:
        """A step of so many prompt tokens and other rows took so long."""
        if prompt >= LEAST:
            more_s = max(0.0, seconds - self.decode_s) if others else seconds
            share = NEW_SHARE if self._token_s else 1.0
            self._token_s += share * (more_s / prompt - self._token_s)
