"""Whose prefix cache a request shares: a shared one tells by its times what others have asked.

Without API_KEYS there is one room for all; a client's salt makes smaller rooms within that of its
key, never larger ones.
"""

import hashlib
import secrets
from functools import lru_cache

_SECRET = secrets.token_bytes(32)  # so that nobody finds a key by its digests


@lru_cache(maxsize=1024)
def cache_namespace(model: str, key: bytes, salt: str | None) -> bytes:
    """16 bytes that say nothing of what they are made of."""
    digest = hashlib.blake2b(digest_size=16, key=_SECRET)
    for part in (model.encode(), key, (salt or "").encode()):
        digest.update(len(part).to_bytes(8))
        digest.update(part)
    return digest.digest()
