"""Linear layers with few rows, as decoding has them, by a native operation (native/linear.cpp).

It reads a weight once, as fast as memory gives it, from where oneDNN has packed it for its own
products (cpu_linear.py): there is no other copy. A row's result does not depend on how many others
come with it, up to as many as the operation takes. How oneDNN packs is its own affair: a layer uses
the operation where both give the same product.

More rows go on to oneDNN, filled up to one of a few dozen numbers: for each that it has not seen it
makes kernels first, which took a small model's prompts half as long again. Those of usual prompts
are made beforehand.
"""

import logging
from typing import Any

import torch
from torch import Tensor, nn

from worker.model.cpu_linear import ROUNDING, PackedLinear, multiply_alike

log = logging.getLogger("onequeue.native_linear")

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
def use(model: nn.Module) -> None:
    """From the next call on, in each packed layer for which it gives the same product. It must
    have been loaded (native_attention.py)."""
    layers = [each for each in model.modules() if isinstance(each, PackedLinear)]
    for layer in layers:
        layer.native_width = next((w for w in WIDTHS if gives_the_same(layer, w)), 0)
    using = sum(layer.native_width > 0 for layer in layers)
    if layers:
        log.info("native products layers=%d of %d", using, len(layers))


@torch.inference_mode()
def make_kernels(body: nn.Module) -> None:
    """Those of oneDNN that prompts of up to MADE_ROWS tokens need, before the first such prompt
    does; for as many threads as the calling one has."""
    layers = [each for each in body.modules() if isinstance(each, PackedLinear)]
    alike = {(each.in_features, each.out_features, each.bias is None): each for each in layers}
    for layer in alike.values():
        for rows in range(MADE_STEP, MADE_ROWS + 1, MADE_STEP):
            layer(torch.zeros(rows, layer.in_features, dtype=layer.packed.dtype))


def gives_the_same(layer: PackedLinear, width: int) -> bool:
    """Whether it does, but for rounding, if the weights' columns lie so many side by side."""

    def product(x: Tensor) -> Tensor:
        made: Tensor = torch.ops.onequeue.linear(x, layer.packed, layer.bias, width)
        return made

    inputs, dtype = layer.in_features, layer.packed.dtype
    try:
        return multiply_alike(product, layer.packed_product, inputs, dtype, ROUNDING[dtype])
    except RuntimeError:  # this CPU has no kernel, or they are packed in another way
        return False
