"""A prompt with pictures on its way: processed in the pool, looked at by the worker's thread unless
that was done before, and forgotten but for its numbers once it has run. Shared by a request's
choices.
"""

from collections.abc import Callable, Container, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch
from torch import Tensor

from worker.model.entrance import Entrance, Rows
from worker.model.pictures import Pictures
from worker.vision.album import Album
from worker.vision.layout import lay_out
from worker.vision.processed import PIXELS, Piece, Processed
from worker.vision.tower import Tower

Again = Callable[[], Future[Processed]]
NEVER: Again = Future  # of what is looked at once: it does not come


@dataclass(eq=False, slots=True)
class PicturePrompt(Pictures):
    """`process` makes of the request what went in, in another thread, where pixels are needed that
    are not here: of a prompt that was put back after it had run, or whose pictures were known and
    then given up."""

    process: Again = field(kw_only=True)
    processed: Processed | None = field(kw_only=True)
    pieces: Sequence[Piece] = field(kw_only=True)
    ids: Sequence[int] = field(kw_only=True)
    digests: Sequence[bytes] = field(kw_only=True)
    found: dict[bytes, Rows] = field(default_factory=dict)
    coming: Future[Processed] | None = None

    @classmethod
    def of(cls, made: Processed, process: Again = NEVER) -> "PicturePrompt":
        pieces = made.pieces()
        spans = [(each.start, each.stop) for each in pieces]
        digests = [each.digest for each in pieces]
        return cls(
            spans=spans, end=spans[-1][1], contents=made.ids, process=process,
            ids=made.ids, digests=digests, processed=made, pieces=pieces,
        )  # fmt: skip

    def missing(self, album: Album, most: int) -> list[Piece]:
        """The first `most` of its pictures that have not been looked at, each once; none while
        they are made again, in `coming`."""
        unseen = self._unseen(album)
        if not unseen:
            return []
        if not (self.processed and all(self.pieces[number].whole for number in unseen)):
            self.coming = self.coming or self.process()
            if not self.coming.done():
                return []
            coming, self.coming = self.coming, None
            self.processed = coming.result()
            self.pieces = self.processed.pieces()
        return [self.pieces[number] for number in unseen[:most]]

    def is_seen(self, album: Album) -> bool:
        return not self._unseen(album)

    def _unseen(self, album: Album) -> list[int]:
        for digest in self.digests:
            if digest not in self.found and (rows := album.rows.find(digest)) is not None:
                self.found[digest] = rows
        return [*{d: n for n, d in enumerate(self.digests) if d not in self.found}.values()]

    def lay_out(self, entrance: Entrance) -> None:
        """CannotRun as in layout.py."""
        made = self.made()
        images = [taken(each, entrance.takes) for each in made.images]
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
        for view in self.processed.views if self.processed else ():
            tower.album.keep_view(view)
        self.rows = [self.found[digest] for digest in self.digests]
        self.processed, self.pieces, self.found, self.ready = None, (), {}, True

    def close(self) -> None:
        """It has run, or nobody waits for it."""
        self.rows, self.ready = (), False

    def made(self) -> Processed:
        """What went in, until it has been looked at."""
        assert self.processed
        return self.processed


def taken(inputs: Mapping[str, object], takes: Container[str]) -> dict[str, Tensor]:
    """The tensors that the model's forward takes."""
    return {n: each for n, each in inputs.items() if isinstance(each, Tensor) and n in takes}
