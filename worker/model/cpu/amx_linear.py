"""Linear layers of float32 encoders on a CPU with matrix tiles: a native operation
(native/amx_linear.cpp). Tiles multiply bfloat16; a float32 number is split in three parts of that,
which is more accurate than products of float32, and faster.

A layer's weights are laid out for it in place of oneDNN's layout (cpu/linear.py) where it gives the
same product, six bytes each in place of four. A row's result does not depend on how many others
come with it. For bfloat16 weights oneDNN's own products are quicker, from some hundred rows on.
"""

import logging

import torch
from torch import Tensor, nn

from worker.model.cpu.linear import COPY_SHARE, PackedLinear, products_match

log = logging.getLogger("onequeue.amx_linear")

ROUNDING = 2e-6  # of the largest number


class AmxLinear(nn.Module):
    """x [..., in] → [..., out], as the packed layer. RuntimeError if this CPU has no tiles, or a
    weight is not finite."""

    tiles: Tensor
    bias: Tensor | None

    def __init__(self, layer: PackedLinear) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        tiles = torch.ops.onequeue.amx_pack(layer.packed.to_dense())
        self.register_buffer("tiles", tiles, persistent=False)
        self.register_buffer("bias", layer.bias, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = torch.ops.onequeue.amx_linear(x, self.tiles, self.bias, self.out_features)
        return made


@torch.inference_mode()
def use_amx_linear(model: nn.Module, free_bytes: int) -> None:
    """In place of each packed layer for which it gives the same product, one after another, while
    the model may be running. The operations must have been loaded (attention/native.py)."""
    packed = {
        name: each
        for name, each in model.named_modules()
        if isinstance(each, PackedLinear) and each.dtype == torch.float32
    }
    more = sum(2 * each.in_features * each.out_features for each in packed.values())
    if more > COPY_SHARE * free_bytes:
        log.warning("no matrix tiles: weights would take %.1f GB more", more / 1e9)
        return
    using = 0
    for name in list(packed):
        if made := tiled(packed.pop(name)):
            model.set_submodule(name, made)
            using += 1
    if using:
        log.info("matrix tiles layers=%d gb_more=%.3f", using, more / 1e9)


def tiled(layer: PackedLinear) -> AmxLinear | None:
    """None unless it gives the layer's product, but for rounding."""
    try:
        made = AmxLinear(layer)
    except RuntimeError:
        return None
    same = products_match(made, layer.packed_product, layer.in_features, layer.dtype, ROUNDING)
    return made if same else None
