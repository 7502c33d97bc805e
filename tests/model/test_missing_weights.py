"""A checkpoint without weights that its task's outputs depend on is an error."""

import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import tiny, tiny_media
from tests.tiny import hf
from worker.engines.pipeline.loading import PipelineOptions, load_runner
from worker.model.language_model import GeneratorOptions, load_language_model
from worker.model.loading import LoadingFailed, missing_weights_matter, record_missing_weights

assert tiny_media


def load(task: str, path: Path | str) -> Any:
    return load_runner(PipelineOptions(str(path), task=task, device="cpu", dtype="float32"), 8)


def copy_without(model: str, auto: str, path: Path, drop: Callable[[str], bool]) -> Path:
    """Copy the model's checkpoint without some of its weights."""
    loaded = getattr(hf, auto).from_pretrained(tiny.folder(model))
    kept = {name: value for name, value in loaded.state_dict().items() if not drop(name)}
    loaded.save_pretrained(path, state_dict=kept)
    for file in tiny.folder(model).iterdir():
        if not (path / file.name).exists():
            shutil.copy(file, path)
    return path


@pytest.mark.parametrize(
    ("task", "model", "message"),
    [
        ("fill-mask", "bert-nli", r"weights for cls\..* and \d more; its architecture, BertForSeq"),
        ("text-classification", "bert-mlm", r"classifier.bias.*PIPELINE_TASK=fill-mask"),
        ("token-classification", "bert-base", "weights for classifier.bias, classifier.weight;"),
        ("text-classification", "gpt2-lm", "weights for score.weight;"),
        ("text-generation", "bert-nli", "PIPELINE_TASK=text-classification or zero-shot"),
        ("image-classification", "vit-base", "weights for classifier.bias"),
    ],
)
def test_a_model_without_the_head_of_its_task_is_an_error(
    task: str, model: str, message: str
) -> None:
    with pytest.raises(LoadingFailed, match=f"not made for {task}: .*{message}"):
        load(task, tiny.folder(model))


def test_a_detector_without_its_class_head_is_an_error(tmp_path: Path) -> None:
    path = copy_without(
        "yolos", "AutoModelForObjectDetection", tmp_path, lambda name: "class_labels" in name
    )
    with pytest.raises(LoadingFailed, match="class_labels_classifier"):
        load("object-detection", path)


@pytest.mark.parametrize("task", ["fill-mask", "feature-extraction"])
def test_weights_that_no_output_depends_on_may_be_missing(task: str) -> None:
    """A masked language model has no pooler."""
    assert load(task, tiny.folder("bert-mlm")).info.task == task


def test_a_tied_weight_is_not_missing() -> None:
    model = hf.AutoModelForCausalLM.from_pretrained(tiny.folder("gpt2-lm"))
    assert model.lm_head.weight is model.transformer.wte.weight
    names = {"lm_head.weight": "lm_head.weight"}

    def run() -> bytes:
        raise AssertionError("the model need not run")

    assert not missing_weights_matter(model, names, run)


def test_weights_of_another_shape_are_an_error_with_both_shapes(tmp_path: Path) -> None:
    model = hf.AutoModelForSequenceClassification.from_pretrained(tiny.folder("bert-classify"))
    weights = model.state_dict()
    weights["classifier.weight"] = torch.zeros(5, 32)
    model.save_pretrained(tmp_path, state_dict=weights)
    hf.AutoTokenizer.from_pretrained(tiny.folder("bert-classify")).save_pretrained(tmp_path)
    message = r"classifier.weight \(it has \(5, 32\) where config.json has \(3, 32\)\)"
    with pytest.raises(LoadingFailed, match=message):
        load("text-classification", tmp_path)


def test_weights_are_restored_after_the_check() -> None:
    model = hf.AutoModelForSequenceClassification.from_pretrained(tiny.folder("bert-classify"))
    before = model.classifier.weight.clone()
    assert missing_weights_matter(
        model, {"classifier.weight": ""}, lambda: bytes(model.classifier.weight.numpy())
    )
    assert torch.equal(model.classifier.weight, before)


def test_a_load_that_hangs_does_not_keep_others_from_recording() -> None:
    def load_another() -> int:
        with record_missing_weights() as recorded:
            hf.AutoModel.from_pretrained(tiny.folder("bert-classify"))
        return len(recorded)

    with record_missing_weights() as recorded, ThreadPoolExecutor(1) as pool:
        assert pool.submit(load_another).result(60) == 1
        assert not recorded


# ── the chat model ──


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("bert-mlm", "its tokens depend on those that follow; its architecture, BertForMaskedLM,"),
        ("bert-nli", "its checkpoint has no weights for cls"),
        ("llama-classify", r"no weights for lm_head.weight; .*PIPELINE_TASK=text-classification"),
    ],
)
def test_a_chat_model_that_does_not_generate_text_is_an_error(model: str, message: str) -> None:
    options = GeneratorOptions(str(tiny.folder(model)), dtype="float32", device="cpu")
    with pytest.raises(LoadingFailed, match=f"not made to generate text: .*{message}"):
        load_language_model(options)
