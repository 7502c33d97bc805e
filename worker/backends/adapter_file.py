"""LoRA adapters in PEFT's format: adapter_config.json and adapter_model.safetensors.

Names, shapes and sizes are checked before a tensor is read. A field that would change the result in
a way that is not supported is refused, also one that is not known.
"""

import json
import math
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import regex
import torch
from msgspec import Meta
from safetensors import SafetensorError, safe_open
from torch import Tensor

from worker.adapter_folder import CONFIG, WEIGHTS
from worker.error_classification import first_line
from worker.load_context import advance
from worker.messages.adapters import InvalidAdapter

MAX_RANK = 512
MAX_ALPHA = 1e6
Alpha = Annotated[float, Meta(ge=-MAX_ALPHA, le=MAX_ALPHA)]
MAX_PATTERN = 1000  # characters of a pattern of layers
MATCH_TIMEOUT_S = 2.0  # for all patterns of a configuration
FLOAT_DTYPES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
# Fields that do not change the product of a trained adapter. The tensors in the file show which
# layers it has, so those that choose layers are not read.
IGNORED = {
    "alpha_pattern", "arrow_config", "auto_mapping", "base_model_name_or_path", "corda_config",
    "eva_config", "exclude_modules", "fan_in_fan_out", "inference_mode", "init_lora_weights",
    "layers_pattern", "layers_to_transform", "loftq_config", "lora_alpha", "lora_dropout",
    "lora_ga_config", "megatron_core", "peft_type", "peft_version", "qalora_group_size", "r",
    "rank_pattern", "revision", "runtime_config", "target_modules", "task_type", "use_rslora",
    "ensure_weight_tying", "bias",
}  # fmt: skip
# Other initializations change the weights of the base.
INITIALIZATIONS = (None, True, False, "gaussian", "eva", "orthogonal")
TENSOR = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])\.weight")


@dataclass(frozen=True, slots=True)
class LoraPair:
    """The change of one linear layer: y += up(down(x)).

    `down` [rank, in], `up` [rank, out] with the scale of the adapter.
    """

    down: Tensor
    up: Tensor


@dataclass(frozen=True, eq=False)
class LoraWeights:
    """Implements AdapterWeights. `pairs`: by the names of the layers."""

    pairs: Mapping[str, LoraPair]

    @property
    def nbytes(self) -> int:
        return sum(pair.down.nbytes + pair.up.nbytes for pair in self.pairs.values())


class LoraConfig(msgspec.Struct):
    """The fields of adapter_config.json that are read, with their accepted values."""

    peft_type: Literal["LORA"]
    bias: Literal["none"] | None = None
    r: Annotated[int, Meta(ge=1, le=MAX_RANK)] = 8
    lora_alpha: Alpha = 8
    use_rslora: bool | None = None
    alpha_pattern: dict[Annotated[str, Meta(max_length=MAX_PATTERN)], Alpha] | None = None

    def scale(self, layer: str, rank: int, deadline: float) -> float:
        """Return the scale of a layer. `deadline`: of matching the patterns."""
        patterns = self.alpha_pattern or {}
        matching = (a for p, a in patterns.items() if _matches(p, layer, deadline))
        return next(matching, self.lora_alpha) / (math.sqrt(rank) if self.use_rslora else rank)


def _matches(pattern: str, layer: str, deadline: float) -> bool:
    """Return whether a key of a pattern field is the layer's, as PEFT compares them."""
    left_s = max(0.001, deadline - time.monotonic())
    try:
        return bool(regex.match(rf"(.*\.)?({pattern})$", layer, timeout=left_s))
    except (regex.error, RecursionError, TimeoutError) as error:
        reason = f"alpha_pattern: {pattern!r:.100} cannot be matched with a layer"
        raise InvalidAdapter(reason) from error


def read_config(folder: Path) -> LoraConfig:
    """Return an adapter's configuration. Raises InvalidAdapter."""
    try:
        fields = json.loads((folder / CONFIG).read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidAdapter(f"{CONFIG} cannot be read: {first_line(error)}") from None
    try:
        config = msgspec.convert(fields, LoraConfig)
    except msgspec.ValidationError as error:
        raise InvalidAdapter(f"{CONFIG}: {error}") from None
    if (init := fields.get("init_lora_weights")) not in INITIALIZATIONS:
        raise InvalidAdapter(
            f"init_lora_weights: {init!r:.100} changes the weights of the base: convert the "
            "adapter to plain LoRA"
        )
    for field, value in fields.items():
        if field not in IGNORED and value:
            raise InvalidAdapter(f"{field:.100}: {value!r:.100} is not supported")
    return config


def read_weights(
    folder: Path,
    layers: Mapping[str, tuple[int, int]],
    dtype: torch.dtype,
    device: torch.device,
    free_bytes: float,
) -> LoraWeights:
    """Return an adapter's weights. `layers`: inputs and outputs of those that may be adapted.

    Raise InvalidAdapter where it does not fit them, or does not fit into memory.
    """
    config, deadline = read_config(folder), time.monotonic() + MATCH_TIMEOUT_S
    try:
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            ranks = _check_tensors(file, layers, dtype, free_bytes)
            pairs = {}
            for layer, (rank, prefix) in ranks.items():
                advance()
                down, up = (file.get_tensor(f"{prefix}.lora_{part}.weight") for part in "AB")
                up = up.float().T * config.scale(layer, rank, deadline)
                pairs[layer] = LoraPair(
                    down.to(device, dtype).contiguous(), up.to(device, dtype).contiguous()
                )
    except (SafetensorError, OSError) as error:
        raise InvalidAdapter(f"{WEIGHTS} cannot be read: {first_line(error)}") from None
    return LoraWeights(pairs)


def _check_tensors(
    file: Any, layers: Mapping[str, tuple[int, int]], dtype: torch.dtype, free_bytes: float
) -> dict[str, tuple[int, str]]:
    """Return the rank of each layer of the file, and the prefix of its tensors' names."""
    shapes: dict[str, dict[str, list[int]]] = {}
    prefixes: dict[str, str] = {}
    numbers = 0
    for name in file.keys():  # noqa: SIM118
        if not (match := TENSOR.fullmatch(name)):
            raise InvalidAdapter(
                f"{WEIGHTS}: {name:.200} is not supported, only lora_A and lora_B of linear layers"
            )
        layer, part = match.groups()
        if layer not in layers:
            raise InvalidAdapter(
                f"target_modules: {layer:.200} is no linear layer of this model that can be "
                "adapted; embeddings, output heads, experts and recurrent layers cannot"
            )
        tensor = file.get_slice(name)
        shape = tensor.get_shape()
        if tensor.get_dtype() not in FLOAT_DTYPES or len(shape) != 2:
            raise InvalidAdapter(
                f"{WEIGHTS}: {name:.200} must be a matrix of floating-point numbers"
            )
        if part in shapes.setdefault(layer, {}):
            raise InvalidAdapter(f"{WEIGHTS}: {layer:.200} has two matrices {part}")
        shapes[layer][part] = shape
        prefixes[layer] = name.rpartition(".lora_")[0]
        numbers += math.prod(shape)
    if not shapes:
        raise InvalidAdapter(f"{WEIGHTS}: it has no tensors")
    ranks = {}
    for layer, parts in shapes.items():
        inputs, outputs = layers[layer]
        rank = parts["A"][0] if "A" in parts else 0
        if parts != {"A": [rank, inputs], "B": [outputs, rank]}:
            raise InvalidAdapter(
                f"{WEIGHTS}: {layer:.200} has {parts}, and needs A [rank, {inputs}] and "
                f"B [{outputs}, rank]: it is of another base"
            )
        if not 1 <= rank <= MAX_RANK:
            raise InvalidAdapter(f"r: must be 1 to {MAX_RANK}, not {rank} as of {layer:.200}")
        ranks[layer] = (rank, prefixes[layer])
    if (needed := numbers * dtype.itemsize) > free_bytes:
        raise InvalidAdapter(
            f"it needs {needed / 1e6:.1f} MB and {max(0, free_bytes) / 1e6:.1f} MB are free"
        )
    return ranks
