"""What is generated or heard for a request comes in parts, kept here until the client reads.

    each step's deltas → an AnswerStream → its reader, at the client's pace

Event loop only. How a request's items are submitted and let go is worker_client.py's.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from starlette.types import Receive

from batching.errors import ClientGone, ItemFailed
from server.core.worker_client import Deadlines, Submission, WorkerClient
from worker.messages.decisions import DecisionInput
from worker.messages.deltas import Delta
from worker.messages.generation import GenerationInput

D = TypeVar("D")


class AnswerStream(Submission, Generic[D]):
    """One request's deltas, of all its items, until these are done."""

    def __init__(
        self,
        worker_client: WorkerClient,
        serves: str,
        payloads: Sequence[Any],
        deadlines: Deadlines,
        receive: Receive | None,
        cache_namespace: bytes = b"",
    ) -> None:
        self.deadlines = deadlines
        self.arrival = asyncio.Event()  # set it to wake the reader
        self.begun = False  # the first deltas have been read
        self.unfinished = 1  # parts of the answer whose end has not been read
        self._unread: list[D] = []
        self._error: BaseException | None = None  # what ends the stream after what is unread
        super().__init__(worker_client, serves, payloads, deadlines, receive, self, cache_namespace)
        self._running = len(self.items)
        for item in self.items:
            item.future.add_done_callback(self._on_done)

    def push(self, delta: D) -> None:
        """What a step gave."""
        self._unread.append(delta)
        self.arrival.set()

    def take(self) -> list[D]:
        """What is unread, if anything."""
        self.unfinished = int(self._running > 0 or self._error is not None)
        deltas, self._unread = self._unread, []
        return deltas

    def begin(self) -> None:
        """The first deltas are there."""
        self.begun = True
        self._expire_at(self.deadlines.whole)

    def ended(self) -> BaseException | None:
        """The worker is done with all items: what is wrong with that, if anything."""
        return None

    async def read(self) -> list[D]:
        """What is new; nothing if woken. Raises whatever ended the request."""
        await self.arrival.wait()
        deltas = self.take()
        if self._error is None:
            self.arrival.clear()
        elif not deltas:
            raise self._error
        if deltas and not self.begun:
            self.begin()
        return deltas

    async def collect(self) -> list[D]:
        """The whole answer, of which nobody looks at the parts."""
        await self.arrival.wait()
        if self._error is None:
            self.begin()
            futures = [item.future for item in self.items]
            await asyncio.wait(futures, return_when=asyncio.FIRST_EXCEPTION)
        deltas = self.take()
        if self.unfinished and self._error:
            raise self._error
        if not self.begun:
            self.begin()
        return deltas

    def _on_done(self, future: "asyncio.Future[None]") -> None:
        """The worker is done with an item: no more deltas will come."""
        self._running -= 1
        if self._error is not None:
            return  # the first failure is the one that counts
        self._error = ClientGone("the server is gone") if future.cancelled() else future.exception()
        if self._error is None and not self._running:
            self._error = self.ended()
        if self._error is not None or not self._running:
            self.arrival.set()


@dataclass(slots=True)
class UsageCounts:
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


class TokenStream(AnswerStream[Delta]):
    """All choices of all a request's prompts, counted in `usage` when they are read.

    What has not been read yet is merged, one delta a choice, so a slow reader costs no more memory
    than its text.
    """

    def __init__(
        self,
        worker_client: WorkerClient,
        name: str,
        payloads: Sequence[GenerationInput | DecisionInput],
        deadlines: Deadlines,
        usage: UsageCounts,
        receive: Receive | None,
        cache_namespace: bytes,
    ) -> None:
        super().__init__(worker_client, name, payloads, deadlines, receive, cache_namespace)
        self.usage = usage
        self.unfinished = sum(payload.n for payload in payloads)  # choices
        self._choices: dict[int, Delta] = {}  # unread

    def push(self, delta: Delta) -> None:
        if (earlier := self._choices.setdefault(delta.choice, delta)) is not delta:
            earlier.merge(delta)
        self.arrival.set()

    def take(self) -> list[Delta]:
        """One delta a choice, in order."""
        deltas = [self._choices[choice] for choice in sorted(self._choices)]
        self._choices = {}
        for delta in deltas:
            self.usage.count(delta)
            self.unfinished -= delta.finish_reason is not None
        return deltas

    def begin(self) -> None:
        super().begin()
        waited_s = time.monotonic() - self.items[0].accepted_at
        self.worker_client.metrics.first_token.observe(waited_s)

    def ended(self) -> BaseException:
        return ItemFailed("the model ended without a finish_reason")
