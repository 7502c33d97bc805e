"""Stored responses, by id: what `GET /v1/responses/{id}` and `previous_response_id` look up.

One sqlite database, in memory or in a file. It is bounded: what was stored or built upon longest
ago goes first. A conversation is a chain of responses, each with its input alone, so that a turn
costs as much room as it adds. Methods block; call them in a pool thread.
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

MOST_RESPONSES = 10_000
MOST_BYTES = 256_000_000

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
    """`id` is of no stored response, or of no item of one."""

    def __init__(self, id: str) -> None:
        super().__init__(id)
        self.id = id


class TooLarge(Exception):
    """What a response builds on."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A response as it ended, and the items it was given, oldest first, without its chain's."""

    response: Document
    input: list[Document]


class ResponseStore:
    """Raises sqlite3.Error if the file at `path` cannot be used. `:memory:` is no file."""

    def __init__(
        self, path: str, most_responses: int = MOST_RESPONSES, most_bytes: int = MOST_BYTES
    ) -> None:
        self.most_responses = most_responses
        self.most_bytes = most_bytes
        self._lock = threading.Lock()
        self._database = sqlite3.connect(path, check_same_thread=False)
        run = self._database.execute
        run("PRAGMA foreign_keys = ON")
        run("PRAGMA journal_mode = WAL")
        run("PRAGMA synchronous = NORMAL")  # a power cut may cost the last ones, never the file
        self._database.executescript(SCHEMA)

    @property
    def totals(self) -> tuple[int, int]:
        """How many responses there are, and their bytes."""
        totals = "SELECT count(*), coalesce(sum(size), 0) FROM responses"
        count, size = self._database.execute(totals).fetchone()
        return count, size

    def close(self) -> None:
        with self._lock:
            self._database.close()

    def put(self, stored: Stored) -> None:
        """Keep a response, and drop others until both bounds hold."""
        response, given = orjson.dumps(stored.response), orjson.dumps(stored.input)
        id, size = stored.response["id"], len(response) + len(given)
        items = {(item["id"], id) for item in (*stored.input, *stored.response["output"])}
        with self._lock, self._database as database:  # all of it or, if it raises, nothing
            inserted = f"INSERT INTO responses VALUES (?, {NEXT_USE}, ?, ?, ?)"
            database.execute(inserted, (id, size, response, given))
            database.executemany("INSERT INTO items VALUES (?, ?)", items)
            count, total = self.totals
            oldest = "SELECT id FROM responses ORDER BY used LIMIT 1"
            while count > self.most_responses or total > self.most_bytes:
                dropped = f"DELETE FROM responses WHERE id = ({oldest}) RETURNING size"
                count, total = count - 1, total - database.execute(dropped).fetchone()[0]

    def get(self, id: str) -> Stored:
        with self._lock:
            return self._read(id)

    def chain(self, id: str, most_bytes: float = math.inf) -> list[Stored]:
        """A response and all before it in its conversation, first one first; or TooLarge."""
        found: list[Stored] = []
        following: str | None = id
        with self._lock:
            while following is not None:
                most_bytes -= self._size(following)
                if most_bytes < 0:
                    raise TooLarge(id)
                stored = self._read(following)
                found.append(stored)
                following = stored.response["previous_response_id"]
            with contextlib.suppress(sqlite3.Error), self._database:  # a full disk can be read
                used = f"UPDATE responses SET used = {NEXT_USE} WHERE id = ?"
                self._database.executemany(used, [(each.response["id"],) for each in found])
        return found[::-1]

    def items(self, ids: Set[str], most_bytes: float = math.inf) -> dict[str, Document]:
        """Those input and output items of any stored response that there are, by their ids; or
        TooLarge. Each response is read once, however many are of it."""
        found: dict[str, Document] = {}
        of_item = "SELECT response_id FROM items WHERE id = ? LIMIT 1"
        for id in ids:
            if id in found:
                continue
            with self._lock:
                row = self._database.execute(of_item, (id,)).fetchone()
                if row is None:
                    continue
                most_bytes -= self._size(row[0])
                if most_bytes < 0:
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
        response, given = self._row("response, input", id)
        return Stored(orjson.loads(response), orjson.loads(given))

    def _size(self, id: str) -> int:
        return int(self._row("size", id)[0])

    def _row(self, columns: str, id: str) -> tuple[Any, ...]:
        found = f"SELECT {columns} FROM responses WHERE id = ?"
        row: tuple[Any, ...] | None = self._database.execute(found, (id,)).fetchone()
        if row is None:
            raise NotStored(id)
        return row
