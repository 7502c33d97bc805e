"""What breaks one request's generation leaves its mates and the memory as they are."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from batching import scheduler
from batching.errors import InvalidInput, ItemFailed, OutOfMemory
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
from worker.generation.engine import GenerationEngine
from worker.generation.speculation import Speculation
from worker.messages.generation import Sampling

pytestmark = pytest.mark.usefixtures("steps")

POISON = 310  # a token that no other prompt has
LENGTHS = (3, 17, 30, 45)
NEW = 8


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "MAX_PREFILL_TOKENS", {"cpu": 40})
    monkeypatch.setattr(scheduler, "MIN_PREFILL_TOKENS", 40)


@contextmanager
def poisoned(generator: GenerationEngine) -> Iterator[None]:
    """POISON's embedding is no number, nor are the keys and values of whoever sees it."""
    embedding: Any = generator.runner.language.model.get_input_embeddings()
    was = embedding.weight.data[POISON].clone()
    embedding.weight.data[POISON] = float("nan")
    try:
        yield
    finally:
        embedding.weight.data[POISON] = was


@contextmanager
def raising(generator: GenerationEngine, error: Callable[[], Exception]) -> Iterator[list[int]]:
    """A step that has POISON among its tokens raises; gives how many rows the steps had."""
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


def with_guilty(given: Sequence[Sequence[int]], places: Sequence[int]) -> list[list[int]]:
    """Some prompts get POISON in their middle."""
    made = [list(prompt) for prompt in given]
    for place in places:
        made[place][len(made[place]) // 2] = POISON
    return made


def assert_only_guilty_failed(served: Sequence[Served], kind: type[Exception]) -> None:
    assert any(POISON in each.prompt for each in served)
    for each in served:
        assert each.done
        if POISON in each.prompt:
            assert type(each.error) is kind
    assert_greedy("llama", [each for each in served if POISON not in each.prompt], NEW)


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_numbers_that_are_none_fail_their_own_item_only(seed: int | None) -> None:
    generator = engine("llama", blocks=24)
    given = with_guilty(prompts(8, LENGTHS), (0, 5, 6, 11))
    with poisoned(generator):
        for _ in range(2):  # the second time over the same blocks
            items = [request(prompt, max_tokens=NEW) for prompt in given]
            served, _ = serve(generator, items, seed)
            assert_only_guilty_failed(served, ItemFailed)
    healed, _ = serve(generator, [request(prompt, max_tokens=NEW) for prompt in given], seed)
    assert_greedy("llama", healed, NEW)  # nobody has found what the broken ones left


def test_a_broken_choice_fails_its_item_and_its_blocks_are_not_found_again() -> None:
    generator = engine("llama", blocks=24)
    [broken] = with_guilty(prompts(8, (45,), each=1), (0,))
    sampling = Sampling(temperature=1.0, seed=5)
    whole = prompts(9, LENGTHS, each=1)
    with poisoned(generator):
        items = [request(broken, sampling, NEW, n=3), *(request(p, max_tokens=NEW) for p in whole)]
        served, driver = serve(generator, items)
        assert type(served[0].error) is ItemFailed
        assert_greedy("llama", served[1:], NEW)
    [again], driver = serve(generator, [request(broken, max_tokens=NEW)])
    assert driver.total("cached_tokens") == 0
    assert_greedy("llama", [again], NEW)


def test_a_choice_that_breaks_late_takes_its_item_along() -> None:
    """One choice draws the token that breaks it, the others are well."""
    generator = engine("llama", blocks=40)
    prompt, mate = prompts(10, (20,), each=2)
    sampling = Sampling(temperature=1.0, seed=3, logit_bias={POISON: 6.0})
    for speculation in (Speculation("cpu"), None):
        generator._speculation = speculation
        with poisoned(generator):
            items = [request(prompt, sampling, 30, n=4), request(mate, max_tokens=NEW)]
            (broken, well), _ = serve(generator, items)
        assert type(broken.error) is ItemFailed
        assert str(broken.error) == "the model's output for this input is not a number"
        assert any(ids[-1] == POISON for ids in broken.ids)
        assert not all(POISON in ids for ids in broken.ids)
        assert_greedy("llama", [well], NEW)


def test_an_abandoned_prompt_leaves_nothing_to_its_blocks_next_owner() -> None:
    """Nobody has looked at its output yet: that it is no number was not known."""
    generator = engine("llama", blocks=8)
    [broken] = with_guilty(prompts(8, (100,), each=1), (0,))
    broken[10] = POISON
    with poisoned(generator):
        driver = Driver(generator)
        gone = driver.add(request(broken, max_tokens=NEW))
        driver.step()
        assert generator.scheduler.pool.used
        gone.item.open = False
        mates = [driver.add(request(p, max_tokens=NEW)) for p in prompts(11, (5, 20), each=3)]
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
def test_a_step_that_raises_fails_the_guilty_only(
    error: Callable[[], Exception], kind: type[Exception]
) -> None:
    generator = engine("llama", blocks=24)
    given = with_guilty(prompts(8, LENGTHS), (0, 5, 6, 11))
    with raising(generator, error):
        served, _ = serve(generator, [request(prompt, max_tokens=NEW) for prompt in given], 4)
    assert_only_guilty_failed(served, kind)
    healed, _ = serve(generator, [request(prompt, max_tokens=NEW) for prompt in given])
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
    assert steps == len(driver.reports) + 1, "no half of it was tried again"
    assert set(generator.clear()) == set(items)
    assert generator.scheduler.pool.used == 0
    assert not generator.busy


def test_who_leaves_frees_its_blocks_at_the_next_step() -> None:
    generator = engine("llama", blocks=200)
    driver = Driver(generator)
    served = [driver.add(request(prompt, max_tokens=40)) for prompt in prompts(8, LENGTHS)]
    several = driver.add(request(served[0].prompt, max_tokens=40, n=3))
    for _ in range(4):
        driver.step()
    before = generator.scheduler.pool.used
    leaving = [*served[::2], several]
    for each in leaving:
        each.item.open = False
    report = driver.step()
    assert report.blocks_used < before
    assert not {each.item for each in leaving} & set(generator.live)
    driver.finish()
    assert not any(each.done for each in leaving)
    staying = served[1::2]
    assert [each.ids[0] for each in staying] == greedy("llama", [e.prompt for e in staying], 40)


def test_clear_gives_everything_back() -> None:
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


def test_a_warm_up_tells_that_the_model_is_broken() -> None:
    generator = engine("llama")
    weights: Any = generator.runner.language.model.get_input_embeddings()
    was = weights.weight.data[0].clone()
    weights.weight.data[0] = float("nan")
    try:
        with pytest.raises(ItemFailed):
            generator.warm_up()
    finally:
        weights.weight.data[0] = was
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
def test_what_does_not_fit_is_refused_before_it_runs(
    prompt: list[int], changes: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidInput) as caught:
        engine("llama").prepare(request(prompt, **changes))
    assert caught.value.param == param


def test_least_tokens_are_refused_where_every_token_ends_the_answer() -> None:
    generator = engine("llama")
    every = tuple(range(generator.runner.language.vocab_size))
    with pytest.raises(InvalidInput, match=r"^min_tokens: every token"):
        generator.prepare(request([7], stop_token_ids=every, min_tokens=1))
    generator.prepare(request([7], stop_token_ids=every))
    generator.prepare(request([7], stop_token_ids=every[1:], min_tokens=1, ignore_eos=True))


def test_a_default_gives_way_to_the_end_of_the_context() -> None:
    for length, most in ((200, 16), (250, 6), (255, 1)):
        item = request([7] * length, max_tokens=None, default_tokens=16)
        engine("llama").prepare(item)
        assert item.prepared[0].prepared.max_tokens == most


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "max_output_tokens"])
def test_more_than_the_context_holds_is_told_by_the_fields_own_name(name: str) -> None:
    with pytest.raises(InvalidInput, match=f"^{name}: 1000 tokens") as caught:
        engine("llama").prepare(request([7], max_tokens=1000, param=name))
    assert caught.value.param == name
