"""Whose prefix cache a request shares: a shared one tells by its times what others have asked.

    model, adapter, API key, cache_salt → the root of its chains of blocks (batching/block_pool.py)

Without API_KEYS there is one room for all. A client's salt makes smaller rooms within that of its
key, never larger ones.
"""

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

from starlette.types import Scope

P = TypeVar("P", bound=Any)  # a payload, which has a `cache_root`

_SECRET = secrets.token_bytes(32)  # so that nobody finds a key by its digests


def cache_root(model: str, adapter: str, key: bytes, salt: str) -> bytes:
    """16 bytes that say nothing of what they are made of."""
    digest = hashlib.blake2b(digest_size=16, key=_SECRET)
    for part in (model.encode(), adapter.encode(), key, salt.encode()):
        digest.update(len(part).to_bytes(8))
        digest.update(part)
    return digest.digest()


def rooted(payloads: Sequence[P], scope: Scope, model: str, salt: str | None) -> list[P]:
    """Those of a request, which share their prefixes from here on."""
    root = cache_root(model, "", scope["api_key"], salt or "")
    return [replace(each, cache_root=root) for each in payloads]
