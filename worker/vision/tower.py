"""Pictures through the model's vision tower, each once however often it comes.

    pixels  --the model's own forward, up to its decoder-->  rows: what the decoder is given

A prompt of nothing but a picture's places is run as far as the decoder; what that would be given is
kept in the album. On the worker's thread.
"""

from collections.abc import Sequence

import torch

from worker.model.entrance import Entrance, Rows, rows_of
from worker.vision.album import Album
from worker.vision.processed import Piece


class Tower:
    def __init__(self, entrance: Entrance, album: Album) -> None:
        self.entrance = entrance
        self.album = album
        self.runs = 0  # pictures that were looked at

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
            self.album.rows.keep(each.digest, rows, size_of(rows))
        return made


def size_of(rows: Rows) -> int:
    """In bytes."""
    found = (each if isinstance(each, list) else [each] for each in rows.values())
    return sum(tensor.nbytes for each in found for tensor in each)
