"""One HTTP request as its work items, metrics and log lines know it."""

import time
from dataclasses import dataclass

from batching.fair_share import Priority, WorkOwner
from server.core.api_keys import ApiKey


@dataclass(slots=True)
class RequestContext:
    """`client`: whose share of the server the request counts for, an API key or an address.
    `priority`: its class; a submission reads it. `owner`: of all work of a stream of inputs, which
    waits for room in the queue itself.

    A submission adds its model and its tokens when it ends; the error is set by the response. All
    are in the request's line of the log."""

    request_id: str
    client: bytes = b""
    priority: Priority = Priority.INTERACTIVE
    owner: WorkOwner | None = None
    key: ApiKey | None = None
    flow: int = 0  # of the client: requests with a number share its turns
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
    def share(self) -> float:
        return self.key.share if self.key else 1.0

    def use_tokens(self, tokens: int) -> None:
        """Count tokens that the model has run against the key's limit."""
        if tokens and self.key and self.key.tokens:
            self.key.tokens.take(tokens, time.monotonic())
