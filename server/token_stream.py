"""What a request has generated, on its way to the client: tokens and choices, merged and counted.

    submit → first delta, or the refusal → more deltas → every choice has its finish_reason

Of answer_stream.py's kind, which keeps the time limits.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from batching.errors import ItemFailed
from server.answer_stream import AnswerStream
from server.engine import Engine
from server.http.request import Deadlines
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


class TokenStream(AnswerStream[Delta]):
    """One request's deltas, all choices of all its prompts, counted in `usage` when they are read.

    What has not been read yet is merged, one delta a choice, so a slow reader costs no more memory
    than its text.
    """

    def __init__(
        self,
        engine: Engine,
        payloads: Sequence[GenerationInput | DecisionInput],
        deadlines: Deadlines,
        usage: Usage,
    ) -> None:
        self.usage = usage
        self.unfinished = sum(payload.n for payload in payloads)  # choices
        self._unread: dict[int, Delta] = {}
        super().__init__(engine, "generation", payloads, deadlines)

    def push(self, delta: Delta) -> None:
        merge(self._unread, delta)
        self.arrival.set()

    def take(self) -> list[Delta]:
        """One delta a choice."""
        deltas = list(self._unread.values())
        self._unread = {}
        for delta in deltas:
            self.usage.count(delta)
            self.unfinished -= delta.finish_reason is not None
        return deltas

    def begun(self) -> None:
        self.engine.metrics.first_token.observe(time.monotonic() - self.items[0].accepted_at)

    def ended(self) -> BaseException:
        return ItemFailed("the model ended without a finish_reason")

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


def merge(choices: dict[int, Delta], delta: Delta) -> None:
    if (earlier := choices.setdefault(delta.choice, delta)) is not delta:
        earlier.merge(delta)
