"""Progress of a load, and its end where it is stopped."""

import math

import pytest
import torch

from worker.load_context import (
    LoadContext,
    LoadStopped,
    advance,
    expect_download,
    loading,
    on_worker,
    report,
)


def test_a_load_notes_its_progress_and_a_download_is_not_counted() -> None:
    context = LoadContext(lambda function: function(), progress_at=0.0)
    with loading(context):
        expect_download()
        assert context.progress_at == math.inf
        for step in (advance, lambda: report("weights"), lambda: on_worker(lambda: None)):
            context.progress_at = 0.0
            step()
            assert 0.0 < context.progress_at < math.inf


def test_a_load_that_is_stopped_ends_at_its_next_progress() -> None:
    context = LoadContext(lambda function: function())
    assert context.stop()
    with loading(context):
        for step in (advance, lambda: report("weights"), lambda: on_worker(lambda: None)):
            with pytest.raises(LoadStopped):
                step()
    advance()  # without a load


def test_a_loads_forwards_run_without_gradients() -> None:
    with loading(LoadContext(lambda function: function())):
        assert not on_worker(torch.is_grad_enabled)
    assert torch.is_grad_enabled()
