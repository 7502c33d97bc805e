"""The scan of the hub cache that MODELS_FROM_CACHE=1 makes."""

import json
from pathlib import Path
from typing import Any

import pytest

from server.cached_models import scan
from server.core.settings import ModelReference, Settings
from server.entries import entry_on_demand, model_entries
from tests.checkpoints import NO_TENSORS
from tests.hub import add_to_cache
from worker.checkpoint_files import LFS_POINTER

CHAT: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}


def files(**config: Any) -> dict[str, bytes]:
    text = json.dumps(CHAT | config).encode()
    return {"config.json": text, "model.safetensors": NO_TENSORS}


def names(cache: Path, seen: dict[str, int] | None = None) -> list[str]:
    kinds = {"generation", "embedding"}
    return [name for name, _ in scan(cache, kinds, {} if seen is None else seen)]


def test_complete_checkpoints_are_found_by_name(tmp_path: Path) -> None:
    folder = add_to_cache(tmp_path, "org/chat", files())
    add_to_cache(tmp_path, "org/chat", files(), ref="v1")
    embedder = files() | {"modules.json": b'[{"type": "sentence_transformers.models.Pooling"}]'}
    add_to_cache(tmp_path, "embedder", embedder)
    quantized = add_to_cache(tmp_path, "org/q", {"x.gguf": b"GGUF", "y.gguf": LFS_POINTER})
    found = dict(scan(tmp_path, {"generation", "embedding"}, {}))
    assert found.pop("org/chat") == ("generation", folder)
    assert found.pop("org/q/x.gguf") == ("generation", quantized / "x.gguf")
    assert found.pop("embedder")[0] == "embedding"
    assert [*found] == ["org/chat@v1"]


@pytest.mark.parametrize(
    "content",
    [
        {"config.json": b"{}"},  # no weights yet
        {"model.safetensors": NO_TENSORS},
        files() | {"config.json": b"[" * 100_000},
        files() | {"modules.json": b"[1]"},
        files() | {"model.safetensors": (9).to_bytes(8, "little")},
        files(architectures=["ViTForImageClassification"]),  # its endpoint names no models so
    ],
)
def test_other_repositories_are_left_out(tmp_path: Path, content: dict[str, bytes]) -> None:
    add_to_cache(tmp_path, "org/x", content)
    add_to_cache(tmp_path, "org/y", files())
    assert names(tmp_path) == ["org/y"]


def test_what_is_no_repository_is_left_out(tmp_path: Path) -> None:
    assert names(tmp_path / "missing") == []
    add_to_cache(tmp_path, "org/x y", files())
    snapshot = add_to_cache(tmp_path, "org/x", files())
    (tmp_path / "models--org--x" / "refs" / "main").write_text(f"../snapshots/{snapshot.name}")
    (tmp_path / "models--org--x" / "refs" / "pr").mkdir()
    add_to_cache(tmp_path, "org/data", files())
    (tmp_path / "models--org--data").rename(tmp_path / "datasets--org--data")
    (tmp_path / "models--file").touch()
    assert names(tmp_path) == []


def test_files_are_read_again_only_when_they_have_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = add_to_cache(tmp_path, "org/x", {"config.json": json.dumps(CHAT).encode()})
    seen: dict[str, int] = {}
    assert names(tmp_path, seen) == []
    with monkeypatch.context() as patch:
        patch.setattr("server.cached_models.folder_problem", lambda _: pytest.fail("read again"))
        assert names(tmp_path, seen) == []
    (snapshot / "model.safetensors").write_bytes(NO_TENSORS)
    assert names(tmp_path, seen) == ["org/x"]


def test_a_cached_model_has_the_settings_and_a_configured_models_share() -> None:
    models = "demo;dtype=float32;max_len=40,x=demo"
    settings = Settings(
        chat_model=models, chat_template="x", decision_config="y", kv_cache_gb=4, reasoning="on"
    )
    entries = model_entries(settings, ())
    reference = ModelReference("org/x", "org/x", "/cache/x", is_named=True)
    entry = entry_on_demand("generation", reference, settings, entries)
    assert (entry.name, entry.served_by, entry.generates) == (*["generation:org/x"] * 2, True)
    own = entry.settings
    assert (own.dtype, own.max_model_len, own.chat_template) == ("auto", None, "auto")
    assert own.decision_config == "auto"
    assert (own.kv_cache_gb, own.max_running, own.reasoning) == (2, 128, "on")
