"""The input file of a batch, and the store of `BATCH_DIR`, without a server."""

import json
import random
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from batching.errors import InvalidInput
from server.apis.openai.batches import store as store_module
from server.apis.openai.batches.input_file import MAX_ERRORS, MAX_LINES, InputChecker, prefix_key
from server.apis.openai.batches.store import (
    CHUNK_BYTES,
    BatchRecord,
    BatchStore,
    LineResult,
    open_folder,
)
from server.apis.openai.store import ListPage, Store
from server.http.errors import HttpError
from tests.postgres import Databases, kill

CHAT = "/v1/chat/completions"
KEY, OTHER = b"1" * 16, b"2" * 16


def line(custom_id: str, *texts: str) -> bytes:
    body = {"model": "demo", "messages": [{"role": "user", "content": text} for text in texts]}
    document = {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body}
    return json.dumps(document).encode() + b"\n"


def check(content: bytes, max_line_bytes: int = 1 << 20, chunk: int = 1 << 18) -> InputChecker:
    checker = InputChecker(CHAT, max_line_bytes)
    for start in range(0, len(content), chunk):
        checker.feed(content[start : start + chunk])
    return checker


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_lines_are_found_again_by_their_offsets(chunk: int) -> None:
    content = b"\xef\xbb\xbf" + line("a") + b"\n \r\n" + line("b").strip() + b"\r\n" + line("c")
    lines = sorted(check(content, chunk=chunk).finish())
    assert [entry.number for entry in lines] == [1, 4, 5]
    found = [json.loads(content[at : at + size])["custom_id"] for _, at, size, _ in lines]
    assert found == ["a", "b", "c"]


def test_lines_with_a_common_prefix_follow_each_other() -> None:
    trunks = [f"You are helper number {n}. " + "Be kind. " * 50 * n for n in range(1, 6)]
    documents = [f"Document {n}: " + "words " * 300 for n in range(4)]
    lines = [
        (trunk, document, line(f"{trunk[:30]}{document[:12]}{n}", trunk + document, f"{n}?"))
        for trunk in trunks
        for document in documents
        for n in range(5)
    ]
    random.Random(1).shuffle(lines)
    ordered = check(b"".join(entry[2] for entry in lines)).finish()
    groups = [lines[entry.number - 1][:2] for entry in ordered]
    changes = sum(a != b for a, b in pairwise(groups))
    assert changes == len(trunks) * len(documents) - 1
    trunk_changes = sum(a[0] != b[0] for a, b in pairwise(groups))
    assert trunk_changes == len(trunks) - 1
    assert len(prefix_key({"messages": "x" * 10_000_000})) <= 200


def test_a_file_is_bounded() -> None:
    checker = check(b"".join(line(str(n)) for n in range(MAX_LINES + 1)))
    checker.finish()
    assert [error.code for error in checker.errors] == ["too_many_tasks"]
    checker = check(b"".join(line(str(n)) for n in range(MAX_LINES)))
    assert len(checker.finish()) == MAX_LINES
    assert checker.errors == []
    checker = check(b"x\n" * 10_000)
    assert checker.has_failed
    checker.finish()
    assert len(checker.errors) == MAX_ERRORS


Open = Callable[[], BatchStore]


@pytest.fixture
def opened(databases: Databases) -> Open:
    """Each call opens the store as another process."""
    return lambda: BatchStore(databases.open(), 200_000, 100_000)


@pytest.fixture
def store(opened: Open) -> BatchStore:
    return opened()


def add(store: BatchStore, content: bytes, kept_s: int = 3600, namespace: bytes = KEY) -> str:
    with tempfile.NamedTemporaryFile() as source:
        source.write(content)
        source.flush()
        return store.add_file(namespace, source.name, "in.jsonl", len(content), kept_s).id


def content_of(store: BatchStore, id: str) -> bytes:
    content = b""
    while piece := store.next_piece(id, len(content)):
        content += piece
    return content


def begun(store: BatchStore, count: int = 3) -> BatchRecord:
    content = b"".join(line(str(n)) for n in range(count))
    record = store.create(KEY, "", CHAT, add(store, content), None, 3600)
    assert store.claim_check(record)
    store.begin(record, check(content).finish())
    return record


def result(position: int, is_error: bool = False) -> LineResult:
    return LineResult(position, b'{"position": %d}\n' % position, is_error)


def claimed(store: BatchStore, record: BatchRecord, count: int = 10) -> list[int]:
    return [line.position for line in store.claim(record, count)]


def test_a_content_is_read_in_parts_of_any_size(store: BatchStore) -> None:
    content = bytes(range(256)) * 350  # two chunks
    assert len(content) > CHUNK_BYTES
    id = add(store, content)
    assert content_of(store, id) == content
    assert store.size(id) == len(content)
    for start, size in ((0, 10), (5, 3), (CHUNK_BYTES - 5, 9), (CHUNK_BYTES, 4), (80_000, 20_000)):
        assert store.read(id, start, size) == content[start : start + size]
    store.delete_file(KEY, id)
    assert store.database.execute("SELECT count(*) FROM chunks") == [(0,)]


def test_lines_are_claimed_once_and_released_when_their_process_ends(opened: Open) -> None:
    one, other = opened(), opened()
    record = begun(one, 6)
    [found] = other.unfinished()
    assert (found.job, found.number) == (record.job, record.number)
    assert claimed(one, record, 2) == [0, 1]
    assert claimed(other, found, 3) == [2, 3, 4]
    assert claimed(one, record) == [5]
    assert claimed(other, found) == []
    other.release_abandoned()  # both run
    assert claimed(other, found) == []
    one.release(record)
    assert claimed(other, found, 1) == [0]
    assert claimed(one, record) == [1, 5]
    kill(one.database)
    for _ in range(2):
        other.release_abandoned()
    assert claimed(other, found) == [1, 5]
    assert other.reload(found)
    assert found.crashes == 1
    assert other.append(found, [result(1)]) == [result(1)]
    assert other.reload(found)
    assert found.crashes == 0


def test_processes_that_die_together_are_one_crash(opened: Open) -> None:
    """As those of machines that lose power: their lines have not ended them."""
    stores = [opened() for _ in range(4)]
    record = begun(stores[0], 6)
    for store in stores[:3]:
        assert len(claimed(store, record, 2)) == 2
        kill(store.database)
    stores[3].release_abandoned()
    [found] = stores[3].unfinished()
    assert found.crashes == 1
    assert claimed(stores[3], found) == [*range(6)]


def test_each_line_has_one_result(opened: Open) -> None:
    """A process whose claim is lost stores nothing, and what is stored is stored together."""
    one, other = opened(), opened()
    record = begun(one)
    [found] = other.unfinished()
    assert claimed(one, record, 2) == [0, 1]
    assert other.append(found, [result(0)]) == []
    assert one.append(record, [result(0)]) == [result(0)]
    assert one.append(record, [result(0), result(1, is_error=True)]) == [result(1, True)]
    assert claimed(other, found) == [2]
    assert other.has_lines(found)
    assert other.append(found, [result(2)]) == [result(2)]
    assert not other.has_lines(found)
    assert one.finish(record, "completed")
    assert not other.finish(found, "completed")
    assert other.append(found, [result(2)]) == []
    assert content_of(one, record.output_id) == b'{"position": 0}\n{"position": 2}\n'
    assert content_of(one, record.error_id) == b'{"position": 1}\n'
    job = json.loads(one.batch(KEY, record.job.id))
    assert job["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
    assert job["output_file_id"] == record.output_id
    assert one.file(KEY, record.output_id).bytes == 2 * len(result(0).content)
    assert one.file(KEY, record.error_id).filename == f"{record.job.id}_error.jsonl"
    assert one.unfinished() == []
    assert not other.reload(found)


def test_one_process_checks_the_input(opened: Open) -> None:
    one, other = opened(), opened()
    content = line("a")
    record = one.create(KEY, "", CHAT, add(one, content), None, 3600)
    [found] = other.unfinished()
    assert one.claim_check(record)
    assert not other.claim_check(found)
    assert one.claim_check(record)
    kill(one.database)
    other.release_abandoned()
    assert other.claim_check(found)
    for _ in range(2):  # the second one is late
        other.begin(found, check(content).finish())
    assert claimed(other, found) == [0]


def test_a_cancelled_batch_is_seen_by_all(opened: Open) -> None:
    one, other = opened(), opened()
    record = begun(one)
    assert claimed(one, record, 1) == [0]
    for _ in range(2):
        assert json.loads(other.cancel(KEY, record.job.id))["status"] == "cancelling"
    assert one.append(record, [result(0)]) == [result(0)]
    assert record.job.status == "cancelling"
    assert one.finish(record, "cancelled")
    with pytest.raises(InvalidInput, match="it is cancelled"):
        other.cancel(KEY, record.job.id)


def test_a_batch_that_is_cancelled_before_its_end_is_cancelled(opened: Open) -> None:
    """The process that ends it has not read that yet."""
    one, other = opened(), opened()
    record = begun(one, 1)
    assert claimed(one, record) == [0]
    one.append(record, [result(0)])
    other.cancel(KEY, record.job.id)
    assert one.finish(record, "completed")
    job = json.loads(one.batch(KEY, record.job.id))
    assert (job["status"], job["completed_at"]) == ("cancelled", None)
    assert job["cancelled_at"]
    assert job["output_file_id"] == record.output_id


def test_a_result_that_cannot_be_stored_changes_nothing(
    store: BatchStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = begun(store)
    assert claimed(store, record) == [0, 1, 2]
    store.append(record, [result(0)])

    def fail(usage: Any, results: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(store_module, "add_tokens", fail)
        with pytest.raises(OSError, match="No space"):
            store.append(record, [result(1), result(2, is_error=True)])
    [stored] = store.unfinished()
    assert stored.job == record.job
    store.append(record, [result(2)])
    assert content_of(store, record.output_id) == b'{"position": 0}\n{"position": 2}\n'
    assert record.job.request_counts.completed == 2


def test_files_without_lines_are_dropped(store: BatchStore) -> None:
    record = begun(store)
    for id in (record.output_id, record.error_id):
        with pytest.raises(HttpError):
            store.file(KEY, id)
    assert claimed(store, record, 1) == [0]
    store.append(record, [result(0, is_error=True)])
    store.finish(record, "cancelled")
    assert (record.job.output_file_id, record.job.error_file_id) == (None, record.error_id)
    assert store.database.execute("SELECT count(*) FROM files") == [(2,)]


def test_expired_files_are_removed_unless_a_batch_needs_them(
    store: BatchStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = begun(store)
    needed, expired, kept = record.job.input_file_id, add(store, b"x", 0), add(store, b"x")
    with pytest.raises(HttpError):
        store.file(KEY, expired)
    assert expired.encode() not in store.list_files(KEY, ListPage(), None)
    store.remove_expired()
    assert content_of(store, expired) == b""
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 3601)
    store.remove_expired()
    assert content_of(store, needed)
    assert not content_of(store, kept)
    store.finish(record, "completed")
    store.remove_expired()
    assert not content_of(store, needed)
    monkeypatch.setattr(time, "time", lambda: now + 40 * 24 * 3600)
    store.remove_expired()
    with pytest.raises(HttpError):
        store.batch(KEY, record.job.id)


def test_what_is_left_of_an_upload_is_removed(
    store: BatchStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(store, "_copy", fail)
        with pytest.raises(OSError, match="No space"):
            add(store, b"x")
        assert store.database.execute("SELECT count(*) FROM files") == [(0,)]
        patch.setattr(store, "_delete_files", fail)  # as if the process was killed
        with pytest.raises(OSError, match="No space"):
            add(store, b"x")
    assert b'"data":[]' in store.list_files(KEY, ListPage(), None)
    store.remove_expired()
    assert store.database.execute("SELECT count(*) FROM files") == [(1,)]
    later = time.time() + store_module.MAX_UPLOAD_S + 1
    monkeypatch.setattr(time, "time", lambda: later)
    store.remove_expired()
    assert store.database.execute("SELECT count(*) FROM files") == [(0,)]


def test_uploads_that_a_crash_has_left_are_removed_at_the_start(tmp_path: Path) -> None:
    database = open_folder(str(tmp_path))
    left = tmp_path / "uploads" / "onequeue-left"
    left.write_bytes(b"x")
    open_folder(str(tmp_path)).close()  # another process: it may be its upload
    assert left.exists()
    database.close()
    open_folder(str(tmp_path)).close()
    assert [*left.parent.iterdir()] == []


def test_files_whose_contents_were_in_a_folder_are_dropped(tmp_path: Path) -> None:
    """As an earlier version has left them."""
    database = open_folder(str(tmp_path))
    first, *_ = store_module.MIGRATIONS
    Store(database, "batches", [first])
    columns = "id, namespace, purpose, filename, bytes, created_at, expires_at, is_whole"
    database.execute(
        f"INSERT INTO files ({columns}) VALUES ('file-1', ?, '', '', 1, 1, 1, 1)", [KEY]
    )
    store = BatchStore(database, 200_000, 100_000)
    assert database.execute("SELECT * FROM files") == []
    add(store, b"x")


def test_space_is_shared_and_given_back(store: BatchStore) -> None:
    first = add(store, b"x" * 90_000)
    with pytest.raises(HttpError, match="of this key would exceed"):
        add(store, b"x" * 10_000)
    add(store, b"x" * 90_000, namespace=OTHER)
    with pytest.raises(HttpError, match="all files together"):
        add(store, b"x" * 90_000, namespace=b"3" * 16)
    store.delete_file(KEY, first)
    add(store, b"x" * 90_000)


def test_a_key_has_a_bounded_number_of_batches(
    store: BatchStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "MAX_UNFINISHED", 2)
    monkeypatch.setattr(store_module, "MAX_ENDED", 1)
    id = add(store, b"x")

    def create() -> Any:
        return store.create(KEY, "", CHAT, id, None, 3600)

    records = [create(), create()]
    with pytest.raises(InvalidInput, match="2 batches of this key have not ended"):
        create()
    for record in records:
        store.finish(record, "failed")
    create()
    newest = json.loads(store.list_batches(KEY, ListPage()))["data"]
    assert len(newest) == 2
    assert json.loads(store.list_batches(KEY, ListPage(order="asc")))["data"] == newest[::-1]
