"""API keys: those of the settings, and those of API_KEYS_FILE with their rights and limits.

The file has the SHA-256 of each key. Keys are random, so that a slow hash would protect them no
better, and a key is found by its digest in constant time. A change of the file takes effect at the
next reload; an invalid file changes nothing.
"""

import hashlib
import logging
import re
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from batching.fair_share import Priority
from batching.token_bucket import ParallelLimit, TokenBucket
from server.core.settings import Settings, SettingsError, read_toml

log = logging.getLogger("onequeue.api_keys")

NAME = re.compile(r"[\w.@-]{1,64}", re.ASCII)
MAX_REASON = 200  # characters of the error about a table
Limit = Annotated[int, Meta(ge=1, le=10**12)]
PRIORITIES = {priority.name.lower(): priority for priority in Priority}
# Ids of the file's keys start with a character that no key of a setting has.
FILE_PREFIX = b"\0"


class KeyTable(Struct, forbid_unknown_fields=True):
    """A table [keys.NAME] of the file."""

    sha256: Annotated[str, Meta(pattern=r"^[0-9a-fA-F]{64}\Z")]
    priority: Literal["interactive", "batch", "background"] = "interactive"
    share: Annotated[float, Meta(ge=0.001, le=1000)] = 1.0
    admin: bool = False
    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None
    max_parallel_requests: Limit | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ApiKey:
    """`id`: the client in the queue, in caches and stores; it remains when the key is replaced."""

    id: bytes
    name: str  # for logs
    priority: Priority = Priority.INTERACTIVE  # the highest class that it may use
    share: float = 1.0  # beside the others of its class
    admin: bool = False
    requests: TokenBucket | None = None
    tokens: TokenBucket | None = None
    parallel: ParallelLimit | None = None


NO_KEY = ApiKey(b"", "")  # of requests that need none


class Keyring:
    """All keys. Raises SettingsError for a file that is not accepted."""

    def __init__(self, settings: Settings) -> None:
        self.required = settings.has_keys
        self.has_admins = False
        self.file = None if settings.api_keys_file == "none" else settings.api_keys_file
        keys = [(key, False) for key in settings.api_keys]
        keys += [(key, True) for key in settings.admin_keys]
        self._of_settings = {
            digest_of(key.encode()): ApiKey(key.encode(), f"key {number}", admin=is_admin)
            for number, (key, is_admin) in enumerate(keys, 1)
        }
        self._metrics_keys = {digest_of(key.encode()) for key in settings.metrics_keys}
        self._keys: dict[bytes, ApiKey] = {}  # by digest
        self.reload()

    def __iter__(self) -> Iterator[ApiKey]:
        return iter(self._keys.values())

    def find(self, key: bytes) -> ApiKey | None:
        return self._keys.get(digest_of(key))

    def may_read_metrics(self, key: bytes) -> bool:
        if not self._metrics_keys or digest_of(key) in self._metrics_keys:
            return True
        found = self.find(key)
        return found is not None and found.admin

    def reload(self) -> None:
        """Read the file again, from any thread. Keys with the same limits as before go on from what
        they have used. Raises SettingsError, and changes nothing then."""
        keys = dict(self._of_settings)
        if self.file:
            keys |= read_keys(self.file, {key.id: key for key in self._keys.values()})
        self._keys, self.has_admins = keys, any(key.admin for key in keys.values())


def digest_of(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def read_keys(file: str, before: dict[bytes, ApiKey]) -> dict[bytes, ApiKey]:
    """Return the keys of a file by their digests. `before`: the keys until now, by id. Raises
    SettingsError; its message has no digest, which may be a key by mistake."""
    where = f"API_KEYS_FILE={file!r}"
    document = read_toml(file, where)
    tables = document.pop("keys", None)
    if document or not isinstance(tables, dict) or not tables:
        raise SettingsError(f"{where}: must have a table [keys.NAME] for each key, and no others")
    keys: dict[bytes, ApiKey] = {}
    for name, table in tables.items():
        digest, key = _key_of(f"{where}: keys.{name[:64]}", name, table, before)
        if digest in keys:
            raise SettingsError(f"{where}: {keys[digest].name} and {name} have the same sha256")
        keys[digest] = key
    with suppress(OSError):  # the file may be gone by now
        if Path(file).expanduser().stat().st_mode & stat.S_IROTH:
            log.warning("%s can be read by all users of this machine: chmod o-r is advised", where)
    return keys


def _key_of(where: str, name: str, table: Any, before: dict[bytes, ApiKey]) -> tuple[bytes, ApiKey]:
    if not NAME.fullmatch(name):
        raise SettingsError(f"{where}: a name has 1 to 64 letters, digits, and _ . @ -")
    try:
        rights = msgspec.convert(table, KeyTable)
    except msgspec.ValidationError as error:
        raise SettingsError(f"{where}: {str(error)[:MAX_REASON]}") from None
    id = FILE_PREFIX + name.encode()
    old = before.get(id)
    key = ApiKey(
        id,
        name,
        PRIORITIES[rights.priority],
        rights.share,
        rights.admin,
        _bucket(rights.requests_per_minute, old.requests if old else None),
        _bucket(rights.tokens_per_minute, old.tokens if old else None),
        _parallel(rights.max_parallel_requests, old.parallel if old else None),
    )
    return bytes.fromhex(rights.sha256), key


def _bucket(per_minute: int | None, before: TokenBucket | None) -> TokenBucket | None:
    if per_minute is None or (before and before.per_minute == per_minute):
        return before if per_minute else None
    return TokenBucket(per_minute, time.monotonic())


def _parallel(limit: int | None, before: ParallelLimit | None) -> ParallelLimit | None:
    if limit is None or (before and before.limit == limit):
        return before if limit else None
    return ParallelLimit(limit)
