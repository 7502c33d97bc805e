"""Records on disk, in files that survive any end of the process: the tier below the prefix cache.

A record is the bytes of one block of keys and values, or of one state, under a key of 16 bytes. A
segment is a file of many records: a header with their keys, places and checksums, then their data,
aligned. It is written under a temporary name, synced and renamed, and never changed. The headers
are the index: it is read from them when it is first needed, and again after the folder has changed,
so several processes may share a folder. A fault of the folder or of a file loses records, nothing
else.

Which records there are is decided in worker/engines/generation/prefix_store.py.
"""

import fcntl
import itertools
import logging
import os
import secrets
import struct
import threading
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple, cast

log = logging.getLogger("onequeue.segment_store")

MAGIC = b"onequeue kv 1\0\0\0"
HEADER = struct.Struct("<16s16sI")  # MAGIC, digest of what follows, number of records
RECORD = struct.Struct("<16sQII")  # key, offset, length, checksum
ALIGNMENT = 4096  # of data in a segment
SEGMENT_BYTES = 128 << 20  # at most; and a quarter of the folder's limit
SEGMENT, TEMPORARY, SECRET = ".segment", ".tmp", "secret"
SECRET_BYTES = 32

Buffer = bytes | bytearray | memoryview


class FolderIsOpen(Exception):
    """Other users may read the folder."""


@dataclass(eq=False, slots=True)
class SegmentFile:
    name: str
    records: bytes  # RECORD for each

    def __iter__(self) -> Iterator[bytes]:
        return (key for key, *_ in RECORD.iter_unpack(self.records))


class Place(NamedTuple):
    """Where a record is."""

    segment: SegmentFile
    offset: int
    length: int
    checksum: int


class FolderUsage(NamedTuple):
    segments: int
    bytes: int
    oldest_s: float  # since the least recently used segment was


class SegmentStore:
    """The segments in one folder, which is created if need be. Its methods run in any thread; all
    but `__contains__` may wait for the disk. Raises OSError and FolderIsOpen for a folder that
    cannot be used."""

    def __init__(self, folder: str | Path, max_bytes: int) -> None:
        self.folder = Path(folder).expanduser()
        self.max_bytes = max_bytes
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = self.folder.stat()
        if status.st_uid != os.geteuid():
            raise FolderIsOpen("another user owns it")
        if status.st_mode & 0o077:
            raise FolderIsOpen("other users may read it: chmod 700")
        self.secret = self._read_secret()
        self._lock = threading.Lock()  # of what follows
        self._changed_at: int | None = None  # the folder's time at the last scan
        self._segments: dict[str, SegmentFile] = {}
        # A record's segment and its number there, as one integer: garbage collection would visit
        # each tuple.
        self._index: dict[bytes, int] = {}
        self._by_number: dict[int, SegmentFile] = {}
        self._numbers = itertools.count()

    def _read_secret(self) -> bytes:
        """Return the secret of the installation, which keeps keys from being guessed. Of two
        processes that create it at a time, one shares nothing until its next start."""
        path = self.folder / SECRET
        with suppress(FileNotFoundError):
            if len(secret := path.read_bytes()) == SECRET_BYTES:
                return secret
        file = TemporaryFile(self.folder)
        try:
            file.write(0, secrets.token_bytes(SECRET_BYTES))
            file.publish(SECRET)
        finally:
            file.discard()
        return path.read_bytes()

    # ── the index ──

    def __contains__(self, key: bytes) -> bool:
        """Return whether a record was there at the last `refresh`. Does not block."""
        return key in self._index

    def refresh(self) -> None:
        """Read the headers of segments that have appeared since the last call, and forget those
        that are gone."""
        with self._lock, suppress(OSError):  # an unreadable folder has no records
            changed_at = self.folder.stat().st_mtime_ns
            if changed_at == self._changed_at:
                return
            names = {name for name in os.listdir(self.folder) if name.endswith(SEGMENT)}
            for name in self._segments.keys() - names:
                self._forget(self._segments[name])
            for name in sorted(names - self._segments.keys()):
                if segment := self._read_header(name):
                    self._add(segment)
            self._changed_at = changed_at

    def _read_header(self, name: str) -> SegmentFile | None:
        """Return a segment; None, and remove the file, if its header is not whole."""
        path = self.folder / name
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if len(start := file.read(HEADER.size)) == HEADER.size:
                    magic, digest, count = HEADER.unpack(start)
                    records = file.read(min(count * RECORD.size, size))
                    if magic == MAGIC and digest == _digest(records, size):
                        return SegmentFile(name, records)
        except OSError:
            return None
        self._unlink(name)
        return None

    def _add(self, segment: SegmentFile) -> None:
        number = next(self._numbers)
        self._segments[segment.name] = self._by_number[number] = segment
        for n, key in enumerate(segment):
            self._index[key] = number << 32 | n

    def _forget(self, segment: SegmentFile) -> None:
        if self._segments.pop(segment.name, None) is None:
            return
        number = next(n for n, other in self._by_number.items() if other is segment)
        del self._by_number[number]
        for key in segment:
            if self._index.get(key, -1) >> 32 == number:
                del self._index[key]

    def _find(self, key: bytes) -> Place | None:
        if (number := self._index.get(key)) is None:
            return None
        segment = self._by_number[number >> 32]
        _, *place = RECORD.unpack_from(segment.records, (number & 0xFFFFFFFF) * RECORD.size)
        return Place(segment, *place)

    # ── reading ──

    def read(self, keys: Sequence[bytes]) -> Iterator[memoryview]:
        """Yield the data of records, in order, each valid until the next one. End before the first
        that is not there or not whole."""
        with self._lock:
            places = [*itertools.takewhile(bool, map(self._find, keys))]
        left, buffer = iter(keys), bytearray()
        for segment, own in itertools.groupby(cast(list[Place], places), lambda p: p.segment):
            parts = [*own]
            try:
                with (self.folder / segment.name).open("rb", buffering=0) as file:
                    _read_ahead(file.fileno(), parts)
                    for _, offset, length, checksum in parts:
                        if len(buffer) < length:
                            buffer = bytearray(length)
                        data = memoryview(buffer)[:length]
                        is_whole = _fill(file.fileno(), data, offset)
                        if not is_whole or _checksum(next(left), data) != checksum:
                            log.warning("KV_CACHE_DIR: a damaged segment is removed")
                            self._unlink(segment.name)
                            raise OSError("damaged")
                        yield data
            except OSError:
                with self._lock:
                    self._forget(segment)
                return

    def use(self, keys: Iterable[bytes]) -> None:
        """Record that a prefix was used: its first segment is the last to be removed."""
        with self._lock:
            places = [place for key in keys if (place := self._find(key))]
        for segment in reversed(dict.fromkeys(place.segment for place in places)):
            with suppress(OSError):
                os.utime(self.folder / segment.name)

    # ── writing ──

    def write(self, records: Iterable[tuple[bytes, Buffer]], most: int) -> int:
        """Write records in new segments, whose headers have room for `most` of them; return their
        bytes. A record that is larger than a segment is left out. Raises OSError, such as for a
        full disk; the segments before stay."""
        limit, total = min(SEGMENT_BYTES, self.max_bytes // 4), 0
        start = _aligned(HEADER.size + most * RECORD.size)
        file: TemporaryFile | None = None
        entries, end = bytearray(), 0
        try:
            for key, data in records:
                if start + len(data) > limit:
                    continue
                has_entry = HEADER.size + len(entries) + RECORD.size <= start
                if file and not (has_entry and _aligned(end) + len(data) <= limit):
                    self._finish(file, entries, end)
                    file.discard()
                    file = None
                if not file:
                    self._make_room(limit)
                    file, entries, end = TemporaryFile(self.folder), bytearray(), start
                offset = _aligned(end)
                file.write(offset, data)
                entries += RECORD.pack(key, offset, len(data), _checksum(key, data))
                end = offset + len(data)
                total += len(data)
            if file:
                self._finish(file, entries, end)
        finally:
            if file:
                file.discard()
        return total

    def _finish(self, file: "TemporaryFile", entries: bytearray, size: int) -> None:
        count = len(entries) // RECORD.size
        file.write(0, HEADER.pack(MAGIC, _digest(entries, size), count) + entries)
        name = secrets.token_hex(16) + SEGMENT
        file.publish(name)
        with self._lock:
            self._add(SegmentFile(name, bytes(entries)))

    def _make_room(self, needed: int) -> None:
        """Remove the least recently used segments, and what other processes have abandoned."""
        files = sorted(self._files(), key=lambda file: (file[2].endswith(SEGMENT), file))
        total = sum(size for _, size, _ in files)
        for _, size, name in files:
            is_segment = name.endswith(SEGMENT)
            if (total + needed > self.max_bytes) if is_segment else self._is_abandoned(name):
                self._unlink(name)
                total -= size
                with self._lock:
                    if segment := self._segments.get(name):
                        self._forget(segment)

    def _is_abandoned(self, name: str) -> bool:
        """Return whether no process writes a temporary file: its lock ends with the process."""
        try:
            file = os.open(self.folder / name, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        finally:
            os.close(file)
        return True

    def _files(self) -> list[tuple[float, int, str]]:
        """Return when each file was used last, its size and its name."""
        files = []
        for entry in os.scandir(self.folder):
            if entry.name.endswith((SEGMENT, TEMPORARY)):
                with suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    files.append((status.st_mtime, status.st_size, entry.name))
        return files

    def _unlink(self, name: str) -> None:
        with suppress(OSError):
            os.unlink(self.folder / name)

    # ── the operator ──

    def usage(self) -> FolderUsage:
        files = self._files()
        oldest = min((used_at for used_at, _, _ in files), default=time.time())
        segments = sum(name.endswith(SEGMENT) for _, _, name in files)
        return FolderUsage(
            segments, sum(size for _, size, _ in files), max(0.0, time.time() - oldest)
        )

    def clear(self) -> None:
        """Remove all records, also those that other processes write."""
        for _, _, name in self._files():
            self._unlink(name)


class TemporaryFile:
    """A file that appears complete or not at all."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / (secrets.token_hex(16) + TEMPORARY)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._file = os.open(self._path, flags, 0o600)
        with suppress(OSError):  # a file system without locks
            fcntl.flock(self._file, fcntl.LOCK_EX)

    def write(self, offset: int, data: Buffer) -> None:
        left = memoryview(data)
        while left:
            written = os.pwrite(self._file, left, offset)
            offset, left = offset + written, left[written:]

    def publish(self, name: str) -> None:
        """Sync the file, and then its name."""
        os.fsync(self._file)
        os.rename(self._path, self._path.with_name(name))
        folder = os.open(self._path.parent, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def discard(self) -> None:
        """Close the file; remove it unless it is published."""
        os.close(self._file)
        with suppress(OSError):
            self._path.unlink()


@cache
def open_store(folder: str, max_bytes: int) -> SegmentStore:
    """Return the process's store of a folder, which its models share."""
    return SegmentStore(folder, max_bytes)


def _digest(records: Buffer, size: int) -> bytes:
    return blake2b(records, digest_size=16, salt=struct.pack("<Q", size)).digest()


def _checksum(key: bytes, data: Buffer) -> int:
    """Return a checksum that another record's data do not have."""
    return zlib.crc32(data, zlib.crc32(key))


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _read_ahead(file: int, places: Sequence[Place]) -> None:
    """Have the system read what will be read."""
    if hasattr(os, "posix_fadvise"):
        size = places[-1].offset + places[-1].length - places[0].offset
        os.posix_fadvise(file, places[0].offset, size, os.POSIX_FADV_WILLNEED)


def _fill(file: int, data: memoryview, offset: int) -> bool:
    """Read until `data` is full; return False at the end of the file."""
    while len(data):
        if not (count := os.preadv(file, [data], offset)):
            return False
        offset, data = offset + count, data[count:]
    return True
