"""A PostgreSQL server in a temporary folder, and databases for tests of the stores."""

import os
import pwd
import shutil
import signal
import sqlite3
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from server.apis.openai.database import Database, SqliteDatabase
from tests.serving import wait_until

PROGRAMS = [*sorted(Path("/usr/lib/postgresql").glob("*/bin"))]
# Without a disk's delays; a test kills the server, not the machine.
OPTIONS = "listen_addresses=", "fsync=off", "full_page_writes=off", "max_connections=200"


class Postgres:
    """A server that listens on a Unix socket in its folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.user = "postgres" if os.getuid() == 0 else pwd.getpwuid(os.getuid()).pw_name
        os.chown(folder, pwd.getpwnam(self.user).pw_uid, -1)
        self._numbers = count(1)
        options = "-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync"
        self._start("initdb", "-D", str(folder / "data"), *options).wait(120)
        self.start()

    def _start(self, program: str, *arguments: str) -> "subprocess.Popen[bytes]":
        command = [str(PROGRAMS[-1] / program), *arguments]
        others: dict[str, Any] = {"user": self.user} if os.getuid() == 0 else {}  # not root
        with (self.folder / "log").open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, cwd=self.folder, **others)

    def start(self) -> None:
        options = [part for option in OPTIONS for part in ("-c", option)]
        folders = "-D", str(self.folder / "data"), "-k", str(self.folder)
        self.server = self._start("postgres", *folders, *options)
        wait_until(self._answers)

    def stop(self, number: int = signal.SIGINT) -> None:
        """Stop the server, and end its connections at once."""
        self.server.send_signal(number)
        self.server.wait(60)

    def url(self, name: str = "postgres") -> str:
        return f"postgresql://postgres@/{name}?host={self.folder}"

    def new_database(self) -> str:
        """Return the URL of an empty database."""
        name = f"test{next(self._numbers)}"
        self.execute(f"CREATE DATABASE {name}")
        return self.url(name)

    def execute(self, sql: str, url: str = "") -> list[Any]:
        import psycopg

        with psycopg.connect(url or self.url(), autocommit=True) as connection:
            cursor = connection.execute(sql)  # type: ignore[arg-type,unused-ignore]
            return cursor.fetchall() if cursor.description else []

    def _answers(self) -> bool:
        assert self.server.poll() is None, (self.folder / "log").read_text()
        with suppress(Exception):
            return self.execute("SELECT 1") == [(1,)]
        return False


@contextmanager
def running_postgres() -> Iterator[Postgres]:
    try:
        import psycopg_pool  # noqa: F401
    except ImportError:
        is_installed = False
    else:
        is_installed = bool(PROGRAMS)
    if not is_installed:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("PostgreSQL is not installed")
    folder = Path(tempfile.mkdtemp(prefix="onequeue-postgres-"))
    try:
        server = Postgres(folder)
        try:
            yield server
        finally:
            server.stop(signal.SIGQUIT)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class Databases:
    """An empty database, which each call of `open` opens as another process would."""

    def __init__(self, url: str) -> None:
        self.url = url  # of PostgreSQL, or a path
        self._opened = ExitStack()

    @property
    def is_postgres(self) -> bool:
        return "://" in self.url

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of a server with its stores in the database, or beside the path."""
        if self.is_postgres:
            return {"store": self.url}
        return {"responses_db": self.url, "batch_dir": self.url + ".batches"}

    def open(self) -> Database:
        if not self.is_postgres:
            return SqliteDatabase(self.url)
        from server.apis.openai.postgres import PostgresDatabase

        database = PostgresDatabase(self.url)
        self._opened.callback(database.close)
        return database

    def execute(self, sql: str, values: Sequence[object] = ()) -> list[Any]:
        """Run a statement on the tables of batches."""
        if not self.is_postgres:
            path = Path(self.settings["batch_dir"]) / "batches.sqlite"
            with closing(sqlite3.connect(path)) as database, database:
                return database.execute(sql, values).fetchall()
        import psycopg

        with psycopg.connect(self.url) as connection:
            cursor = connection.execute(sql.replace("?", "%s"), values)  # type: ignore[arg-type,unused-ignore]
            return cursor.fetchall() if cursor.description else []

    def close(self) -> None:
        self._opened.close()


def kill(database: Any) -> None:
    """End the locks of a process as SIGKILL does."""
    if isinstance(database, SqliteDatabase):
        database.connection.close()
        os.close(database._locked)
        database.is_shared = False  # it can be closed
        return
    import psycopg

    from server.apis.openai.postgres import lock_number

    url = f"dbname={database._options['dbname']} host={database._options['host']} user=postgres"
    database.close()
    locks = "SELECT FROM pg_locks WHERE locktype = 'advisory' AND objid::bigint = %s"
    number = lock_number(database.process) % (1 << 32)
    with psycopg.connect(url, autocommit=True) as connection:
        wait_until(lambda: not connection.execute(locks, (number,)).fetchall())
