"""Models with recurrent layers serve requests of all kinds as others do: grammars, tools, scores,
seeds, choices and images."""

import json
import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import jsonschema_rs
import pytest
import torch

from tests import tiny_chat
from tests.generating import ORDINARY, Driver, Served, engine, raw_logits, serve
from tests.generating import request as text_request
from tests.matrix import matrix
from tests.model.test_structured_output import (
    SCHEMAS,
    TOOLS,
    calls_in,
    schema,
)
from tests.multimodal import assert_generated, png, request
from tests.multimodal import engine as image_engine
from tests.tiny import for_tokenizer
from tests.tiny_decoders import small_settings
from worker.generation.engine import GenerationEngine
from worker.generation.loading import load_generator, paged_engine
from worker.messages.generation import Sampling, ToolCallPolicy
from worker.model.language_model import GeneratorOptions
from worker.model.paged_runner import PagedRunner

pytestmark = pytest.mark.usefixtures("steps")

HYBRIDS = ("qwen3.5", "lfm2", "granite4", "falcon-h1", "qwen3-next")
SEEDED = Sampling(temperature=1.0, seed=11, logprobs=3)


@pytest.fixture(autouse=True)
def drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the modules' own forwards verify drafts, one after another."""
    monkeypatch.setattr(PagedRunner, "verifies_drafts", True)


@cache
def chat_model() -> GenerationEngine:
    config = "Qwen3_5TextConfig"
    tokenizer, settings = tiny_chat.tokenizer(), small_settings(config)
    path = for_tokenizer("hybrid", tokenizer, config, **settings)
    return load_generator(
        GeneratorOptions(str(path), dtype="float32", device="cpu", kv_cache_gb=0.02)
    )


def chat_engine() -> GenerationEngine:
    known = chat_model()
    assert known.info.batching == "continuous", known.info.why
    runner = PagedRunner(known.runner.language, 400, tiny_chat.CONTEXT, 32)
    generator = paged_engine(runner, GeneratorOptions(""))
    generator.input_processor.constraint_builder.grammars = (
        known.input_processor.constraint_builder.grammars
    )
    return generator


def tokens(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(ORDINARY, k=count)


# ── grammars and tools ──


def test_documents_follow_their_schemas() -> None:
    items = [
        tiny_chat.asking(sampling=Sampling(temperature=1.2, seed=seed), constraint=schema(name))
        for name in SCHEMAS
        for seed in range(3)
    ]
    served, driver = serve(chat_engine(), items, seed=0)
    assert driver.total("accepted") > 0
    for item, name in zip(served, [name for name in SCHEMAS for _ in range(3)], strict=True):
        [choice] = item.choices
        assert choice.finish_reason == "stop"
        assert jsonschema_rs.is_valid(SCHEMAS[name], json.loads(choice.text)), choice.text


def test_required_tools_are_called() -> None:
    policy = ToolCallPolicy(("clock",), required=True, parallel=False)
    items = [
        tiny_chat.asking(
            sampling=Sampling(seed=seed), max_tokens=700, tools=TOOLS, tool_policy=policy
        )
        for seed in range(3)
    ]
    served, _ = serve(chat_engine(), items, seed=1)
    for item in served:
        assert calls_in(item) == [("clock", {})]


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


ONE, OTHER, TALL = png(0), png(1), png(2, 40, 72)


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
