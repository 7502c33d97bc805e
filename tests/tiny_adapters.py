"""Random LoRA adapters in PEFT's format for the tiny models, and the merged models."""

import json
import math
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

CONFIG: dict[str, Any] = {
    "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "bias": "none",
    "target_modules": "all-linear", "lora_dropout": 0.1, "inference_mode": True,
}  # fmt: skip
HEADS = ("lm_head", "embed_out")


def linear_layers(model: Any) -> dict[str, tuple[int, int]]:
    """Return the inputs and outputs of the layers that PEFT's all-linear adapts."""
    layers = {}
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in HEADS:
            continue
        if isinstance(module, nn.Linear):
            layers[name] = module.in_features, module.out_features
        elif isinstance(module, Conv1D):
            layers[name] = module.nx, module.nf
    return layers


def write(folder: Path, tensors: dict[str, torch.Tensor], **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def tensors_for(
    layers: dict[str, tuple[int, int]], seed: int, rank: int = 4, size: float = 0.3
) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (inputs, outputs) in layers.items():
        for part, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
            matrix = size * torch.randn(shape, generator=generator)
            tensors[f"base_model.model.{name}.lora_{part}.weight"] = matrix
    return tensors


@cache
def plain_model(path: Path) -> Any:
    auto: Any = AutoModelForCausalLM
    return auto.from_pretrained(path, dtype=torch.float32)


def make(
    folder: Path, base: Path, seed: int, endings: Iterable[str] = ("",), **config: Any
) -> Path:
    """Write an adapter of the base's layers whose names have one of these endings."""
    layers = linear_layers(plain_model(base))
    chosen = {name: size for name, size in layers.items() if name.endswith(tuple(endings))}
    return write(folder, tensors_for(chosen, seed, config.get("r", 4)), **config)


def merged(base: Path, adapter: Path) -> Any:
    """Return the base with the adapter's products added to its weights."""
    from safetensors.torch import load_file

    auto: Any = AutoModelForCausalLM
    model = auto.from_pretrained(base, dtype=torch.float32, attn_implementation="eager")
    config = json.loads((adapter / "adapter_config.json").read_text())
    tensors = load_file(adapter / "adapter_model.safetensors")
    for name in [key for key in tensors if key.endswith("lora_A.weight")]:
        layer = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        down, up = tensors[name], tensors[name.replace("lora_A", "lora_B")]
        rank = len(down)
        scale = config["lora_alpha"] / (math.sqrt(rank) if config.get("use_rslora") else rank)
        change = up @ down * scale
        module = model.get_submodule(layer)
        module.weight.data += change.T if isinstance(module, Conv1D) else change
    model.generation_config.eos_token_id = None
    return model.eval()
