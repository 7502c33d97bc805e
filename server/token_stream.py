"""A request's output on its way to the client: filled after each step, read at the client's pace.

    submit → first delta, or the refusal → more deltas → every choice has its finish_reason

Event loop only. Keeps the time limits, counts tokens and choices, and ends the work when nobody
waits for it. What has not been read yet is merged, one delta a choice, so a slow reader costs no
more memory than its text.
"""

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from batching.errors import ClientGone, ItemFailed
from server.engine import Engine
from server.http.request import Deadlines, expire
from worker.decisions import DecisionInput
from worker.deltas import Delta
from worker.protocol import GenerationInput


@dataclass(slots=True)
class Usage:
    """Tokens so far, of all choices."""

    prompt: int = 0
    cached: int = 0
    completion: int = 0
    reasoning: int = 0  # of the completion

    def count(self, delta: Delta) -> None:
        self.prompt += delta.prompt_tokens
        self.cached += delta.cached_tokens
        self.completion += delta.tokens
        self.reasoning += delta.reasoning_tokens


@dataclass(eq=False)
class TokenStream:
    """One request's deltas, all choices of all its prompts, counted in `usage` when they are read.

    Submits the request, or raises a Refused. `close` it in the end, however it ends.
    """

    engine: Engine
    payloads: Sequence[GenerationInput | DecisionInput]
    deadlines: Deadlines
    usage: Usage

    def __post_init__(self) -> None:
        self.unfinished = sum(payload.n for payload in self.payloads)  # choices
        self._unread: dict[int, Delta] = {}
        self._error: BaseException | None = None  # what ends the stream after what is unread
        self.arrival = asyncio.Event()  # set it to wake the reader
        self._timer: asyncio.TimerHandle | None = None
        self._begun = False
        first = self.deadlines.first
        self.items = self.engine.submit("generation", self.payloads, first, self)
        self._running = len(self.items)
        self._expire_at(min(first, self.deadlines.whole))
        for item in self.items:
            item.future.add_done_callback(self._on_done)

    def push(self, delta: Delta) -> None:
        merge(self._unread, delta)
        self.arrival.set()

    async def read(self) -> list[Delta]:
        """What is new, one delta a choice; none if woken. Raises whatever ended the request."""
        await self.arrival.wait()
        if self._error is not None and not self._unread:
            raise self._error
        deltas = list(self._unread.values())
        self._unread = {}
        if self._error is None:
            self.arrival.clear()
        if deltas and not self._begun:
            self._begun = True
            self.engine.metrics.first_token.observe(time.monotonic() - self.items[0].accepted_at)
            self._expire_at(self.deadlines.whole)
        for delta in deltas:
            self.usage.count(delta)
            self.unfinished -= delta.finish_reason is not None
        return deltas

    async def collect(self) -> list[Delta]:
        """The whole answer, one delta a choice, in order."""
        whole: dict[int, Delta] = {}
        while self.unfinished:
            for delta in await self.read():
                merge(whole, delta)
            if self.unfinished:  # the stream merges the rest; nobody looks at it step by step
                futures = [item.future for item in self.items]
                await asyncio.wait(futures, return_when=asyncio.FIRST_EXCEPTION)
        return [whole[choice] for choice in sorted(whole)]

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
            self._error = ItemFailed("the model ended without a finish_reason")
        if self._error is not None:
            self.arrival.set()


def merge(choices: dict[int, Delta], delta: Delta) -> None:
    if (earlier := choices.setdefault(delta.choice, delta)) is not delta:
        earlier.merge(delta)
