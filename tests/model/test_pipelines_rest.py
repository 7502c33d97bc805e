"""Items of the remaining tasks, with images and audio: limits, memory, cancellation. Their results
are compared with the pipeline's in tests/http/test_pipeline_responses.py."""

import base64
import io
from collections import UserDict
from typing import Any
from unittest.mock import Mock

import orjson
import pytest
from PIL import Image

from batching.errors import InvalidInput
from tests import tiny_media as tiny_media  # adds its models to the list
from tests.model.test_pipelines_media import noise, png, wav
from tests.parity import assert_same, item, oracle, refusal, runner, serve, text
from tests.tiny_decisions import QUESTIONS
from worker.engines.pipeline.limits import values_per_pixel
from worker.media.inputs import to_json

IMAGES = [
    png(1, (40, 30)),
    png(2, (32, 32)),
    png(3, (50, 70)),
    png(4, (33, 40), "L"),
    png(5, (40, 30), "RGBA"),
]


def opened(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data))


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def test_image_text_to_text_equals_the_pipeline() -> None:
    task, model = "image-text-to-text", "llava"
    parameters: list[dict[str, Any]] = [
        {"max_new_tokens": 5},
        {"max_new_tokens": 5, "return_full_text": False},
        {"max_new_tokens": 5, "return_full_text": True},
    ]
    calls = [
        (data, f"<image> {text(4, i)}", chosen)
        for i, data in enumerate(IMAGES)
        for chosen in parameters
    ]
    items = [item({"images": encoded(d), "text": words}, **chosen) for d, words, chosen in calls]
    answers = serve(runner(task, model), items)
    for answer, (data, words, chosen) in zip(answers, calls, strict=True):
        expected = oracle(task, model)(images=opened(data), text=words, **chosen)
        assert_same(answer, orjson.loads(to_json(expected)))
    assert len({orjson.dumps(answer) for answer in answers[::3]}) == len(IMAGES)


@pytest.mark.parametrize(
    "images", [None, [], [IMAGES[0]], IMAGES[:3]], ids=["one", "none", "a list of one", "three"]
)
def test_keypoint_matching_needs_two_images(images: list[bytes] | None) -> None:
    value = encoded(IMAGES[0]) if images is None else list(map(encoded, images))
    error = refusal("keypoint-matching", "superglue", {"images": value})
    assert (str(error), error.param) == (
        "inputs.images: must be a list of two images",
        "inputs.images",
    )


def test_an_error_names_the_image_that_is_a_path() -> None:
    images = [encoded(IMAGES[0]), "/etc/passwd"]
    error = refusal("keypoint-matching", "superglue", {"images": images})
    assert error.param == "inputs.images[1]"
    assert "paths and links are not opened" in str(error)


@pytest.mark.parametrize(
    ("task", "model", "inputs", "parameters"),
    [
        ("image-feature-extraction", "vit-base", IMAGES[0], {}),
        ("zero-shot-image-classification", "clip", IMAGES[0], {"candidate_labels": ["a"]}),
        (
            "zero-shot-object-detection",
            "owlvit",
            {"image": encoded(IMAGES[0]), "candidate_labels": ["one", "two"]},
            {},
        ),
        ("image-text-to-text", "llava", {"images": encoded(IMAGES[0]), "text": "<image> a"}, {}),
        ("keypoint-matching", "superglue", {"images": [encoded(IMAGES[0])] * 2}, {}),
    ],
)
def test_a_prepared_item_holds_no_decoded_image(
    task: str, model: str, inputs: Any, parameters: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, taken = runner(task, model), []
    load = Image.Image.convert

    def convert(self: Image.Image, *args: Any, **more: Any) -> Image.Image:
        taken.append(run.decode_limiter.taken)
        return load(self, *args, **more)

    monkeypatch.setattr(Image.Image, "convert", convert)
    prepared = item(inputs, **parameters)
    run.prepare(prepared)
    assert taken[0] == 40 * 30 * (2 if task == "keypoint-matching" else 1)
    assert run.decode_limiter.taken == 0
    assert not [leaf for leaf in leaves(prepared.prepared.chunks) if isinstance(leaf, Image.Image)]


def leaves(value: Any) -> list[Any]:
    if isinstance(value, (dict, UserDict)):
        return leaves(list(value.values()))
    if isinstance(value, (list, tuple)):
        return [leaf for element in value for leaf in leaves(element)]
    return [value]


def test_an_image_is_stored_once_for_all_labels() -> None:
    inputs = {"image": encoded(IMAGES[0]), "candidate_labels": ["one", "two", "three"]}
    prepared = item(inputs)
    runner("zero-shot-object-detection", "owlvit").prepare(prepared)
    assert len({id(chunk["pixel_values"]) for chunk in prepared.prepared.chunks}) == 1
    assert len({id(chunk["input_ids"]) for chunk in prepared.prepared.chunks}) == 3


def test_the_number_of_labels_for_detection_is_bounded() -> None:
    inputs = {"image": encoded(IMAGES[0]), "candidate_labels": ["one"] * 129}
    wrong = refusal("zero-shot-object-detection", "owlvit", inputs)
    assert (str(wrong), wrong.param) == (
        "there are 129 labels; at most 128 are accepted",
        "inputs.candidate_labels",
    )


DETECTION_INPUT = {"image": encoded(IMAGES[0]), "candidate_labels": ["one", "two", "three"]}
SHORT = {"max_new_tokens": 20}


@pytest.mark.parametrize(
    ("task", "model", "inputs", "parameters", "forwards"),
    [
        ("text-generation", "llama-lm", "hello", {**SHORT, "do_sample": False}, 20),
        (
            "text-generation",
            "llama-lm",
            "hello",
            {**SHORT, "num_beams": 8, "do_sample": False},
            20,
        ),
        ("automatic-speech-recognition", "whisper", wav(noise(1, 4.0)), SHORT, 20),
        ("zero-shot-object-detection", "owlvit", DETECTION_INPUT, {}, 3),
    ],
    ids=["greedy", "beams", "whisper", "owlvit"],
)
def test_a_cancelled_batch_stops_before_the_next_forward(
    task: str, model: str, inputs: Any, parameters: dict[str, Any], forwards: int
) -> None:
    run, items, after = runner(task, model), [item(inputs, **parameters) for _ in range(2)], 2
    count = 0

    def step(*_: Any) -> None:
        nonlocal count
        count += 1
        if count == after:
            for one in cancelled:
                future: Any = one.prepared.future
                future.done.return_value = True

    for one in items:
        run.prepare(one)
        one.prepared.future = Mock(**{"done.return_value": False})
    hook = run.pipe.model.register_forward_hook(step)
    try:
        for cancelled in (items[:1], items):  # one item is still open; none is
            count = 0
            raw = run.forward([one.prepared for one in items])
            assert (count == after, count >= forwards) == (
                cancelled is items,
                cancelled is not items,
            )
            assert (raw == [None, None]) == (cancelled is items)
    finally:
        hook.remove()


@pytest.mark.parametrize(
    ("task", "model", "values"),
    [("depth-estimation", "glpn", 16), ("image-segmentation", "detr-panoptic", 10)],
)
def test_an_output_as_large_as_the_image_uses_the_decode_limit_too(
    task: str, model: str, values: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, taken = runner(task, model), []
    prepared = item(IMAGES[0])
    run.prepare(prepared)
    (raw,) = run.forward([prepared.prepared])
    monkeypatch.setattr(run.pipe.model.config, "num_queries", values, raising=False)
    monkeypatch.setattr(run.reader, "values_per_pixel", values_per_pixel(task, run.pipe))

    def record(result: Any) -> bytes:
        taken.append(run.decode_limiter.taken)
        return to_json(result)

    monkeypatch.setattr("worker.engines.pipeline.runner.to_json", record)
    run.finish(prepared, raw)
    assert taken == [40 * 30 * values // 8]
    assert run.decode_limiter.taken == 0
    monkeypatch.setattr(run.decode_limiter, "size", 40 * 30 + 1)
    with pytest.raises(InvalidInput, match=f"where each gets {values} values"):
        run.prepare(item(IMAGES[0]))


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"state": "hello"}, "decision takes an object"),
        ({"state": "hello", "questions": {}}, "must be an object of 1 to 64 questions"),
        ({"state": "", "questions": QUESTIONS}, "must be a non-empty string, object or list"),
        ({"state": "hello", "questions": {"a": {"type": "which"}}}, "`type` must be one of"),
        ({"state": "hello", "questions": {"a": {"type": "choice"}}}, "criteria"),
        ({"state": text(400), "questions": QUESTIONS}, "the state and a question have"),
        ({"state": "a", "questions": QUESTIONS, "assets": {"a": "/etc/passwd"}}, "takes an object"),
    ],
)
def test_malformed_decisions_are_refused(request_: Any, message: str) -> None:
    assert message in str(refusal("decision", "decider", request_))


def test_a_state_nested_too_deeply_is_refused() -> None:
    state: Any = "hello"
    for _ in range(5000):
        state = [state]
    error = refusal("decision", "decider", {"state": state, "questions": QUESTIONS})
    assert "nested too deeply" in str(error)
