"""The embedded chat model as checkpoints that are quantized by other programs."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

DEMO = Path(__file__).parents[1] / "worker" / "demo" / "chat"
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
INT8_WEIGHTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": INT8_WEIGHTS}},
    "ignore": ["lm_head"],
}


def write_config(folder: Path, section: dict[str, Any]) -> Path:
    """Copy the model with a quantization_config."""
    shutil.copytree(DEMO, folder, dirs_exist_ok=True)
    config = json.loads((DEMO / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": section}))
    return folder


def _write(folder: Path, section: dict[str, Any], quantize: Any) -> Path:
    weights: dict[str, torch.Tensor] = {}
    for name, weight in load_file(DEMO / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            weights |= quantize(name, weight.float())
        else:
            weights[name] = weight
    write_config(folder, section)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def write_fp8(folder: Path) -> Path:
    def quantize(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        blocks = [-(-size // 128) for size in weight.shape]
        scales = weight.new_empty(blocks)
        for row in range(blocks[0]):
            for column in range(blocks[1]):
                block = weight[row * 128 : row * 128 + 128, column * 128 : column * 128 + 128]
                scales[row, column] = block.abs().max() / 448
                block /= scales[row, column]
        return {name: weight.to(torch.float8_e4m3fn), f"{name}_scale_inv": scales}

    return _write(folder, FP8, quantize)


def write_compressed(folder: Path) -> Path:
    def quantize(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        scale = weight.abs().amax(1, keepdim=True) / 127
        return {name: (weight / scale).round().to(torch.int8), f"{name}_scale": scale}

    return _write(folder, COMPRESSED, quantize)


def write_gguf(file: Path, quantization: str = "Q8_0") -> Path:
    """Write the model as llama.cpp's converter does: a Qwen2 whose matrices are quantized."""
    import gguf

    config = json.loads((DEMO / "config.json").read_text())
    tokenizer = json.loads((DEMO / "tokenizer.json").read_text())
    writer = gguf.GGUFWriter(file, "qwen2")
    writer.add_name("demo")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    tokens = [f"[PAD{number}]" for number in range(config["vocab_size"])]
    types = [gguf.TokenType.UNUSED] * len(tokens)
    for token, number in tokenizer["model"]["vocab"].items():
        tokens[number], types[number] = token, gguf.TokenType.NORMAL
    for added in tokenizer["added_tokens"]:
        tokens[added["id"]], types[added["id"]] = added["content"], gguf.TokenType.CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_pad_token_id(config["pad_token_id"])
    writer.add_chat_template((DEMO / "chat_template.jinja").read_text())
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, config["num_hidden_layers"])
    for name, weight in load_file(DEMO / "model.safetensors").items():
        if name == "lm_head.weight":  # tied
            continue
        values, kind = weight.float().numpy().astype(np.float32), gguf.GGMLQuantizationType.F32
        if values.ndim == 2:
            kind = gguf.GGMLQuantizationType[quantization]
            values = gguf.quants.quantize(values, kind)
        known = names.get_name(name, (".weight", ".bias"))
        writer.add_tensor(str(known), values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def write_mxfp4(folder: Path, source: Path) -> Path:
    """Write a GPT-OSS whose experts are MXFP4: blocks of 32 inputs, with one exponent each."""
    shutil.copytree(source, folder, dirs_exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for name, weight in load_file(source / "model.safetensors").items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            weights[name] = weight
            continue
        experts, inputs, outputs = weight.shape
        shape = (experts, outputs, inputs // 32)
        codes = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(120, 124, shape, dtype=torch.uint8, generator=generator)
        weights |= {f"{name}_blocks": codes, f"{name}_scales": scales}
    config = json.loads((source / "config.json").read_text())
    section = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": section}))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder
