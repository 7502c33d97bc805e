"""The store of responses by id, for `GET /v1/responses/{id}` and `previous_response_id`.

An sqlite database, in memory or in a file. It is bounded: the client with the most stored bytes, or
responses, loses its least recently used ones. A conversation is a chain of responses, each with its
own input only. Responses and items are looked up within a namespace; those of other namespaces do
not exist for it. Methods block: call them in a pool thread.

Processes on one machine may share a file. A background response is in the table `running` until it
has ended, and its process renews a lease on it. One with an expired lease has failed, for all
processes.
"""

import contextlib
import hashlib
import logging
import math
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

import orjson

from batching.errors import QueueFull
from server.http.json import Document

log = logging.getLogger("onequeue.store")

MAX_RESPONSES = 10_000
MAX_BYTES = 256_000_000
OPEN_S = 30.0  # to wait for other processes that open a new file
LEASE_S = 30.0  # without a renewal, a background response has failed after this time
RETRY_S = 10.0  # after a failure of the disk
ENDED = "the server process that generated the response has ended"

SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY,
    used INTEGER NOT NULL,
    size INTEGER NOT NULL,
    response BLOB NOT NULL,
    input BLOB NOT NULL,
    namespace BLOB NOT NULL,
    client BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS responses_uses ON responses (used);
CREATE INDEX IF NOT EXISTS responses_sizes_of_clients ON responses (client, used, size);
CREATE TABLE IF NOT EXISTS items (
    namespace BLOB NOT NULL,
    id TEXT NOT NULL,
    response_id TEXT NOT NULL REFERENCES responses (id) ON DELETE CASCADE,
    PRIMARY KEY (namespace, id, response_id)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS items_response ON items (response_id);
CREATE TABLE IF NOT EXISTS running (
    id TEXT PRIMARY KEY,
    expires REAL NOT NULL,
    cancelled INTEGER NOT NULL,
    response BLOB NOT NULL,
    input BLOB NOT NULL,
    namespace BLOB NOT NULL,
    client BLOB NOT NULL
);
CREATE VIEW IF NOT EXISTS found AS
    SELECT namespace, id, response, input, size FROM responses UNION ALL
    SELECT namespace, id, response, input, length(response) + length(input) FROM running;
"""

NEXT_USE = "(SELECT coalesce(max(used), 0) + 1 FROM responses)"


class NotStored(Exception):
    """The namespace has no stored response with this id."""

    def __init__(self, id: str) -> None:
        super().__init__(id)
        self.id = id


class LeaseExpired(Exception):
    """The response has failed already: its lease was not renewed in time."""


class TooLarge(Exception):
    """The stored items that a request refers to exceed the limit."""


# Called with the size of a response before it is read, in bytes of JSON; may raise.
Count = Callable[[int], object]


def uncounted(size: int) -> None:
    pass


class Owner(NamedTuple):
    """Of a stored response: `namespace` limits its readers, `client` is charged for its size."""

    namespace: bytes
    client: bytes


def owner_of(key: bytes, address: str) -> Owner:
    """Return the owner of responses that are stored with an API key. Without API_KEYS the key is
    empty: there is one namespace, and each address is a client.

    Both are 16 bytes, the same from one start to the next."""
    return Owner(storage_namespace(key), _digest(key or address.encode()))


def storage_namespace(key: bytes) -> bytes:
    return _digest(key)


def _digest(name: bytes) -> bytes:
    return hashlib.blake2b(name, digest_size=16, person=b"responses").digest()


@dataclass(frozen=True, slots=True)
class Stored:
    """A response and its own input items, oldest first, without those of earlier responses."""

    response: Document
    input: list[Document]


@contextlib.contextmanager
def refusing_disk_errors() -> Iterator[None]:
    """Raise QueueFull if the disk of a store fails."""
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        log.error("store not available error=%.200r", error)
        reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else error
        raise QueueFull(f"the server's disk has failed: {reason}", RETRY_S) from None


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


class ResponseStore:
    """`path` is a file, or `:memory:`. Raises sqlite3.Error if the file cannot be used."""

    def __init__(
        self, path: str, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES
    ) -> None:
        self.max_responses = max_responses
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        self.is_shared = path != ":memory:"
        if self.is_shared:
            make_private(path)
        self._database = sqlite3.connect(path, check_same_thread=False)
        run = self._database.execute
        run("PRAGMA foreign_keys = ON")
        use_write_ahead_log(self._database)
        run("PRAGMA synchronous = NORMAL")  # a power cut may lose the last responses only
        self._database.executescript(f"BEGIN IMMEDIATE; {SCHEMA} COMMIT;")

    @property
    def totals(self) -> tuple[int, int]:
        """The number of responses, and their bytes."""
        usage = self._usage().values()
        return sum(count for count, _ in usage), sum(size for _, size in usage)

    def close(self) -> None:
        with self._lock:
            self._database.close()

    def put(self, owner: Owner, stored: Stored, has_lease: bool = False) -> None:
        """Store a response, and drop others beyond the bounds.

        `has_lease`: it was started by `start`. Raises LeaseExpired."""
        with self._lock, self._database as database:  # a transaction
            if has_lease:
                ended = "DELETE FROM running WHERE id = ? AND expires > ?"
                if not database.execute(ended, (stored.response["id"], time.time())).rowcount:
                    raise LeaseExpired
            self._insert(owner, stored)

    def _insert(self, owner: Owner, stored: Stored) -> None:
        """Within a transaction."""
        response, input_items = orjson.dumps(stored.response), orjson.dumps(stored.input)
        id, size = stored.response["id"], len(response) + len(input_items)
        item_ids = {item["id"] for item in (*stored.input, *stored.response["output"])}
        items = [(owner.namespace, item_id, id) for item_id in item_ids]
        inserted = f"INSERT INTO responses VALUES (?, {NEXT_USE}, ?, ?, ?, ?, ?)"
        self._database.execute(inserted, (id, size, response, input_items, *owner))
        self._database.executemany("INSERT INTO items VALUES (?, ?, ?)", items)
        self._drop()

    # ── background responses that have not ended ──

    def start(self, owner: Owner, stored: Stored) -> float:
        """Show a background response to all processes; return when its lease expires, in seconds
        since the epoch. `put` ends it."""
        self._fail_expired()
        response, input_items = orjson.dumps(stored.response), orjson.dumps(stored.input)
        expires = time.time() + LEASE_S
        values = stored.response["id"], expires, response, input_items, *owner
        with self._lock, self._database as database:
            database.execute("INSERT INTO running VALUES (?, ?, 0, ?, ?, ?, ?)", values)
        return expires

    def update(self, response: Document) -> None:
        """Replace a background response, which has made progress."""
        updated = "UPDATE running SET response = ? WHERE id = ?"
        with self._lock, self._database as database:
            database.execute(updated, (orjson.dumps(response), response["id"]))

    def renew(self, ids: Sequence[str]) -> tuple[float, dict[str, bool]]:
        """Renew leases. Return when they expire, and the responses whose lease had not expired,
        each with whether it is to be cancelled."""
        now = time.time()
        renewed = (
            "UPDATE running SET expires = ? WHERE expires > ? "
            "AND id IN (SELECT value FROM json_each(?)) RETURNING id, cancelled"
        )
        values = now + LEASE_S, now, orjson.dumps(ids).decode()
        with self._lock, self._database as database:
            held = {id: bool(flag) for id, flag in database.execute(renewed, values)}
        self._fail_expired()
        return now + LEASE_S, held

    def cancel(self, namespace: bytes, id: str) -> None:
        """Let the process of a background response cancel it, at its next renewal."""
        cancelled = "UPDATE running SET cancelled = 1 WHERE namespace = ? AND id = ?"
        with self._lock, self._database as database:
            database.execute(cancelled, (namespace, id))

    def is_running(self, namespace: bytes, id: str) -> bool:
        self._fail_expired()
        running = "SELECT 1 FROM running WHERE namespace = ? AND id = ?"
        with self._lock:
            return self._database.execute(running, (namespace, id)).fetchone() is not None

    def _fail_expired(self) -> None:
        """Store background responses with an expired lease as failed, without their input."""
        select = "SELECT id FROM running WHERE expires <= ?"
        taken = "DELETE FROM running WHERE id = ? AND expires <= ? RETURNING *"
        now = time.time()
        with self._lock:
            for [id] in self._database.execute(select, (now,)).fetchall():
                with self._database as database:
                    # another process may have done it
                    for row in database.execute(taken, (id, now)).fetchall():
                        response, owner = orjson.loads(row[3]), Owner(*row[5:])
                        response |= {
                            "status": "failed",
                            "error": {"code": "server_error", "message": ENDED},
                            "output": [],
                        }
                        self._insert(owner, Stored(response, []))

    # ── stored responses ──

    def response(self, namespace: bytes, id: str, count: Count = uncounted) -> bytes:
        """Return a response as JSON."""
        count(self._size(namespace, id))
        content: bytes = self._row("response", namespace, id)[0]
        return content

    def get(self, namespace: bytes, id: str, count: Count = uncounted) -> Stored:
        count(self._size(namespace, id))
        response, input_items = self._row("response, input", namespace, id)
        return Stored(orjson.loads(response), orjson.loads(input_items))

    def chain(
        self, namespace: bytes, id: str, max_bytes: float = math.inf, count: Count = uncounted
    ) -> list[Stored]:
        """Return the responses of a conversation, oldest first, up to the one with this id.

        Raises NotStored or TooLarge.
        """
        chain: list[Stored] = []
        next_id: str | None = id
        while next_id is not None:
            max_bytes -= self._size(namespace, next_id)
            if max_bytes < 0:
                raise TooLarge(id)
            stored = self.get(namespace, next_id, count)
            chain.append(stored)
            next_id = stored.response["previous_response_id"]
        with self._lock, contextlib.suppress(sqlite3.Error), self._database:  # a full disk
            used = f"UPDATE responses SET used = {NEXT_USE} WHERE id = ?"
            self._database.executemany(used, [(stored.response["id"],) for stored in chain])
        return chain[::-1]

    def items(
        self,
        namespace: bytes,
        ids: Set[str],
        max_bytes: float = math.inf,
        count: Count = uncounted,
    ) -> dict[str, Document]:
        """Return the input and output items of stored responses that have one of the ids.

        Raises TooLarge if their responses exceed `max_bytes`. A response is read once.
        """
        items: dict[str, Document] = {}
        of_item = "SELECT response_id FROM items WHERE namespace = ? AND id = ? LIMIT 1"
        for id in ids:
            if id in items:
                continue
            with self._lock:
                row = self._database.execute(of_item, (namespace, id)).fetchone()
            if row is None:
                continue
            with contextlib.suppress(NotStored):  # it has been deleted meanwhile
                max_bytes -= self._size(namespace, row[0])
                if max_bytes < 0:
                    raise TooLarge(id)
                stored = self.get(namespace, row[0], count)
                for item in (*stored.input, *stored.response["output"]):
                    if item["id"] in ids:
                        items.setdefault(item["id"], item)
        return items

    def delete(self, namespace: bytes, id: str) -> None:
        deleted = "DELETE FROM responses WHERE namespace = ? AND id = ?"
        with self._lock, self._database as database:
            if not database.execute(deleted, (namespace, id)).rowcount:
                raise NotStored(id)

    def _usage(self) -> dict[bytes, tuple[int, int]]:
        """Return the number and the bytes of each client's responses."""
        usage = "SELECT client, count(*), sum(size) FROM responses GROUP BY client"
        return {client: (count, size) for client, count, size in self._database.execute(usage)}

    def _drop(self) -> None:
        """Drop the least recently used responses of the client that has the most, until all fit."""
        usage = self._usage()
        count, size = map(sum, zip(*usage.values(), strict=True))
        oldest = "SELECT id FROM responses WHERE client = ? ORDER BY used LIMIT 1"
        dropped = f"DELETE FROM responses WHERE id = ({oldest}) RETURNING size"
        while count > self.max_responses or size > self.max_bytes:
            kind = int(count <= self.max_responses)
            client = max(usage, key=lambda client: usage[client][kind])
            [freed] = self._database.execute(dropped, (client,)).fetchone()
            usage[client] = usage[client][0] - 1, usage[client][1] - freed
            if not usage[client][0]:
                del usage[client]
            count, size = count - 1, size - freed

    def _size(self, namespace: bytes, id: str) -> int:
        return int(self._row("size", namespace, id)[0])

    def _row(self, columns: str, namespace: bytes, id: str) -> tuple[Any, ...]:
        self._fail_expired()
        select = f"SELECT {columns} FROM found WHERE namespace = ? AND id = ?"
        with self._lock:
            row: tuple[Any, ...] | None = self._database.execute(select, (namespace, id)).fetchone()
        if row is None:
            raise NotStored(id)
        return row
