"""Linear layers for a CPU, with weights in a layout that its matrix kernels read fast.

PackedLinear holds weights in oneDNN's layout, several times faster than the plain one for the few
rows of a decode step; the native operation (native/packed_linear.cpp) reads the same copy.
Bf16WeightLinear serves bfloat16 on CPUs without bfloat16 instructions. Int8Linear and Int4Linear
hold quantized weights for torch's kernels, NativeInt8Linear and NativeInt4Linear for the native
ones, which need AVX512-VNNI. linear.py replaces a model's layers by these.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from worker.backends.cpu.fused_linear import weight_stand_in
from worker.backends.cpu.torch_only import is_torch_only
from worker.device.device import has_bfloat16

MakeLayer = Callable[[Tensor, Tensor | None], nn.Module]

# The int8 kernels read the weights once per row, which pays up to so many rows.
INT8_ROWS = 8
# Output rows quantized at a time: the float32 copy of a vocabulary's head would take gigabytes.
QUANTIZED_ROWS = 4096
PANEL_COLUMNS = 32  # columns of a panel: SPREAD in native/bf16_weight_linear.cpp
QUANTIZED_COLUMNS = 64  # of int8 and int4 weights: QUANTIZED_GROUP in native/quantized.h
INT8_ZERO = 128  # the code of 0 in the native operation
INT8_DEPTH = 32  # int8 weights are padded to a multiple of this depth, INPUT_DEPTH in C++
INT4_DEPTH = 32  # inputs that share a scale and an offset, INPUT_DEPTH in C++
INT4_BYTES = 0.5 + 4 / INT4_DEPTH  # of a weight, with its share of scale and offset


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
    "onequeue::experts_linear",
    "(Tensor x, Tensor counts, Tensor addresses, Tensor? scales, int padded, int columns,"
    " int width) -> Tensor",
)


@torch.library.register_fake("onequeue::packed_linear")  # type: ignore[untyped-decorator]  # torch's
def _(x: Any, packed: Any, bias: Any, width: int) -> Tensor:
    out: Tensor = x.new_empty(*x.shape[:-1], packed.shape[0])
    return out


@torch.library.register_fake("onequeue::experts_linear")  # type: ignore[untyped-decorator]  # torch's
def _(
    x: Any, counts: Any, addresses: Any, scales: Any, padded: int, columns: int, width: int
) -> Tensor:
    out: Tensor = x.new_empty(x.shape[0], columns)
    return out


for name, weights in {
    "bf16_weight_linear": "Tensor panels",
    "int8_linear": "Tensor panels, Tensor scales",
    "int4_linear": "Tensor blocks",
}.items():
    torch.library.define(
        f"onequeue::{name}", f"(Tensor x, {weights}, Tensor? bias, int columns) -> Tensor",
        tags=torch.Tag.flexible_layout,
    )  # fmt: skip

    @torch.library.register_fake(f"onequeue::{name}")  # type: ignore[untyped-decorator]  # torch's
    def _(x: Any, *weights_bias_columns: Any) -> Tensor:
        out: Tensor = x.new_empty(*x.shape[:-1], weights_bias_columns[-1])
        return out


# ── layers ──


class LinearLayer(nn.Module):
    """A linear layer, x [..., in] → [..., out], with weights in a layout of its own. `dtype`: that
    of the original layer."""

    bias: Tensor | None

    def __init__(
        self, weight: Tensor, bias: Tensor | None, bias_dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        bias = None if bias is None else bias.detach().to(bias_dtype or bias.dtype)
        self.register_buffer("bias", bias, persistent=False)

    def memory(self) -> Iterator[tuple[int, int]]:
        """Yield the addresses and bytes of the weights."""
        for buffer in self.buffers(recurse=False):
            if buffer.is_mkldnn:
                yield torch.ops.mkldnn.data_ptr(buffer), torch.ops.mkldnn._nbytes(buffer)
            else:
                yield buffer.data_ptr(), buffer.nbytes


class PackedLinear(LinearLayer):
    """nn.Linear, x [..., in] → [..., out], with weights in oneDNN's layout.

    Where bfloat16 would be emulated, weights are float32 and so are sums; inputs and outputs stay
    bfloat16, with the results of bfloat16 kernels. The native operation replaces oneDNN's product
    once `native_width`, the columns per group of the layout, is not 0. A row of its result does not
    depend on the other rows; oneDNN's order of sums changes with their number.
    """

    packed: Tensor

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight, bias, packed_dtype(weight.dtype))
        self.compute_dtype = packed_dtype(weight.dtype)
        self.native_width = 0
        self.weight = weight_stand_in(weight)
        weight = weight.detach().to(self.compute_dtype)
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, INT8_ROWS)
        self.register_buffer("packed", packed, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        rows = x if x.dtype == self.compute_dtype else x.to(self.compute_dtype)
        if self.native_width and not is_torch_only():
            width = self.native_width
            out: Tensor = torch.ops.onequeue.packed_linear(rows, self.packed, self.bias, width)
        else:
            out = self.onednn_product(rows)
        return out if rows is x else out.to(x.dtype)

    def onednn_product(self, x: Tensor) -> Tensor:
        """Return oneDNN's product of x, which has the dtype of the packed weights."""
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return out

    def unpacked(self) -> tuple[Tensor, Tensor | None]:
        """Return the weight [out, in] and bias of the original layer."""
        bias = None if self.bias is None else self.bias.to(self.dtype)
        return self.packed.to_dense().to(self.dtype), bias


class Bf16WeightLinear(LinearLayer):
    """nn.Linear of bfloat16, x [..., in] → [..., out], for a CPU that does not multiply bfloat16.

    The native operation, which must be loaded (native_attention.py), widens weights to float32 in
    registers: a step reads half the bytes of float32 weights, and memory holds half. Sums are
    float32, rounded to bfloat16 at the end, and do not depend on the other rows of a batch.

    `panels` [out / PANEL_COLUMNS, in / 2, PANEL_COLUMNS, 2], padded with zeros: weights of two
    inputs side by side, for PANEL_COLUMNS outputs.
    """

    panels: Tensor

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight, bias)
        self.weight = weight_stand_in(weight)
        panels = _panels(weight.detach(), PANEL_COLUMNS, 2)
        self.register_buffer("panels", panels, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.onequeue.bf16_weight_linear(
            x, self.panels, self.bias, self.out_features
        )
        return out

    def unpacked(self) -> tuple[Tensor, Tensor | None]:
        """Return the weight [out, in] and bias of the original layer."""
        return _unpaired(self.panels, self.out_features, self.in_features), self.bias


class Int8Linear(LinearLayer):
    """x [..., in] → [..., out] with int8 weights [out, in rounded up to INT8_DEPTH] and one
    bfloat16 scale per output.

    Symmetric quantization: scale = max |w| / 127 of a row, w ≈ int8 · scale. Inputs are rounded to
    bfloat16. More than INT8_ROWS rows go through `dequantized`, a copy of the same values that
    `make_copy` packs; None: there is no memory for one.
    """

    weight: Tensor
    scale: Tensor

    def __init__(
        self, weight: Tensor, bias: Tensor | None, make_copy: MakeLayer | None = None
    ) -> None:
        super().__init__(weight, bias)
        starts = range(0, self.out_features, QUANTIZED_ROWS)
        parts = [_quantize(weight.detach()[at : at + QUANTIZED_ROWS]) for at in starts]
        quantized, scales = zip(*parts, strict=True)
        # torch's kernel reads beyond rows of other depths
        padded = nn.functional.pad(torch.cat(quantized), (0, -self.in_features % INT8_DEPTH))
        self.register_buffer("weight", padded, persistent=False)
        self.register_buffer("scale", torch.cat(scales), persistent=False)
        self.dequantized: nn.Module | None = None
        if make_copy:
            weights = self.weight[:, : self.in_features].float()
            values = weights.mul_(self.scale.float()[:, None]).to(self.dtype)
            self.dequantized = make_copy(values, None)

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


class NativeInt8Linear(LinearLayer):
    """Int8Linear by the native operation, which must be loaded. It needs no copy, and a row of its
    result does not depend on the other rows. Without AMX, inputs are rounded to 8 bits.

    `panels` [out / QUANTIZED_COLUMNS, in / 4, QUANTIZED_COLUMNS, 4] uint8, weights plus INT8_ZERO,
    padded; `scales` [out, rounded up to QUANTIZED_COLUMNS] float32.
    """

    panels: Tensor
    scales: Tensor

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight, bias)
        self.weight = weight_stand_in(weight)
        panels, scales = [], []
        for at in range(0, self.out_features, QUANTIZED_ROWS):  # a multiple of QUANTIZED_COLUMNS
            quantized, scale = _quantize(weight.detach()[at : at + QUANTIZED_ROWS])
            codes = _panels(quantized, QUANTIZED_COLUMNS, INT8_DEPTH, 4).view(torch.uint8)
            panels.append(codes ^ INT8_ZERO)
            scales.append(scale.float())
        packed = torch.cat(panels)
        self.register_buffer("panels", packed, persistent=False)
        columns = -self.out_features % QUANTIZED_COLUMNS
        padded_scales = nn.functional.pad(torch.cat(scales), (0, columns))
        self.register_buffer("scales", padded_scales, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.onequeue.int8_linear(
            x, self.panels, self.scales, self.bias, self.out_features
        )
        return out


class Int4Linear(LinearLayer):
    """x [..., in] → [..., out] with int4 weights (`_quantize_int4`), by torch's kernel. Inputs are
    rounded to bfloat16.

    `packed`: in the layout of the kernel; `scales` [in / INT4_DEPTH, out, 2]: scales and offsets.
    Both are padded with zeros.
    """

    packed: Tensor
    scales: Tensor

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight, bias)
        self.weight = weight_stand_in(weight)
        parts, scales = [], []
        for codes, scale, offset in _int4_parts(weight):
            parts.append(torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int(), 1))
            scales.append(torch.stack((scale, offset), -1).transpose(0, 1))
        self.register_buffer("packed", torch.cat(parts), persistent=False)
        self.register_buffer("scales", torch.cat(scales, 1).contiguous(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features).bfloat16()
        rows = nn.functional.pad(rows, (0, -self.in_features % INT4_DEPTH))
        out: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
            rows, self.packed, INT4_DEPTH, self.scales
        )
        out = out[:, : self.out_features].to(self.dtype)
        out = out.reshape(*x.shape[:-1], self.out_features)
        return out if self.bias is None else out + self.bias


class NativeInt4Linear(LinearLayer):
    """Int4Linear by the native operation, which must be loaded. A row of its result does not depend
    on the other rows. Without AMX, inputs are rounded to 8 bits.

    `blocks` [out / QUANTIZED_COLUMNS, in / INT4_DEPTH, bytes], padded with zeros: scales, offsets
    and codes of QUANTIZED_COLUMNS outputs and INT4_DEPTH inputs.
    """

    blocks: Tensor

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight, bias)
        self.weight = weight_stand_in(weight)
        blocks = torch.cat([_int4_blocks(*part) for part in _int4_parts(weight)])
        self.register_buffer("blocks", blocks, persistent=False)

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
    """Return the blocks of the native operation: bytes of two codes, of columns 16 apart; four
    inputs side by side for each column."""
    columns, depth = QUANTIZED_COLUMNS, INT4_DEPTH
    lines = _panels(codes, columns, depth, 4).view(len(codes) // columns, -1, depth // 2, 2, 64)
    bytes_of_codes = (lines[:, :, :, 0] | lines[:, :, :, 1] << 4).flatten(2)
    factors = [
        each.view(len(lines), columns, -1).transpose(1, 2).contiguous().view(torch.uint8)
        for each in (scales, offsets)
    ]
    return torch.cat([*factors, bytes_of_codes], 2)


def _int4_weight(blocks: Tensor) -> Tensor:
    """Return the weight, in float32, of `_int4_blocks`, with its padding."""
    factors, codes = blocks.tensor_split([4 * QUANTIZED_COLUMNS], 2)
    lines = codes.reshape(*blocks.shape[:2], -1, 1, 64)
    whole = torch.cat((lines & 15, lines >> 4), 3).view(*blocks.shape[:2], -1, QUANTIZED_COLUMNS, 4)
    factors = factors.contiguous().view(torch.bfloat16).float()
    scales, offsets = factors.view(*blocks.shape[:2], 2, 1, -1, 1).unbind(2)
    weight = (whole.float() - 8).mul_(scales).add_(offsets).permute(0, 3, 1, 2, 4)
    return weight.reshape(len(blocks) * QUANTIZED_COLUMNS, -1)


def _quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 [rows, in] and the bfloat16 scales [rows]."""
    weight = weight.float()
    scale = (weight.abs().amax(1) / 127).clamp(min=1e-12).bfloat16()
    quantized = (weight / scale.float()[:, None]).round_().clamp_(-127, 127).to(torch.int8)
    return quantized, scale


def unquantized_linear(
    weight: Tensor, bias: Tensor | None, bf16_weights: bool = False
) -> nn.Module:
    """Return the layer with unquantized weights that this CPU multiplies fastest. `bf16_weights`:
    the operation of Bf16WeightLinear is loaded."""
    if not packs_dtype(weight.dtype):
        return plain_linear(weight, bias)
    kind = Bf16WeightLinear if bf16_weights and emulates_dtype(weight.dtype) else PackedLinear
    return kind(weight, bias)


def plain_linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    out, inputs = weight.shape
    layer = nn.Linear(inputs, out, bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias, requires_grad=False)
    return layer


# ── the same products in float32, by operation: for the checks at load (model/check.py) ──


def _packed_in_float32(x: Tensor, packed: Tensor, bias: Tensor | None, *_: Any) -> Tensor:
    return _product_in_float32(x, packed.to_dense(), bias)


def _int8_in_float32(
    x: Tensor, panels: Tensor, scales: Tensor, bias: Tensor | None, columns: int
) -> Tensor:
    codes = _unpaired(panels, columns, x.shape[-1]).float() - INT8_ZERO
    return _product_in_float32(x, codes * scales[:columns, None], bias)


def _experts_in_float32(x: Tensor, *args: Any) -> Tensor:
    raise NotImplementedError("experts are multiplied by their addresses")


def _panels(weight: Tensor, columns: int, depth: int, width: int = 2) -> Tensor:
    """Return [out / columns, in / width, columns, width]: weights of `width` inputs side by side.
    Both sizes are padded with zeros to multiples of `columns` and `depth`."""
    missing = -weight.shape[1] % depth, -len(weight) % columns
    if any(missing):
        weight = nn.functional.pad(weight, (0, missing[0], 0, missing[1]))
    pairs = weight.reshape(-1, columns, weight.shape[1] // width, width)
    return pairs.transpose(1, 2).contiguous()


def _unpaired(panels: Tensor, columns: int, depth: int) -> Tensor:
    """Return the weight [columns, depth] of `_panels`."""
    return panels.transpose(1, 2).reshape(-1, panels.shape[1] * panels.shape[3])[:columns, :depth]


def _product_in_float32(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    bias = None if bias is None else bias.float()
    return nn.functional.linear(x.float(), weight.float(), bias)


FLOAT32_PRODUCTS: dict[Any, Callable[..., Tensor]] = {
    torch.ops.mkldnn._linear_pointwise: _packed_in_float32,
    torch.ops.onequeue.packed_linear: _packed_in_float32,
    torch.ops.onequeue.bf16_weight_linear: lambda x, panels, bias, columns: _product_in_float32(
        x, _unpaired(panels, columns, x.shape[-1]), bias
    ),
    torch.ops.onequeue.int8_linear: _int8_in_float32,
    torch.ops.onequeue.int4_linear: lambda x, blocks, bias, columns: _product_in_float32(
        x, _int4_weight(blocks)[:columns, : x.shape[-1]], bias
    ),
    torch.ops.onequeue.experts_linear: _experts_in_float32,
}


def packs_dtype(dtype: torch.dtype) -> bool:
    """Return whether this CPU multiplies packed weights for a model of this dtype."""
    available: bool = torch.backends.mkldnn.is_available()
    return available and dtype in (torch.float32, torch.bfloat16)


def emulates_dtype(dtype: torch.dtype) -> bool:
    """Return whether this CPU emulates products of this dtype, at a sixth of float32's speed."""
    return dtype == torch.bfloat16 and not has_bfloat16()


def packed_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of PackedLinear's weights for a model of this dtype."""
    return torch.float32 if emulates_dtype(dtype) else dtype
