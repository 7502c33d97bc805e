"""The task is read off the checkpoint, and one that contradicts it is refused before loading."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from server.app import create_app
from server.core.settings import Settings, SettingsError
from tests.fakes import FakeRunner
from worker import task_detection
from worker.task_detection import TaskUnclear, made_for, settle_task
from worker.tasks import TASKS

NLI = {"id2label": {"0": "CONTRADICTION", "1": "entailment"}}


@pytest.mark.parametrize(
    ("architecture", "more", "tasks"),
    [
        ("BertForMaskedLM", {}, ["fill-mask"]),
        ("BertForPreTraining", {}, ["fill-mask"]),
        ("BertForSequenceClassification", {}, ["text-classification"]),
        (
            "BertForSequenceClassification",
            NLI,
            ["text-classification", "zero-shot-classification"],
        ),
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
def test_what_an_architecture_was_made_for(
    architecture: str, more: dict[str, Any], tasks: list[str]
) -> None:
    found = made_for({"architectures": [architecture], **more})
    assert list(found) == tasks
    assert set(found) <= set(TASKS)


def checkpoint(folder: Path, *names: str, **more: Any) -> str:
    (folder / "config.json").write_text(json.dumps({"architectures": names, **more}))
    return str(folder)


def test_a_task_that_is_not_set_is_read_off_the_checkpoint(tmp_path: Path) -> None:
    settings = Settings(pipeline_model=checkpoint(tmp_path, "BertForTokenClassification"))
    app = create_app(settings, FakeRunner)
    assert app.settings.pipeline_task == "token-classification"
    assert settle_task("auto", "demo") == settle_task("auto", "none") == "fill-mask"


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["BertForSequenceClassification"], "several: text-classification, zero-shot-class"),
        (["T5ForConditionalGeneration"], r"\(T5ForConditionalGeneration\) says none"),
        ([], r"\(not named\) says none"),
    ],
)
def test_a_checkpoint_that_leaves_the_task_open_is_refused(
    names: list[str], says: str, tmp_path: Path
) -> None:
    settings = Settings(pipeline_model=checkpoint(tmp_path, *names, **NLI))
    with pytest.raises(SettingsError, match="PIPELINE_TASK is not set, and .*" + says):
        create_app(settings, FakeRunner)


def test_a_task_that_the_checkpoint_has_no_head_for_is_refused_before_it_is_loaded(
    tmp_path: Path,
) -> None:
    model = checkpoint(tmp_path, "BertForSequenceClassification")
    with pytest.raises(TaskUnclear, match=r"not made for it: .* PIPELINE_TASK=text-class"):
        settle_task("fill-mask", model)
    for fine in ("text-classification", "sentiment-analysis", "feature-extraction"):
        assert settle_task(fine, model) in TASKS


def test_an_architecture_that_is_not_known_is_left_to_the_loading(tmp_path: Path) -> None:
    assert settle_task("fill-mask", checkpoint(tmp_path, "Mine")) == "fill-mask"
    assert settle_task("fill-mask", "/no/such/folder") == "fill-mask"


def test_the_config_of_a_hub_id_is_fetched_where_the_task_is_not_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint(tmp_path, "BertForMaskedLM")
    asked = []

    def fetch(model: str, file: str) -> str:
        asked.append((model, file))
        return str(tmp_path / file)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", fetch)
    assert settle_task("auto", "some/model") == "fill-mask"
    assert asked == [("some/model", "config.json")]
    assert settle_task("token-classification", "some/model") == "token-classification"
    assert len(asked) == 1, "nothing is fetched for a task that is set"


def test_a_config_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    for content in (None, "{"):
        if content:
            (tmp_path / "config.json").write_text(content)
        with pytest.raises(TaskUnclear, match=r"PIPELINE_MODEL=/.*config.json cannot be read"):
            settle_task("auto", str(tmp_path))


def test_a_hub_that_does_not_answer_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *_: gate.wait(60))
    monkeypatch.setattr(task_detection, "FETCH_S", 0.01)
    with pytest.raises(TaskUnclear, match=r"did not answer within 0\.01 s"):
        settle_task("auto", "owner/name")
    gate.set()
