"""Linear layers for a CPU: weights laid out as its matrix kernels want them, or as int8.

oneDNN's layout makes products with few rows, which is what decoding is, several times faster
than the plain one, and a compiled graph uses the same weights. A CPU that has no bfloat16 would
emulate it at a sixth of the speed: there the weights of a bfloat16 model are multiplied by an
operation of our own (cpu/linear.py), and until it is built laid out as float32, if there is
memory for that. Products are then as bfloat16 kernels make them: of the same numbers, summed in
float32, rounded to bfloat16. int8 weights carry one scale an output and are multiplied by
bfloat16 inputs; more rows than those kernels are good at go through a copy of the dequantised
values, if there is memory for one, so that both say the same. Layers are converted one by one, and
each original goes as it is replaced, unless an embedding shares it. Those that are called on one
input become one product (fused_linear.py).

Weights in pages of 2 MB in place of 4 kB, where Linux gives them: a step reads all weights, and
where each page lies has to be looked up, which takes long in a virtual machine above all.

Linear layers of bfloat16 weights on a CPU that does not multiply bfloat16: a native operation
(native/bf16_weight_linear.cpp).

Weights stay as they are, two bytes each, and become float32 in registers: a step reads half of what
float32 weights are, and memory holds half. Products are as bfloat16 kernels make them: of the same
numbers, summed in float32, rounded to bfloat16. A row's does not depend on how many come with it.

Linear layers with few rows, as decoding has them, by a native operation (native/linear.cpp).

It reads a weight once, as fast as memory gives it, from where oneDNN has packed it for its own
products (cpu/linear.py): there is no other copy. A row's result does not depend on how many others
come with it, up to as many as the operation takes. How oneDNN packs is its own affair: a layer uses
the operation where both give the same product.

More rows go on to oneDNN, filled up to one of a few dozen numbers: for each that it has not seen it
makes kernels first, which took a small model's prompts half as long again. Those of usual prompts
are made beforehand.
"""

import ctypes
import logging
import mmap
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from worker.device.device import has_bfloat16
from worker.device.self_check import CannotRun, compare
from worker.model.cpu.fused_linear import FusedSlice, find_shared_inputs, share

log = logging.getLogger("onequeue.linear")

# The int8 kernels read the weights once a row: faster up to so many rows.
INT8_ROWS = 8
# Rows that are made int8 at once: in float32 a vocabulary's would be gigabytes.
QUANTISED_ROWS = 4096
# Of what is free, how much the copy may take.
COPY_SHARE = 0.5
# Rows of products that are compared: one, some, more than a matrix tile has, more than are few.
COMPARED_ROWS = (1, 7, 18, 45)
# Of a product's largest number.
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


class PackedLinear(nn.Module):
    """x [..., in] → [..., out], as nn.Linear. `native_width`: how many columns of its weights lie
    side by side for the native operation (cpu/linear.py), 0: it is not used."""

    packed: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self.inside = packed_dtype(weight.dtype)
        self.native_width = 0
        self.activation: tuple[str, str] | None = None  # of what it makes, as oneDNN calls it
        self.weight = SimpleNamespace(dtype=weight.dtype, device=weight.device)  # some ask for it
        weight = weight.detach().to(self.inside)
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, INT8_ROWS)
        use_large_pages(torch.ops.mkldnn.data_ptr(packed), torch.ops.mkldnn._nbytes(packed))
        bias = None if bias is None else bias.detach().to(self.inside)
        self.register_buffer("packed", packed, persistent=False)
        self.register_buffer("bias", bias, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        given = x if x.dtype == self.inside else x.to(self.inside)
        if self.native_width:
            width = self.native_width
            made: Tensor = torch.ops.onequeue.linear(given, self.packed, self.bias, width)
        else:
            made = self.packed_product(given)
        return made if given is x else made.to(x.dtype)

    def packed_product(self, x: Tensor) -> Tensor:
        """oneDNN's, of x in the dtype of the packed weights."""
        name, kind = self.activation or ("none", "")
        made: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, name, [], kind)
        return made

    def plain(self) -> tuple[Tensor, Tensor | None]:
        """Weight and bias as they were given."""
        bias = None if self.bias is None else self.bias.to(self.dtype)
        return self.packed.to_dense().to(self.dtype), bias


class Int8Linear(nn.Module):
    """x [..., in] → [..., out]; weight int8 [out, in], scale bfloat16 [out]."""

    weight: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None, copy: bool) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        starts = range(0, self.out_features, QUANTISED_ROWS)
        parts = [_quantised(weight.detach()[at : at + QUANTISED_ROWS]) for at in starts]
        quantised, scales = zip(*parts, strict=True)
        self.register_buffer("weight", torch.cat(quantised), persistent=False)
        self.register_buffer("scale", torch.cat(scales), persistent=False)
        self.register_buffer("bias", None if bias is None else bias.detach(), persistent=False)
        self.dtype = weight.dtype
        self.copy: nn.Module | None = None
        if copy:
            plain = self.weight.float().mul_(self.scale.float()[:, None]).to(self.dtype)
            self.copy = (
                PackedLinear(plain, None) if packs_dtype(self.dtype) else _linear(plain, None)
            )

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features).bfloat16()
        if self.copy is not None and len(rows) > INT8_ROWS:
            out = self.copy(rows.to(self.dtype))
        else:
            out = torch.ops.aten._weight_int8pack_mm(rows, self.weight, self.scale)
        out = out.to(self.dtype).view(*x.shape[:-1], self.out_features)
        made: Tensor = out if self.bias is None else out + self.bias
        return made


def _quantised(weight: Tensor) -> tuple[Tensor, Tensor]:
    """int8 [rows, in] and the rows' scales."""
    weight = weight.float()
    scale = (weight.abs().amax(1) / 127).clamp(min=1e-12).bfloat16()
    made = (weight / scale.float()[:, None]).round_().clamp_(-127, 127).to(torch.int8)
    return made, scale


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    out, inputs = weight.shape
    made = nn.Linear(inputs, out, bias=bias is not None, device="meta")
    made.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        made.bias = nn.Parameter(bias, requires_grad=False)
    return made


def packs_dtype(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies packed weights of a model of this dtype."""
    known: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]  # torch's
    return known and dtype in (torch.float32, torch.bfloat16)


def emulates_dtype(dtype: torch.dtype) -> bool:
    """Whether this CPU has to emulate it, which packing spares."""
    return dtype == torch.bfloat16 and not has_bfloat16()


def packed_dtype(dtype: torch.dtype) -> torch.dtype:
    """What packed weights of a model of this dtype are."""
    return torch.float32 if emulates_dtype(dtype) else dtype


def _weights(model: nn.Module) -> tuple[int, torch.dtype]:
    """Of all linear layers: how many, and of what type."""
    found = [each.weight for each in model.modules() if type(each) is nn.Linear]
    return sum(weight.numel() for weight in found), found[0].dtype if found else torch.float32


def _replace(model: nn.Module, kind: type[nn.Module], make: Callable[[Any], nn.Module]) -> None:
    """Each module of this kind gives way to what is made of it, one after another."""
    places = [  # not the modules: whoever lists them keeps them
        (parent, name)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is kind
    ]
    for parent, name in places:
        setattr(parent, name, make(parent.get_submodule(name)))


def pack_weights(
    model: nn.Module,
    free_bytes: int,
    check: Callable[[], object] = lambda: None,
    shares: bool = True,
    widens: bool = False,
) -> None:
    """Lay out all linear layers' weights anew, unless that takes too much memory, or `check`, which
    runs the model, raises then; what was shared with an embedding is copied. `shares`: those that
    are called on one input become one product, which pays where rows are few. `widens`: bfloat16
    that would be emulated is left to the native operation, which must be loaded."""

    def laid_out(weight: Tensor, bias: Tensor | None) -> nn.Module:
        kind = Bf16WeightLinear if widens and emulates_dtype(weight.dtype) else PackedLinear
        return kind(weight, bias)

    more = 0 if widens else extra_bytes(model)
    if not widens and not has_memory(model, free_bytes):
        log.warning("bfloat16 is emulated: float32 weights would take %.1f GB more", more / 1e9)
        return
    if more:
        log.info("bfloat16 weights multiplied in float32, which takes %.3f GB more", more / 1e9)
    try:
        share(model, find_shared_inputs(model, check) if shares else (), laid_out)
        _replace(model, nn.Linear, lambda plain: laid_out(plain.weight, plain.bias))
        check()
    except Exception as error:  # a model that uses weights without calling their layer
        unpack_weights(model)
        emulated = emulates_dtype(_weights(model)[1])
        slow = "this CPU emulates bfloat16: DTYPE=float32 is faster here; " if emulated else ""
        log.warning("%sweights stay as they are: %r", slow, error)


def extra_bytes(model: nn.Module) -> int:
    """That packed weights take than plain ones."""
    numbers, dtype = _weights(model)
    return numbers * (packed_dtype(dtype).itemsize - dtype.itemsize)


def has_memory(model: nn.Module, free_bytes: int) -> bool:
    """Whether packed weights may take what they take more."""
    return extra_bytes(model) <= COPY_SHARE * free_bytes


def products_match(
    one: Callable[[Tensor], Tensor], other: Callable[[Tensor], Tensor], inputs: int,
    dtype: torch.dtype, rounding: float,
) -> bool:  # fmt: skip
    """Whether both make the same of random rows [R, inputs] of this dtype."""
    generator = torch.Generator().manual_seed(0)
    for rows in COMPARED_ROWS:
        x = torch.randn(rows, inputs, generator=generator).to(dtype)
        try:
            compare(one(x), other(x), rounding)
        except CannotRun:
            return False
    return True


def unpack_weights(model: nn.Module) -> None:
    _replace(model, FusedSlice, _unpacked_part)
    for kind in (PackedLinear, Bf16WeightLinear):
        _replace(model, kind, lambda layer: _linear(*layer.plain()))


def _unpacked_part(part: FusedSlice) -> nn.Linear:
    weight, bias = part.shared.layer.plain()
    rows = slice(*part.shared.columns[part.place])
    return _linear(weight[rows].clone(), bias[rows].clone() if part.biased else None)


@torch.inference_mode()
def use_bf16_weights(model: nn.Module) -> None:
    """Each packed layer of bfloat16 that this CPU would emulate gives way to the native operation,
    which must be loaded, where that gives the same product: one after another, while the model may
    be running."""
    using = 0

    def widened(layer: Any) -> nn.Module:
        nonlocal using
        if not emulates_dtype(layer.dtype) or layer.activation:
            return layer  # type: ignore[no-any-return]
        made = Bf16WeightLinear(*layer.plain())
        dtype = layer.dtype
        if not products_match(made, layer, layer.in_features, dtype, ROUNDING[dtype]):
            return layer  # type: ignore[no-any-return]
        using += 1
        return made

    _replace(model, PackedLinear, widened)
    if using:
        log.info("bfloat16 weights made float32 as they are multiplied layers=%d", using)


def quantize_weights(
    model: nn.Module, free_bytes: int, check: Callable[[], object] = lambda: None
) -> None:
    """int8 in place of all linear layers' weights, with a copy for large batches if it fits.
    `check` runs the model."""
    numbers, dtype = _weights(model)
    copy_bytes = numbers * packed_dtype(dtype).itemsize
    copy = copy_bytes <= COPY_SHARE * free_bytes
    share(
        model, find_shared_inputs(model, check), lambda weight, bias: Int8Linear(weight, bias, copy)
    )
    _replace(model, nn.Linear, lambda plain: Int8Linear(plain.weight, plain.bias, copy))
    log.info(
        "int8 weights_gb=%.3f copy_gb=%.3f%s",
        numbers / 1e9,
        copy_bytes / 1e9 if copy else 0.0,
        " the copy of the dequantised values serves larger batches" if copy else "",
    )


PAGE = 2 << 20
COLLAPSE = 25  # MADV_COLLAPSE of madvise(2), Linux 6.1: at once


def use_large_pages(start: int, size: int) -> None:
    """For what lies in whole pages of so many bytes there; what the system refuses stays as it
    is."""
    if sys.platform != "linux":
        return
    first, last = -(-start // PAGE) * PAGE, (start + size) // PAGE * PAGE
    if first < last:
        advise = ctypes.CDLL(None).madvise
        for advice in (mmap.MADV_HUGEPAGE, COLLAPSE):
            advise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), advice)


SPREAD = 32  # columns that lie side by side

# The C++ implements it.
torch.library.define(
    "onequeue::bf16_weight_linear",
    "(Tensor x, Tensor panels, Tensor? bias, int columns) -> Tensor",
    tags=torch.Tag.flexible_layout,
)


@torch.library.register_fake("onequeue::bf16_weight_linear")  # type: ignore[untyped-decorator]  # torch's
def _(x: Any, panels: Any, bias: Any, columns: int) -> Tensor:
    made: Tensor = x.new_empty(*x.shape[:-1], columns)
    return made


class Bf16WeightLinear(nn.Module):
    """x [..., in] → [..., out], as nn.Linear of bfloat16; the operation must be loaded
    (attention/native.py). `panels` [out / SPREAD, in / 2, SPREAD, 2]: rows of the matrix in pairs,
    filled up with zeros."""

    panels: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self.weight = SimpleNamespace(dtype=weight.dtype, device=weight.device)  # some ask for it
        filled = weight.detach()
        columns, rows = self.in_features % 2, -self.out_features % SPREAD
        if columns or rows:
            filled = nn.functional.pad(filled, (0, columns, 0, rows))
        pairs = filled.reshape(-1, SPREAD, filled.shape[1] // 2, 2)
        panels = pairs.transpose(1, 2).contiguous()
        use_large_pages(panels.data_ptr(), panels.nbytes)
        self.register_buffer("panels", panels, persistent=False)
        bias = None if bias is None else bias.detach().float()
        self.register_buffer("bias", bias, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = torch.ops.onequeue.bf16_weight_linear(
            x, self.panels, self.bias, self.out_features
        )
        return made

    def plain(self) -> tuple[Tensor, Tensor | None]:
        """Weight and bias as they were given."""
        filled = self.panels.transpose(1, 2).reshape(-1, self.panels.shape[1] * 2)
        weight = filled[: self.out_features, : self.in_features]
        return weight, None if self.bias is None else self.bias.to(self.dtype)


# How many columns may lie side by side.
WIDTHS = (32, 64)
MADE_ROWS, MADE_STEP = 512, 16

# The C++ implements it.
torch.library.define(
    "onequeue::linear", "(Tensor x, Tensor packed, Tensor? bias, int width) -> Tensor",
    tags=torch.Tag.flexible_layout,
)  # fmt: skip


@torch.library.register_fake("onequeue::linear")  # type: ignore[untyped-decorator]  # torch's
def _(x: Any, packed: Any, bias: Any, width: int) -> Tensor:
    made: Tensor = x.new_empty(*x.shape[:-1], packed.shape[0])
    return made


@torch.inference_mode()
def use_native_linear(model: nn.Module) -> None:
    """From the next call on, in each packed layer for which it gives the same product. It must
    have been loaded (attention/native.py)."""
    layers = [each for each in model.modules() if isinstance(each, PackedLinear)]
    for layer in layers:
        layer.native_width = next((w for w in WIDTHS if native_product_matches(layer, w)), 0)
    using = sum(layer.native_width > 0 for layer in layers)
    if layers:
        log.info("native products layers=%d of %d", using, len(layers))


@torch.inference_mode()
def warm_up_onednn(body: nn.Module) -> None:
    """Those of oneDNN that prompts of up to MADE_ROWS tokens need, before the first such prompt
    does; for as many threads as the calling one has."""
    layers = [each for each in body.modules() if isinstance(each, PackedLinear)]
    alike = {(each.in_features, each.out_features, each.bias is None): each for each in layers}
    for layer in alike.values():
        for rows in range(MADE_STEP, MADE_ROWS + 1, MADE_STEP):
            layer(torch.zeros(rows, layer.in_features, dtype=layer.packed.dtype))


def native_product_matches(layer: PackedLinear, width: int) -> bool:
    """Whether it does, but for rounding, if the weights' columns lie so many side by side."""

    def product(x: Tensor) -> Tensor:
        made: Tensor = torch.ops.onequeue.linear(x, layer.packed, layer.bias, width)
        return made

    inputs, dtype = layer.in_features, layer.packed.dtype
    try:
        return products_match(product, layer.packed_product, inputs, dtype, ROUNDING[dtype])
    except RuntimeError:  # this CPU has no kernel, or they are packed in another way
        return False
