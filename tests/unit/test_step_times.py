"""Steps and batches of bounded time, by noisy measurements of earlier ones."""

import math
import random
from typing import Any

import pytest

from batching.step_times import (
    EFFICIENT_TOKENS,
    MAX_LARGE_PREFILL_S,
    MAX_PREFILL_S,
    MAX_PREFILL_TOKENS,
    MAX_PREFILL_TOKENS_WHOLE,
    MAX_TURN_ALONE_S,
    MAX_TURN_S,
    MIN_PREFILL_TOKENS,
    MIN_PREFILL_TOKENS_ALONE,
    PrefillBudget,
    StepTimes,
)

DECODE_S = 0.1
ROWS = 16


def trained(token_s: float, chance: random.Random, steps: int = 60) -> PrefillBudget:
    """Train it on its own steps, one in three without a prompt."""
    prefill = PrefillBudget("cpu")
    for number in range(steps):
        prompt = 0 if number % 3 == 2 else prefill.prompt_tokens(streaming=True)
        seconds = (DECODE_S + prompt * token_s) * chance.uniform(0.9, 1.2)
        prefill.times.learn(prompt, ROWS, seconds)
    return prefill


def within(seconds: float, token_s: float) -> Any:
    return pytest.approx(seconds / token_s, rel=0.3)


@pytest.mark.parametrize(
    ("token_s", "streaming", "tokens"),
    [
        (1.0, True, MIN_PREFILL_TOKENS),
        *((token_s, True, within(MAX_PREFILL_S["cpu"], token_s)) for token_s in (0.001, 0.006)),
        (0.005, False, within(MAX_TURN_ALONE_S, 0.005)),
        # more tokens than run efficiently would delay a request that arrives
        (0.0002, True, MIN_PREFILL_TOKENS_ALONE["cpu"]),
        (0.0002, False, MIN_PREFILL_TOKENS_ALONE["cpu"]),
        # a fast model takes what fits into the time
        (0.00004, True, within(MAX_LARGE_PREFILL_S, 0.00004)),
        (0.00004, False, within(MAX_LARGE_PREFILL_S, 0.00004)),
        (1e-6, True, MAX_PREFILL_TOKENS["cpu"]),
    ],
)
def test_prompts_of_a_step_take_a_limited_time(
    token_s: float, streaming: bool, tokens: Any
) -> None:
    for seed in range(3):
        assert trained(token_s, random.Random(seed)).prompt_tokens(streaming) == tokens


@pytest.mark.parametrize("streaming", [True, False])
def test_prompts_advance_however_slow_a_step_was(streaming: bool) -> None:
    prefill = PrefillBudget("cpu")
    prefill.times.learn(20, 0, 60.0)
    assert prefill.prompt_tokens(streaming, spent_s=1.0) == MIN_PREFILL_TOKENS


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_before_any_measurement_the_minimum_is_taken(device: str, streaming: bool) -> None:
    assert PrefillBudget(device).prompt_tokens(streaming) == MIN_PREFILL_TOKENS_ALONE[device]
    whole = PrefillBudget(device, whole_prompts=True)
    assert whole.prompt_tokens(streaming=True) == MIN_PREFILL_TOKENS_ALONE[device]


@pytest.mark.parametrize(
    ("token_s", "tokens"),
    [
        (0.0, MAX_PREFILL_TOKENS_WHOLE["cpu"]),
        (0.00005, MAX_PREFILL_TOKENS_WHOLE["cpu"]),
        (0.0004, int(MAX_TURN_ALONE_S / 0.0004)),
        (0.1, MIN_PREFILL_TOKENS_ALONE["cpu"]),
    ],
)
def test_whole_prompts_take_longer_steps_without_streams(token_s: float, tokens: int) -> None:
    prefill = PrefillBudget("cpu", whole_prompts=True)
    prefill.times.learn(100, 0, 100 * token_s)
    assert prefill.prompt_tokens(streaming=False) == pytest.approx(tokens, abs=1)


def test_chunks_that_take_longer_with_each_one_stay_within_the_time() -> None:
    """Without paged attention the chunks of a long prompt do, and the next prompt begins anew."""
    prefill, times_s = PrefillBudget("cpu", whole_prompts=True), list[float]()
    for _ in range(4):
        position = 0
        while position < 4000:
            tokens = prefill.prompt_tokens(streaming=True)
            position += tokens
            times_s.append(tokens * (0.0002 + 5e-7 * position))
            prefill.times.learn(tokens, 0, times_s[-1], tokens * (position - tokens / 2))
    assert len(times_s) > 20
    assert max(times_s[2:]) < 2 * MAX_PREFILL_S["cpu"]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_step_beside_streams_is_longer_by_the_time_of_its_device(device: str) -> None:
    """On a GPU streams pause for a shorter time: its steps are shorter."""
    prefill, token_s = PrefillBudget(device), 1e-4 if device == "cuda" else 1e-3
    prefill.times.learn(0, ROWS, DECODE_S)
    prefill.times.learn(200, ROWS, DECODE_S + 200 * token_s)
    tokens = prefill.prompt_tokens(streaming=True)
    assert tokens * token_s == pytest.approx({"cpu": 0.2, "cuda": 0.1}[device], rel=0.1)


@pytest.mark.parametrize("whole_prompts", [False, True])
def test_a_step_beside_other_models_takes_a_turn(whole_prompts: bool) -> None:
    prefill = PrefillBudget("cpu", whole_prompts)
    prefill.times.learn(200, 0, 0.2)
    assert prefill.prompt_tokens(True, max_turn_s=MAX_TURN_S) == pytest.approx(200, abs=1)
    assert prefill.prompt_tokens(True, 0.1, MAX_TURN_S) == pytest.approx(100, abs=1)
    for streaming in (True, False):  # and alone as long as ever
        alone = prefill.prompt_tokens(streaming, max_turn_s=MAX_TURN_ALONE_S)
        assert alone == prefill.prompt_tokens(streaming)


def test_the_tokens_that_double_a_step_are_measured() -> None:
    prefill = trained(0.001, random.Random(0))
    assert prefill.doubling_tokens(ROWS) == pytest.approx(100, rel=0.3)
    assert PrefillBudget("cpu").doubling_tokens(ROWS) == MAX_PREFILL_TOKENS["cpu"]
    slow = trained(1.0, random.Random(0))
    assert slow.doubling_tokens(ROWS) == MIN_PREFILL_TOKENS


def test_one_slow_step_is_forgotten() -> None:
    prefill = trained(0.005, random.Random(1))
    usual = prefill.prompt_tokens(streaming=True)
    prefill.times.learn(usual, ROWS, 5.0)
    assert prefill.prompt_tokens(streaming=True) == MIN_PREFILL_TOKENS
    for _ in range(12):
        tokens = prefill.prompt_tokens(streaming=True)
        prefill.times.learn(tokens, ROWS, DECODE_S + tokens * 0.005)
    assert prefill.prompt_tokens(streaming=True) > 0.9 * usual


def test_a_slow_first_step_is_forgotten() -> None:
    """The smaller steps after it count as well."""
    prefill = PrefillBudget("cpu")
    prefill.times.learn(MAX_PREFILL_TOKENS["cpu"], 0, 5.0)
    for number in range(40):
        tokens = prefill.prompt_tokens(streaming=True) * (number % 2)
        prefill.times.learn(tokens, ROWS, DECODE_S + tokens * 0.003)
    assert prefill.prompt_tokens(streaming=True) > 0.9 * MAX_PREFILL_S["cpu"] / 0.003


def test_a_step_of_few_prompt_tokens_is_not_measured() -> None:
    prefill = trained(0.005, random.Random(2))
    usual = prefill.prompt_tokens(streaming=True)
    prefill.times.learn(1, ROWS, DECODE_S + 0.2)
    assert prefill.prompt_tokens(streaming=True) == pytest.approx(usual, abs=2)


def test_time_spent_on_images_is_not_left_for_prompts() -> None:
    prefill = trained(0.001, random.Random(3))
    usual = prefill.prompt_tokens(streaming=True)
    assert prefill.prompt_tokens(streaming=True, spent_s=MAX_PREFILL_S["cpu"] / 2) == pytest.approx(
        usual / 2, 0.1
    )
    assert (
        prefill.prompt_tokens(streaming=True, spent_s=2 * MAX_PREFILL_S["cpu"])
        == MIN_PREFILL_TOKENS
    )
    alone = prefill.prompt_tokens(streaming=False, spent_s=2 * MAX_PREFILL_S["cpu"])
    assert alone * 0.001 == pytest.approx(MAX_TURN_ALONE_S, rel=0.3)


# ── rows ──


def test_noise_of_steps_of_similar_sizes_makes_rows_neither_free_nor_dear() -> None:
    times = StepTimes()
    for n in range(400):  # the larger ones are faster by chance
        times.learn(0, 250 + n % 6, 0.0022 + 0.00007 * 250 + 0.002 * (n % 6 < 3))
    assert 20 < times.spare_rows < 100


def test_a_delayed_step_changes_the_cost_of_a_row_little() -> None:
    times = StepTimes()
    for rows in (2, 256, 16, 100, 256) * 10:
        times.learn(0, rows, 0.002 + 0.0001 * rows)
    times.learn(0, 2, 0.270)  # the preparation of many requests took the cores
    assert 20 < times.spare_rows < 40
    for rows in (2, 256, 16, 100, 256) * 40:
        times.learn(0, rows, 10 * (0.002 + 0.0001 * rows) + 0.1)  # it stays slow
    assert 100 < times.spare_rows < 130


def test_the_cost_of_a_row_is_measured() -> None:
    times = StepTimes()
    assert times.spare_rows == 50  # an assumption
    for rows in (1, 128, 1, 40, 128) * 4:
        times.learn(0, rows, 0.010 + 0.001 * rows)
    assert 9 < times.spare_rows < 12
    for rows in (1, 128, 1, 40, 128) * 40:
        times.learn(0, rows, 0.010)  # as on a GPU
    assert times.spare_rows > 128


# ── batches ──


def learned(*batches: tuple[int, float]) -> StepTimes:
    times = StepTimes()
    for tokens, seconds in batches:
        times.learn(tokens, 0, seconds)
    return times


ONE = (1000, MAX_TURN_S)  # tokens that take a turn


@pytest.mark.parametrize(
    ("batches", "sizes", "fewest", "most"),
    [
        ([ONE], [250] * 8, 4, 4),
        ([ONE], [900, 200, 50], 1, 1),
        ([ONE], [100, 100], 2, 2),
        # a row that takes longer runs alone
        ([ONE], [5000, 10], 1, 1),
        ([ONE], [10, 5000], 1, 1),
        # before a batch was measured
        ([], [100] * 3, 3, 3),
        # most of a small batch is its constant time
        ([ONE, *[(10, MAX_TURN_S / 10)] * 50], [100] * 20, 9, 10),
        # a small first batch is corrected by the next
        ([(3, MAX_TURN_S), *[(250, MAX_TURN_S / 5)] * 12], [250] * 8, 3, 5),
        # the machine is slower now
        ([ONE, *[(1000, 4 * MAX_TURN_S)] * 30], [125] * 8, 1, 2),
        ([ONE, *[(250, MAX_TURN_S)] * 30], [125] * 8, 1, 2),
    ],
)
def test_as_many_rows_fit_as_run_within_a_turn(
    batches: list[tuple[int, float]], sizes: list[int], fewest: int, most: int
) -> None:
    assert fewest <= learned(*batches).fitting(sizes, MAX_TURN_S) <= most


def test_rows_fit_by_the_length_of_a_turn_and_the_number_of_its_layers() -> None:
    assert learned(ONE).fitting([250] * 80, math.inf) == 80
    assert learned(ONE).fitting([250] * 80, MAX_TURN_S, 12) == 48  # each layer may take a turn


def test_without_other_models_a_request_that_arrives_waits_for_a_short_batch() -> None:
    """A document in 80 strides of a model that takes 0.0002 s per token."""
    times = learned((330, 330 * 0.0002))
    rows = times.fitting([330] * 80, MAX_TURN_ALONE_S)
    assert 0.9 * MAX_TURN_ALONE_S - 330 * 0.0002 < 330 * 0.0002 * rows <= MAX_TURN_ALONE_S < 0.5


def test_an_efficient_batch_is_cut_only_beside_other_models() -> None:
    times, rows = learned((10, MAX_TURN_ALONE_S)), [EFFICIENT_TOKENS // 4] * 8
    assert times.fitting(rows, MAX_TURN_ALONE_S) == 4
    assert times.fitting(rows, MAX_TURN_S) == 1


@pytest.mark.parametrize("rows", [1, 8])
def test_steps_without_prompts_do_not_make_tokens_dear(rows: int) -> None:
    """A step with a short prompt takes as long as one without: the fit says nothing of tokens."""
    times = StepTimes()
    for _ in range(3):
        times.learn(20, 0, 0.0095)
        for _ in range(800):
            times.learn(0, rows, 0.01)
            assert times.token_s <= 0.01 / 20 * 1.01
