"""Drafts: as many in a step as pay, by the measured times of steps, and those of n-grams."""

import random
from types import SimpleNamespace
from typing import Any

import pytest

from batching.sequence import Chunk, Sequence, TokenIds
from batching.step_times import StepTimes
from worker.engines.generation.speculation import (
    INITIAL_ACCEPTANCE,
    MAX_DRAFT,
    MAX_INDEXED,
    MAX_NGRAMS,
    MAX_ROWS,
    NgramDrafter,
    NgramTable,
    Speculation,
)


def trained(row_s: float, sequences: int, steps: int = 200, fixed_s: float = 0.01) -> Speculation:
    """Train it on steps of different sizes, with noise in their times."""
    times, chance = StepTimes(), random.Random(1)
    speculation = Speculation("cpu", times)
    for _ in range(steps):
        drafts = chance.randrange(9)
        seconds = (fixed_s + row_s * (sequences + drafts)) * chance.uniform(0.95, 1.1)
        times.learn(0, sequences + drafts, seconds)
        speculation.learn(sequences, seconds)
    return speculation


@pytest.mark.parametrize("sequences", [1, 4, 16])
@pytest.mark.parametrize("row_s", [0.0002, 0.0005, 0.002])
def test_the_minimum_gain_of_a_row_is_its_cost(row_s: float, sequences: int) -> None:
    tokens_per_s = sequences / (0.01 + row_s * (sequences + 4))
    min_gain = trained(row_s, sequences).min_gain
    assert min_gain == pytest.approx(row_s * tokens_per_s, rel=0.35)


def test_drafts_are_worthwhile_while_each_brings_more_than_it_costs() -> None:
    speculation = trained(0.0005, 8)
    min_gain = speculation.min_gain
    for acceptance in (0.1, 0.5, 0.8, 0.95):
        count = speculation.worthwhile(acceptance, 100)
        assert acceptance ** (count + 1) <= min_gain
        assert count == 0 or acceptance**count > min_gain
    assert speculation.worthwhile(0.95, 3) == 3


def test_free_rows_are_used_and_rows_as_costly_as_a_step_are_not() -> None:
    assert trained(0.0, 1).worthwhile(0.7, 6) == 6
    assert trained(0.01, 16, fixed_s=0.0).worthwhile(0.5, 6) == 0


def test_the_cost_of_rows_is_assumed_until_it_is_measured() -> None:
    times = StepTimes()
    untrained = Speculation("cpu", times)
    assert untrained.worthwhile(0.5, 6) == 5
    for _ in range(50):
        times.learn(0, 16, 0.01)
        untrained.learn(16, 0.01)  # always the same size: the cost of a row does not show
    assert untrained.worthwhile(0.5, 6) == 2
    assert untrained.worthwhile(0.2, 6) == 0


def test_a_changed_load_is_learned() -> None:
    speculation = trained(0.002, 16)
    for _ in range(1000):
        speculation._times.learn(0, 2, 0.02)
        speculation.learn(1, 0.02)
    assert speculation.worthwhile(0.9, 16) == 16


@pytest.mark.parametrize("sequences", [1, 3, 8, 16, 31, 32, 40])
def test_rows_are_bounded_and_shared_equally(sequences: int) -> None:
    speculation = Speculation("cpu", StepTimes())
    speculation.begin_step(sequences)
    rooms = []
    for _ in range(sequences):
        rooms.append(room := speculation.allot_rows())
        speculation._free_rows -= room
    assert sum(rooms) == max(0, MAX_ROWS["cpu"] - sequences)
    assert max(rooms) - min(rooms) <= 1


def test_unused_rows_are_left_to_later_sequences() -> None:
    speculation = Speculation("cpu", StepTimes())
    speculation.begin_step(4)
    assert speculation.allot_rows() == 7
    assert [speculation.allot_rows() for _ in range(3)] == [10, 14, 28]


# ── n-grams ──

LONG = [1, 2, 3, *range(10, 40), 1, 2, 3]


@pytest.mark.parametrize(
    ("tokens", "limit", "draft"),
    [
        ([1, 2, 3, 4, 5, 6, 1, 2, 3], 2, [4, 5]),
        ([1, 2, 3, 7, 0, 1, 2, 3, 8, 0, 1, 2, 3], 1, [8]),  # the latest occurrence
        ([5, 5, 5, 5], 6, [5] * 6),  # beyond the end of the text
        ([0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2], 6, [3, 0, 1, 2, 3, 0]),
        (LONG, 100, range(10, 10 + MAX_DRAFT)),
        (LONG, 0, []),
        ([1, 2, 3, 4, 5, 6], 6, []),
        ([1, 2], 6, []),
    ],
)
def test_the_tokens_that_followed_the_last_ngram_are_drafted(
    tokens: list[int], limit: int, draft: list[int]
) -> None:
    assert NgramDrafter().draft(tokens, limit) == tuple(draft)


def test_text_that_grows_is_indexed_once_and_found_later() -> None:
    drafter = NgramDrafter()
    tokens = [1, 2, 3, 4]
    assert drafter.draft(tokens, 6) == ()
    tokens += [9, 2, 3, 4]
    assert drafter.draft(tokens, 4) == (9, 2, 3, 4)
    tokens += [9, 2]
    assert drafter.draft(tokens, 2) == (3, 4)


@pytest.mark.parametrize("right", [0.1, 0.6, 0.9])
def test_acceptance_is_learned_up_to_the_first_wrong_token(right: float) -> None:
    drafter, chance, learned = NgramDrafter(), random.Random(0), []
    for _ in range(2000):
        outcomes = [chance.random() < right for _ in range(4)]
        drafter.record_verified(4, (*outcomes, False).index(False))
        learned.append(drafter.acceptance)
    assert sum(learned) / len(learned) == pytest.approx(right, abs=0.1)


def test_acceptance_too_low_for_drafts_recovers() -> None:
    drafter = NgramDrafter()
    for _ in range(10):
        drafter.record_verified(1, 0)
    assert drafter.acceptance < 0.1
    steps = 0
    while drafter.acceptance < INITIAL_ACCEPTANCE / 2:
        assert drafter.draft([1, 2, 3, 4, 1, 2, 3], 0) == ()
        steps += 1
    assert 40 < steps < 120


def test_a_call_indexes_a_bounded_number_of_tokens() -> None:
    drafter, tokens = (
        NgramDrafter(),
        [*range(3 * MAX_INDEXED), 2 * MAX_INDEXED, 2 * MAX_INDEXED + 1, 2 * MAX_INDEXED + 2],
    )
    assert [drafter.draft(tokens, 1) for _ in range(3)] == [(), (), (2 * MAX_INDEXED + 3,)]


def test_a_limit_of_zero_indexes_nothing() -> None:
    drafter, late = NgramDrafter(), MAX_INDEXED + 100
    tokens = [*range(2 * MAX_INDEXED), late, late + 1, late + 2]
    for _ in range(3):
        assert drafter.draft(tokens, 0) == ()
    assert [drafter.draft(tokens, 1) for _ in range(2)] == [(), (late + 3,)]


# ── n-grams of other outputs ──


def learned(
    *outputs: list[int], prompt: list[int] | None = None, namespace: bytes = b""
) -> NgramTable:
    table = NgramTable()
    for output in outputs:
        sequence = decoding(prompt or [0], output, namespace)
        table.learn(sequence, NgramDrafter())
    return table


def decoding(prompt: list[int], output: list[int], namespace: bytes = b"") -> Sequence:
    tokens = TokenIds(prompt)
    sequence = Sequence(tokens, max_tokens=100, cache_namespace=namespace)
    tokens.extend(output)
    return sequence


def test_a_token_is_drafted_after_one_and_two_tokens_of_another_output() -> None:
    table = learned([1, 2, 3, 4], [5, 2, 6, 7])
    assert table.draft(decoding([9], [1, 2]), 3, 0.0) == (3, 4)  # by two tokens
    assert table.draft(decoding([9], [5, 2]), 3, 0.0) == (6, 7)
    assert table.draft(decoding([9], [8, 2]), 1, 0.0) == (3,)  # by one: the first is kept
    assert table.draft(decoding([2], []), 1, 0.0) == (3,)
    assert table.draft(decoding([9], [4]), 3, 0.0) == ()


def test_a_token_is_drafted_while_all_are_probably_right() -> None:
    often = learned(*[[1, 2, 3, 4]] * 20)
    assert often.draft(decoding([9], [1]), 3, 0.5) == (2, 3, 4)
    once = learned([1, 2, 3, 4])
    assert once.draft(decoding([9], [1]), 3, 0.5) == ()
    assert once.draft(decoding([9], [1]), 3, 0.2) == (2,)


def test_another_token_takes_the_place_of_one_that_no_longer_follows() -> None:
    table = learned(*[[1, 2]] * 5, *[[1, 3]] * 30)
    assert table.draft(decoding([9], [1]), 1, 0.0) == (3,)


def test_prompts_and_other_namespaces_are_not_drafted() -> None:
    table = learned([5, 6], prompt=[1, 2, 3])
    assert table.draft(decoding([9], [1]), 1, 0.0) == ()
    assert table.draft(decoding([9], [5]), 1, 0.0) == (6,)
    assert table.draft(decoding([9], [5], b"another"), 1, 0.0) == ()


def test_each_output_token_is_learned_once() -> None:
    table, drafter = NgramTable(), NgramDrafter()
    sequence = decoding([0], [1, 2])
    table.learn(sequence, drafter)
    before = dict(table._next)
    table.learn(sequence, drafter)
    assert before == table._next


def test_ngrams_that_have_not_occurred_for_long_are_dropped() -> None:
    table, drafter = learned([1, 2]), NgramDrafter()
    sequence = decoding([0], [*range(10, 10 + MAX_NGRAMS)])
    table.learn(sequence, drafter)
    assert len(table._next) == MAX_NGRAMS
    assert table.draft(decoding([9], [1]), 1, 0.0) == ()


@pytest.mark.parametrize(("device", "drafts"), [("cpu", (3, 4)), ("cuda", ())])
def test_outputs_of_other_requests_are_drafted_where_steps_are_read_at_once(
    device: str, drafts: tuple[int, ...]
) -> None:
    speculation = Speculation(device, StepTimes())
    unconstrained: Any = SimpleNamespace(tokens=1, constraints=None)
    for output, expected in (([1, 2, 3, 4], ()), ([7, 1, 2], drafts)):
        sequence = decoding([0], output)
        speculation.add(sequence)
        for _ in range(8):
            speculation.begin_step(1)
            assert speculation.draft(sequence, unconstrained) == expected
        acceptance = speculation._drafters[sequence].acceptance
        speculation.record_verified(Chunk(sequence, 0, 1, expected), 1)
        # it is that of drafts from the sequence's own text
        assert speculation._drafters[sequence].acceptance == acceptance
        speculation.remove(sequence)
