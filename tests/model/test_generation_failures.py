"""A request that fails in generation affects neither other requests nor the KV cache."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from batching import step_times
from batching.errors import InvalidInput, ItemFailed, OutOfMemory
from batching.step_times import StepTimes
from tests.generating import (
    Driver,
    Served,
    assert_greedy,
    engine,
    greedy,
    prompts,
    request,
    serve,
)
from worker.engines.generation.engine import GenerationEngine
from worker.engines.generation.speculation import Speculation
from worker.messages.generation import Sampling

pytestmark = pytest.mark.usefixtures("steps")

POISON = 310  # a token that no other prompt has
LENGTHS = (3, 17, 30, 45)
NEW = 8


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_times, "MAX_PREFILL_TOKENS", {"cpu": 40})
    monkeypatch.setattr(step_times, "MIN_PREFILL_TOKENS", 40)


@contextmanager
def poisoned(generator: GenerationEngine) -> Iterator[None]:
    """The embedding of POISON is NaN, and so are the keys and values that attend to it."""
    embedding: Any = generator.runner.language.model.get_input_embeddings()
    original = embedding.weight.data[POISON].clone()
    embedding.weight.data[POISON] = float("nan")
    try:
        yield
    finally:
        embedding.weight.data[POISON] = original


@contextmanager
def raising(generator: GenerationEngine, error: Callable[[], Exception]) -> Iterator[list[int]]:
    """Steps with POISON among their tokens raise. Yields the widths of the steps."""
    runner: Any = generator.runner
    model = runner.model
    rows: list[int] = []

    def guarded(**inputs: Any) -> Any:
        rows.append(inputs["input_ids"].shape[1])
        if (inputs["input_ids"] == POISON).any():
            raise error()
        return model(**inputs)

    runner.model = guarded
    try:
        yield rows
    finally:
        runner.model = model


def with_guilty(prompts: Sequence[Sequence[int]], indices: Sequence[int]) -> list[list[int]]:
    """Put POISON into the middle of some prompts."""
    result = [list(prompt) for prompt in prompts]
    for index in indices:
        result[index][len(result[index]) // 2] = POISON
    return result


def assert_only_guilty_failed(served: Sequence[Served], kind: type[Exception]) -> None:
    assert any(POISON in one.prompt for one in served)
    for one in served:
        assert one.done
        if POISON in one.prompt:
            assert type(one.error) is kind
    assert_greedy("llama", [one for one in served if POISON not in one.prompt], NEW)


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_nan_fails_its_own_item_only(seed: int | None) -> None:
    generator = engine("llama", blocks=24)
    texts = with_guilty(prompts(8, LENGTHS), (0, 5, 6, 11))
    with poisoned(generator):
        for _ in range(2):  # the second time over the same blocks
            items = [request(prompt, max_tokens=NEW) for prompt in texts]
            served, _ = serve(generator, items, seed)
            assert_only_guilty_failed(served, ItemFailed)
    healed, _ = serve(generator, [request(prompt, max_tokens=NEW) for prompt in texts], seed)
    assert_greedy("llama", healed, NEW)  # nothing of the failed ones is in the prefix cache


def test_a_choice_that_fails_late_fails_its_item() -> None:
    """One choice samples the token that fails it, the others do not."""
    generator = engine("llama", blocks=40)
    prompt, mate = prompts(10, (20,), count=2)
    sampling = Sampling(temperature=1.0, seed=3, logit_bias={POISON: 6.0})
    for speculation in (Speculation("cpu", StepTimes()), None):
        generator._speculation = speculation
        with poisoned(generator):
            items = [request(prompt, sampling, 30, n=4), request(mate, max_tokens=NEW)]
            (failed, other), _ = serve(generator, items)
        assert type(failed.error) is ItemFailed
        assert str(failed.error) == "the model's output for this input is not a number"
        assert any(ids[-1] == POISON for ids in failed.ids)
        assert not all(POISON in ids for ids in failed.ids)
        assert_greedy("llama", [other], NEW)


def test_a_cancelled_prompt_leaves_nothing_in_its_blocks() -> None:
    """It is cancelled before its NaN output is read."""
    generator = engine("llama", blocks=8)
    [broken] = with_guilty(prompts(8, (100,), count=1), (0,))
    broken[10] = POISON
    with poisoned(generator):
        driver = Driver(generator)
        gone = driver.add(request(broken, max_tokens=NEW))
        driver.step()
        assert generator.scheduler.pool.used
        gone.item.open = False
        mates = [driver.add(request(p, max_tokens=NEW)) for p in prompts(11, (5, 20), count=3)]
        driver.finish()
    assert_greedy("llama", mates, NEW)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (lambda: ValueError("not this one"), ItemFailed),
        (lambda: MemoryError(), OutOfMemory),
        (lambda: RuntimeError("DefaultCPUAllocator: can't allocate memory"), OutOfMemory),
    ],
)
def test_a_step_that_raises_fails_the_guilty_items_only(
    error: Callable[[], Exception], kind: type[Exception]
) -> None:
    generator = engine("llama", blocks=24)
    texts = with_guilty(prompts(8, LENGTHS), (0, 5, 6, 11))
    with raising(generator, error):
        served, _ = serve(generator, [request(prompt, max_tokens=NEW) for prompt in texts], 4)
    assert_only_guilty_failed(served, kind)
    healed, _ = serve(generator, [request(prompt, max_tokens=NEW) for prompt in texts])
    assert_greedy("llama", healed, NEW)


def test_a_lost_device_is_raised_at_once() -> None:
    generator = engine("llama")
    driver = Driver(generator)
    items = [request(prompt) for prompt in with_guilty(prompts(8, LENGTHS), (0,))]
    for item in items:
        driver.add(item)
    with raising(generator, lambda: RuntimeError("CUDA error: an illegal memory access")) as rows:
        with pytest.raises(RuntimeError, match="CUDA error"):
            driver.finish()
        steps = len(rows)
    assert steps == len(driver.reports) + 1, "no half of the step ran again"
    assert set(generator.clear()) == set(items)
    assert generator.scheduler.pool.used == 0
    assert not generator.busy


def test_a_cancelled_onefrees_its_blocks_at_the_next_step() -> None:
    generator = engine("llama", blocks=200)
    driver = Driver(generator)
    served = [driver.add(request(prompt, max_tokens=40)) for prompt in prompts(8, LENGTHS)]
    several = driver.add(request(served[0].prompt, max_tokens=40, n=3))
    for _ in range(4):
        driver.step()
    before = generator.scheduler.pool.used
    leaving = [*served[::2], several]
    for one in leaving:
        one.item.open = False
    report = driver.step()
    assert report.blocks_used < before
    assert not {one.item for one in leaving} & set(generator.live)
    driver.finish()
    assert not any(one.done for one in leaving)
    staying = served[1::2]
    assert [one.ids[0] for one in staying] == greedy("llama", [one.prompt for one in staying], 40)


def test_clear_frees_all_blocks_and_returns_all_items() -> None:
    generator = engine("llama", blocks=12)
    driver = Driver(generator)
    items = [driver.add(request(prompt, n=2)).item for prompt in prompts(8, LENGTHS)]
    for _ in range(3):
        driver.step()
    assert generator.scheduler.waiting
    assert set(generator.clear()) == {item for item in items if item in driver.served}
    assert generator.scheduler.pool.used == 0
    assert not generator.busy
    served, _ = serve(
        generator, [request(prompt, max_tokens=NEW) for prompt in prompts(8, LENGTHS)]
    )
    assert_greedy("llama", served, NEW)


def test_a_warm_up_beside_running_sequences_changes_nothing() -> None:
    generator = engine("llama", blocks=12)
    driver = Driver(generator)
    served = [driver.add(request(prompt, max_tokens=NEW)) for prompt in prompts(8, LENGTHS)]
    while generator.busy:
        driver.step()
        used = generator.scheduler.pool.used
        generator.warm_up()
        assert generator.scheduler.pool.used == used
    assert_greedy("llama", served, NEW)


def test_a_warm_up_of_a_broken_model_raises() -> None:
    generator = engine("llama")
    weights: Any = generator.runner.language.model.get_input_embeddings()
    original = weights.weight.data[0].clone()
    weights.weight.data[0] = float("nan")
    try:
        with pytest.raises(ItemFailed):
            generator.warm_up()
    finally:
        weights.weight.data[0] = original
    assert generator.scheduler.pool.used == 0
    generator.warm_up()


@pytest.mark.parametrize(
    ("prompt", "changes", "param"),
    [
        ([], {}, "messages"),
        ([9999], {}, "messages"),
        ([7] * 257, {}, "messages"),
        ([7] * 250, {"max_tokens": 7}, "max_tokens"),
        ([7] * 250, {"max_tokens": None, "min_tokens": 7}, "min_tokens"),
        ([7] * 250, {"max_tokens": None, "default_tokens": 16, "min_tokens": 7}, "min_tokens"),
        ([7], {"stop_token_ids": (9999,)}, "stop_token_ids"),
        ([7], {"sampling": Sampling(logit_bias={9999: 1.0})}, "logit_bias"),
    ],
)
def test_invalid_requests_are_refused_before_they_run(
    prompt: list[int], changes: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidInput) as caught:
        engine("llama").prepare(request(prompt, **changes))
    assert caught.value.param == param


def test_min_tokens_is_refused_where_every_token_ends_the_response() -> None:
    generator = engine("llama")
    all_tokens = tuple(range(generator.runner.language.vocab_size))
    with pytest.raises(InvalidInput, match=r"^min_tokens: every token"):
        generator.prepare(request([7], stop_token_ids=all_tokens, min_tokens=1))
    generator.prepare(request([7], stop_token_ids=all_tokens))
    generator.prepare(request([7], stop_token_ids=all_tokens[1:], min_tokens=1, ignore_eos=True))


def test_a_default_limit_shrinks_to_the_rest_of_the_context() -> None:
    for length, limit in ((200, 16), (250, 6), (255, 1)):
        item = request([7] * length, max_tokens=None, default_tokens=16)
        engine("llama").prepare(item)
        assert item.prepared[0].prepared.max_tokens == limit


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "max_output_tokens"])
def test_a_limit_beyond_the_context_is_refused_by_its_own_name(name: str) -> None:
    with pytest.raises(InvalidInput, match=f"^{name}: 1000 tokens") as caught:
        engine("llama").prepare(request([7], max_tokens=1000, param=name))
    assert caught.value.param == name
