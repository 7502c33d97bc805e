"""Responses of `POST /` in each form of input equal what the transformers pipeline returns."""

import warnings
from collections.abc import Sequence
from copy import deepcopy
from typing import Any, NamedTuple

import orjson
import pytest

from tests import tiny
from tests import tiny_media as tiny_media  # adds its models to the list
from tests.event_streams import CLIENT
from tests.matrix import matrix
from tests.model.test_pipelines_media import noise, wav
from tests.model.test_pipelines_rest import IMAGES, encoded, opened
from tests.parity import WORDS, assert_same, oracle, text
from tests.serving import serving
from tests.tiny_decisions import QUESTIONS
from worker.media.inputs import to_json


class Case(NamedTuple):
    """Inputs as they are posted, as the pipeline takes them, and sets of parameters."""

    task: str
    model: str
    posted: Sequence[Any]
    called: Sequence[Any]
    parameters: Sequence[dict[str, Any]] = ({},)


def table(rows: int) -> dict[str, list[str]]:
    return {"city": WORDS[:rows], "people": [str(7 * i) for i in range(rows)]}


SOUNDS = [noise(1, 0.5), noise(2, 0.5)]
TEXTS = [text(3), text(9, 4)]
MASKED = ["grass is [MASK]", "a [MASK] and a [MASK]"]
LABELS = {"candidate_labels": ["cat", "deep blue sky"]}
TEMPLATE = {**LABELS, "hypothesis_template": "The {} film."}
TABLES = [
    {"table": table(4), "query": "How many people?"},
    {"table": table(40), "query": ["largest city?", "since when is it green?"]},
]
DOCUMENTS = [
    {
        "question": text(4, n),
        "word_boxes": [[w, [i, i, i + 50, i + 9]] for i, w in enumerate(words)],
    }
    for n, words in enumerate((text(9).split(), text(30).split()))
]
DECISIONS = [
    {"state": state, "questions": QUESTIONS}
    for state in ("I was charged twice.", {"message": ["hello", 3]})
]
PICTURES = [encoded(data) for data in IMAGES]
OPENED = [opened(data) for data in IMAGES]
RECORDINGS = [encoded(wav(samples)) for samples in SOUNDS]
DETECTED = [{"image": image, **LABELS} for image in PICTURES]
PAIRS = [PICTURES[:2], PICTURES[3:0:-2]]
SEGMENTS = {"threshold": 0.0, "mask_threshold": 0.3, "overlap_mask_area_threshold": 0.0}
CASES = [
    Case("fill-mask", "bert-mlm", MASKED, MASKED, ({}, {"top_k": 2}, {"targets": ["snow", "a"]})),
    Case(
        "text-classification", "bert-classify", TEXTS, TEXTS,
        ({}, {"top_k": 1}, {"top_k": None}, {"function_to_apply": "none"}),
    ),
    Case(
        "text-classification", "bert-classify",
        pairs := [{"text": t, "text_pair": text(4)} for t in TEXTS], pairs, ({}, {"top_k": 2}),
    ),
    Case(
        "token-classification", "bert-ner", TEXTS, TEXTS, ({}, {"aggregation_strategy": "simple"})
    ),
    Case(
        "zero-shot-classification", "bert-nli", TEXTS, TEXTS,
        (LABELS, {**LABELS, "multi_label": True}),
    ),
    Case("feature-extraction", "bert-base", TEXTS, TEXTS),
    Case(
        "text-generation", "gpt2-lm", TEXTS, TEXTS,
        ({"max_new_tokens": 3, "do_sample": False},
         {"max_new_tokens": 3, "num_beams": 2, "num_return_sequences": 2, "do_sample": False}),
    ),
    Case("table-question-answering", "tapas", TABLES, TABLES, ({}, {"sequential": True})),
    Case(
        "document-question-answering", "layoutlm", DOCUMENTS, DOCUMENTS,
        ({}, {"top_k": 3, "max_answer_len": 2},
         {"max_seq_len": 40, "doc_stride": 5, "handle_impossible_answer": True}),
    ),
    Case("image-classification", "vit", PICTURES, OPENED, ({}, {"top_k": 1})),
    Case("image-feature-extraction", "vit-base", PICTURES, OPENED, ({}, {"pool": True})),
    Case("image-segmentation", "segformer", PICTURES, OPENED, ({}, {"subtask": "semantic"})),
    Case(
        "image-segmentation", "detr-panoptic", PICTURES, OPENED,
        ({}, {"subtask": "panoptic", **SEGMENTS}, {"subtask": "instance", **SEGMENTS},
         {"threshold": 1.0}),
    ),
    *(
        Case(
            "object-detection", model, PICTURES, OPENED,
            ({}, {"threshold": 0.0}, {"threshold": 0.85}),
        )
        for model in ("yolos", "detr")
    ),
    Case("depth-estimation", "glpn", PICTURES, OPENED),
    Case("zero-shot-image-classification", "clip", PICTURES, OPENED, (LABELS, TEMPLATE)),
    Case(
        "zero-shot-object-detection", "owlvit", DETECTED, [{"image": i, **LABELS} for i in OPENED],
        ({}, {"threshold": 0.01}, {"threshold": 0.01, "top_k": 3}),
    ),
    Case("audio-classification", "wav2vec2-classify", RECORDINGS, SOUNDS, ({}, {"top_k": 1})),
    Case("automatic-speech-recognition", "wav2vec2-ctc", RECORDINGS, SOUNDS),
    Case("zero-shot-audio-classification", "clap", RECORDINGS, SOUNDS, (LABELS, TEMPLATE)),
    Case("text-to-audio", "vits", TEXTS, TEXTS),
    Case(
        "keypoint-matching", "superglue", [{"images": pair} for pair in PAIRS],
        [OPENED[:2], OPENED[3:0:-2]], ({}, {"threshold": 0.1}),
    ),
    Case("decision", "decider", DECISIONS, DECISIONS),
]  # fmt: skip


@pytest.mark.parametrize("number", matrix(range(len(CASES)), 0, 1, 2, 7, 9, 13, 17, 23))
def test_response_is_what_the_pipeline_returns(number: int) -> None:
    case, distinct = CASES[number], 0
    call: Any = oracle(case.task, case.model)
    path = str(tiny.folder(case.model))
    with serving(pipeline_task=case.task, pipeline_model=path, device="cpu", dtype="float32") as s:
        for parameters in case.parameters:
            for form, posted, called in (
                ("single", case.posted[0], case.called[0]),
                ("list of one", [*case.posted[:1]], [*case.called[:1]]),
                ("list", [*case.posted], [*case.called]),
            ):
                body = {"inputs": posted, "parameters": parameters}
                answer = CLIENT.post(s.url, json=body)
                assert answer.status_code == 200, answer.text
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    expected = orjson.loads(to_json(call(deepcopy(called), **parameters)))
                assert_same(answer.json(), expected, f"{form} {parameters}")
            distinct = max(distinct, len({orjson.dumps(result) for result in answer.json()}))
    assert distinct > 1, "equal results of all inputs prove nothing"


def test_predict_is_that_of_text_embeddings_inference() -> None:
    model = str(tiny.folder("bert-classify"))
    with serving(pipeline_task="text-classification", pipeline_model=model) as server:

        def ask(path: str, body: dict[str, Any]) -> Any:
            response = CLIENT.post(server.url + path, json=body)
            assert response.status_code == 200, response.text
            return response.json()

        one, pair = "short", {"text": "short", "text_pair": "other"}
        for given, inputs in (
            ("short", one),
            (["short"], one),
            (["short", "other"], pair),
            ([["short"], ["short", "other"]], [one, pair]),
            ([["short"]], [one]),
        ):
            for raw, function in ((False, "softmax"), (True, "none")):
                parameters = {"top_k": None, "function_to_apply": function}
                expected = ask("/", {"inputs": inputs, "parameters": parameters})
                assert_same(ask("/predict", {"inputs": given, "raw_scores": raw}), expected)
        long = {"inputs": "word " * 2000}
        assert CLIENT.post(server.url + "/predict", json=long).status_code == 400
        assert len(ask("/predict", long | {"truncate": True})) == 3
        for wrong, param in (
            ([], "inputs"), ([["a"], "b"], "inputs"), (["a", "b", "c"], "inputs"), (5, "inputs"),
        ):  # fmt: skip
            response = CLIENT.post(server.url + "/predict", json={"inputs": wrong})
            assert (response.status_code, response.json()["error"]["param"]) == (400, param)
        for text in ("plain", '["a", "b"]'):
            assert CLIENT.post(server.url + "/predict", content=text).status_code == 400
        info = CLIENT.get(server.url + "/info").json()
        names = [entry["label"] for entry in ask("/predict", {"inputs": "short"})]
        labels = info["model_type"]["classifier"]
        assert sorted(labels["label2id"]) == sorted(names)
        assert {name: int(n) for n, name in labels["id2label"].items()} == labels["label2id"]
        assert info["max_input_length"] == 64
        named = CLIENT.post(server.url + "/predict", json={"inputs": "a", "parameters": {}})
        assert named.json()["error"]["param"] == "parameters"
