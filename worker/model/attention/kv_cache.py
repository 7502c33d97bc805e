"""The KV cache: keys and values of all layers, in blocks of BLOCK token positions.

Which block holds which tokens, and which blocks are reused, is decided in batching/block_pool.py.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from worker.device.device import record_reservation
from worker.load_context import add_memory

BLOCK = 16  # token positions in a block
PANEL_WIDTH = 16  # columns of a panel of values, as in native/panels.h


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The shape of one layer's cache entries, and the limits of its attention."""

    heads: int  # of keys and values
    key_size: int
    value_size: int
    chunk: int = 0  # attention is limited to aligned chunks of so many tokens (Llama 4); 0: not
    # Llama 4's temperature tuning: floor_scale and attn_scale
    temperature: tuple[float, float] | None = None
    # a value is the first numbers of its key, of the only head (latent.py)
    values_in_keys: bool = False

    @property
    def numbers(self) -> int:
        """How many numbers a token takes."""
        return self.heads * (self.key_size + (0 if self.values_in_keys else self.value_size))

    def rescale(self, query: Tensor, positions: Tensor) -> Tensor:
        """Correct Llama 4's temperature tuning for a packed step.

        The model scales queries by 1 + attn_scale · log(1 + ⌊(p + 1) / floor_scale⌋) and takes a
        token's row in the step for its position p. query: [1, H, T, D]; positions: [T].
        """
        assert self.temperature
        floor_scale, attn_scale = self.temperature
        rows = torch.arange(len(positions), device=positions.device)
        correct, applied = (
            torch.log1p(torch.floor((index.float() + 1) / floor_scale)) * attn_scale + 1
            for index in (positions, rows)
        )
        return (query * (correct / applied)[:, None]).to(query.dtype)


@dataclass(frozen=True, slots=True)
class StateShape:
    """The shape of one state of a recurrent layer, for one sequence."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class KVCache:
    """Keys and values of all layers, [blocks, BLOCK, heads, size] each, and `slots` states of
    recurrent layers, [slots, *shape] each. Values that are in the keys are a view of them.

    `panels`: each block has its numbers in the order that native attention reads in place
    (native/panels.h), except where values are in keys or a key's numbers do not fill words.

    Memory is reserved, not touched: the system provides a page at its first write. torch's
    attention multiplies masked positions too, so none of them may hold a NaN: a block is zeroed
    when its first token is written, and padding repeats blocks of the same sequence.
    """

    def __init__(
        self,
        layers: Sequence[LayerShape],
        blocks: int,
        dtype: torch.dtype,
        device: torch.device,
        states: Sequence[StateShape] = (),
        slots: int = 0,
        panels: bool = False,
    ) -> None:
        self.layers = layers
        self._word = word = 4 // dtype.itemsize  # numbers of 32 bits
        self.panels = [
            panels and not layer.values_in_keys and layer.key_size % word == 0 for layer in layers
        ]
        # float64 [layers, 4] for native attention: panels, chunk, floor_scale and attn_scale
        limits = [
            (order, layer.chunk, *(layer.temperature or (0, 0)))
            for order, layer in zip(self.panels, layers, strict=True)
        ]
        self.limits = torch.tensor(limits, dtype=torch.double)
        self.dtype = dtype
        self.device = device

        def reserve(heads: int, size: int) -> Tensor:
            return torch.empty(blocks, BLOCK, heads, size, dtype=dtype, device=device)

        self.keys = [reserve(layer.heads, layer.key_size) for layer in layers]
        own_values: list[Tensor] = []
        self.values: list[Tensor] = []
        for layer, key in zip(layers, self.keys, strict=True):
            if layer.values_in_keys:
                self.values.append(key[..., : layer.value_size])
            else:
                own_values.append(reserve(layer.heads, layer.value_size))
                self.values.append(own_values[-1])
        self.states = [
            torch.empty(slots, *state.shape, dtype=state.dtype, device=device) for state in states
        ]
        add_memory(record_reservation(self, (*self.keys, *own_values, *self.states)))

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write keys and values [T, heads, size] of a layer to slots [T]."""
        key_rows, value_rows = self._rows(layer)
        if self.panels[layer]:
            block, token, word = slots // BLOCK, slots % BLOCK, self._word
            key_rows[block, token] = keys.reshape(-1, *key_rows.shape[2:])
            parts = values.reshape(-1, *value_rows.shape[3:])
            value_rows[block, token // word, token % word] = parts
            return
        for stored, new in ((key_rows, keys), (value_rows, values)):
            stored.view(-1, *stored.shape[2:]).index_copy_(0, slots, new)

    def gather(self, layer: int, blocks: Tensor) -> tuple[Tensor, ...]:
        """Return keys and values of a layer's blocks, [tokens, heads, size] each."""
        shape, (keys, values) = self.layers[layer], self._rows(layer)
        sizes = (keys, shape.key_size), (values, shape.value_size)
        return tuple(x.index_select(0, blocks).reshape(-1, shape.heads, size) for x, size in sizes)

    def _rows(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return views of keys and values [blocks, BLOCK, heads, size]; of panels some of these
        dimensions are two."""
        keys, values = self.keys[layer], self.values[layer]
        if not self.panels[layer]:
            return keys, values
        count, _, heads, size = values.shape
        key_shape = count, heads, -1, BLOCK, self._word
        width = size if size % PANEL_WIDTH else PANEL_WIDTH
        value_shape = count, heads, -1, BLOCK // self._word, width, self._word
        return (
            keys.view(key_shape).permute(0, 3, 1, 2, 4),
            values.view(value_shape).permute(0, 3, 5, 1, 2, 4),
        )
