"""A body of multipart/form-data: fields in memory, and one file on disk.

    chunks of a body → python-multipart → fields and a file, within limits

Runs in pool threads; upload.py reads the chunks. Starlette's MultiPartParser is no replacement: it
accepts a form that is cut off, reads invalid UTF-8 as Latin-1, parses on the event loop, and its
spooled file has no path for the decoders to open.
"""

import contextlib
import os
import tempfile
import threading
from collections.abc import Callable
from typing import TypeVar

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from batching.errors import InvalidInput, QueueFull
from server.http.errors import HttpError

FILE = "file"  # name of the field with the file
MAX_PARTS = 64
MAX_FIELD_BYTES = 1 << 16
MAX_FILENAME_BYTES = 255  # of the client's name; the rest is cut off
CURL_HINT = "with curl: -F file=@PATH"
T = TypeVar("T")
PREFIX = "onequeue-"  # of file names on disk


class Form:
    """A form that is fed in chunks. Call `finish` after the last one, and `remove` in the end.

    Raises InvalidInput with the invalid field, HttpError (413) for a file of more than `max_bytes`,
    QueueFull for a full disk."""

    def __init__(self, boundary: bytes, max_bytes: int, folder: str | None = None) -> None:
        self.max_bytes = max_bytes
        self.folder = folder  # of the file; None: that of temporary files
        self.filename = ""  # that the client gives
        self.fields: dict[str, list[str]] = {}
        self.file_bytes = 0
        self._descriptor = -1  # of the file, while it is open
        self._path = ""
        self._parts = 0
        self._name = ""  # of the current part
        self._is_file = False
        self._text = bytearray()
        self._header = bytearray()  # value of the current header
        self._options: dict[bytes, bytes] = {}  # of the part's Content-Disposition
        self._complete = False
        self._removed = False
        self._lock = threading.Lock()
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._on_part_begin,
                    "on_header_value": self._on_header_value,
                    "on_header_end": self._on_header_end,
                    "on_headers_finished": self._on_headers_finished,
                    "on_part_data": self._on_part_data,
                    "on_part_end": self._on_part_end,
                    "on_end": self._on_end,
                },
            )
        except FormParserError:
            raise InvalidInput("the boundary of the form is too long") from None

    def feed(self, chunk: bytes) -> None:
        try:
            with self._lock:
                if not self._removed:
                    self._parser.write(chunk)
        except FormParserError:
            message = (
                "the body is not a form with the boundary of its Content-Type, or a header in it, "
                "such as that with the file name, is longer than 4 kB"
            )
            raise InvalidInput(message) from None
        except OSError:
            raise QueueFull("the server's disk has no space for the file") from None

    def finish(self) -> None:
        if not self._complete:
            raise InvalidInput("the form is cut off: its last boundary is missing")

    @property
    def has_file(self) -> bool:
        return bool(self._path)

    @property
    def path(self) -> str:
        """The path of the file. Raises InvalidInput if there is none."""
        if not self._path:
            raise InvalidInput.at(FILE, f"is required; {CURL_HINT}")
        if not self.file_bytes:
            raise InvalidInput.at(FILE, "is empty")
        return self._path

    def use_file(self, use: Callable[[str], T]) -> T:
        """Return the result of `use`, which reads the file at the path that it gets. Raises the
        errors of `path`."""
        with self._lock:
            return use(self.path)

    def remove(self) -> None:
        """Remove the file. A thread may still feed a chunk when the server stops: it is dropped."""
        with self._lock:
            self._removed = True
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1
            if self._path:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._path)

    # ── the parser's callbacks ──

    def _on_part_begin(self) -> None:
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise InvalidInput(f"the form has more than {MAX_PARTS} fields")
        self._options = {}
        self._text.clear()

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        """Collect a header. The parser limits the length and the number of headers."""
        self._header += data[start:end]

    def _on_header_end(self) -> None:
        kind, options = parse_options_header(bytes(self._header))
        if kind == b"form-data":  # of Content-Disposition alone
            self._options = options
        self._header.clear()

    def _on_headers_finished(self) -> None:
        options = self._options
        if b"name" not in options:
            raise InvalidInput("a part of the form has no name")
        self._name = options[b"name"].decode(errors="replace")[:100]
        self._is_file = b"filename" in options
        if not self._is_file and self._name == FILE:
            raise InvalidInput.at(FILE, f"must be a file, with a file name; {CURL_HINT}")
        if self._is_file:
            if self._name != FILE:
                raise InvalidInput.at(self._name, f"must not be a file: send it as {FILE!r}")
            if self._path:
                raise InvalidInput.at(FILE, "must be sent once")
            self._descriptor, self._path = tempfile.mkstemp(prefix=PREFIX, dir=self.folder)
            name = options[b"filename"][:MAX_FILENAME_BYTES]
            self.filename = name.decode(errors="replace")

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        if not self._is_file:
            if len(self._text) + end - start > MAX_FIELD_BYTES:
                raise InvalidInput.at(self._name, f"is longer than {MAX_FIELD_BYTES} bytes")
            self._text += data[start:end]
            return
        self.file_bytes += end - start
        if self.file_bytes > self.max_bytes:
            message = f"the file is larger than {self.max_bytes / 1_000_000:g} MB"
            raise HttpError(413, message, FILE)
        rest = memoryview(data)[start:end]
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]

    def _on_part_end(self) -> None:
        if self._is_file:
            os.close(self._descriptor)
            self._descriptor = -1
            return
        try:
            text = self._text.decode()
        except UnicodeDecodeError:
            raise InvalidInput.at(self._name, "is not valid UTF-8") from None
        self.fields.setdefault(self._name, []).append(text)

    def _on_end(self) -> None:
        self._complete = True
