"""The task is inferred from the checkpoint; one that contradicts it is refused before loading."""

import threading
from pathlib import Path
from typing import Any

import pytest

from server.app import create_app
from server.core.settings import Settings, SettingsError
from server.entries import model_entries
from server.preflight import check_models
from tests.checkpoints import write_checkpoint
from tests.fakes import FakeRunner
from worker import task_detection
from worker.task_detection import TaskError, detect_task, tasks_of
from worker.tasks import TASKS

NLI = {"id2label": {"0": "CONTRADICTION", "1": "entailment"}}


@pytest.mark.parametrize(
    ("architecture", "more", "tasks"),
    [
        ("BertForMaskedLM", {}, ["fill-mask"]),
        ("BertForPreTraining", {}, ["fill-mask"]),
        ("BertForSequenceClassification", {}, ["text-classification"]),
        ("BertForSequenceClassification", NLI, ["text-classification", "zero-shot-classification"]),
        ("Wav2Vec2ForSequenceClassification", {}, ["audio-classification"]),
        ("Wav2Vec2ForCTC", {}, ["automatic-speech-recognition"]),
        ("WhisperForConditionalGeneration", {}, ["automatic-speech-recognition"]),
        ("LlamaForCausalLM", {}, ["text-generation"]),
        ("GPT2LMHeadModel", {}, ["text-generation"]),
        ("BertModel", {"vocab_size": 9}, ["feature-extraction"]),
        ("ViTModel", {"num_channels": 3}, ["image-feature-extraction"]),
        ("CLIPModel", {}, ["zero-shot-image-classification"]),
        ("OwlViTForObjectDetection", {}, ["zero-shot-object-detection"]),
        ("DetrForObjectDetection", {}, ["object-detection"]),
        ("SegformerForSemanticSegmentation", {}, ["image-segmentation"]),
        ("DetrForSegmentation", {}, ["image-segmentation"]),
        ("LlavaForConditionalGeneration", {"vision_config": {}}, ["image-text-to-text"]),
        ("Wav2Vec2Model", {"vocab_size": 32}, []),
        ("Wav2Vec2ForPreTraining", {}, []),
        ("SpeechEncoderDecoderModel", {}, []),
        ("ViTMAEForPreTraining", {}, []),
        ("T5ForConditionalGeneration", {}, []),
        ("BertForQuestionAnswering", {}, []),
        ("SomethingElse", {}, []),
    ],
)
def test_an_architecture_has_its_tasks(
    architecture: str, more: dict[str, Any], tasks: list[str]
) -> None:
    inferred = tasks_of({"architectures": [architecture], **more})
    assert list(inferred) == tasks
    assert set(inferred) <= set(TASKS)


def checkpoint(folder: Path, *names: str, **more: Any) -> str:
    return write_checkpoint(folder, {"architectures": names, **more})


def test_a_task_that_is_not_set_is_inferred_from_the_checkpoint(tmp_path: Path) -> None:
    settings = Settings(pipeline_model=checkpoint(tmp_path, "BertForTokenClassification"))
    entries = model_entries(check_models(settings), ())
    [task] = [entry.settings.pipeline_task for entry in entries if entry.kind == "pipeline"]
    assert task == "token-classification"
    assert detect_task("auto", "demo") == detect_task("auto", "none") == "fill-mask"


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["BertForSequenceClassification"], "--pipeline-task zero-shot-classification"),
        (
            ["T5ForConditionalGeneration"],
            r"\(T5ForConditionalGeneration\) has no pipeline in .* 5: ",
        ),
        (["BartForConditionalGeneration"], "serve a chat model with --chat-model instead"),
        (["MarianMTModel"], "has no pipeline in transformers 5"),
        (["BertForQuestionAnswering"], "has no pipeline in transformers 5"),
        ([], r"\(not named\) fits no known task"),
    ],
)
def test_a_checkpoint_without_a_single_task_is_refused(
    names: list[str], message: str, tmp_path: Path
) -> None:
    settings = Settings(pipeline_model=checkpoint(tmp_path, *names, **NLI))
    with pytest.raises(SettingsError, match="PIPELINE_TASK is not set, and .*" + message):
        create_app(settings, FakeRunner)


def test_a_task_without_a_head_in_the_checkpoint_is_refused_before_loading(tmp_path: Path) -> None:
    model = checkpoint(tmp_path, "BertForSequenceClassification")
    with pytest.raises(TaskError, match=r"not made for it: .* PIPELINE_TASK=text-class"):
        detect_task("fill-mask", model)
    for valid in ("text-classification", "sentiment-analysis", "feature-extraction"):
        assert detect_task(valid, model) in TASKS


def test_an_unknown_architecture_is_accepted_until_loading(tmp_path: Path) -> None:
    assert detect_task("fill-mask", checkpoint(tmp_path, "Mine")) == "fill-mask"
    assert detect_task("fill-mask", "/no/such/folder") == "fill-mask"


@pytest.fixture
def _hub_is_online(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("httpx.head", lambda endpoint, timeout: None)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)


@pytest.mark.usefixtures("_hub_is_online")
def test_the_config_of_a_hub_id_is_downloaded_if_the_task_is_not_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint(tmp_path, "BertForMaskedLM")
    downloads = []

    def fetch(model: str, file: str, revision: str | None) -> str:
        downloads.append((model, file, revision))
        return str(tmp_path / file)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", fetch)
    assert detect_task("auto", "some/model") == "fill-mask"
    assert downloads == [("some/model", "config.json", None)]
    assert detect_task("auto", "some/model@v2") == "fill-mask"
    assert downloads.pop() == ("some/model", "config.json", "v2")
    assert detect_task("token-classification", "some/model") == "token-classification"
    assert len(downloads) == 1, "a task that is set needs no config"


def test_an_unreadable_config_is_an_error(tmp_path: Path) -> None:
    for content in (None, "{"):
        if content:
            (tmp_path / "config.json").write_text(content)
        with pytest.raises(TaskError, match=r"PIPELINE_MODEL=/.*config.json cannot be read"):
            detect_task("auto", str(tmp_path))


@pytest.mark.usefixtures("_hub_is_online")
def test_a_hub_that_does_not_respond_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *_, **__: gate.wait(60))
    monkeypatch.setattr(task_detection, "FETCH_S", 0.01)
    with pytest.raises(TaskError, match=r"did not answer within 0\.01 s"):
        detect_task("auto", "owner/name")
    gate.set()
