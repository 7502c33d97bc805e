"""Kills and faults of a segment store, in a process without torch: `python -m tests.segment_faults
ROUNDS SEED FOLDER`. Prints how many segments were read whole, and how many of which faults it
survived."""

import errno
import os
import random
import resource
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from worker.segment_store import SEGMENT, SegmentStore

MAX_BYTES = 4 << 20
NUMBERS = 400  # of different segments


def segment(number: int) -> tuple[bytes, memoryview]:
    """Return a key, and data that no other key has."""
    key = number.to_bytes(16, "little")
    return key, memoryview(key * (1 + number * 7 % 1500))


def write(store: SegmentStore, numbers: Iterable[int]) -> None:
    for number in numbers:
        store.write(*segment(number))


def read(store: SegmentStore, numbers: Iterable[int]) -> Iterator[int]:
    """Yield the numbers of the segments that exist; check that each has its written content."""
    for number in numbers:
        key, data = segment(number)
        buffer = bytearray(len(data))
        if store.read(key, memoryview(buffer)):
            assert buffer == data, "a segment has other data"
            yield number


class Faults:
    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.random = folder, random.Random(seed)
        self.store = SegmentStore(folder, MAX_BYTES)
        self.counts = Counter[str]()

    def numbers(self) -> list[int]:
        start = self.random.randrange(NUMBERS)
        return [n % NUMBERS for n in range(start, start + self.random.randint(1, 60))]

    def read(self, store: SegmentStore) -> None:
        store.refresh()
        numbers = self.numbers()
        self.counts["read"] += len([*read(store, numbers)])
        store.use(segment(number)[0] for number in numbers)

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
                write(store, self.numbers())
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

    def fill_disk(self) -> None:
        """Have the system write a part of a file at most."""
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (self.random.randrange(25_000), hard))
        try:
            with suppress(OSError):
                write(self.store, self.numbers())
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))

    def fail_call(self) -> None:
        """Have a function of the system fail from its next or a later call on."""
        name, number = self.random.choice(
            (("fsync", errno.EIO), ("rename", errno.ENOSPC), ("scandir", errno.EIO))
        )
        real, left = getattr(os, name), self.random.randrange(40)

        def call(*args: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise OSError(number, os.strerror(number))
            return real(*args)

        setattr(os, name, call)
        try:
            with suppress(OSError):
                write(self.store, self.numbers())
        finally:
            setattr(os, name, real)

    def fail_read(self) -> None:
        """Put a folder in place of a file: reading it is an error."""
        if file := self.file():
            file.unlink()
            file.mkdir()
            self.read(self.store)
            file.rmdir()

    def run(self, rounds: int) -> None:
        faults = (
            *[self.kill] * 4, self.flip, self.truncate, self.remove, self.step_clock,
            self.damage_secret, self.fill_disk, *[self.fail_call] * 3, self.fail_read,
        )  # fmt: skip
        for _ in range(rounds):
            fault = self.random.choice(faults)
            fault()
            self.counts[fault.__name__] += 1
            self.read(self.store)
            if not self.random.randrange(4):
                self.store = SegmentStore(self.folder, MAX_BYTES)  # a restart
            self.check_works()
        self.store.write(*segment(0))
        self.store.measure()
        assert self.store.usage.bytes <= MAX_BYTES, self.store.usage

    def check_works(self) -> None:
        """What is written after a fault can be read."""
        number = self.random.randrange(NUMBERS)
        write(self.store, [number])
        assert [*read(self.store, [number])] == [number], "the folder is broken"


if __name__ == "__main__":
    rounds, seed, folder = sys.argv[1:]
    faults = Faults(Path(folder), int(seed))
    faults.run(int(rounds))
    assert "torch" not in sys.modules
    print(dict(faults.counts))
