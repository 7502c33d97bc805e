"""Prompts on a GPU: all of a step attend in one call of torch's flash attention."""

import inspect
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn as varlen_attn

from batching.sequence import Batch
from worker.backends.cuda.mixed import MixedMetadata
from worker.device.async_copy import to_device
from worker.model.attention.kv_cache import BLOCK, KVCache
from worker.model.attention.paged import MAX_FLASH_SIZE, select

FLASH_SIZE_STEP = 8  # sizes of heads are multiples of it
# torch 2.11 takes fewer key heads than query heads without the argument
GQA: dict[str, Any] = (
    {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
)


class PromptKeys(NamedTuple):
    """The keys that the prompts of a step attend to, one prompt after another."""

    slots: Tensor | None  # of the cache; None: the prompts are whole, their keys are the step's
    bounds: Tensor  # int32 [prompts + 1]
    longest: int


class VarlenMetadata(MixedMetadata):
    """MixedMetadata in which prompts are neither padded nor masked, and share one call.

    Keys are gathered from the cache where a prompt has a prefix. By bytes and operations that is a
    twentieth of the attention of a chunk of 2,048 tokens on an H100. To read them in place, flash
    attention needs blocks of 256 tokens, which share fewer prefixes, and a torch after 2.11.
    """

    def __init__(self, cache: KVCache, batch: Batch) -> None:
        super().__init__(cache, batch)
        prompts = np.flatnonzero(self.grouped)
        self._prompts = prompts
        if not len(prompts):
            return
        is_row = np.repeat(self.grouped, self.widths)
        self._prompt_rows = None
        if not is_row.all():
            self._prompt_rows = to_device(np.flatnonzero(is_row), cache.device)
        self._reaches = (self.starts + self.widths)[prompts]
        self._bounds = to_device(_bounds(self.widths[prompts]), cache.device)
        self._longest = int(self.widths[prompts].max())
        self._keys: dict[int, PromptKeys] = {}

    def _attend_grouped(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None,
        layer: int, scale: float, window: int, softcap: float,
    ) -> Tensor:  # fmt: skip
        chunk = self.cache.layers[layer].chunk
        if not len(self._prompts) or not self._supports(q, v, sinks, chunk, softcap):
            return super()._attend_grouped(q, k, v, sinks, layer, scale, window, softcap)
        window = window if window < self._reaches.max() else 0
        if window not in self._keys:
            self._keys[window] = self._prompt_keys(window)
        slots, bounds, longest = self._keys[window]
        if slots is None:
            k, v = select(k, self._prompt_rows), select(v, self._prompt_rows)
        else:
            stored = self.cache.keys[layer], self.cache.values[layer]
            k, v = (x.view(-1, *x.shape[2:]).index_select(0, slots) for x in stored)
        prompts = varlen_attn(
            select(q, self._prompt_rows), k, v, self._bounds, bounds, self._longest, longest,
            scale=scale, window_size=(window - 1 if window else -1, 0), **GQA,
        )  # fmt: skip
        assert isinstance(prompts, Tensor)
        if self._prompt_rows is None:
            return prompts.contiguous()  # as the operation's fake kernel promises
        out = prompts.new_empty(len(q), *prompts.shape[1:])
        return out.index_copy_(0, self._prompt_rows, prompts)

    def _supports(
        self, q: Tensor, v: Tensor, sinks: Tensor | None, chunk: int, softcap: float
    ) -> bool:
        is_plain = sinks is None and not softcap and not 0 < chunk < self._reaches.max()
        return is_plain and has_flash_attention(q, v) and q.shape[-1] % FLASH_SIZE_STEP == 0

    def _prompt_keys(self, window: int) -> PromptKeys:
        """Return the keys from the first that any query of a prompt attends to."""
        starts = self.starts[self._prompts]
        device = self.cache.device
        if not starts.any():
            return PromptKeys(None, self._bounds, self._longest)
        firsts = self._first_visible(starts, window, 0)
        counts = self._reaches - firsts
        slots = []
        for number, first, reach in zip(self._prompts, firsts, self._reaches, strict=True):
            positions = np.arange(first, reach)
            blocks = np.asarray(self.blocks[number])
            slots.append(blocks[positions // BLOCK] * BLOCK + positions % BLOCK)
        on_device = to_device(np.concatenate(slots), device), to_device(_bounds(counts), device)
        return PromptKeys(*on_device, int(counts.max()))


def has_flash_attention(q: Tensor, v: Tensor) -> bool:
    """Return whether torch has flash attention for q [..., D] and v [..., Dv]."""
    size = q.shape[-1]
    half = q.dtype in (torch.float16, torch.bfloat16)
    return q.device.type == "cuda" and half and size == v.shape[-1] <= MAX_FLASH_SIZE


def _bounds(counts: Any) -> Any:
    """Return int32 [n + 1]: where each of n parts of these lengths begins, and the last ends."""
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
