"""The store of responses by id, for `GET /v1/responses/{id}` and `previous_response_id`.

An sqlite database, in memory or in a file. It is bounded: the client with the most stored bytes, or
responses, loses its least recently used ones. A chain of responses has the input of each only once.

A conversation of `/v1/conversations` has a row among the responses, in a namespace of its own, and
one for each item in `conversation_items`.

Processes on one machine may share a file. A background response is stored from its beginning, and
in the table `generating` until it has ended. It has failed if its process ends before. The events
of a streamed one are kept beside it for EVENTS_S; the last is added with its final state.
"""

import contextlib
import hashlib
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any

import orjson

from batching.errors import InvalidInput
from server.apis.openai.sqlite_store import ListPage, Owner, SqliteStore
from server.http.json import Document
from server.http.sse import named_frame

MAX_RESPONSES = 10_000
MAX_BYTES = 256_000_000
EVENTS_S = 3600
MAX_READ_BYTES = 1 << 18  # of events at a time, or one event
ENDED = "the server process that generated the response has ended"

# `used` is 0 while a response is generated: it is not dropped, and not counted.
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
-- The namespace of an item's id is its conversation.
CREATE TABLE IF NOT EXISTS conversation_items (
    namespace TEXT NOT NULL REFERENCES responses (id) ON DELETE CASCADE,
    number INTEGER NOT NULL,
    id TEXT NOT NULL,
    item BLOB NOT NULL,
    PRIMARY KEY (namespace, number),
    UNIQUE (namespace, id)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS generating (
    id TEXT PRIMARY KEY REFERENCES responses (id) ON DELETE CASCADE,
    process TEXT NOT NULL,
    is_cancelled INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE IF NOT EXISTS events (
    id TEXT NOT NULL REFERENCES responses (id) ON DELETE CASCADE,
    number INTEGER NOT NULL,
    event BLOB NOT NULL,
    added_at INTEGER NOT NULL,
    PRIMARY KEY (id, number)
) WITHOUT ROWID;
"""

EVENT_BYTES = "(SELECT coalesce(sum(length(event)), 0) FROM events WHERE events.id = responses.id)"
ITEM_BYTES = "(SELECT total(length(item)) FROM conversation_items WHERE namespace = responses.id)"
NEXT_USE = "(SELECT coalesce(max(used), 0) + 1 FROM responses)"


def of_conversations(namespace: bytes) -> bytes:
    """Return the namespace of the conversations of a key, whose responses are in another one."""
    return hashlib.blake2b(namespace, digest_size=16, person=b"conversations").digest()


class NotStored(Exception):
    """The namespace has no stored response, conversation or item with this id."""

    def __init__(self, id: str) -> None:
        super().__init__(id)
        self.id = id


# Called with the size of a response before it is read, in bytes of JSON; may raise.
Count = Callable[[int], object]


def uncounted(size: int) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Stored:
    """A response and its own input items, oldest first, without those of earlier responses."""

    response: Document
    input: list[Document]

    @property
    def items(self) -> list[Document]:
        return [*self.input, *self.response["output"]]


class ResponseStore(SqliteStore):
    """`path` is a file, or `:memory:`. Raises OSError or sqlite3.Error if it cannot be used."""

    def __init__(
        self, path: str, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES
    ) -> None:
        self.max_responses = max_responses
        self.max_bytes = max_bytes
        self._lost: set[str] = set()  # responses whose end could not be stored
        super().__init__(path, SCHEMA)

    @property
    def totals(self) -> tuple[int, int]:
        """The number of responses that have ended, and their bytes."""
        usage = self._usage_of_clients().values()
        return sum(count for count, _ in usage), sum(size for _, size in usage)

    def put(self, owner: Owner, stored: Stored, is_generating: bool = False) -> None:
        """Store a response, in place of its earlier state, and drop others beyond the bounds.

        `is_generating`: this process generates it; its output is stored at its end."""
        if is_generating:
            self._fail_abandoned()
        with self._lock, self._database:  # a transaction
            self._put(owner, stored, is_generating)

    def _put(self, owner: Owner, stored: Stored, is_generating: bool = False) -> None:
        """Within a transaction."""
        id, execute = stored.response["id"], self._database.execute
        document = stored.response | {"output": []} if is_generating else stored.response
        response, input_items = orjson.dumps(document), orjson.dumps(stored.input)
        use = "0" if is_generating else NEXT_USE
        inserted = (
            f"INSERT INTO responses VALUES (?, {use}, ?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET"
            " (used, size, response, input) ="
            " (excluded.used, excluded.size, excluded.response, excluded.input)"
        )
        size = len(response) + len(input_items)
        execute(inserted, (id, size, response, input_items, *owner))
        if is_generating:
            generating = "INSERT OR IGNORE INTO generating (id, process) VALUES (?, ?)"
            execute(generating, (id, self.process))
            return
        execute("DELETE FROM generating WHERE id = ?", (id,))
        item_ids = {item["id"] for item in stored.items}
        items = [(owner.namespace, item_id, id) for item_id in item_ids]
        self._database.executemany("INSERT INTO items VALUES (?, ?, ?)", items)
        [count] = execute("SELECT max(number) + 1 FROM events WHERE id = ?", (id,)).fetchone()
        if count is not None:
            last = {"type": f"response.{document['status']}", "response": document}
            self._add_event(id, count, named_frame(last | {"sequence_number": count}))
            execute(f"UPDATE responses SET size = size + {EVENT_BYTES} WHERE id = ?", (id,))
        self._drop()

    # ── background responses that have not ended ──

    def cancel(self, namespace: bytes, id: str) -> None:
        """Let the process that generates a response cancel it."""
        cancelled = (
            "UPDATE generating SET is_cancelled = 1 WHERE id = "
            "(SELECT id FROM responses WHERE namespace = ? AND id = ?)"
        )
        with self._lock, self._database as database:
            database.execute(cancelled, (namespace, id))

    def cancelled(self) -> list[str]:
        cancelled = "SELECT id FROM generating WHERE process = ? AND is_cancelled"
        with self._lock:
            return [id for [id] in self._database.execute(cancelled, (self.process,))]

    def is_generating(self, namespace: bytes, id: str) -> bool:
        self._fail_abandoned()
        generating = (
            "SELECT 1 FROM generating JOIN responses USING (id) WHERE namespace = ? AND id = ?"
        )
        with self._lock:
            row = self._database.execute(generating, (namespace, id)).fetchone()
            return row is not None and id not in self._lost

    def _fail_abandoned(self) -> None:
        """Store the unfinished responses of dead processes as failed, without their input."""
        processes = "SELECT DISTINCT process FROM generating WHERE process != ?"
        abandoned = (
            "SELECT response, namespace, client FROM generating JOIN responses USING (id) "
            "WHERE process = ?"
        )
        with self._lock:
            for [process] in self._database.execute(processes, (self.process,)).fetchall():
                if self._is_alive(process):
                    continue
                with self._database as database:
                    database.execute("BEGIN IMMEDIATE")  # another process may have done it
                    for response, *owner in database.execute(abandoned, (process,)).fetchall():
                        error = {"code": "server_error", "message": ENDED}
                        failed = orjson.loads(response) | {"status": "failed", "error": error}
                        self._put(Owner(*owner), Stored(failed, []))

    def lose(self, id: str) -> None:
        """Treat a response as deleted. The disk has failed: its row is deleted later."""
        self._lost.add(id)

    # ── events ──

    def add_event(self, id: str, number: int, event: bytes) -> None:
        """Keep an event of a response that is generated."""
        with self._lock, self._database:
            self._add_event(id, number, event)

    def _add_event(self, id: str, number: int, event: bytes) -> None:
        added = "INSERT INTO events VALUES (?, ?, ?, ?)"
        self._database.execute(added, (id, number, event, int(time.time())))

    def events(self, namespace: bytes, id: str, after: int) -> tuple[list[bytes], bool]:
        """Return the next events after a number, and whether the response is generated. Raises
        InvalidInput if they are not kept."""
        self._row("id", namespace, id)
        generating = "SELECT 1 FROM generating WHERE id = ?"
        select = "SELECT event FROM events WHERE id = ? AND number > ? ORDER BY number"
        kept = "SELECT min(number), max(number) FROM events WHERE id = ?"
        with self._lock:
            # first: the last event ends it
            is_generating = self._database.execute(generating, (id,)).fetchone() is not None
            first, last = self._database.execute(kept, (id,)).fetchone()
            if first is None:
                reason = "with background: true and stream: true, until an hour after their end"
                raise InvalidInput.at("stream", f"is for responses created {reason}")
            if not first <= after + 1 <= last + 1:
                reason = f"the events {first} to {last} are kept"
                raise InvalidInput.at("starting_after", f"is {after}; {reason}")
            events, size = list[bytes](), 0
            for [event] in self._database.execute(select, (id, after)):
                events.append(event)
                if (size := size + len(event)) > MAX_READ_BYTES:
                    break
            return events, is_generating

    def remove_expired(self) -> None:
        """Remove the events of responses that ended before EVENTS_S, and the lost responses."""
        old = int(time.time()) - EVENTS_S
        expired = (
            "SELECT id FROM events GROUP BY id HAVING max(added_at) < ? "
            "AND id NOT IN (SELECT id FROM generating)"
        )
        resized = "UPDATE responses SET size = length(response) + length(input) WHERE id = ?"
        with self._lock, self._database as database:
            ids = database.execute(expired, (old,)).fetchall()
            database.executemany("DELETE FROM events WHERE id = ?", ids)
            database.executemany(resized, ids)
            lost = [(id,) for id in self._lost]
            database.executemany("DELETE FROM responses WHERE id = ?", lost)
        self._lost.clear()

    # ── stored responses ──

    def response(self, namespace: bytes, id: str, count: Count = uncounted) -> bytes:
        """Return a response as JSON."""
        count(self.size(namespace, id))
        content: bytes = self._row("response", namespace, id)[0]
        return content

    def get(self, namespace: bytes, id: str, count: Count = uncounted) -> Stored:
        count(self.size(namespace, id))
        response, input_items = self._row("response, input", namespace, id)
        return Stored(orjson.loads(response), orjson.loads(input_items))

    def chain(self, namespace: bytes, id: str, count: Count = uncounted) -> list[Stored]:
        """Return a response after those that it continues, oldest first. Raises NotStored."""
        chain: list[Stored] = []
        next_id: str | None = id
        while next_id is not None:
            stored = self.get(namespace, next_id, count)
            chain.append(stored)
            next_id = stored.response["previous_response_id"]
        self._use([stored.response["id"] for stored in chain])
        return chain[::-1]

    def _use(self, ids: Sequence[str]) -> None:
        used = f"UPDATE responses SET used = {NEXT_USE} WHERE id = ? AND used"
        with self._lock, contextlib.suppress(sqlite3.Error), self._database:  # a full disk
            self._database.executemany(used, [(id,) for id in ids])

    def items(
        self, namespace: bytes, ids: Set[str], count: Count = uncounted
    ) -> dict[str, Document]:
        """Return the input and output items of stored responses that have one of the ids. A
        response is read once."""
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
                stored = self.get(namespace, row[0], count)
                for item in stored.items:
                    if item["id"] in ids:
                        items.setdefault(item["id"], item)
        return items

    def delete(self, namespace: bytes, id: str) -> None:
        deleted = "DELETE FROM responses WHERE namespace = ? AND id = ?"
        with self._lock, self._database as database:
            if not database.execute(deleted, (namespace, id)).rowcount:
                raise NotStored(id)

    # ── conversations ──

    def create_conversation(
        self, owner: Owner, document: Document, items: Sequence[Document], max_bytes: float
    ) -> None:
        """Raises InvalidInput for items that are there twice, or exceed `max_bytes`."""
        content, id = orjson.dumps(document), document["id"]
        inserted = f"INSERT INTO responses VALUES (?, {NEXT_USE}, ?, ?, ?, ?, ?)"
        with self._lock, self._database as database, self._changed(id):
            database.execute(inserted, (id, len(content), content, b"[]", *owner))
            self._add_items(id, items, max_bytes)

    def update(self, namespace: bytes, id: str, fields: Document) -> bytes:
        """Set fields of a conversation, and return it as JSON. Raises NotStored."""
        with self._changing(namespace, id) as document:
            changed = orjson.dumps(orjson.loads(document) | fields)
            self._database.execute("UPDATE responses SET response = ? WHERE id = ?", (changed, id))
            return changed

    def extend(
        self,
        namespace: bytes,
        id: str,
        items: Sequence[Document],
        max_bytes: float,
        response: tuple[Owner, Stored] | None = None,
    ) -> None:
        """Add items to a conversation, and store the response that they are of. Raises NotStored,
        and InvalidInput if one is there or the conversation would exceed `max_bytes`."""
        with self._changing(namespace, id):
            self._add_items(id, items, max_bytes)
            if response:
                self._put(*response)

    def remove_item(self, namespace: bytes, id: str, item_id: str) -> bytes:
        """Remove an item of a conversation, and return that as JSON. Raises NotStored."""
        removed = "DELETE FROM conversation_items WHERE namespace = ? AND id = ?"
        with self._changing(namespace, id) as document:
            if not self._database.execute(removed, (id, item_id)).rowcount:
                raise NotStored(item_id)
            return document

    def conversation(self, namespace: bytes, id: str, count: Count = uncounted) -> list[Document]:
        """Return all items of a conversation, oldest first. Raises NotStored."""
        count(self.size(namespace, id))
        select = "SELECT item FROM conversation_items WHERE namespace = ? ORDER BY number"
        with self._lock:
            rows = self._database.execute(select, (id,)).fetchall()
        self._use([id])
        return [orjson.loads(item) for [item] in rows]

    def conversation_page(self, id: str, page: ListPage) -> list[Document]:
        return [orjson.loads(item) for [item] in self._list("conversation_items", "item", id, page)]

    def item(self, id: str, item_id: str) -> bytes:
        """Return an item of a conversation as JSON. Raises NotStored."""
        select = "SELECT item FROM conversation_items WHERE namespace = ? AND id = ?"
        with self._lock:
            row = self._database.execute(select, (id, item_id)).fetchone()
        if row is None:
            raise NotStored(item_id)
        return bytes(row[0])

    @contextlib.contextmanager
    def _changing(self, namespace: bytes, id: str) -> Iterator[bytes]:
        """Change a conversation in a transaction. Raises NotStored."""
        select = "SELECT response FROM responses WHERE namespace = ? AND id = ?"
        with self._lock, self._database as database:
            database.execute("BEGIN IMMEDIATE")
            row = database.execute(select, (namespace, id)).fetchone()
            if row is None:
                raise NotStored(id)
            with self._changed(id):
                yield row[0]

    @contextlib.contextmanager
    def _changed(self, id: str) -> Iterator[None]:
        """Count the size of a conversation that has been changed, and drop others."""
        yield
        changed = f"UPDATE responses SET used = {NEXT_USE}, size = length(response) + {ITEM_BYTES}"
        self._database.execute(f"{changed} WHERE id = ?", (id,))
        self._drop()

    def _add_items(self, id: str, items: Sequence[Document], max_bytes: float) -> None:
        execute, contents = self._database.execute, [orjson.dumps(item) for item in items]
        last = "SELECT coalesce(max(number), 0) FROM conversation_items WHERE namespace = ?"
        [[number]] = execute(last, (id,))
        [[size]] = execute("SELECT size FROM responses WHERE id = ?", (id,))
        if size + sum(map(len, contents)) > max_bytes:
            reason = f"the conversation would exceed {max_bytes / 1_000_000:g} MB"
            raise InvalidInput.at("items", reason)
        for n, (item, content) in enumerate(zip(items, contents, strict=True)):
            row = id, number + n + 1, item["id"], content
            try:
                execute("INSERT INTO conversation_items VALUES (?, ?, ?, ?)", row)
            except sqlite3.IntegrityError:
                reason = "is in the conversation already"
                raise InvalidInput.at(f"items[{n}].id", reason) from None

    # ── bounds ──

    def _usage_of_clients(self) -> dict[bytes, tuple[int, int]]:
        return self._usage("responses WHERE used", "client", "size")

    def _drop(self) -> None:
        """Drop the least recently used responses of the client that has the most, until all fit."""
        usage = self._usage_of_clients()
        count, size = map(sum, zip(*usage.values(), strict=True))
        oldest = "SELECT id FROM responses WHERE client = ? AND used ORDER BY used LIMIT 1"
        dropped = f"DELETE FROM responses WHERE id = ({oldest}) RETURNING size"
        while count > self.max_responses or size > self.max_bytes:
            kind = int(count <= self.max_responses)
            client = max(usage, key=lambda client: usage[client][kind])
            [freed] = self._database.execute(dropped, (client,)).fetchone()
            usage[client] = usage[client][0] - 1, usage[client][1] - freed
            if not usage[client][0]:
                del usage[client]
            count, size = count - 1, size - freed

    def size(self, namespace: bytes, id: str) -> int:
        return int(self._row("size", namespace, id)[0])

    def _row(self, columns: str, namespace: bytes, id: str) -> tuple[Any, ...]:
        self._fail_abandoned()
        select = f"SELECT {columns} FROM responses WHERE namespace = ? AND id = ?"
        with self._lock:
            row: tuple[Any, ...] | None = self._database.execute(select, (namespace, id)).fetchone()
        if row is None or id in self._lost:
            raise NotStored(id)
        return row
