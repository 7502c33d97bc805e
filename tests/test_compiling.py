"""The compiled model takes over between steps and says the same; without a compiler, nothing."""

import logging
import shutil
import threading
from typing import Any

import pytest

from tests import tiny
from worker.generation import loading
from worker.model import compiling
from worker.model.language_model import GeneratorOptions, LanguageModel, load_language_model
from worker.model.paged_attention import PagedCache, Step


def loaded(quantization: str = "none") -> LanguageModel:
    options = GeneratorOptions(
        str(tiny.folder("llama-lm")), dtype="float32", device="cpu", quantization=quantization
    )
    language = load_language_model(options)
    language.page()
    loading._lay_out(language, options, paged=True)
    return language


@pytest.mark.skipif(not shutil.which("g++"), reason="there is no compiler")
@pytest.mark.parametrize(("quantization", "rounding"), [("none", 1e-4), ("int8", 5e-2)])
def test_the_compiled_model_takes_over_and_gives_the_same_logits(
    quantization: str, rounding: float
) -> None:
    language = loaded(quantization)
    assert language.tolerance == rounding
    plain = language.call
    finished = threading.Event()
    outcome: list[bool] = []

    def done(compiled: bool) -> None:
        outcome.append(compiled)
        finished.set()

    compiling.compile_in_background(language, done)
    assert finished.wait(1200)
    assert outcome == [True]
    assert language.call is not plain
    cache = PagedCache(language.layers, 8, language.dtype, language.device)
    # a prompt with a chunk of another, then a token each, then one alone
    for chunks in (
        [([0, 1, 2], 0, 40), ([3, 4], 0, 5)],
        [([0, 1, 2], 40, 1), ([3, 4], 5, 1)],
        [([3, 4], 6, 1)],
        [([3, 4], 7, 3)],  # with drafts
    ):
        width = sum(chunk[2] for chunk in chunks)
        ids = [1 + n % 50 for n in range(width)]
        step = Step(cache, chunks, language.dtype)
        got = language.forward(step, ids, range(width))
        language.compare(got, language.forward(step, ids, range(width), plain))


def test_where_compiling_fails_serving_goes_on_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    language = loaded()
    plain = language.call

    def broken(model: Any) -> Any:
        raise RuntimeError("no compiler here\nand a long trace")

    monkeypatch.setattr(compiling, "_twin", broken)
    outcome: list[bool] = []
    caplog.set_level(logging.WARNING, "onequeue.compiling")
    compiling._compile(language, outcome.append)
    assert outcome == [False]
    assert language.call is plain
    assert [record.message for record in caplog.records] == [
        "not compiled, serving goes on as it is: no compiler here"
    ]
