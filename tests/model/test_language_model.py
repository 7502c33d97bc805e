"""Models on a paged cache, and the check at load that detects faults."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AttentionInterface

from tests import tiny_decoders
from tests.generating import load
from tests.matrix import matrix
from tests.tiny_decoders import ARCHITECTURES, LONG_ROPES, UNPAGED, WINDOW, WINDOWED
from worker.device.self_check import CannotRun
from worker.model.attention import paged
from worker.model.attention.kv_cache import LayerShape
from worker.model.attention.paged import ATTENTION, AttentionMetadata
from worker.model.language_model import GeneratorOptions, LanguageModel, load_language_model
from worker.model.loading import LoadingFailed
from worker.model.paging import PagingCheck

torch.set_num_threads(1)
pytestmark = pytest.mark.usefixtures("poisoned_cache")


def language(model: str) -> LanguageModel:
    path = str(tiny_decoders.folder(model))
    return load_language_model(GeneratorOptions(path, dtype="float32", device="cpu"))


@pytest.mark.parametrize("model", matrix(ARCHITECTURES, "llama", "gpt2", "qwen3-moe"))
def test_an_architecture_runs_on_a_paged_cache(model: str) -> None:
    loaded = language(model)
    PagingCheck(loaded).enable()
    second = WINDOW if model in ("mistral", "starcoder2") else 0
    assert loaded.windows == [WINDOW if model in WINDOWED else 0, second]
    assert [layer.chunk for layer in loaded.layers] == [WINDOW if model == "llama4" else 0, 0]
    assert loaded.context == tiny_decoders.CONTEXT


@pytest.mark.parametrize("model", ["llama", "qwen3.5"])
def test_a_model_is_freed_with_its_engine(model: str, caplog: pytest.LogCaptureFixture) -> None:
    engine = load(tiny_decoders.folder(model), compile="off")
    engine.warm_up()
    text_model: Any = engine.text_model  # with the tokenizer
    parts = [weakref.ref(part) for part in (engine, engine.runner, text_model)]
    parts.append(weakref.ref(engine.runner.language.model))
    engine.close()
    del engine, text_model
    gc.collect()
    assert [part() for part in parts] == [None] * len(parts)


@pytest.mark.parametrize("model", sorted(UNPAGED))
def test_a_model_without_an_attention_interface_is_refused(model: str) -> None:
    loaded = language(model)
    before = loaded.model.config._attn_implementation
    with pytest.raises(CannotRun, match="takes no attention function"):
        PagingCheck(loaded).enable()
    assert loaded.model.config._attn_implementation == before


@pytest.mark.parametrize("model", sorted(LONG_ROPES))
def test_rope_tables_that_depend_on_the_longest_sequence_limit_the_context(model: str) -> None:
    loaded = language(model)
    assert loaded.context == 64
    PagingCheck(loaded).enable()


@pytest.mark.parametrize("model", sorted(LONG_ROPES))
def test_a_context_beyond_that_limit_fails_the_check(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sequence far ahead in the context changes the tables of all sequences."""
    loaded = language(model)
    monkeypatch.setattr(LanguageModel, "context", 256)
    with pytest.raises(CannotRun, match="differ"):
        PagingCheck(loaded).enable()


def test_a_max_model_len_beyond_the_context_is_an_error() -> None:
    path = tiny_decoders.folder("llama")
    assert load(path).text_model.max_model_len == tiny_decoders.CONTEXT
    with pytest.raises(LoadingFailed, match=r"^MAX_MODEL_LEN=300: the model takes 256 tokens$"):
        load(path, max_model_len=300)


def test_a_max_model_len_beyond_the_cache_is_an_error_without_the_context() -> None:
    path, size = tiny_decoders.folder("llama"), {"kv_cache_gb": 5e-5}
    holds = load(path, **size).text_model.max_model_len
    assert holds < tiny_decoders.CONTEXT
    reason = f"^MAX_MODEL_LEN={holds + 1}: the memory for keys and values holds {holds} tokens$"
    with pytest.raises(LoadingFailed, match=reason):
        load(path, **size, max_model_len=holds + 1)


@pytest.mark.parametrize(
    ("model", "windows"),
    [
        ("mistral-wide", [320, 320]),
        ("phi3-wide", [320, 320]),
        ("gemma2-wide", [320, 0]),
        ("llama-wide", [0, 0]),
    ],
)
def test_a_window_longer_than_the_checks_prompts_is_recorded(
    model: str, windows: list[int]
) -> None:
    loaded = language(model)
    PagingCheck(loaded).enable()
    assert loaded.windows == windows
    assert loaded.config.sliding_window == 320


@pytest.mark.parametrize("model", ["mistral-wide", "phi3-wide", "gemma2-wide", "phimoe-wide"])
def test_a_window_that_layers_do_not_pass_on_is_detected(
    model: str,
) -> None:
    original: Any = paged.attention_function

    def without_window(*arguments: Any, sliding_window: int | None = None, **more: Any) -> Any:
        return original(*arguments, sliding_window=None, **more)

    loaded = language(model)
    AttentionInterface.register(ATTENTION, without_window)
    try:
        with pytest.raises(CannotRun, match="its layers do not pass on its sliding window"):
            PagingCheck(loaded).enable()
    finally:
        AttentionInterface.register(ATTENTION, original)
    assert loaded.config.sliding_window == 320


# ── a faulty implementation is detected ──

Patch = Callable[[pytest.MonkeyPatch], None]


def attending(change: Callable[..., tuple[Any, ...]]) -> Patch:
    """`change` maps the arguments (query, …, sinks, layer, scale, window, softcap)."""
    original = paged.attend
    return lambda patch: patch.setattr(
        paged, "attend", lambda *arguments: original(*change(*arguments))
    )


def range_off_by(first: int, last: int) -> Patch:
    """Shift the bounds of the keys that each query attends to."""
    original = AttentionMetadata._visible_range

    def visible_range(step: AttentionMetadata, *arguments: Any) -> Any:
        begin, end = original(step, *arguments)
        return np.minimum(begin + first, end), np.maximum(end + last, 0)

    return lambda patch: patch.setattr(AttentionMetadata, "_visible_range", visible_range)


def window_off_by(amount: int) -> Patch:
    return attending(lambda *a: (*a[:6], a[6] and a[6] + amount, a[7]))


def chunks(change: Callable[[int], int]) -> Patch:
    original = AttentionMetadata._first_visible

    def first_visible(step: AttentionMetadata, position: Any, window: int, chunk: int) -> Any:
        return original(step, position, window, change(chunk) if chunk else 0)

    return lambda patch: patch.setattr(AttentionMetadata, "_first_visible", first_visible)


def metadata(change: Callable[[AttentionMetadata], None]) -> Patch:
    """`change` alters the metadata of each step."""
    original = AttentionMetadata.__init__

    def init(step: AttentionMetadata, *arguments: Any) -> None:
        original(step, *arguments)
        change(step)

    return lambda patch: patch.setattr(AttentionMetadata, "__init__", init)


def number_positions_by_row(step: AttentionMetadata) -> None:
    step.positions = torch.arange(len(step.positions))


def shift_slots(step: AttentionMetadata) -> None:
    step.slots = step.slots.roll(1)


def queries_scaled_by_row(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LayerShape, "rescale", lambda shape, query, positions: query)


FAULTS: list[tuple[str, str, Patch]] = [
    ("llama", "one more token visible", range_off_by(0, 1)),
    ("llama", "one token less visible", range_off_by(1, 0)),
    ("mistral", "one more token visible", range_off_by(0, 1)),
    ("gpt-oss", "one token less visible", range_off_by(0, -1)),
    *((m, "window ignored", attending(lambda *a: (*a[:6], 0, a[7]))) for m in WINDOWED),
    *((m, "window too long", window_off_by(1)) for m in WINDOWED),
    *((m, "window too short", window_off_by(-1)) for m in WINDOWED),
    *((m, "positions by row", metadata(number_positions_by_row)) for m in ("llama", "gpt2", "opt")),
    ("llama", "keys in wrong slots", metadata(shift_slots)),
    ("gemma2", "capping ignored", attending(lambda *a: (*a[:7], 0.0))),
    ("gpt-oss", "sinks ignored", attending(lambda *a: (*a[:3], None, *a[4:]))),
    ("llama4", "chunks ignored", chunks(lambda chunk: 0)),
    ("llama4", "chunks too long", chunks(lambda chunk: chunk + 1)),
    ("llama4", "chunks too short", chunks(lambda chunk: chunk - 1)),
    ("llama4", "temperature by row", queries_scaled_by_row),
    ("granite", "scale ignored", attending(lambda *a: (*a[:5], 8**-0.5, *a[6:]))),
]


@pytest.mark.parametrize(
    ("model", "patch"),
    [pytest.param(model, patch, id=f"{model}: {fault}") for model, fault, patch in FAULTS],
)
def test_a_fault_is_detected(model: str, patch: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = language(model)
    patch(monkeypatch)
    with pytest.raises(CannotRun, match="differ"):
        PagingCheck(loaded).enable()
