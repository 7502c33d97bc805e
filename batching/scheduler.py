"""Iteration-level scheduling: which tokens of which sequences go through the next step.

    waiting ──admit──▶ running: prefill in chunks ──▶ decode a token a step ──▶ finished
       ▲                  │
       └────preempt───────┘   (its blocks are freed, its tokens are computed again later)

Every decoding sequence is in every step. Prompts share the step's prefill budget, so they run in
chunks beside decoding sequences: half of it is for the oldest, the rest for those that need least,
so that short prompts do not wait for a long one, nor a long one forever. When blocks run out, the
youngest sequence is preempted, so the oldest always advances and nothing can deadlock.

Background sequences have low priority: they come after all others, in the queue and in a step, and
are preempted for them. Beside others only a few of them are in a step, since each makes it longer.
The oldest is promoted to the others, so that background work also finishes, one by one at least.

A step may be scheduled while the one before it runs. Sequences then have placeholders for the
tokens that this will sample; the prefix cache gets those once they are known.

The worker thread owns this state: no tensors, no clock. Sampling and stop conditions are the
caller's. PrefillBudget sizes the steps, from the times that the caller measures.
"""

import bisect
import itertools
from collections import abc

from batching.block_pool import BlockPool
from batching.sequence import Chunk, Sequence

# An admission leaves a block free for each running sequence to grow into, or else it might be
# preempted at once; but at most this part of all blocks.
RESERVE_DIVISOR = 20
# Tokens in a step of a prompt whose log-probabilities are requested: each is projected onto the
# vocabulary. The second: where each step of such a prompt runs the whole of it.
MAX_SCORED_TOKENS = 128
MAX_SCORED_TOKENS_WHOLE = 512
# Sequences in a step with both kinds: as many background ones as others, or up to this total. A
# step of so many takes hardly longer than one of a single sequence.
SMALL_STEP = 8

DraftFunction = abc.Callable[[Sequence], tuple[int, ...]]


class ContinuousScheduler:
    """`whole_prompts`: prompts run without chunks, for a model runner that keeps no blocks."""

    def __init__(self, pool: BlockPool, max_running: int, whole_prompts: bool = False) -> None:
        self.pool = pool
        self.max_running = max_running  # now: less while memory is short
        self.whole_prompts = whole_prompts
        self.waiting: list[Sequence] = []  # by priority, then by order of arrival
        self.running: list[Sequence] = []  # likewise
        self.preempted = 0  # in the last step
        self.admitted: list[Sequence] = []  # for the first time, in the last step
        self.starved = False  # the last step had no room for a sequence not in the background
        self._max_running_limit = max_running
        self._promoted: Sequence | None = None  # the background sequence that counts as another
        self._removed_any = False  # since the last step
        self._numbers = itertools.count()

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. The caller checks that the pool can hold it at its full length."""
        sequence.number = next(self._numbers)
        bisect.insort(self.waiting, sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that has finished or is cancelled; ValueError if it is not here."""
        queue = self.waiting if sequence.table is None else self.running
        index = bisect.bisect_left(queue, sequence)
        if queue[index : index + 1] != [sequence]:
            raise ValueError("this sequence is not scheduled")
        del queue[index]
        self._release(sequence)
        sequence.number = -1
        self._removed_any = True
        if sequence is self._promoted:
            self._promoted = None

    def _release(self, sequence: Sequence) -> None:
        """Free its blocks. The step in flight may still write to them: any step that reuses them
        runs after it."""
        sequence.drop_placeholder()  # the same token is sampled when it is computed again
        if sequence.table is not None:
            self.pool.close(sequence.table)
            sequence.table = None
            sequence.computed = 0

    # ── one step ──

    def schedule(self, budget: int, draft: DraftFunction | None = None) -> list[Chunk]:
        """Return the next step's chunks. `budget`: how many prompt tokens it may have. `draft`
        proposes a sequence's next tokens."""
        self.preempted, self.admitted = 0, []
        if self._removed_any:  # there is more memory than when it was short
            self.max_running = min(self._max_running_limit, 2 * self.max_running)
            self._removed_any = False
        limit = self._background_limit() if self._promote() else self.max_running
        idle = set(self.running[limit:])  # background sequences beyond the limit
        idle.update(sequence for sequence in self.running if not sequence.uncomputed)
        ready = [sequence for sequence in self.running[:limit] if sequence.uncomputed == 1]
        decoding = [sequence for sequence in ready if self._make_room(sequence)]
        prefix_pending = self._admit_waiting(limit)
        decoding = [sequence for sequence in decoding if sequence.table]
        if prefix_pending:  # a background sequence may be computing that prefix
            idle = {sequence for sequence in idle if sequence.uncomputed <= 1}
        without_prefill = idle.union(decoding)
        prompts = [sequence for sequence in self.running if sequence not in without_prefill]
        chunks = self._prefill(prompts, budget, prefix_pending) if prompts else []
        prefilled = {chunk.sequence for chunk in chunks}
        self.starved |= any(
            not sequence.background and sequence not in prefilled for sequence in prompts
        )
        return [self._decode(sequence, draft) for sequence in decoding if sequence.table] + chunks

    def _promote(self) -> bool:
        """Promote the oldest background sequence, until it has finished, to be one of the others.
        Return whether there are background sequences."""
        queues = [queue for queue in (self.running, self.waiting) if queue and queue[-1].background]
        if queues and self._promoted is None:
            first_of_each = [queue[_num_foreground(queue)] for queue in queues]
            self._promoted = oldest = min(first_of_each, key=lambda sequence: sequence.number)
            queue = self.running if oldest.table else self.waiting
            queue.remove(oldest)
            oldest.background = False
            bisect.insort(queue, oldest)
        return bool(queues)

    def _background_limit(self) -> int:
        """Return how many sequences a step may have if the last of them is a background one."""
        running = _num_foreground(self.running)
        if running + _num_foreground(self.waiting) == (self._promoted is not None):
            return self.max_running  # there are no others
        return max(SMALL_STEP, 2 * running)

    def _decode(self, sequence: Sequence, draft: DraftFunction | None) -> Chunk:
        """Return a decode chunk. Its drafts have their room for this step only, and come after all
        else has room. Drafting may remove sequences."""
        drafts, table = draft(sequence) if draft else (), sequence.table
        if drafts and not (table and self.pool.grow(table, len(sequence.tokens) + len(drafts))):
            drafts = ()
        return Chunk(sequence, sequence.computed, 1, drafts)

    def _make_room(self, sequence: Sequence) -> bool:
        """Make room for one more token, by preemption if need be. Return False if the sequence
        itself is preempted or was before, for an older one."""
        tokens, block_size = len(sequence.tokens), self.pool.block_size
        while (table := sequence.table) and tokens > len(table.blocks) * block_size:
            if not self.pool.grow(table, tokens):
                self._preempt(self.running[-1])
        return table is not None

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._release(sequence)
        self.preempted += 1
        bisect.insort(self.waiting, sequence)

    # ── admission ──

    def _admit_waiting(self, limit: int) -> bool:
        """Admit sequences in order while there is room, background ones while fewer than `limit`
        run. Return whether one that is not in the background waits for a pending prefix."""
        self.starved = prefix_pending = False
        position = 0
        while position < len(self.waiting):
            sequence = self.waiting[position]
            if sequence.background and (self.preempted or len(self.running) >= limit):
                break  # it would idle, or was preempted in this very step
            ahead = len(self.running) if sequence.background else _num_foreground(self.running)
            if ahead + position >= self.max_running:  # those passed over keep their slots
                self.starved = not sequence.background
                break
            if sequence.multimodal and not sequence.multimodal.ready:
                position += 1  # its images are not encoded yet: others pass
                continue
            matched = self._match(sequence)
            if matched is None:
                position += 1  # the rest of its prefix is being computed: others pass
                prefix_pending |= not sequence.background
            elif self._admit_or_preempt(sequence, matched, position):
                del self.waiting[position]
            else:
                self.starved = not sequence.background
                break  # a smaller sequence does not overtake
        return prefix_pending

    def _match(self, sequence: Sequence) -> list[int] | None:
        """Return the blocks of its cached prefix; None if more of that is being computed. The key
        of its last block is kept, since matching again takes as long as the prefix is."""
        if sequence.scores_prompt:
            return []
        if sequence.pending_prefix not in self.pool.computing:
            matched, sequence.pending_prefix = self.pool.match(
                sequence.contents, sequence.cache_namespace
            )
            if sequence.pending_prefix is None:
                return matched
        return None

    def _admit_or_preempt(self, sequence: Sequence, matched: list[int], kept: int) -> bool:
        """Admit it, with `kept` slots left for others, if need be by preempting background
        sequences."""
        while len(self.running) + kept >= self.max_running or not self._admit(sequence, matched):
            if sequence.background or _num_foreground(self.running) == len(self.running):
                return False
            self._preempt(self.running[-1])
        return True

    def _admit(self, sequence: Sequence, matched: list[int]) -> bool:
        reserve = min(len(self.running), self.pool.num_blocks // RESERVE_DIVISOR)
        contents, namespace = sequence.contents, sequence.cache_namespace
        sequence.table = self.pool.open(contents, matched, reserve, namespace)
        if sequence.table is None:
            return False
        sequence.computed = len(matched) * self.pool.block_size
        if sequence.cached is None:
            sequence.cached = sequence.computed
            sequence.tokens = sequence.tokens.copy()  # it is about to append to them
            self.admitted.append(sequence)
        bisect.insort(self.running, sequence)
        return True

    # ── prefill ──

    def _prefill(self, prompts: list[Sequence], budget: int, prefix_pending: bool) -> list[Chunk]:
        """Return the prompts' chunks. While a pending prefix is waited for, which a background
        sequence may be computing, those have the same priority as all others."""
        if budget <= 0:
            return []
        ranked = prompts
        if prefix_pending:
            ranked = sorted(prompts, key=lambda sequence: sequence.number)
        max_scored = MAX_SCORED_TOKENS_WHOLE if self.whole_prompts else MAX_SCORED_TOKENS
        wanted = {
            sequence: min(sequence.uncomputed, max_scored)
            if sequence.scores_prompt
            else sequence.uncomputed
            for sequence in prompts
        }
        shares = dict.fromkeys(prompts, 0)
        if self.whole_prompts:  # at least one; more while all, padded to the longest, fit
            lengths = itertools.accumulate((len(sequence.tokens) for sequence in ranked), max)
            fitting = sum(n * length <= budget for n, length in enumerate(lengths, 1))
            shares |= {sequence: wanted[sequence] for sequence in ranked[: max(1, fitting)]}
        else:
            shares[ranked[0]] = min(wanted[ranked[0]], -(-budget // 2))
            budget -= shares[ranked[0]]
            for sequence in sorted(
                prompts, key=lambda s: (s.background and not prefix_pending, s.uncomputed)
            ):
                more = min(wanted[sequence] - shares[sequence], budget)
                shares[sequence] += more
                budget -= more
        return [_prefill_chunk(sequence, share) for sequence, share in shares.items() if share]

    # ── after the step ──

    def append_placeholders(self, chunks: abc.Sequence[Chunk]) -> None:
        """Let sequences be scheduled again while their chunks, which have no drafts, run: each that
        samples a token gets a placeholder for it, unless that is its last."""
        row = 0
        for chunk in chunks:
            sequence = chunk.sequence
            max_len = sequence.prompt_len + sequence.max_tokens
            if chunk.is_active:
                sequence.computed = chunk.start + chunk.count
                if chunk.reaches_end and len(sequence.tokens) + 1 < max_len:
                    sequence.append_placeholder(row)
            row += chunk.to_sample

    def advance(self, chunk: Chunk, sampled: abc.Sequence[int] = ()) -> None:
        """Record that the chunk has run. `sampled`: the accepted drafts and one token more; empty
        if the chunk ends before its sequence does."""
        sequence = chunk.sequence
        assert sequence.table is not None
        if sequence.scores_prompt:
            sequence.scored = max(sequence.scored, chunk.to_score.stop)
        sequence.computed = chunk.start + chunk.count + max(0, len(sampled) - 1)
        if sampled:
            sequence.extend(sampled)
        if chunk.drafts:
            self.pool.trim(sequence.table, len(sequence.tokens))
        if sequence.computed // self.pool.block_size > sequence.table.registered:
            self.pool.register(sequence.table, sequence.contents, sequence.computed)

    def shrink_running(self) -> bool:
        """Preempt the younger half of the running sequences after an out-of-memory error, and admit
        none before one has finished. Return False if that frees nothing: a single sequence runs,
        or all memory is reserved in the pool."""
        if not self.whole_prompts or len(self.running) < 2:
            return False
        self.max_running = len(self.running) // 2
        while len(self.running) > self.max_running:
            self._preempt(self.running[-1])
        return True


def _prefill_chunk(sequence: Sequence, count: int) -> Chunk:
    """Return a chunk of about `count` tokens: spans with bidirectional attention stay whole."""
    start, multimodal = sequence.computed, sequence.multimodal
    return Chunk(sequence, start, multimodal.align_chunk(start, count) if multimodal else count)


def _num_foreground(queue: list[Sequence]) -> int:
    """Return how many sequences of a queue are not in the background."""
    return bisect.bisect_left(queue, True, key=lambda sequence: sequence.background)


# Limits of a step's prompt tokens, by device; where prompts run whole, padding included.
MAX_PREFILL_TOKENS = {"cpu": 2048, "cuda": 8192}
MAX_PREFILL_TOKENS_WHOLE = {"cpu": 4096, "cuda": 32768}
# The longest time that prompts add to a step, and the fewest of their tokens in it: while sequences
# decode, and while none does.
MAX_PREFILL_S = 0.3
MIN_PREFILL_TOKENS = 32
MIN_PREFILL_TOKENS_ALONE = {"cpu": 512, "cuda": 8192}
NEW_SHARE = 0.3  # weight of the latest step in the measured time per token


class PrefillBudget:
    """Chooses the number of prompt tokens of a step, by the times of earlier steps: few enough not
    to stall streams. It measures the time that a prompt token adds, not a token's share of the
    whole step: most of a small step is reading the weights."""

    def __init__(self, device_type: str, whole_prompts: bool = False) -> None:
        limits = MAX_PREFILL_TOKENS_WHOLE if whole_prompts else MAX_PREFILL_TOKENS
        self._max = limits[device_type]
        self._min_alone = self._max if whole_prompts else MIN_PREFILL_TOKENS_ALONE[device_type]
        self.decode_s = 0.0  # the time of the last step without prompts, set by the caller
        self._token_s = 0.0  # the time that a prompt token adds; 0: not measured yet

    def prompt_tokens(self, streaming: bool, spent_s: float = 0.0) -> int:
        """Return the next step's budget. `streaming`: sequences are decoding. `spent_s`: time
        that the step has taken already."""
        left_s = max(0.0, MAX_PREFILL_S - spent_s)
        fitting = int(left_s / self._token_s) if self._token_s else 0
        minimum = MIN_PREFILL_TOKENS if streaming and self._token_s else self._min_alone
        return min(self._max, max(minimum, fitting))

    def learn(self, prompt_tokens: int, other_rows: int, seconds: float) -> None:
        """Record the time of a step of `prompt_tokens` and of `other_rows` that decoded."""
        if prompt_tokens >= MIN_PREFILL_TOKENS:
            added_s = max(0.0, seconds - self.decode_s) if other_rows else seconds
            share = NEW_SHARE if self._token_s else 1.0
            self._token_s += share * (added_s / prompt_tokens - self._token_s)
