"""Bounds on the bytes that requests hold while clients send them or read them.

    body, upload or response → Transfer → TransferBudget, until the response has been sent

While a budget is short, the transfers with the lowest rates end: a body with 408, a response by
closing its connection. With room, a slow client is left alone.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from batching.errors import QueueFull

T = TypeVar("T")


class Transfer:
    """The bytes that a request holds, and those moved while the server waited for the client."""

    def __init__(self) -> None:
        self.held = 0
        self.ended = False
        self.may_stall = False  # the response may wait unread: the client still sends
        self.on_lost: Callable[[], None] | None = None  # called when the connection is lost
        self.restart()

    def restart(self) -> None:
        """Measure the rate from now on: the response follows the body."""
        self.moved = 0
        self._waited_s = 0.0
        self._timeout: asyncio.Timeout | None = None  # while the server waits

    async def wait(self, step: Awaitable[T], timeout_s: float | None = None) -> T:
        """Wait for the client. Raises TimeoutError after `timeout_s`, and when the transfer is
        ended because its budget is short."""
        started = time.monotonic()
        self._waited_s -= started  # plus the time at which the rate is asked for
        try:
            async with asyncio.timeout(timeout_s) as self._timeout:
                result = await step
        finally:
            self._timeout = None
            self._waited_s += time.monotonic()
        if self.ended:
            raise TimeoutError
        return result

    @property
    def is_waiting(self) -> bool:
        return self._timeout is not None

    @property
    def rate(self) -> float:
        """Bytes per second of waiting; the server waits now."""
        return self.moved / max(self._waited_s + time.monotonic(), 1e-6)

    def end(self) -> None:
        """Let `wait` raise TimeoutError."""
        self.ended = True
        assert self._timeout is not None
        self._timeout.reschedule(asyncio.get_running_loop().time())


class TransferBudget:
    """At most `limit` bytes of all transfers; `used` by those that hold some."""

    def __init__(self, limit: int, message: str) -> None:
        self.limit = limit
        self.used = 0
        self._message = message
        self._transfers: set[Transfer] = set()

    def take(self, transfer: Transfer, size: int) -> None:
        """Count bytes that a request is about to hold. QueueFull if there is no room for them, also
        without the transfers for which the server waits."""
        if size and self.used + size > self.limit:
            self._make_room(size)
        self._add(transfer, size)

    def hold(self, transfer: Transfer, size: int) -> None:
        """Count a response of a size, if the transfer holds less. It exists already: others may
        have to make room, and the limit may be exceeded by it."""
        if (missing := size - transfer.held) > 0:
            with contextlib.suppress(QueueFull):
                self._make_room(missing)
            self._add(transfer, missing)

    def give_back(self, transfer: Transfer, size: int) -> None:
        """Count bytes that a request holds no more."""
        size = min(size, transfer.held)  # none, if the transfer was ended
        self.used -= size
        transfer.held -= size

    def release(self, transfer: Transfer) -> None:
        self.used -= transfer.held
        transfer.held = 0
        self._transfers.discard(transfer)

    def _add(self, transfer: Transfer, size: int) -> None:
        self.used += size
        transfer.held += size
        self._transfers.add(transfer)

    def _make_room(self, size: int) -> None:
        """End the slowest transfers. QueueFull, and none is ended, if that is not enough."""
        missing = self.used + size - self.limit
        waiting = [transfer for transfer in self._transfers if transfer.is_waiting]
        if sum(transfer.held for transfer in waiting) < missing:
            raise QueueFull(self._message)
        waiting.sort(key=lambda transfer: transfer.rate)
        for transfer in waiting:
            if missing <= 0:
                break
            missing -= transfer.held
            self.release(transfer)
            transfer.end()
