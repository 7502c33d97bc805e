"""Split an NDJSON body into lines, as its chunks arrive, in bounded memory. Pure state."""

import re
from codecs import BOM_UTF8
from collections.abc import Iterator
from typing import NamedTuple

_BLANK_LINES = re.compile(rb"\s*\n")


class Line(NamedTuple):
    number: int  # from 1; blank lines count
    content: bytes | None  # None: it is too long
    offset: int  # of the content in the body, in bytes


class LineSplitter:
    """Lines of at most `max_bytes`. Longer ones are skipped without being held; blank ones, a byte
    order mark and carriage returns at the end of lines are left out."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.complete = 0  # lines that have ended
        self._partial = bytearray()
        self._is_too_long = False
        self._fed = self._start = 0  # offsets: of the next chunk, of the line that has not ended

    @property
    def held(self) -> int:
        """The bytes of the line that has not ended."""
        return len(self._partial)

    def feed(self, chunk: bytes) -> Iterator[Line]:
        """Yield the lines that end in a chunk; all must be taken."""
        start, base = 0, self._fed
        self._fed += len(chunk)
        while (end := chunk.find(b"\n", start)) >= 0:
            part = chunk[start:end]
            start = end + 1
            if self._partial or self._is_too_long:
                self._add(part)
                part = b"" if self._is_too_long else bytes(self._partial)
            yield from self._end(part)
            if blank := _BLANK_LINES.match(chunk, start):  # at once: a chunk may have 300,000
                self.complete += chunk.count(b"\n", start, blank.end())
                start = blank.end()
            self._start = base + start
        self._add(chunk[start:])

    def finish(self) -> Iterator[Line]:
        """Yield the last line, if it has no line break."""
        if self._partial or self._is_too_long:
            yield from self._end(bytes(self._partial))

    def _add(self, part: bytes) -> None:
        if len(self._partial) + len(part) > self.max_bytes + len(BOM_UTF8 + b"\r"):
            self._is_too_long = True
            self._partial.clear()
        if not self._is_too_long:
            self._partial += part

    def _end(self, content: bytes) -> Iterator[Line]:
        is_too_long, self._is_too_long = self._is_too_long, False
        self._partial.clear()
        self.complete += 1
        offset = self._start
        if self.complete == 1 and content.startswith(BOM_UTF8):
            content, offset = content.removeprefix(BOM_UTF8), offset + len(BOM_UTF8)
        content = content.removesuffix(b"\r")
        if is_too_long or len(content) > self.max_bytes:
            yield Line(self.complete, None, offset)
        elif content and not content.isspace():
            yield Line(self.complete, content, offset)
