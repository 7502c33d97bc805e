"""The number of drafts in a step: as many as pay, by the measured times of steps."""

import random

import pytest

from batching.step_times import StepTimes
from worker.engines.generation.speculation import MAX_ROWS, Speculation


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
        speculation.take(room)
    assert sum(rooms) == max(0, MAX_ROWS["cpu"] - sequences)
    assert max(rooms) - min(rooms) <= 1


def test_unused_rows_are_left_to_later_sequences() -> None:
    speculation = Speculation("cpu", StepTimes())
    speculation.begin_step(4)
    assert speculation.allot_rows() == 7
    assert [speculation.allot_rows() for _ in range(3)] == [10, 14, 28]
