"""Tiny random-weight models of every causal language model of the installed transformers.

There is no list of settings per family: a configuration's defaults are made small by the names of
its settings, and OVERRIDES has those that must fit each other in another way.
"""

import importlib
import inspect
from typing import Any

import torch

from tests.tiny import hf
from tests.tiny_decoders import CONTEXT, WINDOW, with_random_vectors
from tests.tiny_tokenizers import llama_tokenizer

configuration_auto: Any = importlib.import_module("transformers.models.auto.configuration_auto")
modeling_auto: Any = importlib.import_module("transformers.models.auto.modeling_auto")
SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "n_embd": 32,
    "d_model": 32,
    "dim": 32,
    "emb_dim": 32,
    "embedding_size": 32,
    "word_embed_proj_dim": 32,
    "num_hidden_layers": 2,
    "n_layer": 2,
    "n_layers": 2,
    "num_layers": 2,
    "decoder_layers": 2,
    "encoder_layers": 2,
    "num_decoder_layers": 2,
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_kv_heads": 2,
    "head_dim": 8,
    "d_kv": 8,
    "d_head": 8,
    "intermediate_size": 64,
    "n_inner": 64,
    "ffn_dim": 64,
    "d_ff": 64,
    "d_inner": 64,
    "decoder_ffn_dim": 64,
    "encoder_ffn_dim": 64,
    "ffn_hidden_size": 64,
    "intermediate_size_mlp": 64,
    "dense_intermediate_size": 64,
    "max_position_embeddings": CONTEXT,
    "n_positions": CONTEXT,
    "n_ctx": CONTEXT,
    "max_seq_len": CONTEXT,
    "sliding_window": WINDOW,
    "attention_chunk_size": WINDOW,
    "local_attention": WINDOW,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "top_k_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "num_expert_group": 1,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32,
    "expert_ffn_hidden_size": 32,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "o_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "global_head_dim": 8,
    "query_pre_attn_scalar": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_num_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_head_dim": 8,
    "mamba_n_heads": 8,
    "mamba_num_heads": 8,
    "n_mamba_heads": 8,
    "mamba_d_head": 8,
    "mamba_head_dim": 8,
    "mamba_headdim": 8,
    "mamba_n_groups": 2,
    "mamba_ngroups": 2,
    "n_groups": 2,
    "mamba_d_state": 8,
    "mamba_d_ssm": 64,
    "mamba_dt_rank": 4,
    "mamba_chunk_size": 16,
    "state_size": 8,
    "ssm_state_size": 8,
    "chunk_size": 16,
    "time_step_rank": 4,
    "lru_width": 32,
    "vocab_size_per_layer_input": 360,
    "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 0,
    "init_std": 0.5,
    "initializer_range": 0.5,
}
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
IDS = {"vocab_size": 360, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
MAX_PARAMETERS = 3_000_000
KINDS = ("layer_types", "layers_block_type", "mlp_layer_types")  # a setting for each layer


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
    return getattr(hf, name)(**(IDS | small_settings(name) | OVERRIDES.get(kind, {})))


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


def small_settings(name: str) -> dict[str, Any]:
    config = getattr(hf, name)
    default = config()
    known = {*inspect.signature(config.__init__).parameters, *vars(default)}
    known |= set(getattr(config, "attribute_map", {})) | set(getattr(config, "__annotations__", {}))
    settings = {
        setting: value
        for setting, value in SMALL.items()
        if setting in known
        and (setting == "head_dim" or getattr(default, setting, None) is not None)
        and not _is_read_only(config, setting)
    }
    if "kv_lora_rank" in settings:  # latent attention has as many key heads as query heads
        settings["num_key_value_heads"] = settings["num_attention_heads"]
    for setting in KINDS:
        kinds = getattr(default, setting, None)
        if isinstance(kinds, (list, tuple)) and kinds and not _is_read_only(config, setting):
            settings[setting] = list(dict.fromkeys(kinds))
    longest = max((len(settings[one]) for one in KINDS if one in settings), default=0)
    if longest:
        longest = max(longest, 2)
        for setting in KINDS:
            if kinds := settings.get(setting):
                settings[setting] = (kinds * longest)[:longest]
        for count in ("num_hidden_layers", "n_layer", "n_layers", "num_layers"):
            if count in settings:
                settings[count] = longest
    return settings


def _is_read_only(config: Any, setting: str) -> bool:
    value = getattr(config, config.attribute_map.get(setting, setting), None)
    return isinstance(value, property) and value.fset is None
