"""What of a prompt's pictures goes through the tower by itself: a picture, or, where the processor
has cut one into frames, each frame, so that no run is longer than one takes.
"""

import hashlib
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from torch import Tensor

from worker.vision.processor import Processed


class Piece(NamedTuple):
    """`start`, `stop`: its places in the prompt. `inputs`: what the forward takes of it."""

    start: int
    stop: int
    digest: bytes
    inputs: Mapping[str, Tensor]


def pieces_of(made: Processed) -> list[Piece]:
    """In the order of their places."""
    pieces: list[Piece] = []
    for (start, stop, digest), image in zip(made.spans, made.images, strict=True):
        tensors = {name: each for name, each in image.inputs.items() if isinstance(each, Tensor)}
        places = [place for place in range(start, stop) if made.ids[place] == made.image_id]
        frames = _frames(tensors, made.axes, len(places))
        if frames == 1:
            pieces.append(Piece(start, stop, digest, tensors))
            continue
        each = len(places) // frames
        for number, inputs in enumerate(_cut(tensors, made.axes, frames)):
            own = places[number * each : (number + 1) * each]
            named = hashlib.blake2b(digest + bytes([number]), digest_size=32).digest()
            pieces.append(Piece(own[0], own[-1] + 1, named, inputs))
    return pieces


def _frames(tensors: Mapping[str, Tensor], axes: Mapping[str, int], places: int) -> int:
    """Of a picture whose tensors all have as many along the axis by which pictures are joined."""
    counts = {each.shape[axes[name]] if name in axes else 1 for name, each in tensors.items()}
    frames = counts.pop() if len(counts) == 1 else 1
    return frames if frames and places % frames == 0 else 1


def _cut(
    tensors: Mapping[str, Tensor], axes: Mapping[str, int], frames: int
) -> Iterator[dict[str, Tensor]]:
    for number in range(frames):
        yield {name: each.narrow(axes[name], number, 1) for name, each in tensors.items()}
