"""The tasks, parameters and inputs that are served, and the errors for others."""

from pathlib import Path
from typing import Any

import pytest
from transformers import pipelines

from batching.errors import InvalidInput
from tests.parity import refusal
from worker.engines.pipeline.loading import PipelineOptions, load_pipeline
from worker.model.loading import LoadingFailed
from worker.tasks import (
    DROPPED,
    NOT_SERVED,
    TASKS,
    UnservedTask,
    check_parameters,
    resolve_task,
)

# ── tasks and models ──


def test_every_task_of_transformers_is_served_or_listed_as_not_served() -> None:
    known = set(pipelines.PIPELINE_REGISTRY.supported_tasks)
    assert known == set(TASKS) | set(NOT_SERVED)
    if removed := getattr(pipelines, "REMOVED_TASKS", None):
        assert set(removed) == set(DROPPED)


def test_unknown_and_unserved_tasks_are_refused_by_name() -> None:
    with pytest.raises(UnservedTask, match=r"unknown task 'fill-mast'; the tasks are: .*fill-mask"):
        resolve_task("fill-mast")
    with pytest.raises(UnservedTask, match="paths and URLs only"):
        resolve_task("video-classification")
    assert resolve_task("ner") == "token-classification"


def test_unknown_models_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for model in ("/no/such/folder", "no-such-user/no-such-model", str(tmp_path)):
        with pytest.raises(LoadingFailed, match="could not be loaded") as caught:
            load_pipeline(PipelineOptions(model, task="fill-mask", device="cpu"))
        assert model in str(caught.value)
        assert "\n" not in str(caught.value)


# ── parameters ──


@pytest.mark.parametrize("task", sorted(TASKS))
@pytest.mark.parametrize(
    "name",
    [
        "trust_remote_code",
        "custom_generate",
        "assistant_model",
        "tokenizer_kwargs",
        "tokenize_kwargs",
        "generation_config",
        "generate_kwargs",
        "image_processor_kwargs",
        "model_kwargs",
        "timeout",
        "return_tensors",
        "tesseract_config",
        "x" * 5000,
    ],
)
def test_parameters_outside_the_list_are_refused_by_name(task: str, name: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        check_parameters(task, {name: "value"})
    assert caught.value.param == f"parameters.{name[:100]}"
    assert "it accepts:" in str(caught.value)
    assert len(str(caught.value)) < 1000


WRONG: list[tuple[str, dict[str, Any]]] = [
    ("fill-mask", {"top_k": 0}),
    ("fill-mask", {"top_k": True}),
    ("fill-mask", {"top_k": 2.0}),
    ("fill-mask", {"top_k": "5"}),
    ("fill-mask", {"targets": []}),
    ("fill-mask", {"targets": ["fine", 7]}),
    ("fill-mask", {"targets": "  "}),
    ("text-classification", {"function_to_apply": "exec"}),
    ("token-classification", {"aggregation_strategy": ["none"]}),
    ("token-classification", {"stride": -1}),
    ("token-classification", {"ignore_labels": {}}),
    ("token-classification", {"ignore_labels": "O"}),
    ("zero-shot-classification", {}),
    ("zero-shot-classification", {"candidate_labels": []}),
    ("zero-shot-image-classification", {"candidate_labels": "cat, dog"}),
    ("zero-shot-classification", {"candidate_labels": ["a"] * 513}),
    ("zero-shot-classification", {"candidate_labels": "a", "hypothesis_template": "no place"}),
    ("zero-shot-classification", {"candidate_labels": "a", "hypothesis_template": "{} and {}"}),
    (
        "zero-shot-classification",
        {"candidate_labels": "a", "hypothesis_template": "{0.__class__}{}"},
    ),
    ("zero-shot-classification", {"candidate_labels": "a", "multi_label": "yes"}),
    ("feature-extraction", {"truncation": 1}),
    ("text-generation", {"temperature": 0}),
    ("text-generation", {"top_p": float("nan")}),
    ("text-generation", {"max_new_tokens": 0}),
    ("text-generation", {"stop_sequence": [""]}),
    ("automatic-speech-recognition", {"return_timestamps": 1}),
    ("automatic-speech-recognition", {"chunk_length_s": -1}),
    ("document-question-answering", {"max_seq_len": 10**9}),
]


@pytest.mark.parametrize(("task", "parameters"), WRONG)
def test_values_of_wrong_type_or_range_are_refused(task: str, parameters: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput) as caught:
        check_parameters(task, parameters)
    assert str(caught.value.param).startswith("parameters.")


@pytest.mark.parametrize(
    ("value", "given"),
    [
        (0, "0"),
        (True, "true"),
        (None, "null"),
        ("é" * 99, '"' + "é" * 50 + '"'),
        ([1, 2], "a list of 2"),
    ],
)
def test_an_error_names_the_given_value(value: Any, given: str) -> None:
    with pytest.raises(InvalidInput, match=f"^top_k must be a whole number from .*, not {given}$"):
        check_parameters("fill-mask", {"top_k": value})


def test_a_whole_number_becomes_a_float_where_any_number_is_valid() -> None:
    parameters = {"temperature": 1, "repetition_penalty": 2, "top_k": 3}
    check_parameters("text-generation", parameters)
    assert [type(value) for value in parameters.values()] == [float, float, int]


def test_values_beyond_the_models_limits_are_refused() -> None:
    wrong = refusal("fill-mask", "bert-mlm", "a [MASK]", top_k=261)
    assert str(wrong) == "top_k is 261; the model has 260 tokens"
    assert wrong.param == "parameters.top_k"
    assert refusal("token-classification", "bert-ner", "a", stride=33).param == "parameters.stride"
    for name, value in (("max_seq_len", 65), ("doc_stride", 40)):
        boxes = [["one", [0, 0, 10, 10]]]
        inputs = {"question": "what?", "word_boxes": boxes}
        wrong = refusal("document-question-answering", "layoutlm", inputs, **{name: value})
        assert wrong.param == f"parameters.{name}"


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"max_new_tokens": 300}, "context is 256"),
        ({"num_return_sequences": 2, "do_sample": False}, "num_return_sequences"),
        ({"num_return_sequences": 3, "num_beams": 2, "do_sample": False}, "num_return_sequences"),
        (
            {"min_new_tokens": 9, "max_new_tokens": 3},
            "min_new_tokens is 9; it must be at most max_new_tokens, which is 3",
        ),
    ],
)
def test_impossible_generation_is_refused(parameters: dict[str, Any], words: str) -> None:
    assert words in str(refusal("text-generation", "llama-lm", "hello", **parameters))
