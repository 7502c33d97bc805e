"""A prompt with pictures on its way: processed in the pool, looked at by the worker's thread, and
forgotten but for its numbers once it has run. Shared by a request's choices.
"""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch import Tensor

from worker.model.entrance import Entrance, Rows
from worker.model.pictures import Pictures
from worker.vision.layout import PIXELS, lay_out
from worker.vision.pieces import Piece, pieces_of
from worker.vision.processor import Processed
from worker.vision.tower import Look, Tower


@dataclass(eq=False, slots=True)
class PicturePrompt(Pictures):
    """`process` makes of the request what went in, should that be needed once more: a prompt that
    was put back after it had run."""

    process: Callable[[], Processed] = field(kw_only=True)
    ids: Sequence[int] = field(kw_only=True)
    digests: Sequence[bytes] = field(kw_only=True)
    processed: Processed | None = field(kw_only=True)
    pieces: Sequence[Piece] = field(kw_only=True)
    found: dict[bytes, Rows] = field(default_factory=dict)

    @classmethod
    def of(cls, made: Processed, process: Callable[[], Processed]) -> "PicturePrompt":
        pieces = pieces_of(made)
        spans = [(each.start, each.stop) for each in pieces]
        digests = [each.digest for each in pieces]
        return cls(
            spans=spans, end=spans[-1][1], contents=made.ids, process=process,
            ids=made.ids, digests=digests, processed=made, pieces=pieces,
        )  # fmt: skip

    def missing(self, tower: Tower, most: int) -> list[Look]:
        """The first `most` of its pictures that have not been looked at, each once."""
        for digest in self.digests:
            if digest not in self.found and (rows := tower.find(digest)) is not None:
                self.found[digest] = rows
        wanted = {d: n for n, d in enumerate(self.digests) if d not in self.found}
        return [self._look(number, tower) for number in islice(wanted.values(), most)]

    def _look(self, number: int, tower: Tower) -> Look:
        made = self.made()
        start, stop, digest, inputs = self.pieces[number]
        of_text = {name: each[:, start:stop] for name, each in made.inputs.items()}
        known = taken({**of_text, **inputs}, tower.entrance.takes)
        return Look(digest, tuple(self.ids[start:stop]), known)

    def lay_out(self, entrance: Entrance) -> None:
        """CannotRun as in layout.py."""
        made = self.made()
        images = [taken(each.inputs, entrance.takes) for each in made.images]
        joined = {
            name: torch.cat([each[name] for each in images])
            for name in images[0]
            if not name.startswith(PIXELS)
        }
        inputs = {**taken(made.inputs, entrance.takes), **joined}
        lay_out(self, entrance, self.ids, inputs, self.digests)

    def open(self, tower: Tower) -> None:
        """All its pictures have been looked at: it may be scheduled. CannotRun as in layout.py."""
        if self.positions is None:
            self.lay_out(tower.entrance)
        self.rows = [self.found[digest] for digest in self.digests]
        self.processed, self.pieces, self.found, self.ready = None, (), {}, True

    def close(self) -> None:
        """It has run, or nobody waits for it."""
        self.rows, self.ready = (), False

    def made(self) -> Processed:
        """What went in, made again if need be."""
        if self.processed is None:
            self.processed = self.process()
            self.pieces = pieces_of(self.processed)
        return self.processed


def taken(inputs: Mapping[str, object], takes: Container[str]) -> dict[str, Tensor]:
    """The tensors that the model's forward takes."""
    return {n: each for n, each in inputs.items() if isinstance(each, Tensor) and n in takes}
