"""Tiny random-weight models of every causal language model of the installed transformers.

There is no list of settings per family: OVERRIDES has those that must fit each other in another way
than those that are made small by their names.
"""

import importlib
from typing import Any

import torch

from tests.tiny import IDS, hf
from tests.tiny_decoders import small_settings, with_random_vectors
from tests.tiny_tokenizers import llama_tokenizer

configuration_auto: Any = importlib.import_module("transformers.models.auto.configuration_auto")
modeling_auto: Any = importlib.import_module("transformers.models.auto.modeling_auto")
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "codegen": {"rotary_dim": 4},
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {
            "hidden_size": 32,
            "ffn_hidden_size": 32,
            "moe_num_experts": 4,
            "moe_top_k": 2,
        },
    },
    "dory": {  # input, looped and output layers
        "num_hidden_layers": 3,
        "n_input_layers": 1,
        "n_output_layers": 1,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    },
    "falcon": {"num_kv_heads": 2, "new_decoder_architecture": True},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 8},
    "gptj": {"rotary_dim": 4},
    "granitemoehybrid": {
        "layer_types": ["linear_attention", "full_attention"],
        "layers_block_type": ["linear_attention", "full_attention"],
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
    },
    "nemotron": {"num_key_value_heads": 2},
    "inkling2_loop_text": {
        "unpadded_vocab_size": 360,
        "initializer_range": 0.1,  # more amplifies rounding too much in its loops
        "num_hidden_layers": 4,
        "layer_types": ["hybrid_sliding", "hybrid"] * 2,
        "rel_extent": 16,
        "n_layers_per_attn_res_block": 1,
        "loop_layer_index_start": 1,
        "loop_layer_index_end": 3,
        "loop_gate_rank": 8,
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
        "ngram_vocab_size_base": 200,
        "split_ngram_parts": 2,
        "hc_lowrank": 8,
    },
    "recurrent_gemma": {"num_hidden_layers": 3, "attention_window_size": 16},
    "reformer": {
        "is_decoder": True,
        "axial_pos_embds": False,
        "attn_layers": ["local", "lsh"],
        "feed_forward_size": 32,
        "local_attn_chunk_length": 16,
        "lsh_attn_chunk_length": 16,
        "num_buckets": 4,
    },
    "roc_bert": {"pronunciation_vocab_size": 360, "shape_vocab_size": 360},
    "xlstm": {"hidden_size": 64, "qk_dim_factor": 1.0},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX", "is_decoder": True},
    "zamba": {
        "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "hybrid"] * 2,
        "layer_types": ["mamba", "hybrid"] * 2,
    },
    "zaya": {"num_experts_per_tok": 1},
}
MAX_PARAMETERS = 3_000_000


def families() -> dict[str, str]:
    """Return the configuration class of each model type that transformers maps to a causal language
    model, and not to one with images."""
    names = dict(configuration_auto.CONFIG_MAPPING_NAMES)
    multimodal = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    kinds = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return {kind: names[kind] for kind in kinds if kind in names and kind not in multimodal}


def configuration(kind: str) -> Any:
    """Return the configuration of a tiny model of this type."""
    name = families()[kind]
    return getattr(hf, name)(
        **({"vocab_size": 360} | IDS | small_settings(name) | OVERRIDES.get(kind, {}))
    )


def build(kind: str) -> list[Any]:
    """Return a tiny model of this type, and a tokenizer. Raise if it would not be tiny."""
    if parameters(kind) > MAX_PARAMETERS:
        raise ValueError(f"it has more than {MAX_PARAMETERS // 1_000_000} million parameters")
    torch.manual_seed(sum(kind.encode()))
    model = hf.AutoModelForCausalLM.from_config(configuration(kind))
    return [with_random_vectors(model), llama_tokenizer()]


def parameters(kind: str) -> int:
    """Return the number of parameters of a tiny model of this type."""
    config = configuration(kind)
    with torch.device("meta"):
        model = hf.AutoModelForCausalLM.from_config(config)
    return sum(parameter.numel() for parameter in model.parameters())
