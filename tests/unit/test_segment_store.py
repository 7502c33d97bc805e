"""The segment store: what is written is found again, and no fault gives other bytes."""

import errno
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from server.commands.cache import cache_command
from server.core import request_context
from server.core.metrics import Metrics
from server.core.request_context import RequestContext, RequestRecord
from server.core.settings import Settings, SettingsError
from server.preflight import open_stored_prefixes
from tests.segment_faults import read, segment, write
from worker import segment_store
from worker.segment_store import SegmentStore

MB = 1 << 20


def written(folder: Path, numbers: range, max_bytes: int = 64 * MB) -> SegmentStore:
    store = SegmentStore(folder, max_bytes)
    write(store, numbers)
    return store


def file_of(store: SegmentStore, number: int) -> Path:
    return store.folder / f"{segment(number)[0].hex()}.segment"


def test_another_process_reads_what_one_has_written(tmp_path: Path) -> None:
    reader = SegmentStore(tmp_path / "kv", MB)
    written(tmp_path / "kv", range(50))
    assert segment(1)[0] not in reader  # nothing is read before it is asked for
    reader.refresh()
    assert segment(1)[0] in reader
    assert [*read(reader, range(40, 60))] == [*range(40, 50)]
    assert SegmentStore(tmp_path / "kv", MB).secret == reader.secret


def test_the_folder_is_closed_to_others(tmp_path: Path) -> None:
    store = written(tmp_path / "kv", range(3))
    assert store.folder.stat().st_mode & 0o777 == 0o700
    assert all(file.stat().st_mode & 0o777 == 0o600 for file in store.folder.iterdir())
    store.folder.chmod(0o755)
    with pytest.raises(PermissionError):
        SegmentStore(store.folder, MB)


def test_a_folder_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SegmentStore(tmp_path / "kv", MB)
    monkeypatch.setattr(os, "geteuid", lambda: store.folder.stat().st_uid + 1)
    with pytest.raises(PermissionError, match="other users own it"):
        SegmentStore(store.folder, MB)


def test_the_least_recently_used_segments_are_removed_first(tmp_path: Path) -> None:
    store = SegmentStore(tmp_path / "kv", 400_000)
    data = memoryview(bytes(80_000))
    for number in range(1, 5):
        store.write(segment(number)[0], data)
        os.utime(file_of(store, number), (number, number))
    (store.folder / "00.segment.tmp").write_bytes(bytes(50_000))
    os.utime(store.folder / "00.segment.tmp", (1, 1))  # a killed process has left it
    store.use([segment(1)[0]])
    for number in (5, 6):
        store.write(segment(number)[0], data)
        store.measure()
        assert store.usage.bytes <= 400_000
    assert [n for n in range(7) if segment(n)[0] in store] == [1, 4, 5, 6]
    assert not [*store.folder.glob("*.tmp")]


def test_the_first_segment_of_a_prefix_is_removed_last(tmp_path: Path) -> None:
    store = written(tmp_path / "kv", range(3))
    store.use(segment(number)[0] for number in range(3))
    times = [file_of(store, number).stat().st_mtime_ns for number in range(3)]
    assert times == sorted(times, reverse=True)


def test_the_number_of_files_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_store, "MAX_FILES", 20)
    store = written(tmp_path / "kv", range(50))
    assert 18 <= len([*store.folder.glob("*.segment")]) <= 20
    assert segment(49)[0] in store


def test_a_segment_that_is_larger_than_the_folder_is_left_out(tmp_path: Path) -> None:
    store = written(tmp_path / "kv", range(3), 100_000)
    store.write(segment(5)[0], memoryview(bytes(100_000)))
    assert segment(5)[0] not in store
    assert [*read(store, range(3))] == [0, 1, 2]


def test_requests_do_not_wait_for_the_sizes_of_all_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = SegmentStore(tmp_path / "kv", MB)
    written(tmp_path / "kv", range(2))
    monkeypatch.delattr(os, "scandir")
    reader.refresh()
    assert segment(1)[0] in reader


def test_a_full_disk_leaves_no_file_and_the_segments_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = written(tmp_path / "kv", range(5))

    def fail(_: int) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="no space"):
        write(store, [9])
    assert not [*store.folder.glob("*.tmp")]
    assert [*read(store, range(10))] == [0, 1, 2, 3, 4]


def test_a_segment_under_another_key_is_not_read(tmp_path: Path) -> None:
    store = written(tmp_path / "kv", range(1))
    file_of(store, 0).rename(file_of(store, 1))
    assert not store.read(segment(1)[0], memoryview(bytearray(len(segment(0)[1]))))


def test_an_index_is_there_while_the_disk_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = written(tmp_path / "kv", range(1))
    reached, opened, listdir = threading.Event(), threading.Event(), os.listdir

    def hang(path: Path) -> object:
        reached.set()
        assert opened.wait(60)
        return listdir(path)

    monkeypatch.setattr(os, "listdir", hang)
    thread = threading.Thread(target=store.refresh)
    thread.start()
    assert reached.wait(60)
    assert segment(0)[0] in store
    opened.set()
    thread.join()


def test_kills_and_faults_give_no_other_bytes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.segment_faults", "150", "3", str(tmp_path / "kv")]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    assert "'kill'" in result.stdout


# ── KV_CACHE_DIR: its command, and what outlives the process of a request ──


def test_the_command_shows_and_removes_what_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KV_CACHE_DIR", str(tmp_path / "kv"))
    SegmentStore(tmp_path / "kv", 1 << 30).write(bytes(16), memoryview(bytes(2_000_000)))
    cache_command("onequeue cache", ["ls"])
    assert capsys.readouterr().out.startswith("files=1 gb=0.002 of=10 ")
    cache_command("onequeue cache", ["clear"])
    assert capsys.readouterr().out.startswith("files=0 gb=0.000 of=10 ")
    monkeypatch.delenv("KV_CACHE_DIR")
    with pytest.raises(SystemExit):
        cache_command("onequeue cache", ["ls"])
    assert "KV_CACHE_DIR is not set" in capsys.readouterr().err


def test_a_folder_that_others_may_read_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(SettingsError, match=r"KV_CACHE_DIR=.* other users own it or may read it"):
        open_stored_prefixes(Settings(kv_cache_dir=str(tmp_path)))
    assert open_stored_prefixes(Settings()) is None


def test_a_namespace_depends_on_the_secret_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def namespace(secret: bytes, salt: str) -> bytes:
        request_context._digest.cache_clear()
        monkeypatch.setattr(request_context, "SECRET", bytearray(secret))
        context = RequestContext(b"client")
        return context.cache_namespace("model", salt)

    one, other = bytes(32), bytes([1] * 32)
    assert namespace(one, "salt") == namespace(one, "salt")
    assert len({namespace(one, "a"), namespace(one, "b"), namespace(other, "a")}) == 3


def test_metrics_have_the_size_and_the_age_of_the_files(tmp_path: Path) -> None:
    metrics = Metrics(lambda: 0)
    settings = Settings(kv_cache_dir=str(tmp_path / "kv"))
    SegmentStore(tmp_path / "kv", 1 << 30).write(bytes(16), memoryview(bytes(100_000)))
    [file] = (tmp_path / "kv").glob("*.segment")
    os.utime(file, (time.time() - 500, time.time() - 500))
    assert open_stored_prefixes(settings)  # as a server that starts
    metrics.refresh(settings, {})
    value = metrics.registry.get_sample_value
    assert value("onequeue_kv_files_bytes") == 100_004
    assert 500 <= (value("onequeue_kv_files_age_seconds") or 0) < 560


def test_the_time_of_a_read_is_in_the_header() -> None:
    record = RequestRecord(accepted_at=1.0, prepared_at=1.0, started_at=2.0)
    assert record.timing_header(3.0)[1] == b"queue;dur=0.00, batch;dur=1000.00, model;dur=1000.00"
    record.read_s = 0.5
    assert record.timing_header(3.0)[1].endswith(b", read;dur=500.00")
