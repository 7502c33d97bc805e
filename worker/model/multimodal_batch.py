"""What a paged step needs of the prompts with pictures that have a part in it: rows in the places
of pictures, and positions as the model counts them there.

Found by looking at the pictures first (worker/vision); used by paged_runner.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from batching.sequence import Batch, MultimodalInputs
from worker.model.decoder_hook import Rows


@dataclass(eq=False, slots=True)
class MultimodalBatch(MultimodalInputs):
    """`spans`: places [start, stop) of each picture's tokens in the prompt. `positions`: [A, T] of
    the whole prompt, for each of the A axes that the model counts on. `rows`: of each picture, from
    when it has been looked at until the prompt has run."""

    spans: Sequence[tuple[int, int]] = ()
    positions: Any = None
    rows: Sequence[Rows] = ()


def position_ids(batch: Batch) -> Tensor:
    """[A, 1, T], or [1, T] where the model counts on one axis."""
    told: list[Tensor] = []
    for number, (_, start, width) in enumerate(batch.spans):
        multimodal = batch.chunks[number].sequence.multimodal
        positions = torch.arange(start, start + width)[None]
        if isinstance(multimodal, MultimodalBatch):
            positions = positions + multimodal.shift
            known = multimodal.positions[:, start : start + width]
            rest = positions[:, known.shape[1] :].expand(len(known), -1)
            positions = torch.cat([known, rest], 1)
        told.append(positions)
    axes = max(map(len, told))
    made = torch.cat([each.expand(axes, -1) for each in told], 1)
    return made if axes == 1 else made[:, None]


def rows_of(batch: Batch) -> tuple[Tensor, Rows]:
    """Places [N] in the step that are pictures', and what the decoder is given there."""
    places: list[Tensor] = []
    parts: list[Rows] = []
    for number in batch.multimodal_spans:
        multimodal = batch.chunks[number].sequence.multimodal
        _, start, width = batch.spans[number]
        assert isinstance(multimodal, MultimodalBatch)
        shift = batch.offsets[number] - start
        for (first, stop), rows in zip(multimodal.spans, multimodal.rows, strict=True):
            begin, end = max(first, start), min(stop, start + width)
            if begin < end:
                places.append(torch.arange(begin + shift, end + shift))
                own = slice(begin - first, end - first)
                parts.append({name: each[own] for name, each in rows.items()})
    if not parts:
        return torch.empty(0, dtype=torch.long), {}
    return torch.cat(places), {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
