"""Rows of images and sounds: which of them may run together, and as one batch. Texts, which need
padding or are packed, are left to runner.py.
"""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any

import torch

Chunk = dict[str, Any]  # what `preprocess` makes of an input, or of a part of it: a row of a batch


def shape(chunk: Chunk) -> Hashable:
    """Equal for rows that can be stacked: the same keys, and tensors of the same shape."""
    return tuple((k, getattr(v, "shape", (1,))[1:]) for k, v in sorted(chunk.items()))


def stack(rows: Sequence[Chunk]) -> Chunk:
    """Rows of equal shapes as one batch."""
    columns = {key: [row[key] for row in rows] for key in rows[0]}
    return {k: torch.cat(v) if isinstance(v[0], torch.Tensor) else v for k, v in columns.items()}


def share_equal(chunks: Iterable[Chunk]) -> Iterator[Chunk]:
    """The chunks, with one tensor for all that equal the first's: zero-shot-object-detection makes
    the same image again for each label."""
    first: Chunk = {}
    for chunk in chunks:
        first = first or chunk
        for key, value in first.items():
            if isinstance(value, torch.Tensor) and torch.equal(value, chunk[key]):
                chunk[key] = value
        yield chunk
