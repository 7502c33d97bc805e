"""Models with recurrent layers serve requests of all kinds as others do: scores, seeds, choices and
images."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.generating import ORDINARY, Driver, Served, engine, raw_logits, serve
from tests.generating import request as text_request
from tests.matrix import matrix
from tests.multimodal import assert_generated, png, request
from tests.multimodal import engine as image_engine
from worker.messages.generation import Sampling
from worker.model.paged_runner import PagedRunner

pytestmark = pytest.mark.usefixtures("steps")

HYBRIDS = ("qwen3.5", "lfm2", "granite4", "falcon-h1", "qwen3-next")
SEEDED = Sampling(temperature=1.0, seed=11, logprobs=3)


@pytest.fixture(autouse=True)
def drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the modules' own forwards verify drafts, one after another."""
    monkeypatch.setattr(PagedRunner, "verifies_drafts", True)


def tokens(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(ORDINARY, k=count)


# ── scores, seeds and choices ──


@pytest.mark.parametrize("model", matrix(HYBRIDS, "qwen3.5", "lfm2"))
def test_prompts_and_outputs_are_scored_by_the_raw_distribution(model: str) -> None:
    items = [text_request(tokens(n, n), SEEDED, echo=True) for n in (1, 40, 150)]
    served, _ = serve(engine(model), items, seed=2)
    for one in served:
        ids = [*one.prompt, *one.ids[0]]
        expected = torch.log_softmax(raw_logits(model, ids), -1)
        entries = one.choices[0].logprobs
        assert [entry.token_id for entry in entries] == ids
        for index, entry in enumerate(entries[1:], 1):
            assert entry.logprob == pytest.approx(float(expected[index - 1][ids[index]]), abs=2e-3)


def results(served: Sequence[Served]) -> list[Any]:
    return [one.ids for one in served]


@pytest.mark.parametrize("model", matrix(HYBRIDS, "qwen3.5", "granite4"))
def test_seeds_draw_the_same_alone_and_beside_others(model: str) -> None:
    def items() -> list[Any]:
        prompts = [tokens(9 * n + 1, n % 3) for n in range(6)]
        return [text_request(prompt, SEEDED, max_tokens=10, n=2) for prompt in prompts]

    alone = [serve(engine(model), [item])[0][0] for item in items()]
    assert all(len(one.choices) == 2 for one in alone)
    for blocks in (400, 12):
        served, driver = serve(engine(model, blocks), items(), seed=blocks)
        assert bool(driver.total("preempted")) == (blocks == 12)
        assert results(served) == results(alone)


# ── images ──


ONE, OTHER = png(0), png(1)


def test_prefixes_with_equal_images_are_continued() -> None:
    driver = Driver(image_engine("qwen3.5-vl"))
    cached: list[int] = []
    for image in (ONE, ONE, OTHER):
        served = driver.add(request("What are these, and for what? ", image, " Tell me, please!"))
        driver.finish()
        assert_generated("qwen3.5-vl", [served])
        cached.append(served.sequences[0].cached or 0)
    assert cached[0] == 0
    assert cached[1] > cached[2]


def test_the_model_with_images_has_recurrent_layers() -> None:
    assert image_engine("qwen3.5-vl").runner.language.recurrent
