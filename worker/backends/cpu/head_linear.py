"""Products of each attention head with a matrix of its own: x [heads, T, in] → [heads, T, out]."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn


class HeadLinear(nn.Module):
    """weight: [heads, out, in]."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(x, self.weight.transpose(1, 2))


class PackedHeads(nn.Module):
    """HeadLinear with a packed layer for each head (linear_layers.py). They are no submodules: a
    model may have thousands.

    `products`: of all heads at once, of rows [heads · T, in] and T for each head; None: by head.
    """

    def __init__(
        self, layers: Sequence[nn.Module], products: Callable[[Tensor, Tensor], Tensor] | None
    ) -> None:
        super().__init__()
        self.layers, self.products = layers, products

    def forward(self, x: Tensor) -> Tensor:
        heads, rows, _ = x.shape
        if self.products is None:
            return torch.stack([layer(part) for layer, part in zip(self.layers, x, strict=True)])
        counts = torch.full((heads,), rows)
        return self.products(x.reshape(heads * rows, -1), counts).view(heads, rows, -1)
