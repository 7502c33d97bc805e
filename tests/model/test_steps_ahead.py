"""Steps launched before the last one's results are read: outputs do not change."""

from typing import Any

import pytest

from batching.errors import ItemFailed
from batching.sequence import Batch
from tests import tiny_decoders
from tests.generating import (
    Driver,
    assert_greedy,
    built,
    engine,
    greedy,
    prompts,
    request,
    runner_of,
    serve,
)
from worker.backends.cached_runner import CachedRunner
from worker.engines.generation import engine as module
from worker.engines.generation.engine import GenerationEngine
from worker.engines.generation.loading import cached_engine
from worker.messages.generation import Sampling
from worker.model import sampler
from worker.model.attention.kv_cache import BLOCK
from worker.model.language_model import GeneratorOptions
from worker.model.sampler import SamplerOutput


@pytest.fixture(autouse=True)
def _ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(module.RUNS_AHEAD, "cpu", True)


def engine_ahead(**options: Any) -> GenerationEngine:
    return engine("llama", speculation="off", **options)


def cached() -> GenerationEngine:
    runner = CachedRunner(built("llama", tiny_decoders.BUILDERS["llama"]))
    return cached_engine(runner, GeneratorOptions("", speculation="off"), "")


def count_widths(generator: GenerationEngine) -> list[int]:
    """The number of tokens of each forward, as they run."""
    forward, widths = generator.runner.forward, list[int]()

    def count(batch: Any, sampled: Any = None) -> Any:
        widths.append(len(batch.ids))
        return forward(batch, sampled)

    generator.runner.forward = count  # type: ignore[method-assign]
    return widths


@pytest.mark.parametrize("stop_index", [3, 8])
def test_tokens_beyond_a_stop_are_neither_delivered_nor_cached(
    stop_index: int,
) -> None:
    """The stop token fills a block, which would be registered if the next step counted."""
    prompt = prompts(3, (2 * BLOCK - stop_index - 1,), count=1)[0]
    [tokens] = greedy("llama", [prompt], stop_index + 2)
    generator = engine_ahead()
    stop_token = tokens[stop_index]
    assert stop_token not in tokens[:stop_index]
    driver = Driver(generator)
    served = driver.add(request(prompt, max_tokens=40, stop_token_ids=(stop_token,)))
    other = driver.add(request(prompts(5, (20,), count=1)[0], max_tokens=20))  # keeps steps running
    driver.finish()
    assert served.ids == [tokens[: stop_index + 1]]
    assert served.choices[0].tokens == stop_index + 1
    assert driver.total("decode_tokens") == stop_index + 1 + 20
    assert_greedy("llama", [other], 20)
    blocks, pending = generator.scheduler.pool.match([*prompt, *tokens[: stop_index + 1], 7])
    assert (len(blocks), pending) == (1, None)
    again, later = serve(generator, [request([*prompt, *tokens[: stop_index + 1]], max_tokens=6)])
    assert later.total("cached_tokens") == BLOCK
    assert_greedy("llama", again, 6)


@pytest.mark.parametrize("ahead", [True, False])
def test_steps_of_the_same_sequences_build_no_batch(
    ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(module.RUNS_AHEAD, "cpu", ahead)
    built, from_chunks = list[int](), Batch.from_chunks

    def recorded(chunks: Any) -> Batch:
        built.append(len(chunks))
        return from_chunks(chunks)

    monkeypatch.setattr(Batch, "from_chunks", recorded)
    texts = prompts(8, (9, 30, 17), count=1)
    driver = Driver(engine_ahead())
    served = [driver.add(request(prompt, max_tokens=40)) for prompt in texts]
    for _ in range(20):
        driver.step()
    later = driver.add(request(texts[0], max_tokens=40))
    driver.finish()
    assert_greedy("llama", [*served, later], 40)
    # prompts, decodes; beside another prompt, with it; two when the first end, one at the end
    assert len(built) <= 7


@pytest.mark.parametrize("paged", [True, False])
def test_rows_with_too_few_candidates_are_resampled(
    paged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That is known when they are read: the next step already runs with their first samples."""
    texts = prompts(6, (9, 30), count=2)

    def served() -> tuple[list[list[int]], int]:
        generator = engine_ahead() if paged else cached()
        widths = count_widths(generator)
        items = [
            request(prompt, Sampling(temperature=1.5, top_p=0.9, top_k=n % 2 * 9, seed=n), 12)
            for n, prompt in enumerate(texts)
        ]
        return [request.ids[0] for request in serve(generator, items)[0]], len(widths)

    monkeypatch.setattr(sampler, "CANDIDATES", 1)
    ahead, steps = served()
    monkeypatch.setattr(sampler, "CANDIDATES", 64)
    monkeypatch.setitem(module.RUNS_AHEAD, "cpu", False)
    at_once, fewest = served()
    assert ahead == at_once
    assert (steps > fewest) == paged  # the paged runner runs such a step again; the other waits


def test_an_error_in_reading_a_step_delivers_nothing_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    generator = engine_ahead()
    driver = Driver(generator)
    items = [request(prompt, max_tokens=12) for prompt in prompts(4, (20,), count=2)]
    served = [driver.add(item) for item in items]
    for _ in range(3):
        driver.step()
    delivered = [request.deltas[0].tokens for request in served]

    def broken(sampled: SamplerOutput) -> Any:
        raise RuntimeError("it is raised late")

    with monkeypatch.context() as patch:
        patch.setattr(SamplerOutput, "read", broken)
        with pytest.raises(RuntimeError, match="late"):
            driver.step()
    assert generator.clear() == items  # as the worker does
    assert [request.deltas[0].tokens for request in served] == delivered
    generator.warm_up()
    again, _ = serve(generator, [request(earlier.prompt, max_tokens=12) for earlier in served])
    assert_greedy("llama", again, 12)


def test_a_forward_that_raises_keeps_the_tokens_in_flight() -> None:
    """The results of the step before are processed, and its sequences continue from there."""
    generator = engine_ahead()
    driver, runner = Driver(generator), runner_of(generator)
    served = [driver.add(request(p, max_tokens=12)) for p in prompts(4, (20,), count=3)]
    driver.step()
    driver.step()
    forward, calls = runner.forward, list[int]()

    def guarded(batch: Any, sampled: Any = None) -> Any:
        calls.append(len(batch.ids))
        if served[1].sequences[0] in [chunk.sequence for chunk in batch.chunks]:
            raise ItemFailed("not this one")
        return forward(batch, sampled)

    runner.forward = guarded  # type: ignore[method-assign]
    driver.finish()
    assert calls[:4] == [3, 1, 2, 1]
    assert isinstance(served[1].error, ItemFailed)
    assert_greedy("llama", [served[0], served[2]], 12)
