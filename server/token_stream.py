"""A request's output on its way to the client: filled after each step, read at the client's pace.

Event loop only. What has not been read yet is merged, one delta a choice, so a slow reader
costs no more memory than its text.
"""

import asyncio

from worker.deltas import Delta


class TokenStream:
    """One request's deltas, all choices of all its prompts."""

    def __init__(self) -> None:
        self._unread: dict[int, Delta] = {}
        self._error: BaseException | None = None
        self._arrival = asyncio.Event()

    def push(self, delta: Delta) -> None:
        if (unread := self._unread.get(delta.choice)) is None:
            self._unread[delta.choice] = delta
        else:
            unread.merge(delta)
        self._arrival.set()

    def fail(self, error: BaseException) -> None:
        """End the stream after what is unread."""
        self._error = error
        self._arrival.set()

    def wake(self) -> None:
        """Let the reader look up, though there is nothing new."""
        self._arrival.set()

    async def read(self) -> list[Delta]:
        """Wait for something new: at most one delta a choice, none if woken; raises the failure."""
        await self._arrival.wait()
        if self._error is not None and not self._unread:
            raise self._error
        deltas = list(self._unread.values())
        self._unread = {}
        if self._error is None:
            self._arrival.clear()
        return deltas
