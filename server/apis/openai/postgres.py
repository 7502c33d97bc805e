"""PostgreSQL as the database of the stores of several servers, by psycopg and its pool.

    thread → a pooled connection → statements, each its own transaction or in one of the thread

The lock of this process is an advisory lock on a connection of its own. A paused process keeps it,
the server releases that of a killed one at once, and that of a lost machine by TCP's keepalives.
After an outage no process judges another one until all have had the time to connect again.
"""

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import psycopg
from psycopg.conninfo import conninfo_to_dict
from psycopg.pq import TransactionStatus
from psycopg_pool import ConnectionPool

from batching.errors import InvalidInput
from server.apis.openai.database import DatabaseDown, Row

logging.getLogger("psycopg").setLevel(logging.CRITICAL)  # each call here reports its failure

MAX_CONNECTIONS = 8  # of the pool
WAIT_S = 4.0  # for one of them, unless the database is down
REPLY_S = 20.0  # for a statement: more than its timeout, which a paused server does not enforce
RECONNECT_S = 5.0  # from an outage's end until all processes have their locks again
LOCK_CLASS = 0x0E0E  # of the advisory locks of processes
MIGRATION_LOCK = 0x0E0E0000
# `objid` is the number of each process, without a sign.
PROCESSES = (
    "FROM pg_locks JOIN pg_database ON database = pg_database.oid "
    f"WHERE datname = current_database() AND locktype = 'advisory' AND classid = {LOCK_CLASS}"
)
# A machine that is lost is noticed after 11 s without a reply.
CONNECTION = {
    "connect_timeout": 2, "tcp_user_timeout": 5000, "keepalives_idle": 5, "keepalives_interval": 2,
    "keepalives_count": 3, "application_name": "onequeue",
}  # fmt: skip
# Of a session. The second one is for a process that is stopped within a transaction.
SESSION = (
    "SET statement_timeout = '10s'; SET idle_in_transaction_session_timeout = '10s'; "
    "SET tcp_keepalives_idle = 5; SET tcp_keepalives_interval = 2; SET tcp_keepalives_count = 3"
)


class PostgresConnection(psycopg.Connection[Row]):  # type: ignore[misc,unused-ignore]
    def wait(self, gen: Any, *_: Any, **__: Any) -> Any:
        """Run a statement. Closes the connection if it has no result within REPLY_S."""
        try:
            return super().wait(gen, timeout=REPLY_S)
        except psycopg.OperationalError:
            if self.pgconn.transaction_status == TransactionStatus.ACTIVE:
                self.pgconn.finish()
            raise


def configure(connection: PostgresConnection) -> None:
    connection.execute(SESSION)


class PostgresDatabase:
    """Raises DatabaseDown if the server of `url` cannot be reached, ValueError for a wrong one."""

    is_shared = True
    for_update = "FOR UPDATE"
    skip_locked = "FOR UPDATE SKIP LOCKED"
    types: ClassVar = {
        "INTEGER PRIMARY KEY AUTOINCREMENT": "BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY",
        "INTEGER": "BIGINT",
        "BLOB": "BYTEA",
        ") WITHOUT ROWID": ")",
    }

    def __init__(self, url: str) -> None:
        self.process = secrets.token_hex(4)
        try:
            self._options: Any = CONNECTION | conninfo_to_dict(url) | {"autocommit": True}
        except psycopg.ProgrammingError:  # its text may quote the password
            raise ValueError("is not a URL of PostgreSQL with known parameters") from None
        self._thread = threading.local()  # its transaction
        # Others may be connecting again at this time.
        self._judges_from, self._is_down = time.monotonic() + RECONNECT_S, False
        self._locking = self._connect()
        self._pool = ConnectionPool(
            kwargs=self._options,
            connection_class=PostgresConnection,
            min_size=1,
            max_size=MAX_CONNECTIONS,
            open=True,
            configure=configure,
            check=ConnectionPool.check_connection,  # a restart of the server closes idle ones
            timeout=WAIT_S,
            reconnect_timeout=WAIT_S / 2,
        )

    def execute(self, sql: str, values: Sequence[object] = ()) -> list[Row]:
        with self._connection() as connection:
            cursor = connection.execute(sql.replace("?", "%s"), values)
            return cursor.fetchall() if cursor.description else []

    def execute_many(self, sql: str, rows: Sequence[Sequence[object]]) -> None:
        with self._connection() as connection:
            connection.cursor().executemany(sql.replace("?", "%s"), rows)

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        if getattr(self._thread, "connection", None):
            yield
            return
        with self._connection() as connection, connection.transaction():
            self._thread.connection = connection
            try:
                yield
            finally:
                self._thread.connection = None

    def is_alive(self, process: str) -> bool:
        if time.monotonic() < self._judges_from:
            return True
        locked = "SELECT pg_try_advisory_xact_lock(?, ?)"
        [[is_free]] = self.execute(locked, (LOCK_CLASS, lock_number(process)))
        return not is_free

    def count_processes(self) -> int:
        """Return the number of processes that use the database."""
        return max(1, int(self.execute(f"SELECT count(*) {PROCESSES}")[0][0]))

    def renew(self) -> None:
        try:
            self._locking.execute("SELECT 1")
        except psycopg.Error:
            self._is_down = True
            self._locking.close()
            self._locking = self._connect()
            self._judges_from, self._is_down = time.monotonic() + RECONNECT_S, False

    def close(self) -> None:
        self._pool.close()
        self._locking.close()

    def _connect(self) -> PostgresConnection:
        """Return a connection that holds the lock of this process."""
        with converting_errors():
            connection: PostgresConnection = PostgresConnection.connect(**self._options)
            configure(connection)
            number = lock_number(self.process)
            connection.execute("SELECT pg_advisory_lock(%s, %s)", (LOCK_CLASS, number))
            return connection

    @contextlib.contextmanager
    def _connection(self) -> Iterator[PostgresConnection]:
        """Yield the connection of the thread's transaction, or one of the pool."""
        with converting_errors():
            if connection := getattr(self._thread, "connection", None):
                yield connection
                return
            if self._is_down:  # a wait of each would take threads from other requests
                raise DatabaseDown("it could not be reached a second ago")
            with self._pool.connection() as connection:
                yield connection

    def version(self, name: str) -> int:
        self.execute("SELECT pg_advisory_xact_lock(?)", (MIGRATION_LOCK,))
        self.execute(
            "CREATE TABLE IF NOT EXISTS schema_versions "
            "(name TEXT PRIMARY KEY, version BIGINT NOT NULL)"
        )
        rows = self.execute("SELECT version FROM schema_versions WHERE name = ?", (name,))
        return rows[0][0] if rows else 0

    def set_version(self, name: str, version: int) -> None:
        inserted = "INSERT INTO schema_versions VALUES (?, ?) ON CONFLICT (name) DO UPDATE"
        self.execute(f"{inserted} SET version = excluded.version", (name, version))


@contextlib.contextmanager
def converting_errors() -> Iterator[None]:
    try:
        yield
    except psycopg.DataError as error:  # a text with NUL, which SQLite takes
        raise InvalidInput(f"cannot be stored: {str(error)[:200]}") from None
    except psycopg.Error as error:
        raise DatabaseDown(repr(error)) from error


def lock_number(process: str) -> int:
    """Return a process's name as PostgreSQL's integer."""
    return int(process, 16) - (1 << 31)
