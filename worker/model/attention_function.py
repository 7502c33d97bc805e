"""What layers call to attend, in eager and in compiled models.

They don't know where a step's tokens lie: that is found through the thread, on which the step's
metadata is told before the model runs (paged_attention.py, native_attention.py, cuda_graphs.py).
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from worker.model.kv_cache import KVCache

ATTENTION = "onequeue_paged"


class Attends(ABC):
    """A step's metadata: where its tokens lie, and how layers attend to them."""

    cache: KVCache
    positions: Tensor  # [T]

    @abstractmethod
    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None,
        layer: int, scale: float, window: int, softcap: float,
    ) -> Tensor:  # fmt: skip
        """Of one layer, [1, heads, T, size] in, [1, T, heads, size] out. `window`: how many tokens
        back are seen, 0: all. `softcap`: what scores are capped to, 0: nothing."""

    def begin(self) -> None:  # noqa: B027  # nothing to do for most
        """Before the layers run, on their thread."""

    def end(self) -> None:  # noqa: B027
        """After them."""


_context = threading.local()  # .metadata: of the step that runs on this thread


@contextmanager
def forward_context(metadata: Attends) -> Iterator[None]:
    """The layers of a model that is run inside, on this thread, attend by this metadata."""
    _context.metadata = metadata
    try:
        metadata.begin()
        yield
    finally:
        metadata.end()
        _context.metadata = None


def attend(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None,
    layer: int, scale: float, window: int, softcap: float,
) -> Tensor:  # fmt: skip
    metadata: Attends = _context.metadata
    return metadata.attend(query, key, value, sinks, layer, scale, window, softcap)


def rescaled(query: Tensor, temperature: tuple[float, float] | None, positions: Tensor) -> Tensor:
    """Llama 4 scales queries by 1 + attn_scale · log(1 + ⌊(place + 1) / floor_scale⌋) and takes a
    token's row in the step for its place: made right for its position."""
    if temperature is None:
        return query
    floor_scale, attn_scale = temperature
    rows = torch.arange(len(positions), device=positions.device)
    right, given = (
        torch.log1p(torch.floor((place.float() + 1) / floor_scale)) * attn_scale + 1
        for place in (positions, rows)
    )
    return (query * (right / given)[:, None]).to(query.dtype)


# The same, opaque to the compiler: its graph depends on the number of tokens only. The cache is
# found through the thread, not passed, and each layer writes its part alone. On a CPU, the native
# operation takes the first one's place once it is loaded, and leaves steps that are not its own to
# the second.
_attend_op = torch.library.custom_op("onequeue::paged_attention", attend, mutates_args=())
torch.library.custom_op("onequeue::plain_attention", attend, mutates_args=())


@_attend_op.register_fake
def _(query: Any, key: Any, value: Any, sinks: Any, *rest: Any) -> Tensor:
    made: Tensor = query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])
    return made


def attention_function(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any,
    scaling: float | None = None, sliding_window: int | None = None, softcap: float | None = None,
    s_aux: Tensor | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """transformers' attention interface: [1, heads, T, size] in, [1, T, heads, size] out."""
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    options = (module.layer_idx, scale, sliding_window or 0, softcap or 0.0)
    if torch.compiler.is_compiling():
        return torch.ops.onequeue.paged_attention(query, key, value, s_aux, *options), None
    return attend(query, key, value, s_aux, *options), None


# No function that makes its mask is registered: for such, transformers makes none, and does not
# look at the positions, which a GPU would have to wait for.
AttentionInterface.register(ATTENTION, attention_function)
