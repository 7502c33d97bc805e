"""Models whose rotary factors depend on the longest sequence of a batch: one set serves all."""

import logging
import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests import generating, tiny_decoders
from tests.generating import ORDINARY, request
from tests.matrix import matrix
from tests.tiny_decoders import CONTEXT, LONG_ROPES, YARN
from tests.tiny_embedders import embedded
from worker.device.self_check import CannotRun
from worker.engines.embedding.loading import ScoringOptions, load_embedder
from worker.engines.generation import loading
from worker.engines.generation.engine import GenerationEngine
from worker.engines.pipeline.loading import PipelineOptions, choose_batching, load_pipeline
from worker.messages.scoring import EmbeddingInput
from worker.model.attention.kv_cache import BLOCK
from worker.model.loading import LoadingFailed

ORIGINAL = 64  # tokens of the models' first training
TOKENS = 12
FOUR_BLOCKS_GB = 4 * BLOCK * 2 * 2 * 16 * 4 / 1e9  # layers, heads, sizes of key and value, bytes
MODELS = matrix(sorted(LONG_ROPES), "llama-dynamic", "phi3-longrope")
pytestmark = pytest.mark.usefixtures("poisoned_cache")
# prompts on both sides of ORIGINAL, and outputs that cross it
LENGTHS = (5, 30, ORIGINAL - 4, ORIGINAL, ORIGINAL + 1, 80)


def load(model: str, **options: Any) -> GenerationEngine:
    return generating.load(tiny_decoders.folder(model), **options)


def prompts(lengths: Sequence[int]) -> list[list[int]]:
    chance = random.Random(3)
    return [chance.choices(ORDINARY, k=length) for length in lengths]


@cache
def reference(model: str, length: int) -> Any:
    """transformers' model, with the factors for `length` tokens at all lengths; 0: unchanged."""
    loaded = generating.reference_model.__wrapped__(model)
    rotary = loaded.model.rotary_emb
    if length:
        by_layer_type = isinstance(rotary.rope_type, dict)
        layer_type = "full_attention" if by_layer_type else None
        kind = rotary.rope_type[layer_type] if by_layer_type else rotary.rope_type
        device = torch.device("cpu")
        factors, _ = ROPE_INIT_FUNCTIONS[kind](
            loaded.config, device, seq_len=length, layer_type=layer_type
        )
        getattr(rotary, f"{layer_type}_inv_freq" if by_layer_type else "inv_freq").copy_(factors)
        rotary.rope_type = (
            dict.fromkeys(rotary.rope_type, "default") if by_layer_type else "default"
        )
    return loaded


def greedy(model: str, prompt: Sequence[int], length: int = 0) -> list[int]:
    return generating.generate(reference(model, length), [prompt], TOKENS)[0]


def outputs(engine: GenerationEngine, batch: Sequence[Sequence[int]]) -> list[list[int]]:
    served, _ = generating.serve(engine, [request(p, max_tokens=TOKENS) for p in batch], seed=1)
    return [one.ids[0] for one in served]


@pytest.mark.parametrize("model", MODELS)
def test_one_set_of_factors_serves_the_whole_context(
    model: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        engine = load(model)
    assert engine.text_model.max_model_len == CONTEXT
    assert "MAX_MODEL_LEN=64" in caplog.text
    batch = prompts((*LENGTHS, 200))
    expected = [greedy(model, prompt, CONTEXT) for prompt in batch]
    assert expected != [greedy(model, prompt) for prompt in batch]
    assert outputs(engine, batch) == expected
    assert [outputs(engine, [prompt])[0] for prompt in batch] == expected


@pytest.mark.parametrize("model", MODELS)
def test_a_length_between_has_its_own_factors(model: str) -> None:
    engine = load(model, max_model_len=100)
    batch = prompts(LENGTHS)
    assert outputs(engine, batch) == [greedy(model, prompt, 100) for prompt in batch]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("limit", ["setting", "memory"])
def test_up_to_the_original_length_outputs_are_those_of_generate(
    model: str, limit: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Also if memory is too small for more, which is known only after the check at load."""
    bound = {"max_model_len": ORIGINAL} if limit == "setting" else {"kv_cache_gb": FOUR_BLOCKS_GB}
    engine = load(model, **bound)
    assert engine.text_model.max_model_len == ORIGINAL
    assert "rotary" not in caplog.text
    batch = prompts((5, 20, 30, ORIGINAL - TOKENS))
    assert outputs(engine, batch) == [greedy(model, prompt) for prompt in batch]


@pytest.mark.parametrize("model", MODELS)
def test_without_a_paged_cache_one_set_serves_too(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> Any:
        raise CannotRun("a test asks for it")

    monkeypatch.setattr(loading, "load_paged_runner", refuse)
    engine = load(model)
    assert engine.info.batching == "static"
    assert engine.text_model.max_model_len == CONTEXT
    batch = prompts(LENGTHS)
    assert outputs(engine, batch) == [greedy(model, prompt, CONTEXT) for prompt in batch]


def test_factors_that_cannot_be_fixed_leave_the_original_length(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = load("phimoe-longrope")
    assert engine.text_model.max_model_len == ORIGINAL
    assert "context=64 of 256: its rotary factors cannot be fixed" in caplog.text
    batch = prompts((5, 20, 30, ORIGINAL - TOKENS))
    expected = [greedy("phimoe-longrope", prompt) for prompt in batch]
    assert outputs(engine, batch) == expected
    with pytest.raises(LoadingFailed, match="MAX_MODEL_LEN=100: the model takes 64"):
        load("phimoe-longrope", max_model_len=100)


@pytest.mark.parametrize("model", matrix(sorted(YARN), "llama-yarn"))
def test_yarn_extends_the_context_and_outputs_are_those_of_generate(
    model: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its configuration names 64 tokens, its factors are for 256."""
    engine = load(model)
    assert engine.text_model.max_model_len == CONTEXT
    assert "rotary" not in caplog.text
    batch = prompts((*LENGTHS, 200))
    assert outputs(engine, batch) == [greedy(model, prompt) for prompt in batch]


def test_texts_of_an_embedder_do_not_change_each_others_factors() -> None:
    options = ScoringOptions(
        str(tiny_decoders.folder("phi3-longrope")), dtype="float32", device="cpu"
    )
    embedder = load_embedder(options)
    texts = prompts((5, 30, ORIGINAL + 1, 200))
    together = embedded(embedder, EmbeddingInput(texts, None)).vectors
    for text, vector in zip(texts, together, strict=True):
        alone = embedded(embedder, EmbeddingInput([text], None)).vectors[0]
        np.testing.assert_allclose(vector, alone, atol=1e-5)


def test_texts_of_a_pipeline_do_not_change_each_others_factors() -> None:
    options = PipelineOptions(
        str(tiny_decoders.folder("phi3-longrope")), "cpu", "float32", task="text-generation"
    )
    batching, why, _ = choose_batching("text-classification", load_pipeline(options)[0])
    assert batching == "single"
    assert "rotary factors" in why


def test_a_length_beyond_the_checkpoints_factors_is_refused() -> None:
    with pytest.raises(LoadingFailed, match="MAX_MODEL_LEN=300: the model takes 256"):
        load("phi3-longrope", max_model_len=300)
