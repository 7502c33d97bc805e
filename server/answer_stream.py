"""A request's answer on its way to the client: filled after each step, read at the client's pace.

    submit → first delta, or the refusal → more deltas → the items are done

Event loop only. Keeps the time limits, and ends the work when nobody waits for it. What is
generated and what is heard come by a stream of their own kind: token_stream.py and
openai/audio/transcript_stream.py.
"""

import asyncio
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from batching.errors import ClientGone
from server.engine import Engine
from server.http.request import Deadlines, expire

D = TypeVar("D")


class AnswerStream(ABC, Generic[D]):
    """One request's deltas, of all its items.

    Submits the request to the model of a name in the registry, or raises a Refused. `close` it in
    the end, however it ends.
    """

    def __init__(
        self, engine: Engine, serves: str, payloads: Sequence[Any], deadlines: Deadlines
    ) -> None:
        self.engine = engine
        self.deadlines = deadlines
        self._error: BaseException | None = None  # what ends the stream after what is unread
        self.arrival = asyncio.Event()  # set it to wake the reader
        self._timer: asyncio.TimerHandle | None = None
        self._begun = False
        self.items = engine.submit(serves, payloads, deadlines.first, self)
        self._running = len(self.items)
        self._expire_at(min(deadlines.first, deadlines.whole))
        for item in self.items:
            item.future.add_done_callback(self._on_done)

    @abstractmethod
    def push(self, delta: D) -> None:
        """What a step gave; sets `arrival`."""

    @abstractmethod
    def take(self) -> list[D]:
        """What is unread, if anything."""

    @abstractmethod
    def ended(self) -> BaseException | None:
        """The worker is done with all items: what is wrong with that, if anything."""

    async def read(self) -> list[D]:
        """What is new; nothing if woken. Raises whatever ended the request."""
        await self.arrival.wait()
        deltas = self.take()
        if self._error is not None:
            if not deltas:
                raise self._error
        else:
            self.arrival.clear()
        if deltas and not self._begun:
            self._begun = True
            self._expire_at(self.deadlines.whole)
            self.begun()
        return deltas

    def begun(self) -> None:
        """The first deltas are being read."""

    def close(self) -> None:
        """Give the places back; what still runs is aborted."""
        self._expire_at(math.inf)
        self.engine.queue.forget(self.items)

    def _expire_at(self, deadline: float) -> None:
        """From now on this is the time limit."""
        if self._timer:
            self._timer.cancel()
        if deadline < math.inf:
            left_s = deadline - time.monotonic()
            self._timer = self.engine.loop.call_later(left_s, expire, self.items)

    def _on_done(self, future: "asyncio.Future[None]") -> None:
        """The worker is done with an item: no more deltas will come."""
        self._running -= 1
        if self._error is not None:
            return  # the first failure is the one that counts
        self._error = ClientGone("the server is gone") if future.cancelled() else future.exception()
        if self._error is None and not self._running:
            self._error = self.ended()
        if self._error is not None:
            self.arrival.set()
