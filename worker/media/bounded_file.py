"""The file that Pillow reads an image from, with limits on the work of parsing it.

Pillow parses most formats in Python, a few bytes per read, and reads again what a file refers to
several times. No torch.
"""

import io
import time
from collections.abc import Callable

from batching.errors import ClientGone

MAX_READS = 100_000
BYTES_PER_READ = 1024  # more reads for larger files
MAX_REREADS = 8  # bytes read, in sizes of the file
HEADER_CPU_S = 0.3


class TooComplex(Exception):
    """Reading an image takes too much work. The text is the reason."""


class BoundedFile(io.BytesIO):
    """Each read raises TooComplex beyond the limits, and ClientGone unless `is_wanted()`. Opened
    and read in one thread."""

    def __init__(self, data: bytes, is_wanted: Callable[[], bool]) -> None:
        super().__init__(data)
        self._is_wanted = is_wanted
        self._reads = MAX_READS + len(data) // BYTES_PER_READ
        self._bytes = MAX_REREADS * len(data)
        self.allow_cpu(HEADER_CPU_S)

    def allow_cpu(self, cpu_s: float) -> None:
        """Set the limit of the thread's CPU time from now on."""
        self._cpu_end = time.thread_time() + cpu_s

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size)
        self._reads -= 1
        self._bytes -= len(data)
        if self._reads < 0 or self._bytes < 0:
            raise TooComplex("its parts are too many, or too small")
        if time.thread_time() > self._cpu_end:
            raise TooComplex("it takes too long to read")
        if not self._is_wanted():
            raise ClientGone("the client has gone")
        return data
