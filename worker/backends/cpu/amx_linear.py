"""Linear layers of float32 encoders on a CPU with AMX, by a native operation (amx_linear.cpp).

AMX tiles multiply bfloat16. A float32 number is split into three bfloat16 numbers, which gives
products that are more accurate than float32's own, and faster. A weight takes six bytes in place of
four. A row's result does not depend on the other rows. bfloat16 models are not converted: from some
hundred rows on, oneDNN's products are faster.
"""

import logging

import torch
from torch import Tensor, nn

from worker.backends.cpu.linear import MAX_COPY_SHARE, products_match
from worker.backends.cpu.linear_layers import PackedLinear

log = logging.getLogger("onequeue.amx_linear")

ROUNDING = 2e-6  # largest difference of two products, relative to the largest value


class AmxLinear(nn.Module):
    """x [..., in] → [..., out], float32, with the weights of a packed layer.

    Raise RuntimeError if the CPU has no AMX or a weight is not finite.
    """

    tiles: Tensor
    bias: Tensor | None

    def __init__(self, layer: PackedLinear) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        tiles = torch.ops.onequeue.amx_pack(layer.packed.to_dense())
        self.register_buffer("tiles", tiles, persistent=False)
        self.register_buffer("bias", layer.bias, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.onequeue.amx_linear(x, self.tiles, self.bias, self.out_features)
        return out


@torch.inference_mode()
def use_amx_linear(model: nn.Module, free_bytes: int) -> None:
    """Replace each packed float32 layer for which AMX gives the same product.

    The model may be running meanwhile. The operations must be loaded (native_attention.py).
    """
    packed = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, PackedLinear) and module.dtype == torch.float32
    }
    extra = sum(2 * layer.in_features * layer.out_features for layer in packed.values())
    if extra > MAX_COPY_SHARE * free_bytes:
        log.warning("no AMX: weights would take %.1f GB more", extra / 1e9)
        return
    replaced = 0
    for name in list(packed):
        if layer := converted(packed.pop(name)):
            model.set_submodule(name, layer)
            replaced += 1
    if replaced:
        log.info("AMX layers=%d gb_more=%.3f", replaced, extra / 1e9)


def converted(layer: PackedLinear) -> AmxLinear | None:
    """Return the layer's AMX version; None unless it gives the same product."""
    try:
        candidate = AmxLinear(layer)
    except RuntimeError:
        return None
    same = products_match(candidate, layer.onednn_product, layer.in_features, layer.dtype, ROUNDING)
    return candidate if same else None
