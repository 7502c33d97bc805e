"""The compiled model takes over between steps and says the same; without a compiler, nothing."""

import logging
import shutil
import threading
import time
from typing import Any

import pytest
import torch

from batching.sequence import Batch, Span
from tests import tiny
from worker.cores import compute_alone
from worker.model import paged_runner
from worker.model.language_model import GeneratorOptions, load_language_model
from worker.model.paged_attention import AttentionMetadata
from worker.model.paged_runner import PagedRunner, run
from worker.model.paging import load_paged_runner


def loaded(quantization: str = "none") -> PagedRunner:
    options = GeneratorOptions(
        str(tiny.folder("llama-lm")), dtype="float32", device="cpu", quantization=quantization,
        kv_cache_gb=0.001,
    )  # fmt: skip
    return load_paged_runner(load_language_model(options), options)


def compile_state(runner: PagedRunner) -> str:
    """Once it is known."""
    runner.compile()
    deadline = time.monotonic() + 1200
    while runner.compile_state == "running":
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return runner.compile_state


@pytest.mark.skipif(not shutil.which("g++"), reason="there is no compiler")
@pytest.mark.parametrize(("quantization", "rounding"), [("none", 1e-4), ("int8", 5e-2)])
def test_the_compiled_model_takes_over_and_gives_the_same_logits(
    quantization: str, rounding: float
) -> None:
    runner = loaded(quantization)
    language = runner.language
    assert language.tolerance == rounding
    eager = runner.model
    assert compile_state(runner) == "done"
    assert runner.model is eager, "it takes over in the middle of a step"
    # a prompt with a chunk of another, then a token each, then one alone
    for spans in (
        [Span([0, 1, 2], 0, 40), Span([3, 4], 0, 5)],
        [Span([0, 1, 2], 40, 1), Span([3, 4], 5, 1)],
        [Span([3, 4], 6, 1)],
        [Span([3, 4], 7, 3)],  # with drafts
    ):
        width = sum(span.width for span in spans)
        batch = Batch(spans, [1 + n % 50 for n in range(width)], range(width))
        got = runner.forward(batch)
        assert runner.model is not eager
        language.compare(got, run(eager, batch, AttentionMetadata(runner.cache, batch)))


def test_the_code_is_made_for_the_workers_threads_whatever_others_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner, threads, seen = loaded(), torch.get_num_threads(), []
    monkeypatch.setattr(paged_runner, "compiled", lambda *_: seen.append(torch.get_num_threads()))
    torch.set_num_threads(3)
    try:
        other = threading.Thread(target=compute_alone)  # as a pool's does
        other.start()
        other.join()
        compile_state(runner)
    finally:
        torch.set_num_threads(threads)
    assert seen == [3]


def test_where_compiling_fails_serving_goes_on_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runner = loaded()
    eager = runner.model

    def broken(model: Any, check: Any) -> Any:
        raise RuntimeError("no compiler here\nand a long trace")

    monkeypatch.setattr(paged_runner, "compiled", broken)
    caplog.set_level(logging.WARNING, "onequeue.paged_runner")
    assert compile_state(runner) == "off"
    runner.forward(Batch([Span([0], 0, 1)], [1], [0]))
    assert runner.model is eager
    assert [record.message for record in caplog.records] == [
        "not compiled, serving goes on as it is: no compiler here"
    ]
