"""A prompt with pictures on its way: processed in the pool, looked at by the worker's thread unless
that was done before, and forgotten but for its numbers once it has run. Shared by a request's
choices.

How it is laid out (positions, what sees what, what its blocks are found by) is read off the model's
own forward as it comes to its decoder, without pixels.
"""

import hashlib
from collections.abc import Callable, Container, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch
from torch import Tensor

from batching.block_pool import Content
from worker.model.decoder_hook import DecoderHook, Rows, attends_to_next
from worker.model.multimodal_batch import MultimodalBatch
from worker.vision.encoder import EncoderCache, VisionEncoder
from worker.vision.processor import PIXELS, MultimodalItem, ProcessorOutput

Again = Callable[[], Future[ProcessorOutput]]
NEVER: Again = Future  # of what is looked at once: it does not come


@dataclass(eq=False, slots=True)
class MultimodalPrompt(MultimodalBatch):
    """`process` makes of the request what went in, in another thread, where pixels are needed that
    are not here: of a prompt that was put back after it had run, or whose pictures were known and
    then given up."""

    process: Again = field(kw_only=True)
    processed: ProcessorOutput | None = field(kw_only=True)
    ids: Sequence[int] = field(kw_only=True)
    digests: Sequence[bytes] = field(kw_only=True)
    found: dict[bytes, Rows] = field(default_factory=dict)
    coming: Future[ProcessorOutput] | None = None

    @classmethod
    def of(cls, made: ProcessorOutput, process: Again = NEVER) -> "MultimodalPrompt":
        spans = [(each.start, each.stop) for each in made.pieces]
        digests = [each.digest for each in made.pieces]
        return cls(
            spans=spans, end=spans[-1][1], contents=made.ids, process=process,
            ids=made.ids, digests=digests, processed=made,
        )  # fmt: skip

    def missing(self, album: EncoderCache, most: int) -> list[MultimodalItem]:
        """The first `most` of its pictures that have not been looked at, each once; none while
        they are made again, in `coming`."""
        if not (unseen := self.unseen(album)):
            return []
        if not (self.processed and all(self.processed.pieces[n].whole for n in unseen)):
            self.coming = self.coming or self.process()
            if not self.coming.done():
                return []
            coming, self.coming = self.coming, None
            self.processed = coming.result()
        return [self.processed.pieces[number] for number in unseen[:most]]

    def unseen(self, album: EncoderCache) -> list[int]:
        """The numbers of those, as far as the album does not have them."""
        for digest in self.digests:
            if digest not in self.found and (rows := album.rows.find(digest)) is not None:
                self.found[digest] = rows
        return [*{d: n for n, d in enumerate(self.digests) if d not in self.found}.values()]

    def lay_out(self, entrance: DecoderHook) -> None:
        """CannotRun where the forward does not tell."""
        made, device = self.made(), entrance.model.device
        images = [taken(each, entrance.argument_names) for each in made.images]
        joined = {
            name: torch.cat([each[name] for each in images])
            for name in images[0]
            if not name.startswith(PIXELS)
        }
        inputs = {**taken(made.inputs, entrance.argument_names), **joined}
        given = entrance.capture(
            input_ids=torch.tensor([self.ids], device=device),
            **{name: each.to(device) for name, each in inputs.items()},
        )
        count = len(self.ids)
        self.positions = _positions(given.get("position_ids"), count)
        self.shift = int(self.positions.max()) + 1 - count
        self.blocks = _blocks(attends_to_next(given))
        self.end = max(stop for _, stop in (*self.spans, *self.blocks))
        text = torch.arange(self.end, count) + self.shift
        if not bool((self.positions[:, self.end :] == text).all()):
            self.end = count
        self.contents = self._contents()

    def _contents(self) -> list[Content]:
        """Token ids, but of pictures their digests; and since the tokens of a block depend on all
        of it, of blocks theirs."""
        contents: list[Content] = [*self.ids]
        for (start, stop), digest in zip(self.spans, self.digests, strict=True):
            contents[start:stop] = [digest] * (stop - start)
        for start, stop in self.blocks:
            whole = hashlib.blake2b(repr(contents[start:stop]).encode(), digest_size=16).digest()
            contents[start:stop] = [whole] * (stop - start)
        return contents

    def open(self, tower: VisionEncoder) -> None:
        """All its pictures have been looked at: it may run. CannotRun as from `lay_out`."""
        if self.positions is None:
            self.lay_out(tower.entrance)
        for view in self.processed.views if self.processed else ():
            tower.album.keep_view(view)
        self.rows = [self.found[digest] for digest in self.digests]
        self.processed, self.found, self.ready = None, {}, True

    def close(self) -> None:
        """It has run, or nobody waits for it."""
        self.rows, self.ready = (), False

    def made(self) -> ProcessorOutput:
        """What went in, until it has been looked at."""
        assert self.processed
        return self.processed


def taken(inputs: Mapping[str, object], takes: Container[str]) -> dict[str, Tensor]:
    """The tensors that the model's forward takes."""
    return {n: each for n, each in inputs.items() if isinstance(each, Tensor) and n in takes}


def _positions(given: Tensor | None, width: int) -> Tensor:
    """[A, T] on the CPU, whatever axes a model has for them and for the batch."""
    positions = torch.arange(width) if given is None else given.cpu()
    return positions.reshape(-1, width)


def _blocks(attends_to_next: Tensor) -> list[tuple[int, int]]:
    """Runs of tokens that each see the next."""
    none = torch.zeros(1, dtype=torch.int)
    edges = torch.diff(attends_to_next.cpu().int(), prepend=none, append=none)
    starts, ends = ((edges == step).nonzero().flatten().tolist() for step in (1, -1))
    return [(start, end + 1) for start, end in zip(starts, ends, strict=True)]
