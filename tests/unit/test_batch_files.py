"""The input file of a batch, and the store of `BATCH_DIR`, without a server."""

import json
import os
import random
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from batching.errors import InvalidInput
from server.apis.openai.batches import store as store_module
from server.apis.openai.batches.input_file import MAX_ERRORS, MAX_LINES, InputChecker, prefix_key
from server.apis.openai.batches.store import BatchRecord, BatchStore, LineResult
from server.apis.openai.sqlite_store import ListPage
from server.http.errors import HttpError
from server.http.lines import LineSplitter

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
    splitter = LineSplitter(3)
    body = b"abcd\n\nxy\nlonger\nz"
    found = [
        (entry.content, entry.offset)
        for start in range(0, len(body), chunk)
        for entry in splitter.feed(body[start : start + chunk])
    ]
    found += [(entry.content, entry.offset) for entry in splitter.finish()]
    assert found == [(None, 0), (b"xy", 6), (None, 9), (b"z", 16)]


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


@pytest.fixture
def store(tmp_path: Path) -> BatchStore:
    return BatchStore(str(tmp_path), 200_000, 100_000)


def add(store: BatchStore, content: bytes, kept_s: int = 3600, namespace: bytes = KEY) -> str:
    source = store.uploads / "upload"
    source.write_bytes(content)
    return store.add_file(namespace, str(source), "in.jsonl", len(content), kept_s).id


def begun(store: BatchStore, count: int = 3) -> BatchRecord:
    content = b"".join(line(str(n)) for n in range(count))
    record = store.create(KEY, "", CHAT, add(store, content), None, 3600)
    store.begin(record, check(content).finish())
    return record


def result(position: int, is_error: bool = False) -> LineResult:
    return LineResult(position, b'{"position": %d}\n' % position, is_error)


def test_a_result_that_the_database_does_not_know_is_overwritten(
    store: BatchStore, tmp_path: Path
) -> None:
    record = begun(store)
    store.append(record, [result(0)])
    path = store.path(record.output_id)
    with path.open("ab") as file:  # the process is killed between the file and the database
        file.write(b'{"position": 1}\n{"posi')
    store.close()
    store = BatchStore(str(tmp_path), 200_000, 100_000)
    [record] = store.unfinished()
    assert record.job.request_counts.completed == 1
    assert [pending.position for pending in store.pending(record, -1, 10)] == [1, 2]
    store.append(record, [result(2), result(1, is_error=True)])
    assert path.read_bytes() == b'{"position": 0}\n{"position": 2}\n'
    with path.open("ab") as file:
        file.write(b"rest")
    store.finish(record, "completed")
    assert path.read_bytes() == b'{"position": 0}\n{"position": 2}\n'
    assert store.file(KEY, record.output_id).bytes == len(path.read_bytes())
    assert store.file(KEY, record.error_id).filename == f"{record.job.id}_error.jsonl"
    assert store.unfinished() == []


def test_a_result_that_cannot_be_stored_changes_nothing(
    store: BatchStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = begun(store)
    store.append(record, [result(0)])

    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", fail)
        with pytest.raises(OSError, match="No space"):
            store.append(record, [result(1), result(2, is_error=True)])
    [stored] = store.unfinished()
    assert stored.job == record.job
    store.append(record, [result(2)])
    assert store.path(record.output_id).read_bytes() == b'{"position": 0}\n{"position": 2}\n'
    assert record.job.request_counts.completed == 2


def test_files_without_lines_are_dropped(store: BatchStore) -> None:
    record = begun(store)
    for id in (record.output_id, record.error_id):
        with pytest.raises(HttpError):
            store.file(KEY, id)
    store.append(record, [result(0, is_error=True)])
    store.finish(record, "cancelled")
    assert (record.job.output_file_id, record.job.error_file_id) == (None, record.error_id)
    assert not store.path(record.output_id).exists()


def test_expired_files_are_removed_unless_a_batch_needs_them(
    store: BatchStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = begun(store)
    needed, expired, kept = record.job.input_file_id, add(store, b"x", 0), add(store, b"x")
    with pytest.raises(HttpError):
        store.file(KEY, expired)
    assert expired.encode() not in store.list_files(KEY, ListPage(None, 9, True), None)
    store.remove_expired()
    assert not store.path(expired).exists()
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 3601)
    store.remove_expired()
    assert store.path(needed).exists()
    assert not store.path(kept).exists()
    store.finish(record, "completed")
    store.remove_expired()
    assert not store.path(needed).exists()
    monkeypatch.setattr(time, "time", lambda: now + 40 * 24 * 3600)
    store.remove_expired()
    with pytest.raises(HttpError):
        store.batch(KEY, record.job.id)


def test_what_no_row_names_is_removed_at_the_start(store: BatchStore, tmp_path: Path) -> None:
    kept = add(store, b"x")
    (store.files / "file-left").write_bytes(b"x")
    (store.uploads / "onequeue-left").write_bytes(b"x")
    store.close()
    store = BatchStore(str(tmp_path), 200_000, 100_000)
    assert [path.name for path in store.files.iterdir()] == [kept]
    assert [*store.uploads.iterdir()] == []


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
    assert len(json.loads(store.list_batches(KEY, ListPage(None, 10, True)))["data"]) == 2
