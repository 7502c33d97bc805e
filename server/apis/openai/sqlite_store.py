"""The base of the stores of responses, files and batches: an sqlite database that only this user
reads.

Rows are looked up within a namespace, that of an API key; those of other namespaces do not exist
for it. A row that is being worked on names its process, which holds a locked file until it ends.
The system unlocks it. Methods block: call them in a pool thread.
"""

import contextlib
import fcntl
import hashlib
import logging
import os
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from anyio import CapacityLimiter
from anyio.to_thread import run_sync

from batching.errors import InvalidInput, QueueFull
from server.http.json import to_json

log = logging.getLogger("onequeue.store")

OPEN_S = 30.0  # to wait for other processes that open a new file
MAX_LOG_BYTES = 1 << 26  # of the write-ahead log on the disk, once no reader needs more
RETRY_S = 10.0  # after a failure of the disk

T = TypeVar("T")


class Owner(NamedTuple):
    """Of a row: `namespace` limits its readers, `client` is charged for its size."""

    namespace: bytes
    client: bytes


def owner_of(key: bytes, address: str) -> Owner:
    """Return the owner of rows that are stored with an API key. Without API_KEYS the key is empty:
    there is one namespace, and each address is a client.

    Both are 16 bytes, the same from one start to the next."""
    return Owner(storage_namespace(key), _digest(key or address.encode()))


def storage_namespace(key: bytes) -> bytes:
    return _digest(key)


def _digest(name: bytes) -> bytes:
    return hashlib.blake2b(name, digest_size=16, person=b"responses").digest()


class ListPage(NamedTuple):
    """A part of a list."""

    after: str | None
    limit: int
    is_descending: bool


def encode_page(kind: Callable[..., object], entries: Sequence[Any], limit: int) -> bytes:
    """Return a page of a list as JSON; `entries` has one more if there are more."""
    has_more, entries = len(entries) > limit, entries[:limit]
    ids = [entry["id"] if isinstance(entry, dict) else entry.id for entry in entries] or [None]
    return to_json(kind("list", entries, ids[0], ids[-1], has_more))


@contextlib.contextmanager
def refusing_disk_errors() -> Iterator[None]:
    """Raise QueueFull if the disk of a store fails."""
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        log.error("store not available error=%.200r", error)
        reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else error
        raise QueueFull(f"the server's disk has failed: {reason}", RETRY_S) from None


async def in_store(
    call: Callable[..., T], *arguments: Any, limiter: CapacityLimiter | None = None
) -> T:
    """Call a method of a store in a pool thread. Raises QueueFull if the disk fails."""
    with refusing_disk_errors():
        return await run_sync(call, *arguments, limiter=limiter)


def use_write_ahead_log(database: sqlite3.Connection) -> None:
    """Switch to it. While another process does so, sqlite fails at once, without its timeout."""
    give_up_at = time.monotonic() + OPEN_S
    while True:
        try:
            database.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > give_up_at:
                raise
        time.sleep(0.01)


def make_private(path: str) -> None:
    """Let only this user read a database. sqlite creates its other files with its mode, and reports
    an error with the path."""
    with contextlib.suppress(OSError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL, 0o600))  # closing another's ends its locks
    for suffix in ("", "-wal", "-shm"):  # a crash may have left some
        with contextlib.suppress(OSError):
            os.chmod(path + suffix, 0o600)


def lock_file(path: Path) -> int | None:
    """Lock a file, which is made if there is none. Return its descriptor; None if another process
    holds the lock."""
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        return None
    return file


class SqliteStore:
    """`path` is a file, or `:memory:`. Raises OSError or sqlite3.Error if it cannot be used."""

    def __init__(self, path: str, schema: str) -> None:
        self.is_shared = path != ":memory:"
        self.process = secrets.token_hex(8)  # the name of this one
        self.is_alone = True  # no other process had it open before
        self._path = Path(path)
        self._lock = threading.RLock()
        if self.is_shared:
            make_private(path)
        self._database = sqlite3.connect(path, check_same_thread=False)
        self._database.execute("PRAGMA foreign_keys = ON")
        use_write_ahead_log(self._database)
        self._database.execute(f"PRAGMA journal_size_limit = {MAX_LOG_BYTES}")
        self._database.execute("PRAGMA synchronous = NORMAL")  # a power cut loses the last changes
        # In one transaction: another process does not take an unlocked file for a dead one's.
        with self._database as database:
            database.executescript(f"BEGIN IMMEDIATE; {schema}")
            if self.is_shared:
                self._lock_process()

    def close(self) -> None:
        with self._lock:
            self._database.close()
            if self.is_shared:
                self._process_file(self.process).unlink(missing_ok=True)
                os.close(self._locked)

    def cancelled(self) -> list[str]:
        """Return the rows that this process works on and is to cancel."""
        return []

    def remove_expired(self) -> None:
        """Remove expired rows."""

    def _process_file(self, process: str) -> Path:
        return self._path.with_name(f"{self._path.name}-{process}.lock")

    def _lock_process(self) -> None:
        """Hold the file of this process, and remove those of dead ones."""
        paths = self._path.parent.glob(self._process_file("*").name)
        names = [path.name.removesuffix(".lock").rpartition("-")[2] for path in paths]
        self.is_alone = not any([self._is_alive(name) for name in names])  # noqa: C419  # of all
        file = lock_file(self._process_file(self.process))
        assert file is not None
        self._locked = file

    def _is_alive(self, process: str) -> bool:
        """Return whether a process still runs; the file of a dead one is removed."""
        path = self._process_file(process)
        file = lock_file(path)
        if file is None:
            return True
        path.unlink(missing_ok=True)
        os.close(file)
        return False

    def _usage(self, table: str, owner: str, size: str) -> dict[bytes, tuple[int, int]]:
        """Return the number and the bytes of each owner's rows."""
        usage = f"SELECT {owner}, count(*), sum({size}) FROM {table} GROUP BY {owner}"
        return {owner: (count, size) for owner, count, size in self._database.execute(usage)}

    def _list(
        self,
        table: Literal["files", "batches", "conversation_items"],
        columns: str,
        namespace: bytes | str,
        page: ListPage,
        where: str = "TRUE",
        values: Sequence[object] = (),
    ) -> list[tuple[Any, ...]]:
        """Return the rows of a page, and one more. Raises InvalidInput for an unknown `after`."""
        order, sign = ("DESC", "<") if page.is_descending else ("ASC", ">")
        conditions = [namespace, *values]
        with self._lock:
            if page.after is not None:
                found = f"SELECT number FROM {table} WHERE namespace = ? AND id = ?"
                row = self._database.execute(found, (namespace, page.after)).fetchone()
                if row is None:
                    reason = f"there is no {page.after[:100]!r} in the list"
                    raise InvalidInput.at("after", reason)
                where = f"{where} AND number {sign} ?"
                conditions.append(row[0])
            select = (
                f"SELECT {columns} FROM {table} WHERE namespace = ? AND {where} "
                f"ORDER BY number {order} LIMIT ?"
            )
            return self._database.execute(select, (*conditions, page.limit + 1)).fetchall()
