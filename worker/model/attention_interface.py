"""What the layers of a model call in place of attention: the step that runs on this thread.

Registered with transformers as an attention function, but with no function that makes its mask:
for such it makes none, and does not look at the positions, which a GPU would have to wait for.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from worker.model.paged_attention import AttentionParams, LayerShape

ATTENTION = "onequeue_paged"


class CannotPage(Exception):
    """This model does not run on paged memory; the message says why."""


class Attends(Protocol):
    """A step: knows where its tokens' keys and values are."""

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, how: AttentionParams
    ) -> Tensor: ...


_here = threading.local()  # .step of this thread, or .probe


@contextmanager
def running(step: Attends) -> Iterator[None]:
    _here.step = step
    try:
        yield
    finally:
        _here.step = None


@contextmanager
def probing(record: Callable[[nn.Module, LayerShape, int], None]) -> Iterator[None]:
    """Layers report their shape and window instead of attending."""
    _here.probe = record
    try:
        yield
    finally:
        _here.probe = None


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: [1, heads, T, size] in, [1, T, heads, size] out."""
    if not torch.compiler.is_compiling() and (probe := getattr(_here, "probe", None)):
        if position_bias is not None:
            raise CannotPage("its attention adds a bias of its own")
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        if not causal or not hasattr(module, "layer_idx"):
            raise CannotPage("its attention is not causal, or does not know its layer")
        shape = LayerShape(key.shape[1], key.shape[3], value.shape[3], warming=_warming(module))
        probe(module, shape, sliding_window or 0)
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    layer: Any = module.layer_idx
    arguments = (query, key, value, s_aux, layer, scale, sliding_window or 0, softcap or 0.0)
    if torch.compiler.is_compiling():
        return torch.ops.onequeue.paged_attention(*arguments), None
    return attend(*arguments), None


def _warming(module: Any) -> tuple[float, float] | None:
    if getattr(module, "attn_temperature_tuning", False) and not module.use_rope:
        return float(module.floor_scale), float(module.attn_scale)
    return None


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    layer: int,
    scale: float,
    window: int,
    softcap: float,
) -> Tensor:
    step: Attends = _here.step
    return step.attend(query, key, value, sinks, AttentionParams(layer, scale, window, softcap))


# The same, opaque to the compiler: its graph depends on the number of tokens only. The cache is
# found through the thread, not passed, and each layer writes its own part alone.
_attend_op = torch.library.custom_op("onequeue::paged_attention", attend, mutates_args=())


@_attend_op.register_fake
def _(query: Any, key: Any, value: Any, sinks: Any, *rest: Any) -> Tensor:
    made: Tensor = query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])
    return made


AttentionInterface.register(ATTENTION, paged_attention)
