"""What a body of multipart/form-data holds: fields in memory, and one file that goes to disk.

    pieces of a body → parser (python-multipart) → fields and a file, within bounds

Runs in pool threads. How the pieces get here is upload.py's matter.
"""

import contextlib
import os
import tempfile
import threading

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from batching.errors import InvalidInput
from server.http.errors import HttpError

FILE = "file"  # the field that the file comes in
MOST_PARTS = 64
MAX_FIELD = 1 << 16  # bytes of one field
CURL = "with curl: -F file=@PATH"
PREFIX = "onequeue-"  # of files on disk


class Form:
    """Fed piece by piece; `finish` says whether it was whole. `remove` its file in the end.

    InvalidInput names the field that does not fit; HttpError (413) is raised for a file of more
    than `most` bytes, OSError where the disk takes no more."""

    def __init__(self, boundary: bytes, most: int) -> None:
        self.most = most
        self.fields: dict[str, list[str]] = {}
        self.received = 0  # bytes of the body, as whoever feeds it counts
        self.size = 0  # of them, the file's
        self._file = -1  # its descriptor, while it is being written
        self._path = ""
        self._parts = 0
        self._name = ""  # of the part that is being read
        self._is_file = False
        self._text = bytearray()
        self._header = bytearray()  # the value of one of its headers
        self._options: dict[bytes, bytes] = {}  # of its Content-Disposition
        self._ended = False
        self._removed = False
        self._using = threading.Lock()
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._begin_part,
                    "on_header_value": self._extend_header,
                    "on_header_end": self._end_header,
                    "on_headers_finished": self._end_headers,
                    "on_part_data": self._take,
                    "on_part_end": self._end_part,
                    "on_end": self._end,
                },
            )
        except FormParserError:
            raise InvalidInput("the boundary of the form is too long") from None

    def feed(self, piece: bytes) -> None:
        try:
            with self._using:
                if not self._removed:
                    self._parser.write(piece)
        except FormParserError:
            wrong = "the body is not the form that its Content-Type says: its boundary may be wrong"
            raise InvalidInput(wrong) from None

    def finish(self) -> None:
        if not self._ended:
            raise InvalidInput("the form is cut off: its last boundary is missing")

    @property
    def path(self) -> str:
        """Where the file is; InvalidInput if none was sent."""
        if not self._path:
            raise InvalidInput.at(FILE, f"is required; {CURL}")
        if not self.size:
            raise InvalidInput.at(FILE, "is empty")
        return self._path

    def remove(self) -> None:
        """A piece may still be fed by another thread, where the server was stopped meanwhile."""
        with self._using:
            self._removed = True
            if self._file >= 0:
                os.close(self._file)
                self._file = -1
            if self._path:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._path)

    # ── what the parser finds ──

    def _begin_part(self) -> None:
        self._parts += 1
        if self._parts > MOST_PARTS:
            raise InvalidInput(f"the form has more than {MOST_PARTS} fields")
        self._options = {}
        self._text.clear()

    def _extend_header(self, data: bytes, start: int, end: int) -> None:
        """The parser bounds how long one may be, and how many there are."""
        self._header += data[start:end]

    def _end_header(self) -> None:
        kind, options = parse_options_header(bytes(self._header))
        if kind == b"form-data":  # which no other header says
            self._options = options
        self._header.clear()

    def _end_headers(self) -> None:
        options = self._options
        if b"name" not in options:
            raise InvalidInput("a part of the form has no name")
        self._name = options[b"name"].decode(errors="replace")[:100]
        self._is_file = b"filename" in options
        if not self._is_file and self._name == FILE:
            raise InvalidInput.at(FILE, f"must be a file, with a file name; {CURL}")
        if self._is_file:
            if self._name != FILE:
                raise InvalidInput.at(self._name, f"is not taken as a file: send it as {FILE!r}")
            if self._path:
                raise InvalidInput.at(FILE, "comes twice")
            self._file, self._path = tempfile.mkstemp(prefix=PREFIX)

    def _take(self, data: bytes, start: int, end: int) -> None:
        if not self._is_file:
            if len(self._text) + end - start > MAX_FIELD:
                raise InvalidInput.at(self._name, f"is longer than {MAX_FIELD} bytes")
            self._text += data[start:end]
            return
        self.size += end - start
        if self.size > self.most:
            raise HttpError(413, f"the file is larger than {self.most / 1_000_000:g} MB", FILE)
        rest = memoryview(data)[start:end]
        while rest:
            rest = rest[os.write(self._file, rest) :]

    def _end_part(self) -> None:
        if self._is_file:
            os.close(self._file)
            self._file = -1
            return
        try:
            text = self._text.decode()
        except UnicodeDecodeError:
            raise InvalidInput.at(self._name, "is not valid UTF-8") from None
        self.fields.setdefault(self._name, []).append(text)

    def _end(self) -> None:
        self._ended = True
