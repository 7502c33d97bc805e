"""Random schedules, and a model that knows what lies at every place in memory."""

import random
import zlib
from collections import Counter, abc
from collections.abc import Collection, Iterable
from itertools import takewhile

from batching import scheduler
from batching.block_pool import BlockPool, BlockTable
from batching.scheduler import RESERVE_DIVISOR, ContinuousScheduler
from batching.sequence import Chunk, Sequence, is_placeholder, row_of

WORDS = 3  # so few that prefixes are often equal by chance
NOTHING = 0
BROKEN = -1


def assert_sound(pool: BlockPool, tables: Collection[BlockTable]) -> None:
    """The books agree with each other and with the tables that are open."""
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
    assert all(users[block] for block in pool.computing.values())  # whoever promises is there


def following(tokens: abc.Sequence[int]) -> int:
    return zlib.crc32(bytes(tokens)) % WORDS


class FakeModel:
    """Holds for every place in memory the exact prefix whose keys and values lie there."""

    def __init__(self, pool: BlockPool) -> None:
        self.size = pool.block_size
        self.memory = [NOTHING] * (pool.num_blocks * pool.block_size)
        self._numbers: dict[tuple[int, int], int] = {}

    def prefixes(self, tokens: Iterable[int]) -> list[int]:
        """A number for each prefix, the same for the same tokens only."""
        made = [NOTHING]
        for token in tokens:
            made.append(self._numbers.setdefault((made[-1], token), len(self._numbers) + 1))
        return made[1:]

    def run(
        self,
        chunks: abc.Sequence[Chunk],
        broken: abc.Sequence[Sequence] = (),
        drawn: abc.Sequence[int] = (),
    ) -> None:
        """All read before any writes: a chunk cannot see what another does in the same step.
        `drawn`: by the rows of the step before, which was promised."""
        written: dict[int, int] = {}
        for chunk in chunks:
            sequence = chunk.sequence
            assert sequence.table is not None
            end = chunk.start + chunk.width
            tokens = sequence.tokens[: chunk.start + chunk.count]
            known = [drawn[row_of(token)] if is_placeholder(token) else token for token in tokens]
            prefixes = self.prefixes([*known, *chunk.drafts])
            places = [
                block * self.size + i for block in sequence.table.blocks for i in range(self.size)
            ]
            assert [self.memory[place] for place in places[: chunk.start]] == prefixes[
                : chunk.start
            ]
            for place, prefix in zip(
                places[chunk.start : end], prefixes[chunk.start :], strict=True
            ):
                assert place not in written
                written[place] = BROKEN if sequence in broken else prefix
        for place, prefix in written.items():
            self.memory[place] = prefix


class Job:
    """A request for `most` tokens, and what it must get."""

    def __init__(self, prompt: list[int], most: int, reuse: bool, background: bool) -> None:
        # the step after its last token ends it
        self.sequence = Sequence(
            prompt, max_tokens=most + 1, scores_prompt=not reuse, background=background
        )
        self.most = most
        self.expected = list(prompt)
        for _ in range(most):
            self.expected.append(following(self.expected))

    @property
    def left(self) -> int:
        return len(self.expected) - len(self.sequence.tokens)

    def sample(self, drafts: abc.Sequence[int]) -> list[int]:
        """What the engine hands to `advance`: drafts that are right and one token more."""
        taken: list[int] = []
        for draft in (*drafts, None):
            if len(taken) == self.left:
                break
            taken.append(following([*self.sequence.tokens, *taken]))
            if taken[-1] != draft:
                break
        return taken


class Simulation:
    """Arrivals, cancellations and failures at random, checked at every step."""

    def __init__(self, seed: int) -> None:
        self.chance = chance = random.Random(seed)
        self.longest = chance.randint(2, 44)  # prompt and output
        size = chance.choice((1, 2, 4, 16))
        fitting = -(-self.longest // size)
        count = int(fitting * chance.choice((1, 1.3, 2, 3, 8)))
        self.pool = BlockPool(count, size, fresh_fraction=(0, 0.3, 1)[seed % 3])
        self.scheduler = ContinuousScheduler(self.pool, chance.choice((1, 3, 8, 16)))
        self.model = FakeModel(self.pool)
        self.budget = chance.choice((2, 8, 30, 200))
        self.prefixes = [self._words(self.longest) for _ in range(3)]
        self.to_come = chance.randint(1, 15)
        self.bustle = chance.choice((0.2, 0.5, 0.9))  # how often somebody comes
        self.unrest = chance.choice((0, 0, 0.02, 0.1))  # how often somebody goes
        self.patience = chance.choice((0, 0, 0.5, 0.9))  # how often work is for the background
        self.live: list[Job] = []
        self.jobs: dict[Sequence, Job] = {}  # also those that are over
        self.past: list[list[int]] = [[0]]
        self.seen: Counter[str] = Counter()
        self.ahead = bool(seed % 2)  # steps are scheduled before the last has landed
        self.flight: list[tuple[Chunk, list[int]]] = []  # and what each is given

    def play(self) -> None:
        steps = work = 0
        while self.to_come or self.live:
            while self.to_come and self.chance.random() < self.bustle:
                self._arrive()
            work = max(work, steps + sum(len(job.expected) for job in self.live))
            if self.live:
                self._step()
            steps += 1
            assert steps < 1000 + 2 * work
        assert self.pool.used == 0
        assert_sound(self.pool, [])
        whole = self.pool.open([-1] * self.pool.num_blocks * self.pool.block_size, [])
        assert whole is not None  # nothing stays registered when the room is needed
        self.pool.close(whole)
        assert not self.pool._computed

    def _words(self, most: int) -> list[int]:
        return [self.chance.randrange(WORDS) for _ in range(self.chance.randint(1, most))]

    def _arrive(self) -> None:
        kind = self.chance.randrange(4)
        prompt = self._words(self.longest)
        if kind == 1:
            prompt = self.chance.choice(self.prefixes) + prompt
        elif kind == 2:  # an earlier conversation goes on
            prompt = self.chance.choice(self.past) + prompt
        elif kind == 3:
            prompt = self.chance.choice(self.past)
        prompt = prompt[: self.longest - 1]
        most = self.chance.randint(0, self.longest - len(prompt))
        reuse = self.chance.random() < 0.85
        self.past.append(prompt)
        for _ in range(self.chance.choice((1, 1, 1, 4))):
            job = Job(prompt, most, reuse, self.chance.random() < self.patience)
            self.scheduler.add(job.sequence)
            self.live.append(job)
            self.jobs[job.sequence] = job
        self.to_come -= 1

    def _end(self, job: Job, event: str) -> None:
        self.seen[f"{event} {'running' if job.sequence.table else 'waiting'}"] += 1
        self.scheduler.remove(job.sequence)
        self.live.remove(job)
        self.past.append([*job.sequence.tokens])
        assert [*job.sequence.tokens] == job.expected[: len(job.sequence.tokens)]

    def _leaving(self) -> list[Job]:
        return [job for job in self.live if self.chance.random() < self.unrest]

    def _draft(self, sequence: Sequence) -> tuple[int, ...]:
        job = self.jobs[sequence]
        if sequence.has_placeholder:
            return ()
        most = min(job.left - 1, self.chance.choice((0, 0, 1, 2, 5)))
        right = job.expected[len(sequence.tokens) :][: max(0, most)]
        wrong = self.chance.choice((0, 0.2, 1))
        return tuple((t + (self.chance.random() < wrong)) % WORDS for t in right)

    def _step(self) -> None:
        for job in self._leaving():
            self._end(job, "cancelled while")
        if not self.live:
            return
        before = Before(self.scheduler)
        budget = self.chance.randint(1, self.budget)
        chunks = self.scheduler.schedule(budget, self._draft)
        before.check(chunks, budget, [job.sequence for job in self.live])
        self.seen["gave way"] += before.gave_way
        self.seen["rested"] += len(before.resting)
        self._count(chunks)
        broken = [job for job in self._leaving() if self.chance.random() < 0.3]
        drawn = [sum(tokens) for chunk, tokens in self.flight if chunk.to_sample]
        self.model.run(chunks, [job.sequence for job in broken], drawn)
        self._land()
        for job in broken:
            if job in self.live:
                if job.sequence.table:
                    self.pool.unregister(job.sequence.table)
                self._end(job, "broken while")
        self.flight = [
            (chunk, self.jobs[chunk.sequence].sample(chunk.drafts) if chunk.reaches_end else [])
            for chunk in chunks
        ]
        if self.ahead and not any(chunk.drafts for chunk in chunks):
            self.scheduler.append_placeholders(chunks)
            self.seen["promised"] += sum(chunk.sequence.has_placeholder for chunk in chunks)
        else:
            self._land()

    def _land(self) -> None:
        flight, self.flight = self.flight, []
        for chunk, sampled in flight:
            if not chunk.runs:
                self.seen["dropped"] += 1
                continue
            self.seen["drafts right"] += max(0, len(sampled) - 1)
            self.scheduler.advance(chunk, sampled)
            if chunk.reaches_end and not sampled:  # a step after its last token
                self._end(self.jobs[chunk.sequence], "finished while")

    def _count(self, chunks: abc.Sequence[Chunk]) -> None:
        self.seen["preempted"] += self.scheduler.preempted
        self.seen["cached"] += sum(s.cached or 0 for s in self.scheduler.admitted)
        self.seen["chunked"] += sum(c.start > 0 and c.count > 1 for c in chunks)
        self.seen["drafted"] += sum(len(chunk.drafts) for chunk in chunks)
        self.seen["awaiting a prefix"] += len(awaiting(self.scheduler))


def awaiting(scheduler: ContinuousScheduler) -> list[Sequence]:
    """Those at the head of the line whose prefix is just being computed."""
    return list(
        takewhile(
            lambda s: not s.scores_prompt and scheduler.pool.match(s.tokens)[1], scheduler.waiting
        )
    )


class Before:
    """How things stood before a step, to judge the step by."""

    def __init__(self, scheduler: ContinuousScheduler) -> None:
        scheduler._promote()  # as the step will do first
        self.most = scheduler._background_limit()
        self.scheduler = scheduler
        self.gave_way = False
        self.pool = pool = scheduler.pool
        self.running = list(scheduler.running)
        self.tables = {sequence: sequence.table for sequence in self.running}
        self.decoding = [s for s in self.running[: self.most] if s.uncomputed == 1]
        self.resting = self.running[self.most :]
        self.landing = [s for s in self.running if not s.uncomputed]
        self.new = [s for s in scheduler.waiting if s.cached is None]
        self.free = pool.free
        self.wanted = 0
        for sequence in self.running:
            assert sequence.table is not None
            more = pool.blocks_for(len(sequence.tokens)) - len(sequence.table.blocks)
            assert more >= 0  # nobody sits on room that it does not need
            self.wanted += more

    def check(self, chunks: list[Chunk], budget: int, live: list[Sequence]) -> None:
        decodes = [c for c in chunks if c.sequence in self.decoding and self._stayed(c.sequence)]
        prompts = [chunk for chunk in chunks if chunk not in decodes]
        left = budget - sum(chunk.count for chunk in prompts)
        assert left >= 0
        self._check_shares(prompts, budget, left)
        assert not any(chunk.drafts for chunk in prompts)
        assert all(chunk.count == 1 for chunk in decodes)
        self._check_lines(live)
        self._check_chunks(chunks)
        self._check_who_is_put_back()
        self._check_who_is_admitted(chunks)

    def _stayed(self, sequence: Sequence) -> bool:
        return sequence.table is not None and sequence.table is self.tables.get(sequence)

    def _check_lines(self, live: list[Sequence]) -> None:
        waiting, running = self.scheduler.waiting, self.scheduler.running
        assert sorted(waiting + running, key=lambda s: s.number) == live  # nobody is lost
        for line in (waiting, running):
            assert line == sorted(line)
        behind = [s for s in live if s.background]
        ahead = [s for s in live if s is self.scheduler._promoted]
        assert all(ahead[0].number < s.number for s in behind)  # the oldest counts as none of them
        assert len(running) <= self.scheduler.max_running
        assert_sound(self.pool, [s.table for s in running if s.table])
        assert all(s.table is None and s.computed == 0 for s in waiting)

    def _check_chunks(self, chunks: list[Chunk]) -> None:
        assert chunks or self.landing
        at_work = [chunk.sequence for chunk in chunks]
        assert len(set(at_work)) == len(at_work)
        assert all(c.start == c.sequence.computed and c.count > 0 for c in chunks)
        assert all(
            not c.sequence.scores_prompt or c.count <= scheduler.MAX_SCORED_TOKENS for c in chunks
        )
        assert all(s in at_work for s in self.decoding if self._stayed(s))
        running = self.scheduler.running  # whatever happens, the oldest gets on
        oldest = {running[0], min(running, key=lambda s: s.number)}
        assert oldest.intersection(at_work) or oldest.intersection(self.landing)
        if self.running and not self.running[0].background:
            assert self._stayed(self.running[0])

    def _check_shares(self, prompts: list[Chunk], budget: int, left: int) -> None:
        """Half is for the first, nothing is left over, and nobody is passed over by one who needs
        more, or who is in the background."""
        shares = {chunk.sequence: chunk.count for chunk in prompts}
        idle = [s for s in (*self.decoding, *self.resting, *self.landing) if self._stayed(s)]
        wanting = [s for s in self.scheduler.running if s not in idle]
        if not wanting:
            return
        if any(not s.background for s in awaiting(self.scheduler)):
            return
        assert all(s.background for s in self.resting)
        assert not any(s in shares for s in self.resting if self._stayed(s))
        most = {
            s: min(s.uncomputed, scheduler.MAX_SCORED_TOKENS) if s.scores_prompt else s.uncomputed
            for s in wanting
        }
        unmet = [s for s in wanting if shares.get(s, 0) < most[s]]
        assert not (left and unmet)
        assert shares[wanting[0]] >= min(most[wanting[0]], budget / 2)
        for s in unmet:
            served = [t for t in wanting[1:] if t in shares]
            assert all((t.background, t.uncomputed) <= (s.background, s.uncomputed) for t in served)

    def _check_who_is_put_back(self) -> None:
        """The youngest, and only for tokens that have no room, or for one that is not in the
        background while they are."""
        stayed = [self._stayed(sequence) for sequence in self.running]
        assert stayed == sorted(stayed, reverse=True)
        assert stayed.count(False) == self.scheduler.preempted
        if all(stayed) or self.wanted > self.free:
            return
        self.gave_way = True
        assert all(s.background for s in self.running if not self._stayed(s))
        newcomers = [s for s in self.scheduler.running if not self._stayed(s)]
        assert not all(s.background for s in newcomers + self.scheduler.waiting)

    def _check_who_is_admitted(self, chunks: list[Chunk]) -> None:
        """In order of arrival; only those are passed over whose prefix is being computed. And
        nobody waits without need."""
        scheduler, pool = self.scheduler, self.pool
        admitted = [s for s in scheduler.running if not self._stayed(s)]
        assert scheduler.admitted == [s for s in admitted if s in self.new]
        for sequence in scheduler.admitted:
            assert sequence.cached == sequence.computed < sequence.prompt_len
            assert not (sequence.scores_prompt and sequence.cached)
        passed = len(awaiting(scheduler))
        if passed == len(scheduler.waiting):
            return
        first = scheduler.waiting[passed]
        if first.background and (scheduler.preempted or len(scheduler.running) >= self.most):
            return
        if not scheduler.preempted:
            assert all(s < first for s in admitted)
        places = scheduler.max_running - len(scheduler.running) - passed
        matched = [] if first.scores_prompt else pool.match(first.tokens)[0]
        wanted = pool.blocks_for(len(first.tokens)) - len(matched) + pool.count_unused(matched)
        for_drafts = sum(
            len(c.sequence.table.blocks) - pool.blocks_for(len(c.sequence.tokens))
            for c in chunks
            if c.sequence.table
        )
        reserve = min(len(scheduler.running), pool.num_blocks // RESERVE_DIVISOR)
        assert places <= 0 or wanted + reserve > pool.free + for_drafts
