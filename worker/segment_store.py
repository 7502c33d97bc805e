"""Segments on disk: the tier below the prefix cache, which survives any end of the process.

A segment is a file with the bytes of a few blocks of keys and values, or of the states after a
block, and a checksum. Its name is its key, so the folder is the index, and several processes may
share it. A segment is written under a temporary name, synced and renamed, and never changed. A
fault of the folder or of a file loses segments, nothing else.

What is in a segment is decided in worker/engines/generation/stored_engine.py.
"""

import logging
import os
import secrets
import time
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import IO, NamedTuple

log = logging.getLogger("onequeue.segment_store")

SEGMENT, TEMPORARY, SECRET = ".segment", ".segment.tmp", "secret"
SECRET_BYTES, CHECKSUM_BYTES = 32, 4
# As all of them are listed when the folder has changed: of a tiny model's the folder holds less
# than its limit.
MAX_FILES = 8192
# A full folder is reduced to this fraction of its limits, so that not every write lists it.
KEPT_FRACTION = 0.95


class FolderUsage(NamedTuple):
    files: int
    bytes: int
    oldest_at: float  # when the least recently used one was used, in seconds since the epoch


class SegmentStore:
    """The segments in one folder, which is created if need be. The methods run in any thread; all
    but `__contains__` may wait for the disk. Raises OSError for a folder that cannot be used.

    `usage`: of the folder at the last `measure`, and what this process has written since."""

    def __init__(self, folder: str | Path, max_bytes: int) -> None:
        self.folder = Path(folder).expanduser()
        self.max_bytes = max_bytes
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = self.folder.stat()
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise PermissionError("other users own it or may read it: chmod 700")
        # Keeps keys from being guessed. Of two processes that create it at a time, one shares
        # nothing until its next start.
        secret = self.folder / SECRET
        if not secret.exists() or secret.stat().st_size != SECRET_BYTES:
            with self._new_file(SECRET) as file:
                file.write(secrets.token_bytes(SECRET_BYTES))
        self.secret = secret.read_bytes()
        self.usage = FolderUsage(0, 0, time.time())
        self.measure()
        self._names: set[str] = set()
        self._changed_at = 0  # the folder's time at the last `refresh`

    def __contains__(self, key: bytes) -> bool:
        """Return whether a segment was there at the last `refresh`."""
        return key.hex() + SEGMENT in self._names

    def refresh(self) -> None:
        """List the folder, if it has changed."""
        with suppress(OSError):  # an unreadable folder has no segments
            if (changed_at := self.folder.stat().st_mtime_ns) != self._changed_at:
                self._names = {*os.listdir(self.folder)}
                self._changed_at = changed_at

    def measure(self) -> None:
        """Add up the files of all processes: ten times the time of `refresh`."""
        with suppress(OSError):
            self._files()

    def read(self, key: bytes, buffer: memoryview) -> bool:
        """Fill `buffer` with a segment. Return whether it is there and whole; else remove it."""
        name = key.hex() + SEGMENT
        with suppress(OSError), (self.folder / name).open("rb") as file:
            size = file.readinto(buffer)
            if size == len(buffer) and file.read() == _checksum(key, buffer):
                return True
            log.warning("KV_CACHE_DIR: a damaged segment is removed")
        self._remove(name)
        return False

    def use(self, keys: Iterable[bytes]) -> None:
        """Record that the segments of a prefix were used: the first is the last to be removed."""
        for key in reversed([*keys]):
            with suppress(OSError):
                os.utime(self.folder / (key.hex() + SEGMENT))

    def write(self, key: bytes, data: memoryview) -> None:
        """Write a segment, unless it is larger than the folder may be. Raises OSError, such as for
        a full disk."""
        name = key.hex() + SEGMENT
        if len(data) < KEPT_FRACTION * self.max_bytes:
            self._make_room(len(data) + CHECKSUM_BYTES)
            with self._new_file(name) as file:
                file.write(data)
                file.write(_checksum(key, data))
            self._names.add(name)

    @contextmanager
    def _new_file(self, name: str) -> Iterator[IO[bytes]]:
        """Create a file that appears complete or not at all."""
        path = self.folder / (secrets.token_hex(16) + TEMPORARY)
        try:
            with open(path, "xb", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            path.rename(self.folder / name)
        finally:
            path.unlink(missing_ok=True)

    def _make_room(self, needed: int) -> None:
        """Remove the least recently used files if there is too little room for another one. Those
        that a process writes are the last."""
        count, nbytes = self.usage.files + 1, self.usage.bytes + needed
        if count > MAX_FILES or nbytes > self.max_bytes:
            files = self._files()
            count, nbytes = len(files) + 1, self.usage.bytes + needed
            for _, size, name in files:
                if max(count / MAX_FILES, nbytes / self.max_bytes) <= KEPT_FRACTION:
                    break
                self._remove(name)
                count, nbytes = count - 1, nbytes - size
        self.usage = FolderUsage(count, nbytes, self.usage.oldest_at)

    def _files(self) -> list[tuple[float, int, str]]:
        """Return when each file was used last, its size and its name, in order."""
        files = []
        with os.scandir(self.folder) as entries:
            for entry in entries:
                if entry.name.endswith((SEGMENT, TEMPORARY)):
                    with suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        files.append((status.st_mtime, status.st_size, entry.name))
        files.sort()
        oldest_at = files[0][0] if files else time.time()
        self.usage = FolderUsage(len(files), sum(size for _, size, _ in files), oldest_at)
        return files

    def _remove(self, name: str) -> None:
        self._names.discard(name)
        with suppress(OSError):
            (self.folder / name).unlink()

    def clear(self) -> None:
        """Remove all segments, also those that other processes write."""
        for _, _, name in self._files():
            self._remove(name)
        self.measure()


@cache
def open_store(folder: str, max_bytes: int) -> SegmentStore:
    """Return the process's store of a folder, which its models share."""
    return SegmentStore(folder, max_bytes)


def _checksum(key: bytes, data: memoryview) -> bytes:
    """Return a checksum that another segment's data do not have."""
    return zlib.crc32(data, zlib.crc32(key)).to_bytes(CHECKSUM_BYTES)
