"""Iteration-level scheduling: which tokens of which sequences go through the next step.

    waiting ──admit──▶ running: prefill in chunks ──▶ decode a token a step ──▶ finished
       ▲                  │
       ├────pause─────────┤   (it keeps its blocks)
       └────preempt───────┘   (its blocks are freed, its tokens are computed again later)

There are no phases: a step has a row for each sequence that decodes, and chunks of prompts up to
its budget. Waiting sequences are admitted by one rank: class, then the slots that the client (over
its share), the flow and the request hold, then arrival, which request_queue.py has made fair. When
all slots or blocks are taken, the running sequence of the largest rank is paused or preempted, if
its client, flow or request holds over one slot more. Beside other requests, the rows of a request
after its first one at most double the time of a step: a chat beside a hundred choices of another
request keeps about its speed. Beside other clients, the prompts of a client that need several steps
take at most as long as a step of the others' rows.

The oldest prompt gets half of the budget, those that need least the rest: short prompts do not wait
for a long one, nor a long one forever. Lower classes come after all others; the oldest of each is
promoted, so that such work also finishes, one by one at least.

A step may be scheduled while the one before it runs. Sequences then have placeholders for the
tokens that this will sample; the prefix cache gets those once they are known.

The worker thread owns this state: no tensors, no clock. Sampling and stop conditions are the
caller's. step_times.py sizes the steps, by the times that the caller measures.
"""

import bisect
import heapq
import itertools
import math
from collections import Counter, OrderedDict, abc
from typing import Any

from batching.block_pool import BlockPool
from batching.fair_share import Priority, WorkOwner
from batching.sequence import Chunk, PrefixedTokens, Sequence
from batching.state_pool import checkpoint_positions

# An admission leaves a block free for each running sequence to grow into, or else it might be
# preempted at once; but at most this part of all blocks.
RESERVE_DIVISOR = 20
# Tokens in a step of a prompt whose log-probabilities are requested: each is projected onto the
# vocabulary. The second: where each step of such a prompt runs the whole of it.
MAX_SCORED_TOKENS = 128
MAX_SCORED_TOKENS_WHOLE = 512

DraftFunction = abc.Callable[[Sequence], tuple[int, ...]]
Rank = tuple[float, ...]
ClientLimits = abc.Mapping[abc.Hashable, int]  # by client: tokens of its prompts in a step


class ContinuousScheduler:
    """`whole_prompts`: prompts run without chunks, for a model runner that keeps no blocks."""

    def __init__(self, pool: BlockPool, max_running: int, whole_prompts: bool = False) -> None:
        self.pool = pool
        self.max_running = max_running  # now: less while memory is short
        self.whole_prompts = whole_prompts
        self.begin_read: abc.Callable[[BlockPool, Sequence, list[int], int], bool]  # StoredEngine's
        self.save: abc.Callable[[BlockPool, Sequence], None]
        self.running: list[Sequence] = []  # by priority, then by order of arrival
        self.num_waiting = 0
        self.preempted = 0  # in the last step
        self.admitted: list[Sequence] = []  # for the first time, in the last step
        # Of each request and class, by order of arrival.
        self._waiting: dict[tuple[Priority, WorkOwner], list[Sequence]] = {}
        self._paused: set[Sequence] = set()  # of those that wait
        # Running sequences of each class's clients, flows and requests.
        self._held = Counter[abc.Hashable]()
        # Of all that run, of clients and of flows: that of the largest rank. Empty: not known.
        self._largest: dict[abc.Hashable, Sequence] = {}
        self._max_running_limit = max_running
        self._may_admit = False  # since the last step: one waits, or a slot is free
        # All that are here run and decode without limits, until one joins, ends or waits.
        self.is_steady = False
        # Sequences of each class, by order of arrival.
        self._live: list[OrderedDict[Sequence, None]] = [OrderedDict() for _ in Priority]
        self._promoted: dict[Priority, Sequence] = {}  # by the class that they had
        self._removed_any = False  # since the last step
        self._decodes: list[Chunk] = []  # of the last step
        self._draft_slots: float = math.inf  # for states after drafts, in this step
        self._numbers = itertools.count()

    @property
    def waiting(self) -> list[Sequence]:
        """All that wait, by priority, then by order of arrival."""
        return sorted(itertools.chain(*self._waiting.values()))

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. The caller checks that the pool can hold it at its full length."""
        sequence.number = next(self._numbers)
        self._live[sequence.priority][sequence] = None
        self._add_waiting(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that has finished or is cancelled; ValueError if it is not here."""
        if sequence.table is None or sequence.paused:
            self._remove_waiting(sequence)
        else:
            self._remove_running(sequence)
        self._release(sequence)
        sequence.number = -1
        del self._live[sequence.priority][sequence]
        self._removed_any = True
        for priority in [p for p, promoted in self._promoted.items() if promoted is sequence]:
            del self._promoted[priority]

    def _add_waiting(self, sequence: Sequence) -> None:
        bisect.insort(self._waiting.setdefault(_key_of(sequence), []), sequence)
        self.num_waiting += 1
        self._may_admit = True
        self.is_steady = False

    def _remove_waiting(self, sequence: Sequence) -> None:
        queue = self._waiting.get(_key_of(sequence), [])
        queue.remove(sequence)
        self.num_waiting -= 1
        if not queue:
            del self._waiting[_key_of(sequence)]

    def _add_running(self, sequence: Sequence) -> None:
        bisect.insort(self.running, sequence)
        self._held.update(_holders(sequence))
        self._largest.clear()

    def _remove_running(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._may_admit = True
        self.is_steady = False
        self._decodes = [chunk for chunk in self._decodes if chunk.sequence is not sequence]
        self._largest.clear()
        for holder in _holders(sequence):
            self._held[holder] -= 1
            if not self._held[holder]:
                del self._held[holder]

    def _rank(self, sequence: Sequence) -> Rank:
        """Return its place: of those that wait, the smallest is admitted first; of those that run,
        the largest is preempted first. A client's slots count over its share."""
        client, flow, request = map(self._held.__getitem__, _holders(sequence))
        share = sequence.owner.share
        return sequence.priority, client / share, flow, request, sequence.number

    def _release(self, sequence: Sequence) -> None:
        """Free its blocks. The step in flight may still write to them: any step that reuses them
        runs after it."""
        sequence.drop_placeholder()  # the same token is sampled when it is computed again
        sequence.paused = False
        self._paused.discard(sequence)
        if sequence.table is not None:
            if sequence.disk_key:
                self.save(self.pool, sequence)
            self.pool.close(sequence.table)
            sequence.table = None
            sequence.computed = 0

    # ── one step ──

    def schedule(
        self,
        budget: int,
        draft: DraftFunction | None = None,
        spare_rows: float = math.inf,
        resting: abc.Container[WorkOwner] = (),
        doubling: abc.Callable[[int], int] | None = None,
    ) -> list[Chunk]:
        """Return the next step's chunks: the last step's list if only starts differ. `budget`: how
        many prompt tokens it may have. `draft` proposes a sequence's next tokens. `spare_rows`:
        that take as long as an empty step. `resting` requests have no part in it. `doubling`
        returns the prompt tokens that take as long as a step of so many rows; None: no limit."""
        self.preempted, self.admitted = 0, []
        if self._removed_any:  # there is more memory than when it was short
            self.max_running = min(self._max_running_limit, 2 * self.max_running)
            self._removed_any = False
        self._promote()
        if self.is_steady and not resting:  # a token begins a block or has room
            for sequence in [s for s in self.running if not s.computed % self.pool.block_size]:
                self._make_room(sequence)
        decoding, chunks = self.running, list[Chunk]()
        if not self.is_steady or resting:
            decoding, chunks = self._select(budget, spare_rows, resting, doubling)
        self._draft_slots = self.pool.states.max_drafts if self.pool.states else math.inf
        # drafting may remove sequences
        drafts = {s: draft(s) for s in [*decoding] if s.table} if draft else {}
        decoding, decodes = [s for s in decoding if s.table], self._decodes
        kept = [c for c in decodes if not (c.is_prefill or c.drafts or c.deferred)]
        is_same = kept == decodes and decoding == [chunk.sequence for chunk in kept]
        if not is_same or any(drafts.values()):
            chunk_of = {chunk.sequence: chunk for chunk in kept if not drafts.get(chunk.sequence)}
            new = {s: self._decode(s, drafts.get(s, ())) for s in decoding if s not in chunk_of}
            self._decodes = decodes = [chunk_of.get(s) or new[s] for s in decoding]
        for chunk in decodes:
            chunk.start = chunk.sequence.computed
        chunks = decodes + [chunk for chunk in chunks if chunk.is_active] if chunks else decodes
        if self.pool.states:
            for chunk in chunks:
                if chunk.table:
                    end = chunk.start + chunk.count
                    chunk.states = self.pool.plan_states(chunk.table, end, len(chunk.drafts))
        return chunks

    def _select(
        self,
        budget: int,
        spare_rows: float,
        resting: abc.Container[WorkOwner],
        doubling: abc.Callable[[int], int] | None,
    ) -> tuple[list[Sequence], list[Chunk]]:
        """Admit sequences; return those that decode, and the chunks of prompts."""
        rows = self._pick_rows(spare_rows, resting)
        idle = {s for s in self.running if s.uncomputed == 1}.difference(rows)
        tables = {sequence: sequence.table for sequence in rows if self._make_room(sequence)}
        prefix_pending = self._admit_waiting()
        decoding = [s for s, table in tables.items() if s.table is table and not s.paused]
        without_prefill = {s for s in idle if s.uncomputed == 1}.union(decoding)
        prompts = [s for s in self.running if s.uncomputed and s not in without_prefill]
        prompts = [sequence for sequence in prompts if sequence.owner not in resting]
        limits: dict[abc.Hashable, int] = {}
        if doubling is not None:
            rows_of = Counter(sequence.owner.client for sequence in decoding)
            large = _large_clients(prompts, set(rows_of), budget)
            limits = {client: doubling(len(decoding) - rows_of[client]) for client in large}
        chunks: list[Chunk] = []
        if prompts:
            chunks = self._prefill(prompts, budget, prefix_pending, limits)
        kinds, owners = {s.priority for s in decoding}, {s.owner for s in decoding}
        all_decode = len(decoding) == len(self.running) and not self.num_waiting
        self.is_steady = all_decode and len(kinds) == 1 and len(owners) in (1, len(decoding))
        return decoding, chunks

    def _pick_rows(self, spare_rows: float, resting: abc.Container[WorkOwner]) -> list[Sequence]:
        """Return the sequences that decode in this step: one of each request of the highest class,
        that which has generated least, and as many others as at most double the step's time."""
        ready = [s for s in self.running if s.uncomputed == 1 and s.owner not in resting]
        counts = [*map(len, self._live)]
        counts[Priority.INTERACTIVE] -= len(self._promoted)  # alone, these are no other work
        highest = next((priority for priority in Priority if counts[priority]), 0)
        requests = {(max(highest, s.priority), s.owner) for s in self.running}
        if len(requests) < 2 and requests.issuperset(self._waiting):
            return ready
        if ready and len(requests) == len(self.running) and self.running[-1].priority <= highest:
            return ready  # each is the only one of its request
        ready.sort(key=lambda s: (s.priority, len(s.tokens) - s.prompt_len))
        first: dict[WorkOwner, Sequence] = {}
        for sequence in ready:
            if sequence.priority <= highest:
                first.setdefault(sequence.owner, sequence)
        others = [s for s in ready if first.get(s.owner) is not s]
        return [*first.values(), *others[: int(min(len(first) + spare_rows, len(others)))]]

    def _promote(self) -> None:
        """Promote the oldest sequence of each lower class to an interactive one, until it has
        finished."""
        for priority in Priority:
            if not self._live[priority] or priority in (Priority.INTERACTIVE, *self._promoted):
                continue
            oldest = next(iter(self._live[priority]))
            self._promoted[priority] = oldest
            is_running = oldest.table and not oldest.paused
            (self._remove_running if is_running else self._remove_waiting)(oldest)
            del self._live[priority][oldest]
            oldest.priority = Priority.INTERACTIVE
            self._live[oldest.priority][oldest] = None
            (self._add_running if is_running else self._add_waiting)(oldest)

    def _decode(self, sequence: Sequence, drafts: tuple[int, ...]) -> Chunk:
        """Return a decode chunk. Its drafts have their room for this step only, and come after all
        else has room."""
        if drafts:
            table, drafts = sequence.table, drafts[: int(min(len(drafts), self._draft_slots))]
            if not (table and self.pool.grow(table, len(sequence.tokens) + len(drafts))):
                drafts = ()
            self._draft_slots -= len(drafts)
        return Chunk(sequence, sequence.computed, 1, drafts)

    def _make_room(self, sequence: Sequence) -> bool:
        """Make room for one more token, by preemption if need be. Return False if the sequence
        itself is preempted or was before, for an older one."""
        tokens, block_size = len(sequence.tokens), self.pool.block_size
        while (table := sequence.table) and tokens > len(table.blocks) * block_size:
            if not self.pool.grow(table, tokens) and not self._release_paused(sequence):
                self._preempt(max(self.running, key=self._rank))
        return table is not None

    def _preempt(self, sequence: Sequence) -> None:
        self._remove_running(sequence)
        self._release(sequence)
        self.preempted += 1
        self._add_waiting(sequence)

    def _pause(self, sequence: Sequence) -> None:
        assert sequence.table is not None
        self._remove_running(sequence)
        self.pool.withdraw(sequence.table)
        sequence.paused = True
        self._paused.add(sequence)
        self._add_waiting(sequence)

    def _release_paused(self, needs: Sequence) -> bool:
        """Free the blocks of a paused sequence for another one: of the youngest, which is computed
        again later. Return False if there is none."""
        paused = [s for s in self._paused if s is not needs and s.priority >= needs.priority]
        if not paused:
            return False
        self._release(max(paused))
        self.preempted += 1
        return True

    # ── admission ──

    def _admit_waiting(self) -> bool:
        """Admit sequences by rank while there is room or others yield, none past one that lacks
        blocks. Return whether an interactive one waits for a pending prefix."""
        if not self._may_admit:
            return False
        self._may_admit = prefix_pending = False
        heads = [(self._rank(queue[0]), queue[0]) for queue in self._waiting.values()]
        heapq.heapify(heads)
        failed: set[abc.Hashable] = set()  # flows
        skipped = 0
        while heads:
            rank, sequence = heapq.heappop(heads)
            _, flow, _ = _holders(sequence)
            if flow in failed:
                continue
            if (new_rank := self._rank(sequence)) != rank:  # others of its client were admitted
                heapq.heappush(heads, (new_rank, sequence))
                continue
            is_interactive = sequence.priority == Priority.INTERACTIVE
            if not is_interactive and self.preempted:  # it was perhaps preempted in this very step
                self._may_admit = True
                break
            if len(self.running) >= self.max_running and not self._yielding(sequence):
                failed.add(flow)
                continue
            ready = not (sequence.reading or ((m := sequence.multimodal) and not m.ready))
            matched = self._match(sequence) if ready else None
            if matched is None:  # the rest of its prefix is computed or read, or its images are
                prefix_pending |= ready and is_interactive and not sequence.reading
                self._may_admit = True
                skipped += 1
            elif not self._take_room(sequence, matched):
                self._may_admit = True
                break
            following = self._after(sequence)
            if following and skipped < self.max_running:
                heapq.heappush(heads, (self._rank(following), following))
        return prefix_pending

    def by_rank(self) -> abc.Iterator[Sequence]:
        """Yield all that wait, by the rank of the first one of their request."""
        queues = sorted(self._waiting.values(), key=lambda queue: self._rank(queue[0]))
        return itertools.chain.from_iterable(queues)

    def _after(self, sequence: Sequence) -> Sequence | None:
        """Return the next one of its request that waits."""
        queue = self._waiting.get(_key_of(sequence), [])
        index = bisect.bisect_right(queue, sequence)
        return queue[index] if index < len(queue) else None

    def _yielding(self, sequence: Sequence) -> Sequence | None:
        """Return the running sequence that gives up its slot, or its blocks, for one that waits:
        that of the largest rank of all, of its client or of its flow. It has to be of a lower
        class, or its client, flow or request (the first that differs) has to hold over one slot
        more."""
        if not self._largest:
            for running in sorted(self.running, key=self._rank):
                scopes = _holders(running)[:2]
                self._largest |= dict.fromkeys((None, *scopes), running)
        holders = _holders(sequence)
        for scope in (None, *holders[:2]):
            if (other := self._largest.get(scope)) is None:
                continue
            if other.priority != sequence.priority:
                if other.priority > sequence.priority:
                    return other
                continue
            for own, its in zip(holders, _holders(other), strict=True):
                if own != its:
                    held = self._held[its] / other.owner.share
                    if held > (self._held[own] + 1) / sequence.owner.share:
                        return other
                    break
        return None

    def _take_room(self, sequence: Sequence, matched: list[int]) -> bool:
        """Admit a sequence that finds a slot, if need be by taking slot and blocks from others.
        Return False if there are not enough blocks."""
        if len(self.running) >= self.max_running:
            yielding = self._yielding(sequence)
            assert yielding
            self._pause(yielding)
        while not self._admit(sequence, matched):
            if self._release_paused(sequence):
                continue
            if (yielding := self._yielding(sequence)) is None:
                return False
            self._preempt(yielding)
        return True

    def _match(self, sequence: Sequence) -> list[int] | None:
        """Return the blocks of its cached prefix; None if more of that is being computed or read.
        The key of its last block is kept, since matching again takes as long as the prefix is."""
        if sequence.scores_prompt or sequence.paused:
            return []
        if not self.pool.is_awaited(sequence.pending_prefix):
            matched, sequence.pending_prefix = self.pool.match(
                sequence.contents, sequence.cache_namespace
            )
            if sequence.pending_prefix is None:
                usable = self.pool.resumable(matched)
                if sequence.disk_key and self.begin_read(
                    self.pool, sequence, matched[:usable], self._reserve
                ):
                    return None
                # where it leaves a prefix of others: later ones may continue from there
                sequence.branch = len(matched) * self.pool.block_size if matched[usable:] else 0
                return matched[:usable]
        return None

    def _admit(self, sequence: Sequence, matched: list[int]) -> bool:
        contents, namespace = sequence.contents, sequence.cache_namespace
        if sequence.paused:
            assert sequence.table is not None
            if not self.pool.grow(sequence.table, len(sequence.tokens)):
                return False
        else:
            checkpoints = self._checkpoints(sequence) if self.pool.states else ()
            sequence.table = self.pool.open(
                contents, matched, self._reserve, namespace, checkpoints
            )
            if sequence.table is None:
                return False
            sequence.computed = len(matched) * self.pool.block_size
        self._remove_waiting(sequence)
        sequence.paused = False
        self._paused.discard(sequence)
        if sequence.cached is None:
            sequence.cached = sequence.computed
            sequence.tokens = sequence.tokens.copy()  # it is about to append to them
            self.admitted.append(sequence)
        self._add_running(sequence)
        return True

    @property
    def _reserve(self) -> int:
        return min(len(self.running), self.pool.num_blocks // RESERVE_DIVISOR)

    def _checkpoints(self, sequence: Sequence) -> set[int]:
        """Return the numbers of tokens after which the states of its prompt are kept."""
        tokens, shared = sequence.tokens, [sequence.branch, sequence.history_len]
        if isinstance(tokens, PrefixedTokens):
            shared.append(len(tokens.shared))
        return checkpoint_positions(len(tokens), self.pool.block_size, shared)

    # ── prefill ──

    def _prefill(
        self,
        prompts: list[Sequence],
        budget: int,
        prefix_pending: bool,
        limits: ClientLimits,
    ) -> list[Chunk]:
        """Return the prompts' chunks. While a pending prefix is waited for, which a sequence of a
        lower class may be computing, all classes have the same priority."""
        if budget <= 0:
            return []
        oldest = min(prompts, key=lambda s: s.number) if prefix_pending else prompts[0]
        max_scored = MAX_SCORED_TOKENS_WHOLE if self.whole_prompts else MAX_SCORED_TOKENS
        wanted = {
            sequence: min(sequence.uncomputed, max_scored)
            if sequence.scores_prompt
            else sequence.uncomputed
            for sequence in prompts
        }
        of_client, of_request = Counter[abc.Hashable](), Counter[WorkOwner]()
        for sequence in prompts:
            of_client[sequence.owner.client] += sequence.uncomputed
            of_request[sequence.owner] += sequence.uncomputed

        def need(sequence: Sequence) -> Rank:
            owner, priority = sequence.owner, 0 if prefix_pending else sequence.priority
            client = of_client[owner.client] / owner.share
            return priority, client, of_request[owner], sequence.uncomputed, sequence.number

        by_need = sorted(prompts, key=need)
        if self.whole_prompts:
            in_turn = [oldest, *(sequence for sequence in by_need if sequence is not oldest)]
            totals = itertools.accumulate(len(sequence.tokens) for sequence in in_turn)
            fitting = sum(total <= budget for total in totals)
            return [_prefill_chunk(s, wanted[s]) for s in in_turn[: max(1, fitting)]]
        shares = _divide(oldest, by_need, wanted, budget, limits)
        return [_prefill_chunk(sequence, share) for sequence, share in shares.items()]

    # ── after the step ──

    def append_placeholders(self, chunks: abc.Sequence[Chunk]) -> None:
        """Let sequences be scheduled again while their chunks, which have no drafts, run: each that
        samples a token gets a placeholder for it, unless that is its last."""
        row = 0
        for chunk in chunks:
            sequence, table = chunk.sequence, chunk.table
            if table is not None and table is sequence.table:
                sequence.computed = end = chunk.end
                if self.pool.states:
                    self.pool.commit_states(table, end)
                tokens: Any = sequence.tokens  # PrefixedTokens generate nothing
                missing = sequence.prompt_len + sequence.max_tokens - len(tokens)
                if missing > 1 and chunk.reaches_end and not chunk.deferred:
                    tokens.append(-1 - row)
                    sequence.has_placeholder = True
                else:
                    self.is_steady = False
            row += chunk.to_sample

    def advance(self, chunk: Chunk, sampled: abc.Sequence[int] = ()) -> None:
        """Record that the chunk has run. `sampled`: the accepted drafts and one token more; empty
        if the chunk ends before its sequence does."""
        sequence, pool, table = chunk.sequence, self.pool, chunk.sequence.table
        assert table is not None
        if sequence.scores_prompt:
            sequence.scored = max(sequence.scored, chunk.to_score.stop)
        if sampled:
            sequence.extend(sampled)
        sequence.computed = computed = len(sequence.tokens) - 1 if sampled else chunk.end
        if pool.states:
            pool.commit_states(table, computed)
        if chunk.drafts:
            pool.trim(table, len(sequence.tokens))
        if computed // pool.block_size > table.registered:
            pool.register(table, sequence.contents, computed)

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


def _key_of(sequence: Sequence) -> tuple[Priority, WorkOwner]:
    return sequence.priority, sequence.owner


def _holders(sequence: Sequence) -> tuple[abc.Hashable, abc.Hashable, abc.Hashable]:
    """Return the keys of its client, flow and request, in its class."""
    priority, owner = sequence.priority, sequence.owner
    client = priority, owner.client
    return client, (client, owner.flow), (priority, owner)


def _large_clients(
    prompts: abc.Iterable[Sequence], decoding: set[abc.Hashable], budget: int
) -> list[abc.Hashable]:
    """Return the clients whose prompts take several steps, or are of a lower class, beside another
    client that decodes or whose prompts fit into one. `decoding`: the clients that do."""
    needed = Counter[abc.Hashable]()
    for sequence in prompts:
        is_lower = sequence.priority > Priority.INTERACTIVE
        needed[sequence.owner.client] += budget + 1 if is_lower else sequence.uncomputed
    served = decoding | {client for client, tokens in needed.items() if tokens <= budget}
    return [client for client, tokens in needed.items() if tokens > budget and served - {client}]


def _divide(
    oldest: Sequence,
    by_need: list[Sequence],
    wanted: dict[Sequence, int],
    budget: int,
    limits: ClientLimits,
) -> dict[Sequence, int]:
    """Divide a step's budget: half for the oldest, the rest in order, within limits of clients."""
    shares, of_client, left = Counter[Sequence](), Counter[abc.Hashable](), budget
    for sequence, most in ((oldest, -(-budget // 2)), *((s, budget) for s in by_need)):
        client = sequence.owner.client
        more = min(
            min(most, wanted[sequence]) - shares[sequence],
            left,
            limits.get(client, budget) - of_client[client],
        )
        if more > 0:
            shares[sequence] += more
            of_client[client] += more
            left -= more
    return shares


def _prefill_chunk(sequence: Sequence, count: int) -> Chunk:
    """Return a chunk of about `count` tokens: spans with bidirectional attention stay whole."""
    start, multimodal = sequence.computed, sequence.multimodal
    return Chunk(sequence, start, multimodal.align_chunk(start, count) if multimodal else count)
