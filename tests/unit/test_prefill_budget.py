"""Prompts in a step: as many as streams can bear, learned from times with noise."""

import random

import pytest

from batching.scheduler import (
    MAX_PREFILL_S,
    MAX_PREFILL_TOKENS,
    MAX_PREFILL_TOKENS_WHOLE,
    MIN_PREFILL_TOKENS,
    MIN_PREFILL_TOKENS_ALONE,
    PrefillBudget,
)

DECODE_S = 0.1
ROWS = 16


def taught(token_s: float, chance: random.Random, steps: int = 60) -> PrefillBudget:
    """By its own steps, one in three without a prompt."""
    pace = PrefillBudget("cpu")
    for number in range(steps):
        prompt = 0 if number % 3 == 2 else pace.prompt_tokens(streaming=True)
        seconds = (DECODE_S + prompt * token_s) * chance.uniform(0.9, 1.2)
        if prompt:
            pace.learn(prompt, ROWS, seconds)
        else:
            pace.decode_s = seconds
    return pace


def test_while_nobody_streams_a_slow_model_takes_more_but_not_the_most() -> None:
    pace = taught(0.005, random.Random(0))
    assert pace.prompt_tokens(streaming=True) < MIN_PREFILL_TOKENS_ALONE["cpu"]
    assert pace.prompt_tokens(streaming=False) == MIN_PREFILL_TOKENS_ALONE["cpu"]
    assert MIN_PREFILL_TOKENS_ALONE["cpu"] < MAX_PREFILL_TOKENS["cpu"]


@pytest.mark.parametrize("streaming", [True, False])
def test_a_quick_model_takes_what_fits_into_the_time(streaming: bool) -> None:
    tokens = taught(0.0003, random.Random(0)).prompt_tokens(streaming)
    assert MIN_PREFILL_TOKENS_ALONE["cpu"] < tokens < MAX_PREFILL_TOKENS["cpu"]


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_as_long_as_nothing_is_known(device: str, streaming: bool) -> None:
    assert PrefillBudget(device).prompt_tokens(streaming) == MIN_PREFILL_TOKENS_ALONE[device]


def test_where_prompts_run_whole_a_step_takes_the_most_while_nobody_streams() -> None:
    pace = PrefillBudget("cpu", whole_prompts=True)
    pace.learn(100, 0, 10.0)
    assert pace.prompt_tokens(streaming=False) == MAX_PREFILL_TOKENS_WHOLE["cpu"]
    assert pace.prompt_tokens(streaming=True) == MIN_PREFILL_TOKENS


@pytest.mark.parametrize("token_s", [0.001, 0.003, 0.006])
@pytest.mark.parametrize("seed", range(5))
def test_prompts_make_a_step_longer_by_what_is_allowed(token_s: float, seed: int) -> None:
    tokens = taught(token_s, random.Random(seed)).prompt_tokens(streaming=True)
    assert 0.7 < tokens * token_s / MAX_PREFILL_S < 1.2


@pytest.mark.parametrize(
    ("token_s", "tokens"), [(1.0, MIN_PREFILL_TOKENS), (1e-6, MAX_PREFILL_TOKENS["cpu"])]
)
def test_there_is_a_least_and_a_most(token_s: float, tokens: int) -> None:
    assert taught(token_s, random.Random(0)).prompt_tokens(streaming=True) == tokens


def test_one_slow_step_is_forgotten() -> None:
    pace = taught(0.005, random.Random(1))
    usual = pace.prompt_tokens(streaming=True)
    pace.learn(usual, ROWS, 5.0)
    assert pace.prompt_tokens(streaming=True) == MIN_PREFILL_TOKENS
    for _ in range(12):
        tokens = pace.prompt_tokens(streaming=True)
        pace.learn(tokens, ROWS, DECODE_S + tokens * 0.005)
    assert pace.prompt_tokens(streaming=True) > 0.9 * usual


def test_a_slow_first_step_is_forgotten() -> None:
    """It would be the only one to teach, did the others not count because they are smaller."""
    pace = PrefillBudget("cpu")
    pace.learn(MAX_PREFILL_TOKENS["cpu"], 0, 5.0)
    for number in range(40):
        tokens = pace.prompt_tokens(streaming=True) * (number % 2)
        if tokens:
            pace.learn(tokens, ROWS, DECODE_S + tokens * 0.003)
        else:
            pace.decode_s = DECODE_S
    assert pace.prompt_tokens(streaming=True) > 0.9 * MAX_PREFILL_S / 0.003


def test_a_steps_last_few_prompt_tokens_teach_nothing() -> None:
    pace = taught(0.005, random.Random(2))
    usual = pace.prompt_tokens(streaming=True)
    pace.learn(1, ROWS, DECODE_S + 0.2)
    assert pace.prompt_tokens(streaming=True) == usual


def test_what_a_picture_took_of_a_step_is_not_there_for_prompts() -> None:
    pace = taught(0.001, random.Random(3))
    usual = pace.prompt_tokens(streaming=True)
    assert pace.prompt_tokens(streaming=True, spent_s=MAX_PREFILL_S / 2) == pytest.approx(
        usual / 2, 0.1
    )
    assert pace.prompt_tokens(streaming=True, spent_s=2 * MAX_PREFILL_S) == MIN_PREFILL_TOKENS
    assert (
        pace.prompt_tokens(streaming=False, spent_s=2 * MAX_PREFILL_S)
        == MIN_PREFILL_TOKENS_ALONE["cpu"]
    )
