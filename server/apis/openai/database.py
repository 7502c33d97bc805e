"""The database of a store: SQLite here, embedded, in memory or in a file that processes of one
machine share; PostgreSQL in postgres.py, for several machines.

Both run the same SQL: `?` stands for a value, and a text has the types of SQLite. A process holds a
lock until it ends, by which others see that it lives. The system, or the server, releases it.
Methods block, and are for any thread; a transaction is one thread's.
"""

import contextlib
import fcntl
import os
import secrets
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, Union

if TYPE_CHECKING:
    from server.apis.openai.postgres import PostgresDatabase

OPEN_S = 30.0  # to wait for other processes that open a new file
MAX_LOG_BYTES = 1 << 26  # of the write-ahead log on the disk, once no reader needs more

Row = tuple[Any, ...]


class DatabaseDown(OSError):
    """PostgreSQL cannot be reached, or has failed. Its text is for clients: it has no address."""

    def __str__(self) -> str:
        return "the server's database is not available"


class NewerSchema(Exception):
    """A newer server has migrated the database."""


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
    an error with the path. Raises OSError for a folder or a device, sqlite3.Error for another file,
    whose mode is kept."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise OSError("it is not a regular file")
    with contextlib.suppress(OSError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL, 0o600))  # closing another's ends its locks
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA schema_version")
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


class SqliteDatabase:
    """`path` is a file, or `:memory:`. Raises OSError or sqlite3.Error if it cannot be used."""

    # Clauses of SELECT for rows that the transaction changes; SQLite has one transaction at a time.
    for_update = skip_locked = ""
    types: ClassVar[Mapping[str, str]] = {}  # from SQLite's types to its own, in this order

    def __init__(self, path: str) -> None:
        self.process = secrets.token_hex(4)  # the name of this one
        self.is_shared = path != ":memory:"  # other processes find its rows
        self.is_alone = True  # no other process had it open before
        self._path = Path(path)
        self._lock = threading.RLock()
        if self.is_shared:
            make_private(path)
        self.connection = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        self.connection.execute("PRAGMA foreign_keys = ON")
        use_write_ahead_log(self.connection)
        self.connection.execute(f"PRAGMA journal_size_limit = {MAX_LOG_BYTES}")
        self.connection.execute("PRAGMA synchronous = NORMAL")  # a power cut loses the last changes
        # In a transaction: another process does not take an unlocked file for a dead one's.
        with self.transaction():
            if self.is_shared:
                self._lock_process()

    def execute(self, sql: str, values: Sequence[object] = ()) -> list[Row]:
        """Run a statement, and return its rows; in a transaction of the thread, if there is one."""
        with self._lock:
            return self.connection.execute(sql, values).fetchall()

    def execute_many(self, sql: str, rows: Sequence[Sequence[object]]) -> None:
        """Run a statement with each of the rows, within a transaction."""
        self.connection.executemany(sql, rows)

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Begin a transaction, or go on with that of the thread."""
        with self._lock:
            if self.connection.in_transaction:
                yield
                return
            self.connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                self.connection.execute("COMMIT")
            except BaseException:
                if self.connection.in_transaction:  # a full disk has ended it
                    self.connection.execute("ROLLBACK")
                raise

    def close(self) -> None:
        """Release the lock of this process, and close all connections."""
        with self._lock:
            self.connection.close()
            if self.is_shared:
                self._process_file(self.process).unlink(missing_ok=True)
                os.close(self._locked)

    def is_alive(self, process: str) -> bool:
        """Return whether a process still runs; the file of a dead one is removed."""
        path = self._process_file(process)
        file = lock_file(path)
        if file is None:
            return True
        path.unlink(missing_ok=True)
        os.close(file)
        return False

    def _process_file(self, process: str) -> Path:
        return self._path.with_name(f"{self._path.name}-{process}.lock")

    def _lock_process(self) -> None:
        """Hold the file of this process, and remove those of dead ones."""
        paths = self._path.parent.glob(self._process_file("*").name)
        names = [path.name.removesuffix(".lock").rpartition("-")[2] for path in paths]
        self.is_alone = not any([self.is_alive(name) for name in names])  # noqa: C419  # of all
        file = lock_file(self._process_file(self.process))
        assert file is not None
        self._locked = file

    def renew(self) -> None:
        """Connect again if the connection of this process's lock is lost: there is none here."""

    def version(self, name: str) -> int:
        """Return the version of tables, 0 if there are none. No other process migrates until the
        end of the transaction."""
        return int(self.execute("PRAGMA user_version")[0][0])

    def set_version(self, name: str, version: int) -> None:
        self.connection.execute(f"PRAGMA user_version = {version}")


Database: TypeAlias = Union[SqliteDatabase, "PostgresDatabase"]
