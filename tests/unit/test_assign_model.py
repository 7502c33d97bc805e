"""`onequeue serve MODEL`: the setting that a checkpoint is for, by its files."""

import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

from server import preflight
from server.core.settings import Settings, SettingsError
from server.preflight import DEMO_MODELS, MODELS, assign_model
from tests.checkpoints import NO_TENSORS, write_checkpoint

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
        ("Qwen2AudioForConditionalGeneration", "chat_model"),
        ("BertForMaskedLM", "pipeline_model"),
        ("BertForSequenceClassification", "pipeline_model"),  # a cross-encoder among them
        ("Wav2Vec2ForCTC", "transcription_model"),
        ("WhisperForConditionalGeneration", "transcription_model"),
        ("BertModel", "pipeline_model"),
        ("SomethingNew", "pipeline_model"),
    ],
)
def test_a_model_is_assigned_by_its_architecture(
    tmp_path: Path, architecture: str, setting: str
) -> None:
    config = {"architectures": [architecture]}
    if "VL" in architecture:
        config["vision_config"] = {}  # type: ignore[assignment]
    if "Qwen2Audio" in architecture:
        config |= {"audio_config": {}, "text_config": {}}  # type: ignore[dict-item]
    write_checkpoint(tmp_path, config)
    assert served(assign_model(str(tmp_path), NO_FLAGS)) == {setting: str(tmp_path)}


@pytest.mark.parametrize(
    ("kinds", "setting"),
    [
        (["sentence_transformers.models.Transformer", "…models.Pooling"], "embedding_model"),
        (["sentence_transformers.models.Transformer", LOGIT_SCORE], "rerank_model"),
    ],
)
def test_a_sentence_transformers_folder_is_assigned_by_its_modules(
    tmp_path: Path, kinds: list[str], setting: str
) -> None:
    (tmp_path / "modules.json").write_text(json.dumps([{"type": kind} for kind in kinds]))
    (tmp_path / "model.safetensors").write_bytes(NO_TENSORS)
    assert served(assign_model(str(tmp_path), NO_FLAGS)) == {setting: str(tmp_path)}


def test_models_named_by_other_flags_are_served_too() -> None:
    flags = NO_FLAGS | {"embedding_model": "demo"}
    chat = str(DEMO / "chat")
    assert served(assign_model(chat, flags)) == {"chat_model": chat, "embedding_model": "demo"}


def test_a_task_assigns_the_model_to_the_pipeline() -> None:
    chat = str(DEMO / "chat")
    assigned = assign_model(chat, NO_FLAGS | {"pipeline_task": "text-generation"})
    assert served(assigned) == {"pipeline_model": chat}


def test_demo_serves_all_demo_models() -> None:
    demos = dict.fromkeys(DEMO_MODELS, "demo")
    assert assign_model("demo", NO_FLAGS) == NO_FLAGS | demos
    speech = {"transcription_model": "demo"}
    assert assign_model("demo", NO_FLAGS | speech) == NO_FLAGS | demos | speech


def test_a_named_model_is_assigned_with_its_name(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {"architectures": ["LlamaForCausalLM"]})
    assert served(assign_model(f"big={tmp_path}", NO_FLAGS)) == {"chat_model": f"big={tmp_path}"}


def hub(files: dict[str, Any]) -> Callable[[str, str], Path]:
    def fetched(model: str, name: str) -> Path:
        file = files.get(name)
        if isinstance(file, Path):
            return file
        raise file or EntryNotFoundError(f"404: {name}")

    return fetched


def test_files_of_a_hub_id_come_from_the_cache_or_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "config.json": DEMO / "chat" / "config.json",
        "modules.json": LocalEntryNotFoundError("offline"),
    }
    monkeypatch.setattr(preflight, "download", hub(files))
    assert served(assign_model("owner/name", NO_FLAGS)) == {"chat_model": "owner/name"}


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (LocalEntryNotFoundError("offline"), "it is not in the cache"),
        (EntryNotFoundError("404"), "it has no config.json"),
        (OSError("no such repository"), "config.json cannot be read: no such repository"),
    ],
)
def test_a_hub_id_without_a_readable_config_is_refused(
    monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
) -> None:
    monkeypatch.setattr(preflight, "download", hub({"config.json": error}))
    with pytest.raises(SettingsError, match=message):
        assign_model("owner/name", NO_FLAGS)


@pytest.mark.parametrize(
    ("files", "model", "message"),
    [
        (["model.gguf"], "model.gguf", "is no GGUF file: download it again"),
        (["a-00002-of-00003.gguf"], "a-00002-of-00003.gguf", "is a part of a GGUF file: merge"),
        (["model.gguf"], "", "no config.json in it: name a GGUF file in it, such as model.gguf"),
        ([], "model.gguf", "there is no such file"),
        (["notes.txt"], "notes.txt", "is a file: name the checkpoint's folder$"),
        (["adapter_config.json"], "", r"is an adapter \(LoRA\), which is not served"),
    ],
)
def test_a_path_that_is_no_checkpoint_is_refused_with_the_reason(
    tmp_path: Path, files: list[str], model: str, message: str
) -> None:
    for name in files:
        (tmp_path / name).touch()
    with pytest.raises(SettingsError, match=message):
        assign_model(str(tmp_path / model), NO_FLAGS)


@pytest.mark.parametrize(
    ("model", "served_model"),
    [
        ("owner/name/model-q4.gguf", "owner/name/model-q4.gguf"),
        ("q4=owner/name/folder/model.gguf@v1", "q4=owner/name/folder/model.gguf@v1"),
    ],
)
def test_a_gguf_file_of_a_hub_is_a_chat_model(model: str, served_model: str) -> None:
    assert served(assign_model(model, NO_FLAGS)) == {"chat_model": served_model}


@pytest.mark.parametrize("model", ["name/model.gguf", "a/b/../c.gguf@", "model.gguf@v1"])
def test_a_gguf_file_without_a_hub_id_is_refused(model: str) -> None:
    with pytest.raises(SettingsError, match=r"one of the hub \(owner/name/file.gguf\)"):
        assign_model(model, NO_FLAGS)


def test_a_gguf_file_is_no_embedding_model() -> None:
    settings = Settings(embedding_model="owner/name/model.gguf")
    with pytest.raises(SettingsError, match="GGUF files are served as CHAT_MODEL only"):
        preflight.check_models(settings)
