"""The rows of a batch are cut to what runs within a turn."""

import math

import pytest

from batching.turn_budget import EFFICIENT_TOKENS, MAX_TURN_ALONE_S, MAX_TURN_S, TurnBudget


def learned(*batches: tuple[int, float]) -> TurnBudget:
    budget = TurnBudget()
    for tokens, seconds in batches:
        budget.learn(tokens, seconds)
    return budget


def fitting(budget: TurnBudget, sizes: list[int]) -> int:
    return budget.fitting(sizes, MAX_TURN_S)


def test_as_many_rows_fit_as_run_within_a_turn() -> None:
    budget = learned((1000, MAX_TURN_S))
    assert fitting(budget, [250] * 8) == 4
    assert fitting(budget, [900, 200, 50]) == 1
    assert fitting(budget, [100, 100]) == 2
    assert budget.fitting([250] * 80, math.inf) == 80


def test_without_other_models_a_request_that_arrives_waits_for_a_short_batch() -> None:
    """A document in 80 strides of a model that takes 0.0002 s per token."""
    budget = learned((330, 330 * 0.0002))
    rows = budget.fitting([330] * 80, MAX_TURN_ALONE_S)
    assert 0.9 * MAX_TURN_ALONE_S - 330 * 0.0002 < 330 * 0.0002 * rows <= MAX_TURN_ALONE_S < 0.5


def test_each_layer_may_take_a_turn() -> None:
    budget = learned((1000, MAX_TURN_S))
    assert budget.fitting([250] * 80, MAX_TURN_S, 12) == 48


def test_a_row_that_takes_longer_runs_alone() -> None:
    budget = learned((1000, MAX_TURN_S))
    assert fitting(budget, [5000, 10]) == 1
    assert fitting(budget, [10, 5000]) == 1


def test_all_rows_fit_before_a_batch_was_measured() -> None:
    assert fitting(TurnBudget(), [100] * 3) == 3


def test_an_efficient_batch_is_cut_only_beside_other_models() -> None:
    budget, rows = learned((10, MAX_TURN_ALONE_S)), [EFFICIENT_TOKENS // 4] * 8
    assert budget.fitting(rows, MAX_TURN_ALONE_S) == 4
    assert fitting(budget, rows) == 1


def test_a_small_batch_does_not_count() -> None:
    budget = learned((1000, MAX_TURN_S), *[(10, MAX_TURN_S / 10)] * 50)
    assert fitting(budget, [100] * 20) == 10


def test_a_small_first_batch_is_corrected_by_the_next() -> None:
    budget = learned((3, MAX_TURN_S), (250, MAX_TURN_S / 5))
    assert fitting(budget, [250] * 8) == 5


@pytest.mark.parametrize("tokens", [1000, 250])
def test_a_slower_machine_gets_fewer_rows(tokens: int) -> None:
    token_s = 4 * MAX_TURN_S / 1000
    budget = learned((1000, MAX_TURN_S), (tokens, tokens * token_s))
    assert fitting(budget, [125] * 8) in (4, 5)  # a slow batch does not replace the others
    budget = learned((1000, MAX_TURN_S), *[(tokens, tokens * token_s)] * 30)
    assert fitting(budget, [125] * 8) == 2
