"""What the answer to a generation request looks like, streamed or whole.

A Reply makes JSON documents of deltas; `Usage` comes from the exchange. Sending is done by
generation.py.
"""

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import orjson

from server.openai.exchange import Usage
from server.openai.params import GenerationRequest
from worker.deltas import Delta, TokenLogprob
from worker.protocol import GenerationInput

LEAST_LOGPROB = -9999.0  # JSON has no minus infinity

Document = dict[str, Any]
CallId = Callable[[str, int], str]  # for a call of this function, its conversation's n-th


class Reply(ABC):
    """One request's answer. `payloads` are what it asks the model for."""

    id_prefix: str
    whole_object: str
    chunk_object: str

    def __init__(
        self, request: GenerationRequest, payloads: list[GenerationInput], model: str
    ) -> None:
        self.payloads = payloads
        self.streams = bool(request.stream)
        options = request.stream_options
        self.includes_usage = bool(options and options.include_usage)
        self.continuous_usage = bool(options and options.continuous_usage_stats)
        self.head: Document = {
            "id": self.id_prefix + secrets.token_hex(12),
            "object": self.chunk_object if self.streams else self.whole_object,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": None,
        }
        self.unsent: dict[int, list[TokenLogprob]] = {}  # of text that is still to come

    @abstractmethod
    def opening(self) -> Iterator[Document]:
        """Choices, one a chunk, that come before the first delta."""

    @abstractmethod
    def choices(self, delta: Delta, logprobs: list[TokenLogprob]) -> Iterator[Document]:
        """Choices, one a chunk, that say what a delta adds."""

    @abstractmethod
    def choice(self, delta: Delta) -> Document:
        """A choice as a whole."""

    def first_chunks(self, usage: Usage) -> Iterator[bytes]:
        for choice in self.opening():
            yield self._chunk([choice], usage)

    def chunks(self, delta: Delta, usage: Usage) -> Iterator[bytes]:
        """None as long as there is no text to show; log-probabilities wait for theirs."""
        logprobs = delta.logprobs
        if not delta.parts and delta.finish_reason is None:
            if logprobs:
                self.unsent.setdefault(delta.choice, []).extend(logprobs)
            return
        if self.unsent:
            logprobs = self.unsent.pop(delta.choice, []) + logprobs
        for choice in self.choices(delta, logprobs):
            yield self._chunk([choice], usage)

    def last_chunk(self, usage: Usage) -> bytes:
        return orjson.dumps(self.head | {"choices": [], "usage": usage_of(usage)})

    def whole(self, deltas: list[Delta], usage: Usage) -> bytes:
        choices = [self.choice(delta) for delta in deltas]
        return orjson.dumps(self.head | {"choices": choices, "usage": usage_of(usage)})

    def _chunk(self, choices: list[Document], usage: Usage) -> bytes:
        chunk = self.head | {"choices": choices}
        if self.includes_usage:
            chunk["usage"] = usage_of(usage) if self.continuous_usage else None
        return orjson.dumps(chunk)


def usage_of(usage: Usage) -> Document:
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning},
    }


def finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, LEAST_LOGPROB)
