"""The segment store: what is written is found again, and no fault gives other bytes."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.segment_faults import record
from worker.segment_store import FolderIsOpen, SegmentStore

MB = 1 << 20


def written(folder: Path, numbers: range, max_bytes: int = 64 * MB) -> SegmentStore:
    store = SegmentStore(folder, max_bytes)
    store.write(map(record, numbers), len(numbers))
    return store


def read(store: SegmentStore, numbers: range) -> list[bytes]:
    return [bytes(data) for data in store.read([record(n)[0] for n in numbers])]


def segments(store: SegmentStore) -> list[Path]:
    return sorted(store.folder.glob("*.segment"))


def test_another_process_reads_what_one_has_written(tmp_path: Path) -> None:
    reader = SegmentStore(tmp_path / "kv", MB)
    written(tmp_path / "kv", range(50))
    assert record(1)[0] not in reader  # nothing is read before it is asked for
    reader.refresh()
    assert record(1)[0] in reader
    assert read(reader, range(50)) == [record(n)[1] for n in range(50)]
    assert read(reader, range(40, 60)) == [record(n)[1] for n in range(40, 50)]
    assert SegmentStore(tmp_path / "kv", MB).secret == reader.secret


def test_the_folder_tells_nothing_to_others(tmp_path: Path) -> None:
    store = written(tmp_path / "kv", range(3))
    assert store.folder.stat().st_mode & 0o777 == 0o700
    assert all(file.stat().st_mode & 0o777 == 0o600 for file in store.folder.iterdir())
    assert all(len(file.stem) == 32 for file in segments(store))  # random names
    store.folder.chmod(0o755)
    with pytest.raises(FolderIsOpen):
        SegmentStore(store.folder, MB)


def test_a_folder_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SegmentStore(tmp_path / "kv", MB)
    monkeypatch.setattr(os, "geteuid", lambda: store.folder.stat().st_uid + 1)
    with pytest.raises(FolderIsOpen, match="another user"):
        SegmentStore(store.folder, MB)


def test_the_least_recently_used_segments_are_removed_first(tmp_path: Path) -> None:
    store = SegmentStore(tmp_path / "kv", 400_000)
    data = bytes(80_000)
    for number in range(1, 5):
        store.write([(record(number)[0], data)], 1)
        [file] = [file for file in segments(store) if record(number)[0] in file.read_bytes()]
        os.utime(file, (number, number))
    store.use([record(1)[0]])
    for number in (5, 6):
        store.write([(record(number)[0], data)], 1)
        assert store.usage().bytes <= 400_000
    assert [n for n in range(7) if record(n)[0] in store] == [1, 4, 5, 6]


def test_a_record_that_no_segment_holds_is_left_out(tmp_path: Path) -> None:
    store = SegmentStore(tmp_path / "kv", 100_000)
    assert store.write([(record(0)[0], bytes(50_000)), record(1)], 2) == len(record(1)[1])
    assert record(0)[0] not in store
    assert read(store, range(1, 2)) == [record(1)[1]]


def test_more_records_than_a_header_has_room_for_are_written_whole(tmp_path: Path) -> None:
    store = SegmentStore(tmp_path / "kv", 64 * MB)
    store.write(map(record, range(300)), 1)  # others of a prefix were removed meanwhile
    assert read(store, range(300)) == [record(n)[1] for n in range(300)]
    assert len(segments(store)) == 3


@pytest.mark.parametrize("place", [0, 20, 33, 40, 50, 60, 64, 4100, -1])
def test_a_flipped_bit_loses_the_segment_alone(tmp_path: Path, place: int) -> None:
    store = written(tmp_path / "kv", range(10))
    [file] = segments(store)
    content = bytearray(file.read_bytes())
    content[place] ^= 4
    store.write(map(record, range(10, 12)), 2)
    file.write_bytes(content)
    again = SegmentStore(store.folder, MB)
    again.refresh()
    assert read(again, range(10)) in [[record(n)[1] for n in range(m)] for m in range(10)]
    assert not file.exists()
    assert read(again, range(10, 12)) == [record(10)[1], record(11)[1]]


def test_a_full_disk_leaves_no_file_and_the_segments_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = written(tmp_path / "kv", range(5))

    def fail(*_: object) -> int:
        raise OSError(errno.ENOSPC, "no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", fail)
        with pytest.raises(OSError, match="no space"):
            store.write([record(9)], 1)
    assert not list(store.folder.glob("*.tmp"))
    assert read(store, range(5)) == [record(n)[1] for n in range(5)]


def test_kills_and_faults_give_no_other_bytes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.segment_faults", "150", "3", str(tmp_path / "kv")]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    assert "'kill'" in result.stdout
