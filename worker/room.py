"""How much is decoded at the same time: pixels of images, samples of sound.

An image of a few hundred kilobytes may unpack into a gigabyte, and each pool thread decodes one:
together they hold no more than the largest image that is taken may have. Torch-free; what is
decoded, and what it weighs, is for pipeline/media.py to say.
"""

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from batching.errors import InvalidInput

# What the inputs of a request may take one after another, in rooms.
ROOMS = 16


class Allowance:
    """Of one request, whose inputs share it."""

    def __init__(self) -> None:
        self._spent = 0
        self._lock = threading.Lock()

    def spend(self, count: int, most: int) -> None:
        with self._lock:
            self._spent += count
            if self._spent > most:
                much = f"the inputs have more than {most} pixels or samples in all: send fewer"
                raise InvalidInput(much, "inputs")


class Place:
    """One input's share of a room."""

    def __init__(self, room: "Room", allowance: Allowance | None) -> None:
        self.size = room.size
        self.room = room
        self.allowance = allowance
        self.held = 0

    def take(self, count: int) -> None:
        """Wait, first come first served, for so much room; call it once, as two that wait for
        each other's would wait forever. What exceeds the room waits until it is alone."""
        assert not self.held
        if self.allowance:
            self.allowance.spend(count, ROOMS * self.size)
        self.held = self.room.take(min(count, self.size))


class Room:
    def __init__(self, size: int) -> None:
        self.size = size
        self.taken = 0
        self._line: deque[object] = deque()
        self._changed = threading.Condition()

    @contextmanager
    def place(self, allowance: Allowance | None = None) -> Iterator[Place]:
        """What the place takes is given back at the end."""
        place = Place(self, allowance)
        try:
            yield place
        finally:
            if place.held:
                with self._changed:
                    self.taken -= place.held
                    self._changed.notify_all()

    def take(self, count: int) -> int:
        ticket = object()
        with self._changed:
            self._line.append(ticket)
            try:
                self._changed.wait_for(
                    lambda: self._line[0] is ticket and self.taken + count <= self.size
                )
                self.taken += count
            finally:
                self._line.remove(ticket)
                self._changed.notify_all()
        return count
