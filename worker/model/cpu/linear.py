"""Linear layers for a CPU, with weights in a layout that its matrix kernels read fast.

PackedLinear holds weights in oneDNN's layout, several times faster than the plain one for the few
rows of a decode step; the native operation (native/packed_linear.cpp) reads the same copy.
Bf16WeightLinear serves bfloat16 on CPUs without bfloat16 instructions. Int8Linear and Int4Linear
hold quantized weights for torch's kernels, NativeInt8Linear and NativeInt4Linear for the native
ones, which need bfloat16 instructions. Layers are replaced one by one, so the model exists once in
memory, plus one layer.
"""

import ctypes
import logging
import math
import mmap
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from worker.device.device import has_bfloat16
from worker.device.self_check import CannotRun, compare
from worker.model.cpu.experts import (
    PackedExperts,
    Products,
    expert_weights,
    pack_experts,
    packed_experts,
    unpack_experts,
)
from worker.model.cpu.functional import MIN_ROWS, replace_functions
from worker.model.cpu.fused_linear import (
    FusedSlice,
    find_shared_inputs,
    fuse_linears,
    weight_stand_in,
)
from worker.model.cpu.head_linear import HeadLinear, PackedHeads

log = logging.getLogger("onequeue.linear")

Layer = TypeVar("Layer", bound=nn.Module)

# Share of the free memory that a second copy of the weights may take.
MAX_COPY_SHARE = 0.5
# Largest difference of two products, relative to the largest value.
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
# Row counts to compare products with: one, some, more than one and than two AMX tiles.
COMPARED_ROWS = (1, 7, 18, 77)
# The same for products with plain weights; oneDNN's change at 16, 32, 64 and 512.
STACKED_ROWS = (MIN_ROWS, 7, 18, 33, 77, 600)
# The int8 kernels read the weights once per row, which pays up to so many rows.
INT8_ROWS = 8
# Output rows quantized at a time: the float32 copy of a vocabulary's head would take gigabytes.
QUANTIZED_ROWS = 4096
# Columns per group in which oneDNN may have packed the weights.
GROUP_WIDTHS = (32, 64)
PANEL_COLUMNS = 32  # columns of a panel: SPREAD in native/bf16_weight_linear.cpp
QUANTIZED_COLUMNS = 64  # of int8 and int4 weights: QUANTIZED_GROUP in native/int8_linear.cpp
INT8_DEPTH = 32  # int8 weights are padded to a multiple of this depth, STEP<Half> in C++
INT4_DEPTH = 32  # inputs that share a scale and an offset; as in native/int4_linear.cpp
INT4_BYTES = 0.5 + 4 / INT4_DEPTH  # of a weight, with its share of scale and offset
# Quantized products are timed beside plain ones where a model has so many weights, with a weight
# [out, in] of this shape and so many rows; so many other bytes fill the CPU's cache before each.
MIN_TIMED_WEIGHTS = 10_000_000
TIMED_SHAPE = (4096, 2048)
TIMED_ROWS = (1, 16, 256)
TIMED_TURNS = 10
CACHE_BYTES = 64 << 20
# Times beside others are noise up to this factor.
MAX_FACTOR = 1.1
LARGE_PAGE_BYTES = 2 << 20
MADV_COLLAPSE = 25  # madvise(2), Linux 6.1: make large pages now


class Int4Grid(NamedTuple):
    """Scales and offsets, bfloat16 [out, in / INT4_DEPTH], of a weight [out, in] rounded before
    to 4 bits, in the terms of `_quantize_int4`. The attribute `int4_grid` of its parameter."""

    scales: Tensor
    offsets: Tensor


# ── the native operations, implemented in native/*.cpp ──

torch.library.define(
    "onequeue::packed_linear", "(Tensor x, Tensor packed, Tensor? bias, int width) -> Tensor",
    tags=torch.Tag.flexible_layout,
)  # fmt: skip
torch.library.define(
    "onequeue::bf16_weight_linear",
    "(Tensor x, Tensor panels, Tensor? bias, int columns) -> Tensor",
    tags=torch.Tag.flexible_layout,
)  # fmt: skip

torch.library.define(
    "onequeue::int8_linear",
    "(Tensor x, Tensor panels, Tensor scales, Tensor? bias, int columns) -> Tensor",
    tags=torch.Tag.flexible_layout,
)  # fmt: skip

torch.library.define(
    "onequeue::experts_linear",
    "(Tensor x, Tensor counts, Tensor addresses, Tensor? scales, int padded, int columns,"
    " int width) -> Tensor",
)

torch.library.define(
    "onequeue::int4_linear", "(Tensor x, Tensor blocks, Tensor? bias, int columns) -> Tensor",
    tags=torch.Tag.flexible_layout,
)  # fmt: skip


@torch.library.register_fake("onequeue::packed_linear")  # type: ignore[untyped-decorator]  # torch's
def _(x: Any, packed: Any, bias: Any, width: int) -> Tensor:
    out: Tensor = x.new_empty(*x.shape[:-1], packed.shape[0])
    return out


@torch.library.register_fake("onequeue::bf16_weight_linear")  # type: ignore[untyped-decorator]  # torch's
def _(x: Any, panels: Any, bias: Any, columns: int) -> Tensor:
    out: Tensor = x.new_empty(*x.shape[:-1], columns)
    return out


@torch.library.register_fake("onequeue::int8_linear")  # type: ignore[untyped-decorator]  # torch's
def _(x: Any, panels: Any, scales: Any, bias: Any, columns: int) -> Tensor:
    out: Tensor = x.new_empty(*x.shape[:-1], columns)
    return out


@torch.library.register_fake("onequeue::experts_linear")  # type: ignore[untyped-decorator]  # torch's
def _(
    x: Any, counts: Any, addresses: Any, scales: Any, padded: int, columns: int, width: int
) -> Tensor:
    out: Tensor = x.new_empty(x.shape[0], columns)
    return out


@torch.library.register_fake("onequeue::int4_linear")  # type: ignore[untyped-decorator]  # torch's
def _(x: Any, blocks: Any, bias: Any, columns: int) -> Tensor:
    out: Tensor = x.new_empty(*x.shape[:-1], columns)
    return out


# ── layers ──


class PackedLinear(nn.Module):
    """nn.Linear, x [..., in] → [..., out], with weights in oneDNN's layout.

    Where bfloat16 would be emulated, weights are float32 and so are sums; inputs and outputs stay
    bfloat16, with the results of bfloat16 kernels. The native operation replaces oneDNN's product
    once `native_width`, the columns per group of the layout, is not 0. A row of its result does not
    depend on the other rows; oneDNN's order of sums changes with their number.
    """

    packed: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self.compute_dtype = packed_dtype(weight.dtype)
        self.native_width = 0
        # name and algorithm of an activation that oneDNN applies to the output (vision/cpu_fusions)
        self.activation: tuple[str, str] | None = None
        self.weight = weight_stand_in(weight)
        weight = weight.detach().to(self.compute_dtype)
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, INT8_ROWS)
        use_large_pages(torch.ops.mkldnn.data_ptr(packed), torch.ops.mkldnn._nbytes(packed))
        bias = None if bias is None else bias.detach().to(self.compute_dtype)
        self.register_buffer("packed", packed, persistent=False)
        self.register_buffer("bias", bias, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        rows = x if x.dtype == self.compute_dtype else x.to(self.compute_dtype)
        if self.native_width:
            width = self.native_width
            out: Tensor = torch.ops.onequeue.packed_linear(rows, self.packed, self.bias, width)
        else:
            out = self.onednn_product(rows)
        return out if rows is x else out.to(x.dtype)

    def onednn_product(self, x: Tensor) -> Tensor:
        """Return oneDNN's product of x, which has the dtype of the packed weights."""
        name, kind = self.activation or ("none", "")
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, name, [], kind)
        return out

    def unpacked(self) -> tuple[Tensor, Tensor | None]:
        """Return the weight [out, in] and bias of the original layer."""
        bias = None if self.bias is None else self.bias.to(self.dtype)
        return self.packed.to_dense().to(self.dtype), bias


class Bf16WeightLinear(nn.Module):
    """nn.Linear of bfloat16, x [..., in] → [..., out], for a CPU that does not multiply bfloat16.

    The native operation, which must be loaded (attention/native.py), widens weights to float32 in
    registers: a step reads half the bytes of float32 weights, and memory holds half. Sums are
    float32, rounded to bfloat16 at the end, and do not depend on the other rows of a batch.

    `panels` [out / PANEL_COLUMNS, in / 2, PANEL_COLUMNS, 2], padded with zeros: weights of two
    inputs side by side, for PANEL_COLUMNS outputs.
    """

    panels: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self.weight = weight_stand_in(weight)
        padded = weight.detach()
        columns, rows = self.in_features % 2, -self.out_features % PANEL_COLUMNS
        if columns or rows:
            padded = nn.functional.pad(padded, (0, columns, 0, rows))
        pairs = padded.reshape(-1, PANEL_COLUMNS, padded.shape[1] // 2, 2)
        panels = pairs.transpose(1, 2).contiguous()
        use_large_pages(panels.data_ptr(), panels.nbytes)
        self.register_buffer("panels", panels, persistent=False)
        bias = None if bias is None else bias.detach().float()
        self.register_buffer("bias", bias, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.onequeue.bf16_weight_linear(
            x, self.panels, self.bias, self.out_features
        )
        return out

    def unpacked(self) -> tuple[Tensor, Tensor | None]:
        """Return the weight [out, in] and bias of the original layer."""
        padded = self.panels.transpose(1, 2).reshape(-1, self.panels.shape[1] * 2)
        weight = padded[: self.out_features, : self.in_features]
        return weight, None if self.bias is None else self.bias.to(self.dtype)


class Int8Linear(nn.Module):
    """x [..., in] → [..., out] with int8 weights [out, in rounded up to INT8_DEPTH] and one
    bfloat16 scale per output.

    Symmetric quantization: scale = max |w| / 127 of a row, w ≈ int8 · scale. Inputs are rounded to
    bfloat16. More than INT8_ROWS rows go through `dequantized`, a packed copy of the same values,
    where there is memory for one.
    """

    weight: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None, keep_copy: bool) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        starts = range(0, self.out_features, QUANTIZED_ROWS)
        parts = [_quantize(weight.detach()[at : at + QUANTIZED_ROWS]) for at in starts]
        quantized, scales = zip(*parts, strict=True)
        # torch's kernel reads beyond rows of other depths
        padded = nn.functional.pad(torch.cat(quantized), (0, -self.in_features % INT8_DEPTH))
        self.register_buffer("weight", padded, persistent=False)
        self.register_buffer("scale", torch.cat(scales), persistent=False)
        self.register_buffer("bias", None if bias is None else bias.detach(), persistent=False)
        self.dtype = weight.dtype
        self.dequantized: nn.Module | None = None
        if keep_copy:
            weights = self.weight[:, : self.in_features].float()
            values = weights.mul_(self.scale.float()[:, None]).to(self.dtype)
            self.dequantized = (
                PackedLinear(values, None)
                if packs_dtype(self.dtype)
                else plain_linear(values, None)
            )

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features).bfloat16()
        if self.dequantized is not None and len(rows) > INT8_ROWS:
            out = self.dequantized(rows.to(self.dtype))
        else:
            rows = nn.functional.pad(rows, (0, -self.in_features % INT8_DEPTH))
            out = torch.ops.aten._weight_int8pack_mm(rows, self.weight, self.scale)
        out = out.to(self.dtype).view(*x.shape[:-1], self.out_features)
        biased: Tensor = out if self.bias is None else out + self.bias
        return biased


class NativeInt8Linear(nn.Module):
    """Int8Linear by the native operation, which must be loaded: it widens weights to bfloat16 in
    the cache, so no copy is needed, and a row of its result does not depend on the other rows.

    `panels` [out / QUANTIZED_COLUMNS, in / 2, QUANTIZED_COLUMNS, 2] int8, padded with zeros;
    `scales` [out, rounded up to QUANTIZED_COLUMNS] float32.
    """

    panels: Tensor
    scales: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self.weight = weight_stand_in(weight)
        columns, depth = -self.out_features % QUANTIZED_COLUMNS, -self.in_features % INT8_DEPTH
        panels, scales = [], []
        for at in range(0, self.out_features, QUANTIZED_ROWS):  # a multiple of QUANTIZED_COLUMNS
            quantized, scale = _quantize(weight.detach()[at : at + QUANTIZED_ROWS])
            padded = nn.functional.pad(
                quantized, (0, depth, 0, -len(quantized) % QUANTIZED_COLUMNS)
            )
            pairs = padded.reshape(-1, QUANTIZED_COLUMNS, padded.shape[1] // 2, 2)
            panels.append(pairs.transpose(1, 2).contiguous())
            scales.append(scale.float())
        packed = torch.cat(panels)
        use_large_pages(packed.data_ptr(), packed.nbytes)
        self.register_buffer("panels", packed, persistent=False)
        padded_scales = nn.functional.pad(torch.cat(scales), (0, columns))
        self.register_buffer("scales", padded_scales, persistent=False)
        self.register_buffer("bias", None if bias is None else bias.detach(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.onequeue.int8_linear(
            x, self.panels, self.scales, self.bias, self.out_features
        )
        return out


class Int4Linear(nn.Module):
    """x [..., in] → [..., out] with int4 weights (`_quantize_int4`), by torch's kernel. Inputs are
    rounded to bfloat16.

    `packed`: in the layout of the kernel; `scales` [in / INT4_DEPTH, out, 2]: scales and offsets.
    Both are padded with zeros.
    """

    packed: Tensor
    scales: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self.weight = weight_stand_in(weight)
        parts, scales = [], []
        for codes, scale, offset in _int4_parts(weight):
            parts.append(torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int(), 1))
            scales.append(torch.stack((scale, offset), -1).transpose(0, 1))
        self.register_buffer("packed", torch.cat(parts), persistent=False)
        self.register_buffer("scales", torch.cat(scales, 1).contiguous(), persistent=False)
        self.register_buffer("bias", None if bias is None else bias.detach(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features).bfloat16()
        rows = nn.functional.pad(rows, (0, -self.in_features % INT4_DEPTH))
        out: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
            rows, self.packed, INT4_DEPTH, self.scales
        )
        out = out[:, : self.out_features].to(self.dtype)
        out = out.reshape(*x.shape[:-1], self.out_features)
        return out if self.bias is None else out + self.bias


class NativeInt4Linear(nn.Module):
    """Int4Linear by the native operation, which must be loaded. A row of its result does not depend
    on the other rows.

    `blocks` [out / QUANTIZED_COLUMNS, in / INT4_DEPTH, bytes], padded with zeros: scales, offsets
    and codes of QUANTIZED_COLUMNS outputs and INT4_DEPTH inputs.
    """

    blocks: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self.weight = weight_stand_in(weight)
        blocks = torch.cat([_int4_blocks(*part) for part in _int4_parts(weight)])
        use_large_pages(blocks.data_ptr(), blocks.nbytes)
        self.register_buffer("blocks", blocks, persistent=False)
        self.register_buffer("bias", None if bias is None else bias.detach(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.onequeue.int4_linear(x, self.blocks, self.bias, self.out_features)
        return out


def _int4_parts(weight: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield `_quantize_int4` of QUANTIZED_ROWS rows at a time, padded to QUANTIZED_COLUMNS."""
    padding = (0, -weight.shape[1] % INT4_DEPTH)
    grid: Int4Grid | None = getattr(weight, "int4_grid", None)
    for at in range(0, len(weight), QUANTIZED_ROWS):
        rows = weight.detach()[at : at + QUANTIZED_ROWS]
        missing = (0, -len(rows) % QUANTIZED_COLUMNS)
        part = grid and Int4Grid(
            *(nn.functional.pad(x[at : at + QUANTIZED_ROWS], (0, 0, *missing)) for x in grid)
        )
        yield _quantize_int4(nn.functional.pad(rows, (*padding, *missing)), part)


def _quantize_int4(weight: Tensor, grid: Int4Grid | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return uint8 codes [rows, in] from 0 to 15, bfloat16 scales and offsets [rows, groups] for
    each INT4_DEPTH inputs: w ≈ (code - 8) · scale + offset, rounded to the nearest code.

    `grid`: the scales and offsets of weights that have been rounded already.
    """
    groups = weight.float().view(len(weight), -1, INT4_DEPTH)
    if grid is None:
        low, high = groups.amin(2), groups.amax(2)
        scale = ((high - low) / 15).clamp(min=1e-12).bfloat16()
        offset = (low + 8 * scale.float()).bfloat16()
    else:
        scale, offset = grid.scales.masked_fill(grid.scales == 0, 1), grid.offsets
    codes = (groups - offset.float()[..., None]).div_(scale.float()[..., None])
    codes = codes.round_().add_(8).clamp_(0, 15).to(torch.uint8)
    return codes.flatten(1), scale, offset


def _int4_blocks(codes: Tensor, scales: Tensor, offsets: Tensor) -> Tensor:
    """Return the blocks of the native operation: words of four codes, of columns 16 apart; two
    inputs side by side for each column."""
    columns, depth = QUANTIZED_COLUMNS, INT4_DEPTH
    shape = (len(codes) // columns, columns, codes.shape[1] // depth, depth // 2, 2)
    pairs = (
        codes.view(shape).permute(0, 2, 3, 1, 4).reshape(*shape[:1], shape[2], depth // 2, 4, -1)
    )
    low, high = (pairs[:, :, :, n] | pairs[:, :, :, n + 1] << 4 for n in (0, 2))
    bytes_of_codes = torch.stack((low, high), -1).flatten(2)  # of each word the lower one first
    factors = [
        each.view(shape[0], columns, -1).transpose(1, 2).contiguous().view(torch.uint8)
        for each in (scales, offsets)
    ]
    return torch.cat([*factors, bytes_of_codes], 2)


def _quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 [rows, in] and the bfloat16 scales [rows]."""
    weight = weight.float()
    scale = (weight.abs().amax(1) / 127).clamp(min=1e-12).bfloat16()
    quantized = (weight / scale.float()[:, None]).round_().clamp_(-127, 127).to(torch.int8)
    return quantized, scale


def plain_linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    out, inputs = weight.shape
    layer = nn.Linear(inputs, out, bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias, requires_grad=False)
    return layer


def packs_dtype(dtype: torch.dtype) -> bool:
    """Return whether this CPU multiplies packed weights for a model of this dtype."""
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]  # torch's
    return available and dtype in (torch.float32, torch.bfloat16)


def emulates_dtype(dtype: torch.dtype) -> bool:
    """Return whether this CPU emulates products of this dtype, at a sixth of float32's speed."""
    return dtype == torch.bfloat16 and not has_bfloat16()


def packed_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of PackedLinear's weights for a model of this dtype."""
    return torch.float32 if emulates_dtype(dtype) else dtype


# ── replacing a model's layers ──


def pack_weights(
    model: nn.Module,
    free_bytes: int,
    check: Callable[[], object] = lambda: None,
    fuse: bool = True,
    bf16_weights: bool = False,
) -> None:
    """Replace all linear layers by packed ones; a weight tied to an embedding is copied.

    Layers stay as they are if that takes too much memory, or if `check`, which runs the model,
    raises afterwards; both are logged. `fuse`: layers called on one input become one product, which
    pays where rows are few. `bf16_weights`: bfloat16 that would be emulated goes to
    Bf16WeightLinear; its operation must be loaded.
    """

    def packed(weight: Tensor, bias: Tensor | None) -> nn.Module:
        kind = Bf16WeightLinear if bf16_weights and emulates_dtype(weight.dtype) else PackedLinear
        return kind(weight, bias)

    use_linear_layers(model)
    extra = 0 if bf16_weights else extra_bytes(model)
    if not bf16_weights and not has_memory(model, free_bytes):
        log.warning("bfloat16 is emulated: float32 weights would take %.1f GB more", extra / 1e9)
        return
    if extra:
        log.info("bfloat16 weights are kept as float32, which takes %.3f GB more", extra / 1e9)
    try:
        if pack_experts(model, packed):
            check()
    except Exception as error:
        unpack_experts(model)
        log.warning("experts stay as they are: %r", error)
    try:
        fuse_linears(model, find_shared_inputs(model, check) if fuse else (), packed)
        _replace(model, nn.Linear, lambda plain: packed(plain.weight, plain.bias))
        check()
    except Exception as error:  # a model that reads weights without calling their layer
        unpack_weights(model)
        emulated = emulates_dtype(_linear_weights(model)[1])
        slow = "this CPU emulates bfloat16: DTYPE=float32 is faster here; " if emulated else ""
        log.warning("%sweights stay as they are: %r", slow, error)


@torch.inference_mode()
def use_linear_layers(model: nn.Module) -> None:
    """Replace GPT-2's layers, linear ones with a transposed weight [in, out], by nn.Linear, and
    those of classes that are derived from nn.Linear and give its product."""
    _replace(model, Conv1D, lambda layer: plain_linear(layer.weight.detach().T, layer.bias))
    kinds = {type(module) for module in model.modules() if isinstance(module, nn.Linear)}
    for kind in kinds:
        if not kind.__module__.startswith("torch."):  # whose attention reads the weight
            _replace(model, kind, _plain_if_same)


def _plain_if_same(layer: nn.Linear) -> nn.Linear:
    x = torch.randn(2, layer.in_features, generator=torch.Generator().manual_seed(0))
    plain = plain_linear(layer.weight.detach(), layer.bias)
    try:
        x = x.to(layer.weight.dtype)
        compare(layer(x), plain(x), ROUNDING[x.dtype])
    except Exception:  # another number of outputs, or weights in another format
        return layer
    return plain


def extra_bytes(model: nn.Module) -> int:
    """Return how many bytes more the packed weights take than the plain ones."""
    numbers, dtype = _linear_weights(model)
    return numbers * (packed_dtype(dtype).itemsize - dtype.itemsize)


def has_memory(model: nn.Module, free_bytes: int) -> bool:
    """Return whether there is enough memory to pack the weights."""
    return extra_bytes(model) <= MAX_COPY_SHARE * free_bytes


def unpack_weights(model: nn.Module) -> None:
    """Put plain linear layers back in place of fused and packed ones, and experts."""
    unpack_experts(model)
    _replace(model, FusedSlice, _unpacked_slice)
    _replace(model, PackedLinear, lambda layer: plain_linear(*layer.unpacked()))
    _replace(model, Bf16WeightLinear, lambda layer: plain_linear(*layer.unpacked()))


def _unpacked_slice(part: FusedSlice) -> nn.Linear:
    layer = part.fused.layer
    weight, bias = (layer.weight, layer.bias) if type(layer) is nn.Linear else layer.unpacked()
    rows = slice(*part.fused.columns[part.index])
    return plain_linear(weight[rows].clone(), bias[rows].clone() if part.has_bias else None)


@torch.inference_mode()
def use_bf16_weights(model: nn.Module) -> None:
    """Replace packed layers whose bfloat16 this CPU emulates by Bf16WeightLinear, where both give
    the same product; the model may be running meanwhile. The operation must be loaded."""
    replaced = 0

    def with_bf16_weights(layer: nn.Module) -> nn.Module:
        nonlocal replaced
        if type(layer) is not PackedLinear or not emulates_dtype(layer.dtype) or layer.activation:
            return layer
        candidate = Bf16WeightLinear(*layer.unpacked())
        dtype = layer.dtype
        if not products_match(candidate, layer, layer.in_features, dtype, ROUNDING[dtype]):
            return layer
        replaced += 1
        return candidate

    _replace(model, PackedLinear, with_bf16_weights)
    for experts in packed_experts(model):
        for layers in (experts.up, experts.down):
            for number, layer in enumerate(layers):
                layers[number] = with_bf16_weights(layer)
    if replaced:
        log.info("bfloat16 weights are widened in registers layers=%d", replaced)


def quantize_weights(
    model: nn.Module,
    free_bytes: int,
    check: Callable[[], object] = lambda: None,
    native: bool = False,
    quantization: str = "int8",
) -> None:
    """Replace all linear layers by NativeInt8Linear or NativeInt4Linear if `native` and this CPU
    has its kernel, else by Int4Linear or Int8Linear, whose copy for large batches is kept if it
    fits.

    `check` runs the model, which shows the layers that share an input. `native`: the operations
    are loaded.
    """
    use_linear_layers(model)
    numbers, dtype = _linear_weights(model)
    copy_bytes = numbers * packed_dtype(dtype).itemsize
    is_int8 = quantization == "int8"
    native = native and native_quantized_matches(quantization, dtype)
    keep_copy = is_int8 and not native and copy_bytes <= MAX_COPY_SHARE * free_bytes

    def quantized(weight: Tensor, bias: Tensor | None) -> nn.Module:
        if native:
            return NativeInt8Linear(weight, bias) if is_int8 else NativeInt4Linear(weight, bias)
        return Int8Linear(weight, bias, keep_copy) if is_int8 else Int4Linear(weight, bias)

    groups = find_shared_inputs(model, check)
    pack_experts(model, quantized)
    if native:
        for experts in packed_experts(model):
            use_native_experts(experts)
    fuse_linears(model, groups, quantized)
    _replace(model, nn.Linear, lambda plain: quantized(plain.weight, plain.bias))
    log.info(
        "%s weights_gb=%.3f copy_gb=%.3f native=%s%s",
        quantization,
        numbers * (1 if is_int8 else INT4_BYTES) / 1e9,
        copy_bytes / 1e9 if keep_copy else 0.0,
        native,
        " the dequantized copy serves larger batches" if keep_copy else "",
    )
    if numbers >= MIN_TIMED_WEIGHTS:
        generator = torch.Generator().manual_seed(0)
        weight = torch.randn(TIMED_SHAPE, generator=generator).to(dtype)
        log_speed(quantization, quantized(weight, None), dtype)


@torch.inference_mode()
def log_speed(quantization: str, layer: nn.Module, dtype: torch.dtype) -> None:
    """Log how long products of a layer with quantized weights take, relative to those of a layer
    with QUANTIZATION=none."""
    generator = torch.Generator().manual_seed(0)
    shape: Any = (layer.out_features, layer.in_features)
    weight = torch.randn(shape, generator=generator).to(dtype)
    plain = PackedLinear(weight, None) if packs_dtype(dtype) else plain_linear(weight, None)
    factors = {}
    for rows in TIMED_ROWS:
        x = torch.ones(rows, shape[1], dtype=dtype)
        seconds, plain_seconds = _seconds((layer, plain), x)
        factors[rows] = seconds / plain_seconds
    slow = {rows: factor for rows, factor in factors.items() if factor > MAX_FACTOR}
    times = " ".join(f"rows={rows} factor={factor:.2f}" for rows, factor in factors.items())
    log.log(
        logging.WARNING if slow else logging.INFO,
        "time of %s products relative to %s: %s%s",
        quantization,
        str(dtype).removeprefix("torch."),
        times,
        f": slower on this machine for {' and '.join(map(str, slow))} rows" if slow else "",
    )


def _seconds(layers: Sequence[nn.Module], x: Tensor) -> list[float]:
    """Return the shortest of some times of each layer's product, with weights that are not in the
    CPU's cache. The layers take turns, because other processes may run meanwhile."""
    other = torch.empty(CACHE_BYTES, dtype=torch.uint8)
    shortest = [math.inf for _ in layers]
    for turn in range(TIMED_TURNS):
        for index, layer in enumerate(layers):
            other.fill_(turn)
            started = time.perf_counter()
            layer(x)
            shortest[index] = min(shortest[index], time.perf_counter() - started)
    return shortest


@torch.inference_mode()
def native_quantized_matches(quantization: str, dtype: torch.dtype) -> bool:
    """Return whether the native operation has a kernel for this CPU and dtype, with the products
    of torch's."""
    generator = torch.Generator().manual_seed(0)
    weight, bias = (
        torch.randn(shape, generator=generator).to(dtype) for shape in ((80, 70), (80,))
    )
    one: nn.Module
    other: nn.Module
    if quantization == "int8":
        one, other = NativeInt8Linear(weight, bias), Int8Linear(weight, bias, keep_copy=False)
    else:
        one, other = NativeInt4Linear(weight, bias), Int4Linear(weight, bias)
    try:
        return products_match(one, other, 70, dtype, ROUNDING[torch.bfloat16])
    except RuntimeError:
        return False


@torch.inference_mode()
def use_native_linear(model: nn.Module) -> None:
    """Use the native operation in each packed layer for which it gives oneDNN's product; the model
    may be running meanwhile. The operation must be loaded (attention/native.py)."""
    layers = [module for module in model.modules() if isinstance(module, PackedLinear)]
    for layer in layers:
        _use_native_product(layer)
    for experts in packed_experts(model):
        for alike in (experts.up, experts.down):
            _use_native_products([layer for layer in alike if isinstance(layer, PackedLinear)])
        use_native_experts(experts)
    _replace(model, HeadLinear, _packed_heads)
    using = sum(layer.native_width > 0 for layer in layers)
    if layers:
        log.info("native products layers=%d of %d", using, len(layers))


def _use_native_product(layer: PackedLinear) -> PackedLinear:
    layer.native_width = next((w for w in GROUP_WIDTHS if native_product_matches(layer, w)), 0)
    return layer


def _use_native_products(alike: Sequence[PackedLinear]) -> None:
    """Use the native operation in layers of one shape: one tells for all."""
    width = _use_native_product(alike[0]).native_width if alike else 0
    for layer in alike:
        layer.native_width = width


def _packed_heads(heads: HeadLinear) -> nn.Module:
    """Return the products with rows that do not depend on others, if there is a kernel for them."""
    if emulates_dtype(heads.weight.dtype):
        return PackedHeads([Bf16WeightLinear(weight, None) for weight in heads.weight], None)
    layers = [PackedLinear(weight, None) for weight in heads.weight]
    _use_native_products(layers)
    return PackedHeads(layers, _native_products(layers)) if layers[0].native_width else heads


def use_native_functions(model: nn.Module) -> None:
    """Use the native operation also where modules multiply with a weight of their own."""
    replace_functions(model, lambda weight, bias: _use_native_product(PackedLinear(weight, bias)))


@torch.inference_mode()
def stacked_products_differ(model: nn.Module) -> bool:
    """Return whether a row's product with a matrix, of those that modules keep together in one
    parameter, depends on the number of rows, from MIN_ROWS on."""
    matrices = {
        (parameter.shape[1:], parameter.dtype): parameter[0]
        for module in model.modules()
        if not type(module).__module__.startswith("torch.")
        for parameter in module.parameters(recurse=False)
        if parameter.dim() == 3 and len(parameter) > 1
    }
    generator = torch.Generator().manual_seed(0)
    for matrix in matrices.values():
        x = torch.randn(STACKED_ROWS[-1], matrix.shape[1], generator=generator).to(matrix.dtype)
        products = [nn.functional.linear(x[:rows], matrix) for rows in STACKED_ROWS]
        if not all(torch.equal(part, products[-1][: len(part)]) for part in products):
            return True
    return False


def use_native_experts(experts: PackedExperts) -> None:
    """Multiply by all experts at once, where that gives each one's products."""
    up, down = (_native_products(layers) for layers in (experts.up, experts.down))
    if up and down:
        experts.products = up, down


def _native_products(layers: Sequence[Any]) -> Products | None:
    """Return the products of layers with rows sorted by layer; None if there is no kernel for them
    or they have a bias."""
    first = layers[0]
    kind, columns, inputs = type(first), first.out_features, first.in_features
    if any(type(layer) is not kind or layer.bias is not None for layer in layers):
        return None
    width, scales = 0, None
    if kind is PackedLinear and first.native_width:
        width = first.native_width
        step = 64 // first.dtype.itemsize
        addresses = torch.tensor([torch.ops.mkldnn.data_ptr(layer.packed) for layer in layers])
    elif kind is NativeInt8Linear:
        step = INT8_DEPTH
        addresses = torch.tensor([layer.panels.data_ptr() for layer in layers])
        scales = torch.tensor([layer.scales.data_ptr() for layer in layers])
    else:
        return None
    padded = -(-inputs // step) * step

    def products(rows: Tensor, counts: Tensor) -> Tensor:
        out: Tensor = torch.ops.onequeue.experts_linear(
            rows, counts, addresses, scales, padded, columns, width
        )
        return out

    rows = torch.randn(9, inputs, generator=torch.Generator().manual_seed(0)).to(first.dtype)
    counts = torch.zeros(len(layers), dtype=torch.long)
    counts[0], counts[-1] = 2, counts[-1] + 7
    expected = torch.cat([first(rows[:2]), layers[-1](rows[2:])]) if len(layers) > 1 else None
    matches = expected is not None and torch.equal(products(rows, counts), expected)
    return products if matches else None


def native_product_matches(layer: PackedLinear, width: int) -> bool:
    """Return whether the native product agrees with oneDNN's if `width` columns form a group.

    oneDNN does not document its layout, so a width is accepted by its products.
    """

    def native_product(x: Tensor) -> Tensor:
        out: Tensor = torch.ops.onequeue.packed_linear(x, layer.packed, layer.bias, width)
        return out

    inputs, dtype = layer.in_features, layer.packed.dtype
    try:
        return products_match(native_product, layer.onednn_product, inputs, dtype, ROUNDING[dtype])
    except RuntimeError:  # no kernel for this CPU, or another layout
        return False


def products_match(
    one: Callable[[Tensor], Tensor], other: Callable[[Tensor], Tensor], inputs: int,
    dtype: torch.dtype, rounding: float,
) -> bool:  # fmt: skip
    """Return whether both functions agree on random rows [R, inputs], up to `rounding`."""
    generator = torch.Generator().manual_seed(0)
    for rows in COMPARED_ROWS:
        x = torch.randn(rows, inputs, generator=generator).to(dtype)
        try:
            compare(one(x), other(x), rounding)
        except CannotRun:
            return False
    return True


def _linear_weights(model: nn.Module) -> tuple[int, torch.dtype]:
    """Return the number of weights in all linear layers and experts, and their dtype."""
    weights = [module.weight for module in model.modules() if type(module) is nn.Linear]
    dtype = weights[0].dtype if weights else torch.float32
    return sum(weight.numel() for weight in weights) + expert_weights(model), dtype


def _replace(
    model: nn.Module, kind: type[Layer], replacement: Callable[[Layer], nn.Module]
) -> None:
    """Replace each module of exactly this class, one after another."""
    names = [  # a list of the modules would keep all of them in memory
        (parent, name)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is kind
    ]
    for parent, name in names:
        layer: Any = parent.get_submodule(name)
        setattr(parent, name, replacement(layer))


def use_large_pages(start: int, size: int) -> None:
    """Ask Linux to back the whole 2 MB pages of [start, start + size) by large pages.

    A step reads all weights; with 4 kB pages the address translation takes long, above all in a
    virtual machine. A refusal is ignored.
    """
    if sys.platform != "linux":
        return
    first = -(-start // LARGE_PAGE_BYTES) * LARGE_PAGE_BYTES
    last = (start + size) // LARGE_PAGE_BYTES * LARGE_PAGE_BYTES
    if first < last:
        madvise = ctypes.CDLL(None).madvise
        for advice in (mmap.MADV_HUGEPAGE, MADV_COLLAPSE):
            madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), advice)
