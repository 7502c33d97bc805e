"""One HTTP request as its work items, metrics and log lines know it."""

import time
from dataclasses import dataclass

from batching.fair_share import WorkOwner
from server.core.api_keys import NO_KEY, ApiKey
from server.core.cache_namespace import cache_namespace


@dataclass(frozen=True, slots=True, eq=False)
class RequestContext(WorkOwner):
    """The owner of all work of a request, and its key. `client`: the key's id, or an address."""

    key: ApiKey = NO_KEY

    def cache_namespace(self, model: str, salt: str | None) -> bytes:
        """Return the namespace of the request's prompts on a model."""
        return cache_namespace(model, self.key.id, salt)

    def use_tokens(self, tokens: int) -> None:
        """Count tokens that the model has run against the key's limit."""
        if tokens and self.key.tokens:
            self.key.tokens.take(tokens, time.monotonic())


@dataclass(slots=True)
class RequestRecord:
    """The course of a request, for its line of the log and for telemetry. A submission adds its
    model and its tokens when it ends; the error is set by the response."""

    request_id: str = ""  # for logs; each line of a batch has its own
    model: str = ""  # its served name
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str = ""
    # Monotonic seconds, 0 where it did not get there: of the first input, the last for the end.
    received_at: float = 0.0
    accepted_at: float = 0.0
    prepared_at: float = 0.0
    started_at: float = 0.0
    first_token_at: float = 0.0
    ended_at: float = 0.0
    per_token_s: float = 0.0  # mean time between two output tokens of a choice

    @property
    def seconds(self) -> float:
        """The time since the request arrived."""
        return time.monotonic() - self.received_at
