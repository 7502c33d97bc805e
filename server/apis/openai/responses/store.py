"""The store of responses by id, for `GET /v1/responses/{id}` and `previous_response_id`.

It is bounded: the client with the most stored bytes, or responses, loses its least recently used
ones, and unused ones expire. A chain of responses has the input of each only once.

A conversation of `/v1/conversations` has a row among the responses, in a namespace of its own, and
one for each item in `conversation_items`.

Processes may share the database. A background response is stored from its beginning, and in the
table `generating` until it has ended. It has failed if its process ends before. The events of a
streamed one are kept beside it for EVENTS_S; the last is added with its final state.
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
from server.apis.openai.database import Database
from server.apis.openai.response_schemas import ItemList
from server.apis.openai.store import ListPage, Owner, Store, encode_page
from server.http.json import Document
from server.http.sse import named_frame

MAX_RESPONSES = 10_000
MAX_BYTES = 256_000_000
EVENTS_S = 3600
MAX_READ_BYTES = 1 << 18  # of events at a time, or one event
MAX_ROWS = 1000  # of a statement
TTL_S = 30 * 24 * 3600.0  # of unused responses, as OpenAI has it
ENDED = "the server process that generated the response has ended"

# `used` is 0 while a response is generated: it is not dropped, and not counted.
TABLES = """
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
    is_cancelled BOOLEAN NOT NULL DEFAULT FALSE
);
CREATE TABLE IF NOT EXISTS events (
    id TEXT NOT NULL REFERENCES responses (id) ON DELETE CASCADE,
    number INTEGER NOT NULL,
    event BLOB NOT NULL,
    added_at INTEGER NOT NULL,
    PRIMARY KEY (id, number)
) WITHOUT ROWID;
"""
# `used` is the time of the last use, in microseconds; it was a count of uses.
TIMES_OF_USE = "UPDATE responses SET used = used + {now} WHERE used > 0"
MIGRATIONS = TABLES, TIMES_OF_USE

EVENT_BYTES = "(SELECT coalesce(sum(length(event)), 0) FROM events WHERE events.id = responses.id)"
ITEM_BYTES = (
    "(SELECT coalesce(sum(length(item)), 0) FROM conversation_items WHERE namespace = responses.id)"
)


def microseconds() -> int:
    return int(time.time() * 1e6)


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


class ResponseStore(Store):
    """`ttl_s`: how long a response is kept after its last use."""

    def __init__(
        self,
        database: Database,
        max_responses: int = MAX_RESPONSES,
        max_bytes: int = MAX_BYTES,
        ttl_s: float = TTL_S,
    ) -> None:
        self.max_responses = max_responses
        self.max_bytes = max_bytes
        self.ttl_s = ttl_s
        self._lost: set[str] = set()  # responses whose end could not be stored
        super().__init__(database, "responses", MIGRATIONS)

    def put(self, owner: Owner, stored: Stored, is_generating: bool = False) -> None:
        """Store a response, in place of its earlier state, and drop others beyond the bounds.

        `is_generating`: this process generates it; its output is stored at its end."""
        with self.database.transaction():
            self._put(owner, stored, is_generating)

    def _put(self, owner: Owner, stored: Stored, is_generating: bool = False) -> None:
        """Within a transaction."""
        id, execute = stored.response["id"], self.database.execute
        document = stored.response | {"output": []} if is_generating else stored.response
        response, input_items = orjson.dumps(document), orjson.dumps(stored.input)
        inserted = (
            "INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET"
            " (used, size, response, input) ="
            " (excluded.used, excluded.size, excluded.response, excluded.input)"
        )
        size = len(response) + len(input_items)
        used = 0 if is_generating else microseconds()
        execute(inserted, (id, used, size, response, input_items, *owner))
        if is_generating:
            generating = "INSERT INTO generating (id, process) VALUES (?, ?) ON CONFLICT DO NOTHING"
            execute(generating, (id, self.database.process))
            return
        ended = execute("DELETE FROM generating WHERE id = ? RETURNING id", (id,))
        item_ids = {item["id"] for item in stored.items}
        items = [(owner.namespace, item_id, id) for item_id in item_ids]
        self.database.execute_many(
            "INSERT INTO items VALUES (?, ?, ?) ON CONFLICT DO NOTHING", items
        )
        kept = "SELECT max(number) + 1 FROM events WHERE id = ?"
        if ended and (count := execute(kept, (id,))[0][0]) is not None:
            last = {"type": f"response.{document['status']}", "response": document}
            self._add_event(id, count, named_frame(last | {"sequence_number": count}))
            execute(f"UPDATE responses SET size = size + {EVENT_BYTES} WHERE id = ?", (id,))
        self._drop()

    # ── background responses that have not ended ──

    def cancel(self, namespace: bytes, id: str) -> None:
        """Let the process that generates a response cancel it."""
        cancelled = (
            "UPDATE generating SET is_cancelled = TRUE WHERE id = "
            "(SELECT id FROM responses WHERE namespace = ? AND id = ?)"
        )
        self.database.execute(cancelled, (namespace, id))

    def cancelled(self) -> list[str]:
        cancelled = "SELECT id FROM generating WHERE process = ? AND is_cancelled"
        return [id for [id] in self.database.execute(cancelled, (self.database.process,))]

    def is_generating(self, namespace: bytes, id: str) -> bool:
        generating = (
            "SELECT 1 FROM generating JOIN responses USING (id) WHERE namespace = ? AND id = ?"
        )
        return bool(self.database.execute(generating, (namespace, id))) and id not in self._lost

    def release_abandoned(self) -> None:
        """Store the unfinished responses of dead processes as failed, without their input."""
        abandoned = (
            "SELECT response, namespace, client FROM generating JOIN responses USING (id) "
            f"WHERE process = ? {self.database.skip_locked}"
        )
        for process in self._dead("generating"):
            with self.database.transaction():  # another process may have done it
                for response, *owner in self.database.execute(abandoned, (process,)):
                    error = {"code": "server_error", "message": ENDED}
                    failed = orjson.loads(response) | {"status": "failed", "error": error}
                    self._put(Owner(*owner), Stored(failed, []))

    def lose(self, id: str) -> None:
        """Treat a response as deleted. The disk has failed: its row is deleted later."""
        self._lost.add(id)

    # ── events ──

    def add_event(self, id: str, number: int, event: bytes) -> None:
        """Keep an event of a response that is generated."""
        self._add_event(id, number, event)

    def _add_event(self, id: str, number: int, event: bytes) -> None:
        added = "INSERT INTO events VALUES (?, ?, ?, ?)"
        self.database.execute(added, (id, number, event, int(time.time())))

    def events(self, namespace: bytes, id: str, after: int) -> tuple[list[bytes], bool]:
        """Return the next events after a number, and whether the response is generated. Raises
        InvalidInput if they are not kept."""
        self._row("id", namespace, id)
        generating = "SELECT 1 FROM generating WHERE id = ?"
        sizes = (
            "SELECT number, length(event) FROM events WHERE id = ? AND number > ? "
            f"ORDER BY number LIMIT {MAX_ROWS}"
        )
        select = "SELECT event FROM events WHERE id = ? AND number > ? AND number <= ?"
        kept = "SELECT min(number), max(number) FROM events WHERE id = ?"
        execute = self.database.execute
        is_generating = bool(execute(generating, (id,)))  # first: the last event ends it
        [[first, last]] = execute(kept, (id,))
        if first is None:
            reason = "with background: true and stream: true, until an hour after their end"
            raise InvalidInput.at("stream", f"is for responses created {reason}")
        if not first <= after + 1 <= last + 1:
            reason = f"the events {first} to {last} are kept"
            raise InvalidInput.at("starting_after", f"is {after}; {reason}")
        until, size = after, 0
        for number, event_bytes in execute(sizes, (id, after)):
            until, size = number, size + event_bytes
            if size > MAX_READ_BYTES:
                break
        events = execute(f"{select} ORDER BY number", (id, after, until))
        return [event for [event] in events], is_generating

    def remove_expired(self) -> None:
        """Remove unused responses, the events of those that ended before EVENTS_S, and the lost."""
        old = int(time.time()) - EVENTS_S
        unused = microseconds() - int(self.ttl_s * 1e6)
        expired = (
            "SELECT id FROM events GROUP BY id HAVING max(added_at) < ? "
            "AND id NOT IN (SELECT id FROM generating)"
        )
        resized = "UPDATE responses SET size = length(response) + length(input) WHERE id = ?"
        lost = [(id,) for id in self._lost]
        database = self.database
        with database.transaction():
            database.execute("DELETE FROM responses WHERE used > 0 AND used <= ?", (unused,))
            ids = database.execute(expired, (old,))
            database.execute_many("DELETE FROM events WHERE id = ?", ids)
            database.execute_many(resized, ids)
            database.execute_many("DELETE FROM responses WHERE id = ?", lost)
        self._lost.difference_update(id for [id] in lost)

    # ── stored responses ──

    def response(self, namespace: bytes, id: str, count: Count = uncounted) -> bytes:
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
        marks = ", ".join(
            "?" * len(ids)
        )  # at most MAX_RESPONSES: the databases take three times so many
        # What another process changes is left to it, or two would wait for each other.
        found = f"SELECT id FROM responses WHERE id IN ({marks}) AND used > 0"
        used = f"UPDATE responses SET used = ? WHERE id IN ({found} {self.database.skip_locked})"
        with contextlib.suppress(sqlite3.Error, OSError):
            self.database.execute(used, (microseconds(), *ids))

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
            rows = self.database.execute(of_item, (namespace, id))
            if not rows:
                continue
            with contextlib.suppress(NotStored):  # it has been deleted meanwhile
                stored = self.get(namespace, rows[0][0], count)
                for item in stored.items:
                    if item["id"] in ids:
                        items.setdefault(item["id"], item)
        return items

    def delete(self, namespace: bytes, id: str) -> None:
        deleted = "DELETE FROM responses WHERE namespace = ? AND id = ? RETURNING id"
        if not self.database.execute(deleted, (namespace, id)):
            raise NotStored(id)

    # ── conversations ──

    def create_conversation(
        self, owner: Owner, document: Document, items: Sequence[Document], max_bytes: float
    ) -> None:
        """Raises InvalidInput for items that are there twice, or exceed `max_bytes`."""
        content, id = orjson.dumps(document), document["id"]
        inserted = "INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?, ?)"
        with self.database.transaction(), self._changed(id):
            row = id, microseconds(), len(content), content, b"[]", *owner
            self.database.execute(inserted, row)
            self._add_items(id, items, max_bytes)

    def update(self, namespace: bytes, id: str, fields: Document) -> bytes:
        """Set fields of a conversation, and return it as JSON. Raises NotStored."""
        with self._changing(namespace, id) as document:
            changed = orjson.dumps(orjson.loads(document) | fields)
            self.database.execute("UPDATE responses SET response = ? WHERE id = ?", (changed, id))
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
        removed = "DELETE FROM conversation_items WHERE namespace = ? AND id = ? RETURNING id"
        with self._changing(namespace, id) as document:
            if not self.database.execute(removed, (id, item_id)):
                raise NotStored(item_id)
            return document

    def conversation(self, namespace: bytes, id: str, count: Count = uncounted) -> list[Document]:
        """Return all items of a conversation, oldest first. Raises NotStored."""
        count(self.size(namespace, id))
        select = "SELECT item FROM conversation_items WHERE namespace = ? ORDER BY number"
        rows = self.database.execute(select, (id,))
        self._use([id])
        return [orjson.loads(item) for [item] in rows]

    def conversation_page(self, id: str, page: ListPage) -> bytes:
        rows = self._list("conversation_items", "item", id, page)
        return encode_page(ItemList, [orjson.loads(item) for [item] in rows], page.limit)

    def item(self, id: str, item_id: str) -> bytes:
        """Return an item of a conversation as JSON. Raises NotStored."""
        select = "SELECT item FROM conversation_items WHERE namespace = ? AND id = ?"
        rows = self.database.execute(select, (id, item_id))
        if not rows:
            raise NotStored(item_id)
        return bytes(rows[0][0])

    @contextlib.contextmanager
    def _changing(self, namespace: bytes, id: str) -> Iterator[bytes]:
        """Change a conversation in a transaction. Raises NotStored."""
        select = "SELECT response FROM responses WHERE namespace = ? AND id = ?"
        with self.database.transaction():
            locked = f"{select} {self.database.for_update}"
            rows = self.database.execute(locked, (namespace, id))
            if not rows:
                raise NotStored(id)
            with self._changed(id):
                yield rows[0][0]

    @contextlib.contextmanager
    def _changed(self, id: str) -> Iterator[None]:
        """Count the size of a conversation that has been changed, and drop others."""
        yield
        changed = f"UPDATE responses SET used = ?, size = length(response) + {ITEM_BYTES}"
        self.database.execute(f"{changed} WHERE id = ?", (microseconds(), id))
        self._drop()

    def _add_items(self, id: str, items: Sequence[Document], max_bytes: float) -> None:
        execute, contents = self.database.execute, [orjson.dumps(item) for item in items]
        last = "SELECT coalesce(max(number), 0) FROM conversation_items WHERE namespace = ?"
        [[number]] = execute(last, (id,))
        [[size]] = execute("SELECT size FROM responses WHERE id = ?", (id,))
        if size + sum(map(len, contents)) > max_bytes:
            reason = f"the conversation would exceed {max_bytes / 1_000_000:g} MB"
            raise InvalidInput.at("items", reason)
        added = "INSERT INTO conversation_items VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING"
        for n, (item, content) in enumerate(zip(items, contents, strict=True)):
            row = id, number + n + 1, item["id"], content
            if not execute(f"{added} RETURNING number", row):
                reason = "is in the conversation already"
                raise InvalidInput.at(f"items[{n}].id", reason)

    # ── bounds ──

    def _drop(self) -> None:
        """Drop the least recently used responses of the client that has the most, until all fit."""
        usage = self._usage("responses WHERE used > 0", "client", "size")
        count, size = map(sum, zip(*usage.values(), strict=True))
        # What another process drops is left to it, or two would wait for each other.
        oldest = (
            "SELECT id FROM responses WHERE client = ? AND used > 0 ORDER BY used LIMIT 1 "
            f"{self.database.skip_locked}"
        )
        dropped = f"DELETE FROM responses WHERE id = ({oldest}) RETURNING size"
        while count > self.max_responses or size > self.max_bytes:
            kind = int(count <= self.max_responses)
            client = max(usage, key=lambda client: usage[client][kind])
            rows = self.database.execute(dropped, (client,))
            if not rows:
                return
            [[freed]] = rows
            usage[client] = usage[client][0] - 1, usage[client][1] - freed
            if not usage[client][0]:
                del usage[client]
            count, size = count - 1, size - freed

    def size(self, namespace: bytes, id: str) -> int:
        return int(self._row("size", namespace, id)[0])

    def _row(self, columns: str, namespace: bytes, id: str) -> tuple[Any, ...]:
        select = f"SELECT {columns} FROM responses WHERE namespace = ? AND id = ?"
        rows = self.database.execute(select, (namespace, id))
        if not rows or id in self._lost:
            raise NotStored(id)
        return rows[0]
