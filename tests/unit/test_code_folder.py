"""Where compiled code has no place, the server serves without it."""

import logging
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from server.preflight import CODE_FOLDER, has_code_folder
from tests.process.test_start import SERVER, pipe, process
from tests.serving import wait_until


@pytest.fixture(autouse=True)
def _asked_anew() -> Iterator[None]:
    has_code_folder.cache_clear()
    yield
    has_code_folder.cache_clear()


def test_a_folder_that_can_be_made_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "a" / "b"
    monkeypatch.setenv(CODE_FOLDER, str(folder))
    assert has_code_folder()
    assert folder.is_dir()
    assert os.environ[CODE_FOLDER] == str(folder)
    has_code_folder.cache_clear()
    monkeypatch.delenv(CODE_FOLDER)
    assert has_code_folder()
    assert CODE_FOLDER not in os.environ


def test_what_is_no_folder_is_replaced_by_one_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "code"
    monkeypatch.setenv(CODE_FOLDER, str(folder))
    with caplog.at_level(logging.WARNING, "onequeue.preflight"):
        assert not has_code_folder()
    assert str(folder) in caplog.text
    assert os.environ[CODE_FOLDER] == str(tmp_path)


def test_a_folder_that_may_not_be_written_to_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CODE_FOLDER, str(tmp_path))
    monkeypatch.setattr(os, "access", lambda *arguments: False)
    assert not has_code_folder()
    assert os.environ[CODE_FOLDER] == str(tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="nobody can make a folder in Linux's /proc")
def test_the_server_serves_without_a_place_for_code() -> None:
    models = {"CHAT_MODEL": "none", "EMBEDDING_MODEL": "none", "COMPILE": "on"}
    log = ""
    with process([*SERVER, "--port", "0"], **models, **{CODE_FOLDER: "/proc/code"}) as child:
        for line in pipe(child.stderr):
            log += line
            if "Uvicorn running" in log and "no compiled and no native code" in log:
                break
        [port] = re.findall(r"Uvicorn running on http://[\d.]+:(\d+)", log)
        place = f"http://127.0.0.1:{port}"
        wait_until(lambda: httpx.get(f"{place}/ready").status_code == 200)
        answer = httpx.post(place, json={"inputs": "A dog says [MASK]."})
        assert answer.status_code == 200
    assert "TORCHINDUCTOR_CACHE_DIR=/proc/code" in log
