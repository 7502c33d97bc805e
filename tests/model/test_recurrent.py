"""Models with recurrent layers run on paged memory, with the output of transformers' `generate`."""

import random
from typing import Any

import pytest

from batching.state_pool import StatePool
from tests import multimodal, tiny_decoders
from tests.generating import (
    ORDINARY,
    Driver,
    Served,
    assert_greedy,
    engine,
    greedy,
    loaded,
    prompts,
    request,
    runner_of,
    serve,
)
from tests.matrix import matrix
from tests.model.test_generation import FEATURES, LENGTHS, check_parity
from tests.model.test_generation_answers import assert_scored
from worker.backends.native_attention import NativeMetadata
from worker.engines.generation.speculation import NgramDrafter, Speculation
from worker.messages.generation import Sampling
from worker.model.attention.kv_cache import BLOCK
from worker.model.paged_runner import PagedRunner

PAGED = list(tiny_decoders.RECURRENT)
HYBRIDS = ("qwen3.5", "lfm2", "granite4", "falcon-h1", "qwen3-next")
SEEDED = Sampling(temperature=1.0, seed=11, logprobs=3)
NEW = 12


def tokens(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(ORDINARY, k=count)


def texts(seed: int) -> list[list[int]]:
    """Prompts, and each again with more tokens: a checkpoint lies where a prompt has ended."""
    first = prompts(seed, LENGTHS, 1)
    return [[*prompt, *more] for n, prompt in enumerate(first) for more in ((), tokens(5, n))]


def states_of(driver: Driver) -> StatePool:
    states = driver.generator.scheduler.pool.states
    assert states is not None
    return states


@pytest.fixture
def drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the modules' own forwards verify drafts, one after another."""
    monkeypatch.setattr(PagedRunner, "verifies_drafts", True)


@pytest.mark.usefixtures("steps", "drafts")
@pytest.mark.parametrize("model", matrix(PAGED, "qwen3.5"))
def test_greedy_output_equals_generate(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_parity(model, FEATURES, 1, monkeypatch, texts=texts(1))


@pytest.mark.usefixtures("steps", "native", "drafts")
@pytest.mark.parametrize("model", matrix(PAGED, "falcon-h1"))
def test_greedy_output_with_native_attention_equals_generate(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_parity(model, FEATURES, 1, monkeypatch, NativeMetadata, texts(1))


@pytest.mark.usefixtures("drafts")
@pytest.mark.parametrize("feature", [*sorted(FEATURES), None])
def test_each_feature_alone_leaves_the_output_unchanged(
    feature: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    features = frozenset({feature} if feature else ())
    check_parity("qwen3.5", features, 2, monkeypatch, texts=texts(2))


@pytest.mark.parametrize("model", ["jamba", "mamba"])
def test_a_state_that_is_lost_between_chunks_continues_token_by_token(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers' modules lose it when a prompt continues with several tokens."""
    check_parity(model, FEATURES - {"speculation"}, 1, monkeypatch, texts=texts(1))
    modules = loaded(model).runner.language.recurrent
    assert all(module.stepwise for module in modules)
    assert not any(module.stepwise for module in loaded("qwen3.5").runner.language.recurrent)


@pytest.mark.usefixtures("drafts")
def test_a_conversation_with_drafts_computes_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft that crosses the end of a block leaves the checkpoint there."""
    history = tokens(23)
    answer = greedy("qwen3.5", [history], 30)[0]
    text = [*history, *answer]
    monkeypatch.setattr(Speculation, "worthwhile", lambda budget, acceptance, limit: limit)
    monkeypatch.setattr(
        NgramDrafter, "draft", lambda self, ids, limit: tuple(text[len(ids) :][: min(5, limit)])
    )
    driver = Driver(engine("qwen3.5"))
    served = driver.add(request(history, max_tokens=30))
    driver.finish()
    assert served.ids == [answer]
    assert driver.total("accepted") == driver.total("drafted") > 20
    again = driver.add(request([*text, *tokens(9, 1)], max_tokens=1))
    driver.finish()
    assert again.sequences[0].cached == (len(text) - 1) // BLOCK * BLOCK


def test_a_prompt_that_leaves_another_one_is_continued_by_the_next() -> None:
    """A shared beginning gets its checkpoint by the first prompt that leaves it."""
    driver, shared = Driver(engine("qwen3.5")), tokens(5 * BLOCK + 3)
    cached = []
    for number in range(3):
        served = driver.add(request(shared + tokens(20, 1 + number), max_tokens=NEW))
        driver.finish()
        assert_greedy("qwen3.5", [served], NEW)
        cached.append(served.sequences[0].cached)
    assert cached == [0, 0, 5 * BLOCK]


def test_the_choices_of_a_request_continue_from_its_prompt(monkeypatch: Any) -> None:
    prompt = tokens(50)
    (served,), driver = serve(engine("qwen3.5"), [request(prompt, max_tokens=NEW, n=4)])
    assert served.ids == greedy("qwen3.5", [prompt], NEW) * 4
    assert driver.total("prefill_tokens") == 50 + 3 * (50 - 3 * BLOCK)


def test_a_failed_step_runs_again_from_the_same_states(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = engine("qwen3.5")
    runner, calls = runner_of(generator), 0
    forward = runner.forward

    def failing(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        logits = forward(*args)
        if len(args[0].chunks) > 1:
            raise ValueError  # after all states are written
        return logits

    monkeypatch.setattr(runner, "forward", failing)
    served, _ = serve(generator, [request(tokens(30, n), max_tokens=NEW) for n in range(4)])
    assert_greedy("qwen3.5", served, NEW)
    assert calls > 2 * NEW


def test_a_cancelled_request_frees_its_states() -> None:
    driver = Driver(engine("qwen3.5"))
    stays, leaves = (driver.add(request(tokens(40, n), max_tokens=NEW)) for n in range(2))
    driver.step()
    driver.step()
    assert states_of(driver).sequences == 2
    assert driver.reports[-1].states_used >= 4
    leaves.item.open = False
    driver.step()
    assert states_of(driver).sequences == 1
    driver.finish()
    assert states_of(driver).sequences == 0
    assert_greedy("qwen3.5", [stays], NEW)


def test_sequences_beyond_the_states_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = engine("qwen3.5", state_sequences=2)
    served, driver = serve(generator, [request(tokens(20, n), max_tokens=NEW) for n in range(5)])
    assert max(report.running for report in driver.reports) == 2
    assert max(report.states_used for report in driver.reports) <= driver.reports[0].states_total
    assert_greedy("qwen3.5", served, NEW)


def test_checkpoints_are_bounded() -> None:
    generator = engine("qwen3.5", state_sequences=2, checkpoints=3)
    served: list[Served] = []
    for seed in range(6):
        more, driver = serve(generator, [request(tokens(40, seed), max_tokens=NEW)])
        served += more
        assert states_of(driver).used <= 3
    assert_greedy("qwen3.5", served, NEW)


# ── scores, seeds and choices ──


@pytest.mark.usefixtures("steps", "drafts")
@pytest.mark.parametrize("model", matrix(HYBRIDS, "qwen3.5", "lfm2"))
def test_prompts_and_outputs_are_scored_by_the_raw_distribution(model: str) -> None:
    items = [request(tokens(n, n), SEEDED, echo=True) for n in (1, 40, 150)]
    served, _ = serve(engine(model), items, seed=2)
    for one in served:
        assert_scored(one.choices[0].logprobs, [*one.prompt, *one.ids[0]], 0, 3, model)


@pytest.mark.usefixtures("steps", "drafts")
@pytest.mark.parametrize("model", matrix(HYBRIDS, "qwen3.5", "granite4"))
def test_seeds_draw_the_same_alone_and_beside_others(model: str) -> None:
    def items() -> list[Any]:
        prompts = [tokens(9 * n + 1, n % 3) for n in range(6)]
        return [request(prompt, SEEDED, max_tokens=10, n=2) for prompt in prompts]

    alone = [serve(engine(model), [item])[0][0] for item in items()]
    assert all(len(one.choices) == 2 for one in alone)
    for blocks in (400, 12):
        served, driver = serve(engine(model, blocks), items(), seed=blocks)
        assert bool(driver.total("preempted")) == (blocks == 12)
        assert [one.ids for one in served] == [one.ids for one in alone]


# ── images ──


@pytest.mark.usefixtures("steps")
def test_prefixes_with_equal_images_are_continued() -> None:
    driver = Driver(multimodal.engine("qwen3.5-vl"))
    cached: list[int] = []
    for seed in (0, 0, 1):
        parts = "What are these, and for what? ", multimodal.png(seed), " Tell me, please!"
        served = driver.add(multimodal.request(*parts))
        driver.finish()
        multimodal.assert_generated("qwen3.5-vl", [served])
        cached.append(served.sequences[0].cached or 0)
    assert cached[0] == 0
    assert cached[1] > cached[2]
