"""Read the files that sentence-transformers writes beside a checkpoint.

    modules.json → the folder of each module → its config, its weights

Modules are matched by class name, so that the module paths of all its versions work. An unknown
module or activation raises LoadingFailed. Without these files a vector is the normalized mean of
the tokens' states.
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

from worker.engines.embedding.late_interaction import (
    MODEL_TYPES,
    PYLATE_DENSE,
    LateInteraction,
    read_late_interaction,
)
from worker.engines.embedding.splade import SpladeHead
from worker.model.loading import LoadingFailed

PACKAGE = "sentence_transformers."
# Pooling flags of older configurations, in the order in which several are concatenated.
POOLING_FLAGS = {
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
# Roles that clients give a text, each with the prompt names that stand for it.
QUERY = ("query", "search_query")
DOCUMENT = ("document", "passage", "corpus", "search_document")
ROLES = {**dict.fromkeys(QUERY, QUERY), **dict.fromkeys(DOCUMENT, DOCUMENT)}
TRANSFORMER_CONFIGS = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta")


class Dense(nn.Module):
    """A linear layer over vectors [texts, in] with an activation and an optional residual
    connection, which has weights of its own where the sizes differ."""

    def __init__(self, config: Mapping[str, Any], state: Mapping[str, Tensor]) -> None:
        """`config` and `state` are the contents of the module's files."""
        super().__init__()
        out_size, in_size = state["linear.weight"].shape
        self.linear = nn.Linear(in_size, out_size, config.get("bias", True))
        self.activation = make_activation(config.get("activation_function", "torch.nn.Tanh"))
        self.residual: nn.Module | None = None
        if config.get("use_residual"):
            has_weight = "residual.weight" in state
            self.residual = (
                nn.Linear(in_size, out_size, bias=False) if has_weight else nn.Identity()
            )
        self.load_state_dict(dict(state))

    def forward(self, vectors: Tensor) -> Tensor:
        output: Tensor = self.activation(self.linear(vectors))
        return output if self.residual is None else output + self.residual(vectors)


class Normalize(nn.Module):
    """Scales vectors to unit length."""

    def forward(self, vectors: Tensor) -> Tensor:
        return normalize(vectors, dim=-1)


@dataclass(frozen=True, slots=True)
class SentenceTransformersConfig:
    subfolder: str = ""  # of the transformer
    poolings: Sequence[str] = ("mean",)
    include_prompt: bool = True
    splade: SpladeHead | None = None  # of a sparse model, instead of poolings and layers
    late: LateInteraction | None = None  # of a model without pooling: `layers` are for each token
    layers: Sequence[nn.Module] = (Normalize(),)  # after pooling, in order
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    truncate_dim: int | None = None
    max_length: int | None = None  # tokens
    lower_case: bool = False
    activation: nn.Module | None = None  # of a cross-encoder's scores
    answer_ids: tuple[int, int | None] | None = None  # of a decoder: the tokens of yes and no

    def role_prompt(self, role: str) -> str:
        """Return the prompt of a role; an empty one for a role without a prompt."""
        return next((self.prompts[name] for name in ROLES[role] if name in self.prompts), "")


def find_file(model: str, name: str) -> Path | None:
    """Return the path of a file in a folder or a hub repository; None if it is not there."""
    path = cached_file(model, name, _raise_exceptions_for_missing_entries=False)
    return Path(path) if path else None


def read_json(model: str, name: str) -> Any:
    """Return the contents of a JSON file; None if it is not there."""
    path = find_file(model, name)
    return None if path is None else json.loads(path.read_text())


def read_config(model: str) -> SentenceTransformersConfig:
    """Read the configuration of a folder or a hub id. Raises LoadingFailed for modules, poolings
    and activations that are not implemented."""
    general = read_json(model, "config_sentence_transformers.json") or {}
    read: dict[str, Any] = {
        "prompts": {k: v for k, v in (general.get("prompts") or {}).items() if v is not None},
        "default_prompt": general.get("default_prompt_name"),
        "truncate_dim": general.get("truncate_dim"),
    }
    if general.get("activation_fn"):
        read["activation"] = make_activation(general["activation_fn"])
    if read["default_prompt"] not in (None, *read["prompts"]):
        raise LoadingFailed(
            f"its default prompt {read['default_prompt']!r} is not one of its prompts"
        )
    if (modules := read_json(model, "modules.json")) is None:
        return SentenceTransformersConfig(**read, **_transformer(model, ""))
    layers: list[nn.Module] = []
    is_pylate = PYLATE_DENSE in [module["type"] for module in modules]
    is_late = is_pylate or general.get("model_type") in MODEL_TYPES
    level, mask = "token_embeddings" if is_late else "sentence_embedding", None
    for module in modules:
        path, kind = module.get("path", ""), str(module["type"])
        config = read_json(model, str(Path(path) / "config.json")) or {}
        name = kind.rpartition(".")[2] if kind.startswith((PACKAGE, PYLATE_DENSE)) else kind
        if name in ("Transformer", "MLMTransformer"):
            read |= {"subfolder": path, **_transformer(model, path)}
        elif name == "Pooling":
            read |= _pooling(config)
        elif name == "SpladePooling":
            read["splade"] = SpladeHead(config, general.get("max_active_dims"))
        elif name == "Dense":
            layers.append(_dense(model, path, config, level))
        elif name == "Normalize":
            if config.get("module_input_name", "sentence_embedding") == level:
                layers.append(Normalize())
        elif name == "MultiVectorMask" and is_late:
            mask = config
        elif name == "LogitScore":
            read["answer_ids"] = config["true_token_id"], config.get("false_token_id")
        else:
            raise LoadingFailed(f"its modules.json has an unsupported module: {kind[:200]}")
    if is_late:
        transformer = _transformer_config(model, read.get("subfolder", ""))
        late = read["late"] = read_late_interaction(general, transformer, mask)
        for form, prefix in late.prefixes.items():
            if prefix:
                prompt = read["prompts"].get(form, "")
                read["prompts"][form] = prefix + prompt.removeprefix(prefix)
        if mask is None:  # PyLate masks and normalizes without modules
            layers.append(Normalize())
    return SentenceTransformersConfig(**read, layers=layers)


def _transformer(model: str, path: str) -> dict[str, Any]:
    config = _transformer_config(model, path)
    lower = bool(config.get("do_lower_case"))
    return {"max_length": config.get("max_seq_length"), "lower_case": lower}


def _transformer_config(model: str, path: str) -> dict[str, Any]:
    for name in TRANSFORMER_CONFIGS:
        config = read_json(model, str(Path(path) / f"sentence_{name}_config.json"))
        if config is not None:
            return dict(config)
    return {}


def _pooling(config: Mapping[str, Any]) -> dict[str, Any]:
    mode = config.get("pooling_mode")
    poolings = [mode] if isinstance(mode, str) else list(mode or ())
    if mode is None:
        poolings = [name for key, name in POOLING_FLAGS.items() if config.get(key)] or ["mean"]
    for name in poolings:
        if name not in POOLING_FLAGS.values():
            raise LoadingFailed(f"its pooling is not supported: {str(name)[:100]}")
    return {"poolings": poolings, "include_prompt": bool(config.get("include_prompt", True))}


def _dense(model: str, path: str, config: Mapping[str, Any], level: str) -> Dense:
    """Read a layer over vectors of a level: token_embeddings or sentence_embedding."""
    for key in ("module_input_name", "module_output_name"):
        if config.get(key) not in (None, level):
            raise LoadingFailed(f"its module {path} has the {key} {config[key]!r}, not {level}")
    if (weights := find_file(model, f"{path}/model.safetensors")) is not None:
        state = load_file(weights)
    elif (weights := find_file(model, f"{path}/pytorch_model.bin")) is not None:
        state = torch.load(weights, map_location="cpu", weights_only=True)
    else:
        raise LoadingFailed(f"its module {path} has no weights")
    return Dense(config, state)


def make_activation(name: str) -> nn.Module:
    """Return the activation with a path such as torch.nn.Tanh. Raises LoadingFailed for others than
    ACTIVATIONS."""
    kind = ACTIVATIONS.get(name.rpartition(".")[2]) if name.startswith("torch.nn.") else None
    if kind is None:
        raise LoadingFailed(f"its activation is not supported: {name[:200]}")
    return kind()
