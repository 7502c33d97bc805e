"""The Whisper decoder's cache: keys and values of the windows that run, one row each.

Running rows are always the first ones, so that a step reads them in place: the last row moves to
that of a window that leaves. Keys and values of cross-attention are computed once per window, those
of self-attention with each token.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import EncoderDecoderCache, PreTrainedModel

from worker.device.device import record_reservation
from worker.load_context import add_memory


class RowCache(EncoderDecoderCache):
    """At most `max_rows` windows. `set_positions` comes before each forward."""

    def __init__(self, model: PreTrainedModel, max_rows: int) -> None:
        config: Any = model.config
        heads = config.decoder_attention_heads
        size = config.d_model // heads
        options: Any = {"dtype": model.dtype, "device": model.device}
        self_shape, cross_shape = (
            (2, max_rows, heads, length, size)  # keys and values
            for length in (config.max_target_positions, config.max_source_positions)
        )
        layers = range(config.decoder_layers)
        self.self_attention = [torch.zeros(self_shape, **options) for _ in layers]
        # empty: memory is allocated when a row is first written
        self.cross_attention = [torch.empty(cross_shape, **options) for _ in layers]
        add_memory(record_reservation(self, (*self.self_attention, *self.cross_attention)))
        # three attributes that the model's attention reads
        self.is_updated = dict.fromkeys(layers, True)
        self.self_attention_cache: Any = self
        self.cross_attention_cache: Any = SimpleNamespace()

    def set_positions(self, rows: Sequence[int], positions: Tensor, width: int) -> None:
        """Set the `positions` [R, N] of these rows whose tokens the next forward computes. `width`:
        positions up to the last of them, known to the host: reading it would wait for a GPU."""
        first, count = rows[0], len(rows)
        contiguous = list(rows) == list(range(first, first + count))
        self._rows: Any = slice(first, first + count) if contiguous else torch.tensor(rows)
        self._index = torch.tensor(rows, device=positions.device)[:, None]
        self._positions = positions
        self._width = width
        self.cross_attention_cache.layers = [
            SimpleNamespace(keys=keys[self._rows], values=values[self._rows])
            for keys, values in self.cross_attention
        ]

    def mask(self) -> Tensor:
        """Return the additive causal mask [R, 1, N, T]."""
        positions = torch.arange(self._width, device=self._positions.device)
        masked = (positions > self._positions[..., None])[:, None]
        dtype = self.self_attention[0].dtype
        return torch.zeros(masked.shape, dtype=dtype, device=masked.device).masked_fill_(
            masked, torch.finfo(dtype).min
        )

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store keys and values [R, heads, N, size]; return those up to the last position."""
        keys, values = self.self_attention[layer_idx]
        for stored, new in ((keys, key_states), (values, value_states)):
            stored.transpose(1, 2)[self._index, self._positions] = new.transpose(1, 2)
        return keys[self._rows, :, : self._width], values[self._rows, :, : self._width]

    def move_row(self, source: int, target: int) -> None:
        for layer in (*self.self_attention, *self.cross_attention):
            layer[:, target] = layer[:, source]


def row_bytes(model: PreTrainedModel) -> int:
    config: Any = model.config
    positions = config.max_target_positions + config.max_source_positions
    return int(2 * config.decoder_layers * positions * config.d_model * model.dtype.itemsize)
