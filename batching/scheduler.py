"""Iteration-level scheduling: which tokens of which sequences go through the next step.

    waiting ──admit──▶ running: prefill in chunks ──▶ decode a token a step ──▶ finished
       ▲                  │
       ├────pause─────────┤   (it keeps its blocks)
       └────preempt───────┘   (its blocks are freed, its tokens are computed again later)

Every decoding sequence is in every step. Prompts share the step's prefill budget, so they run in
chunks beside decoding sequences: the oldest prompt gets half of it, the shortest ones the rest, so
that short prompts do not wait for a long one, nor a long one forever. When blocks run out,
paused sequences lose theirs first, then the youngest of the largest request is preempted, so the
oldest always advances and nothing can deadlock.

Running sequences and the prefill budget are shared, and waiting sequences are admitted in turn, as
fair_share.py describes: a request that waits with less than its share gets a slot, or blocks, of a
sequence of a request or client above its own.

Beside other requests, the sequences of a request that share its step with the first one make the
step at most twice as long, and those that have generated least come first: a chat beside a hundred
choices of another request keeps about its speed. The prompts of a client that take several steps at
most double a step, too, beside another client that decodes or whose prompts take a single step.

Sequences of lower classes come after all others, in the queue and in a step, and are preempted for
them. Beside others only some of them are in a step, since each makes it longer: of a batch as many
as at most double its time, of the background a few. Where that leaves some out, or where they have
prompts, a step with an interactive prompt runs without the others too, but not two steps in a row:
its first token comes sooner, and a later step runs more of them at once. The oldest of each class
is promoted, so that such work also finishes, one by one at least.

A step may be scheduled while the one before it runs. Sequences then have placeholders for the
tokens that this will sample; the prefix cache gets those once they are known.

The worker thread owns this state: no tensors, no clock. Sampling and stop conditions are the
caller's. PrefillBudget sizes the steps, from the times that the caller measures.
"""

import bisect
import heapq
import itertools
import math
from collections import Counter, OrderedDict, abc

from batching.block_pool import BlockPool
from batching.fair_share import (
    FairShare,
    Path,
    Priority,
    Turns,
    WorkOwner,
    client_share,
    fair_order,
    request_share,
)
from batching.sequence import Chunk, PrefixedTokens, Sequence
from batching.state_pool import checkpoint_positions
from batching.turn_budget import MAX_TURN_ALONE_S

# An admission leaves a block free for each running sequence to grow into, or else it might be
# preempted at once; but at most this part of all blocks.
RESERVE_DIVISOR = 20
# Tokens in a step of a prompt whose log-probabilities are requested: each is projected onto the
# vocabulary. The second: where each step of such a prompt runs the whole of it.
MAX_SCORED_TOKENS = 128
MAX_SCORED_TOKENS_WHOLE = 512
# Sequences in a step of several classes: as many of a lower one as others, or up to this total. A
# step of so many takes hardly longer than one of a single sequence.
SMALL_STEP = 8

DraftFunction = abc.Callable[[Sequence], tuple[int, ...]]
Limits = abc.Sequence[float]  # of each class: running sequences with those of the classes before
# Waiting sequences, and those that come next after each of them.
Candidates = abc.Iterator[tuple[Sequence, list["Candidates"]]]
ClientLimits = abc.Mapping[abc.Hashable, int]  # by client: tokens of its prompts in a step


class ContinuousScheduler:
    """`whole_prompts`: prompts run without chunks, for a model runner that keeps no blocks."""

    def __init__(
        self,
        pool: BlockPool,
        max_running: int,
        whole_prompts: bool = False,
    ) -> None:
        self.pool = pool
        self.max_running = max_running  # now: less while memory is short
        self.whole_prompts = whole_prompts
        self.running: list[Sequence] = []  # by priority, then by order of arrival
        self.num_waiting = 0
        self.preempted = 0  # in the last step
        self.admitted: list[Sequence] = []  # for the first time, in the last step
        # The last step had no room for an interactive request within its share.
        self.starved = False
        # Of each request and class, by order of arrival; and the first ones of each flow.
        self._waiting: dict[tuple[Priority, WorkOwner], list[Sequence]] = {}
        self._firsts: dict[Path, list[Sequence]] = {}
        self._paused: set[Sequence] = set()  # of those that wait
        # Of each class: running sequences, and slots kept for waiting ones.
        self._shares = [FairShare() for _ in Priority]
        self._capacity = max_running  # of these, in this step: less if memory is short
        self._max_running_limit = max_running
        self._turns = Turns()  # of those that wait
        # By their flows, at the start of the step: ranks that change with each admission would make
        # all others stale.
        self._step_turns: dict[Path, tuple[float, ...]] = {}
        # Clients that run nothing get no slot in this step, up to this share.
        self._blocked_share = 0.0
        # Sequences of each class, by order of arrival.
        self._live: list[OrderedDict[Sequence, None]] = [OrderedDict() for _ in Priority]
        self._promoted: dict[Priority, Sequence] = {}  # by the class that they had
        self._removed_any = False  # since the last step
        self._skipped_lower_classes = False  # in the last step
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
        queue = self._waiting.setdefault(_key_of(sequence), [])
        first = queue[0] if queue else None
        bisect.insort(queue, sequence)
        self._replace_first(first, queue[0])
        self._turns.enter(sequence.owner, sequence.priority)
        self.num_waiting += 1

    def _remove_waiting(self, sequence: Sequence) -> None:
        queue = self._waiting.get(_key_of(sequence), [])
        first = queue[0] if queue else None
        _remove(queue, sequence)
        self._replace_first(first, queue[0] if queue else None)
        self._turns.leave(sequence.owner, sequence.priority)
        self.num_waiting -= 1
        if not queue:
            del self._waiting[_key_of(sequence)]

    def _replace_first(self, old: Sequence | None, new: Sequence | None) -> None:
        """Replace the first waiting sequence of a request among those of its flow."""
        if old is new:
            return
        if old:
            firsts = self._firsts[_flow_of(old)]
            _remove(firsts, old)
            if not firsts:
                del self._firsts[_flow_of(old)]
        if new:
            bisect.insort(self._firsts.setdefault(_flow_of(new), []), new)

    def _add_running(self, sequence: Sequence) -> None:
        bisect.insort(self.running, sequence)
        self._shares[sequence.priority].take(sequence.owner)

    def _remove_running(self, sequence: Sequence) -> None:
        _remove(self.running, sequence)
        self._shares[sequence.priority].give_back(sequence.owner)

    def _release(self, sequence: Sequence) -> None:
        """Free its blocks. The step in flight may still write to them: any step that reuses them
        runs after it."""
        sequence.drop_placeholder()  # the same token is sampled when it is computed again
        sequence.paused = False
        self._paused.discard(sequence)
        if sequence.table is not None:
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
        doubling: int | None = None,
    ) -> list[Chunk]:
        """Return the next step's chunks. `budget`: how many prompt tokens it may have. `draft`
        proposes a sequence's next tokens. `spare_rows`: that take as long as an empty step.
        `resting` requests have no part in the step. `doubling`: the prompt tokens that take as long
        as a step without prompts; None: not limited."""
        self.preempted, self.admitted = 0, []
        if self._removed_any:  # there is more memory than when it was short
            self.max_running = min(self._max_running_limit, 2 * self.max_running)
            self._removed_any = False
        self._promote()
        limits = self._limits(spare_rows)
        active = [s for n, s in enumerate(self.running) if n < limits[s.priority]]
        idle = set(self.running[len(active) :])
        ready = [sequence for sequence in active if sequence.uncomputed == 1]
        sitting_out = {sequence for sequence in ready if sequence.owner in resting}
        sitting_out |= self._sitting_out([s for s in ready if s not in sitting_out], spare_rows)
        ready = [sequence for sequence in ready if sequence not in sitting_out]
        tables = {sequence: sequence.table for sequence in ready if self._make_room(sequence)}
        prefix_pending = self._admit_waiting(limits)
        decoding = [s for s, table in tables.items() if s.table is table and not s.paused]
        if prefix_pending:  # an idle sequence may be computing that prefix
            idle = {sequence for sequence in idle if sequence.uncomputed <= 1}
        sitting_out = {sequence for sequence in sitting_out if sequence.uncomputed == 1}
        without_prefill = idle.union(sitting_out, decoding)
        prompts = [s for s in self.running if s.uncomputed and s not in without_prefill]
        prompts = [sequence for sequence in prompts if sequence.owner not in resting]
        self._skipped_lower_classes = not prefix_pending and self._skips_lower_classes(
            prompts, are_cut=bool(idle)
        )
        if self._skipped_lower_classes:
            prompts, decoding = [
                [s for s in sequences if s.priority == Priority.INTERACTIVE]
                for sequences in (prompts, decoding)
            ]
        doubled: dict[abc.Hashable, int] = {}
        if doubling is not None:
            doubled = dict.fromkeys(_large_clients(prompts, decoding, budget), doubling)
        chunks: list[Chunk] = []
        if prompts:
            chunks = self._prefill(prompts, budget, prefix_pending, doubled)
        prefilled = {chunk.sequence.owner for chunk in chunks}
        self.starved |= any(
            s.priority == Priority.INTERACTIVE and s.owner not in prefilled for s in prompts
        )
        self._draft_slots = self.pool.states.max_drafts if self.pool.states else math.inf
        chunks = [self._decode(sequence, draft) for sequence in decoding if sequence.table] + chunks
        for chunk in chunks:
            if chunk.table:
                end, drafts = chunk.start + chunk.count, len(chunk.drafts)
                chunk.states = self.pool.plan_states(chunk.table, end, drafts)
        return chunks

    def _skips_lower_classes(self, prompts: list[Sequence], are_cut: bool) -> bool:
        """Return whether a step with these prompts runs without lower classes: one of them is
        interactive, the last step had lower classes, and those are cut or have prompts, too."""
        promoted = self._promoted.values()
        return (
            not self._skipped_lower_classes
            and (are_cut or any(s.priority != Priority.INTERACTIVE for s in prompts))
            and any(s.priority == Priority.INTERACTIVE and s not in promoted for s in prompts)
        )

    def _sitting_out(self, ready: list[Sequence], spare_rows: float) -> set[Sequence]:
        """Return the sequences that would more than double the time of a step beside other
        requests: all but the first of each request."""
        first: dict[WorkOwner, Sequence] = {}
        if len({sequence.owner for sequence in self.running}) > 1:
            ready = sorted(ready, key=lambda s: len(s.tokens) - s.prompt_len)
            for sequence in ready:
                first.setdefault(sequence.owner, sequence)
        if not first or len(ready) <= 2 * len(first) + spare_rows:
            return set()
        others = fair_order(s for s in ready if s is not first[s.owner])
        return set(itertools.islice(others, len(first) + int(spare_rows), None))

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

    def _limits(self, spare_rows: float) -> list[float]:
        """Return for each class how many sequences a step may have if the last is of this class."""
        limits: list[float] = []
        limit: float = self.max_running
        for priority in Priority:
            promoted = sum(before >= priority for before in self._promoted)
            if sum(map(len, self._live[:priority])) > promoted:  # there are others before it
                running = _num_before(self.running, priority)
                beside = running + (spare_rows if priority == Priority.BATCH else 0)
                limit = min(limit, max(SMALL_STEP, 2 * running, beside))
            limits.append(limit)
        return limits

    def _decode(self, sequence: Sequence, draft: DraftFunction | None) -> Chunk:
        """Return a decode chunk. Its drafts have their room for this step only, and come after all
        else has room. Drafting may remove sequences."""
        drafts, table = draft(sequence) if draft else (), sequence.table
        drafts = drafts[: int(min(len(drafts), self._draft_slots))]
        if drafts and not (table and self.pool.grow(table, len(sequence.tokens) + len(drafts))):
            drafts = ()
        self._draft_slots -= len(drafts)
        return Chunk(sequence, sequence.computed, 1, drafts)

    def _make_room(self, sequence: Sequence) -> bool:
        """Make room for one more token, by preemption if need be. Return False if the sequence
        itself is preempted or was before, for an older one."""
        tokens, block_size = len(sequence.tokens), self.pool.block_size
        while (table := sequence.table) and tokens > len(table.blocks) * block_size:
            if not self.pool.grow(table, tokens) and not self._release_paused(sequence):
                self._preempt(self._youngest_of_largest())
        return table is not None

    def _youngest_of_largest(self) -> Sequence:
        """Return the youngest sequence of the client and the request that run most, of those of the
        lowest class."""
        priority = self.running[-1].priority
        shares = self._shares[priority]
        youngest_first = itertools.takewhile(
            lambda s: s.priority == priority, reversed(self.running)
        )
        return max(
            youngest_first, key=lambda s: (shares.of_client(s.owner), shares.of_request(s.owner))
        )

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

    def candidates(
        self, blocked: abc.Container[tuple[abc.Hashable, int]] = ()
    ) -> abc.Iterator[Sequence]:
        """Yield waiting sequences in the order of admission: by priority; within the shares of
        their request and client, then beyond; by the turns of clients and flows; then by order of
        arrival. `blocked` requests are left out: their client, and how many sequences they run."""
        self._step_turns.clear()
        seen = {_key_of(sequence) for sequence in self.running}
        clients = {(priority, owner.client) for priority, owner in seen}
        heap: list[tuple[tuple[object, ...], Sequence, list[Candidates], Candidates | None]] = []

        def push(candidates: Candidates, others: Candidates | None = None) -> None:
            if (candidate := next(candidates, None)) is not None:
                sequence, later = candidate
                if candidates is not others:
                    later = [*later, candidates]
                heapq.heappush(heap, (self._rank(sequence), sequence, later, others))

        for key in seen & self._waiting.keys():
            push(self._of_request(key))
        for priority, client in clients:
            push(self._of_client(priority, client, seen))
        self._blocked_share = 0.0
        for priority in Priority:
            of_class = self._of_class(priority, clients, seen)
            push(of_class, of_class)
        while heap:
            rank, sequence, later, others = heap[0]
            is_blocked = self._blocked_key(sequence) in blocked
            if not is_blocked and (new_rank := self._rank(sequence)) != rank:
                heapq.heapreplace(heap, (new_rank, sequence, later, others))
                continue  # the shares have changed
            heapq.heappop(heap)
            if others:
                push(others, others)
            if is_blocked:
                continue  # as are the later ones, of the same client
            seen.add(_key_of(sequence))
            for candidates in later:
                push(candidates)
            yield sequence

    # Each yields sequences in the order of admission, and what follows each of them: the next one
    # is not looked for before. Requests that were seen are left out.

    def _of_class(
        self, priority: Priority, without: abc.Container[object], seen: abc.Container[object]
    ) -> Candidates:
        for client, share in self._turns.in_order((priority,)):
            if self._blocked_share >= self._turns.max_weight((priority,)):
                return
            if (priority, client) not in without and share > self._blocked_share:
                flows = self._of_client(priority, client, seen)
                for first, later in itertools.islice(flows, 1):
                    yield first, [*later, flows]

    def _of_client(
        self, priority: Priority, client: abc.Hashable, seen: abc.Container[object]
    ) -> Candidates:
        for flow, _ in self._turns.in_order((priority, client)):
            requests = self._of_flow((priority, client, flow), seen)
            for first, later in itertools.islice(requests, 1):
                yield first, [*later, requests]

    def _of_flow(self, path: Path, seen: abc.Container[object]) -> Candidates:
        first: Sequence | None = None
        while firsts := self._firsts.get(path):
            start = bisect.bisect_right(firsts, first) if first else 0
            unseen = (s for s in itertools.islice(firsts, start, None) if _key_of(s) not in seen)
            if (first := next(unseen, None)) is None:
                return
            yield first, [self._of_request(_key_of(first), 1)]

    def _of_request(self, key: tuple[Priority, WorkOwner], start: int = 0) -> Candidates:
        for sequence in self._waiting[key][start : self.max_running]:
            yield sequence, []

    def _blocked_key(self, sequence: Sequence) -> tuple[abc.Hashable, int]:
        owner = sequence.owner
        return owner.client, self._shares[sequence.priority].of_request(owner)

    def _rank(self, sequence: Sequence) -> tuple[object, ...]:
        shares = self._shares[sequence.priority]
        excess = shares.excess(sequence.owner, self._capacity)
        key = _flow_of(sequence)
        if (turn := self._step_turns.get(key)) is None:
            turn = self._turns.rank(sequence.owner, sequence.priority)
            self._step_turns[key] = turn
        return sequence.priority, excess, turn, sequence.number

    def _admit_waiting(self, limits: Limits) -> bool:
        """Admit sequences in order while there is room or others yield, those of each class while
        fewer than its limit run. Return whether an interactive one waits for a pending prefix."""
        self.starved = prefix_pending = False
        self._capacity = self.max_running
        kept: list[Sequence] = []  # those that cannot run yet keep their slots
        blocked: set[tuple[abc.Hashable, int]] = set()
        for sequence in self.candidates(blocked):
            owner, shares = sequence.owner, self._shares[sequence.priority]
            is_interactive = sequence.priority == Priority.INTERACTIVE
            if not is_interactive and (self.preempted or blocked):
                break  # it would idle, or was preempted in this very step
            has_slot = self._has_slot(sequence, kept, limits)
            if (has_slot and not blocked) or shares.yields_to(owner, self._capacity):
                ready = not sequence.multimodal or sequence.multimodal.ready
                matched = self._match(sequence) if ready else None
                if matched is None:  # the rest of its prefix is being computed, or its images are
                    prefix_pending |= ready and is_interactive
                    if has_slot:
                        kept.append(sequence)
                        shares.take(owner)
                    continue
                if self._admit_or_reclaim(sequence, matched, kept, limits):
                    continue
            elif not shares.of_client(owner):
                self._blocked_share = max(self._blocked_share, owner.share)
            blocked.add(self._blocked_key(sequence))
            self.starved |= is_interactive and not shares.excess(owner, self.max_running)[0]
        for sequence in kept:
            self._shares[sequence.priority].give_back(sequence.owner)
        return prefix_pending

    def _has_slot(self, sequence: Sequence, kept: list[Sequence], limits: Limits) -> bool:
        running = _num_before(self.running, sequence.priority + 1)
        return running < limits[sequence.priority] and running + len(kept) < self.max_running

    def _admit_or_reclaim(
        self, sequence: Sequence, matched: list[int], kept: list[Sequence], limits: Limits
    ) -> bool:
        """Admit a sequence, if need be by taking slots and blocks from others."""
        while True:
            if not self._has_slot(sequence, kept, limits):
                if not self._take_slot(sequence, kept):
                    return False
            elif len(self.running) + len(kept) >= self.max_running:
                self._preempt(self._youngest_of_largest())  # of a lower class
            elif self._admit(sequence, matched):
                return True
            elif not self._take_blocks(sequence):
                return False

    def _take_slot(self, sequence: Sequence, kept: list[Sequence]) -> bool:
        """Take a slot that has to be yielded: one that is kept, or of a running sequence. Return
        False if there is none."""
        shares = self._shares[sequence.priority]
        if (owner := shares.yields_to(sequence.owner, self.max_running)) is None:
            return False
        if youngest := _youngest(kept, owner, shares, sequence.priority):
            kept.remove(youngest)
            shares.give_back(youngest.owner)
        elif youngest := _youngest(self.running, owner, shares, sequence.priority):
            self._pause(youngest)
        return True

    def _take_blocks(self, sequence: Sequence) -> bool:
        """Free blocks of a paused sequence, of one of a lower class, or of one that has to yield.
        Return False if there is none."""
        if self._release_paused(sequence):
            return True
        priority = sequence.priority
        if self.running and self.running[-1].priority > priority:
            self._preempt(self._youngest_of_largest())
            return True
        self._capacity = min(self._capacity, len(self.running))
        shares = FairShare()  # of memory: sequences that keep a slot have none
        for running in self.running:
            if running.priority == priority:
                shares.take(running.owner)
        if (owner := shares.yields_to(sequence.owner, self._capacity)) is None:
            return False
        youngest = _youngest(self.running, owner, shares, priority)
        assert youngest
        self._preempt(youngest)
        return True

    def _match(self, sequence: Sequence) -> list[int] | None:
        """Return the blocks of its cached prefix; None if more of that is being computed. The key
        of its last block is kept, since matching again takes as long as the prefix is."""
        if sequence.scores_prompt or sequence.paused:
            return []
        if not self.pool.is_awaited(sequence.pending_prefix):
            matched, sequence.pending_prefix = self.pool.match(
                sequence.contents, sequence.cache_namespace
            )
            if sequence.pending_prefix is None:
                usable = self.pool.resumable(matched)
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
            reserve = min(len(self.running), self.pool.num_blocks // RESERVE_DIVISOR)
            checkpoints = self._checkpoints(sequence) if self.pool.states else ()
            sequence.table = self.pool.open(contents, matched, reserve, namespace, checkpoints)
            if sequence.table is None:
                return False
            sequence.computed = len(matched) * self.pool.block_size
            if sequence.cached is None:  # recomputed tokens are not charged
                self._turns.charge(sequence.owner, sequence.priority, sequence.uncomputed)
        self._remove_waiting(sequence)
        sequence.paused = False
        self._paused.discard(sequence)
        if sequence.cached is None:
            sequence.cached = sequence.computed
            sequence.tokens = sequence.tokens.copy()  # it is about to append to them
            self.admitted.append(sequence)
        self._add_running(sequence)
        return True

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
        if self.whole_prompts:
            fitting = _fitting_whole(ranked, budget)
            return [_prefill_chunk(sequence, wanted[sequence]) for sequence in fitting]
        groups: abc.Iterable[abc.Iterable[Sequence]] = [ranked]
        if not prefix_pending:
            groups = (group for _, group in itertools.groupby(ranked, lambda s: s.priority))
        chunks: list[Chunk] = []
        for group in groups:
            of_group = {sequence: wanted[sequence] for sequence in group}
            shares = _divide(of_group, ranked[0], budget, limits)
            budget -= sum(shares.values())
            chunks += (_prefill_chunk(s, share) for s, share in shares.items() if share)
        return chunks

    # ── after the step ──

    def append_placeholders(self, chunks: abc.Sequence[Chunk]) -> None:
        """Let sequences be scheduled again while their chunks, which have no drafts, run: each that
        samples a token gets a placeholder for it, unless that is its last."""
        row = 0
        for chunk in chunks:
            sequence = chunk.sequence
            max_len = sequence.prompt_len + sequence.max_tokens
            if chunk.is_active and chunk.table:
                sequence.computed = chunk.end
                self.pool.commit_states(chunk.table, chunk.end)
                if chunk.reaches_end and not chunk.deferred and len(sequence.tokens) + 1 < max_len:
                    sequence.append_placeholder(row)
            row += chunk.to_sample

    def advance(self, chunk: Chunk, sampled: abc.Sequence[int] = ()) -> None:
        """Record that the chunk has run. `sampled`: the accepted drafts and one token more; empty
        if the chunk ends before its sequence does."""
        sequence = chunk.sequence
        assert sequence.table is not None
        if sequence.scores_prompt:
            sequence.scored = max(sequence.scored, chunk.to_score.stop)
        sequence.computed = chunk.end + max(0, len(sampled) - 1)
        self.pool.commit_states(sequence.table, sequence.computed)
        if sampled:
            self._turns.charge(sequence.owner, sequence.priority, len(sampled))
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


def _fitting_whole(ranked: list[Sequence], budget: int) -> list[Sequence]:
    """Return the prompts that run whole: at least one, and more while all fit."""
    in_turn = list(fair_order(ranked))
    totals = itertools.accumulate(len(sequence.tokens) for sequence in in_turn)
    return in_turn[: max(1, sum(total <= budget for total in totals))]


def _key_of(sequence: Sequence) -> tuple[Priority, WorkOwner]:
    return sequence.priority, sequence.owner


def _flow_of(sequence: Sequence) -> Path:
    return sequence.priority, sequence.owner.client, sequence.owner.flow


def _remove(queue: list[Sequence], sequence: Sequence) -> None:
    """Remove a sequence from a sorted queue; ValueError if it is not there."""
    index = bisect.bisect_left(queue, sequence)
    if queue[index : index + 1] != [sequence]:
        raise ValueError("this sequence is not scheduled")
    del queue[index]


def _youngest(
    queue: list[Sequence], owner: WorkOwner, shares: FairShare, priority: Priority
) -> Sequence | None:
    """Return the youngest sequence of a request, or of another one of its client that holds as
    much."""
    held = shares.of_request(owner)
    for sequence in reversed(queue):
        is_equal = sequence.owner.client == owner.client and sequence.priority == priority
        if is_equal and shares.of_request(sequence.owner) == held:
            return sequence
    return None


def _large_clients(
    prompts: abc.Iterable[Sequence], decoding: abc.Iterable[Sequence], budget: int
) -> list[abc.Hashable]:
    """Return the clients whose prompts take several steps beside another client that decodes or
    whose prompts fit into one."""
    needed, served = Counter[abc.Hashable](), {sequence.owner.client for sequence in decoding}
    for sequence in prompts:
        needed[sequence.owner.client] += sequence.uncomputed
    served |= {client for client, tokens in needed.items() if tokens <= budget}
    return [client for client, tokens in needed.items() if tokens > budget and served - {client}]


def _divide(
    wanted: dict[Sequence, int], first: Sequence, budget: int, client_limits: ClientLimits
) -> dict[Sequence, int]:
    """Divide a step's budget. The first sequence gets half; the rest goes to the requests that need
    the fewest tokens. Several requests are divided in three rounds: within the shares of request
    and client, within the share of the request, then without shares; all within the limits of
    clients."""
    shares, held, of_request = dict.fromkeys(wanted, 0), FairShare(), Counter[WorkOwner]()
    for sequence in wanted:
        of_request[sequence.owner] += sequence.uncomputed
    by_need = sorted(wanted.items(), key=lambda w: (of_request[w[0].owner], w[0].uncomputed))
    turns = by_need
    if first in wanted:
        turns = [(first, min(wanted[first], -(-budget // 2))), *by_need]
    limits = [(turns, budget, False)]
    if len(of_request) > 1:
        request = request_share(budget)
        limits = [(turns, request, True), (turns, request, False), (by_need, budget, False)]
    for sequences, request, by_client in limits:
        for sequence, max_tokens in sequences:
            owner = sequence.owner
            client = client_share(budget, owner.share) if by_client else budget
            more = min(
                max_tokens - shares[sequence],
                budget - held.total,
                request - held.of_request(owner),
                min(client, client_limits.get(owner.client, budget)) - held.of_client(owner),
            )
            if more > 0:
                shares[sequence] += more
                held.take(owner, more)
    return shares


def _prefill_chunk(sequence: Sequence, count: int) -> Chunk:
    """Return a chunk of about `count` tokens: spans with bidirectional attention stay whole."""
    start, multimodal = sequence.computed, sequence.multimodal
    return Chunk(sequence, start, multimodal.align_chunk(start, count) if multimodal else count)


def _num_before(queue: list[Sequence], priority: int) -> int:
    """Return how many sequences of a sorted queue are of a class before this one."""
    return bisect.bisect_left(queue, priority, key=lambda sequence: sequence.priority)


# Limits of a step's prompt tokens, by device.
MAX_PREFILL_TOKENS = {"cpu": 2048, "cuda": 8192}
MAX_PREFILL_TOKENS_WHOLE = {"cpu": 4096, "cuda": 32768}
# The longest time that prompts add to a step, and the fewest of their tokens in it: while sequences
# decode, and while none does. A GPU computes a few thousand in its time, which is enough to use it.
MAX_PREFILL_S = {"cpu": 0.3, "cuda": 0.1}
MIN_PREFILL_TOKENS = 32
MIN_PREFILL_TOKENS_ALONE = {"cpu": 512, "cuda": 8192}
# More than the latter run hardly faster each: a step has more only while prompts add less than this
# to it, since a request that arrives waits for its end. Prompts that run whole are not limited.
MAX_LARGE_PREFILL_S = 0.05
NEW_SHARE = 0.3  # weight of the latest step in the measured time per token
# A row of a step without prompts is assumed to add this part of its constant time, until steps of
# different sizes show it; and the factor of their weight with each later step.
ROW_SHARE, DECAY = 0.02, 0.98
MAX_SLOWDOWN = 4  # a step counts as so many times its expected time at most


class PrefillBudget:
    """Chooses the number of prompt tokens of a step, by the times of earlier steps: few enough not
    to stall streams. It measures the time that a prompt token adds, not a token's share of the
    whole step: most of a small step is reading the weights."""

    def __init__(self, device_type: str, whole_prompts: bool = False) -> None:
        limits = MAX_PREFILL_TOKENS_WHOLE if whole_prompts else MAX_PREFILL_TOKENS
        self.max_tokens = limits[device_type]
        self._max_s = MAX_PREFILL_S[device_type]
        self._whole_prompts = whole_prompts
        self._min_unmeasured = MIN_PREFILL_TOKENS_ALONE[device_type]
        self._min_alone = self.max_tokens if whole_prompts else self._min_unmeasured
        self.decode_s = 0.0  # of the last step without prompts, set by the caller
        self._token_s = 0.0  # the time that a prompt token adds; 0: not measured yet

    def prompt_tokens(
        self, streaming: bool, spent_s: float = 0.0, max_turn_s: float = math.inf
    ) -> int:
        """Return the next step's budget. `streaming`: sequences are decoding, or other models
        have work. `spent_s`: time that the step has taken already; `max_turn_s`: that it should
        take at most."""
        left_s = max(0.0, min(self._max_s, max_turn_s) - spent_s)
        fitting = int(left_s / self._token_s) if self._token_s else 0
        minimum = self._min_alone
        if self._whole_prompts and self._token_s:
            minimum = max(self._min_unmeasured, int(MAX_TURN_ALONE_S / self._token_s))
        if streaming:
            minimum = MIN_PREFILL_TOKENS if self._token_s else self._min_unmeasured
        limit = self.max_tokens
        if self._token_s and not self._whole_prompts:
            limit = min(limit, max(self._min_unmeasured, int(MAX_LARGE_PREFILL_S / self._token_s)))
        return min(limit, max(minimum, fitting))

    @property
    def doubling_tokens(self) -> int:
        """The prompt tokens that take as long as a step without prompts, or a few more."""
        fitting = int(self.decode_s / self._token_s) if self._token_s else 0
        return max(MIN_PREFILL_TOKENS, fitting)

    def learn(self, prompt_tokens: int, other_rows: int, seconds: float) -> None:
        """Record the time of a step of `prompt_tokens` and of `other_rows` that decoded."""
        if prompt_tokens >= MIN_PREFILL_TOKENS:
            added_s = max(0.0, seconds - self.decode_s) if other_rows else seconds
            token_s = added_s / prompt_tokens
            # without paged attention the next chunk of the prompt takes longer still
            is_rising = self._whole_prompts and token_s > self._token_s
            share = NEW_SHARE if self._token_s and not is_rising else 1.0
            self._token_s += share * (token_s - self._token_s)


class RowCost:
    """Measures how much longer a row makes a step without prompts."""

    def __init__(self) -> None:
        self._sums = [0.0] * 5  # over steps: of 1, rows, seconds, rows², rows · seconds

    def learn(self, rows: int, seconds: float) -> float:
        """Record the time of a step. Return it, less for one that other threads have delayed."""
        if self._sums[0]:
            constant_s, row_s = self._fit()
            seconds = min(seconds, MAX_SLOWDOWN * (constant_s + row_s * rows))
        new = (1.0, rows, seconds, rows * rows, rows * seconds)
        self._sums = [DECAY * old + added for old, added in zip(self._sums, new, strict=True)]
        return seconds

    @property
    def spare_rows(self) -> float:
        """How many rows take as long as a step's constant part."""
        if not self._sums[0]:
            return 1 / ROW_SHARE
        constant_s, row_s = self._fit()
        return constant_s / row_s if row_s else math.inf

    def _fit(self) -> tuple[float, float]:
        """Return the constant time of a step and that of a row, by least squares. The assumed share
        weighs as much as one step that is as far from the mean as the mean from zero: steps of
        similar sizes differ by noise alone."""
        steps, rows, seconds, squares, products = self._sums
        variance, covariance = squares - rows * rows / steps, products - rows * seconds / steps
        mean_rows, mean_s = rows / steps, seconds / steps
        assumed_s, weight = mean_s / (1 / ROW_SHARE + mean_rows), mean_rows * mean_rows
        row_s = max(0.0, (covariance + assumed_s * weight) / (variance + weight))
        return max(0.0, mean_s - row_s * mean_rows), row_s
