"""Multi-head latent attention (MLA) over a cache of latents: DeepSeek-AI, "DeepSeek-V2" (2024),
section 2.1.

Such a layer makes the keys and values of all heads from one latent c of a token, and one rotary key
r that all heads share: head h has the key (K_h c, r) and the value V_h c. Since q · K_h c is
K_hᵀ q · c, queries are multiplied by K_hᵀ instead, and the weighted sums by V_h. Heads then attend
to one key (c, r), whose first numbers are the value c: the cache holds that alone. For long
contexts a decode reads less and computes less; a prompt computes more, but its tokens get the bits
of a decode.

In transformers such modules have a method `expand_kv`, which makes the keys and values of all
heads. Which matrices it multiplies with is found by calling it.
"""

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from worker.backends.cpu.head_linear import HeadLinear
from worker.load_context import on_worker
from worker.model.attention.kv_cache import LayerShape
from worker.model.attention.paged import ATTENTION, LATENT

log = logging.getLogger("onequeue.latent")


class LatentProjections(nn.Module):
    """The projections of a layer's heads: of queries [1, heads, T, size] to the size of its cache
    entries, and of the attention to these [1, T, heads, rank] to the size of its values. Their
    weights keep the model's dtype where others are quantized."""

    def __init__(self, to_key: Tensor, to_value: Tensor) -> None:
        """to_key [heads, rank, size], to_value [heads, value size, rank]."""
        super().__init__()
        self.size = to_key.shape[2]  # of a query without its rotary part
        self.to_key, self.to_value = HeadLinear(to_key), HeadLinear(to_value)

    def absorb(self, query: Tensor) -> Tensor:
        part, rotary = query[0, :, :, : self.size], query[:, :, :, self.size :]
        return torch.cat((self.to_key(part)[None], rotary), -1)

    def expand(self, out: Tensor) -> Tensor:
        values: Tensor = self.to_value(out[0].transpose(0, 1))
        return values.transpose(0, 1)[None]


class LatentAttention:
    """A base class, before the module's own, of modules with LatentProjections."""

    config: Any

    def expand_kv(self, latent: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
        """Return the key and value [1, 1, T, size] of a token's cache entry."""
        if self.config._attn_implementation != ATTENTION:  # a copy that runs `generate`
            expanded: tuple[Tensor, Tensor] = super().expand_kv(latent, rotary)  # type: ignore[misc]  # of the module
            return expanded
        return torch.cat((latent, rotary), -1), latent


@functools.cache
def _with_latents(kind: Any) -> Any:
    return type(kind.__name__, (LatentAttention, kind), {"__module__": kind.__module__})


def use_latents(decoder: Any, layers: list[LayerShape], check: Callable[[], None]) -> None:
    """Let the modules of `decoder` that expand latents attend to these, and change their shapes in
    `layers`. Raise what `check`, which runs the model, raises; everything is then as before."""
    modules = [
        module
        for module in decoder.modules()
        if hasattr(module, "expand_kv") and hasattr(module, "layer_idx")
    ]
    if not modules:
        return
    kinds, before = [type(module) for module in modules], list(layers)
    try:
        on_worker(functools.partial(_replace, decoder, modules, layers))
        check()
    except Exception:
        layers[:] = before
        for module, kind in zip(modules, kinds, strict=True):
            module.__class__ = kind
            module._modules.pop(LATENT, None)
        raise
    numbers = [sum(layer.numbers for layer in shapes) for shapes in (layers, before)]
    log.info("latents are stored layers=%d numbers=%d instead of %d", len(modules), *numbers)


@torch.no_grad()
def _replace(decoder: Any, modules: Sequence[Any], layers: list[LayerShape]) -> None:
    for module in modules:
        rank, rotary = module.kv_lora_rank, module.qk_rope_head_dim
        unit = torch.eye(rank, dtype=decoder.dtype, device=decoder.device)[None, None]
        keys, values = module.expand_kv(unit, unit.new_zeros(1, 1, rank, rotary))
        projections = LatentProjections(
            keys[0, :, :, : keys.shape[3] - rotary].contiguous(),
            values[0].transpose(1, 2).contiguous(),
        )
        module.add_module(LATENT, projections)
        kind: Any = type(module)
        module.__class__ = _with_latents(kind)
        layers[module.layer_idx] = replace(
            layers[module.layer_idx], heads=1, key_size=rank + rotary, value_size=rank,
            values_in_keys=True,
        )  # fmt: skip
