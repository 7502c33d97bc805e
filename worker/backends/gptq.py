"""Checkpoints in the formats of GPTQ and AWQ, dequantized while transformers reads them.

Both store the weight of a linear layer as whole numbers in int32 words, `qweight`, with a zero
point (`qzeros`) and a scale (`scales` [groups, out]) for each group of inputs:
w = (q - zero) · scale. GPTQ packs consecutive inputs into a word. Its zero points are stored less
one, except in the format gptq_v2, and `g_idx` [in] has the group of each input. AWQ packs outputs,
in another order. Where the package gptqmodel is installed, transformers uses it instead.
"""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
from transformers.quantizers.base import HfQuantizer

from worker.backends.cpu.linear_layers import INT4_DEPTH, Int4Grid

WORD_BITS = 32
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # places in a word of consecutive outputs
BITS = {"gptq": (2, 4, 8), "awq": (4,)}
GRIDS = "onequeue_int4_grids"  # attribute of a model while it is loaded
FORMATS = {"gptq": ("gptq", "gptq_v2"), "awq": ("gemm",)}


def unpack(words: Tensor, bits: int, order: Sequence[int] | None = None) -> Tensor:
    """Return uint8 numbers [rows, columns · 32 / bits] of words [rows, columns], from the lowest
    bits on, or in the order of these places."""
    places, mask = order or range(WORD_BITS // bits), (1 << bits) - 1
    numbers = [(words >> place * bits & mask).to(torch.uint8) for place in places]
    return torch.stack(numbers, -1).flatten(1)


def dequantize(
    words: Tensor, zero_words: Tensor, scales: Tensor, groups: Tensor | None,
    method: str, format: str,
) -> tuple[Tensor, Int4Grid | None]:  # fmt: skip
    """Return the float32 weight [out, in], and its grid where an int4 layer can hold its codes.

    `groups` [in]: GPTQ's `g_idx`; None: groups of equal size. Raise ValueError for tensors that do
    not fit together.
    """
    is_awq, count = method == "awq", len(scales)
    bits = WORD_BITS * zero_words.shape[1] // max(1, scales.shape[1])
    if bits not in BITS[method]:
        raise ValueError(f"{bits} bits per weight: {method} has {BITS[method]}")
    per_word, (rows, columns) = WORD_BITS // bits, words.shape
    inputs, outputs = (rows, columns * per_word) if is_awq else (rows * per_word, columns)
    if (
        not words.dtype == zero_words.dtype == torch.int32
        or scales.shape != (count, outputs)
        or zero_words.shape != (count, outputs // per_word)
        or (inputs % max(1, count) if groups is None else groups.shape != (inputs,))
    ):
        shapes = ", ".join(str(tuple(x.shape)) for x in (words, zero_words, scales))
        raise ValueError(f"{shapes} are not qweight, qzeros and scales of {bits} bits per weight")
    if groups is not None and not 0 <= int(groups.min()) <= int(groups.max()) < count:
        raise ValueError(f"g_idx names groups other than the {count} of scales")
    order = AWQ_ORDER if is_awq else None
    zeros = unpack(zero_words, bits, order)
    if format == "gptq":
        zeros = zeros + 1 & (1 << bits) - 1
    codes = unpack(words, bits, order).T if is_awq else unpack(words.T, bits)
    if groups is None:
        groups = torch.arange(inputs, device=words.device) // (inputs // count)
    groups, zeros, factors = groups.long(), zeros.float(), scales.float()
    grid = None
    if bits == 4 and inputs % INT4_DEPTH == 0:
        first = groups[::INT4_DEPTH]
        if torch.equal(groups, first.repeat_interleave(INT4_DEPTH)):
            offsets = (8 - zeros) * factors
            grid = Int4Grid(factors[first].T.bfloat16(), offsets[first].T.bfloat16())
    return codes.float().sub_(zeros[groups].T).mul_(factors[groups].T), grid


def drop_int4_grids(model: nn.Module) -> None:
    """Free the grids of a model's weights, where no int4 layers are made of them."""
    for parameter in model.parameters():
        vars(parameter).pop("int4_grid", None)


class Dequantize(ConversionOps):
    """The operation that runs on a checkpoint's tensors before those of the model's own
    conversions, such as a merge of experts."""

    def __init__(self, hf_quantizer: Any) -> None:
        self.hf_quantizer = hf_quantizer

    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        full_layer_name: str = "",
        model: Any = None,
        **_: Any,
    ) -> dict[str, Any]:
        parent, _dot, name = full_layer_name.rpartition(".")
        module = model.get_submodule(parent)
        is_transposed, dtype = isinstance(module, Conv1D), getattr(module, name).dtype
        tensors = {key: v if isinstance(v, list) else [v] for key, v in input_dict.items()}
        results: dict[str, list[Tensor]] = {}
        quantizer = self.hf_quantizer
        for key, values in tensors.items():
            if key.endswith("qweight"):
                prefix = key.removesuffix("qweight")
                groups = tensors.get(prefix + "g_idx", [None] * len(values))
                parts = (values, tensors[prefix + "qzeros"], tensors[prefix + "scales"], groups)
                for packed in zip(*parts, strict=True):
                    weight, grid = dequantize(*packed, quantizer.method, quantizer.format)
                    weight = (weight.T.contiguous() if is_transposed else weight).to(dtype)
                    results.setdefault(prefix + "weight", []).append(weight)
                    if prefix == "" and grid is not None and not is_transposed:
                        grids = vars(model).setdefault(GRIDS, {})  # the quantizer is copied
                        grids[full_layer_name] = grid
            elif key.endswith("weight"):
                results[key] = [value.to(dtype) for value in values]
        if "weight" in results:  # of one module, not of a model's conversion
            return {full_layer_name: results["weight"][0]}
        return results


class PackedQuantizer(HfQuantizer):
    """transformers' quantizer of either method."""

    serialized_names = {"weight": ["weight", "qweight", "qzeros", "scales", "g_idx"]}  # noqa: RUF012

    def __init__(self, quantization_config: Any, **keywords: Any) -> None:
        super().__init__(quantization_config, **keywords)
        self.method = str(getattr(quantization_config.quant_method, "value", None))
        self.format = str(getattr(quantization_config.format, "value", quantization_config.format))
        quantization_config.dequantize = True

    def validate_environment(self, *_: Any, **__: Any) -> None:
        config: Any = self.quantization_config
        for name, value, accepted in (
            ("bits", config.bits, BITS[self.method]),
            ("format", self.format, FORMATS[self.method]),
        ):
            if value not in accepted:
                choices = ", ".join(map(str, accepted))
                raise ValueError(f"its {name} {value!r} cannot be read, only {choices}")

    def get_load_operations(self) -> dict[str, Any]:
        return {"dequantize": Dequantize}

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        for name, grid in vars(model).pop(GRIDS, {}).items():
            model.get_parameter(name).int4_grid = grid
        return model

    @property
    def is_trainable(self) -> bool:
        return False

    def is_serializable(self) -> bool:
        return False


if find_spec("gptqmodel") is None:  # register_quantizer refuses names that transformers has
    AUTO_QUANTIZER_MAPPING.update(dict.fromkeys(BITS, PackedQuantizer))
