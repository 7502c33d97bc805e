"""The rows of a batch are cut to what runs within a turn."""

import math

from batching.turn_budget import MAX_TURN_S, TurnBudget


def learned(*batches: tuple[int, float]) -> TurnBudget:
    budget = TurnBudget()
    for tokens, seconds in batches:
        budget.learn(tokens, seconds)
    return budget


def fitting(budget: TurnBudget, sizes: list[int]) -> int:
    return budget.fitting(sizes, MAX_TURN_S)


def test_as_many_rows_fit_as_run_within_the_budget() -> None:
    budget = learned((1000, MAX_TURN_S))
    assert fitting(budget, [250] * 8) == 4
    assert fitting(budget, [900, 200, 50]) == 1
    assert fitting(budget, [100, 100]) == 2
    assert budget.fitting([250] * 8, MAX_TURN_S / 2) == 2
    assert budget.fitting([250] * 8, math.inf) == 8


def test_a_row_that_takes_longer_runs_alone() -> None:
    budget = learned((1000, MAX_TURN_S))
    assert fitting(budget, [5000, 10]) == 1
    assert fitting(budget, [10, 5000]) == 1


def test_all_rows_fit_before_a_batch_was_measured() -> None:
    assert fitting(TurnBudget(), [100] * 3) == 3


def test_a_small_batch_does_not_count() -> None:
    budget = learned((1000, MAX_TURN_S), *[(10, MAX_TURN_S / 10)] * 50)
    assert fitting(budget, [100] * 20) == 10


def test_a_small_first_batch_is_corrected() -> None:
    budget = learned((3, 0.01))
    row_s = 250 * MAX_TURN_S / 1000
    for _ in range(30):
        rows = fitting(budget, [250] * 8)
        budget.learn(rows * 250, rows * row_s)
    assert rows >= 3


def test_a_slower_machine_gets_fewer_rows() -> None:
    budget = learned((1000, MAX_TURN_S), *[(1000, 4 * MAX_TURN_S)] * 30)
    assert fitting(budget, [125] * 8) == 2
    budget = learned((1000, MAX_TURN_S), *[(100, MAX_TURN_S)] * 30)
    assert fitting(budget, [50] * 8) == 2
