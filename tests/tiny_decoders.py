"""Tiny random-weight language models of many architectures, built like those of tiny.py.

Windows and chunks are 8 tokens, so that short prompts exceed them. An architecture with several
layer types has one layer of each. The outputs of these models mean nothing.
"""

import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny import SMALL, hf
from tests.tiny_tokenizers import llama_tokenizer

CONTEXT = 256
WINDOW = 8
MIXED = ["sliding_attention", "full_attention"]
GROUPED = {"num_key_value_heads": 2}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
}
EXPERTS = {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_root = tempfile.TemporaryDirectory(prefix="tiny-decoders-")


@cache
def folder(name: str) -> Path:
    path = Path(_root.name) / name
    torch.manual_seed(sum(name.encode()))
    for part in BUILDERS[name]():
        part.save_pretrained(path)
    return path


def decoder(config: str, **more: Any) -> Callable[[], list[Any]]:
    """Return a builder of the causal language model for a config class."""

    def build() -> list[Any]:
        tokenizer = llama_tokenizer()
        sizes = {**SMALL, "vocab_size": len(tokenizer), "max_position_embeddings": CONTEXT}
        ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
        settings = getattr(hf, config)(**{**sizes, **ids, **more})
        model = hf.AutoModelForCausalLM.from_config(settings)
        return [with_random_vectors(model), tokenizer]

    return build


def with_random_vectors(model: Any) -> Any:
    """Randomize parameters that classes set to a constant: biases, scales, attention sinks."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.2 * torch.randn_like(parameter)
    return model


BUILDERS: dict[str, Callable[[], list[Any]]] = {
    "llama": decoder("LlamaConfig", **GROUPED),
    "qwen2": decoder("Qwen2Config", **GROUPED),
    "qwen3": decoder("Qwen3Config", **GROUPED, head_dim=8),
    "qwen2-moe": decoder("Qwen2MoeConfig", **EXPERTS, shared_expert_intermediate_size=32),
    "qwen3-moe": decoder("Qwen3MoeConfig", **EXPERTS, head_dim=8),
    "mistral": decoder("MistralConfig", **GROUPED, sliding_window=WINDOW),
    "mixtral": decoder("MixtralConfig", **GROUPED, num_local_experts=4),
    "gemma": decoder("GemmaConfig", num_key_value_heads=1, head_dim=8),
    "gemma2": decoder(
        "Gemma2Config",
        **GROUPED,
        head_dim=8,
        sliding_window=WINDOW,
        layer_types=MIXED,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=20.0,
        query_pre_attn_scalar=8,
    ),
    "gemma3": decoder(
        "Gemma3TextConfig",
        **GROUPED,
        head_dim=8,
        sliding_window=WINDOW,
        layer_types=MIXED,
        query_pre_attn_scalar=8,
    ),
    "phi": decoder("PhiConfig"),
    "phi3": decoder("Phi3Config", **GROUPED),
    "gpt2": decoder("GPT2Config"),
    "gpt-neox": decoder("GPTNeoXConfig"),
    "opt": decoder("OPTConfig", word_embed_proj_dim=32, ffn_dim=64, init_std=0.5),
    "olmo2": decoder("Olmo2Config", **GROUPED),
    "granite": decoder(
        "GraniteConfig",
        **GROUPED,
        embedding_multiplier=2.0,
        attention_multiplier=0.2,
        residual_multiplier=0.7,
        logits_scaling=2.0,
    ),
    "starcoder2": decoder("Starcoder2Config", **GROUPED, sliding_window=WINDOW),
    "cohere": decoder("CohereConfig", **GROUPED, logit_scale=1.0),
    "cohere2": decoder(
        "Cohere2Config",
        **GROUPED,
        head_dim=8,
        logit_scale=1.0,
        sliding_window=WINDOW,
        layer_types=MIXED,
    ),
    "deepseek-v3": decoder(
        "DeepseekV3Config",
        num_key_value_heads=4,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
        n_group=2,
        topk_group=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=12,
    ),
    "smollm3": decoder("SmolLM3Config", **GROUPED, no_rope_layers=[1, 0]),
    "llama4": decoder(
        "Llama4TextConfig",
        **GROUPED,
        head_dim=8,
        intermediate_size_mlp=64,
        num_local_experts=4,
        attention_chunk_size=WINDOW,
        no_rope_layers=[1, 0],
        layer_types=["chunked_attention", "full_attention"],
        floor_scale=8,  # its temperature changes at every 8th position
        attn_scale=0.5,
    ),
    "ernie4.5": decoder("Ernie4_5Config", **GROUPED, head_dim=8),
    "glm4": decoder("Glm4Config", **GROUPED, head_dim=8),
    "gpt-oss": decoder(
        "GptOssConfig",
        **GROUPED,
        head_dim=8,
        sliding_window=WINDOW,
        layer_types=MIXED,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
}
# Models with recurrent layers.
LINEAR = {
    **GROUPED,
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "mamba_chunk_size": 16,
}
RECURRENT: dict[str, Callable[[], list[Any]]] = {
    "mamba": decoder("MambaConfig", state_size=8),
    "mamba2": decoder(
        "Mamba2Config", state_size=8, num_heads=8, head_dim=8, n_groups=2, chunk_size=16
    ),
    "qwen3.5": decoder("Qwen3_5TextConfig", **LINEAR),
    "qwen3-next": decoder(
        "Qwen3NextConfig", **{**EXPERTS, **LINEAR}, shared_expert_intermediate_size=32
    ),
    "lfm2": decoder("Lfm2Config", **GROUPED, layer_types=["conv", "full_attention"]),
    "bamba": decoder("BambaConfig", **GROUPED, **MAMBA, attn_layer_indices=[1]),
    "falcon-h1": decoder("FalconH1Config", **GROUPED, **MAMBA, mamba_d_ssm=64),
    "granite4": decoder(
        "GraniteMoeHybridConfig",
        **GROUPED,
        **MAMBA,
        layer_types=["linear_attention", "full_attention"],
        num_local_experts=4,
        shared_intermediate_size=32,
    ),
    "jamba": decoder(
        "JambaConfig",
        **GROUPED,
        attn_layer_period=2,
        attn_layer_offset=1,
        num_experts=4,
        mamba_d_state=8,
        mamba_dt_rank=4,
    ),
    "olmo-hybrid": decoder(
        "OlmoHybridConfig",
        **{**LINEAR, "num_key_value_heads": 4, "linear_num_key_heads": 4},
    ),
    "kimi-linear": decoder(
        "KimiLinearConfig",
        num_key_value_heads=4,
        moe_intermediate_size=32,
        num_local_experts=4,
        num_experts_per_tok=2,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=12,
        linear_head_dim=8,
        linear_num_heads=4,
        layer_types=["linear_attention", "full_attention"],
        mlp_layer_types=["dense", "sparse"],
    ),
}
# Models that do not run on a paged cache.
UNPAGED: dict[str, Callable[[], list[Any]]] = {
    "bloom": decoder("BloomConfig", n_layer=2, n_head=4),
    "falcon-alibi": decoder("FalconConfig", alibi=True),
}
LONG_ROPES: dict[str, Callable[[], list[Any]]] = {
    "llama-dynamic": decoder(
        "LlamaConfig",
        **GROUPED,
        rope_parameters={
            "rope_type": "dynamic",
            "factor": 4.0,
            "rope_theta": 10000.0,
        },
        max_position_embeddings=64,
    ),
    "gemma3-dynamic": decoder(
        "Gemma3TextConfig",
        **GROUPED,
        head_dim=8,
        sliding_window=WINDOW,
        layer_types=MIXED,
        query_pre_attn_scalar=8,
        rope_parameters={
            "full_attention": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
        max_position_embeddings=64,
    ),
    "phi3-longrope": decoder(
        "Phi3Config",
        **GROUPED,
        original_max_position_embeddings=64,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "original_max_position_embeddings": 64,
            "short_factor": [1.0] * 4,
            "long_factor": [4.0, 6.0, 8.0, 10.0],
        },
    ),
}
# Its rotary embedding chooses a scale by the length of each batch, and factors in its forward.
UNFIXABLE: dict[str, Callable[[], list[Any]]] = {
    "phimoe-longrope": decoder(
        "PhimoeConfig",
        **GROUPED,
        num_local_experts=4,
        num_experts_per_tok=2,
        original_max_position_embeddings=64,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "original_max_position_embeddings": 64,
            "short_factor": [1.0] * 4,
            "long_factor": [4.0, 6.0, 8.0, 10.0],
            "short_mscale": 1.0,
            "long_mscale": 1.2,
        },
    ),
}
# One set of factors, for more tokens than `max_position_embeddings`.
YARN: dict[str, Callable[[], list[Any]]] = {
    name: decoder(config, **GROUPED, **more, max_position_embeddings=64)
    for name, config, more in (
        ("llama-yarn", "LlamaConfig", {"rope_parameters": YARN_ROPE}),
        (
            "gemma3-yarn",
            "Gemma3TextConfig",
            {
                "head_dim": 8,
                "sliding_window": WINDOW,
                "layer_types": MIXED,
                "query_pre_attn_scalar": 8,
                "rope_parameters": {
                    "full_attention": YARN_ROPE,
                    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                },
            },
        ),
    )
}
# Windows longer than the prompts of the check at load.
WIDE: dict[str, Callable[[], list[Any]]] = {
    name: decoder(config, **GROUPED, **more, sliding_window=320, max_position_embeddings=1024)
    for name, config, more in (
        ("mistral-wide", "MistralConfig", {}),
        ("phi3-wide", "Phi3Config", {}),
        ("gemma2-wide", "Gemma2Config", {"head_dim": 8, "layer_types": MIXED}),
        # masks its window, and does not pass it to the attention function
        ("phimoe-wide", "PhimoeConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
        # has a window in its configuration, and ignores it
        ("llama-wide", "LlamaConfig", {}),
    )
}


def skip_where_capping_is_ignored(name: str) -> None:
    """Skip the test if transformers' sdpa ignores soft-capping, which keeps a model from paging.

    transformers 5.17 does so for Gemma 2.
    """
    model = hf.AutoModelForCausalLM.from_pretrained(folder(name))
    if getattr(model.config, "attn_logit_softcapping", None) is None:
        return
    logits = []
    for attention in (model.config._attn_implementation, "eager"):
        model.set_attn_implementation(attention)
        with torch.inference_mode():
            logits.append(model(torch.arange(1, 40)[None], use_cache=False).logits)
    if not torch.allclose(logits[0], logits[1], atol=1e-3):
        pytest.skip("transformers' sdpa forward ignores soft-capping")


WINDOWED = ("mistral", "gemma2", "gemma3", "starcoder2", "cohere2", "gpt-oss")
ARCHITECTURES = sorted(BUILDERS)
BUILDERS |= RECURRENT | UNPAGED | LONG_ROPES | UNFIXABLE | YARN | WIDE
