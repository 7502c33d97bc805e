"""Kills and faults of a segment store, in a process without torch: `python -m tests.segment_faults
ROUNDS SEED FOLDER`. Prints how many records were read whole, and how many of which faults it
survived."""

import errno
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from worker.segment_store import SEGMENT, SegmentStore

MAX_BYTES = 4 << 20
NUMBERS = 400  # of different records


def record(number: int) -> tuple[bytes, bytes]:
    """Return a key, and data that no other key has."""
    key = number.to_bytes(16, "little")
    return key, key * (1 + number * 7 % 1500)


class Faults:
    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.random = folder, random.Random(seed)
        self.store = SegmentStore(folder, MAX_BYTES)
        self.counts = Counter[str]()

    def numbers(self) -> list[int]:
        start = self.random.randrange(NUMBERS)
        return [n % NUMBERS for n in range(start, start + self.random.randint(1, 60))]

    def write(self, store: SegmentStore) -> None:
        numbers = self.numbers()
        store.write(map(record, numbers), len(numbers))

    def read(self, store: SegmentStore) -> None:
        """Read a chain as a prompt does, and compare each record."""
        store.refresh()
        numbers = self.numbers()
        expected = map(record, numbers)
        for data, (_, wanted) in zip(store.read([record(n)[0] for n in numbers]), expected):  # noqa: B905
            assert data == wanted, "a record has other data"
            self.counts["read"] += 1
        store.use(record(n)[0] for n in numbers)

    # ── faults ──

    def kill(self) -> None:
        if child := os.fork():
            time.sleep(self.random.random() * 0.008)  # any moment
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return
        try:
            store = SegmentStore(self.folder, MAX_BYTES)
            while True:
                self.write(store)
                self.read(store)
        finally:
            os._exit(1)

    def file(self) -> Path | None:
        files = sorted(self.folder.glob(f"*{SEGMENT}"))
        return self.random.choice(files) if files else None

    def flip(self) -> None:
        if file := self.file():
            content = bytearray(file.read_bytes())
            content[self.random.randrange(len(content))] ^= 1 << self.random.randrange(8)
            file.write_bytes(content)

    def truncate(self) -> None:
        if file := self.file():
            os.truncate(file, self.random.randrange(file.stat().st_size))

    def remove(self) -> None:
        if file := self.file():
            file.unlink()

    def step_clock(self) -> None:
        if file := self.file():
            at = time.time() + self.random.uniform(-1e8, 1e8)
            os.utime(file, (at, at))

    def damage_secret(self) -> None:
        os.truncate(self.folder / "secret", self.random.randrange(32))
        assert len(SegmentStore(self.folder, MAX_BYTES).secret) == 32

    @contextmanager
    def patched(self, name: str, fault: Callable[..., Any]) -> Iterator[None]:
        real, after = getattr(os, name), self.random.randrange(40)
        calls = 0

        def call(*args: Any) -> Any:
            nonlocal calls
            calls += 1
            return fault(real, *args) if calls > after else real(*args)

        setattr(os, name, call)
        try:
            yield
        finally:
            setattr(os, name, real)

    def fill_disk(self) -> None:
        self._failing_write("pwrite", errno.ENOSPC)

    def fail_sync(self) -> None:
        self._failing_write("fsync", errno.EIO)

    def fail_rename(self) -> None:
        self._failing_write("rename", errno.ENOSPC)

    def _failing_write(self, name: str, number: int) -> None:
        def fail(*_: Any) -> None:
            raise OSError(number, os.strerror(number))

        with self.patched(name, fail), suppress(OSError):
            for _ in range(3):
                self.write(self.store)

    def write_in_parts(self) -> None:
        def part(real: Callable[..., Any], file: int, data: memoryview, offset: int) -> Any:
            return real(file, data[: 1 + len(data) // 3], offset)

        with self.patched("pwrite", part):
            self.write(self.store)

    def read_in_parts(self) -> None:
        def part(real: Callable[..., Any], file: int, data: list[memoryview], offset: int) -> Any:
            return real(file, [data[0][: 1 + len(data[0]) // 3]], offset)

        with self.patched("preadv", part):
            self.read(self.store)

    def fail_read(self) -> None:
        def fail(*_: Any) -> None:
            raise OSError(errno.EIO, "input/output error")

        with self.patched("preadv", fail):
            self.read(self.store)

    def run(self, rounds: int) -> None:
        faults = (
            *[self.kill] * 4, self.flip, self.truncate, self.remove, self.step_clock,
            self.damage_secret, self.fill_disk, self.fail_sync, self.fail_rename,
            self.write_in_parts, self.read_in_parts, self.fail_read,
        )  # fmt: skip
        for _ in range(rounds):
            fault = self.random.choice(faults)
            fault()
            self.counts[fault.__name__] += 1
            self.read(self.store)
            if not self.random.randrange(4):
                self.store = SegmentStore(self.folder, MAX_BYTES)  # a restart
            self.check_works()
        left = self.store.usage()
        temporary = sum(file.stat().st_size for file in self.folder.glob("*.tmp"))
        assert left.bytes <= MAX_BYTES + temporary, left

    def check_works(self) -> None:
        """What is written after a fault can be read."""
        number = self.random.randrange(NUMBERS)
        key, data = record(number)
        self.store.write([(key, data)], 1)
        assert [bytes(part) for part in self.store.read([key])] == [data], "the folder is broken"


if __name__ == "__main__":
    rounds, seed, folder = sys.argv[1:]
    faults = Faults(Path(folder), int(seed))
    faults.run(int(rounds))
    assert "torch" not in sys.modules
    print(dict(faults.counts))
