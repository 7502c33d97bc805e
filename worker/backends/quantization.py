"""Weights that transformers quantizes, and checkpoints that are quantized already.

Weights that transformers or gptq.py can dequantize while they are read are dequantized on a CPU,
where the layers of linear_layers.py serve them. Others keep the layers of their library.
"""

import copy
import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
import transformers
from torch import nn
from transformers import BitsAndBytesConfig
from transformers.quantizers.auto import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    AUTO_QUANTIZER_MAPPING,
    AutoHfQuantizer,
    AutoQuantizationConfig,
)

from batching.errors import OnequeueError
from worker.backends.gptq import PackedQuantizer
from worker.error_classification import first_line

OTHER_CHECKPOINT = "use a checkpoint that is not quantized"
PACKED_BITS = 4  # of a weight whose configuration names no number


class CannotQuantize(OnequeueError):
    """The weights cannot be quantized, or transformers does not know how they are."""


def quantization_of(config: Any) -> dict[str, Any]:
    """Return the quantization_config of a checkpoint's configuration; empty if it has none. Raise
    CannotQuantize if it names no method."""
    found = getattr(config, "quantization_config", None)
    if found is None:
        found = getattr(config.get_text_config(decoder=True), "quantization_config", None)
    if found is None:
        return {}
    section = found if isinstance(found, dict) else found.to_dict()
    if not section.keys() & {"quant_method", "load_in_8bit", "load_in_4bit"}:
        raise CannotQuantize(
            f"the quantization_config in its config.json has no quant_method: {OTHER_CHECKPOINT}"
        )
    return dict(section)


def method_of(section: dict[str, Any]) -> str:
    if section.get("load_in_8bit") or section.get("load_in_4bit"):
        return "bitsandbytes"
    return str(section.get("quant_method"))


def is_dequantized(section: dict[str, Any], device: torch.device) -> bool:
    """Return whether weights with this quantization_config are dequantized while they are read."""
    if is_read_here(method_of(section)):
        return True
    known = AUTO_QUANTIZATION_CONFIG_MAPPING.get(method_of(section))
    accepts = known is not None and "dequantize" in inspect.signature(known).parameters
    return device.type == "cpu" and accepts


def is_read_here(method: str) -> bool:
    """Return whether gptq.py reads weights of this method, on any device."""
    return AUTO_QUANTIZER_MAPPING.get(method) is PackedQuantizer


def memory_factor(section: dict[str, Any], device: torch.device, itemsize: int) -> float:
    """Return how many bytes of memory a byte of quantized weights takes; `itemsize`: of a weight
    that is dequantized."""
    if not is_dequantized(section, device):
        return 1.0
    bits = 8 if method_of(section) in ("fp8", "mxfp8") else min(_bits(section), default=PACKED_BITS)
    return itemsize * 8 / bits


def _bits(section: Any) -> Iterator[int]:
    """Yield the numbers of bits that a quantization_config names."""
    if isinstance(section, dict):
        for name, value in section.items():
            if name in ("num_bits", "bits") and isinstance(value, int) and 0 < value <= 8:
                yield value
            else:
                yield from _bits(value)


def quantization_arguments(
    config: Any, quantization: str, dtype: Any, device: torch.device
) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` for a quantized model, none for others.

    `quantization`: the setting. Raise CannotQuantize for what this environment does not have.
    """
    section, asked = quantization_of(config), f"QUANTIZATION={quantization}"
    on_device = {"device_map": {"": device}}
    if section:
        method = method_of(section)
        check_method(section, device)
        if quantization.startswith("bnb-") or not (
            quantization == "none" or is_dequantized(section, device)
        ):
            already = f"its weights are quantized with {method} already"
            raise CannotQuantize(f"{already}: load them without {asked}")
        if is_dequantized(section, device):
            config = copy.deepcopy(config)
            config.quantization_config = {**section, "dequantize": True}
            return {"config": config}
        return on_device if device.type != "cpu" else {}
    if quantization.startswith("bnb-"):
        if find_spec("bitsandbytes") is None:
            raise CannotQuantize(f"{asked} needs bitsandbytes: pip install 'onequeue[bnb]'")
        if dtype == "auto":
            dtype = getattr(config, "dtype", None) or torch.float32
        bits = {
            "bnb-8bit": {"load_in_8bit": True},
            "bnb-4bit": {
                "load_in_4bit": True,
                "bnb_4bit_quant_type": "nf4",
                "bnb_4bit_use_double_quant": True,
                "bnb_4bit_compute_dtype": dtype,
            },
        }
        # it logs each product of bfloat16 inputs
        logging.getLogger("bitsandbytes.autograd").setLevel(logging.ERROR)
        return {"quantization_config": BitsAndBytesConfig(**bits[quantization]), **on_device}
    return {}


def gguf_arguments(quantization: str, device: torch.device) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` for a GGUF file, which is dequantized on a CPU."""
    if quantization.startswith("bnb-"):
        asked = f"QUANTIZATION={quantization}"
        raise CannotQuantize(f"GGUF is quantized already: load it without {asked}")
    if device.type != "cpu":
        return {}
    return {"quantization_config": transformers.GgufConfig(dequantize=True)}


def check_quantization(config: Any, device: torch.device) -> None:
    """Raise CannotQuantize unless transformers reads the weights of a checkpoint here."""
    if section := quantization_of(config):
        check_method(section, device)


def check_method(section: dict[str, Any], device: torch.device) -> None:
    """Raise CannotQuantize unless transformers reads weights of this method here."""
    method = method_of(section)
    subject = f"its weights are quantized with {method}"
    accepts = is_dequantized(section, device) and not is_read_here(method)
    dequantize = {"dequantize": True} if accepts else {}
    try:
        try:
            config = AutoQuantizationConfig.from_dict({**section, **dequantize})
        except (TypeError, ValueError, AttributeError) as error:
            raise CannotQuantize(
                f"the quantization_config in its config.json is invalid for {method}: "
                + first_line(error).rstrip(".")
            ) from error
        quantizer = AutoHfQuantizer.from_config(config, pre_quantized=True)
        quantizer.validate_environment(device_map={"": device.type})
    except CannotQuantize:
        raise
    except Exception as error:  # each method raises its own errors
        why = first_line(error).rstrip(".")
        raise CannotQuantize(
            f"{subject}, which is not available on {device.type} here: {why}"
        ) from error


# ── layers of other libraries ──


def has_library_layers(model: nn.Module) -> bool:
    """Return whether linear layers are those of a library that quantizes."""
    return bool(getattr(model, "is_quantized", False)) and any(
        type(module) is not nn.Linear
        and isinstance(getattr(module, "in_features", None), int)
        and isinstance(getattr(module, "out_features", None), int)
        for module in model.modules()
    )


@contextmanager
def without_outliers(model: nn.Module) -> Iterator[None]:
    """Multiply all inputs of bitsandbytes' 8-bit layers as int8, in the checks at load.

    Otherwise an input that is large in any row is multiplied as float16 in all rows: a row's result
    depends on the others then.
    """
    found = (getattr(module, "state", None) for module in model.modules())
    states: list[Any] = [state for state in found if hasattr(state, "threshold")]
    before = [state.threshold for state in states]
    for state in states:
        state.threshold = 0.0
    try:
        yield
    finally:
        for state, threshold in zip(states, before, strict=True):
            state.threshold = threshold
