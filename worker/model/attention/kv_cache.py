"""The KV cache: keys and values of all layers, in blocks of BLOCK token positions.

Which block holds which tokens, and which blocks are reused, is decided in batching/block_pool.py.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from worker.backends.cpu.panels import Panels
from worker.device.device import record_reservation
from worker.device.large_pages import use_large_pages
from worker.load_context import add_memory

BLOCK = 16  # token positions in a block


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

    def fits_panels(self, dtype: torch.dtype) -> bool:
        """Return whether a key fills words, and values are numbers of their own."""
        return not self.values_in_keys and self.key_size * dtype.itemsize % 4 == 0

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
    recurrent layers, [slots, *shape] each. Values that are in the keys are a view of them. With
    `in_panels`, layers that fit have the order of backends/cpu/panels.py.

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
        in_panels: bool = False,
    ) -> None:
        self.layers = layers
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
        self.panels = [
            Panels(*stored) if in_panels and layer.fits_panels(dtype) else None
            for layer, *stored in zip(layers, self.keys, self.values, strict=True)
        ]
        # float64 [layers, 4] for native attention: panels, chunk, floor_scale and attn_scale
        limits = [
            (panels is not None, layer.chunk, *(layer.temperature or (0, 0)))
            for panels, layer in zip(self.panels, layers, strict=True)
        ]
        self.limits = torch.tensor(limits, dtype=torch.double)
        self.states = [
            torch.empty(slots, *state.shape, dtype=state.dtype, device=device) for state in states
        ]
        tensors = (*self.keys, *own_values, *self.states)
        if device.type == "cpu":
            use_large_pages(((x.data_ptr(), x.nbytes) for x in tensors), collapse=False)
        add_memory(record_reservation(self, tensors))
