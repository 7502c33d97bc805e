"""The deltas of one request, buffered until its handler reads them.

    step → deltas → DeltaStream.push → DeltaStream.read → handler, at the client's pace
    step → tokens, of which TokenStream.push hears → TokenStream.read: their text

Runs on the event loop only. Submission (worker_client.py) submits and releases the work items.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Self, TypeVar

from batching.errors import ClientGone, ItemFailed, OnequeueError
from server.core.worker_client import Submission
from worker.messages.decisions import DecisionInput
from worker.messages.deltas import MAX_UNREAD, Delta, DeltaSource
from worker.messages.generation import GenerationInput

log = logging.getLogger("onequeue.delta_stream")

D = TypeVar("D")
# Generated text may take this many times the longest time without progress.
MAX_IDLE_TIMES = 10


class DeltaStream(Submission[None], Generic[D]):
    """The deltas of all work items of a request.

    `arrival` is set when there are deltas or an end to read; setting it wakes the reader.
    `unfinished` counts the parts of the response whose end has not been read.
    """

    def __post_init__(self) -> None:
        self.arrival = asyncio.Event()
        self.started = False  # the first deltas have been read
        self.ended_at = 0.0  # monotonic seconds: when the last item did
        self.unfinished = 1
        self._unread: list[D] = []
        self._end: BaseException | None = None  # raised once all deltas are read
        super().__post_init__()
        self._running = len(self.items)
        for item in self.items:
            item.future.add_done_callback(self._on_done)

    def _stream(self) -> Self:
        return self

    def push(self, delta: D) -> None:
        self._unread.append(delta)
        self.arrival.set()

    def take(self) -> list[D]:
        """Return the unread deltas without waiting."""
        self.unfinished = int(self._running > 0 or self._end is not None)
        deltas, self._unread = self._unread, []
        return deltas

    def start(self) -> None:
        """Record that the first deltas have been read."""
        self.started = True

    def _end_limit(self) -> float:
        """Return the time limit of the whole response."""
        return self.incoming.deadlines.whole

    def _expire(self) -> None:
        """Extend the time limit by the progress of the request since it was set."""
        progress_at = max(item.progress_at for item in self.items)
        limit = min(progress_at + self.incoming.deadlines.idle_s, self._end_limit())
        if progress_at and limit > self._limit:
            self._expire_at(limit)
        else:
            super()._expire()

    def failure_at_end(self) -> BaseException | None:
        """Return an error if the work items have ended without a complete response."""
        return None

    def timing_headers(self) -> list[tuple[bytes, bytes]]:
        """Return the time per stage: until the prompts were prepared, until the first one started,
        and until now. Empty if none has started."""
        self._record_times()
        return [self.record.timing_header(time.monotonic())] if self.record.started_at else []

    async def read(self) -> list[D]:
        """Wait for deltas; none if `arrival` was set for another reason.

        Raises the error that ended the request.
        """
        await self.arrival.wait()
        deltas = self.take()
        if self._end is None:
            self.arrival.clear()
        elif self.unfinished and not deltas:
            raise self._end
        if deltas and not self.started:
            self.start()
        return deltas

    async def collect(self) -> list[D]:
        """Wait for the whole response; return all deltas. Raises the error that ended it."""
        await self.arrival.wait()
        if self._end is None:
            self.start()
            futures = [item.future for item in self.items]
            await asyncio.wait(futures, return_when=asyncio.FIRST_EXCEPTION)
        deltas = self.take()
        if self.unfinished and self._end:
            raise self._end
        if not self.started:
            self.start()
        return deltas

    def _on_done(self, future: "asyncio.Future[None]") -> None:
        """Count a work item that has ended; the first failure of an item ends the stream."""
        self._running -= 1
        self.ended_at = time.monotonic()
        if self._end is not None:
            return
        self._end = ClientGone("the server is gone") if future.cancelled() else future.exception()
        if self._end is None and not self._running:
            self._end = self.failure_at_end()
        if self._end is not None or not self._running:
            self.arrival.set()


@dataclass(slots=True)
class UsageCounts:
    """Tokens of all choices so far. `reasoning` tokens are part of the completion's."""

    prompt: int = 0
    cached: int = 0
    completion: int = 0
    reasoning: int = 0
    audio: int = 0  # of the prompt

    def count(self, delta: Delta) -> None:
        self.prompt += delta.prompt_tokens
        self.cached += delta.cached_tokens
        self.audio += delta.audio_tokens
        self.completion += delta.tokens
        self.reasoning += delta.reasoning_tokens


class TokenStream(DeltaStream[Delta]):
    """The choices of all prompts of a request; `usage` counts the tokens that have been read.

    A choice's text is written when it is read, or for a slow reader at MAX_UNREAD tokens, so that
    this takes no more memory than its text.
    """

    payloads: Sequence[GenerationInput | DecisionInput]

    def __post_init__(self) -> None:
        super().__post_init__()
        self.usage = UsageCounts()
        self._num_choices = self.unfinished = sum(payload.n for payload in self.payloads)
        self._sources: dict[int, DeltaSource] = {}  # choices with unread tokens
        self._choices: dict[int, Delta] = {}  # their text, as far as it is written
        self._ended: set[int] = set()  # choices
        self._is_read = False  # part by part

    def push(self, source: DeltaSource) -> None:  # type: ignore[override]  # in place of deltas
        """Record that a choice has unread tokens, or has ended."""
        if source.finished:
            self._ended.add(source.choice)
        if source.unread:
            self._sources[source.choice] = source
        elif len(self._ended) < self._num_choices:
            return  # read meanwhile: a reader with nothing to read would send a comment
        if source.unread >= MAX_UNREAD:
            self._write([source.choice])
        if self._is_read and self.started and not source.finished:
            self.worker_client.wake_reader(self._wake)
        else:
            self.arrival.set()

    def _wake(self) -> None:
        if self._sources or self._choices:  # else the end of another choice has woken the reader
            self.arrival.set()

    def _write(self, choices: Sequence[int]) -> None:
        """Write the text of choices' unread tokens. A failure ends the request."""
        for choice in choices:
            try:
                delta = self._sources.pop(choice).take_delta()
            except OnequeueError as error:
                cause = error.__cause__ or error
                log.warning("generation failed id=%s error=%.200r", self.context.request_id, cause)
                self._end = error
                self._ended.discard(choice)
                self._fail(error)
                self.arrival.set()
                return
            self.context.use_tokens(delta.prompt_tokens + delta.tokens)
            if (written := self._choices.setdefault(choice, delta)) is not delta:
                written.merge(delta)

    async def read(self) -> list[Delta]:
        if not self._is_read:
            self._is_read = True
            self.worker_client.readers += 1
        return await super().read()

    def take(self) -> list[Delta]:
        """Return one delta per choice, in order."""
        self._write([*self._sources])
        self.unfinished = self._num_choices - len(self._ended)
        deltas = [self._choices[choice] for choice in sorted(self._choices)]
        self._choices = {}
        for delta in deltas:
            self.usage.count(delta)
        return deltas

    def start(self) -> None:
        super().start()
        self._started_at = time.monotonic()
        waited_s = self._started_at - self.items[0].accepted_at
        self.worker_client.metrics.first_token.labels(self.record.model).observe(waited_s)
        self.record.first_token_at = self._started_at

    def close(self) -> None:
        self._write([*self._sources])  # counts all tokens against the limit of the key
        self.worker_client.readers -= self._is_read
        if not self.unfinished:  # all was read, maybe before the step that ended the items was over
            self.ended_at = self.ended_at or time.monotonic()
        if self.started and self.ended_at and self.usage.completion > self._num_choices:
            tokens = self.usage.completion / self._num_choices
            per_token_s = (self.ended_at - self._started_at) / (tokens - 1)
            self.worker_client.metrics.per_token.labels(self.record.model).observe(per_token_s)
            self.record.per_token_s = per_token_s
        super().close()

    def _record_tokens(self) -> None:
        self.record.prompt_tokens += self.usage.prompt
        self.record.output_tokens += self.usage.completion
        self.record.ended_at = self.ended_at

    def _end_limit(self) -> float:
        idle_s = self.incoming.deadlines.idle_s
        return min(super()._end_limit(), self.items[0].accepted_at + MAX_IDLE_TIMES * idle_s)

    def failure_at_end(self) -> BaseException:
        return ItemFailed("the model ended without a finish_reason")
