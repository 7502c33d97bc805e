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


PACKED = tuple(f"{name}.weight" for name in ("_proj", "w1", "w2", "w3", "c_attn", "c_fc"))


def write_config(folder: Path, section: dict[str, Any], source: Path = DEMO) -> Path:
    """Copy the model with a quantization_config."""
    shutil.copytree(source, folder, dirs_exist_ok=True)
    config = json.loads((source / "config.json").read_text())
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


def write_gptq(
    folder: Path,
    bits: int = 4,
    group: int = 64,
    format: str = "gptq",
    desc_act: bool = False,
    source: Path = DEMO,
) -> tuple[Path, dict[str, torch.Tensor]]:
    """Write the model as GPTQ does, and return the dequantized weights too."""
    section = {
        "quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": desc_act,
        "sym": False, "checkpoint_format": format,
    }  # fmt: skip

    def pack(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        inputs = weight.shape[1]
        groups = torch.arange(inputs) // group
        if desc_act:
            groups = groups[torch.randperm(inputs, generator=torch.Generator().manual_seed(0))]
        codes, zeros, scales = _rounded(weight, groups, bits)
        stored = zeros - 1 if format == "gptq" else zeros
        return {
            "qweight": _words(codes, bits).T.contiguous(),  # words of consecutive inputs
            "qzeros": _words(stored.T % 2**bits, bits),
            "scales": scales.T.contiguous().half(),
            "g_idx": groups.int(),
        }, (codes - zeros[:, groups]) * scales[:, groups]

    return _write_packed(folder, section, pack, source)


def write_awq(
    folder: Path, group: int = 64, source: Path = DEMO
) -> tuple[Path, dict[str, torch.Tensor]]:
    """Write the model as AWQ does, and return the dequantized weights too."""
    section = {
        "quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True,
        "version": "gemm",
    }  # fmt: skip

    def pack(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        groups = torch.arange(weight.shape[1]) // group
        codes, zeros, scales = _rounded(weight, groups, 4)
        return {
            "qweight": _words(_awq_order(codes.T), 4),
            "qzeros": _words(_awq_order(zeros.T), 4),
            "scales": scales.T.contiguous().half(),
        }, (codes - zeros[:, groups]) * scales[:, groups]

    return _write_packed(folder, section, pack, source)


def _write_packed(
    folder: Path, section: dict[str, Any], pack: Any, source: Path
) -> tuple[Path, dict[str, torch.Tensor]]:
    tensors, dequantized = {}, {}
    for name, weight in load_file(source / "model.safetensors").items():
        if not name.endswith(PACKED):
            tensors[name] = weight
            continue
        is_transposed = ".c_" in name  # GPT-2's
        parts, dequantized[name] = pack((weight.T if is_transposed else weight).float())
        if is_transposed:
            dequantized[name] = dequantized[name].T.contiguous()
        tensors |= {name.replace("weight", part): tensor for part, tensor in parts.items()}
    write_config(folder, section, source)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder, dequantized


def _rounded(
    weight: torch.Tensor, groups: torch.Tensor, bits: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return codes [out, in], zero points and scales [out, groups], which float16 holds."""
    zeros, scales = [], []
    for number in range(int(groups.max()) + 1):
        part = weight[:, groups == number]
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        scales.append(((high - low) / (2**bits - 1)).clamp(min=1e-4).half().float())
        zeros.append((-low / scales[-1]).round().clamp(0, 2**bits - 1))
    zero, scale = torch.stack(zeros, 1), torch.stack(scales, 1)
    codes = (weight / scale[:, groups]).round() + zero[:, groups]
    return codes.clamp(0, 2**bits - 1).int(), zero.int(), scale


def _words(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack numbers along the last dimension into int32 words, from the lowest bits on."""
    count = 32 // bits
    words = torch.zeros(*numbers.shape[:-1], numbers.shape[-1] // count, dtype=torch.int64)
    for place in range(count):
        words |= numbers[..., place::count].long() << place * bits
    return words.int()


def _awq_order(numbers: torch.Tensor) -> torch.Tensor:
    """Return the columns as AWQ packs them: the lowest bits are the first, then the third, …"""
    columns = torch.arange(numbers.shape[1]).view(-1, 8)[:, [0, 2, 4, 6, 1, 3, 5, 7]].flatten()
    return numbers[:, columns]


def write_gguf(file: Path, quantization: str = "Q8_0", layers: int = 0) -> Path:
    """Write the model as llama.cpp's converter does: a Qwen2 whose matrices are quantized.
    `layers`: the number that its header has, 0: the model's."""
    import gguf

    config = json.loads((DEMO / "config.json").read_text())
    tokenizer = json.loads((DEMO / "tokenizer.json").read_text())
    writer = gguf.GGUFWriter(file, "qwen2")
    writer.add_name("demo")
    writer.add_block_count(layers or config["num_hidden_layers"])
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
    section = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    write_config(folder, section, source)
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
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder
