"""Pictures through the model's vision tower, each once however often it comes; and what is kept of
those that were looked at, by digests, within bounds of memory.

    pixels  --the model's own forward, up to its decoder-->  rows: what the decoder is given

A prompt of nothing but a picture's places is run as far as the decoder, on the worker's thread;
what is kept is for any thread.
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch

from worker.model.decoder_hook import DecoderHook, Rows, rows_of
from worker.vision.processor import ImageFeatures, MultimodalItem

VIEW_BYTES = 16 << 20
ENTRY_BYTES = 1 << 10  # that an entry takes beside its tensors
ROWS_BYTES = 256 << 20

V = TypeVar("V")


class LRUCache(Generic[V]):
    """The least recently used are given up first. For any thread."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self._entries: OrderedDict[bytes, tuple[V, int]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._entries

    def find(self, digest: bytes) -> V | None:
        with self._lock:
            if not (entry := self._entries.get(digest)):
                return None
            self._entries.move_to_end(digest)
            return entry[0]

    def keep(self, digest: bytes, value: V, nbytes: int) -> None:
        with self._lock:
            if digest in self._entries:
                return
            self._entries[digest] = value, nbytes + ENTRY_BYTES
            self._bytes += nbytes + ENTRY_BYTES
            while self._bytes > self.most_bytes:
                _, (_, dropped) = self._entries.popitem(last=False)
                self._bytes -= dropped


@dataclass(eq=False)
class EncoderCache:
    """`views`: of whole pictures, without pixels. `rows`: of each frame, what the decoder gets."""

    views: LRUCache[ImageFeatures] = field(default_factory=lambda: LRUCache(VIEW_BYTES))
    rows: LRUCache[Rows] = field(default_factory=lambda: LRUCache(ROWS_BYTES))

    def view(self, digest: bytes) -> ImageFeatures | None:
        """Of a picture that needs no more looking."""
        view = self.views.find(digest)
        return view if view and all(each.digest in self.rows for each in view.frames) else None

    def keep_view(self, view: ImageFeatures) -> None:
        blank = view.without_pixels()
        self.views.keep(view.digest, blank, blank.nbytes)


class VisionEncoder:
    def __init__(self, entrance: DecoderHook, album: EncoderCache) -> None:
        self.entrance = entrance
        self.album = album
        self.runs = 0  # pictures that were looked at

    def look(self, pieces: Sequence[MultimodalItem]) -> Sequence[Rows]:
        """Of the same shape, in one run; CannotRun where the decoder is given what cannot be told
        apart by picture."""
        device, width = self.entrance.model.device, len(pieces[0].ids)
        given = self.entrance.capture(
            input_ids=torch.tensor([each.ids for each in pieces], device=device),
            **{
                name: torch.cat([each.inputs[name] for each in pieces]).to(device)
                for name in pieces[0].inputs.keys() & self.entrance.argument_names
            },
        )
        made = rows_of(given, len(pieces), width)
        self.runs += len(pieces)
        for each, rows in zip(pieces, made, strict=True):
            self.album.rows.keep(each.digest, rows, sum(part.nbytes for part in rows.values()))
        return made
