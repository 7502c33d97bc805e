"""A request's work items: submitted, awaited or streamed, and let go whatever becomes of them.

    submit, or the refusal → the items' answers, or deltas as they come → their places are free

Event loop only. What is answered at once comes by the items' futures. What is generated or heard
comes in parts, after each step: an AnswerStream keeps them until the client reads.
"""

import asyncio
import hashlib
import math
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Self, TypeVar

from starlette.types import Receive, Scope

from batching.errors import ClientGone, DeadlineExceeded, ItemFailed
from batching.request_queue import Stream
from server.engine import Engine, fail
from server.http.json import Header
from server.http.request import Deadlines
from worker.decisions import DecisionInput
from worker.deltas import Delta
from worker.generation_input import GenerationInput

D = TypeVar("D")
P = TypeVar("P", bound=Any)  # a payload, which has a `cache_root`

_SECRET = secrets.token_bytes(32)  # so that nobody finds a key by its digests


def rooted(payloads: Sequence[P], scope: Scope, model: str, salt: str | None) -> list[P]:
    """A request's payloads, which share their prefixes from here on."""
    root = cache_root(model, scope["api_key"], salt or "")
    return [replace(each, cache_root=root) for each in payloads]


def cache_root(model: str, key: bytes, salt: str) -> bytes:
    """Whose prefix cache a request shares: a shared one tells by its times what others have asked.

    16 bytes that say nothing of what they are made of. Without API_KEYS there is one room for all;
    a client's salt makes smaller rooms within that of its key, never larger ones."""
    digest = hashlib.blake2b(digest_size=16, key=_SECRET)
    for part in (model.encode(), key, salt.encode()):
        digest.update(len(part).to_bytes(8))
        digest.update(part)
    return digest.digest()


class Submission:
    """Work items for the model of that name in the registry, which keep their places as long as
    the block lasts. Their futures get the answers, DeadlineExceeded, or ClientGone if the client
    leaves.

    Raises a Refused if they are not accepted. Without `receive` no client waits for them."""

    def __init__(
        self,
        engine: Engine,
        serves: str,
        payloads: Sequence[Any],
        deadlines: Deadlines,
        receive: Receive | None,
        stream: Stream | None = None,
    ) -> None:
        self.engine = engine
        self._timer: asyncio.TimerHandle | None = None
        self.items = engine.submit(serves, payloads, deadlines.first, stream)
        self._expire_at(min(deadlines.first, deadlines.whole))
        if receive:
            engine.loop.create_task(self._abort_on_disconnect(receive))  # receive() holds it

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Give the places back; what still runs is aborted."""
        self._expire_at(math.inf)
        self.engine.queue.forget(self.items)

    async def answers(self) -> list[Any]:
        """Of all items, in order; raises the first error there is."""
        return [await item.future for item in self.items]

    def timing_headers(self) -> list[Header]:
        """Where the time went, in milliseconds; of several items, the one that took longest."""
        items = self.items
        item = items[0] if len(items) == 1 else max(items, key=lambda item: item.finished_at)
        timing = b"queue;dur=%.2f, batch;dur=%.2f, model;dur=%.2f" % (
            (item.arrived_at - item.accepted_at) * 1e3,
            (item.started_at - item.arrived_at) * 1e3,
            (item.finished_at - item.started_at) * 1e3,
        )
        return [(b"server-timing", timing), (b"x-batch-size", b"%d" % item.batch_size)]

    def _expire_at(self, deadline: float) -> None:
        """From now on this is the time limit."""
        if self._timer:
            self._timer.cancel()
        if deadline < math.inf:
            left_s = deadline - time.monotonic()
            self._timer = self.engine.loop.call_later(left_s, self._expire)

    def _expire(self) -> None:
        late = "the request did not finish within its time limit"
        fail(self.items, DeadlineExceeded(late))

    async def _abort_on_disconnect(self, receive: Receive) -> None:
        """After the answer, when that is reported too, this does nothing."""
        while (await receive())["type"] != "http.disconnect":
            pass
        fail(self.items, ClientGone("the client has gone"))


class AnswerStream(Submission, Generic[D]):
    """One request's deltas, of all its items, until these are done."""

    def __init__(
        self,
        engine: Engine,
        serves: str,
        payloads: Sequence[Any],
        deadlines: Deadlines,
        receive: Receive | None,
    ) -> None:
        self.deadlines = deadlines
        self.arrival = asyncio.Event()  # set it to wake the reader
        self.begun = False  # the first deltas have been read
        self.unfinished = 1  # parts of the answer whose end has not been read
        self._unread: list[D] = []
        self._error: BaseException | None = None  # what ends the stream after what is unread
        super().__init__(engine, serves, payloads, deadlines, receive, self)
        self._running = len(self.items)
        for item in self.items:
            item.future.add_done_callback(self._on_done)

    def push(self, delta: D) -> None:
        """What a step gave."""
        self._unread.append(delta)
        self.arrival.set()

    def take(self) -> list[D]:
        """What is unread, if anything."""
        self.unfinished = int(self._running > 0)
        deltas, self._unread = self._unread, []
        return deltas

    def ended(self) -> BaseException | None:
        """The worker is done with all items: what is wrong with that, if anything."""
        return None

    def merged(self, deltas: list[D]) -> list[D]:
        """All that were read, as an answer at once has them."""
        return deltas

    async def read(self) -> list[D]:
        """What is new; nothing if woken. Raises whatever ended the request."""
        await self.arrival.wait()
        deltas = self.take()
        if self._error is None:
            self.arrival.clear()
        elif not deltas:
            raise self._error
        if deltas and not self.begun:
            self.begun = True
            self._expire_at(self.deadlines.whole)
        return deltas

    async def collect(self) -> list[D]:
        """The whole answer."""
        whole: list[D] = []
        while self.unfinished:
            whole += await self.read()
            if self.unfinished:  # the rest is kept here; nobody looks at it step by step
                futures = [item.future for item in self.items]
                await asyncio.wait(futures, return_when=asyncio.FIRST_EXCEPTION)
        return self.merged(whole)

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


class TokenStream(AnswerStream[Delta]):
    """All choices of all a request's prompts, counted in `usage` when they are read.

    What has not been read yet is merged, one delta a choice, so a slow reader costs no more memory
    than its text.
    """

    def __init__(
        self,
        engine: Engine,
        name: str,
        payloads: Sequence[GenerationInput | DecisionInput],
        deadlines: Deadlines,
        usage: Usage,
        receive: Receive | None,
    ) -> None:
        super().__init__(engine, name, payloads, deadlines, receive)
        self.usage = usage
        self.unfinished = sum(payload.n for payload in payloads)  # choices
        self._choices: dict[int, Delta] = {}  # unread

    def push(self, delta: Delta) -> None:
        merge(self._choices, delta)
        self.arrival.set()

    def take(self) -> list[Delta]:
        """One delta a choice."""
        if self._choices and not self.begun:
            waited_s = time.monotonic() - self.items[0].accepted_at
            self.engine.metrics.first_token.observe(waited_s)
        deltas = list(self._choices.values())
        self._choices = {}
        for delta in deltas:
            self.usage.count(delta)
            self.unfinished -= delta.finish_reason is not None
        return deltas

    def ended(self) -> BaseException:
        return ItemFailed("the model ended without a finish_reason")

    def merged(self, deltas: list[Delta]) -> list[Delta]:
        """One delta a choice, in order."""
        whole: dict[int, Delta] = {}
        for delta in deltas:
            merge(whole, delta)
        return [whole[choice] for choice in sorted(whole)]


def merge(choices: dict[int, Delta], delta: Delta) -> None:
    if (earlier := choices.setdefault(delta.choice, delta)) is not delta:
        earlier.merge(delta)
