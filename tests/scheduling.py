"""Random schedules, and a fake model that knows the contents of every slot in memory."""

import random
import zlib
from collections import Counter, abc
from collections.abc import Collection, Iterable
from functools import cache, partial
from itertools import takewhile

from batching import scheduler
from batching.block_pool import BlockPool, BlockTable
from batching.fair_share import NO_OWNER, Priority, WorkOwner
from batching.scheduler import RESERVE_DIVISOR, ContinuousScheduler, _holders
from batching.sequence import Chunk, Sequence
from batching.state_pool import NO_SLOT, SequenceState, StatePool

TOKENS = 3  # so few that prefixes are often equal by chance
NOTHING = 0
BROKEN = -1


def assert_sound(pool: BlockPool, tables: Collection[BlockTable]) -> None:
    """Check the pool's state for consistency, and with the open tables."""
    users = [0] * pool.num_blocks
    for table in tables:
        assert len(set(table.blocks)) == len(table.blocks)
        for block in table.blocks:
            users[block] += 1
    assert pool._ref_counts == users
    fresh = range(pool._fresh, pool.num_blocks)
    idle = [block for block in (*pool._empty, *pool._cached, *fresh) if not users[block]]
    assert sorted(idle) == [block for block, count in enumerate(users) if not count]
    assert len(idle) == pool.free
    assert pool.used + pool.free == pool.num_blocks
    named = {block: key for block, key in enumerate(pool._key_of) if key is not None}
    assert {**pool._computed, **pool.computing} == {key: block for block, key in named.items()}
    assert not pool._computed.keys() & pool.computing.keys()
    assert all(users[block] for block in pool.computing.values())
    if pool.states:
        assert_sound_states(pool, pool.states, [table.state for table in tables if table.state])


def assert_sound_states(
    pool: BlockPool, states: StatePool, of_sequences: Collection[SequenceState]
) -> None:
    assert states.sequences == len(of_sequences) <= states.max_sequences
    users = [0] * states.num_slots
    for state in of_sequences:
        for slot in (
            *(state.current, state.target, *state.pending.values()),
            *state.drafts.values(),
        ):
            users[slot] += slot != NO_SLOT
        assert state.target != state.current
    for slot in states._checkpoints.values():
        users[slot] += 1
    assert states._ref_counts == users
    assert states.used == sum(map(bool, users))
    assert sorted(states._empty) == [s for s in range(states._fresh) if not users[s]]
    pending = sum(len(state.pending) for state in of_sequences)
    assert states._pending == pending
    assert pending + len(states._checkpoints) <= states.max_checkpoints
    registered = {pool._prefix_of[block] for block in pool._computed.values()}
    computing = {pool._prefix_of[block] for block in pool.computing.values()}
    assert states._checkpoints.keys() <= registered | computing
    assert states.planned <= computing


def following(tokens: abc.Sequence[int]) -> int:
    return zlib.crc32(bytes(tokens)) % TOKENS


class FakeModel:
    """Holds for every slot in memory the exact prefix whose keys and values are there."""

    def __init__(self, pool: BlockPool) -> None:
        self.size = pool.block_size
        self.memory = [NOTHING] * (pool.num_blocks * pool.block_size)
        self.states = [BROKEN] * (pool.states.num_slots if pool.states else 0)
        self._numbers: dict[tuple[int, int], int] = {}

    def prefixes(self, tokens: Iterable[int]) -> list[int]:
        """Return a number for each prefix, equal for equal tokens only."""
        numbers = [NOTHING]
        for token in tokens:
            numbers.append(self._numbers.setdefault((numbers[-1], token), len(self._numbers) + 1))
        return numbers[1:]

    def run(
        self,
        chunks: abc.Sequence[Chunk],
        broken: abc.Sequence[Sequence] = (),
        sampled: abc.Sequence[int] = (),
    ) -> None:
        """Read for all chunks before any writes: a chunk does not see another's part of the step.
        `sampled`: the tokens of the step before, for placeholders."""
        written: dict[int, int] = {}
        written_states: dict[int, int] = {}
        for chunk in chunks:
            sequence = chunk.sequence
            assert sequence.table is not None
            end = chunk.start + chunk.width
            tokens = sequence.tokens[: chunk.start + chunk.count]
            known = [sampled[-1 - token] if token < 0 else token for token in tokens]
            prefixes = self.prefixes([*known, *chunk.drafts])
            slots = [
                block * self.size + i for block in sequence.table.blocks for i in range(self.size)
            ]
            assert [self.memory[slot] for slot in slots[: chunk.start]] == prefixes[: chunk.start]
            for slot, prefix in zip(slots[chunk.start : end], prefixes[chunk.start :], strict=True):
                assert slot not in written
                written[slot] = BROKEN if sequence in broken else prefix
            if self.states:
                self._run_states(chunk, [NOTHING, *prefixes], written_states)
                if sequence in broken:
                    written_states |= {segment.target: BROKEN for segment in chunk.states}
        for slot, prefix in written_states.items():
            self.states[slot] = prefix
        for slot, prefix in written.items():
            self.memory[slot] = prefix

    def _run_states(
        self, chunk: Chunk, prefixes: abc.Sequence[int], written: dict[int, int]
    ) -> None:
        """Run its segments one after another; none writes a slot that another one reads."""
        position = chunk.start
        before: dict[int, int] = {}  # of this chunk
        for tokens, source, target in chunk.states:
            assert tokens > 0
            assert target not in written
            state = before.get(source, self.states[source]) if source != NO_SLOT else NOTHING
            assert state == prefixes[position]
            position += tokens
            before[target] = written[target] = prefixes[position]
        assert position == chunk.start + chunk.width


class Job:
    """A request for `count` tokens, and its expected output."""

    def __init__(
        self, prompt: list[int], count: int, reuse: bool, priority: Priority, owner: WorkOwner
    ) -> None:
        # the step after its last token ends it
        self.sequence = Sequence(
            prompt,
            max_tokens=count + 1,
            scores_prompt=not reuse,
            priority=priority,
            owner=owner,
            history_len=len(prompt) - len(prompt) % 7,
        )
        self.count = count
        self.expected = list(prompt)
        for _ in range(count):
            self.expected.append(following(self.expected))

    @property
    def remaining(self) -> int:
        return len(self.expected) - len(self.sequence.tokens)

    def sample(self, drafts: abc.Sequence[int]) -> list[int]:
        """Return what the engine passes to `advance`: the right drafts and one token more."""
        tokens: list[int] = []
        for draft in (*drafts, None):
            if len(tokens) == self.remaining:
                break
            tokens.append(following([*self.sequence.tokens, *tokens]))
            if tokens[-1] != draft:
                break
        return tokens


class Simulation:
    """Random arrivals, cancellations and failures, checked at every step. `is_recurrent`: the model
    has recurrent layers."""

    def __init__(self, seed: int, is_recurrent: bool = False) -> None:
        self.chance = chance = random.Random(seed)
        self.max_len = chance.randint(2, 44)  # prompt and output
        size = chance.choice((1, 2, 4, 16))
        blocks = -(-self.max_len // size)
        count = int(blocks * chance.choice((1, 1.3, 2, 3, 8)))
        running = chance.choice((1, 3, 8, 16))
        states = None
        if is_recurrent:
            states = StatePool(max(1, running - seed % 3 * 2), seed % 7 * 2, seed % 5 * 2)
        self.pool = BlockPool(count, size, fresh_fraction=(0, 0.3, 1)[seed % 3], states=states)
        self.scheduler = ContinuousScheduler(self.pool, running)
        self.model = FakeModel(self.pool)
        self.budget = chance.choice((2, 8, 30, 200))
        self.prefixes = [self._tokens(self.max_len) for _ in range(3)]
        self.to_come = chance.randint(1, 15)
        self.arrivals = chance.choice((0.2, 0.5, 0.9))  # probability of another before a step
        self.cancellations = chance.choice((0, 0, 0.02, 0.1))  # probability per job and step
        self.low = chance.choice((0, 0, 0.5, 0.9))  # probability per job of a low priority
        self.low_classes = ([Priority.BATCH], [Priority.BACKGROUND], [*Priority][1:])[seed % 3]
        self.clients = chance.choice((0, 0, 0, 1, 2, 4))  # 0: all jobs belong to one request
        self.live: list[Job] = []
        self.jobs: dict[Sequence, Job] = {}  # finished ones too
        self.past: list[list[int]] = [[0]]
        self.seen: Counter[str] = Counter()
        self.ahead = bool(seed % 2)  # schedule a step before the results of the last
        self.in_flight: list[tuple[Chunk, list[int]]] = []  # with the tokens of each

    def play(self) -> None:
        steps = work = 0
        while self.to_come or self.live:
            while self.to_come and self.chance.random() < self.arrivals:
                self._arrive()
            work = max(work, steps + sum(len(job.expected) for job in self.live))
            if self.live:
                self._step()
            steps += 1
            assert steps < 1000 + 2 * work
        assert self.pool.used == 0
        assert_sound(self.pool, [])
        whole = self.pool.open([-1] * self.pool.num_blocks * self.pool.block_size, [])
        assert whole is not None  # no block stays registered when its memory is needed
        self.pool.close(whole)
        assert not self.pool._computed
        assert not self.pool.states or not self.pool.states.used

    def _tokens(self, max_len: int) -> list[int]:
        return [self.chance.randrange(TOKENS) for _ in range(self.chance.randint(1, max_len))]

    def _arrive(self) -> None:
        kind = self.chance.randrange(4)
        prompt = self._tokens(self.max_len)
        if kind == 1:
            prompt = self.chance.choice(self.prefixes) + prompt
        elif kind == 2:  # continues an earlier conversation
            prompt = self.chance.choice(self.past) + prompt
        elif kind == 3:
            prompt = self.chance.choice(self.past)
        prompt = prompt[: self.max_len - 1]
        count = self.chance.randint(0, self.max_len - len(prompt))
        reuse = self.chance.random() < 0.85
        self.past.append(prompt)
        owner = NO_OWNER
        if self.clients:
            owner = WorkOwner(self.chance.randrange(self.clients))
        for _ in range(self.chance.choice((1, 1, 1, 4, 9 if self.clients else 4))):
            priority = Priority.INTERACTIVE
            if self.chance.random() < self.low:
                priority = self.chance.choice(self.low_classes)
            job = Job(prompt, count, reuse, priority, owner)
            self.scheduler.add(job.sequence)
            self.live.append(job)
            self.jobs[job.sequence] = job
        self.to_come -= 1

    def _end(self, job: Job, event: str) -> None:
        state = "paused" if job.sequence.paused else "running" if job.sequence.table else "waiting"
        self.seen[f"{event} {state}"] += 1
        self.scheduler.remove(job.sequence)
        self.live.remove(job)
        self.past.append([*job.sequence.tokens])
        assert [*job.sequence.tokens] == job.expected[: len(job.sequence.tokens)]

    def _random_jobs(self) -> list[Job]:
        return [job for job in self.live if self.chance.random() < self.cancellations]

    def _draft(self, sequence: Sequence) -> tuple[int, ...]:
        job = self.jobs[sequence]
        if sequence.has_placeholder:
            return ()
        limit = min(job.remaining - 1, self.chance.choice((0, 0, 1, 2, 5)))
        right = job.expected[len(sequence.tokens) :][: max(0, limit)]
        wrong = self.chance.choice((0, 0.2, 1))
        return tuple((t + (self.chance.random() < wrong)) % TOKENS for t in right)

    def _step(self) -> None:
        for job in self._random_jobs():
            self._end(job, "cancelled while")
        if not self.live:
            return
        budget = self.chance.randint(1, self.budget)
        spare_rows = self.chance.randrange(4)
        before = Before(self.scheduler, spare_rows, alone=not self.clients)
        chunks = self.scheduler.schedule(budget, self._draft, spare_rows=spare_rows)
        before.check(chunks, budget, [job.sequence for job in self.live])
        self.seen["background preempted"] += before.background_preempted
        self.seen["background idle"] += len(before.idle)
        self.seen["paused"] += before.paused
        self.seen["resumed"] += before.resumed
        self._count(chunks)
        self.seen["waiting for a prefix"] += len(before.waiting_for_prefix)
        broken = [job for job in self._random_jobs() if self.chance.random() < 0.3]
        sampled = [sum(tokens) for chunk, tokens in self.in_flight if chunk.to_sample]
        self.model.run(chunks, [job.sequence for job in broken], sampled)
        self._process_results()
        for job in broken:
            if job in self.live:
                if job.sequence.table:
                    self.pool.unregister(job.sequence.table)
                self._end(job, "broken while")
        self.in_flight = [
            (chunk, self.jobs[chunk.sequence].sample(chunk.drafts) if chunk.reaches_end else [])
            for chunk in chunks
        ]
        if self.ahead and not any(chunk.drafts for chunk in chunks):
            self.scheduler.append_placeholders(chunks)
            self.seen["placeholders"] += sum(chunk.sequence.has_placeholder for chunk in chunks)
        else:
            self._process_results()

    def _process_results(self) -> None:
        in_flight, self.in_flight = self.in_flight, []
        for chunk, sampled in in_flight:
            if not chunk.is_active:
                self.seen["dropped"] += 1
                continue
            self.seen["drafts right"] += max(0, len(sampled) - 1)
            if chunk.reaches_end and not sampled:  # a step after its last token
                self._end(self.jobs[chunk.sequence], "finished while")
            else:
                self.scheduler.advance(chunk, sampled)

    def _count(self, chunks: abc.Sequence[Chunk]) -> None:
        self.seen["preempted"] += self.scheduler.preempted
        self.seen["cached"] += sum(s.cached or 0 for s in self.scheduler.admitted)
        self.seen["divided"] += sum(len(c.states) > 1 for c in chunks)
        self.seen["chunked"] += sum(c.start > 0 and c.count > 1 for c in chunks)
        self.seen["drafted"] += sum(len(chunk.drafts) for chunk in chunks)


def is_waiting_for_prefix(scheduler: ContinuousScheduler, sequence: Sequence) -> bool:
    is_pending = scheduler.pool.match(sequence.tokens)[1] is not None
    return is_pending and not (sequence.scores_prompt or sequence.paused)


def is_interactive(sequence: Sequence) -> bool:
    return sequence.priority == Priority.INTERACTIVE


class Before:
    """The state before a step, to check the step by. `alone`: all belongs to one request."""

    def __init__(self, scheduler: ContinuousScheduler, spare_rows: float, alone: bool) -> None:
        self.alone = alone
        scheduler._promote()  # as the step does first
        self.scheduler = scheduler
        self.background_preempted = False
        self.pool = pool = scheduler.pool
        self.running = list(scheduler.running)
        waiting = scheduler.waiting
        self.was_paused = [s for s in waiting if s.paused]
        self.paused = self.resumed = 0
        self.tables = {sequence: sequence.table for sequence in self.running}
        self.decoding = scheduler._pick_rows(spare_rows, ())
        ready = [s for s in self.running if s.uncomputed == 1]
        requests = {s.owner for s in self.running}
        if len(requests) > 1:
            assert len(self.decoding) <= 2 * len(requests) + spare_rows
        self.idle = [s for s in ready if s not in self.decoding]
        self.ending = [s for s in self.running if not s.uncomputed]
        self.new = [s for s in waiting if s.cached is None]
        self.free = pool.free
        self.needed = 0
        for sequence in self.running:
            assert sequence.table is not None
            more = pool.blocks_for(len(sequence.tokens)) - len(sequence.table.blocks)
            assert more >= 0  # it has no block that it does not need
            self.needed += more

    def check(self, chunks: list[Chunk], budget: int, live: list[Sequence]) -> None:
        self.waiting = self.scheduler.waiting
        self.awaits_prefix = cache(partial(is_waiting_for_prefix, self.scheduler))
        # those at the head of the queue
        self.waiting_for_prefix = list(takewhile(self.awaits_prefix, self.waiting))
        decodes = [c for c in chunks if c.sequence in self.decoding and self._stayed(c.sequence)]
        prompts = [chunk for chunk in chunks if chunk not in decodes]
        left = budget - sum(chunk.count for chunk in prompts)
        assert left >= 0
        self._check_budget(prompts, budget, left)
        assert not any(chunk.drafts for chunk in prompts)
        assert all(chunk.count == 1 for chunk in decodes)
        self._check_queues(live)
        self._check_chunks(chunks)
        if self.alone:
            self._check_preemption()
            self._check_admission(chunks)
        else:
            self._check_shares()

    def _stayed(self, sequence: Sequence) -> bool:
        table = sequence.table
        return table is not None and table is self.tables.get(sequence) and not sequence.paused

    def _check_shares(self) -> None:
        """No sequence waits while one of another client or request that holds more runs."""
        scheduler = self.scheduler
        self.paused = sum(sequence.paused for sequence in self.running)
        self.resumed = sum(sequence in scheduler.running for sequence in self.was_paused)
        if any(map(self.awaits_prefix, self.waiting)):
            return  # they are passed by others
        if scheduler.preempted:
            return  # those are admitted in the next step
        running = [s for s in scheduler.running if is_interactive(s)]
        by_request = Counter(s.owner for s in running)
        by_client = Counter(s.owner.client for s in running)
        waiting = sorted(filter(is_interactive, self.waiting), key=scheduler._rank)
        if len(scheduler.running) < scheduler.max_running:
            waiting = waiting[:1]  # memory is short, and none overtakes
        for sequence in waiting:
            client, request = sequence.owner.client, sequence.owner
            assert len(running) == len(scheduler.running)
            assert max(by_client.values(), default=0) <= by_client[client] + 1
            siblings = [n for o, n in by_request.items() if o.client == client]
            assert max(siblings, default=0) <= by_request[request] + 1

    def _check_queues(self, live: list[Sequence]) -> None:
        waiting, running = self.waiting, self.scheduler.running
        assert sorted(waiting + running, key=lambda s: s.number) == live  # none is lost
        for queue in (waiting, running):
            assert queue == sorted(queue)
        for priority in (Priority.BATCH, Priority.BACKGROUND):  # the oldest is promoted
            below = [s for s in live if s.priority == priority]
            promoted = self.scheduler._promoted.get(priority)
            assert promoted or not below
            assert not promoted or promoted in live
            assert all(promoted.number < s.number for s in below if promoted)
        counts = Counter(s.priority for s in live)
        sizes = [len(live) for live in self.scheduler._live]
        assert sizes == [counts[priority] for priority in Priority]
        assert len(running) <= self.scheduler.max_running
        assert_sound(self.pool, [s.table for s in (*running, *waiting) if s.table])
        assert all(s.paused or (s.table is None and s.computed == 0) for s in waiting)
        assert not any(s.paused for s in running)
        assert self.scheduler._held == Counter(holder for s in running for holder in _holders(s))
        assert self.scheduler.num_waiting == len(waiting)
        assert self.scheduler._paused == {s for s in waiting if s.paused}

    def _check_chunks(self, chunks: list[Chunk]) -> None:
        # those that had their turn may have been preempted for each other
        assert chunks or self.ending or self.scheduler.preempted
        in_step = [chunk.sequence for chunk in chunks]
        assert len(set(in_step)) == len(in_step)
        assert all(c.start == c.sequence.computed and c.count > 0 for c in chunks)
        assert all(
            not c.sequence.scores_prompt or c.count <= scheduler.MAX_SCORED_TOKENS for c in chunks
        )
        decoding = [s for s in self.decoding if self._stayed(s)]
        if not self.alone:
            if len(decoding) == len(self.decoding):
                assert {s.owner for s in decoding} <= {s.owner for s in in_step}
            return
        assert all(s in in_step for s in decoding)
        running = self.scheduler.running  # the oldest always advances
        oldest = {running[0], min(running, key=lambda s: s.number)}
        assert self.idle or oldest.intersection(in_step) or oldest.intersection(self.ending)
        if self.running and is_interactive(self.running[0]):
            assert self._stayed(self.running[0])

    def _check_budget(self, prompts: list[Chunk], budget: int, left: int) -> None:
        """Half of the budget is for the first, all of it is used, and no sequence is passed over
        for one that needs more or is in the background."""
        shares = {chunk.sequence: chunk.count for chunk in prompts}
        idle = [s for s in (*self.decoding, *self.idle, *self.ending) if self._stayed(s)]
        # those that sit out, also if they were preempted and admitted again
        again = self.idle if self.alone else [*self.idle, *self.decoding]
        idle += [s for s in again if s.uncomputed == 1]
        wanting = [s for s in self.scheduler.running if s not in idle]
        if not wanting:
            return
        if any(map(self.awaits_prefix, filter(is_interactive, self.waiting))):
            return
        assert not any(s in shares for s in self.idle if self._stayed(s))
        wanted = {
            s: min(s.uncomputed, scheduler.MAX_SCORED_TOKENS) if s.scores_prompt else s.uncomputed
            for s in wanting
        }
        unmet = [s for s in wanting if shares.get(s, 0) < wanted[s]]
        assert not (left and unmet)
        if not self.alone:
            return self._check_budget_shares(shares, unmet, wanting)
        assert shares[wanting[0]] >= min(wanted[wanting[0]], budget / 2)
        for s in unmet:
            served = [t for t in wanting[1:] if t in shares]
            assert all((t.priority, t.uncomputed) <= (s.priority, s.uncomputed) for t in served)

    def _check_budget_shares(
        self, shares: dict[Sequence, int], unmet: list[Sequence], wanting: list[Sequence]
    ) -> None:
        """The oldest has half of the budget, and no sequence is passed over for one whose client,
        request or prompt needs more."""
        of_client, of_request = Counter[object](), Counter[WorkOwner]()
        for sequence in wanting:
            of_client[sequence.owner.client] += sequence.uncomputed
            of_request[sequence.owner] += sequence.uncomputed

        def need(s: Sequence) -> tuple[float, ...]:
            owner = s.owner
            return s.priority, of_client[owner.client], of_request[owner], s.uncomputed, s.number

        for sequence in unmet:
            assert all(need(t) <= need(sequence) for t in shares if t is not wanting[0])

    def _check_preemption(self) -> None:
        """The youngest are preempted, and only for tokens without room; or sequences of a low
        priority, for one of a higher one."""
        stayed = [self._stayed(sequence) for sequence in self.running]
        assert stayed == sorted(stayed, reverse=True)
        paused = sum(sequence.paused for sequence in self.running)
        assert stayed.count(False) <= self.scheduler.preempted + paused
        if all(stayed) or self.needed > self.free:
            return
        self.background_preempted = True
        preempted = [s.priority for s in self.running if not self._stayed(s)]
        newcomers = [s for s in self.scheduler.running if not self._stayed(s)]
        first = min(s.priority for s in newcomers + self.waiting)
        assert first < min(preempted)

    def _check_admission(self, chunks: list[Chunk]) -> None:
        """Sequences are admitted in order, past those only whose prefix is being computed, and none
        waits while there is room."""
        scheduler, pool = self.scheduler, self.pool
        admitted = [s for s in scheduler.running if not self._stayed(s)]
        assert scheduler.admitted == [s for s in admitted if s in self.new]
        for sequence in scheduler.admitted:
            assert sequence.cached == sequence.computed < sequence.prompt_len
            assert not (sequence.scores_prompt and sequence.cached)
        passed = len(self.waiting_for_prefix)
        if passed >= min(len(self.waiting), scheduler.max_running):
            return
        first = self.waiting[passed]
        if not is_interactive(first) and scheduler.preempted:
            return
        if not scheduler.preempted:
            assert all(s < first for s in admitted)
        slots = scheduler.max_running - len(scheduler.running)
        matched = [] if first.scores_prompt else pool.match(first.tokens)[0]
        matched = matched[: pool.resumable(matched)]
        if pool.states and pool.states.sequences == pool.states.max_sequences:
            return
        unused = sum(pool._ref_counts[block] == 0 for block in matched)
        wanted = pool.blocks_for(len(first.tokens)) - len(matched) + unused
        for_drafts = sum(
            len(c.sequence.table.blocks) - pool.blocks_for(len(c.sequence.tokens))
            for c in chunks
            if c.sequence.table
        )
        reserve = min(len(scheduler.running), pool.num_blocks // RESERVE_DIVISOR)
        assert slots <= 0 or wanted + reserve > pool.free + for_drafts
