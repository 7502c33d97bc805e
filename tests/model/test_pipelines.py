"""Results of text tasks in a batch equal `transformers.pipeline` called on each input alone."""

import json
import sys
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from transformers import pipeline

from batching.errors import InvalidInput
from tests import tiny
from tests.parity import assert_parity, item, mixed, oracle, runner, serve, text
from tests.threads import run_together
from worker.backends.cpu.linear_layers import PackedLinear
from worker.engines.pipeline.loading import PipelineOptions, load_runner
from worker.engines.pipeline.runner import PipelineRunner

TEXTS = [text(n, 7 * n) for n in (1, 3, 12, 2, 25, 5, 1, 18)]


def masked(mask: str, count: int, *at: int) -> str:
    words = text(count, count).split()
    for position in at:
        words[position] = mask
    return " ".join(words)


MASKED = [(9, 4), (1, 0), (20, 3), (5, 4), (14, 2, 7, 9), (3, 1), (17, 0, 16)]


# ── text ──


@pytest.mark.parametrize(
    ("model", "mask"),
    [
        ("bert-mlm", "[MASK]"),
        ("distilbert-mlm", "[MASK]"),
        ("roberta-mlm", "<mask>"),
        ("modernbert-mlm", "[MASK]"),
        ("deberta-mlm", "[MASK]"),
        ("fnet-mlm", "[MASK]"),
    ],
)
def test_fill_mask_equals_the_pipeline(model: str, mask: str) -> None:
    texts = [masked(mask, *positions) for positions in MASKED]
    parameters: tuple[dict[str, Any], ...] = (
        {},
        {"top_k": 2},
        {"targets": ["paris", "deep"]},
        {"targets": "snow", "top_k": 3},
    )
    assert_parity("fill-mask", model, mixed(texts, *parameters))


@pytest.mark.parametrize(
    "model", ["bert-classify", "electra-classify", "gpt2-classify", "llama-classify"]
)
def test_text_classification_equals_the_pipeline(model: str) -> None:
    parameters: tuple[dict[str, Any], ...] = (
        {},
        {"top_k": None},
        {"top_k": 1},
        {"top_k": 2, "function_to_apply": "sigmoid"},
        {"function_to_apply": "none"},
    )
    pairs = [{"text": text(4), "text_pair": text(9, 3)}, {"text": text(2, 5)}]
    inputs = [*TEXTS, *pairs] if model != "llama-classify" else TEXTS
    assert_parity("text-classification", model, mixed(inputs, *parameters))


@pytest.mark.parametrize("strategy", ["none", "simple", "first", "average", "max"])
def test_token_classification_equals_the_pipeline(strategy: str) -> None:
    chosen = {"aggregation_strategy": strategy}
    parameters: list[dict[str, Any]] = [chosen, {**chosen, "ignore_labels": []}]
    parameters.append({**chosen, "ignore_labels": ["PER", "B-LOC"]})
    assert_parity("token-classification", "bert-ner", mixed(TEXTS, *parameters))


def test_token_classification_of_long_texts_in_strides_equals_the_pipeline() -> None:
    long = [text(150), text(3), text(90, 4), text(61, 1)]
    strides: list[dict[str, Any]] = [
        {"stride": n, "aggregation_strategy": "max"} for n in (0, 7, 30)
    ]
    items = assert_parity(
        "token-classification",
        "bert-ner",
        mixed(long, *strides, {"aggregation_strategy": "simple"}),
        max_rows=4,
    )
    assert max(item.rows for item in items) > 4, "needs an item with more rows than a batch"


def test_zero_shot_classification_equals_the_pipeline() -> None:
    parameters: tuple[dict[str, Any], ...] = (
        {"candidate_labels": ["politics", "sports and games", "a"]},
        {"candidate_labels": "science, music", "multi_label": True},
        {"candidate_labels": ["deep blue"], "hypothesis_template": "The {} film."},
        {"candidate_labels": [text(n, n) for n in range(1, 11)], "multi_label": True},
    )
    assert_parity("zero-shot-classification", "bert-nli", mixed([*TEXTS, text(90)], *parameters))


@pytest.mark.parametrize("model", ["bert-base", "gpt2-base", "xlnet-base"])
def test_feature_extraction_equals_the_pipeline(model: str) -> None:
    assert_parity("feature-extraction", model, mixed(TEXTS, {}, {"truncation": True}))


def test_rows_as_wide_as_the_number_of_labels_keep_their_scores() -> None:
    calls: list[tuple[Any, dict[str, Any]]] = [
        (word, {"top_k": None}) for word in ("xqz", "q", "zx")
    ]
    items = assert_parity("text-classification", "llama-classify", calls)
    assert [item.tokens for item in items] == [3, 1, 2]
    assert runner("text-classification", "llama-classify").pipe.model.config.num_labels == 3


def test_concurrent_calls_with_and_without_truncation_get_their_own_ids() -> None:
    run = runner("feature-extraction", "bert-base")
    long, short = text(300), text(11)
    expected = {
        (value, truncation): oracle("feature-extraction", "bert-base").tokenizer(
            value, truncation=truncation
        )["input_ids"]
        for value, truncation in ((long, True), (short, False))
    }
    wrong: list[object] = []

    def prepare_many(value: str, truncation: bool) -> None:
        for _ in range(400):
            one = item(value, truncation=truncation)
            try:
                run.prepare(one)
                ids = one.prepared.chunks[0]["input_ids"][0].tolist()
                assert ids == expected[value, truncation]
            except (AssertionError, InvalidInput) as error:
                wrong.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # switch threads as often as possible
    run_together(partial(prepare_many, long, True), partial(prepare_many, short, False))
    sys.setswitchinterval(interval)
    assert not wrong, f"{len(wrong)} wrong results"


# ── generation ──

GREEDY = {"do_sample": False, "max_new_tokens": 8}


def test_the_default_length_is_reduced_to_the_context_per_prompt() -> None:
    run = runner("text-generation", "llama-lm")
    short, long = item(text(2), do_sample=False), item(text(60), do_sample=False)
    alone = [serve(run, [item(one.payload.inputs, do_sample=False)])[0] for one in (short, long)]
    assert serve(run, [short, long]) == alone
    room = run.limit - long.prepared.tokens
    assert room < 256
    assert long.prepared.forward["max_new_tokens"] == room


# ── the runner ──


def test_the_forward_of_an_item_can_be_repeated() -> None:
    """A batch that runs out of memory is run again in halves."""
    for task, model, inputs in (
        ("token-classification", "bert-ner", text(5)),
        ("text-generation", "llama-lm", text(5)),
        ("fill-mask", "deberta-mlm", "a [MASK] b"),
    ):
        run = runner(task, model)
        one = item(inputs, **(GREEDY if task == "text-generation" else {}))
        run.prepare(one)
        results = [run.finish(one, run.forward([one.prepared])[0]) for _ in range(2)]
        assert results[0] == results[1]


def test_one_replica_is_copied_per_concurrent_thread() -> None:
    run = load_runner(PipelineOptions("demo", task="fill-mask", device="cpu"), 8)
    for _ in range(3):
        run.prepare(item("a [MASK] b"))
    assert len(run._idle) == 1
    with run._replica() as one, run._replica() as other:
        assert one is not other
        assert one.model is other.model is run.pipe.model
        assert one.tokenizer is not other.tokenizer
    assert len(run._idle) == 2


@pytest.mark.parametrize("model", sorted(tiny.TASKS))
def test_warm_up_succeeds_for_every_model(model: str) -> None:
    run: PipelineRunner = runner(tiny.TASKS[model], model)
    run.warm_up()
    assert json.dumps(run.info.batching)


# ── a CPU that emulates bfloat16 ──


def emulating(monkeypatch: pytest.MonkeyPatch, model: str = "bert-classify") -> PipelineRunner:
    monkeypatch.setattr("worker.backends.cpu.linear_layers.has_bfloat16", lambda: False)
    options = PipelineOptions(
        str(tiny.folder(model)), task="text-classification", device="cpu", dtype="bfloat16"
    )
    return load_runner(options, 8)


def linears(run: PipelineRunner) -> set[type]:
    kinds = (nn.Linear, PackedLinear)
    return {type(module) for module in run.pipe.model.modules() if isinstance(module, kinds)}


def test_bfloat16_weights_are_multiplied_in_float32_where_bfloat16_is_emulated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = emulating(monkeypatch)
    assert linears(run) == {PackedLinear}
    assert run.info.dtype == "bfloat16"
    call = pipeline(
        "text-classification", model=str(tiny.folder("bert-classify")), dtype=torch.bfloat16
    )
    texts = [text(3 + 4 * number, number) for number in range(6)]
    all_labels = {"top_k": None}
    results = serve(run, [item(value, **all_labels) for value in texts])
    for result, value in zip(results, texts, strict=True):
        expected = {score["label"]: score["score"] for score in call(value, **all_labels)}
        scores = {score["label"]: score["score"] for score in result}
        assert scores == pytest.approx(expected, abs=0.02)


def test_without_packed_products_nothing_is_laid_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not every CPU has them; Apple's has not."""
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert linears(emulating(monkeypatch)) == {nn.Linear}


def test_layers_whose_weights_are_read_are_not_replaced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def read_weights(run: PipelineRunner) -> None:
        for module in run.pipe.model.modules():
            if isinstance(module, PackedLinear):
                _ = module.weight.sum()

    monkeypatch.setattr(PipelineRunner, "warm_up", read_weights)
    run = emulating(monkeypatch)
    assert linears(run) == {nn.Linear}
    assert "DTYPE=float32 is faster here" in caplog.records[-1].message
