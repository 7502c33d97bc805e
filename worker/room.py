"""How much is decoded at the same time: pixels of images, samples of sound.

An image of a few hundred kilobytes may unpack into a gigabyte, and each pool thread decodes one:
together they hold no more than the largest image that is taken may have. Torch-free; what is
decoded, and what it weighs, is for media.py to say.
"""

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager


class Place:
    """One input's share of a room."""

    def __init__(self, room: "Room") -> None:
        self.size = room.size
        self.room = room
        self.held = 0

    def take(self, count: int) -> None:
        """Wait, first come first served, for so much room; call it once, as two that wait for
        each other's would wait forever. What exceeds the room waits until it is alone."""
        assert not self.held
        self.held = self.room.take(min(count, self.size))


class Room:
    def __init__(self, size: int) -> None:
        self.size = size
        self.taken = 0
        self._line: deque[object] = deque()
        self._changed = threading.Condition()

    @contextmanager
    def place(self) -> Iterator[Place]:
        """What the place takes is given back at the end."""
        place = Place(self)
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
            self._changed.wait_for(
                lambda: self._line[0] is ticket and self.taken + count <= self.size
            )
            self._line.popleft()
            self.taken += count
            self._changed.notify_all()
        return count
