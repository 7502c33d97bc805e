"""The scheduler: admission, chunks, preemption, background work and batches."""

import gc
import math
import random
import sys
from collections import Counter, abc
from typing import Any

import pytest

from batching import scheduler
from batching.block_pool import BlockPool
from batching.fair_share import Priority, WorkOwner
from batching.scheduler import RESERVE_DIVISOR, ContinuousScheduler
from batching.sequence import Batch, Chunk, PrefixedTokens, Sequence, TokenIds
from batching.state_pool import StatePool
from tests.matrix import matrix
from tests.scheduling import Simulation


def play(seeds: range, is_recurrent: bool = False) -> Counter[str]:
    """Return how often each kind of event has occurred."""
    seen: Counter[str] = Counter()
    for seed in seeds:
        simulation = Simulation(seed, is_recurrent)
        try:
            simulation.play()
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
        seen += simulation.seen
    return seen


@pytest.mark.parametrize("group", matrix(range(10), 0))
def test_random_schedules_give_each_sequence_its_own_output(
    group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "MAX_SCORED_TOKENS", 7)
    seen = play(range(210 * group, 210 * (group + 1)))
    assert seen["drafted"] > seen["drafts right"] > 100  # every kind of event occurs
    for event in ("preempted", "cached", "chunked", "waiting for a prefix"):
        assert seen[event] > 100
    assert seen["background preempted"] > 2
    assert seen["background idle"] > 3
    assert min(seen["paused"], seen["resumed"]) > 0
    assert seen["placeholders"] > seen["dropped"] > 100
    for event in ("cancelled", "broken"):
        assert min(seen[f"{event} while running"], seen[f"{event} while waiting"]) > 10


@pytest.mark.parametrize("group", matrix(range(6), 0))
def test_random_schedules_continue_from_the_states_of_their_tokens(group: int) -> None:
    seen = play(range(140 * group, 140 * (group + 1)), is_recurrent=True)
    for event in ("cached", "chunked", "divided", "placeholders", "dropped", "drafts right"):
        assert seen[event] > 100
    for event in ("preempted", "waiting for a prefix"):
        assert seen[event] > 10


def scheduler_of(blocks: int, size: int = 4, max_running: int = 64) -> ContinuousScheduler:
    return ContinuousScheduler(BlockPool(blocks, size), max_running)


def arriving(
    scheduler: ContinuousScheduler, *prompts: abc.Sequence[int], reuse: bool = True
) -> list[Sequence]:
    sequences = [Sequence([*prompt], scores_prompt=not reuse) for prompt in prompts]
    for sequence in sequences:
        scheduler.add(sequence)
    return sequences


@pytest.mark.parametrize(("kept", "forgotten"), [("is_steady", False), ("_decodes", [])])
def test_random_steps_repeat_what_a_selection_picks(
    kept: str, forgotten: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[list[tuple[Any, ...]]] = []
    repeated = 0
    schedule = ContinuousScheduler.schedule

    def recorded(self: ContinuousScheduler, *args: Any, **kwargs: Any) -> list[Chunk]:
        nonlocal repeated
        steady, decodes = self.is_steady, self._decodes
        chunks = schedule(self, *args, **kwargs)
        repeated += steady if kept == "is_steady" else chunks is decodes and bool(chunks)
        steps.append([(c.sequence.number, c.start, c.count, c.drafts) for c in chunks])
        return chunks

    monkeypatch.setattr(ContinuousScheduler, "schedule", recorded)
    play(range(80))
    assert repeated > 100
    expected = [*steps]
    steps.clear()
    never = property(lambda self: forgotten, lambda self, value: None)
    monkeypatch.setattr(ContinuousScheduler, kept, never, raising=False)
    play(range(80))
    assert steps == expected


@pytest.mark.parametrize("ahead", [True, False])
def test_a_batch_that_moves_is_that_of_the_next_step(ahead: bool) -> None:
    states = StatePool(8, 8)
    s = ContinuousScheduler(BlockPool(100, 4, states=states), 8)
    for length in (5, 6, 8):
        s.add(Sequence(TokenIds(fresh(length)), max_tokens=60))
    last: list[Chunk] = []
    in_flight: list[Chunk] = []
    batch, moved = Batch.from_chunks([]), 0
    for token in range(50):
        if token == 30:
            s.remove(removed := s.running[1])
            assert removed not in [chunk.sequence for chunk in s._decodes]
        chunks = s.schedule(1000)
        expected = Batch.from_chunks(chunks)
        if is_same := chunks is last:
            batch.move()
            moved += 1
        else:
            batch = expected
        # two wait for the prefix of the first one
        assert is_same == (token not in (*range(3 + ahead), 30))
        fields = ("spans", "rows", "offsets", "positions", "states", "shifts", "scored")
        assert all(getattr(batch, name) == getattr(expected, name) for name in fields)
        assert [*batch.ids] == expected.ids
        for chunk in in_flight if ahead else chunks:
            if chunk.is_active:
                s.advance(chunk, [token])
        if ahead:
            s.append_placeholders(chunks)
        last = in_flight = chunks
    assert moved == 46 - ahead


@pytest.mark.parametrize("ahead", [True, False])
def test_a_deferred_chunk_runs_again(ahead: bool) -> None:
    s = scheduler_of(100)
    for first in (100, 200, 300):
        s.add(Sequence(TokenIds(fresh(5, first)), max_tokens=60))
    for _ in range(3):
        step(s)
    chunks = s.schedule(1000)
    chunks[1].deferred = True
    starts = [chunk.start for chunk in chunks]
    if ahead:
        s.append_placeholders(chunks)
        again = s.schedule(1000)
    for chunk in chunks:
        s.advance(chunk, [] if chunk.deferred else [7])
    if not ahead:
        again = s.schedule(1000)
    assert [chunk.start for chunk in again] == [starts[0] + 1, starts[1], starts[2] + 1]
    assert [chunk.deferred for chunk in again] == [False] * 3
    assert [chunk in chunks for chunk in again] == [True, False, True]
    assert chunks[1].deferred


@pytest.mark.parametrize(
    ("lengths", "budget", "steps"),
    [([10, 12, 9], 24, [[10, 9], [12]]), ([50, 8, 9], 20, [[50], [8, 9]])],
)
def test_whole_prompts_share_a_step_while_they_fit(
    lengths: list[int], budget: int, steps: list[list[int]]
) -> None:
    s = ContinuousScheduler(BlockPool(100, 1000), 64, whole_prompts=True)
    arriving(s, *map(fresh, lengths))
    for expected in steps:
        assert [chunk.count for chunk in step(s, budget).values() if chunk.is_prefill] == expected


def step(
    scheduler: ContinuousScheduler, budget: int = 1000, spare_rows: float = math.inf
) -> dict[Sequence, Chunk]:
    chunks = scheduler.schedule(budget, spare_rows=spare_rows)
    for chunk in chunks:
        scheduler.advance(chunk, [7] if chunk.reaches_end else [])
    return {chunk.sequence: chunk for chunk in chunks}


def finish(scheduler: ContinuousScheduler, sequence: Sequence) -> None:
    while not sequence.table or sequence.computed < sequence.prompt_len:
        step(scheduler)
    scheduler.remove(sequence)


def fresh(count: int, first: int = 1000) -> list[int]:
    return list(range(first, first + count))


def test_a_prefix_shared_by_simultaneous_arrivals_is_computed_once() -> None:
    s = scheduler_of(1000, size=16)
    prefix = fresh(2000)
    sequences = arriving(s, *([*prefix, *fresh(5, first=10 * n)] for n in range(16)))
    computed = 0
    while any(sequence.computed < 2005 for sequence in sequences):
        computed += sum(chunk.count for chunk in step(s, budget=512).values())
    assert computed < 2005 + 15 * 5 + 16 * 5  # the rest are a few tokens generated meanwhile
    assert [sequence.cached for sequence in sequences] == [0] + [2000] * 15
    assert s.pool.used == 125 + 16


def test_a_prompt_that_extends_another_waits_for_all_of_it() -> None:
    s = scheduler_of(100)
    first, second = arriving(s, fresh(8), fresh(11))
    step(s, budget=6)
    assert list(step(s)) == [first]
    assert step(s)[second].start == 8


def test_a_conversation_reuses_its_earlier_turns() -> None:
    s = scheduler_of(100)
    (first,) = arriving(s, fresh(6))
    for _ in range(12):
        step(s)
    s.remove(first)
    (second,) = arriving(s, [*first.tokens, *fresh(3, first=0)])
    step(s)
    assert second.cached == 16  # of 6 prompt tokens and 11 that were generated and computed


@pytest.mark.parametrize("reuse", [True, False])
def test_an_abandoned_prefix_is_computed_by_the_next_sequence(reuse: bool) -> None:
    s = scheduler_of(100)
    (first,) = arriving(s, fresh(18), reuse=reuse)
    second, third = arriving(s, *[fresh(18)] * 2)
    step(s, budget=6)
    assert (first.computed, second.table, third.table) == (6, None, None)
    s.remove(first)
    assert list(step(s)) == [second]
    assert (second.cached, third.table) == (4, None)
    step(s)
    assert third.cached == 16


def test_without_reuse_all_is_computed_and_the_cache_is_unchanged() -> None:
    s = scheduler_of(100)
    finish(s, *arriving(s, fresh(20)))
    before = s.pool.match(fresh(20))
    (sequence,) = arriving(s, fresh(20), reuse=False)
    starts = []
    while sequence.computed < 20:
        starts.append(step(s, budget=7)[sequence].start)
    assert starts == [0, 7, 14]
    assert sequence.cached == 0
    assert s.pool.match(fresh(20)) == before
    s.remove(sequence)
    assert s.pool.match(fresh(20)) == before


# ── fair shares ──


def requests(
    scheduler: ContinuousScheduler, *counts: int, client: str = "", length: int = 3
) -> list[list[Sequence]]:
    """Add requests of a client, of so many choices each."""
    added = []
    for count in counts:
        owner = WorkOwner(client)
        prompts = [fresh(length, first=random.randrange(1 << 30)) for _ in range(count)]
        added.append([Sequence(prompt, owner=owner) for prompt in prompts])
        for sequence in added[-1]:
            scheduler.add(sequence)
    return added


@pytest.mark.parametrize("max_running", [1, 2, 3, 4, 8, 64])
@pytest.mark.parametrize("client", ["", "another"])
def test_a_large_request_uses_all_and_yields_to_others(max_running: int, client: str) -> None:
    s = scheduler_of(1000, max_running=max_running)
    (large,) = requests(s, 100)
    step(s)
    assert s.running == large[:max_running]
    [[small]] = requests(s, 1, client=client)
    step(s)
    assert len(s.running) == max_running
    assert (small in s.running) == (max_running > 1)
    s.remove(small)
    step(s)
    assert {*s.running} <= {*large}  # the paused one runs again
    assert len(s.running) == max_running


def test_a_paused_sequence_keeps_its_blocks_and_continues() -> None:
    s = scheduler_of(1000, max_running=4)
    (large,) = requests(s, 4, length=10)
    step(s)
    step(s)
    computed = {sequence: sequence.computed for sequence in large}
    (small,) = requests(s, 1)
    step(s)
    (paused,) = [sequence for sequence in large if sequence.paused]
    assert paused is large[-1]  # the youngest
    assert (paused.computed, s.preempted) == (computed[paused], 0)
    s.remove(small[0])
    chunk = step(s)[paused]
    assert (chunk.start, chunk.count) == (computed[paused], 1)


def test_blocks_are_taken_from_a_large_request_that_has_all() -> None:
    s = scheduler_of(40, max_running=64)
    requests(s, 20, length=15)
    step(s)
    assert s.pool.free <= 4
    (small,) = requests(s, 1, length=15)
    assert small[0] in step(s)
    assert s.preempted
    for _ in range(30):
        step(s)
        assert small[0].table  # the large one grows by blocks of its own


def test_choices_of_another_request_at_most_double_the_time_of_a_step() -> None:
    s = scheduler_of(1000)
    (large,) = requests(s, 60)
    step(s)
    assert len(s.schedule(1000, spare_rows=3)) == 60  # alone
    (small,) = requests(s, 1)
    step(s)
    steps = Counter[Sequence]()
    for _ in range(20):
        chunks = s.schedule(1000, spare_rows=3)
        assert len(chunks) == 2 + 2 + 3
        steps.update(chunk.sequence for chunk in chunks)
        for chunk in chunks:
            s.advance(chunk, [7])
    assert steps[small[0]] == 20
    assert max(steps[choice] for choice in large) - min(steps[choice] for choice in large) <= 1


DOUBLING = 40  # prompt tokens that double a step


def prompt_tokens(scheduler: ContinuousScheduler, *of: list[Sequence]) -> list[int]:
    """Run a step with a budget of 200; return the prompt tokens of each request in it."""
    chunks = scheduler.schedule(200, doubling=lambda rows: DOUBLING)
    for chunk in chunks:
        scheduler.advance(chunk, [7] if chunk.reaches_end else [])
    return [sum(c.count for c in chunks if c.is_prefill and c.sequence in some) for some in of]


def test_long_prompts_at_most_double_the_step_of_another_client() -> None:
    s = scheduler_of(10000, max_running=16)
    first, second = requests(s, 5, 5, length=1000, client="a")
    assert sum(prompt_tokens(s, first, second)) == 200  # alone
    [small] = requests(s, 1, length=100, client="b")
    first_tokens, second_tokens, small_tokens = prompt_tokens(s, first, second, small)
    assert (first_tokens + second_tokens, small_tokens) == (DOUBLING, 100)
    for _ in range(20):
        first_tokens, second_tokens, _ = prompt_tokens(s, first, second, small)
        assert first_tokens + second_tokens == DOUBLING
        assert s.running[0].computed or first_tokens  # the oldest advances
    assert len(small[0].tokens) == 100 + 21  # a token in each step
    s.remove(small[0])
    assert sum(prompt_tokens(s, first, second)) == 200


def test_rows_of_a_client_do_not_raise_the_limit_of_its_prompts() -> None:
    s = scheduler_of(10000, max_running=32)
    requests(s, *[1] * 10, length=20, client="a")
    requests(s, 1, length=20, client="b")
    while any(sequence.uncomputed > 1 for sequence in (*s.waiting, *s.running)):
        prompt_tokens(s)
    [large] = requests(s, 5, length=1000, client="a")
    chunks = s.schedule(200, doubling=lambda rows: 10 * rows)
    assert sum(c.count for c in chunks if c.is_prefill and c.sequence in large) == 10


def test_prompts_of_a_single_step_and_those_of_the_same_client_are_not_limited() -> None:
    s = scheduler_of(10000, max_running=16)
    [stream] = requests(s, 1, length=10, client="a")
    prompt_tokens(s)
    own, short = requests(s, 1, length=1000, client="a"), requests(s, 2, length=50, client="b")
    assert prompt_tokens(s, *own, *short) == [DOUBLING, 100]
    assert prompt_tokens(s, *own) == [DOUBLING]  # beside the streams of the other client
    for sequence in short[0]:
        s.remove(sequence)
    assert prompt_tokens(s, *own) == [200]
    assert len(stream[0].tokens) == 10 + 4


def test_large_clients_alone_share_the_whole_budget_and_each_may_double_anothers_step() -> None:
    s = scheduler_of(10000, max_running=16)
    large = [requests(s, 2, length=1000, client=client)[0] for client in "abc"]
    assert sum(prompt_tokens(s, *large)) == 200
    requests(s, 1, length=10, client="d")
    for _ in range(3):
        assert prompt_tokens(s, *large) == [DOUBLING] * 3


def test_single_sequences_of_many_requests_are_all_in_a_step() -> None:
    s = scheduler_of(1000)
    requests(s, *[1] * 60)
    step(s)
    assert len(s.schedule(1000, spare_rows=3)) == 60


def test_a_list_of_prompts_has_half_of_the_budget_beside_smaller_requests() -> None:
    s = scheduler_of(10_000, max_running=64)
    (large,) = requests(s, 30, length=200)
    (first, second) = requests(s, 1, 1, length=150)
    chunks = step(s, budget=400)
    assert sum(chunk.count for s_, chunk in chunks.items() if s_ in large) == 200
    assert chunks[first[0]].count + chunks[second[0]].count == 200


@pytest.mark.parametrize("is_one_prompt", [False, True])
def test_a_step_costs_the_same_however_many_wait(is_one_prompt: bool) -> None:
    """Also behind one prefix, which none of them can share yet."""

    def calls_of_a_step(waiting: int) -> int:
        s, calls = scheduler_of(10_000, max_running=16), 0

        def count(*event: Any) -> None:
            nonlocal calls
            calls += 1

        for n in range(waiting):
            s.add(Sequence(fresh(400, first=0 if is_one_prompt else 400 * n)))
        for _ in range(2):
            step(s, budget=100)
        sys.setprofile(count)
        try:
            step(s, budget=100)
        finally:
            sys.setprofile(None)
        return calls

    assert calls_of_a_step(3000) < 1.5 * calls_of_a_step(100)


# ── background work ──


def in_class(
    scheduler: ContinuousScheduler, priority: Priority, *prompts: abc.Sequence[int]
) -> list[Sequence]:
    sequences = [Sequence([*prompt], priority=priority) for prompt in prompts]
    for sequence in sequences:
        scheduler.add(sequence)
    return sequences


def test_a_prefix_pending_in_idle_background_work_is_computed_for_others() -> None:
    s = scheduler_of(4000, max_running=1000)
    in_class(s, Priority.BACKGROUND, [1])
    (background,) = in_class(s, Priority.BACKGROUND, fresh(400))
    step(s, budget=40)
    (waits,) = arriving(s, fresh(400))
    for turn in range(60):
        arriving(s, *(fresh(20, first=10_000 + 1000 * turn + 50 * n) for n in range(3)))
        step(s, budget=40)
    assert background.table
    assert waits.tokens[400:]


# ── the batch class ──


def test_a_batch_shares_a_step_with_others_while_that_at_most_doubles_it() -> None:
    s = scheduler_of(1000)
    batch = in_class(s, Priority.BATCH, *([n] for n in range(50)))
    assert len(step(s)) == 50
    (chat,) = arriving(s, [100])
    for _ in range(3):  # the oldest counts as another
        chunks = step(s, spare_rows=20)
        assert {batch[0], chat} <= set(chunks)
        assert len(chunks) <= 2 + 22
    assert s.preempted == 0
    s.remove(chat)
    assert set(step(s, spare_rows=20)) == set(batch)


def test_a_batch_that_a_step_has_room_for_does_not_wait_for_the_prompts_of_chats() -> None:
    s = scheduler_of(1000)
    batch = in_class(s, Priority.BATCH, *([n] for n in range(20)))
    step(s)
    chats = arriving(s, [100])
    assert set(step(s, spare_rows=30)) == {*batch, *chats}


def test_a_chat_pauses_a_batch_and_background_work_first() -> None:
    s = scheduler_of(100, max_running=4)
    batch = in_class(s, Priority.BATCH, [1], [2])
    background = in_class(s, Priority.BACKGROUND, [3], [4])
    step(s)
    for number, paused in enumerate((background[1], batch[1]), start=5):
        arriving(s, [number])
        step(s)
        assert (s.preempted, s.waiting[0]) == (0, paused)
    assert {batch[0], background[0]} <= {*s.running}  # the oldest of each still finish


@pytest.mark.parametrize("priority", [Priority.BATCH, Priority.BACKGROUND])
def test_each_class_finishes_in_order_under_constant_interactive_work(priority: Priority) -> None:
    s = scheduler_of(60, max_running=3)
    low = in_class(s, priority, *(fresh(10, first=100 * n) for n in range(4)))
    in_class(s, Priority(3 - priority), *(fresh(10, first=1000 + 100 * n) for n in range(4)))
    ended: list[Sequence] = []
    for turn in range(300):
        while len(s.waiting) < 12:  # always more than can run
            arriving(s, fresh(10, first=10_000 + 100 * turn))
        step(s, budget=10)
        for sequence in [sequence for sequence in s.running if len(sequence.tokens) > 20]:
            s.remove(sequence)
            ended += [sequence] if sequence in low else []
    assert ended == low


LOADS: dict[str, abc.Callable[[ContinuousScheduler], object]] = {
    "choices": lambda s: requests(s, 128, client="a", length=300),
    "a list": lambda s: requests(s, 1000, client="a", length=20),
    "a list of long prompts": lambda s: requests(s, 300, client="a", length=400),
    "requests": lambda s: requests(s, *[1] * 1000, client="a", length=20),
    "a long prompt": lambda s: requests(s, 1, client="a", length=10_000),
    "a batch": lambda s: in_class(s, Priority.BATCH, *(fresh(100, first=n) for n in range(300))),
}


@pytest.mark.parametrize("load", LOADS)
def test_another_client_waits_at_most_two_steps_behind_any_load(load: str) -> None:
    s = scheduler_of(20_000, max_running=64)
    LOADS[load](s)
    for _ in range(50):
        step(s, budget=150, spare_rows=16)
    for _ in range(3):
        [[newcomer]] = requests(s, 1, client="b", length=60)
        for _ in range(2):
            step(s, budget=150, spare_rows=16)
        assert len(newcomer.tokens) > newcomer.prompt_len
        for _ in range(10):  # and then decodes in each step
            assert newcomer in step(s, budget=150, spare_rows=16)
        s.remove(newcomer)


def test_a_ninth_flow_of_a_client_waits_as_another_client_does() -> None:
    s = scheduler_of(20_000, max_running=64)
    for flow in range(8):
        for n in range(40):
            owner = WorkOwner("a", flow=flow)
            s.add(Sequence(fresh(20, first=1000 * flow + 20 * n), max_tokens=99, owner=owner))
    for _ in range(50):
        step(s, budget=150)
    ninth = Sequence(fresh(60, first=1 << 20), max_tokens=99, owner=WorkOwner("a", flow=9))
    s.add(ninth)
    for _ in range(2):
        step(s, budget=150)
    assert len(ninth.tokens) > ninth.prompt_len


# ── room ──


def test_a_newcomer_leaves_room_for_running_sequences_to_grow() -> None:
    s = scheduler_of(RESERVE_DIVISOR)
    (first,) = arriving(s, fresh(4))
    step(s)
    (second,) = arriving(s, fresh(4 * (RESERVE_DIVISOR - 2), first=0))
    step(s)
    assert not second.table  # the last block is for the first's next tokens
    s.remove(first)
    step(s)
    assert second.table


def test_the_youngest_is_preempted_and_reuses_its_blocks_later() -> None:
    s = scheduler_of(6)
    old, young = arriving(s, fresh(8), fresh(14, first=0))
    step(s)
    chunks = step(s)  # the old one needs a third block
    assert list(chunks) == [old]
    assert (s.preempted, s.waiting) == (1, [young])
    s.remove(old)
    (younger,) = arriving(s, fresh(4, first=2000))
    chunks = step(s)
    assert list(chunks) == [young, younger]
    assert chunks[young].start == 12  # of 14 prompt tokens and one generated
    assert young.cached == 0
    assert young not in s.admitted  # not for the first time
    assert young.tokens[14:] == [7, 7]


def test_drafts_delay_no_admission_and_free_their_blocks() -> None:
    s = scheduler_of(6)
    old, young = arriving(s, fresh(6), fresh(7, first=0))
    step(s)
    (late,) = arriving(s, fresh(3, first=2000))
    chunks = s.schedule(1000, lambda _: (7,) * 4)  # of the two free blocks one is for the late one
    assert [(chunk.sequence, len(chunk.drafts)) for chunk in chunks] == [
        (old, 4),
        (young, 0),
        (late, 0),
    ]
    assert s.pool.free == 0
    for chunk in chunks:
        s.advance(chunk, [0])
    assert s.pool.free == 1


def test_drafts_of_a_deferred_step_free_their_states_for_others() -> None:
    pool = BlockPool(50, 4, states=StatePool(2, 0, max_drafts=2))
    scheduler = ContinuousScheduler(pool, 2)
    late, other = (Sequence([n, n], max_tokens=9, owner=WorkOwner(n)) for n in range(2))
    for sequence in (late, other):
        scheduler.add(sequence)
    for chunk in scheduler.schedule(100):
        scheduler.advance(chunk, [9])
    deferred, chunk = scheduler.schedule(0, lambda s: (7, 7) if s is late else ())
    assert deferred.sequence is late
    deferred.deferred = True
    scheduler.advance(deferred)
    scheduler.advance(chunk, [9])
    [chunk] = scheduler.schedule(0, lambda _: (7, 7), resting={late.owner})
    assert (chunk.sequence, chunk.drafts) == (other, (7, 7))
    assert len(chunk.states) == 3


# ── the batch ──


def test_tokens_scored_before_a_preemption_are_not_scored_again() -> None:
    s = scheduler_of(20)
    scoring = Sequence(fresh(9), scores_prompt=True)
    s.add(scoring)
    (chunk,) = s.schedule(5)
    assert chunk.to_score == range(5)
    s.advance(chunk)
    assert scoring.scored == 5
    s._preempt(scoring)
    rescored = s.schedule(1000)[0]
    assert (rescored.start, rescored.count, rescored.to_score) == (0, 9, range(5, 8))
    s.advance(rescored, [7])
    s._preempt(scoring)
    assert not s.schedule(1000)[0].to_score


def test_a_sequence_with_max_tokens_0_samples_none() -> None:
    s = scheduler_of(20)
    s.add(Sequence(fresh(3), max_tokens=0))
    (chunk,) = s.schedule(1000)
    assert chunk.reaches_end
    assert Batch.from_chunks([chunk]).rows == []


# ── the tokens of sequences ──


def test_choices_of_a_request_share_their_prompt_until_they_run() -> None:
    prompt = [1, 2, 3]
    scheduler = ContinuousScheduler(BlockPool(8, 4), 1)
    one, other = Sequence(prompt), Sequence(prompt)
    scheduler.add(one)
    scheduler.add(other)
    (chunk,) = scheduler.schedule(8)
    scheduler.advance(chunk, [9])
    assert one.tokens == [1, 2, 3, 9]
    assert other.tokens is prompt
    assert prompt == [1, 2, 3]


@pytest.mark.parametrize("shared", [[], [7]])
def test_a_prefixed_prompt_ends_with_its_own_token(shared: list[int]) -> None:
    sequence = Sequence(PrefixedTokens(shared, [5]), max_tokens=0)
    assert sequence.tokens[-1] == 5
    assert not sequence.has_placeholder


def test_garbage_collection_does_not_visit_token_ids() -> None:
    ids = TokenIds(range(1000, 2000))
    for held in (ids, ids.copy(), PrefixedTokens(ids, range(1000, 2000)).own):
        assert not any(isinstance(visited, int) for visited in gc.get_referents(held))


def test_slices_and_output_are_those_of_a_list() -> None:
    listed, ids = [5, 6, 7], TokenIds([5, 6, 7])
    assert (ids[1:], ids[-1], [*ids]) == (listed[1:], 7, listed)
    one, other = Sequence(ids.copy(), max_tokens=5), Sequence(listed, max_tokens=5)
    for sequence in (one, other):
        sequence.tokens, sequence.has_placeholder = [*sequence.tokens, -1], True
        sequence.extend([8, 9])
        sequence.tokens, sequence.has_placeholder = [*sequence.tokens, -2], True
        sequence.drop_placeholder()
    assert one.tokens[:] == other.tokens[:] == [5, 6, 7, 8, 9]
    assert [*ids] == [5, 6, 7]
