"""The prefill budget: bounded step times, learned from noisy measurements."""

import random

import pytest

from batching.scheduler import (
    MAX_LARGE_PREFILL_S,
    MAX_PREFILL_S,
    MAX_PREFILL_TOKENS,
    MAX_PREFILL_TOKENS_WHOLE,
    MIN_PREFILL_TOKENS,
    MIN_PREFILL_TOKENS_ALONE,
    PrefillBudget,
)
from batching.turn_budget import MAX_TURN_ALONE_S, MAX_TURN_S

DECODE_S = 0.1
ROWS = 16


def trained(token_s: float, chance: random.Random, steps: int = 60) -> PrefillBudget:
    """Train it on its own steps, one in three without a prompt."""
    prefill = PrefillBudget("cpu")
    for number in range(steps):
        prompt = 0 if number % 3 == 2 else prefill.prompt_tokens(streaming=True)
        seconds = (DECODE_S + prompt * token_s) * chance.uniform(0.9, 1.2)
        if prompt:
            prefill.learn(prompt, ROWS, seconds)
        else:
            prefill.decode_s = seconds
    return prefill


def test_without_streams_a_slow_model_takes_more_but_not_the_maximum() -> None:
    prefill = trained(0.005, random.Random(0))
    assert prefill.prompt_tokens(streaming=True) < MIN_PREFILL_TOKENS_ALONE["cpu"]
    assert prefill.prompt_tokens(streaming=False) == MIN_PREFILL_TOKENS_ALONE["cpu"]
    assert MIN_PREFILL_TOKENS_ALONE["cpu"] < MAX_PREFILL_TOKENS["cpu"]


@pytest.mark.parametrize("streaming", [True, False])
def test_a_fast_model_takes_what_fits_into_the_time(streaming: bool) -> None:
    tokens = trained(0.00004, random.Random(0)).prompt_tokens(streaming)
    assert MIN_PREFILL_TOKENS_ALONE["cpu"] < tokens < MAX_PREFILL_TOKENS["cpu"]
    assert tokens * 0.00004 == pytest.approx(MAX_LARGE_PREFILL_S, rel=0.3)


@pytest.mark.parametrize("streaming", [True, False])
def test_more_tokens_than_run_efficiently_do_not_delay_a_request_that_arrives(
    streaming: bool,
) -> None:
    tokens = trained(0.0002, random.Random(0)).prompt_tokens(streaming)
    assert tokens == MIN_PREFILL_TOKENS_ALONE["cpu"]


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_before_any_measurement_the_minimum_is_taken(device: str, streaming: bool) -> None:
    assert PrefillBudget(device).prompt_tokens(streaming) == MIN_PREFILL_TOKENS_ALONE[device]


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
    prefill.learn(100, 0, 100 * token_s)
    assert prefill.prompt_tokens(streaming=False) == tokens


def test_whole_prompts_beside_streams_take_the_minimum_before_any_measurement() -> None:
    tokens = PrefillBudget("cpu", whole_prompts=True).prompt_tokens(streaming=True)
    assert tokens == MIN_PREFILL_TOKENS_ALONE["cpu"]


def test_chunks_that_take_longer_with_each_one_stay_within_the_time() -> None:
    """Without paged attention the chunks of a long prompt do, and the next prompt begins anew."""
    prefill, times_s = PrefillBudget("cpu", whole_prompts=True), list[float]()
    for _ in range(4):
        position = 0
        while position < 4000:
            tokens = prefill.prompt_tokens(streaming=True)
            position += tokens
            times_s.append(tokens * (0.0002 + 5e-7 * position))
            prefill.learn(tokens, 0, times_s[-1])
    assert len(times_s) > 20
    assert max(times_s[2:]) < 1.5 * MAX_PREFILL_S["cpu"]


@pytest.mark.parametrize("token_s", [0.001, 0.003, 0.006])
@pytest.mark.parametrize("seed", range(5))
def test_prompts_make_a_step_longer_by_the_allowed_time(token_s: float, seed: int) -> None:
    tokens = trained(token_s, random.Random(seed)).prompt_tokens(streaming=True)
    assert 0.7 < tokens * token_s / MAX_PREFILL_S["cpu"] < 1.2


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_step_beside_streams_is_longer_by_the_time_of_its_device(device: str) -> None:
    """On a GPU streams pause for a shorter time: its steps are shorter."""
    prefill, token_s = PrefillBudget(device), 1e-4 if device == "cuda" else 1e-3
    prefill.decode_s = DECODE_S
    prefill.learn(200, ROWS, DECODE_S + 200 * token_s)
    tokens = prefill.prompt_tokens(streaming=True)
    assert tokens * token_s == pytest.approx({"cpu": 0.3, "cuda": 0.1}[device], rel=0.01)


@pytest.mark.parametrize("whole_prompts", [False, True])
def test_a_step_beside_other_models_takes_a_turn(whole_prompts: bool) -> None:
    prefill = PrefillBudget("cpu", whole_prompts)
    prefill.learn(200, 0, 0.2)
    assert prefill.prompt_tokens(True, max_turn_s=MAX_TURN_S) == pytest.approx(200, abs=1)
    assert prefill.prompt_tokens(True, 0.1, MAX_TURN_S) == pytest.approx(100, abs=1)
    for streaming in (True, False):  # and alone as long as ever
        alone = prefill.prompt_tokens(streaming, max_turn_s=MAX_TURN_ALONE_S)
        assert alone == prefill.prompt_tokens(streaming)


@pytest.mark.parametrize(
    ("token_s", "tokens"), [(1.0, MIN_PREFILL_TOKENS), (1e-6, MAX_PREFILL_TOKENS["cpu"])]
)
def test_the_budget_has_a_minimum_and_a_maximum(token_s: float, tokens: int) -> None:
    assert trained(token_s, random.Random(0)).prompt_tokens(streaming=True) == tokens


def test_the_tokens_that_double_a_step_are_measured() -> None:
    prefill = trained(0.001, random.Random(0))
    prefill.decode_s = 0.1
    assert prefill.doubling_tokens == pytest.approx(100, rel=0.3)
    prefill.decode_s = 0.0
    assert prefill.doubling_tokens == MIN_PREFILL_TOKENS
    assert PrefillBudget("cpu").doubling_tokens == MIN_PREFILL_TOKENS


def test_one_slow_step_is_forgotten() -> None:
    prefill = trained(0.005, random.Random(1))
    usual = prefill.prompt_tokens(streaming=True)
    prefill.learn(usual, ROWS, 5.0)
    assert prefill.prompt_tokens(streaming=True) == MIN_PREFILL_TOKENS
    for _ in range(12):
        tokens = prefill.prompt_tokens(streaming=True)
        prefill.learn(tokens, ROWS, DECODE_S + tokens * 0.005)
    assert prefill.prompt_tokens(streaming=True) > 0.9 * usual


def test_a_slow_first_step_is_forgotten() -> None:
    """The smaller steps after it count as well."""
    prefill = PrefillBudget("cpu")
    prefill.learn(MAX_PREFILL_TOKENS["cpu"], 0, 5.0)
    for number in range(40):
        tokens = prefill.prompt_tokens(streaming=True) * (number % 2)
        if tokens:
            prefill.learn(tokens, ROWS, DECODE_S + tokens * 0.003)
        else:
            prefill.decode_s = DECODE_S
    assert prefill.prompt_tokens(streaming=True) > 0.9 * MAX_PREFILL_S["cpu"] / 0.003


def test_a_step_of_few_prompt_tokens_is_not_measured() -> None:
    prefill = trained(0.005, random.Random(2))
    usual = prefill.prompt_tokens(streaming=True)
    prefill.learn(1, ROWS, DECODE_S + 0.2)
    assert prefill.prompt_tokens(streaming=True) == usual


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
    assert (
        prefill.prompt_tokens(streaming=False, spent_s=2 * MAX_PREFILL_S["cpu"])
        == MIN_PREFILL_TOKENS_ALONE["cpu"]
    )
