"""The files and batches of `BATCH_DIR`: an sqlite database, and a folder with the contents.

    upload → file → batch → its lines, in order → results: file, then database → output files

A result is in its file, on the disk, before the database knows that its line is done; what a crash
has left behind that is overwritten. One process uses a folder.
"""

import os
import secrets
import shutil
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import json

from batching.errors import InvalidInput
from server.apis.openai.batches.input_file import CheckedLine
from server.apis.openai.response_schemas import (
    BatchError,
    BatchErrors,
    BatchJob,
    BatchList,
    BatchStatus,
    BatchUsage,
    CompletionTokensDetails,
    FileList,
    FileObject,
    PromptTokensDetails,
)
from server.apis.openai.sqlite_store import ListPage, SqliteStore, encode_page
from server.http.errors import HttpError

WINDOW_S = 24 * 3600  # the only completion window
KEPT_S = 30 * 24 * 3600  # files by default, and batches that have ended
FILE_OVERHEAD = 4096  # bytes that a file takes beside its content
# Of a namespace.
MAX_FILES = 10_000
MAX_UNFINISHED = 100
MAX_ENDED = 1000

SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    namespace BLOB NOT NULL,
    purpose TEXT NOT NULL,
    filename TEXT NOT NULL,
    bytes INTEGER NOT NULL,
    created_at INTEGER NOT NULL,
    expires_at INTEGER NOT NULL,
    is_whole INTEGER NOT NULL
);
CREATE INDEX IF NOT EXISTS files_of_namespace ON files (namespace, number);
CREATE INDEX IF NOT EXISTS files_sizes ON files (namespace, bytes);
CREATE TABLE IF NOT EXISTS batches (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    namespace BLOB NOT NULL,
    address TEXT NOT NULL,
    input_id TEXT NOT NULL,
    output_id TEXT NOT NULL,
    error_id TEXT NOT NULL,
    output_kept_s INTEGER NOT NULL,
    crashes INTEGER NOT NULL,
    ended_at INTEGER,
    job BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS batches_of_namespace ON batches (namespace, number);
CREATE TABLE IF NOT EXISTS lines (
    batch INTEGER NOT NULL REFERENCES batches (number) ON DELETE CASCADE,
    position INTEGER NOT NULL,
    number INTEGER NOT NULL,
    offset INTEGER NOT NULL,
    size INTEGER NOT NULL,
    is_done INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (batch, position)
) WITHOUT ROWID;
"""
FILE_COLUMNS = "id, bytes, created_at, expires_at, filename, purpose"
FOUND = "namespace = ? AND id = ? AND is_whole AND expires_at > ?"


class FolderInUse(Exception):
    """Another process uses the folder."""


class StoreFull(Exception):
    """The files would exceed the limit of the folder, or of a key's part of it."""


class PendingInput(NamedTuple):
    """A line without a result."""

    position: int  # in the order in which lines run
    number: int
    offset: int
    size: int


class LineTokens(NamedTuple):
    """The tokens of a line."""

    input: int = 0
    cached: int = 0  # of the input
    output: int = 0
    reasoning: int = 0  # of the output


class LineResult(NamedTuple):
    position: int
    content: bytes  # a line of the output or the error file
    is_error: bool
    model: str | None = None
    tokens: LineTokens = LineTokens()


@dataclass(eq=False)
class BatchRecord:
    """A batch that has not ended, and what only the server knows of it."""

    job: BatchJob
    number: int
    namespace: bytes
    address: str
    output_id: str
    error_id: str
    output_kept_s: int
    crashes: int  # of processes that ran it, since its last result


class BatchStore(SqliteStore):
    """`max_bytes` of all files, and of those of one namespace. Raises FolderInUse, and OSError or
    sqlite3.Error if the folder cannot be used."""

    def __init__(self, folder: str, max_bytes: int, max_namespace_bytes: int) -> None:
        self.max_bytes, self.max_namespace_bytes = max_bytes, max_namespace_bytes
        root = Path(folder).expanduser()
        self.files, self.uploads = root / "files", root / "uploads"
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        super().__init__(str(root / "batches.sqlite"), SCHEMA)
        if not self.is_alone:
            self.close()
            raise FolderInUse("another server process uses it")
        shutil.rmtree(self.uploads, ignore_errors=True)
        for path in (self.files, self.uploads):
            path.mkdir(exist_ok=True)
        known = {id for [id] in self._database.execute("SELECT id FROM files")}
        for path in self.files.iterdir():  # a crash may have left some
            if path.name not in known:
                path.unlink()

    def path(self, id: str) -> Path:
        return self.files / id

    # ── files ──

    def add_file(
        self, namespace: bytes, source: str, filename: str, size: int, kept_s: int
    ) -> FileObject:
        """Move an uploaded file into the store. Raises HttpError if there is no room for it."""
        now, id = int(time.time()), "file-" + secrets.token_hex(12)
        values = id, namespace, "batch", filename, size, now, now + kept_s
        with self._lock, self._database:  # a transaction
            try:
                self._check_room(namespace, size + FILE_OVERHEAD, files=1)
            except StoreFull as error:
                message = f"{error}: delete files first"
                raise HttpError(413, message, code="storage_full") from None
            os.rename(source, self.path(id))
            self._insert_file(*values, is_whole=True)
        return file_object((id, size, now, now + kept_s, filename, "batch"))

    def _insert_file(self, *values: object, is_whole: bool) -> None:
        columns = "id, namespace, purpose, filename, bytes, created_at, expires_at, is_whole"
        inserted = f"INSERT INTO files ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
        self._database.execute(inserted, (*values, is_whole))

    def file(self, namespace: bytes, id: str, param: str = "id") -> FileObject:
        select = f"SELECT {FILE_COLUMNS} FROM files WHERE {FOUND}"
        with self._lock:
            row = self._database.execute(select, (namespace, id, time.time())).fetchone()
        if row is None:
            raise HttpError(404, f"there is no file {id[:100]!r}", param)
        return file_object(row)

    def list_files(self, namespace: bytes, page: ListPage, purpose: str | None) -> bytes:
        """Return a page of files as JSON."""
        values: list[object] = [time.time()]
        where = "is_whole AND expires_at > ?"
        if purpose is not None:
            where, values = where + " AND purpose = ?", [*values, purpose]
        rows = self._list("files", FILE_COLUMNS, namespace, page, where, values)
        return encode_page(FileList, [file_object(row) for row in rows], page.limit)

    def delete_file(self, namespace: bytes, id: str) -> None:
        using = "SELECT id FROM batches WHERE input_id = ? AND ended_at IS NULL"
        with self._lock:  # as a whole, so that no batch begins to use the file meanwhile
            self.file(namespace, id)
            if user := self._database.execute(using, (id,)).fetchone():
                reason = f"the file is the input of {user[0]}, which has not ended: cancel it first"
                raise InvalidInput.at("id", reason)
            self._remove_files("id = ?", (id,))

    def _remove_files(self, where: str, values: Sequence[object]) -> None:
        with self._lock, self._database:
            ids = self._delete_rows(where, values)
        self._unlink(ids)

    def _delete_rows(self, where: str, values: Sequence[object]) -> list[str]:
        """Return the ids of the files. Within a transaction."""
        removed = f"DELETE FROM files WHERE {where} RETURNING id"
        return [id for [id] in self._database.execute(removed, values)]

    def _unlink(self, ids: Iterable[str]) -> None:
        for id in ids:
            self.path(id).unlink(missing_ok=True)

    def remove_expired(self) -> None:
        """Remove expired files that no batch needs, and batches that have ended long ago."""
        now = time.time()
        needed = "SELECT input_id FROM batches WHERE ended_at IS NULL"
        self._remove_files(f"expires_at <= ? AND is_whole AND id NOT IN ({needed})", (now,))
        with self._lock, self._database as database:
            database.execute("DELETE FROM batches WHERE ended_at <= ?", (now - KEPT_S,))

    def _check_room(self, namespace: bytes, size: int, files: int = 0) -> None:
        """Raise StoreFull unless there is room for bytes that are about to be stored. Within the
        lock."""
        usage = self._usage("files", "namespace", f"bytes + {FILE_OVERHEAD}")
        number, used = usage.get(namespace, (0, 0))
        if number + files > MAX_FILES:
            raise StoreFull(f"there are {number} files of this key")
        total = sum(used for _, used in usage.values())
        for bytes_used, limit, name in (
            (used, self.max_namespace_bytes, "the files of this key"),
            (total, self.max_bytes, "all files together"),
        ):
            if bytes_used + size > limit:
                raise StoreFull(f"{name} would exceed {limit / 1e9:g} GB")

    # ── batches ──

    def create(
        self,
        namespace: bytes,
        address: str,
        endpoint: str,
        input_id: str,
        metadata: dict[str, str] | None,
        output_kept_s: int,
    ) -> BatchRecord:
        """Store a new batch. Raises HttpError (404) for an unknown file, and InvalidInput."""
        now = int(time.time())
        id = "batch_" + secrets.token_hex(12)
        output_id, error_id = ("file-" + secrets.token_hex(12) for _ in range(2))
        job = BatchJob(id, "batch", endpoint, input_id, "24h", now, now + WINDOW_S, metadata)
        unfinished = "SELECT count(*) FROM batches WHERE namespace = ? AND ended_at IS NULL"
        dropped = (
            "DELETE FROM batches WHERE number IN (SELECT number FROM batches WHERE namespace = ? "
            "AND ended_at IS NOT NULL ORDER BY number DESC LIMIT -1 OFFSET ?)"
        )
        columns = (
            "id, namespace, address, input_id, output_id, error_id, output_kept_s, crashes, job"
        )
        inserted = f"INSERT INTO batches ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?, 0, ?)"
        ids = input_id, output_id, error_id
        values = id, namespace, address, *ids, output_kept_s, json.encode(job)
        with self._lock, self._database as database:
            file = self.file(namespace, input_id, "input_file_id")
            if file.purpose != "batch":
                reason = f"must be a file with purpose 'batch', not {file.purpose!r}"
                raise InvalidInput.at("input_file_id", reason)
            [number] = database.execute(unfinished, (namespace,)).fetchone()
            if number >= MAX_UNFINISHED:
                raise InvalidInput(f"{number} batches of this key have not ended: wait for one")
            database.execute(dropped, (namespace, MAX_ENDED))
            row = database.execute(inserted, values).lastrowid
        assert row is not None
        return BatchRecord(job, row, namespace, address, output_id, error_id, output_kept_s, 0)

    def batch(self, namespace: bytes, id: str) -> bytes:
        """Return a batch as JSON."""
        select = "SELECT job FROM batches WHERE namespace = ? AND id = ?"
        with self._lock:
            row = self._database.execute(select, (namespace, id)).fetchone()
        if row is None:
            raise HttpError(404, f"there is no batch {id[:100]!r}", "id")
        job: bytes = row[0]
        return job

    def list_batches(self, namespace: bytes, page: ListPage) -> bytes:
        """Return a page of batches as JSON."""
        rows = self._list("batches", "job", namespace, page)
        jobs = [json.decode(job, type=BatchJob) for [job] in rows]
        return encode_page(BatchList, jobs, page.limit)

    def unfinished(self) -> list[BatchRecord]:
        """Return the batches that have not ended, oldest first."""
        return self._records("ended_at IS NULL ORDER BY number", ())

    def reload(self, record: BatchRecord) -> BatchRecord:
        """Return the stored state of a batch, after an error."""
        [stored] = self._records("number = ?", (record.number,))
        return stored

    def _records(self, where: str, values: Sequence[object]) -> list[BatchRecord]:
        columns = "job, number, namespace, address, output_id, error_id, output_kept_s, crashes"
        select = f"SELECT {columns} FROM batches WHERE {where}"
        with self._lock:
            rows = self._database.execute(select, values).fetchall()
        return [BatchRecord(json.decode(row[0], type=BatchJob), *row[1:]) for row in rows]

    def save(self, record: BatchRecord) -> None:
        with self._lock, self._database:
            self._save(record)

    def _save(self, record: BatchRecord) -> None:
        """Within a transaction."""
        values = json.encode(record.job), record.crashes, record.number
        self._database.execute("UPDATE batches SET job = ?, crashes = ? WHERE number = ?", values)

    def begin(self, record: BatchRecord, lines: Sequence[CheckedLine]) -> None:
        """Store the checked lines of a batch, in the order in which they run."""
        job, now = record.job, int(time.time())
        job.status, job.in_progress_at = "in_progress", now
        job.request_counts.total = len(lines)
        rows = [(record.number, n, *line[:3]) for n, line in enumerate(lines)]
        columns = "batch, position, number, offset, size"
        inserted = f"INSERT INTO lines ({columns}) VALUES (?, ?, ?, ?, ?)"
        names = (record.output_id, "output"), (record.error_id, "error")
        with self._lock, self._database as database:
            database.executemany(inserted, rows)
            for id, name in names:
                filename = f"{job.id}_{name}.jsonl"
                values = id, record.namespace, "batch_output", filename, 0, now, 0
                self._insert_file(*values, is_whole=False)
            self._save(record)

    def pending(self, record: BatchRecord, after: int, count: int) -> list[PendingInput]:
        """Return the next lines without a result, in the order in which they run."""
        select = (
            "SELECT position, number, offset, size FROM lines WHERE batch = ? AND position > ? "
            "AND NOT is_done ORDER BY position LIMIT ?"
        )
        with self._lock:
            rows = self._database.execute(select, (record.number, after, count)).fetchall()
        return [PendingInput(*row) for row in rows]

    def append(self, record: BatchRecord, results: Sequence[LineResult]) -> None:
        """Store results of lines. Raises StoreFull."""
        contents = {
            record.output_id: [result.content for result in results if not result.is_error],
            record.error_id: [result.content for result in results if result.is_error],
        }
        job, counts = record.job, record.job.request_counts
        before = counts.completed, counts.failed, job.usage, job.model
        try:
            with self._lock, self._database as database:
                self._check_room(record.namespace, sum(len(result.content) for result in results))
                for id, lines in contents.items():
                    size = write(self.path(id), self._size(id), lines)
                    database.execute("UPDATE files SET bytes = ? WHERE id = ?", (size, id))
                counts.completed += len(contents[record.output_id])
                counts.failed += len(contents[record.error_id])
                job.usage = add_tokens(job.usage, results)
                job.model = job.model or next((r.model for r in results if r.model), None)
                record.crashes = 0
                done = "UPDATE lines SET is_done = 1 WHERE batch = ? AND position = ?"
                positions = [(record.number, result.position) for result in results]
                database.executemany(done, positions)
                self._save(record)
        except BaseException:
            counts.completed, counts.failed, job.usage, job.model = before
            raise

    def _size(self, id: str) -> int:
        row = self._database.execute("SELECT bytes FROM files WHERE id = ?", (id,)).fetchone()
        return int(row[0]) if row else 0  # of a batch that has not begun

    def finish(
        self, record: BatchRecord, status: BatchStatus, errors: Sequence[BatchError] = ()
    ) -> None:
        """End a batch: its files, where they have lines, are found from now on."""
        job, now = record.job, int(time.time())
        job.status = status
        setattr(job, f"{status}_at", now)
        if errors:
            job.errors = BatchErrors("list", list(errors))
        whole = "UPDATE files SET is_whole = 1, created_at = ?, expires_at = ? WHERE id = ?"
        with self._lock, self._database as database:
            for name, id in (
                ("output_file_id", record.output_id),
                ("error_file_id", record.error_id),
            ):
                if size := self._size(id):
                    os.truncate(self.path(id), size)
                    database.execute(whole, (now, now + record.output_kept_s, id))
                    setattr(job, name, id)
            database.execute("DELETE FROM lines WHERE batch = ?", (record.number,))
            ended = "UPDATE batches SET ended_at = ? WHERE number = ?"
            database.execute(ended, (now, record.number))
            self._save(record)
            files = record.output_id, record.error_id
            unused = self._delete_rows("id IN (?, ?) AND NOT is_whole", files)
        self._unlink(unused)


def add_tokens(usage: BatchUsage, results: Sequence[LineResult]) -> BatchUsage:
    """Return the usage with the tokens of results."""
    counts = [
        usage.input_tokens,
        usage.input_tokens_details.cached_tokens,
        usage.output_tokens,
        usage.output_tokens_details.reasoning_tokens,
    ]
    counts = [sum(column) for column in zip(counts, *(r.tokens for r in results), strict=True)]
    input, cached, output, reasoning = counts
    details = PromptTokensDetails(cached), CompletionTokensDetails(reasoning)
    return BatchUsage(input, details[0], output, details[1], input + output)


def write(path: Path, offset: int, lines: Sequence[bytes]) -> int:
    """Write lines at an offset of a file, to the disk; return the offset of their end. What was
    behind it is dropped."""
    if not lines:
        return offset
    with open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
        file.truncate(offset)
        file.seek(offset)
        file.writelines(lines)
        file.flush()
        os.fdatasync(file.fileno())
        return file.tell()


def file_object(row: Sequence[Any]) -> FileObject:
    return FileObject(row[0], "file", *row[1:])
