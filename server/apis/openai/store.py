"""The base of the stores of responses, files and batches, in a database (database.py).

Rows are looked up within a namespace, that of an API key; those of other namespaces do not exist
for it. A row that is being worked on names its process, which holds a lock until it ends. Methods
block: call them in a pool thread.
"""

import contextlib
import hashlib
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from anyio import CapacityLimiter
from anyio.to_thread import run_sync
from msgspec import Meta, Struct

from batching.errors import InvalidInput, QueueFull
from server.apis.openai.database import Database, DatabaseDown, NewerSchema
from server.http.json import to_json

log = logging.getLogger("onequeue.store")

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
    return Owner(storage_namespace(key), storage_namespace(key or address.encode()))


def storage_namespace(name: bytes) -> bytes:
    return hashlib.blake2b(name, digest_size=16, person=b"responses").digest()


class ListPage(Struct):
    after: Annotated[str | None, Meta(description="The id of an entry")] = None
    limit: Annotated[int, Meta(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"


def encode_page(kind: Callable[..., object], entries: Sequence[Any], limit: int) -> bytes:
    """Return a page of a list as JSON; `entries` has one more if there are more."""
    has_more, entries = len(entries) > limit, entries[:limit]
    ids = [entry["id"] if isinstance(entry, dict) else entry.id for entry in entries] or [None]
    return to_json(kind("list", entries, ids[0], ids[-1], has_more))


@contextlib.contextmanager
def refusing_disk_errors() -> Iterator[None]:
    """Raise QueueFull if the disk or the database of a store fails."""
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        log.error("store not available error=%.200r", error)
        if isinstance(error, DatabaseDown):
            raise QueueFull(str(error), RETRY_S) from None
        reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else error
        raise QueueFull(f"the server's disk has failed: {reason}", RETRY_S) from None


async def in_store(
    call: Callable[..., T], *arguments: Any, limiter: CapacityLimiter | None = None
) -> T:
    """Call a method of a store in a pool thread. Raises QueueFull if the disk fails."""
    with refusing_disk_errors():
        return await run_sync(call, *arguments, limiter=limiter)


class Store:
    """Tables of a database. Raises NewerSchema, and OSError or sqlite3.Error if it cannot be used.

    `name`: of the tables' version. `migrations`: scripts of SQL, each of which makes the next
    version of them, from none; `{now}` is the time in microseconds."""

    def __init__(self, database: Database, name: str, migrations: Sequence[str]) -> None:
        self.database = database
        with database.transaction():
            version = database.version(name)
            if version > len(migrations):
                known = f"this server knows versions up to {len(migrations)}"
                raise NewerSchema(f"its schema {name!r} has version {version}, and {known}")
            for script in migrations[version:]:
                script = script.format(now=int(time.time() * 1e6))
                for type_, own in database.types.items():
                    script = script.replace(type_, own)
                for statement in filter(str.strip, script.split(";")):
                    database.execute(statement)
            if version < len(migrations):
                database.set_version(name, len(migrations))

    def close(self) -> None:
        self.database.close()

    def cancelled(self) -> list[str]:
        """Return the rows that this process works on and is to cancel."""
        return []

    def release_abandoned(self) -> None:
        """End, or release, the work of dead processes."""

    def remove_expired(self) -> None:
        """Remove expired rows."""

    def _dead(self, table: Literal["generating", "lines", "batches"]) -> list[str]:
        """Return the dead processes that rows of a table name."""
        named = f"SELECT DISTINCT process FROM {table} WHERE process IS NOT NULL AND process != ?"
        names = [name for [name] in self.database.execute(named, (self.database.process,))]
        return [name for name in names if not self.database.is_alive(name)]

    def _usage(self, table: str, owner: str, size: str) -> dict[bytes, tuple[int, int]]:
        """Return the number and the bytes of each owner's rows."""
        total = f"CAST(sum({size}) AS BIGINT)"
        usage = f"SELECT {owner}, count(*), {total} FROM {table} GROUP BY {owner}"
        return {owner: (count, size) for owner, count, size in self.database.execute(usage)}

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
        order, sign = ("DESC", "<") if page.order == "desc" else ("ASC", ">")
        conditions = [namespace, *values]
        if page.after is not None:
            found = f"SELECT number FROM {table} WHERE namespace = ? AND id = ?"
            rows = self.database.execute(found, (namespace, page.after))
            if not rows:
                reason = f"there is no {page.after[:100]!r} in the list"
                raise InvalidInput.at("after", reason)
            where = f"{where} AND number {sign} ?"
            conditions.append(rows[0][0])
        select = (
            f"SELECT {columns} FROM {table} WHERE namespace = ? AND {where} "
            f"ORDER BY number {order} LIMIT ?"
        )
        return self.database.execute(select, (*conditions, page.limit + 1))
