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
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import normalize
from transformers.utils.hub import cached_file

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


class Dense(nn.Module):
    """A linear layer over vectors [texts, in] and its activation; to that what it was given is
    added where it is a residual one, through weights of their own where the sizes differ."""

    def __init__(self, config: Mapping[str, Any], state: Mapping[str, Tensor]) -> None:
        """`config` and `state` as they are in its files."""
        super().__init__()
        size, given = state["linear.weight"].shape
        self.linear = nn.Linear(given, size, config.get("bias", True))
        self.activation = activation(config.get("activation_function", "torch.nn.Tanh"))
        self.residual: nn.Module | None = None
        if config.get("use_residual"):
            differ = "residual.weight" in state
            self.residual = nn.Linear(given, size, bias=False) if differ else nn.Identity()
        self.load_state_dict(dict(state))

    def forward(self, vectors: Tensor) -> Tensor:
        made: Tensor = self.activation(self.linear(vectors))
        return made if self.residual is None else made + self.residual(vectors)


class Normalize(nn.Module):
    """To unit length."""

    def forward(self, vectors: Tensor) -> Tensor:
        return normalize(vectors, dim=-1)


@dataclass(frozen=True, slots=True)
class SentenceTransformersConfig:
    subfolder: str = ""  # of the transformer itself
    poolings: Sequence[str] = ("mean",)
    include_prompt: bool = True
    layers: Sequence[nn.Module] = (Normalize(),)  # after pooling, in order
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    truncate_dim: int | None = None
    max_length: int | None = None  # tokens
    lower_case: bool = False
    activation: nn.Module | None = None  # of a cross-encoder's scores
    answers: tuple[int, int | None] | None = None  # token ids: true and false, of a decoder's


def find_file(model: str, name: str) -> Path | None:
    """A file of a folder, or of a repository on a hub; None if there is no such file."""
    path = cached_file(model, name, _raise_exceptions_for_missing_entries=False)
    return Path(path) if path else None


def read_json(model: str, name: str) -> Any:
    """None if there is no such file."""
    path = find_file(model, name)
    return None if path is None else json.loads(path.read_text())


def read_files(model: str) -> SentenceTransformersConfig:
    """Of a folder or a hub id; LoadingFailed names what we don't know."""
    general = read_json(model, "config_sentence_transformers.json") or {}
    read: dict[str, Any] = {
        "prompts": {k: v for k, v in (general.get("prompts") or {}).items() if v is not None},
        "default_prompt": general.get("default_prompt_name"),
        "truncate_dim": general.get("truncate_dim"),
    }
    if general.get("activation_fn"):
        read["activation"] = activation(general["activation_fn"])
    if read["default_prompt"] not in (None, *read["prompts"]):
        raise LoadingFailed(f"its default prompt {read['default_prompt']!r} is none of its prompts")
    if (modules := read_json(model, "modules.json")) is None:
        return SentenceTransformersConfig(**read, **_transformer(model, ""))
    layers: list[nn.Module] = []
    for module in modules:
        path, kind = module.get("path", ""), str(module["type"])
        name = kind.rpartition(".")[2] if kind.startswith(PACKAGE) else kind
        if name == "Transformer":
            read |= {"subfolder": path, **_transformer(model, path)}
        elif name == "Pooling":
            read |= _pooling(read_json(model, f"{path}/config.json") or {})
        elif name == "Dense":
            layers.append(_dense(model, path))
        elif name == "Normalize":
            layers.append(Normalize())
        elif name == "LogitScore":
            config = read_json(model, f"{path}/config.json")
            read["answers"] = config["true_token_id"], config.get("false_token_id")
        else:
            raise LoadingFailed(f"its modules.json has a module that is not served: {kind[:200]}")
    return SentenceTransformersConfig(**read, layers=layers)


def _transformer(model: str, path: str) -> dict[str, Any]:
    for name in TRANSFORMER_CONFIGS:
        config = read_json(model, str(Path(path) / f"sentence_{name}_config.json"))
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


def _dense(model: str, path: str) -> Dense:
    config = read_json(model, f"{path}/config.json") or {}
    for key in ("module_input_name", "module_output_name"):
        if config.get(key) not in (None, "sentence_embedding"):
            raise LoadingFailed(f"its module {path} is over {config[key]!r}, not over vectors")
    if (weights := find_file(model, f"{path}/model.safetensors")) is not None:
        state = load_file(weights)
    elif (weights := find_file(model, f"{path}/pytorch_model.bin")) is not None:
        state = torch.load(weights, map_location="cpu", weights_only=True)
    else:
        raise LoadingFailed(f"its module {path} has no weights")
    return Dense(config, state)


def activation(name: str) -> nn.Module:
    """By its path in torch; LoadingFailed if it is none that we know."""
    kind = ACTIVATIONS.get(name.rpartition(".")[2]) if name.startswith("torch.nn.") else None
    if kind is None:
        raise LoadingFailed(f"an activation of its modules is not served: {name[:200]}")
    return kind()
