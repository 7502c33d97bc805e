"""Keys and values of the windows that are being decoded, a row each, as the model's cache.

Rows that run are always the first, so that a step reads them in place: whoever leaves is replaced
by the last. Cross-attention's are made once for a window, self-attention's with each token.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import EncoderDecoderCache, PreTrainedModel


class RowCache(EncoderDecoderCache):
    """`rows` windows at most. Before a forward, `at` says which run and where their tokens are."""

    def __init__(self, model: PreTrainedModel, rows: int) -> None:
        config: Any = model.config
        heads = config.decoder_attention_heads
        size = config.d_model // heads
        made: Any = {"dtype": model.dtype, "device": model.device}
        self.sizes = config.max_target_positions, config.max_source_positions
        own, cross = ((2, rows, heads, length, size) for length in self.sizes)
        layers = range(config.decoder_layers)
        self.own = [torch.zeros(own, **made) for _ in layers]  # keys, values
        self.cross = [torch.empty(cross, **made) for _ in layers]  # memory as rows come to use
        self.is_updated = dict.fromkeys(layers, True)  # read by the model's cross-attention
        self.self_attention_cache: Any = self
        self.cross_attention_cache: Any = SimpleNamespace()

    def at(self, rows: Sequence[int], positions: Tensor) -> None:
        """The next forward's tokens are at `positions` [R, N] of these rows."""
        first, count = rows[0], len(rows)
        together = list(rows) == list(range(first, first + count))
        self._rows: Any = slice(first, first + count) if together else torch.tensor(rows)
        self._index = torch.tensor(rows, device=positions.device)[:, None]
        self._positions = positions
        self._width = int(positions.max()) + 1
        self.cross_attention_cache.layers = [
            SimpleNamespace(keys=keys[self._rows], values=values[self._rows])
            for keys, values in self.cross
        ]

    def mask(self) -> Tensor:
        """[R, 1, N, T], to be added: 0 for the positions that each token sees."""
        every = torch.arange(self._width, device=self._positions.device)
        unseen = (every > self._positions[..., None])[:, None]
        dtype = self.own[0].dtype
        return torch.zeros(unseen.shape, dtype=dtype, device=unseen.device).masked_fill_(
            unseen, torch.finfo(dtype).min
        )

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Keys and values [R, heads, N, size] join; all up to the last of them are given back."""
        keys, values = self.own[layer_idx]
        for kept, new in ((keys, key_states), (values, value_states)):
            kept.transpose(1, 2)[self._index, self._positions] = new.transpose(1, 2)
        return keys[self._rows, :, : self._width], values[self._rows, :, : self._width]

    def move(self, source: int, target: int) -> None:
        for layer in (*self.own, *self.cross):
            layer[:, target] = layer[:, source]


def row_bytes(model: PreTrainedModel) -> int:
    """That a row takes."""
    config: Any = model.config
    positions = config.max_target_positions + config.max_source_positions
    return int(2 * config.decoder_layers * positions * config.d_model * model.dtype.itemsize)
