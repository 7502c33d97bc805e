"""The files and batches of `BATCH_DIR` or `STORE`. Contents of files are in chunks.

    upload → file → batch → its lines, in order → claimed by a process → results → output files

A process claims the lines that it runs. A result is stored with the end of its line, if the line is
still claimed. The claims of a process that has ended are released by another one.
"""

import contextlib
import secrets
import shutil
import sqlite3
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import json

from batching.errors import InvalidInput
from server.apis.openai.batches.input_file import CheckedLine
from server.apis.openai.database import Database, SqliteDatabase
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
from server.apis.openai.store import ListPage, Store, encode_page
from server.http.errors import HttpError

WINDOW_S = 24 * 3600  # the only completion window
KEPT_S = 30 * 24 * 3600  # files by default, and batches that have ended
FILE_OVERHEAD = 4096  # bytes that a file takes beside its content
CHUNK_BYTES = 1 << 16
UPLOADED_CHUNKS = 16  # of a transaction
MAX_UPLOAD_S = 3600  # to store a file; what remains of it later is of a process that has ended
# Of a namespace.
MAX_FILES = 10_000
MAX_UNFINISHED = 100
MAX_ENDED = 1000

TABLES = """
CREATE TABLE IF NOT EXISTS files (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    namespace BLOB NOT NULL,
    purpose TEXT NOT NULL,
    filename TEXT NOT NULL,
    bytes INTEGER NOT NULL,
    created_at INTEGER NOT NULL,
    expires_at INTEGER NOT NULL,
    is_whole BOOLEAN NOT NULL
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
    "offset" INTEGER NOT NULL,
    size INTEGER NOT NULL,
    is_done BOOLEAN NOT NULL DEFAULT FALSE,
    PRIMARY KEY (batch, position)
) WITHOUT ROWID;
"""
# `process` checks the input of a batch, or runs a line that is not done. Files whose contents were
# not in the database are dropped, and their batches.
CLAIMS_AND_CHUNKS = """
DELETE FROM batches;
DELETE FROM files;
ALTER TABLE batches ADD COLUMN process TEXT;
ALTER TABLE lines ADD COLUMN process TEXT;
CREATE INDEX batches_claimed ON batches (process) WHERE process IS NOT NULL;
CREATE INDEX lines_claimed ON lines (process) WHERE process IS NOT NULL;
CREATE INDEX lines_unclaimed ON lines (batch, position) WHERE process IS NULL AND NOT is_done;
CREATE TABLE chunks (
    file TEXT NOT NULL REFERENCES files (id) ON DELETE CASCADE,
    start INTEGER NOT NULL,
    content BLOB NOT NULL,
    PRIMARY KEY (file, start)
);
"""
MIGRATIONS = TABLES, CLAIMS_AND_CHUNKS
FILE_COLUMNS = "id, bytes, created_at, expires_at, filename, purpose"
FOUND = "namespace = ? AND id = ? AND is_whole AND expires_at > ?"


class StoreFull(Exception):
    """The files would exceed the limit of the folder, or of a key's part of it."""


class PendingInput(NamedTuple):
    """A line without a result."""

    position: int  # in the order in which lines run
    number: int
    offset: int
    size: int


class LineTokens(NamedTuple):
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
    crashes: int  # of processes that ran its lines, since its last result


def open_folder(folder: str) -> SqliteDatabase:
    """Return the database of BATCH_DIR, and make its folder of uploads."""
    root = Path(folder).expanduser()
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    database = SqliteDatabase(str(root / "batches.sqlite"))
    if database.is_alone:  # a crash may have left some
        shutil.rmtree(uploads_of(folder), ignore_errors=True)
    uploads_of(folder).mkdir(exist_ok=True)
    return database


def uploads_of(folder: str) -> Path:
    """Return the folder of files that are being uploaded."""
    return Path(folder).expanduser() / "uploads"


class BatchStore(Store):
    """`max_bytes` of all files, and of those of one namespace."""

    def __init__(self, database: Database, max_bytes: int, max_namespace_bytes: int) -> None:
        self.max_bytes, self.max_namespace_bytes = max_bytes, max_namespace_bytes
        super().__init__(database, "batches", MIGRATIONS)

    # ── files ──

    def add_file(
        self, namespace: bytes, source: str, filename: str, size: int, kept_s: int
    ) -> FileObject:
        """Store an uploaded file. Raises HttpError if there is no room for it."""
        now, id = int(time.time()), "file-" + secrets.token_hex(12)
        values = id, namespace, "batch", filename, size, now, now + kept_s
        with self.database.transaction():
            try:
                self._check_room(namespace, size + FILE_OVERHEAD, files=1)
            except StoreFull as error:
                message = f"{error}: delete files first"
                raise HttpError(413, message, code="storage_full") from None
            self._insert_file(*values, is_whole=False)
        try:
            self._copy(id, source)
            self.database.execute("UPDATE files SET is_whole = TRUE WHERE id = ?", (id,))
        except BaseException:
            with contextlib.suppress(OSError, sqlite3.Error):
                self._delete_files("id = ?", (id,))
            raise
        return file_object((id, size, now, now + kept_s, filename, "batch"))

    def _copy(self, id: str, source: str) -> None:
        """Store the content of a file, in several transactions: others write between them."""
        start = 0
        with open(source, "rb") as file:
            while piece := file.read(UPLOADED_CHUNKS * CHUNK_BYTES):
                with self.database.transaction():
                    start = self._add_chunks(id, start, piece)

    def _add_chunks(self, id: str, start: int, content: bytes) -> int:
        """Add to the end of a file; return its new end. Within a transaction."""
        offsets = range(0, len(content), CHUNK_BYTES)
        rows = [(id, start + n, content[n : n + CHUNK_BYTES]) for n in offsets]
        self.database.execute_many("INSERT INTO chunks VALUES (?, ?, ?)", rows)
        return start + len(content)

    def read(self, id: str, start: int, size: int) -> bytes:
        """Return a part of an uploaded file, whose chunks have CHUNK_BYTES each."""
        part = "substr(content, CAST(? AS INTEGER), CAST(? AS INTEGER))"
        select = f"SELECT {part} FROM chunks WHERE file = ? AND start = ?"
        parts: list[bytes] = []
        for chunk in range(start // CHUNK_BYTES * CHUNK_BYTES, start + size, CHUNK_BYTES):
            first = max(start - chunk, 0)
            count = min(start + size - chunk, CHUNK_BYTES) - first
            rows = self.database.execute(select, (first + 1, count, id, chunk))
            parts += [content for [content] in rows]
        return b"".join(parts)

    def next_piece(self, id: str, start: int) -> bytes:
        """Return the next bytes of a file, at most CHUNK_BYTES; none at its end."""
        where = "file = ? AND start >= ? AND start < ?"
        select = f"SELECT content FROM chunks WHERE {where} ORDER BY start"
        piece = b""
        for [content] in self.database.execute(select, (id, start, start + CHUNK_BYTES)):
            if len(piece) + len(content) > CHUNK_BYTES:
                break
            piece += content
        return piece

    def _insert_file(self, *values: object, is_whole: bool) -> None:
        columns = "id, namespace, purpose, filename, bytes, created_at, expires_at, is_whole"
        inserted = f"INSERT INTO files ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
        self.database.execute(inserted, (*values, is_whole))

    def file(self, namespace: bytes, id: str, param: str = "id") -> FileObject:
        select = f"SELECT {FILE_COLUMNS} FROM files WHERE {FOUND}"
        rows = self.database.execute(select, (namespace, id, int(time.time())))
        if not rows:
            raise HttpError(404, f"there is no file {id[:100]!r}", param)
        return file_object(rows[0])

    def list_files(self, namespace: bytes, page: ListPage, purpose: str | None) -> bytes:
        values: list[object] = [int(time.time())]
        where = "is_whole AND expires_at > ?"
        if purpose is not None:
            where, values = where + " AND purpose = ?", [*values, purpose]
        rows = self._list("files", FILE_COLUMNS, namespace, page, where, values)
        return encode_page(FileList, [file_object(row) for row in rows], page.limit)

    def delete_file(self, namespace: bytes, id: str) -> None:
        using = "SELECT id FROM batches WHERE input_id = ? AND ended_at IS NULL"
        locked = f"SELECT id FROM files WHERE id = ? {self.database.for_update}"
        with self.database.transaction():  # so that no batch begins to use the file meanwhile
            self.file(namespace, id)
            self.database.execute(locked, (id,))
            if users := self.database.execute(using, (id,)):
                [user] = users[0]
                reason = f"the file is the input of {user}, which has not ended: cancel it first"
                raise InvalidInput.at("id", reason)
            self._delete_files("id = ?", (id,))

    def _delete_files(self, where: str, values: Sequence[object]) -> None:
        self.database.execute(f"DELETE FROM files WHERE {where}", values)

    def remove_expired(self) -> None:
        """Remove expired files that no batch needs, unfinished uploads, and batches that have ended
        long ago."""
        now = int(time.time())
        needed = "SELECT input_id FROM batches WHERE ended_at IS NULL"
        self._delete_files(f"expires_at <= ? AND is_whole AND id NOT IN ({needed})", (now,))
        uploaded = "purpose = 'batch' AND NOT is_whole AND created_at <= ?"
        self._delete_files(uploaded, (now - MAX_UPLOAD_S,))
        self.database.execute("DELETE FROM batches WHERE ended_at <= ?", (now - KEPT_S,))

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
            "DELETE FROM batches WHERE namespace = ? AND ended_at IS NOT NULL AND number NOT IN "
            "(SELECT number FROM batches WHERE namespace = ? AND ended_at IS NOT NULL "
            "ORDER BY number DESC LIMIT ?)"
        )
        columns = (
            "id, namespace, address, input_id, output_id, error_id, output_kept_s, crashes, job"
        )
        inserted = f"INSERT INTO batches ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?, 0, ?)"
        ids = input_id, output_id, error_id
        values = id, namespace, address, *ids, output_kept_s, json.encode(job)
        locked = f"SELECT id FROM files WHERE id = ? {self.database.for_update}"
        execute = self.database.execute
        with self.database.transaction():
            execute(locked, (input_id,))
            file = self.file(namespace, input_id, "input_file_id")
            if file.purpose != "batch":
                reason = f"must be a file with purpose 'batch', not {file.purpose!r}"
                raise InvalidInput.at("input_file_id", reason)
            [[number]] = execute(unfinished, (namespace,))
            if number >= MAX_UNFINISHED:
                raise InvalidInput(f"{number} batches of this key have not ended: wait for one")
            execute(dropped, (namespace, namespace, MAX_ENDED))
            [[row]] = execute(f"{inserted} RETURNING number", values)
        return BatchRecord(job, row, namespace, address, output_id, error_id, output_kept_s, 0)

    def batch(self, namespace: bytes, id: str) -> bytes:
        select = "SELECT job FROM batches WHERE namespace = ? AND id = ?"
        rows = self.database.execute(select, (namespace, id))
        if not rows:
            raise HttpError(404, f"there is no batch {id[:100]!r}", "id")
        job: bytes = rows[0][0]
        return job

    def list_batches(self, namespace: bytes, page: ListPage) -> bytes:
        rows = self._list("batches", "job", namespace, page)
        jobs = [json.decode(job, type=BatchJob) for [job] in rows]
        return encode_page(BatchList, jobs, page.limit)

    def unfinished(self) -> list[BatchRecord]:
        """Return the batches that have not ended, oldest first."""
        return self._records("ended_at IS NULL ORDER BY number", ())

    def reload(self, record: BatchRecord) -> bool:
        """Read the stored state of a batch. Return whether it has not ended."""
        records = self._records("number = ? AND ended_at IS NULL", (record.number,))
        for stored in records:
            record.job, record.crashes = stored.job, stored.crashes
        return bool(records)

    def _records(self, where: str, values: Sequence[object]) -> list[BatchRecord]:
        columns = "job, number, namespace, address, output_id, error_id, output_kept_s, crashes"
        rows = self.database.execute(f"SELECT {columns} FROM batches WHERE {where}", values)
        return [BatchRecord(json.decode(row[0], type=BatchJob), *row[1:]) for row in rows]

    @contextlib.contextmanager
    def _changing(self, record: BatchRecord) -> Iterator[bool]:
        """Change the job of a batch in a transaction, from its stored state. Yield whether it has
        not ended; else nothing is to be changed. The record has the new state if all is stored."""
        select = "SELECT job FROM batches WHERE number = ? AND ended_at IS NULL "
        before = record.job
        try:
            with self.database.transaction():
                rows = self.database.execute(select + self.database.for_update, (record.number,))
                for [job] in rows:
                    record.job = json.decode(job, type=BatchJob)
                yield bool(rows)
                if rows:
                    changed = json.encode(record.job), record.number
                    self.database.execute("UPDATE batches SET job = ? WHERE number = ?", changed)
        except BaseException:
            record.job = before
            raise

    def cancel(self, namespace: bytes, id: str) -> bytes:
        """Let the processes that run a batch cancel it; return it as JSON. Raises InvalidInput if
        it has ended."""
        job = json.decode(self.batch(namespace, id), type=BatchJob)
        for record in self._records("id = ? AND ended_at IS NULL", (id,)):
            with self._changing(record) as is_unfinished:
                job = record.job
                if is_unfinished and job.status in ("validating", "in_progress"):
                    job.status, job.cancelling_at = "cancelling", int(time.time())
        if job.status != "cancelling":
            raise InvalidInput.at("id", f"the batch cannot be cancelled: it is {job.status}")
        return json.encode(job)

    # ── the work of processes ──

    def claim_check(self, record: BatchRecord) -> bool:
        """Return whether this process checks the input of a batch."""
        claimed = (
            "UPDATE batches SET process = ? WHERE number = ? AND coalesce(process, ?) = ? "
            "RETURNING number"
        )
        process = self.database.process
        return bool(self.database.execute(claimed, (process, record.number, process, process)))

    def begin(self, record: BatchRecord, lines: Sequence[CheckedLine]) -> None:
        """Store the checked lines of a batch, in the order in which they run."""
        now = int(time.time())
        rows = [(record.number, n, *line[:3]) for n, line in enumerate(lines)]
        columns = 'batch, position, number, "offset", size'
        inserted = f"INSERT INTO lines ({columns}) VALUES (?, ?, ?, ?, ?)"
        names = (record.output_id, "output"), (record.error_id, "error")
        with self._changing(record):
            job = record.job
            if job.status != "validating":
                return
            job.status, job.in_progress_at = "in_progress", now
            job.request_counts.total = len(lines)
            self.database.execute_many(inserted, rows)
            for id, name in names:
                filename = f"{job.id}_{name}.jsonl"
                values = id, record.namespace, "batch_output", filename, 0, now, 0
                self._insert_file(*values, is_whole=False)

    def claim(self, record: BatchRecord, count: int) -> list[PendingInput]:
        """Claim the next lines that no process runs, in the order in which they run."""
        unclaimed = (
            "SELECT position FROM lines WHERE batch = ? AND process IS NULL AND NOT is_done "
            f"ORDER BY position LIMIT ? {self.database.skip_locked}"
        )
        claimed = (  # materialized: PostgreSQL may run a subquery again, which finds further lines
            f"WITH unclaimed AS MATERIALIZED ({unclaimed}) UPDATE lines SET process = ? "
            "WHERE batch = ? AND position IN (SELECT position FROM unclaimed) "
            'RETURNING position, number, "offset", size'
        )
        values = record.number, count, self.database.process, record.number
        return sorted(PendingInput(*row) for row in self.database.execute(claimed, values))

    def release(self, record: BatchRecord) -> None:
        """Release the lines of a batch that this process has claimed."""
        released = "UPDATE lines SET process = NULL WHERE process = ? AND batch = ?"
        self.database.execute(released, (self.database.process, record.number))

    def release_abandoned(self) -> None:
        """Release the claims of dead processes. Those that are found at a time count as one crash
        of a batch: they may have lost power together."""
        dead = self._dead("lines")
        claimed = f"process IN ({', '.join('?' * len(dead))})"
        locked = f"SELECT number FROM batches WHERE number = ? {self.database.for_update}"
        released = f"UPDATE lines SET process = NULL WHERE {claimed} AND batch = ? RETURNING batch"
        crashed = "UPDATE batches SET crashes = crashes + 1 WHERE number = ?"
        execute = self.database.execute
        found = f"SELECT DISTINCT batch FROM lines WHERE {claimed}"
        for batch in execute(found, dead) if dead else ():
            with self.database.transaction():
                execute(locked, batch)  # before its lines, as `append` and `finish` do
                if execute(released, (*dead, *batch)):
                    execute(crashed, batch)
        for process in self._dead("batches"):
            checked = "UPDATE batches SET process = NULL WHERE process = ?"
            self.database.execute(checked, (process,))

    def has_lines(self, record: BatchRecord) -> bool:
        """Return whether there are lines without a result."""
        left = "SELECT 1 FROM lines WHERE batch = ? AND NOT is_done LIMIT 1"
        return bool(self.database.execute(left, (record.number,)))

    def append(self, record: BatchRecord, results: Sequence[LineResult]) -> list[LineResult]:
        """Store the results of lines that this process has claimed; return them. Raises
        StoreFull."""
        with self._changing(record) as is_unfinished:
            if not is_unfinished:
                return []
            marks = ", ".join("?" * len(results))
            done = (
                "UPDATE lines SET is_done = TRUE, process = NULL WHERE process = ? AND batch = ? "
                f"AND position IN ({marks}) RETURNING position"
            )
            positions = [result.position for result in results]
            values = self.database.process, record.number, *positions
            claimed = {position for [position] in self.database.execute(done, values)}
            results = [result for result in results if result.position in claimed]
            self._check_room(record.namespace, sum(len(result.content) for result in results))
            for id, is_error in ((record.output_id, False), (record.error_id, True)):
                lines = [result.content for result in results if result.is_error == is_error]
                end = self._add_chunks(id, self.size(id), b"".join(lines))
                self.database.execute("UPDATE files SET bytes = ? WHERE id = ?", (end, id))
            job, failed = record.job, sum(result.is_error for result in results)
            job.request_counts.failed += failed
            job.request_counts.completed += len(results) - failed
            job.usage = add_tokens(job.usage, results)
            job.model = job.model or next((r.model for r in results if r.model), None)
            began = "UPDATE batches SET crashes = 0 WHERE number = ?"
            self.database.execute(began, (record.number,))
            return results

    def size(self, id: str) -> int:
        rows = self.database.execute("SELECT bytes FROM files WHERE id = ?", (id,))
        return int(rows[0][0]) if rows else 0  # of a batch that has not begun

    def finish(
        self, record: BatchRecord, status: BatchStatus, errors: Sequence[BatchError] = ()
    ) -> bool:
        """End a batch: its files, where they have lines, are found from now on. Return whether no
        other process has ended it."""
        now, execute = int(time.time()), self.database.execute
        whole = "UPDATE files SET is_whole = TRUE, created_at = ?, expires_at = ? WHERE id = ?"
        with self._changing(record) as is_unfinished:
            if not is_unfinished:
                return False
            job = record.job
            if status == "completed" and job.status == "cancelling":  # by another process
                status = "cancelled"
            job.status = status
            if status == "completed":
                job.finalizing_at = now
            setattr(job, f"{status}_at", now)
            if errors:
                job.errors = BatchErrors("list", list(errors))
            for name, id in (
                ("output_file_id", record.output_id),
                ("error_file_id", record.error_id),
            ):
                if self.size(id):
                    execute(whole, (now, now + record.output_kept_s, id))
                    setattr(job, name, id)
            execute("DELETE FROM lines WHERE batch = ?", (record.number,))
            ended = "UPDATE batches SET ended_at = ?, process = NULL WHERE number = ?"
            execute(ended, (now, record.number))
            files = record.output_id, record.error_id
            self._delete_files("id IN (?, ?) AND NOT is_whole", files)
        return True


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


def file_object(row: Sequence[Any]) -> FileObject:
    return FileObject(row[0], "file", *row[1:])
