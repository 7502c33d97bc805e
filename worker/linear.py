"""Linear layers for a CPU: weights laid out as its matrix kernels want them, or as int8.

oneDNN's own layout makes products with few rows, which is what decoding is, several times faster
than the plain one, and a compiled graph uses the same weights. A CPU that has no bfloat16 would
emulate it at a sixth of the speed: there the weights of a bfloat16 model are laid out as float32,
if there is memory for that. Products are then what bfloat16's own are: of the same numbers, summed
in float32, rounded to bfloat16. int8 weights carry one scale an output and are multiplied by
bfloat16 inputs; more rows than those kernels are good at go through a copy of the dequantised
values, if there is memory for one, so that both say the same.
"""

import logging

import torch
from torch import Tensor, nn

from worker.loading import has_bfloat16

log = logging.getLogger("onequeue.linear")

# The int8 kernels read the weights once a row: faster up to so many rows.
INT8_ROWS = 8
# Of what is free, how much the copy may take.
COPY_SHARE = 0.5


class PackedLinear(nn.Module):
    """x [..., in] → [..., out], as nn.Linear."""

    packed: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self.inside = packed_dtype(weight.dtype)
        weight = weight.detach().to(self.inside)
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, INT8_ROWS)
        bias = None if bias is None else bias.detach().to(self.inside)
        self.register_buffer("packed", packed, persistent=False)
        self.register_buffer("bias", bias, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = torch.ops.mkldnn._linear_pointwise(
            x.to(self.inside), self.packed, self.bias, "none", [], ""
        )
        return made.to(x.dtype)

    def unpacked(self) -> nn.Linear:
        bias = None if self.bias is None else self.bias.to(self.dtype)
        return _linear(self.packed.to_dense().to(self.dtype), bias)


class Int8Linear(nn.Module):
    """x [..., in] → [..., out]; weight int8 [out, in], scale bfloat16 [out]."""

    weight: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None, copy: bool) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        dtype = weight.dtype
        weight = weight.detach().float()
        scale = (weight.abs().amax(1) / 127).clamp(min=1e-12).bfloat16()
        quantised = (weight / scale.float()[:, None]).round().clamp(-127, 127).to(torch.int8)
        self.register_buffer("weight", quantised, persistent=False)
        self.register_buffer("scale", scale, persistent=False)
        self.register_buffer("bias", None if bias is None else bias.detach(), persistent=False)
        self.dtype = dtype
        self.copy: nn.Module | None = None
        if copy:
            plain = self._dequantised()
            self.copy = PackedLinear(plain, None) if packs(dtype) else _linear(plain, None)

    def _dequantised(self) -> Tensor:
        return (self.weight.float() * self.scale.float()[:, None]).to(self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features).bfloat16()
        if self.copy is not None and len(rows) > INT8_ROWS:
            out = self.copy(rows.to(self.dtype))
        else:
            out = torch.ops.aten._weight_int8pack_mm(rows, self.weight, self.scale)
        out = out.to(self.dtype).view(*x.shape[:-1], self.out_features)
        made: Tensor = out if self.bias is None else out + self.bias
        return made


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    made = nn.Linear(1, 1, bias=bias is not None, device="meta")
    made.out_features, made.in_features = weight.shape
    made.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        made.bias = nn.Parameter(bias, requires_grad=False)
    return made


def packs(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies packed weights of a model of this dtype."""
    known: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]  # torch's
    return known and dtype in (torch.float32, torch.bfloat16)


def spares_emulation(dtype: torch.dtype) -> bool:
    """Whether packing a model of this dtype makes it faster by more than its layout."""
    return packs(dtype) and packed_dtype(dtype) != dtype


def packed_dtype(dtype: torch.dtype) -> torch.dtype:
    """What packed weights of a model of this dtype are."""
    return dtype if dtype != torch.bfloat16 or has_bfloat16() else torch.float32


def _linears(model: nn.Module) -> list[tuple[nn.Module, str, nn.Linear]]:
    return [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear
    ]


def pack(model: nn.Module, free_bytes: int) -> None:
    """Lay out all linear layers' weights anew, unless that takes too much memory; what was shared
    with an embedding is copied."""
    found = _linears(model)
    sizes = [linear.weight.numel() for _, _, linear in found]
    dtype = found[0][2].weight.dtype if found else torch.float32
    more = sum(sizes) * (packed_dtype(dtype).itemsize - dtype.itemsize)
    if more > COPY_SHARE * free_bytes:
        log.warning("bfloat16 is emulated: float32 weights would take %.1f GB more", more / 1e9)
        return
    if more:
        log.info("bfloat16 weights multiplied in float32, which takes %.3f GB more", more / 1e9)
    for parent, name, linear in found:
        setattr(parent, name, PackedLinear(linear.weight, linear.bias))


def unpack(model: nn.Module) -> None:
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, PackedLinear):
                setattr(parent, name, child.unpacked())


def quantise(model: nn.Module, free_bytes: int) -> None:
    """int8 in place of all linear layers' weights, with a copy for large batches if it fits."""
    found = _linears(model)
    sizes = [linear.weight.numel() for _, _, linear in found]
    dtype = packed_dtype(found[0][2].weight.dtype) if found else torch.float32
    copy_bytes = sum(sizes) * dtype.itemsize
    copy = copy_bytes <= COPY_SHARE * free_bytes
    for parent, name, linear in found:
        setattr(parent, name, Int8Linear(linear.weight, linear.bias, copy))
    log.info(
        "int8 weights_gb=%.3f copy_gb=%.3f%s",
        sum(sizes) / 1e9,
        copy_bytes / 1e9 if copy else 0.0,
        " the copy of the dequantised values serves larger batches" if copy else "",
    )
