"""Linear layers of bfloat16 weights on a CPU that does not multiply bfloat16: a native operation
(native/widening_linear.cpp).

Weights stay as they are, two bytes each, and become float32 in registers: a step reads half of what
float32 weights are, and memory holds half. Products are as bfloat16 kernels make them: of the same
numbers, summed in float32, rounded to bfloat16. A row's does not depend on how many come with it.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from worker.model.large_pages import use_large_pages

SPREAD = 32  # columns that lie side by side

# The C++ implements it.
torch.library.define(
    "onequeue::widening_linear",
    "(Tensor x, Tensor panels, Tensor? bias, int columns) -> Tensor",
    tags=torch.Tag.flexible_layout,
)


@torch.library.register_fake("onequeue::widening_linear")  # type: ignore[untyped-decorator]  # torch's
def _(x: Any, panels: Any, bias: Any, columns: int) -> Tensor:
    made: Tensor = x.new_empty(*x.shape[:-1], columns)
    return made


class WideningLinear(nn.Module):
    """x [..., in] → [..., out], as nn.Linear of bfloat16; the operation must be loaded
    (native_attention.py). `panels` [out / SPREAD, in / 2, SPREAD, 2]: rows of the matrix in pairs,
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
        made: Tensor = torch.ops.onequeue.widening_linear(
            x, self.panels, self.bias, self.out_features
        )
        return made

    def plain(self) -> tuple[Tensor, Tensor | None]:
        """Weight and bias as they were given."""
        filled = self.panels.transpose(1, 2).reshape(-1, self.panels.shape[1] * 2)
        weight = filled[: self.out_features, : self.in_features]
        return weight, None if self.bias is None else self.bias.to(self.dtype)
