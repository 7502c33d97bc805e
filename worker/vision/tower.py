"""Pictures through the model's vision tower, each once however often it comes.

    pixels  --the model's own forward, up to its decoder-->  rows: what the decoder is given

A prompt of nothing but a picture's places is run as far as the decoder; what that would be given is
kept by the picture's digest, the least recently used given up first. On the worker's thread.
"""

from collections import OrderedDict
from collections.abc import Sequence

import torch

from worker.model.entrance import Entrance, Rows, rows_of
from worker.vision.pieces import Piece

KEPT_BYTES = 256 << 20


class Tower:
    """`most_bytes`: of the rows that are kept."""

    def __init__(self, entrance: Entrance, most_bytes: int = KEPT_BYTES) -> None:
        self.entrance = entrance
        self.most_bytes = most_bytes
        self.runs = 0  # pictures that were looked at
        self._kept: OrderedDict[bytes, Rows] = OrderedDict()
        self._bytes = 0

    def find(self, digest: bytes) -> Rows | None:
        if rows := self._kept.get(digest):
            self._kept.move_to_end(digest)
        return rows

    def look(self, pieces: Sequence[Piece]) -> Sequence[Rows]:
        """Of the same shape, in one run; CannotRun where the decoder is given what cannot be told
        apart by picture."""
        device, width = self.entrance.model.device, len(pieces[0].ids)
        given = self.entrance.captured(
            input_ids=torch.tensor([each.ids for each in pieces], device=device),
            **{
                name: torch.cat([each.inputs[name] for each in pieces]).to(device)
                for name in pieces[0].inputs.keys() & self.entrance.takes
            },
        )
        made = rows_of(given, len(pieces), width)
        self.runs += len(pieces)
        for each, rows in zip(pieces, made, strict=True):
            self._keep(each.digest, rows)
        return made

    def _keep(self, digest: bytes, rows: Rows) -> None:
        if digest in self._kept:
            return
        self._kept[digest] = rows
        self._bytes += size_of(rows)
        while self._bytes > self.most_bytes:
            _, dropped = self._kept.popitem(last=False)
            self._bytes -= size_of(dropped)


def size_of(rows: Rows) -> int:
    """In bytes."""
    found = (each if isinstance(each, list) else [each] for each in rows.values())
    return sum(tensor.nbytes for each in found for tensor in each)
