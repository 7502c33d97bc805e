"""Steps launched before the last one's results are read: outputs do not change."""

from typing import Any

import pytest
import torch

from batching.errors import ItemFailed
from tests import tiny_decoders
from tests.generating import (
    ORDINARY,
    Driver,
    assert_greedy,
    engine,
    greedy,
    prompts,
    request,
    runner_of,
    serve,
)
from worker.backends.cached_runner import CachedRunner
from worker.device.async_copy import fill_placeholders
from worker.engines.generation import engine as module
from worker.engines.generation.engine import GenerationEngine
from worker.engines.generation.loading import cached_engine
from worker.engines.generation.output import SequenceOutput
from worker.engines.generation.speculation import NgramDrafter
from worker.messages.generation import Sampling
from worker.model import sampler
from worker.model.attention.kv_cache import BLOCK
from worker.model.language_model import GeneratorOptions, LanguageModel
from worker.model.sampler import SamplerOutput


@pytest.fixture(autouse=True)
def _ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(module.RUNS_AHEAD, "cpu", True)


def engine_ahead(**options: Any) -> GenerationEngine:
    return engine("llama", speculation="off", **options)


def cached() -> GenerationEngine:
    torch.manual_seed(1)
    model, tokenizer = tiny_decoders.BUILDERS["llama"]()
    runner = CachedRunner(LanguageModel("llama", model.eval(), tokenizer))
    return cached_engine(runner, GeneratorOptions("", speculation="off"), "")


def count_widths(generator: GenerationEngine) -> list[int]:
    """The number of tokens of each forward, as they run."""
    forward, widths = generator.runner.forward, list[int]()

    def count(batch: Any, sampled: Any = None) -> Any:
        widths.append(len(batch.ids))
        return forward(batch, sampled)

    generator.runner.forward = count  # type: ignore[method-assign]
    return widths


def test_a_step_is_launched_before_the_last_ones_results_are_processed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    generator, order = engine_ahead(), list[str]()
    forward, push = generator.runner.forward, SequenceOutput.push

    def launched(*arguments: Any) -> Any:
        order.append("launched")
        return forward(*arguments)

    def pushed(output: SequenceOutput, *arguments: Any) -> None:
        order.append("text")
        push(output, *arguments)

    monkeypatch.setattr(generator.runner, "forward", launched)
    monkeypatch.setattr(SequenceOutput, "push", pushed)
    [served], _ = serve(generator, [request(list(ORDINARY[:5]), max_tokens=4)])
    assert order == ["launched", "launched", "text"] * 1 + ["launched", "text"] * 2 + ["text"]
    assert_greedy("llama", [served], 4)


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


def test_a_request_cancelled_while_a_step_is_in_flight_gets_nothing_of_it() -> None:
    generator = engine_ahead()
    driver = Driver(generator)
    stays, leaves = (driver.add(request(p, max_tokens=12)) for p in prompts(4, (20,), count=2))
    for _ in range(4):
        driver.step()
    leaves.item.open = False
    delivered = leaves.deltas[0].tokens
    driver.finish()
    assert leaves.deltas[0].tokens == delivered
    assert_greedy("llama", [stays], 12)


def test_a_prompt_cancelled_in_flight_counts_in_the_steps_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the time of decoding would be learned from it."""
    generator, learned = engine_ahead(), list[tuple[int, int]]()
    driver = Driver(generator)
    monkeypatch.setattr(generator._budget.times, "learn", lambda *step: learned.append(step[:2]))
    driver.add(request(list(ORDINARY[:5]), max_tokens=4))
    driver.step()
    leaves = driver.add(request(prompts(4, (20,), count=1)[0], max_tokens=4))
    driver.step()
    leaves.item.open = False
    driver.finish()
    assert learned[:2] == [(5, 0), (20, 1)]
    assert not any(prompt for prompt, _ in learned[2:])
    assert driver.total("prefill_tokens") == 5


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


def test_a_drafter_runs_at_most_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompts end with an n-gram that they repeat, the outputs do not."""
    generator, drafters = engine("llama"), list[NgramDrafter]()
    draft = NgramDrafter.draft

    def recorded(drafter: NgramDrafter, *arguments: Any) -> tuple[int, ...]:
        drafters.append(drafter)
        return draft(drafter, *arguments)

    monkeypatch.setattr(NgramDrafter, "draft", recorded)
    driver, total = Driver(generator), 0
    texts = [[*text, *text[5:8]] for text in prompts(4, (20,), count=3)]
    served = [driver.add(request(text, max_tokens=12)) for text in texts]
    while generator.busy:
        driver.step()
        assert len(set(drafters)) == len(drafters)
        total += len(drafters)
        drafters.clear()
    assert total > 0
    assert_greedy("llama", served, 12)


def test_placeholders_are_filled_in_place() -> None:
    ids, sampled = torch.tensor([[5, -1, -3, 0]]), torch.tensor([7, 8, -1])
    assert fill_placeholders(ids, sampled).tolist() == [[5, 7, 0, 0]]
    assert fill_placeholders(ids, None) is ids
