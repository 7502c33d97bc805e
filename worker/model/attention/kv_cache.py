"""The KV cache: keys and values of all layers in blocks.

Which block holds which tokens, and what is reused, is decided in batching/block_pool.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 16  # token positions in a block


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer keeps per token, and how far it looks back."""

    heads: int  # of keys and values
    key_size: int
    value_size: int
    chunk: int = 0  # tokens see only the chunk of so many that they are in (Llama 4); 0: all
    # Llama 4's temperature tuning, floor_scale and attn_scale: queries grow with their position
    temperature: tuple[float, float] | None = None

    def rescaled(self, query: Tensor, positions: Tensor) -> Tensor:
        """Llama 4 scales queries by 1 + attn_scale · log(1 + ⌊(place + 1) / floor_scale⌋) and takes
        a token's row in the step for its place: made right for its position."""
        assert self.temperature
        floor_scale, attn_scale = self.temperature
        rows = torch.arange(len(positions), device=positions.device)
        right, given = (
            torch.log1p(torch.floor((place.float() + 1) / floor_scale)) * attn_scale + 1
            for place in (positions, rows)
        )
        return (query * (right / given)[:, None]).to(query.dtype)


class KVCache:
    """Keys and values of all layers, [blocks, BLOCK, heads, size] each.

    Reserved, not touched: a system gives memory when it is first written to. torch's attention
    multiplies masked positions, so not even there may a NaN be: the rest of a block is zeroed when
    its first token is written, and padding repeats blocks of the sequence itself.
    """

    def __init__(
        self, layers: Sequence[LayerShape], blocks: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.layers = layers
        # [layers, 3] as the native operation reads them: chunk, floor_scale and attn_scale
        limits = [(layer.chunk, *(layer.temperature or (0, 0))) for layer in layers]
        self.limits = torch.tensor(limits, dtype=torch.double)
        self.dtype = dtype
        self.device = device

        def reserved(heads: int, size: int) -> Tensor:
            return torch.empty(blocks, BLOCK, heads, size, dtype=dtype, device=device)

        self.keys = [reserved(layer.heads, layer.key_size) for layer in layers]
        self.values = [reserved(layer.heads, layer.value_size) for layer in layers]
