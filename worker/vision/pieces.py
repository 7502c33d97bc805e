"""What of a prompt's pictures goes through the tower by itself: a picture, or each frame of one."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from worker.vision.processor import Frame, Processed


class Piece(NamedTuple):
    """`start`, `stop`: its places in the prompt. `ids`: what stands there. `inputs`: what else the
    forward may take, of them [1, ids] and of the picture; `whole`: its pixels are among them."""

    start: int
    stop: int
    digest: bytes
    ids: tuple[int, ...]
    inputs: Mapping[str, Tensor]
    whole: bool

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
    for (start, stop), view in zip(made.spans, made.views, strict=True):
        frames = view.frames
        if len(frames) == 1:
            pieces.append(_piece(made, start, stop, frames[0], view.whole))
            continue
        places = [place for place in range(start, stop) if made.ids[place] == made.image_id]
        each = len(places) // len(frames)
        for number, frame in enumerate(frames):
            first, last = places[number * each], places[(number + 1) * each - 1]
            pieces.append(_piece(made, first, last + 1, frame, view.whole))
    return pieces


def _piece(made: Processed, start: int, stop: int, frame: Frame, whole: bool) -> Piece:
    of_text = {name: each[:, start:stop] for name, each in made.inputs.items()}
    ids = tuple(made.ids[start:stop])
    return Piece(start, stop, frame.digest, ids, {**of_text, **frame.tensors}, whole)
