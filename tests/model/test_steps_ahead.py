"""Steps that are launched before the last has landed: what is found late changes no answer."""

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
from worker.device.async_copy import fill_placeholders
from worker.generation import engine as module
from worker.generation.engine import GenerationEngine
from worker.generation.loading import cached_engine
from worker.generation.output import SequenceOutput
from worker.messages.generation import Sampling
from worker.model import sampler
from worker.model.attention.kv_cache import BLOCK
from worker.model.cached_runner import CachedRunner
from worker.model.language_model import GeneratorOptions, LanguageModel
from worker.model.sampler import SamplerOutput


@pytest.fixture(autouse=True)
def _ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(module.AHEAD, "cpu", True)


def flying(**options: Any) -> GenerationEngine:
    return engine("llama", speculation="off", **options)


def cached() -> GenerationEngine:
    torch.manual_seed(1)
    model, tokenizer = tiny_decoders.BUILDERS["llama"]()
    runner = CachedRunner(LanguageModel("llama", model.eval(), tokenizer))
    return cached_engine(runner, GeneratorOptions("", speculation="off"), "")


def counted(generator: GenerationEngine) -> list[int]:
    """How many tokens each forward has been given."""
    forward, widths = generator.runner.forward, list[int]()

    def count(batch: Any, sampled: Any = None) -> Any:
        widths.append(len(batch.ids))
        return forward(batch, sampled)

    generator.runner.forward = count  # type: ignore[method-assign]
    return widths


def test_a_step_is_launched_before_the_text_of_the_last_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    generator, order = flying(), list[str]()
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


@pytest.mark.parametrize("found_at", [3, 8])
def test_what_is_run_beyond_a_stop_is_neither_delivered_nor_found_in_the_cache(
    found_at: int,
) -> None:
    """The token that ends it fills a block: that would be found if the step after it counted."""
    prompt = prompts(3, (2 * BLOCK - found_at - 1,), each=1)[0]
    [tokens] = greedy("llama", [prompt], found_at + 2)
    generator = flying()
    ends = tokens[found_at]
    assert ends not in tokens[:found_at]
    driver = Driver(generator)
    served = driver.add(request(prompt, max_tokens=40, stop_token_ids=(ends,)))
    other = driver.add(request(prompts(5, (20,), each=1)[0], max_tokens=20))  # steps go on
    driver.finish()
    assert served.ids == [tokens[: found_at + 1]]
    assert served.choices[0].tokens == found_at + 1
    assert driver.total("decode_tokens") == found_at + 1 + 20
    assert_greedy("llama", [other], 20)
    blocks, awaited = generator.scheduler.pool.match([*prompt, *tokens[: found_at + 1], 7])
    assert (len(blocks), awaited) == (1, None)
    again, later = serve(generator, [request([*prompt, *tokens[: found_at + 1]], max_tokens=6)])
    assert later.total("cached_tokens") == BLOCK
    assert_greedy("llama", again, 6)


def test_a_client_that_leaves_while_a_step_flies_gets_nothing_of_it() -> None:
    generator = flying()
    driver = Driver(generator)
    stays, leaves = (driver.add(request(p, max_tokens=12)) for p in prompts(4, (20,), each=2))
    for _ in range(4):
        driver.step()
    leaves.item.open = False
    told = leaves.deltas[0].tokens
    driver.finish()
    assert leaves.deltas[0].tokens == told
    assert_greedy("llama", [stays], 12)


def test_a_prompt_whose_client_leaves_while_it_flies_counts_as_one_in_the_steps_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Or what decoding takes would be learned from it."""
    generator, learned = flying(), list[tuple[int, int]]()
    monkeypatch.setattr(
        generator._budget, "learn", lambda prompt, others, seconds: learned.append((prompt, others))
    )
    driver = Driver(generator)
    driver.add(request(list(ORDINARY[:5]), max_tokens=4))
    driver.step()
    leaves = driver.add(request(prompts(4, (20,), each=1)[0], max_tokens=4))
    driver.step()
    leaves.item.open = False
    driver.finish()
    assert learned == [(5, 0), (20, 1)]
    assert driver.total("prefill_tokens") == 5


def test_who_reaches_the_most_tokens_with_what_flies_is_not_run_again() -> None:
    generator = flying()
    rows = counted(generator)
    serve(generator, [request(list(ORDINARY[:5]), max_tokens=3)])
    assert rows == [5, 1, 1]


def test_penalties_and_grammars_know_the_token_that_flew(monkeypatch: pytest.MonkeyPatch) -> None:
    penalized = Sampling(temperature=0.0, repetition_penalty=1.9, frequency_penalty=1.5)
    given = prompts(6, (9, 30), each=2)

    def served() -> list[list[int]]:
        items = [request(prompt, penalized, 20) for prompt in given]
        return [each.ids[0] for each in serve(flying(), items)[0]]

    ahead = served()
    monkeypatch.setitem(module.AHEAD, "cpu", False)
    assert ahead == served()


@pytest.mark.parametrize("paged", [True, False])
def test_rows_that_looked_at_too_few_logits_are_drawn_anew(
    paged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That is known once they are read, when the next step runs with what they gave first."""
    given = prompts(6, (9, 30), each=2)

    def served() -> tuple[list[list[int]], int]:
        generator = flying() if paged else cached()
        widths = counted(generator)
        items = [
            request(prompt, Sampling(temperature=1.5, top_p=0.9, top_k=n % 2 * 9, seed=n), 12)
            for n, prompt in enumerate(given)
        ]
        return [each.ids[0] for each in serve(generator, items)[0]], len(widths)

    monkeypatch.setattr(sampler, "CANDIDATES", 1)
    ahead, steps = served()
    monkeypatch.setattr(sampler, "CANDIDATES", 64)
    monkeypatch.setitem(module.AHEAD, "cpu", False)
    at_once, least = served()
    assert ahead == at_once
    assert (steps > least) == paged  # such a step is run again, or not before that is known


def test_an_error_that_shows_when_a_step_is_read_delivers_nothing_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    generator = flying()
    driver = Driver(generator)
    items = [request(prompt, max_tokens=12) for prompt in prompts(4, (20,), each=2)]
    served = [driver.add(item) for item in items]
    for _ in range(3):
        driver.step()
    told = [each.deltas[0].tokens for each in served]

    def broken(sampled: SamplerOutput) -> Any:
        raise RuntimeError("it shows late")

    with monkeypatch.context() as patch:
        patch.setattr(SamplerOutput, "read", broken)
        with pytest.raises(RuntimeError, match="late"):
            driver.step()
    assert generator.clear() == items  # as the worker does
    assert [each.deltas[0].tokens for each in served] == told
    generator.warm_up()
    again, _ = serve(generator, [request(each.prompt, max_tokens=12) for each in served])
    assert_greedy("llama", again, 12)


def test_a_forward_that_raises_leaves_what_flies_its_tokens() -> None:
    """The step before lands, and its tokens go on from there."""
    generator = flying()
    driver, runner = Driver(generator), runner_of(generator)
    served = [driver.add(request(p, max_tokens=12)) for p in prompts(4, (20,), each=3)]
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


def test_promised_ids_are_filled_in_where_they_are() -> None:
    ids, sampled = torch.tensor([[5, -1, -3, 0]]), torch.tensor([7, 8, -1])
    assert fill_placeholders(ids, sampled).tolist() == [[5, 7, 0, 0]]
    assert fill_placeholders(ids, None) is ids
