"""Drafts in a step: as many as bring more tokens than they take time, learned from times."""

import random

import pytest

from worker.generation.speculation import MAX_ROWS, Speculation


def taught(row_s: float, sequences: int, steps: int = 200, fixed_s: float = 0.01) -> Speculation:
    """By steps of a few sequences more or less, with some noise in their times."""
    budget, chance = Speculation("cpu"), random.Random(1)
    for _ in range(steps):
        drafts = chance.randrange(9)
        seconds = (fixed_s + row_s * (sequences + drafts)) * chance.uniform(0.95, 1.1)
        budget.learn(sequences + drafts, sequences, seconds)
    return budget


@pytest.mark.parametrize("sequences", [1, 4, 16])
@pytest.mark.parametrize("row_s", [0.0002, 0.0005, 0.002])
def test_a_row_must_bring_what_it_costs(row_s: float, sequences: int) -> None:
    tokens_per_s = sequences / (0.01 + row_s * (sequences + 4))
    least = taught(row_s, sequences).min_gain
    assert least == pytest.approx(row_s * tokens_per_s, rel=0.35)


def test_drafts_are_made_while_each_brings_more_than_it_costs() -> None:
    budget = taught(0.0005, 8)
    least = budget.min_gain
    for acceptance in (0.1, 0.5, 0.8, 0.95):
        count = budget.worthwhile(acceptance, 100)
        assert acceptance ** (count + 1) <= least
        assert count == 0 or acceptance**count > least
    assert budget.worthwhile(0.95, 3) == 3


def test_rows_that_cost_nothing_are_used_and_those_that_cost_as_a_step_are_not() -> None:
    assert taught(0.0, 1).worthwhile(0.7, 6) == 6
    assert taught(0.01, 16, fixed_s=0.0).worthwhile(0.7, 6) == 0


def test_what_rows_cost_is_assumed_until_it_is_seen() -> None:
    unknown = Speculation("cpu")
    assert unknown.worthwhile(0.5, 6) == 5
    for _ in range(50):
        unknown.learn(16, 16, 0.01)  # always the same: nothing is to be seen
    assert unknown.worthwhile(0.5, 6) == 1
    assert unknown.worthwhile(0.2, 6) == 0


def test_another_load_is_learned() -> None:
    budget = taught(0.002, 16)
    for _ in range(1000):
        budget.learn(2, 1, 0.02)
    assert budget.worthwhile(0.9, 16) == 16


@pytest.mark.parametrize("sequences", [1, 3, 8, 16, 31, 32, 40])
def test_no_step_has_more_rows_than_the_most_and_all_sequences_have_a_share(sequences: int) -> None:
    budget = Speculation("cpu")
    budget.begin_step(sequences)
    rooms = []
    for _ in range(sequences):
        rooms.append(room := budget.room())
        budget.take(room)
    assert sum(rooms) == max(0, MAX_ROWS["cpu"] - sequences)
    assert max(rooms) - min(rooms) <= 1


def test_rows_that_are_not_taken_are_for_those_that_follow() -> None:
    budget = Speculation("cpu")
    budget.begin_step(4)
    assert budget.room() == 7
    assert [budget.room() for _ in range(3)] == [10, 14, 28]
