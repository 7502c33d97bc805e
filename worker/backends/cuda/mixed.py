"""Attention on a GPU in steps with prompts: decoding spans stay on the decode kernel."""

import sys
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from batching.sequence import Batch, Span
from worker.device.async_copy import to_device
from worker.model.attention.kv_cache import BLOCK, KVCache
from worker.model.attention.paged import AttentionMetadata

# A span of more tokens is a prompt: as rows, each token would read the whole prefix again.
MAX_SPAN_WIDTH = 16
PROGRAMS_PER_SM = 4  # Triton programs per streaming multiprocessor
# More than any step has: keys are divided into as many parts in each step.
ALL_PROGRAMS = 1 << 40


class MixedMetadata(AttentionMetadata):
    """AttentionMetadata in which the tokens of short spans, decodes and drafts, are rows of the
    decode kernel (triton_decode.py). Only prompts are gathered."""

    max_width = MAX_SPAN_WIDTH

    def __init__(self, cache: KVCache, batch: Batch) -> None:
        super().__init__(cache, batch)
        self.programs = programs(cache.device)
        is_short = self.widths <= self.max_width
        self.grouped = ~is_short
        rows = np.flatnonzero(np.repeat(is_short, self.widths))
        self._rows = to_device(rows, cache.device)
        if not len(rows):
            return
        self._row_positions = self.positions[self._rows]
        short = np.flatnonzero(is_short)
        tables, starts = concatenate_tables([batch.spans[number] for number in short.tolist()])
        self._tables = to_device(tables, cache.device)
        self._table_starts = to_device(np.repeat(starts, self.widths[short]), cache.device)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None,
        layer: int, scale: float, window: int, softcap: float,
    ) -> Tensor:  # fmt: skip
        out = super().attend(query, key, value, sinks, layer, scale, window, softcap)
        if not len(self._rows):
            return out
        # triton comes with torch's builds for GPUs only
        from worker.backends.cuda import triton_decode

        cache, shape = self.cache, self.cache.layers[layer]
        if shape.temperature:
            query = shape.rescale(query, self.positions)
        q = query[0].transpose(0, 1).index_select(0, self._rows)
        attended = triton_decode.attend(
            q, cache.keys[layer], cache.values[layer], self._tables, self._table_starts,
            self._row_positions, programs=self.programs, scale=scale, window=window,
            chunk=shape.chunk, softcap=softcap, sinks=sinks,
        )  # fmt: skip
        out[0].index_copy_(0, self._rows, attended)
        return out


class RowwiseMetadata(MixedMetadata):
    """MixedMetadata in which all tokens are rows, whose keys are divided by their positions only: a
    token gets the same bits in any batch, and in any chunk of its prompt. Long prompts take longer,
    as each token reads its whole prefix."""

    max_width = sys.maxsize

    def __init__(self, cache: KVCache, batch: Batch) -> None:
        super().__init__(cache, batch)
        self.programs = ALL_PROGRAMS


def concatenate_tables(spans: Iterable[Span], room: int = 0) -> tuple[Any, Any]:
    """Return the spans' block tables one after another, int32, each with room for more blocks, and
    where each of them begins."""
    tables: list[Any] = [
        blocks[: (start + width - 1) // BLOCK + 1] for blocks, start, width in spans
    ]
    for table in tables if room else ():
        table.extend([0] * room)
    return np.concatenate(tables, dtype=np.int32), np.cumsum([0, *map(len, tables)])[:-1]


def programs(device: torch.device) -> int:
    """Return the number of Triton programs that keep the device busy."""
    if device.type != "cuda":
        return PROGRAMS_PER_SM
    return PROGRAMS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count
