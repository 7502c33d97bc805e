"""Paged attention of prompts with bidirectional spans, as the image tokens of some models are."""

from collections.abc import Callable
from typing import Any

import numpy as np

from batching.sequence import Batch
from worker.model.attention.kv_cache import KVCache
from worker.model.attention.paged import AttentionBackend, AttentionMetadata, SpanGroup


class BidirectionalMetadata(AttentionMetadata):
    """AttentionMetadata for prompts with spans of bidirectional attention.

    Such a span runs in one step, or its beginning is in the cache. A row of the step also attends
    to positions `firsts` to `lasts` [T] of its sequence.
    """

    def __init__(self, cache: KVCache, batch: Batch) -> None:
        super().__init__(cache, batch)
        self.firsts = np.array(batch.positions)
        self.lasts = self.firsts.copy()
        for number in batch.multimodal_spans:
            multimodal = batch.chunks[number].sequence.multimodal
            _, start, width = batch.spans[number]
            shift = batch.offsets[number] - start
            for first, stop in multimodal.bidirectional_spans if multimodal else ():
                begin, end = max(first, start), min(stop, start + width)
                if begin < end:
                    self.firsts[begin + shift : end + shift] = first
                    self.lasts[begin + shift : end + shift] = stop - 1

    def groups(self, window: int, chunk: int, needs_mask: bool) -> list[SpanGroup]:
        return super().groups(window, chunk, True)

    def _first_gathered(self, members: Any, window: int, chunk: int) -> Any:
        first = super()._first_gathered(members, window, chunk)
        return np.minimum(first, self.firsts[self.offsets[members]])

    def _visible_range(self, queries: Any, window: int, chunk: int, rows: Any) -> Any:
        first, last = super()._visible_range(queries, window, chunk, rows)
        return np.minimum(first, self.firsts[rows]), np.maximum(last, self.lasts[rows])


def backend_of(
    batch: Batch, other: Callable[..., AttentionBackend]
) -> Callable[..., AttentionBackend]:
    """Return BidirectionalMetadata if tokens of the batch attend to later ones; else `other`."""
    inputs = (batch.chunks[number].sequence.multimodal for number in batch.multimodal_spans)
    has_spans = any(multimodal and multimodal.bidirectional_spans for multimodal in inputs)
    return BidirectionalMetadata if has_spans else other
