"""What sentence-transformers writes beside a checkpoint, read by us.

    modules.json → the folder of each module → its config, its weights

Modules are known by their class names, so that the paths of all its versions do; one that we don't
know is refused by name, and so is an activation. Without such files a vector is the mean of the
tokens' states, at unit length.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError
from safetensors.torch import load_file
from torch import Tensor, nn

from worker.model.loading import LoadingFailed

PACKAGE = "sentence_transformers."
# By the names of older configurations, in the order in which several are concatenated.
POOLINGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
ACTIVATIONS = {
    kind.__name__: kind
    for kind in (nn.Identity, nn.Tanh, nn.Sigmoid, nn.ReLU, nn.GELU, nn.SiLU, nn.LeakyReLU)
}
TRANSFORMER_CONFIGS = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta")


@dataclass(frozen=True, slots=True)
class Dense:
    """A linear layer over vectors, `activation` over it, and what it was given added to that where
    it is a residual one."""

    weight: Tensor  # [out, in]
    bias: Tensor | None  # [out]
    activation: nn.Module
    residual: bool = False
    residual_weight: Tensor | None = None  # [out, in], where the two differ


@dataclass(frozen=True, slots=True)
class Normalize:
    """To unit length."""


@dataclass(frozen=True, slots=True)
class SentenceFiles:
    subfolder: str = ""  # of the transformer itself
    poolings: Sequence[str] = ("mean",)
    include_prompt: bool = True
    layers: Sequence[Dense | Normalize] = (Normalize(),)  # after pooling, in order
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    truncate_dim: int | None = None
    max_length: int | None = None  # tokens
    lower_case: bool = False
    activation: nn.Module | None = None  # of a cross-encoder's scores
    answers: tuple[int, int | None] | None = None  # token ids: true and false, of a decoder's


class Checkpoint:
    """A folder, or a repository on a hub."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.folder = Path(model) if Path(model).is_dir() else None

    def path(self, name: str) -> Path | None:
        """None if there is no such file."""
        if self.folder is not None:
            path = self.folder / name
            return path if path.is_file() else None
        try:
            return Path(hf_hub_download(self.model, name))
        except EntryNotFoundError:
            return None

    def json(self, name: str) -> Any:
        """None if there is no such file."""
        path = self.path(name)
        return None if path is None else json.loads(path.read_text())


def read_files(model: str) -> SentenceFiles:
    """Of a folder or a hub id; LoadingFailed names what we don't know."""
    checkpoint = Checkpoint(model)
    general = checkpoint.json("config_sentence_transformers.json") or {}
    read: dict[str, Any] = {
        "prompts": {k: v for k, v in (general.get("prompts") or {}).items() if v is not None},
        "default_prompt": general.get("default_prompt_name"),
        "truncate_dim": general.get("truncate_dim"),
    }
    if general.get("activation_fn"):
        read["activation"] = activation(general["activation_fn"])
    if read["default_prompt"] not in (None, *read["prompts"]):
        raise LoadingFailed(f"its default prompt {read['default_prompt']!r} is none of its prompts")
    if (modules := checkpoint.json("modules.json")) is None:
        return SentenceFiles(**read, **_transformer(checkpoint, ""))
    layers: list[Dense | Normalize] = []
    for module in modules:
        path, kind = module.get("path", ""), str(module["type"])
        name = kind.rpartition(".")[2] if kind.startswith(PACKAGE) else kind
        if name == "Transformer":
            read |= {"subfolder": path, **_transformer(checkpoint, path)}
        elif name == "Pooling":
            read |= _pooling(checkpoint.json(f"{path}/config.json") or {})
        elif name == "Dense":
            layers.append(_dense(checkpoint, path))
        elif name == "Normalize":
            layers.append(Normalize())
        elif name == "LogitScore":
            config = checkpoint.json(f"{path}/config.json")
            read["answers"] = config["true_token_id"], config.get("false_token_id")
        else:
            raise LoadingFailed(f"its modules.json has a module that is not served: {kind[:200]}")
    return SentenceFiles(**read, layers=layers)


def _transformer(checkpoint: Checkpoint, path: str) -> dict[str, Any]:
    for name in TRANSFORMER_CONFIGS:
        config = checkpoint.json(str(Path(path) / f"sentence_{name}_config.json"))
        if config is not None:
            lower = bool(config.get("do_lower_case"))
            return {"max_length": config.get("max_seq_length"), "lower_case": lower}
    return {}


def _pooling(config: Mapping[str, Any]) -> dict[str, Any]:
    given = config.get("pooling_mode")
    poolings = [given] if isinstance(given, str) else list(given or ())
    if given is None:
        poolings = [name for key, name in POOLINGS.items() if config.get(key)] or ["mean"]
    for name in poolings:
        if name not in POOLINGS.values():
            raise LoadingFailed(f"its pooling is not served: {str(name)[:100]}")
    return {"poolings": poolings, "include_prompt": bool(config.get("include_prompt", True))}


def _dense(checkpoint: Checkpoint, path: str) -> Dense:
    config = checkpoint.json(f"{path}/config.json") or {}
    for key in ("module_input_name", "module_output_name"):
        if config.get(key) not in (None, "sentence_embedding"):
            raise LoadingFailed(f"its module {path} is over {config[key]!r}, not over vectors")
    if (weights := checkpoint.path(f"{path}/model.safetensors")) is not None:
        state = load_file(weights)
    elif (weights := checkpoint.path(f"{path}/pytorch_model.bin")) is not None:
        state = torch.load(weights, map_location="cpu", weights_only=True)
    else:
        raise LoadingFailed(f"its module {path} has no weights")
    return Dense(
        state["linear.weight"].float(),
        state["linear.bias"].float() if config.get("bias", True) else None,
        activation(config.get("activation_function", "torch.nn.modules.activation.Tanh")),
        bool(config.get("use_residual")),
        state["residual.weight"].float() if "residual.weight" in state else None,
    )


def activation(name: str) -> nn.Module:
    """By its path in torch; LoadingFailed if it is none that we know."""
    kind = ACTIVATIONS.get(name.rpartition(".")[2]) if name.startswith("torch.nn.") else None
    if kind is None:
        raise LoadingFailed(f"an activation of its modules is not served: {name[:200]}")
    return kind()
