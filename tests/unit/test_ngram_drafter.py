"""The n-gram drafter: its drafts, and the acceptance that it learns."""

import random

import pytest

from worker.engines.generation.speculation import (
    INITIAL_ACCEPTANCE,
    MAX_DRAFT,
    MAX_INDEXED,
    NgramDrafter,
)


def test_the_tokens_that_followed_the_last_ngram_are_drafted() -> None:
    assert NgramDrafter().draft([1, 2, 3, 4, 5, 6, 1, 2, 3], 2) == (4, 5)


def test_the_latest_occurrence_counts() -> None:
    assert NgramDrafter().draft([1, 2, 3, 7, 0, 1, 2, 3, 8, 0, 1, 2, 3], 1) == (8,)


def test_a_repeated_text_is_drafted_beyond_its_end() -> None:
    assert NgramDrafter().draft([5, 5, 5, 5], 6) == (5,) * 6
    assert NgramDrafter().draft([0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2], 6) == (3, 0, 1, 2, 3, 0)


def test_a_draft_is_never_longer_than_its_limits() -> None:
    tokens = [1, 2, 3, *range(10, 40), 1, 2, 3]
    assert NgramDrafter().draft(tokens, 100) == tuple(range(10, 10 + MAX_DRAFT))
    assert NgramDrafter().draft(tokens, 0) == ()


def test_nothing_is_drafted_for_an_unknown_ngram() -> None:
    assert NgramDrafter().draft([1, 2, 3, 4, 5, 6], 6) == ()
    assert NgramDrafter().draft([1, 2], 6) == ()


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
