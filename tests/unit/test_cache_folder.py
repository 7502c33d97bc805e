"""The server runs without a folder for compiled code."""

import logging
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from server.preflight import CACHE_FOLDER, has_cache_folder
from tests.processes import SERVER, pipe, process
from tests.serving import wait_until


@pytest.fixture(autouse=True)
def _clear_cache() -> Iterator[None]:
    has_cache_folder.cache_clear()
    yield
    has_cache_folder.cache_clear()


def test_a_missing_folder_is_created(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "a" / "b"
    monkeypatch.setenv(CACHE_FOLDER, str(folder))
    assert has_cache_folder()
    assert folder.is_dir()
    assert os.environ[CACHE_FOLDER] == str(folder)
    has_cache_folder.cache_clear()
    monkeypatch.delenv(CACHE_FOLDER)
    assert has_cache_folder()
    assert CACHE_FOLDER not in os.environ


def test_an_impossible_folder_is_replaced_by_an_existing_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "code"
    monkeypatch.setenv(CACHE_FOLDER, str(folder))
    with caplog.at_level(logging.WARNING, "onequeue.preflight"):
        assert not has_cache_folder()
    assert str(folder) in caplog.text
    assert os.environ[CACHE_FOLDER] == str(tmp_path)


def test_a_folder_that_is_not_writable_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_FOLDER, str(tmp_path))
    monkeypatch.setattr(os, "access", lambda *arguments: False)
    assert not has_cache_folder()
    assert os.environ[CACHE_FOLDER] == str(tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux, where /proc takes no folders")
def test_the_server_serves_without_a_cache_folder() -> None:
    models = {"CHAT_MODEL": "none", "EMBEDDING_MODEL": "none", "COMPILE": "on"}
    log = ""
    with process([*SERVER, "--port", "0"], **models, **{CACHE_FOLDER: "/proc/code"}) as child:
        for line in pipe(child.stderr):
            log += line
            if "Uvicorn running" in log and "no compiled and no native code" in log:
                break
        [port] = re.findall(r"Uvicorn running on http://[\d.]+:(\d+)", log)
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: httpx.get(f"{url}/ready").status_code == 200)
        response = httpx.post(url, json={"inputs": "A dog says [MASK]."})
        assert response.status_code == 200
    assert "TORCHINDUCTOR_CACHE_DIR=/proc/code" in log
