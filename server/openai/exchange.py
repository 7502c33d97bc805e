"""One generation request between submission and its last delta.

    submit → first delta (or 4xx/5xx) → more deltas → every choice has its finish_reason

Keeps the time limits, counts tokens and choices, and ends the work when nobody waits for it. What
an answer looks like is not known here (see reply.py), nor how it is sent (see http/sse.py).
"""

import asyncio
import math
import time
from dataclasses import dataclass

from batching.errors import ClientGone, ItemFailed
from server.engine import Engine
from server.http.body import Deadlines
from server.metrics import Metrics
from server.token_stream import TokenStream
from worker.deltas import Delta
from worker.protocol import GenerationInput


@dataclass(slots=True)
class Usage:
    """Tokens so far, of all choices."""

    prompt: int = 0
    cached: int = 0
    completion: int = 0
    reasoning: int = 0  # of the completion


class RunningRequest:
    """Submits, or raises a Refused. `close` it in the end, however it ends."""

    def __init__(
        self,
        engine: Engine,
        metrics: Metrics,
        payloads: list[GenerationInput],
        deadlines: Deadlines,
    ) -> None:
        self.engine = engine
        self.metrics = metrics
        self.deadlines = deadlines
        self.stream = TokenStream()
        self.unfinished = sum(payload.n for payload in payloads)
        self.usage = Usage()
        self.begun = False
        self.items = engine.submit("generation", payloads, deadlines.first, self.stream)
        self._running = len(self.items)
        self._failed = False
        self._timer = self._expire_at(min(deadlines.first, deadlines.whole))
        for item in self.items:
            item.future.add_done_callback(self._on_done)

    async def read(self) -> list[Delta]:
        """What is new, one delta a choice; none if woken. Raises whatever ended the request."""
        deltas = await self.stream.read()
        if deltas and not self.begun:
            self._begin()
        for delta in deltas:
            self.usage.prompt += delta.prompt_tokens
            self.usage.cached += delta.cached_tokens
            self.usage.completion += delta.tokens
            self.usage.reasoning += delta.reasoning_tokens
            if delta.finish_reason is not None:
                self.unfinished -= 1
        return deltas

    async def collect(self) -> list[Delta]:
        """The whole answer, one delta a choice, in order."""
        whole: dict[int, Delta] = {}
        while self.unfinished:
            for delta in await self.read():
                if delta.choice in whole:
                    whole[delta.choice].merge(delta)
                else:
                    whole[delta.choice] = delta
            if self.unfinished:  # the stream merges the rest; nobody looks at it step by step
                futures = [item.future for item in self.items]
                await asyncio.wait(futures, return_when=asyncio.FIRST_EXCEPTION)
        return [whole[choice] for choice in sorted(whole)]

    def close(self) -> None:
        """Give the places back; what still runs is aborted."""
        self._stop_timer()
        self.engine.queue.forget(self.items)

    def _begin(self) -> None:
        self.begun = True
        self.metrics.first_token.observe(time.monotonic() - self.items[0].accepted_at)
        self._stop_timer()
        self._timer = self._expire_at(self.deadlines.whole)

    def _expire_at(self, deadline: float) -> asyncio.TimerHandle | None:
        if deadline == math.inf:
            return None
        left_s = deadline - time.monotonic()
        return self.engine.loop.call_later(left_s, self.engine.expire, self.items)

    def _stop_timer(self) -> None:
        if self._timer:
            self._timer.cancel()

    def _on_done(self, future: "asyncio.Future[None]") -> None:
        """The worker is done with an item: what has not been said by now never will be."""
        error = ClientGone("the server is gone") if future.cancelled() else future.exception()
        self._running -= 1
        if self._failed:
            return  # the first failure is the one that is told
        if error is not None:
            self._failed = True
            self.stream.fail(error)
        elif not self._running:
            self.stream.fail(ItemFailed("the model ended without a finish_reason"))
