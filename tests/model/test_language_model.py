"""Which models run on paged memory, and that the check at load would notice if they ran wrongly."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AttentionInterface

from tests import tiny_decoders
from tests.matrix import matrix
from tests.tiny_decoders import ARCHITECTURES, LONG_ROPES, UNPAGED, WINDOW, WINDOWED
from worker.device.self_check import CannotRun
from worker.generation.loading import load_generator
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
    tiny_decoders.skip_where_capping_is_ignored(model)
    return load_language_model(GeneratorOptions(path, dtype="float32", device="cpu"))


@pytest.mark.parametrize("model", matrix(ARCHITECTURES, "llama", "gpt2", "qwen3-moe"))
def test_an_architecture_runs_on_paged_memory(model: str) -> None:
    made = language(model)
    PagingCheck(made).page()
    second = WINDOW if model in ("mistral", "starcoder2") else 0
    assert made.windows == [WINDOW if model in WINDOWED else 0, second]
    assert [layer.chunk for layer in made.layers] == [WINDOW if model == "llama4" else 0, 0]
    assert made.context == tiny_decoders.CONTEXT


@pytest.mark.parametrize("model", sorted(UNPAGED))
def test_a_model_that_attends_in_its_own_way_is_refused(model: str) -> None:
    made = language(model)
    before = made.model.config._attn_implementation
    with pytest.raises(CannotRun, match="takes no attention function"):
        PagingCheck(made).page()
    assert made.model.config._attn_implementation == before


@pytest.mark.parametrize("model", sorted(LONG_ROPES))
def test_positions_that_depend_on_the_longest_sequence_limit_the_context(model: str) -> None:
    made = language(model)
    assert made.context == 64
    PagingCheck(made).page()


@pytest.mark.parametrize("model", sorted(LONG_ROPES))
def test_a_context_beyond_such_a_limit_would_be_noticed(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sequence far ahead in the context turns everybody's tables."""
    made = language(model)
    monkeypatch.setattr(LanguageModel, "context", 256)
    with pytest.raises(CannotRun, match="differ"):
        PagingCheck(made).page()


def test_more_than_the_context_cannot_be_asked_for() -> None:
    path = str(tiny_decoders.folder("phi3-longrope"))
    options = GeneratorOptions(path, dtype="float32", device="cpu", kv_cache_gb=0.01)
    assert load_generator(options).max_model_len == 64
    with pytest.raises(LoadingFailed, match="MAX_MODEL_LEN=100: the model takes 64"):
        load_generator(replace(options, max_model_len=100))


@pytest.mark.parametrize(
    ("model", "windows"),
    [
        ("mistral-wide", [320, 320]),
        ("phi3-wide", [320, 320]),
        ("gemma2-wide", [320, 0]),
        ("llama-wide", [0, 0]),
    ],
)
def test_a_window_longer_than_the_prompts_of_the_check_is_told(
    model: str, windows: list[int]
) -> None:
    made = language(model)
    PagingCheck(made).page()
    assert made.windows == windows
    assert made.config.sliding_window == 320


@pytest.mark.parametrize("model", ["mistral-wide", "phi3-wide", "gemma2-wide", "phimoe-wide"])
def test_a_longer_window_that_layers_are_not_told_is_noticed(
    model: str,
) -> None:
    ordinary: Any = paged.attention_function

    def untold(*arguments: Any, sliding_window: int | None = None, **more: Any) -> Any:
        return ordinary(*arguments, sliding_window=None, **more)

    made = language(model)
    AttentionInterface.register(ATTENTION, untold)
    try:
        with pytest.raises(CannotRun, match="its sliding window is not told to its layers"):
            PagingCheck(made).page()
    finally:
        AttentionInterface.register(ATTENTION, ordinary)
    assert made.config.sliding_window == 320


# ── an implementation with a fault is noticed ──

Patch = Callable[[pytest.MonkeyPatch], None]


def attending(change: Callable[..., tuple[Any, ...]]) -> Patch:
    """`change` sees and returns (query, …, sinks, layer, scale, window, softcap)."""
    ordinary = paged.attend
    return lambda patch: patch.setattr(
        paged, "attend", lambda *arguments: ordinary(*change(*arguments))
    )


def seeing(first: int, last: int) -> Patch:
    """Queries see so much beyond what is theirs, or less."""
    ordinary = AttentionMetadata._seen

    def seen(step: AttentionMetadata, *arguments: Any) -> Any:
        begin, end = ordinary(step, *arguments)
        return np.minimum(begin + first, end), np.maximum(end + last, 0)

    return lambda patch: patch.setattr(AttentionMetadata, "_seen", seen)


def window_off_by(amount: int) -> Patch:
    return attending(lambda *a: (*a[:6], a[6] and a[6] + amount, a[7]))


def chunks(change: Callable[[int], int]) -> Patch:
    ordinary = AttentionMetadata._first_seen

    def first_seen(step: AttentionMetadata, position: Any, window: int, chunk: int) -> Any:
        return ordinary(step, position, window, change(chunk) if chunk else 0)

    return lambda patch: patch.setattr(AttentionMetadata, "_first_seen", first_seen)


def positions_off(patch: pytest.MonkeyPatch) -> None:
    ordinary = AttentionMetadata.__init__

    def init(step: AttentionMetadata, *arguments: Any) -> None:
        ordinary(step, *arguments)
        step.positions = torch.arange(len(step.positions))

    patch.setattr(AttentionMetadata, "__init__", init)


def slots_off(patch: pytest.MonkeyPatch) -> None:
    ordinary = AttentionMetadata.__init__

    def init(step: AttentionMetadata, *arguments: Any) -> None:
        ordinary(step, *arguments)
        step.slots = step.slots.roll(1)

    patch.setattr(AttentionMetadata, "__init__", init)


def queries_scaled_by_row(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LayerShape, "rescaled", lambda shape, query, positions: query)


FAULTS: list[tuple[str, str, Patch]] = [
    ("llama", "mask sees one more", seeing(0, 1)),
    ("llama", "mask sees one less", seeing(1, 0)),
    ("mistral", "mask sees one more", seeing(0, 1)),
    ("gpt-oss", "mask sees one less", seeing(0, -1)),
    *((m, "window ignored", attending(lambda *a: (*a[:6], 0, a[7]))) for m in WINDOWED),
    *((m, "window too long", window_off_by(1)) for m in WINDOWED),
    *((m, "window too short", window_off_by(-1)) for m in WINDOWED),
    ("llama", "positions by row", positions_off),
    ("gpt2", "positions by row", positions_off),
    ("opt", "positions by row", positions_off),
    ("llama", "keys in the wrong place", slots_off),
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
    [pytest.param(model, patch, id=f"{model}: {what}") for model, what, patch in FAULTS],
)
def test_a_fault_is_noticed(model: str, patch: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    made = language(model)
    patch(monkeypatch)
    with pytest.raises(CannotRun, match="differ"):
        PagingCheck(made).page()
