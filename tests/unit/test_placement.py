"""`python -m server MODEL`: which setting a checkpoint is for, by its files."""

import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

from server import preflight
from server.core.settings import Settings, SettingsError
from server.preflight import MODELS, place

DEMO = Path(__file__).parents[2] / "worker" / "demo"
NO_FLAGS = dict.fromkeys((spec.name for spec in fields(Settings)), None)
LOGIT_SCORE = "sentence_transformers.cross_encoder.models.LogitScore"


def served(flags: dict[str, str | None]) -> dict[str, str | None]:
    return {name: flags[name] for name in MODELS if flags[name] != "none"}


@pytest.mark.parametrize(
    ("architecture", "setting"),
    [
        ("Qwen3ForCausalLM", "chat_model"),
        ("GPT2LMHeadModel", "chat_model"),
        ("Qwen2_5_VLForConditionalGeneration", "chat_model"),
        ("BertForMaskedLM", "pipeline_model"),
        ("BertForSequenceClassification", "pipeline_model"),  # a cross-encoder among them
        ("Wav2Vec2ForCTC", "transcription_model"),
        ("WhisperForConditionalGeneration", "transcription_model"),
        ("BertModel", "pipeline_model"),
        ("SomethingNew", "pipeline_model"),
    ],
)
def test_a_model_is_placed_by_its_architecture(
    tmp_path: Path, architecture: str, setting: str
) -> None:
    config = {"architectures": [architecture]}
    if "VL" in architecture:
        config["vision_config"] = {}  # type: ignore[assignment]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert served(place(str(tmp_path), NO_FLAGS)) == {setting: str(tmp_path)}


@pytest.mark.parametrize(
    ("kinds", "setting"),
    [
        (["sentence_transformers.models.Transformer", "…models.Pooling"], "embedding_model"),
        (["sentence_transformers.models.Transformer", LOGIT_SCORE], "rerank_model"),
    ],
)
def test_sentence_transformers_folders_are_known_by_their_modules(
    tmp_path: Path, kinds: list[str], setting: str
) -> None:
    (tmp_path / "modules.json").write_text(json.dumps([{"type": kind} for kind in kinds]))
    assert served(place(str(tmp_path), NO_FLAGS)) == {setting: str(tmp_path)}


def test_what_other_flags_name_is_served_too() -> None:
    flags = NO_FLAGS | {"embedding_model": "demo"}
    chat = str(DEMO / "chat")
    assert served(place(chat, flags)) == {"chat_model": chat, "embedding_model": "demo"}


def test_a_task_says_that_it_is_for_the_pipeline() -> None:
    chat = str(DEMO / "chat")
    placed = place(chat, NO_FLAGS | {"pipeline_task": "text-generation"})
    assert served(placed) == {"pipeline_model": chat}


def test_demo_is_all_that_is_served_by_default() -> None:
    assert place("demo", NO_FLAGS) == NO_FLAGS


def hub(files: dict[str, Any]) -> Callable[[str, str], Path]:
    def fetched(model: str, name: str) -> Path:
        found = files.get(name)
        if isinstance(found, Path):
            return found
        raise found or EntryNotFoundError(f"404: {name}")

    return fetched


def test_files_of_a_hub_id_come_from_the_cache_or_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "config.json": DEMO / "chat" / "config.json",
        "modules.json": LocalEntryNotFoundError("offline"),
    }
    monkeypatch.setattr(preflight, "fetched", hub(files))
    assert served(place("owner/name", NO_FLAGS)) == {"chat_model": "owner/name"}


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (LocalEntryNotFoundError("offline"), "it is not in the cache"),
        (EntryNotFoundError("404"), "it has no config.json"),
        (OSError("no such repository"), "config.json cannot be read: no such repository"),
    ],
)
def test_a_hub_id_that_cannot_be_had_is_refused(
    monkeypatch: pytest.MonkeyPatch, found: Exception, says: str
) -> None:
    monkeypatch.setattr(preflight, "fetched", hub({"config.json": found}))
    with pytest.raises(SettingsError, match=says):
        place("owner/name", NO_FLAGS)


@pytest.mark.parametrize(
    ("files", "model", "says"),
    [
        (["model.gguf"], "model.gguf", "is a file, not a checkpoint's folder; GGUF is not served"),
        (["model.gguf"], "", "no config.json in this folder; GGUF is not served"),
        (["notes.txt"], "notes.txt", "is a file, not a checkpoint's folder$"),
        (["adapter_config.json"], "", r"is an adapter \(LoRA\), which is not served"),
    ],
)
def test_what_is_no_checkpoint_is_told_for_what_it_is(
    tmp_path: Path, files: list[str], model: str, says: str
) -> None:
    for name in files:
        (tmp_path / name).touch()
    with pytest.raises(SettingsError, match=says):
        place(str(tmp_path / model), NO_FLAGS)
