"""Paged attention where parts of prompts are seen in both directions, as pictures are by some
models, beside what is seen causally, by torch's functions (paged_attention.py).

Such a part is run in one step, or its beginning was found in the cache.
"""

from typing import Any

import numpy as np

from batching.sequence import Batch
from worker.model.kv_cache import KVCache
from worker.model.paged_attention import AttentionMetadata
from worker.model.span_attention import Group


def has_blocks(batch: Batch) -> bool:
    scenes = (batch.chunks[number].sequence.scene for number in batch.pictured)
    return any(scene and scene.blocks for scene in scenes)


class BothWaysMetadata(AttentionMetadata):
    """A row of the step sees, beside what it sees anyway, `firsts` to `lasts` [T] of its
    sequence."""

    def __init__(self, cache: KVCache, batch: Batch) -> None:
        super().__init__(cache, batch)
        self.firsts = np.array(batch.positions)
        self.lasts = self.firsts.copy()
        for number in batch.pictured:
            scene, (_, start, width) = batch.chunks[number].sequence.scene, batch.spans[number]
            shift = batch.offsets[number] - start
            for first, stop in scene.blocks if scene else ():
                begin, end = max(first, start), min(stop, start + width)
                if begin < end:
                    self.firsts[begin + shift : end + shift] = first
                    self.lasts[begin + shift : end + shift] = stop - 1

    def groups(self, window: int, chunk: int, masked: bool) -> list[Group]:
        return super().groups(window, chunk, True)

    def _first_gathered(self, members: Any, window: int, chunk: int) -> Any:
        first = super()._first_gathered(members, window, chunk)
        return np.minimum(first, self.firsts[self.offsets[members]])

    def _seen(self, queries: Any, window: int, chunk: int, rows: Any) -> Any:
        first, last = super()._seen(queries, window, chunk, rows)
        return np.minimum(first, self.firsts[rows]), np.maximum(last, self.lasts[rows])
