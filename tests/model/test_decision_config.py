"""Decision configurations, and images in decisions: transformers' own answers, and refusals."""

import base64
import gc
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from batching.errors import InvalidInput
from batching.request_queue import WorkItem
from server.apis.openai.decisions.systemone import SystemOneRequest
from server.apis.openai.request_fields import decode
from tests import tiny_decisions, tiny_multimodal
from tests.generating import Driver, load
from tests.model.test_decisions import KINDS, answers, assert_close, probabilities
from tests.multimodal import loaded, png
from tests.tiny import hf
from tests.tiny_decisions import STATE, about, read
from worker.decision_config import UnusableDecisionConfig, load_decision_config
from worker.engines.generation.engine import GenerationEngine

CONFIG = {
    "labels": {"noul": ["B", "A"], "choice": ["Z", "Y", "X", "W"], "score": [*"VUTSR"]},
    "temperature": {"noul": 2, "score": 0.5},
    "noul_options": ["false", "true"],
    "sort_choices": True,
}
TEMPLATE = (
    "<|user|>{{ question.type }} {{ question.instructions | tojson }}"
    "{% for option in question.options %}\n{{ question.labels[loop.index0] }}<|split|>"
    "{{ option }}: {{ question.descriptions[loop.index0] | tojson }}{% endfor %}"
    "\nYes? {{ state if state is string else state | tojson }}</s><|assistant|><|mark|> not read"
)
PARTS_TEMPLATE = (
    "{% macro show(value) %}{% if value is string or value is none %}{{ value }}{% else %}"
    "{% for part in value %}{% if part.type == 'image' %}IMAGE{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{% endmacro %}"
    "<|user|>{{ show(state.photo) }}\n{{ show(question.instructions) }}"
    "{% for option in question.options %}\n{{ question.labels[loop.index0] }}: {{ option }} "
    "{{ show(question.descriptions[loop.index0]) }}{% endfor %}</s><|assistant|><|mark|>"
)
QUESTIONS = {name: question for name, question in KINDS.items() if name != "letters"}
ON_IMAGES: dict[str, Any] = {
    "like": {"type": "noul", "instructions": "Is img-2 like img-1?"},
    "kind": {"type": "choice", "criteria": {"x": "as in img-1", "y": None}},
    "size": {"type": "score", "instructions": "How large?", "criteria": ["low", "img-2", "high"]},
}
PHOTO = {"photo": "img-1 and img-10"}


def asset(seed: int, **size: int) -> dict[str, str]:
    data = base64.b64encode(png(seed, **size)).decode()
    return {"type": "image", "format": "png", "data_base64": data}


ASSETS = {"img-1": asset(1), "img-10": asset(2, width=40), "img-2": asset(3, height=64)}


def checkpoint(source: Path, to: Path, config: Any, template: str | None = None) -> str:
    """Return a copy of a checkpoint with a decision configuration."""
    shutil.copytree(source, to)
    (to / "decision.json").write_text(json.dumps(config))
    if template is not None:
        (to / "decision_template.jinja").write_text(template)
    return str(to)


def library(path: str, auto: Any = hf.AutoModelForCausalLM) -> Any:
    model = auto.from_pretrained(path, dtype=torch.float32).eval()
    if auto is hf.AutoModelForCausalLM:
        tokenizer = hf.AutoTokenizer.from_pretrained(path)
        return hf.pipeline("decision", model=model, tokenizer=tokenizer)
    processor = hf.AutoProcessor.from_pretrained(path)
    parts = {"tokenizer": processor.tokenizer, "processor": processor}
    return hf.pipeline("decision", model=model, **parts)


def assert_equal(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert list(actual) == list(expected)
    for name, wanted in expected.items():
        assert_close(actual[name], wanted)


def on_images(**fields: Any) -> SystemOneRequest:
    document = {"state": PHOTO, "questions": ON_IMAGES, "assets": ASSETS, **fields}
    return decode(document, SystemOneRequest, lambda _: "tiny", {})


# ── transformers' answers ──


@pytest.mark.parametrize("template", [None, TEMPLATE], ids=["prompt", "template"])
def test_answers_follow_the_checkpoints_configuration(template: str | None, tmp_path: Path) -> None:
    path = checkpoint(tiny_decisions.folder(), tmp_path / "m", CONFIG, template)
    engine, expected = load(path), library(path)
    for state in (STATE, {"Is": ["so </s>be <|mark|> it<|split|>, Yes", None]}):
        wanted = expected({"state": state, "questions": QUESTIONS})
        assert_equal(answers(engine, read(QUESTIONS, state)), wanted)
    plain = answers(tiny_decisions.engine(), read(QUESTIONS))
    assert answers(engine, read(QUESTIONS))["refund"]["noul"] != pytest.approx(
        plain["refund"]["noul"], abs=1e-3
    )


def test_openai_decisions_use_labels_and_temperatures(tmp_path: Path) -> None:
    named = read(QUESTIONS).decision_input()
    for template in (None, TEMPLATE):  # which they do not use
        path = checkpoint(tiny_decisions.folder(), tmp_path / str(template)[:4], CONFIG, template)
        rows = probabilities(load(path), about(STATE, named.questions))
        if template is None:
            expected = rows
    assert rows == [pytest.approx(row, abs=1e-5) for row in expected]
    wanted = library(str(tmp_path / "None"))({"state": STATE, "questions": QUESTIONS})
    assert rows[0][0] == pytest.approx(wanted["refund"]["noul"], abs=1e-4)


def test_a_file_or_none_replaces_the_checkpoints_configuration(tmp_path: Path) -> None:
    path = checkpoint(tiny_decisions.folder(), tmp_path / "m", CONFIG)
    other = tmp_path / "other.json"
    other.write_text(json.dumps({**CONFIG, "chat_template": TEMPLATE}))
    plain = answers(tiny_decisions.engine(), read(QUESTIONS))
    assert_equal(answers(load(path, decision_config="none"), read(QUESTIONS)), plain)
    replaced = answers(load(path, decision_config=str(other)), read(QUESTIONS))
    template = checkpoint(tiny_decisions.folder(), tmp_path / "n", CONFIG, TEMPLATE)
    assert_equal(replaced, answers(load(template), read(QUESTIONS)))


@pytest.mark.parametrize("template", [None, PARTS_TEMPLATE], ids=["prompt", "template"])
@pytest.mark.parametrize("family", ["gemma3", pytest.param("llava", marks=pytest.mark.matrix)])
def test_answers_about_images(family: str, template: str | None, tmp_path: Path) -> None:
    image = {"gemma3": "<start_of_image>", "llava": "<image>"}[family]
    template = template and template.replace("IMAGE", image)
    labels = {kind: [*"ABC"] for kind in ("noul", "choice", "score")}
    path = checkpoint(tiny_multimodal.folder(family), tmp_path / "m", {"labels": labels}, template)
    engine, expected = load(path), library(path, hf.AutoModelForImageTextToText)
    asked = {"state": PHOTO, "questions": ON_IMAGES}
    with_images = expected({**asked, "assets": ASSETS})
    assert_equal(answers(engine, on_images()), with_images)
    without = expected(asked)
    assert_equal(answers(engine, on_images(assets=None)), without)
    assert with_images["kind"] != without["kind"]


def test_an_image_is_decoded_and_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load(tiny_multimodal.folder("gemma3"))
    preprocessor = engine.input_processor.media_preprocessor
    assert preprocessor
    process, calls = preprocessor.processor.process_media, list[bytes]()

    def counted(image: Any, digest: bytes, *args: Any) -> Any:
        calls.append(digest)
        return process(image, digest, *args)

    monkeypatch.setattr(preprocessor.processor, "process_media", counted)
    questions = {f"q{n}": {"type": "noul", "instructions": f"{n}: img-1?"} for n in range(12)}
    driver = Driver(engine)
    payload = on_images(questions=questions, state="img-1 and img-1").decision_input()
    served = driver.add(WorkItem(payload, float("inf"), 0.0))
    waiting: Any = served.sequences[0].multimodal
    # the images are counted once, not with each prompt
    assert 0 < preprocessor.memory_limiter.used_bytes < 2 * waiting.processor_output.nbytes
    del waiting
    driver.finish()
    gc.collect()
    assert preprocessor.memory_limiter.used_bytes == 0
    assert len(served.choices) == 12
    assert len(calls) == len(ASSETS)
    scheduler: Any = engine._encoder_scheduler
    assert scheduler.encoder.tiles_encoded == 1
    prompt_tokens = sum(delta.prompt_tokens for delta in served.choices)
    assert prompt_tokens == sum(map(len, (s.tokens for s in served.sequences)))
    assert driver.total("prefill_tokens") < prompt_tokens


# ── refusals ──


def refused(engine: GenerationEngine, payload: Any) -> InvalidInput:
    with pytest.raises(InvalidInput) as caught:
        engine.prepare(WorkItem(payload, float("inf"), 0.0))
    return caught.value


MANY = {"q": {"type": "noul", "instructions": "img-1" * 21}}
BROKEN = {"img-1": {"type": "image", "data_base64": "cG5n"}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"questions": MANY}, "assets"),
        ({"state": "</s> img-1"}, "questions.like"),
        ({"assets": BROKEN}, "assets.img-1"),
        ({"state": "word " * 2000}, "questions.like"),
    ],
)
def test_error_about_images_names_the_field(fields: dict[str, Any], param: str) -> None:
    assert refused(loaded("gemma3"), on_images(**fields).decision_input()).param == param


@pytest.mark.parametrize(
    ("template", "assets", "param", "reason"),
    [
        (PARTS_TEMPLATE, ASSETS, "state", "does not show the images"),
        (PARTS_TEMPLATE.replace("IMAGE", "<|split|>"), ASSETS, "questions.like", "special tokens"),
        ("{{ raise_exception('never') }}", ASSETS, "state", "never"),
        ("{{ '' }}", None, "questions.like", "has no tokens"),
    ],
)
def test_error_of_a_template_names_a_field(
    template: str, assets: Any, param: str, reason: str, tmp_path: Path
) -> None:
    file = tmp_path / "decision.json"
    file.write_text(json.dumps({"chat_template": template}))
    engine = load(tiny_multimodal.folder("gemma3"), decision_config=str(file))
    error = refused(engine, on_images(assets=assets).decision_input())
    assert error.param == param
    assert reason in str(error)


def test_a_model_of_texts_refuses_images() -> None:
    error = refused(tiny_decisions.engine(), on_images().decision_input())
    assert error.param == "assets"
    assert "no images" in str(error)


def test_a_deeply_nested_state_is_refused(tmp_path: Path) -> None:
    path = checkpoint(tiny_decisions.folder(), tmp_path / "m", {}, TEMPLATE)
    state: Any = 0
    for _ in range(100_000):
        state = [state]
    payload = read(QUESTIONS).decision_input()
    object.__setattr__(payload, "state", state)
    assert refused(load(path), payload).param == "state"


@pytest.mark.parametrize(
    ("config", "template", "reason"),
    [
        ({"labels": {"noul": ["Yes", "maybe not"]}}, None, "distinct single tokens"),
        ({"labels": {"score": ["A", "A"]}}, None, "distinct single tokens"),
        ({"labels": {"score": []}}, None, "length"),
        ({"temperature": {"noul": 0}}, None, "temperature"),
        ({"noul_options": ["true", "true"]}, None, "noul_options"),
        ({"adapter": "lora"}, None, "LoRA"),
        ([], None, "object"),
        ({}, "{{ state }}{% for q in questions %}{{ q }}<|mark|>{% endfor %}", "`questions`"),
        ({}, "{{ state }}{% for o in question.options %}<|mark|>{% endfor %}", "several <|mark|>"),
        ({"chat_template": "{{ state"}, None, "does not compile"),
        ({"chat_template": ""}, None, "length"),
    ],
)
def test_an_unusable_configuration_ends_the_load(
    config: Any, template: str | None, reason: str, tmp_path: Path
) -> None:
    path = checkpoint(tiny_decisions.folder(), tmp_path / "m", config, template)
    with pytest.raises(UnusableDecisionConfig) as caught:
        load(path)
    assert reason in str(caught.value)
    load(path, decision_config="none")


def test_a_checkpoint_without_a_configuration_has_the_default_one() -> None:
    config = load_decision_config("auto", str(tiny_decisions.folder()))
    assert config == load_decision_config("none", "")
    assert config == load_decision_config("auto", "no-owner/no-such-model")
