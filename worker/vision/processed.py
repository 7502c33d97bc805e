"""What a processor makes of a prompt with pictures (processor.py), and what of it goes through the
tower by itself: a picture, or each of the frames that the processor has cut it into.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor

# How tensors' names begin that only what looks at images needs. Of the text, their shape is enough.
PIXELS = "pixel"

Tensors = dict[str, Tensor]


class Frame(NamedTuple):
    """What of an image goes through the tower by itself."""

    digest: bytes
    tensors: Tensors


@dataclass(frozen=True, slots=True)
class View:
    """An image as a model takes it. `told`: what the text is made by, of pixels their shape alone.
    `tensors`: for the model's forward. `count`: ids that it fills. `frames`: it is cut into; a
    whole image is one. `whole`: its pixels are here."""

    digest: bytes
    told: dict[str, Any]
    tensors: Tensors
    count: int
    frames: Sequence[Frame]
    whole: bool = True

    def without_pixels(self) -> "View":
        frames = [Frame(each.digest, {}) for each in self.frames]
        tensors = {n: each for n, each in self.tensors.items() if not n.startswith(PIXELS)}
        return replace(self, tensors=tensors, frames=frames, whole=False)

    @property
    def nbytes(self) -> int:
        parts = (*self.told.values(), *self.tensors.values())
        return sum(each.untyped_storage().nbytes() for each in parts if isinstance(each, Tensor))


class Piece(NamedTuple):
    """A frame at its places in a prompt, from `start` to before `stop`; between those may stand ids
    of text. `ids`: what stands there. `inputs`: what else the forward may take, of them [1, ids]
    and of the picture; `whole`: its pixels are among them."""

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


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Processed:
    """`ids`: with as many places for each image as it fills. `inputs`: what else the forward takes
    of the text, [1, ids]. `pieces`: those of all `views`, in the order of their places."""

    ids: list[int]
    inputs: Tensors
    views: Sequence[View]
    pieces: Sequence[Piece]

    @property
    def images(self) -> list[Tensors]:
        """What the forward takes of each."""
        return [each.tensors for each in self.views]

    @property
    def nbytes(self) -> int:
        own = sum(each.nbytes for each in self.inputs.values())
        return own + sum(each.nbytes for each in self.views)
