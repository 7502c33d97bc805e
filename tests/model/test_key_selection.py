"""Models whose attention selects keys by score generate as `generate` does, beside others.

Which of the keys with equal scores are selected depends on the width of a batch, so padding changes
it, and so does computing a text again.
"""

import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from batching.fair_share import Priority
from tests import generating
from tests.generating import ORDINARY, Driver, request
from tests.matrix import matrix
from tests.tiny import SMALL, hf
from tests.tiny_decoders import CONTEXT, decoder
from tests.tiny_tokenizers import llama_tokenizer
from worker.backends.cached_runner import CachedRunner
from worker.device.self_check import CannotRun, narrowed
from worker.engines.generation.engine import RUNS_AHEAD, GenerationEngine
from worker.engines.generation.input_processor import GenerationItem
from worker.engines.generation.loading import cached_engine
from worker.model.language_model import GeneratorOptions
from worker.model.loading import LoadingFailed
from worker.model.paging import PagingCheck

LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
}


def builders(keys: int) -> dict[str, Callable[[], list[Any]]]:
    """Return builders of models whose attention selects about so many keys."""
    index = {"index_topk": keys, "index_head_dim": 16, "index_n_heads": 4}
    latent = {**LATENT, **index}
    return {
        "deepseek-v3.2": decoder("DeepseekV32Config", **latent, first_k_dense_replace=1),
        "glm-moe-dsa": decoder("GlmMoeDsaConfig", **latent, first_k_dense_replace=1),
        "hy-v4": decoder("HYV4Config", **{**latent, "head_dim": 16}),
        "axk2": decoder(
            "AXK2Config", **{**latent, "n_group": None, "topk_group": None, "gated_norm_rank": 8}
        ),
        "dots3": decoder("Dots3NoteTextConfig", **latent, layer_types=["indexed_attention"] * 2),
        "deepseek-v4": decoder(
            "DeepseekV4Config",
            num_hidden_layers=3,
            num_key_value_heads=1,
            head_dim=16,
            qk_rope_head_dim=2,
            o_groups=2,
            o_lora_rank=8,
            layer_types=[
                "sliding_attention",
                "compressed_sparse_attention",
                "heavily_compressed_attention",
            ],
            mlp_layer_types=["hash_moe"] * 3,
            compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
            **{**index, "index_topk": keys // 4},
        ),
        "minimax-m3": decoder(
            "MiniMaxM3VLTextConfig",
            rotary_dim=4,
            dense_intermediate_size=32,
            index_n_heads=2,
            index_head_dim=8,
            index_block_size=4,
            index_topk_blocks=keys // 4,
            layer_types=["full_attention", "minimax_m3_sparse"],
        ),
        "qwen4": decoder(
            "Qwen4ExpTextConfig",
            hc_count=2,
            hc_lowrank=8,
            indexer_n_heads=2,
            indexer_kv_heads=1,
            indexer_head_dim=8,
            indexer_budget=keys,
            indexer_compress_ratio=4,
        ),
        "doge": decoder("DogeConfig", keep_window_size=keys),
        "glm5-next": multimodal_decoder(
            "Glm5NextConfig",
            **{**latent, "qk_rope_head_dim": 0, "head_dim": 0},
            num_hidden_layers=4,
            index_kpool=4,
            linear_head_dim=8,
            linear_num_heads=4,
            hc_mult=2,
        ),
        "mistral-large4": multimodal_decoder("MistralLarge4Config", **latent, num_hidden_layers=4),
    }


def multimodal_decoder(config: str, **text: Any) -> Callable[[], list[Any]]:
    """Return a builder of a model that transformers has with images only, served without."""

    def build() -> list[Any]:
        tokenizer = llama_tokenizer()
        sizes = {**SMALL, "vocab_size": len(tokenizer), "max_position_embeddings": CONTEXT}
        ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
        vision = dict.fromkeys(("hidden_size", "intermediate_size"), 32)
        vision |= {"num_attention_heads": 2, "num_hidden_layers": 1}
        settings = getattr(hf, config)(
            text_config={**sizes, **ids, **text},
            vision_config={**vision, "depth": 1, "out_hidden_size": SMALL["hidden_size"]},
        )
        return [hf.AutoModelForImageTextToText.from_config(settings), tokenizer]

    return build


MODELS = sorted(builders(16))
# Selected keys, fewer and more than the tokens of the check at load; and lengths of prompts.
LENGTHS = {16: (5, 12, 20, 33, 33, 50, 71, 90, 90, 130), 128: (20, 100, 120, 140, 140, 160, 200)}
TOKENS = 10


@cache
def checked(name: str, keys: int) -> CachedRunner:
    return CachedRunner(generating.built(name, builders(keys)[name]))


@generating.shares_template
def new_engine(name: str, keys: int, max_running: int = 256) -> GenerationEngine:
    options = GeneratorOptions(name, max_running=max_running)
    return cached_engine(checked(name, keys), options, "a test asks for it")


def generate(name: str, keys: int, prompt: Sequence[int], count: int) -> list[int]:
    return generating.generate(checked(name, keys).model, [prompt], count)[0]


def prompts(lengths: Sequence[int]) -> list[list[int]]:
    chance = random.Random(1)
    return [chance.choices(ORDINARY, k=length) for length in lengths]


@pytest.mark.parametrize("keys", [16, 128])
@pytest.mark.parametrize("name", matrix(MODELS, "glm-moe-dsa", "doge"))
def test_selected_keys_are_those_of_generate(
    name: str, keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While steps run at once for requests that arrive together, and ahead for others."""
    batch = prompts(LENGTHS[keys])
    expected = [generate(name, keys, prompt, TOKENS) for prompt in batch]
    for seed, ahead in ((None, False), (1, True)):
        monkeypatch.setitem(RUNS_AHEAD, "cpu", ahead)
        items = [request(prompt, max_tokens=TOKENS) for prompt in batch]
        served, _ = generating.serve(new_engine(name, keys), items, seed)
        assert [one.ids[0] for one in served] == expected
    assert checked(name, keys).uses_cache
    assert checked(name, keys).batches_rows


@pytest.mark.parametrize("name", ["deepseek-v3.2", "qwen4", "axk2"])
def test_a_paged_cache_is_not_used(name: str) -> None:
    with pytest.raises(CannotRun, match="selects keys by score"):
        PagingCheck(checked(name, 128).language).enable()


def background_request(prompt: Sequence[int]) -> GenerationItem:
    item = request(prompt, max_tokens=30)
    item.owner = replace(item.owner, priority=Priority.BACKGROUND)
    return item


@pytest.mark.parametrize("name", matrix(MODELS, "glm-moe-dsa"))
def test_preempted_sequences_continue_as_before(name: str) -> None:
    batch = prompts((25, 30, 30, 30, 35, 35, 40, 45))
    driver = Driver(new_engine(name, 16, max_running=len(batch)))
    first = [driver.add(background_request(prompt)) for prompt in batch]
    for _ in range(15):
        driver.step()
    for sequence in [*driver.generator.scheduler.running]:
        driver.generator.scheduler._preempt(sequence)
    others = [driver.add(request(prompt, max_tokens=3)) for prompt in batch]
    driver.finish()
    expected = [generate(name, 16, prompt, 30) for prompt in batch]
    assert [one.ids[0] for one in first] == expected
    assert [one.ids[0] for one in others] == [ids[:3] for ids in expected]


def test_a_model_that_differs_from_generate_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its `generate` prepares other inputs than the server does."""
    language = checked("doge", 16).language
    model: Any = language.model
    prepare: Any = model.prepare_inputs_for_generation

    @functools.wraps(prepare)
    def changed(*arguments: Any, **named: Any) -> Any:
        inputs = prepare(*arguments, **named)
        return {**inputs, "input_ids": inputs["input_ids"] + 1}

    monkeypatch.setattr(model, "prepare_inputs_for_generation", changed)
    with pytest.raises(LoadingFailed, match="'doge' cannot be served: its outputs differ"):
        CachedRunner(language)


def test_numbers_of_keys_are_narrowed_and_restored() -> None:
    language = checked("deepseek-v3.2", 128).language
    model: Any = language.model
    indexer = model.model.layers[0].self_attn.indexer
    model.config.compress_ranks = 64  # a number on which weights depend

    def run() -> None:
        assert model.config.compress_ranks == 64

    with narrowed(model, run) as changed:
        assert changed
        assert (indexer.index_topk, model.config.index_topk) == (4, 4)
        assert (model.config.index_head_dim, model.config.compress_ranks) == (16, 64)
    assert (indexer.index_topk, model.config.index_topk) == (128, 128)
    del model.config.compress_ranks
