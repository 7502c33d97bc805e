"""The thread that loads models, the progress of a load, its log, and the copy to a GPU."""

import logging
import math
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.utils import logging as transformers_log

from tests import tiny
from worker.load_context import (
    LoadContext,
    LoadStopped,
    advance,
    expect_download,
    on_worker,
    report,
)
from worker.load_context import loading as in_context
from worker.loader import Loader
from worker.model import loading
from worker.model.language_model import LanguageModel
from worker.model.loading import ModelOptions, install_progress_log, load_checkpoint, log_progress

GPU = torch.device("cuda")


def test_a_cancelled_job_does_not_run_and_the_next_one_does() -> None:
    loader, ran = Loader(), list[str]()
    loader.submit(lambda: ran.append("cancelled")).cancel()
    following = loader.submit(lambda: ran.append("next"))
    loader.thread.start()
    following.result(60)
    assert ran == ["next"]
    loader.stop()
    loader.thread.join(60)
    assert not loader.thread.is_alive()


def test_an_abandoned_job_keeps_its_thread_and_another_one_runs_the_next_job() -> None:
    loader, entered, gate = Loader(), threading.Event(), threading.Event()

    def hang() -> None:
        entered.set()
        gate.wait(60)

    stuck = loader.submit(hang)
    following = loader.submit(threading.current_thread)
    first = loader.thread
    first.start()
    assert entered.wait(60)
    assert not loader.abandon(stuck, lambda: False)
    assert loader.abandon(stuck, lambda: True)
    assert following.result(60) is loader.thread is not first
    assert not loader.abandon(stuck, lambda: True)
    gate.set()
    first.join(60)
    assert not first.is_alive()
    assert loader.submit(threading.current_thread).result(60) is loader.thread
    assert not loader.abandon(following, lambda: True)  # it has ended
    loader.stop()
    loader.thread.join(60)


def test_a_job_that_waits_is_cancelled() -> None:
    loader = Loader()
    waiting = loader.submit(lambda: None)
    assert loader.abandon(waiting, lambda: False)
    assert waiting.cancelled()


def test_a_job_of_a_loader_that_stops_is_left_without_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loader, entered, gate = Loader(), threading.Event(), threading.Event()

    def run() -> None:
        entered.set()
        gate.wait(60)

    running, thread = loader.submit(run), loader.thread
    thread.start()
    assert entered.wait(60)
    loader.stop()
    assert loader.abandon(running, lambda: True)
    gate.set()
    thread.join(60)
    assert not thread.is_alive()
    assert loader.thread is thread
    assert not caplog.records


def test_a_load_that_is_stopped_falls_back_to_nothing() -> None:
    context, model = LoadContext(lambda function: function()), object.__new__(LanguageModel)
    context.stop()
    with in_context(context), pytest.raises(LoadStopped):
        model.attempt(advance, "a kernel", "another one", "speed")


def test_a_load_notes_its_progress_and_a_download_is_not_counted() -> None:
    context = LoadContext(lambda function: function(), progress_at=0.0)
    with in_context(context):
        expect_download()
        assert context.progress_at == math.inf
        for step in (advance, lambda: report("weights"), lambda: on_worker(lambda: None)):
            context.progress_at = 0.0
            step()
            assert 0.0 < context.progress_at < math.inf


def test_a_load_that_is_stopped_ends_at_its_next_progress() -> None:
    context = LoadContext(lambda function: function())
    assert context.stop()
    with in_context(context):
        for step in (advance, lambda: report("weights"), lambda: on_worker(lambda: None)):
            with pytest.raises(LoadStopped):
                step()
    advance()  # without a load


def test_a_loads_forwards_run_without_gradients() -> None:
    with in_context(LoadContext(lambda function: function())):
        assert not on_worker(torch.is_grad_enabled)
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("has_accelerate", [True, False])
def test_weights_are_copied_to_a_gpu_while_they_are_read(
    has_accelerate: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed: list[dict[str, Any]] = []
    moved: list[torch.device] = []

    class Model(torch.nn.Module):
        def to(self, device: Any) -> Any:  # type: ignore[override]
            moved.append(device)
            return self

    def from_pretrained(folder: str, **options: Any) -> Any:
        passed.append(options)
        return Model(), {"missing_keys": [], "mismatched_keys": []}

    monkeypatch.setattr(loading, "choose_device", lambda name: GPU)
    monkeypatch.setattr(loading, "check_fits", lambda *_: None)
    monkeypatch.setattr(loading, "is_accelerate_available", lambda: has_accelerate)
    auto = SimpleNamespace(from_pretrained=from_pretrained)
    folder = str(tiny.folder("llama-lm"))
    load_checkpoint(ModelOptions(folder), folder, lambda config: auto)
    [options] = passed
    assert options.get("device_map") == ({"": GPU} if has_accelerate else None)
    assert moved == ([] if has_accelerate else [GPU])


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
