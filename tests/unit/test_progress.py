"""The progress of loading weights appears in the log, in place of progress bars."""

import logging

import pytest
from transformers.utils import logging as transformers_log

from worker.model.loading import install_progress_log, log_progress


def test_progress_is_logged_every_few_seconds(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = 0.0
    monkeypatch.setattr("worker.model.loading.time.monotonic", lambda: now)
    caplog.set_level(logging.INFO)
    for _ in log_progress(range(10), desc="Loading weights"):
        now += 1.0
    assert caplog.messages == [
        "loading weights percent=30 seconds=3",
        "loading weights percent=60 seconds=6",
        "loading weights percent=90 seconds=9",
    ]


def test_transformers_shows_no_progress_bars(capfd: pytest.CaptureFixture[str]) -> None:
    before = transformers_log.set_tqdm_hook(None)
    try:
        install_progress_log()
        with transformers_log.tqdm(total=3) as bar:
            bar.update(1)
        assert list(transformers_log.tqdm([1, 2], desc="Loading weights")) == [1, 2]
    finally:
        transformers_log.set_tqdm_hook(before)
    assert capfd.readouterr().err == ""
