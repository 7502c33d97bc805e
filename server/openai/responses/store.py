"""The store of responses by id, for `GET /v1/responses/{id}` and `previous_response_id`.

An sqlite database, in memory or in a file. It is bounded: the least recently used responses are
dropped. A conversation is a chain of responses, each with its own input only. Methods block: call
them in a pool thread.
"""

import contextlib
import math
import sqlite3
import threading
from collections.abc import Set
from dataclasses import dataclass
from typing import Any

import orjson

from server.http.json import Document

MAX_RESPONSES = 10_000
MAX_BYTES = 256_000_000

SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY,
    used INTEGER NOT NULL,
    size INTEGER NOT NULL,
    response BLOB NOT NULL,
    input BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS responses_sizes ON responses (used, size);
CREATE TABLE IF NOT EXISTS items (
    id TEXT NOT NULL,
    response_id TEXT NOT NULL REFERENCES responses (id) ON DELETE CASCADE,
    PRIMARY KEY (id, response_id)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS items_response ON items (response_id);
"""

NEXT_USE = "(SELECT coalesce(max(used), 0) + 1 FROM responses)"


class NotStored(Exception):
    """There is no stored response with this id."""

    def __init__(self, id: str) -> None:
        super().__init__(id)
        self.id = id


class TooLarge(Exception):
    """The stored items that a request refers to exceed the limit."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A response and its own input items, oldest first, without those of earlier responses."""

    response: Document
    input: list[Document]


class ResponseStore:
    """`path` is a file, or `:memory:`. Raises sqlite3.Error if the file cannot be used."""

    def __init__(
        self, path: str, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES
    ) -> None:
        self.max_responses = max_responses
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        self._database = sqlite3.connect(path, check_same_thread=False)
        run = self._database.execute
        run("PRAGMA foreign_keys = ON")
        run("PRAGMA journal_mode = WAL")
        run("PRAGMA synchronous = NORMAL")  # a power cut may lose the last responses only
        self._database.executescript(SCHEMA)

    @property
    def totals(self) -> tuple[int, int]:
        """The number of responses, and their bytes."""
        totals = "SELECT count(*), coalesce(sum(size), 0) FROM responses"
        count, size = self._database.execute(totals).fetchone()
        return count, size

    def close(self) -> None:
        with self._lock:
            self._database.close()

    def put(self, stored: Stored) -> None:
        """Store a response, and drop the least recently used ones beyond the bounds."""
        response, input_items = orjson.dumps(stored.response), orjson.dumps(stored.input)
        id, size = stored.response["id"], len(response) + len(input_items)
        items = {(item["id"], id) for item in (*stored.input, *stored.response["output"])}
        with self._lock, self._database as database:  # a transaction
            inserted = f"INSERT INTO responses VALUES (?, {NEXT_USE}, ?, ?, ?)"
            database.execute(inserted, (id, size, response, input_items))
            database.executemany("INSERT INTO items VALUES (?, ?)", items)
            count, total = self.totals
            oldest = "SELECT id FROM responses ORDER BY used LIMIT 1"
            while count > self.max_responses or total > self.max_bytes:
                dropped = f"DELETE FROM responses WHERE id = ({oldest}) RETURNING size"
                count, total = count - 1, total - database.execute(dropped).fetchone()[0]

    def get(self, id: str) -> Stored:
        with self._lock:
            return self._read(id)

    def chain(self, id: str, max_bytes: float = math.inf) -> list[Stored]:
        """Return the responses of a conversation, oldest first, up to the one with this id.

        Raises NotStored or TooLarge.
        """
        chain: list[Stored] = []
        next_id: str | None = id
        with self._lock:
            while next_id is not None:
                max_bytes -= self._size(next_id)
                if max_bytes < 0:
                    raise TooLarge(id)
                stored = self._read(next_id)
                chain.append(stored)
                next_id = stored.response["previous_response_id"]
            with contextlib.suppress(sqlite3.Error), self._database:  # the disk may be full
                used = f"UPDATE responses SET used = {NEXT_USE} WHERE id = ?"
                self._database.executemany(used, [(stored.response["id"],) for stored in chain])
        return chain[::-1]

    def items(self, ids: Set[str], max_bytes: float = math.inf) -> dict[str, Document]:
        """Return the input and output items of stored responses that have one of the ids.

        Raises TooLarge if their responses exceed `max_bytes`. A response is read once.
        """
        found: dict[str, Document] = {}
        of_item = "SELECT response_id FROM items WHERE id = ? LIMIT 1"
        for id in ids:
            if id in found:
                continue
            with self._lock:
                row = self._database.execute(of_item, (id,)).fetchone()
                if row is None:
                    continue
                max_bytes -= self._size(row[0])
                if max_bytes < 0:
                    raise TooLarge(id)
                stored = self._read(row[0])
            for item in (*stored.input, *stored.response["output"]):
                if item["id"] in ids:
                    found.setdefault(item["id"], item)
        return found

    def delete(self, id: str) -> None:
        with self._lock, self._database as database:
            if not database.execute("DELETE FROM responses WHERE id = ?", (id,)).rowcount:
                raise NotStored(id)

    def _read(self, id: str) -> Stored:
        response, input_items = self._row("response, input", id)
        return Stored(orjson.loads(response), orjson.loads(input_items))

    def _size(self, id: str) -> int:
        return int(self._row("size", id)[0])

    def _row(self, columns: str, id: str) -> tuple[Any, ...]:
        select = f"SELECT {columns} FROM responses WHERE id = ?"
        row: tuple[Any, ...] | None = self._database.execute(select, (id,)).fetchone()
        if row is None:
            raise NotStored(id)
        return row
