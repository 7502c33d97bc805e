"""KV_CACHE_DIR: its command, and what outlives the process of a request."""

import os
import time
from pathlib import Path

import pytest

from server.commands.cache import cache_command
from server.core import request_context
from server.core.metrics import Metrics
from server.core.request_context import RequestContext, RequestRecord
from server.core.settings import Settings, SettingsError
from server.preflight import open_stored_prefixes
from worker.segment_store import SegmentStore


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
    metrics.describe_stored(settings)
    value = metrics.registry.get_sample_value
    assert value("onequeue_kv_files_bytes") == 100_004
    assert 500 <= (value("onequeue_kv_files_age_seconds") or 0) < 560


def test_the_time_of_a_read_is_in_the_header() -> None:
    record = RequestRecord(accepted_at=1.0, prepared_at=1.0, started_at=2.0)
    assert record.timing_header(3.0)[1] == b"queue;dur=0.00, batch;dur=1000.00, model;dur=1000.00"
    record.read_s = 0.5
    assert record.timing_header(3.0)[1].endswith(b", read;dur=500.00")
