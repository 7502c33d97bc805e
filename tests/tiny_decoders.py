"""Tiny random-weight language models of many architectures, built like those of tiny.py.

A configuration's defaults are made small by the names of its settings. Windows and chunks are
8 tokens, so that short prompts exceed them. An architecture with several layer types has one layer
of each. The outputs of these models mean nothing.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch

from tests import tiny
from tests.tiny import IDS, SMALL, hf
from tests.tiny import folder as folder
from tests.tiny_tokenizers import llama_tokenizer

CONTEXT = 256
WINDOW = 8
MIXED = ["sliding_attention", "full_attention"]
KINDS = ("layer_types", "layers_block_type", "mlp_layer_types")  # a setting for each layer
# The value of each setting that makes a model small.
SMALL_VALUES: dict[Any, str] = {
    32: (
        "hidden_size n_embd d_model dim emb_dim embedding_size word_embed_proj_dim "
        "moe_intermediate_size shared_expert_intermediate_size "
        "moe_shared_expert_intermediate_size shared_intermediate_size expert_ffn_hidden_size "
        "lru_width"
    ),
    2: (
        "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers "
        "num_decoder_layers num_key_value_heads num_kv_heads num_experts_per_tok "
        "num_experts_per_token moe_topk moe_k top_k_experts linear_num_key_heads mamba_n_groups "
        "mamba_ngroups n_groups"
    ),
    4: (
        "num_attention_heads n_head n_heads num_heads decoder_attention_heads "
        "encoder_attention_heads num_experts num_local_experts n_routed_experts moe_num_experts "
        "linear_num_value_heads linear_num_heads mamba_dt_rank time_step_rank"
    ),
    8: (
        "head_dim d_kv d_head sliding_window attention_chunk_size local_attention "
        "qk_nope_head_dim qk_rope_head_dim v_head_dim global_head_dim query_pre_attn_scalar "
        "linear_key_head_dim linear_value_head_dim linear_head_dim mamba_n_heads "
        "mamba_num_heads n_mamba_heads mamba_d_head mamba_head_dim mamba_headdim mamba_d_state "
        "state_size ssm_state_size hidden_size_per_layer_input"
    ),
    64: (
        "intermediate_size n_inner ffn_dim d_ff d_inner decoder_ffn_dim encoder_ffn_dim "
        "ffn_hidden_size intermediate_size_mlp dense_intermediate_size mamba_d_ssm"
    ),
    CONTEXT: "max_position_embeddings n_positions n_ctx max_seq_len",
    1: "n_shared_experts n_group topk_group num_expert_group first_k_dense_replace",
    16: "q_lora_rank kv_lora_rank o_lora_rank mamba_chunk_size chunk_size",
    360: "vocab_size_per_layer_input",
    0: "num_kv_shared_layers",
    0.5: "init_std initializer_range",
}
BY_NAME = {name: value for value, names in SMALL_VALUES.items() for name in names.split()}


def decoder(config: str, **more: Any) -> Callable[[], list[Any]]:
    """Return a builder of the causal language model for a config class."""

    def build() -> list[Any]:
        tokenizer = llama_tokenizer()
        sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": CONTEXT}
        small = {**SMALL, **small_settings(config), **sizes, **IDS}
        model = hf.AutoModelForCausalLM.from_config(getattr(hf, config)(**{**small, **more}))
        return [with_random_vectors(model), tokenizer]

    return build


def with_random_vectors(model: Any) -> Any:
    """Randomize parameters that classes set to a constant: biases, scales, attention sinks."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.2 * torch.randn_like(parameter)
    return model


DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
DYNAMIC_ROPE = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
YARN_ROPE = {**DEFAULT_ROPE, "rope_type": "yarn", "factor": 8.0} | {
    "original_max_position_embeddings": 32
}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 64,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0, 6.0, 8.0, 10.0],
}
SHORT_WINDOWS = {"sliding_attention": {"rope_type": "default", "rope_theta": 100.0}}
BUILDERS: dict[str, Callable[[], list[Any]]] = {
    "llama": decoder("LlamaConfig"),
    "qwen2": decoder("Qwen2Config"),
    "qwen3": decoder("Qwen3Config"),
    "qwen2-moe": decoder("Qwen2MoeConfig"),
    "qwen3-moe": decoder("Qwen3MoeConfig", head_dim=8),
    "mistral": decoder("MistralConfig"),
    "mixtral": decoder("MixtralConfig"),
    "gemma": decoder("GemmaConfig", num_key_value_heads=1),
    "gemma2": decoder("Gemma2Config", attn_logit_softcapping=2.0, final_logit_softcapping=20.0),
    "gemma3": decoder("Gemma3TextConfig"),
    "phi": decoder("PhiConfig", num_key_value_heads=4),
    "phi3": decoder("Phi3Config"),
    "gpt2": decoder("GPT2Config"),
    "gpt-neox": decoder("GPTNeoXConfig"),
    "opt": decoder("OPTConfig"),
    "olmo2": decoder("Olmo2Config"),
    "granite": decoder(
        "GraniteConfig",
        embedding_multiplier=2.0,
        attention_multiplier=0.2,
        residual_multiplier=0.7,
        logits_scaling=2.0,
    ),
    "starcoder2": decoder("Starcoder2Config", sliding_window=WINDOW),
    "cohere": decoder("CohereConfig", logit_scale=1.0),
    "cohere2": decoder("Cohere2Config", logit_scale=1.0),
    "deepseek-v3": decoder("DeepseekV3Config", n_group=2, v_head_dim=12),
    "smollm3": decoder("SmolLM3Config", no_rope_layers=[1, 0]),
    "llama4": decoder(
        "Llama4TextConfig",
        num_experts_per_tok=1,
        no_rope_layers=[1, 0],
        floor_scale=8,  # its temperature changes at every 8th position
        attn_scale=0.5,
    ),
    "ernie4.5": decoder("Ernie4_5Config"),
    "glm4": decoder("Glm4Config"),
    "gpt-oss": decoder("GptOssConfig", rope_parameters=DEFAULT_ROPE),
}
# Models with recurrent layers.
RECURRENT: dict[str, Callable[[], list[Any]]] = {
    "mamba": decoder("MambaConfig", time_step_rank=2),
    "mamba2": decoder("Mamba2Config", num_heads=8, time_step_rank=2),
    "qwen3.5": decoder("Qwen3_5TextConfig"),
    "qwen3-next": decoder("Qwen3NextConfig"),
    "lfm2": decoder("Lfm2Config", layer_types=["conv", "full_attention"]),
    "bamba": decoder("BambaConfig", attn_layer_indices=[1]),
    "falcon-h1": decoder("FalconH1Config"),
    "granite4": decoder(
        "GraniteMoeHybridConfig", layers_block_type=["linear_attention", "full_attention"]
    ),
    "jamba": decoder("JambaConfig", attn_layer_period=2, attn_layer_offset=1),
    "olmo-hybrid": decoder(
        "OlmoHybridConfig", num_key_value_heads=4, head_dim=8, linear_num_key_heads=4
    ),
    "kimi-linear": decoder("KimiLinearConfig", v_head_dim=12),
}
# Models that do not run on a paged cache.
UNPAGED: dict[str, Callable[[], list[Any]]] = {
    "bloom": decoder("BloomConfig"),
    "falcon-alibi": decoder("FalconConfig", alibi=True, num_kv_heads=4, ffn_hidden_size=128),
}
LONG_ROPES: dict[str, Callable[[], list[Any]]] = {
    "llama-dynamic": decoder(
        "LlamaConfig", rope_parameters=DYNAMIC_ROPE, max_position_embeddings=64
    ),
    "gemma3-dynamic": decoder(
        "Gemma3TextConfig",
        rope_parameters={"full_attention": DYNAMIC_ROPE, **SHORT_WINDOWS},
        max_position_embeddings=64,
    ),
    "phi3-longrope": decoder(
        "Phi3Config", original_max_position_embeddings=64, rope_parameters=LONG_ROPE
    ),
}
# Its rotary embedding chooses a scale by the length of each batch, and factors in its forward.
UNFIXABLE: dict[str, Callable[[], list[Any]]] = {
    "phimoe-longrope": decoder(
        "PhimoeConfig",
        original_max_position_embeddings=64,
        rope_parameters={**LONG_ROPE, "short_mscale": 1.0, "long_mscale": 1.2},
    ),
}
# One set of factors, for more tokens than `max_position_embeddings`.
YARN: dict[str, Callable[[], list[Any]]] = {
    "llama-yarn": decoder("LlamaConfig", rope_parameters=YARN_ROPE, max_position_embeddings=64),
    "gemma3-yarn": decoder(
        "Gemma3TextConfig",
        rope_parameters={"full_attention": YARN_ROPE, **SHORT_WINDOWS},
        max_position_embeddings=64,
    ),
}
# Windows longer than the prompts of the check at load.
WIDE: dict[str, Callable[[], list[Any]]] = {
    f"{name}-wide": decoder(config, sliding_window=320, max_position_embeddings=1024, **more)
    for name, config, more in (
        ("mistral", "MistralConfig", {}),
        ("phi3", "Phi3Config", {}),
        ("gemma2", "Gemma2Config", {"query_pre_attn_scalar": 256}),
        # masks its window, and does not pass it to the attention function
        ("phimoe", "PhimoeConfig", {}),
        # has a window in its configuration, and ignores it
        ("llama", "LlamaConfig", {}),
    )
}


def small_settings(name: str) -> dict[str, Any]:
    config = getattr(hf, name)
    default = config()
    default.allow_global_per_layer_attribute_access = True
    known = {*inspect.signature(config.__init__).parameters, *vars(default)}
    known |= set(getattr(config, "attribute_map", {})) | set(getattr(config, "__annotations__", {}))
    settings = {
        setting: value
        for setting, value in BY_NAME.items()
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


WINDOWED = ("mistral", "gemma2", "gemma3", "starcoder2", "cohere2", "gpt-oss")
ARCHITECTURES = sorted(BUILDERS)
BUILDERS |= RECURRENT | UNPAGED | LONG_ROPES | UNFIXABLE | YARN | WIDE
tiny.BUILDERS |= BUILDERS
