"""The cache namespace of a request: prefixes and images are shared within one namespace only.

A cache that is shared leaks, by response times, which prompts others have sent. Each API key has a
namespace of its own, and a client's `cache_salt` divides it further. Without API_KEYS all clients
share one.
"""

import hashlib
import secrets
from functools import lru_cache

_SECRET = secrets.token_bytes(32)  # keys cannot be found by trying their digests


@lru_cache(maxsize=1024)
def cache_namespace(model: str, key: bytes, salt: str | None) -> bytes:
    """Return 16 bytes that reveal neither key nor salt."""
    digest = hashlib.blake2b(digest_size=16, key=_SECRET)
    for part in (model.encode(), key, (salt or "").encode()):
        digest.update(len(part).to_bytes(8))
        digest.update(part)
    return digest.digest()
