"""The input file of a batch: checked, and its lines put in the order in which they run.

    chunks → lines (http/lines.py) → checked → by shared prefixes → store.py

Lines whose prompts start alike follow each other, so the later ones find the prefix in the cache.
A line's body is checked by its endpoint when it runs.
"""

import hashlib
import zlib
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

import orjson
from msgspec import Meta, Raw, Struct

from batching.errors import InvalidInput
from server.apis.openai.request_fields import convert
from server.apis.openai.response_schemas import BatchError
from server.http.json import Document, parse_value
from server.http.lines import Line, LineSplitter

MAX_LINES = 50_000
MAX_ERRORS = 100  # that are reported
# What a prompt is made of, in the order in which templates render it.
PROMPT_FIELDS = (
    "model",
    "cache_salt",
    "tools",
    "instructions",
    "system",
    "previous_response_id",
    "messages",
    "prompt",
    "input",
    "inputs",
)
MIN_PREFIX = 64  # characters of the shortest prefix that is compared
PREFIX_GROWTH = 1.25  # from one compared length to the next
MAX_PREFIX = 1 << 20


class BatchLine(Struct):
    custom_id: Annotated[str, Meta(min_length=1, max_length=512)]
    method: Literal["POST"]
    url: str
    body: dict[str, Any]


class LineBody(Struct):
    """A line that has been checked; its body as it is written."""

    custom_id: str
    body: Raw


class CheckedLine(NamedTuple):
    number: int  # in the file, from 1
    offset: int  # in the file, in bytes
    size: int
    prefixes: bytes  # see prefix_key


class InputChecker:
    """Checks a file that is fed in chunks; for pool threads. `errors` are filled if it is wrong."""

    def __init__(self, endpoint: str, max_line_bytes: int) -> None:
        self.endpoint = endpoint
        self.errors: list[BatchError] = []
        self._lines: list[CheckedLine] = []
        self._ids: set[bytes] = set()  # digests of the custom_ids
        self._splitter = LineSplitter(max_line_bytes)

    @property
    def has_failed(self) -> bool:
        """Whether the rest of the file is not worth reading."""
        return len(self.errors) >= MAX_ERRORS or len(self._lines) > MAX_LINES

    def feed(self, chunk: bytes) -> None:
        for line in self._splitter.feed(chunk):
            self._check(line)

    def finish(self) -> Sequence[CheckedLine]:
        """Return the lines in the order in which they run."""
        for line in self._splitter.finish():
            self._check(line)
        if len(self._lines) > MAX_LINES:
            message = f"the file has more than {MAX_LINES} lines"
            self.errors = [BatchError("too_many_tasks", message)]
        elif not self._lines and not self.errors:
            self.errors = [BatchError("empty_batch", "the file has no lines")]
        return sorted(self._lines, key=lambda line: line.prefixes)

    def _check(self, line: Line) -> None:
        if self.has_failed:
            return
        if line.content is None:
            limit = f"{self._splitter.max_bytes / 1_000_000:g} MB"
            self._fail(line, "invalid_request", f"the line is larger than {limit}")
            return
        try:
            document = parse_value(line.content, "the line")
        except InvalidInput as error:
            return self._fail(line, "invalid_json_line", str(error))
        if not isinstance(document, dict):
            return self._fail(line, "invalid_json_line", "the line must be a JSON object")
        try:
            request = convert(document, BatchLine)
        except InvalidInput as error:
            return self._fail(line, "invalid_request", str(error), error.param)
        if request.url != self.endpoint:
            message = f"url: must be {self.endpoint!r} as in the batch, not {request.url[:100]!r}"
            return self._fail(line, "url_mismatch", message, "url")
        for name in ("stream", "background"):
            if request.body.get(name):
                message = f"body.{name}: must be false in a batch"
                return self._fail(line, "invalid_request", message, f"body.{name}")
        digest = hashlib.blake2b(request.custom_id.encode(), digest_size=16).digest()
        if digest in self._ids:
            message = f"custom_id: {request.custom_id[:100]!r} is the id of an earlier line"
            return self._fail(line, "duplicate_custom_id", message, "custom_id")
        self._ids.add(digest)
        key = prefix_key(request.body)
        self._lines.append(CheckedLine(line.number, line.offset, len(line.content), key))

    def _fail(self, line: Line, code: str, message: str, param: str | None = None) -> None:
        self.errors.append(BatchError(code, message, param, line.number))


def prefix_key(body: Document) -> bytes:
    """Return checksums of the prompt's prefixes, of growing lengths: sorted by them, prompts with a
    common prefix are neighbours. At most 200 bytes."""
    try:
        text = orjson.dumps([body.get(name) for name in PROMPT_FIELDS])
    except TypeError:  # nested deeper than orjson writes
        return b""
    checksum, start, end = 0, 0, MIN_PREFIX
    key = bytearray()
    while start < len(text) and end < MAX_PREFIX:
        checksum = zlib.crc32(text[start:end], checksum)
        key += checksum.to_bytes(4)
        start, end = end, int(end * PREFIX_GROWTH)
    return bytes(key)
