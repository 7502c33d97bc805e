"""What of a prompt's pictures goes through the tower by itself: a picture, or, where the processor
has cut one into frames, each frame, so that no run is longer than one takes.
"""

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from worker.vision.processor import Processed


class Piece(NamedTuple):
    """`start`, `stop`: its places in the prompt. `ids`: what stands there. `inputs`: what else the
    forward may take, of them [1, ids] and of the picture."""

    start: int
    stop: int
    digest: bytes
    ids: tuple[int, ...]
    inputs: Mapping[str, Tensor]

    @property
    def shape(self) -> tuple[Any, ...]:
        """Of those that may be looked at together."""
        return self.ids, *((name, each.shape) for name, each in sorted(self.inputs.items()))

    @property
    def numbers(self) -> int:
        """How many the largest of its tensors has."""
        return max(each.numel() for each in self.inputs.values())


def pieces_of(made: Processed) -> list[Piece]:
    """In the order of their places."""
    pieces: list[Piece] = []
    for (start, stop, digest), image in zip(made.spans, made.images, strict=True):
        tensors = {name: each for name, each in image.items() if isinstance(each, Tensor)}
        places = [place for place in range(start, stop) if made.ids[place] == made.image_id]
        frames = _frames(tensors, made.axes, len(places))
        if frames == 1:
            pieces.append(_piece(made, start, stop, digest, tensors))
            continue
        each = len(places) // frames
        for number, inputs in enumerate(_cut(tensors, made.axes, frames)):
            own = places[number * each : (number + 1) * each]
            named = hashlib.blake2b(digest + bytes([number]), digest_size=32).digest()
            pieces.append(_piece(made, own[0], own[-1] + 1, named, inputs))
    return pieces


def _piece(
    made: Processed, start: int, stop: int, digest: bytes, inputs: Mapping[str, Tensor]
) -> Piece:
    of_text = {name: each[:, start:stop] for name, each in made.inputs.items()}
    return Piece(start, stop, digest, tuple(made.ids[start:stop]), {**of_text, **inputs})


def _frames(tensors: Mapping[str, Tensor], axes: Mapping[str, int], places: int) -> int:
    """Of a picture whose tensors all have as many along the axis by which pictures are joined."""
    counts = {each.shape[axes[name]] for name, each in tensors.items()}
    frames = counts.pop() if len(counts) == 1 else 1
    return frames if frames and places % frames == 0 else 1


def _cut(
    tensors: Mapping[str, Tensor], axes: Mapping[str, int], frames: int
) -> Iterator[dict[str, Tensor]]:
    for number in range(frames):
        yield {name: each.narrow(axes[name], number, 1) for name, each in tensors.items()}
