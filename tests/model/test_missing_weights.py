"""A checkpoint that lacks what its task's answers depend on is not served with random weights."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests import tiny, tiny_media
from tests.tiny import hf
from worker.model.language_model import GeneratorOptions, load_language_model
from worker.model.loading import LoadingFailed, missing_weights_matter
from worker.pipeline.loading import PipelineOptions, load_runner

assert tiny_media


def load(task: str, path: Path | str) -> Any:
    return load_runner(PipelineOptions(str(path), task=task, device="cpu", dtype="float32"), 8)


def copy_without(model: str, auto: str, path: Path, drop: Callable[[str], bool]) -> Path:
    """The model's checkpoint, less some of its weights."""
    made = getattr(hf, auto).from_pretrained(tiny.folder(model))
    kept = {name: value for name, value in made.state_dict().items() if not drop(name)}
    made.save_pretrained(path, state_dict=kept)
    for file in tiny.folder(model).iterdir():
        if not (path / file.name).exists():
            shutil.copy(file, path)
    return path


@pytest.mark.parametrize(
    ("task", "model", "says"),
    [
        ("fill-mask", "bert-nli", r"weights for cls\..* and \d more; its architecture, BertForSeq"),
        ("text-classification", "bert-mlm", r"classifier.bias.*PIPELINE_TASK=fill-mask"),
        ("token-classification", "bert-base", "weights for classifier.bias, classifier.weight;"),
        ("text-classification", "gpt2-lm", "weights for score.weight;"),
        ("text-generation", "bert-nli", "PIPELINE_TASK=text-classification or zero-shot"),
        ("image-classification", "vit-base", "weights for classifier.bias"),
    ],
)
def test_a_model_without_the_head_of_its_task_is_refused(task: str, model: str, says: str) -> None:
    with pytest.raises(LoadingFailed, match=f"not made for {task}: .*{says}"):
        load(task, tiny.folder(model))


def test_a_detector_that_would_find_nothing_is_refused(tmp_path: Path) -> None:
    path = copy_without(
        "yolos", "AutoModelForObjectDetection", tmp_path, lambda name: "class_labels" in name
    )
    with pytest.raises(LoadingFailed, match="class_labels_classifier"):
        load("object-detection", path)


@pytest.mark.parametrize("task", ["fill-mask", "feature-extraction"])
def test_weights_that_no_answer_depends_on_may_be_missing(task: str) -> None:
    """A masked language model has no pooler."""
    assert load(task, tiny.folder("bert-mlm")).info.task == task


def test_a_tied_weight_is_not_missing() -> None:
    model = hf.AutoModelForCausalLM.from_pretrained(tiny.folder("gpt2-lm"))
    assert model.lm_head.weight is model.transformer.wte.weight
    names = {"lm_head.weight": "lm_head.weight"}

    def answer() -> bytes:
        raise AssertionError("there is nothing to try")

    assert not missing_weights_matter(model, names, answer)


def test_weights_of_another_shape_are_refused_with_both(tmp_path: Path) -> None:
    made = hf.AutoModelForSequenceClassification.from_pretrained(tiny.folder("bert-classify"))
    weights = made.state_dict()
    weights["classifier.weight"] = torch.zeros(5, 32)
    made.save_pretrained(tmp_path, state_dict=weights)
    hf.AutoTokenizer.from_pretrained(tiny.folder("bert-classify")).save_pretrained(tmp_path)
    says = r"classifier.weight \(it has \(5, 32\) where config.json says \(3, 32\)\)"
    with pytest.raises(LoadingFailed, match=says):
        load("text-classification", tmp_path)


def test_what_was_tried_is_put_back() -> None:
    model = hf.AutoModelForSequenceClassification.from_pretrained(tiny.folder("bert-classify"))
    before = model.classifier.weight.clone()
    assert missing_weights_matter(
        model, {"classifier.weight": ""}, lambda: bytes(model.classifier.weight.numpy())
    )
    assert torch.equal(model.classifier.weight, before)


def test_the_library_is_left_as_it_was() -> None:
    own = vars(PreTrainedModel)["from_pretrained"]
    with pytest.raises(LoadingFailed):
        load("fill-mask", "/no/such/folder")
    assert vars(PreTrainedModel)["from_pretrained"] is own


# ── the chat model ──


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("bert-mlm", "its tokens depend on those that follow; its architecture, BertForMaskedLM,"),
        ("bert-nli", "its checkpoint has no weights for cls"),
        ("llama-classify", r"no weights for lm_head.weight; .*PIPELINE_TASK=text-classification"),
    ],
)
def test_a_chat_model_that_was_not_made_for_text_is_refused(model: str, says: str) -> None:
    options = GeneratorOptions(str(tiny.folder(model)), dtype="float32", device="cpu")
    with pytest.raises(LoadingFailed, match=f"not made to generate text: .*{says}"):
        load_language_model(options)
