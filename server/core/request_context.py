"""One HTTP request as its work items, metrics and log lines know it."""

import hashlib
import secrets
import time
from dataclasses import dataclass
from functools import lru_cache

from batching.fair_share import WorkOwner
from server.core.api_keys import NO_KEY, ApiKey

# Keys cannot be found by trying digests. Of the process, or of KV_CACHE_DIR, which outlives it.
SECRET = bytearray(secrets.token_bytes(32))


@dataclass(frozen=True, slots=True, eq=False)
class RequestContext(WorkOwner):
    """The owner of all work of a request, and its key. `client`: the key's id, or an address."""

    key: ApiKey = NO_KEY

    def cache_namespace(self, model: str, salt: str | None) -> bytes:
        """Return the namespace of the request's prompts on a model: cached prefixes and images are
        shared within it only.

        A cache that is shared leaks, by response times, which prompts others have sent. Each API
        key has a namespace of its own, and a client's `cache_salt` divides it further. Without
        API_KEYS all clients share one."""
        return _digest(model, self.key.id, salt)

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
    status: int = 0  # of the response; of a stream that is refused after its start, the refusal's
    error: str = ""
    # Monotonic seconds, 0 where it did not get there: of the first input, the last for the end.
    received_at: float = 0.0
    accepted_at: float = 0.0
    prepared_at: float = 0.0
    started_at: float = 0.0
    read_s: float = 0.0  # of the time before it, for a prefix to be read from disk
    first_token_at: float = 0.0
    ended_at: float = 0.0
    per_token_s: float = 0.0  # mean time between two output tokens of a choice

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.received_at

    def timing_header(self, until: float) -> tuple[bytes, bytes]:
        """Return the header with the milliseconds per stage. The last stage lasts until `until`."""
        read = b", read;dur=%.2f" % (self.read_s * 1e3) if self.read_s else b""
        timing = b"queue;dur=%.2f, batch;dur=%.2f, model;dur=%.2f" % (
            (self.prepared_at - self.accepted_at) * 1e3,
            (self.started_at - self.prepared_at) * 1e3,
            (until - self.started_at) * 1e3,
        )
        return b"server-timing", timing + read


@lru_cache(maxsize=1024)
def _digest(model: str, key: bytes, salt: str | None) -> bytes:
    """Return 16 bytes that reveal neither key nor salt."""
    digest = hashlib.blake2b(digest_size=16, key=SECRET)
    for part in (model.encode(), key, (salt or "").encode()):
        digest.update(len(part).to_bytes(8))
        digest.update(part)
    return digest.digest()
