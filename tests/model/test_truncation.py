"""`parameters.truncation` is the tokenizer's own truncation, to the context of the model."""

from typing import Any

import pytest

from batching.errors import InvalidInput
from tests import tiny_media as tiny_media  # adds its models to the list
from tests.parity import assert_parity, assert_same, item, oracle, plain, refusal, runner, serve
from tests.parity import text as words
from worker.engines.pipeline import limits
from worker.tasks import TASKS, check_parameters
from worker.text.long_text import tokenizing

LIMIT = 64
LONG = words(300)
TRUNCATION = {"truncation": True, "max_length": LIMIT}


def result(task: str, model: str, inputs: Any, **parameters: Any) -> Any:
    check_parameters(task, parameters)
    return serve(runner(task, model), [item(inputs, **parameters)])[0]


def ids(task: str, model: str, inputs: Any, **parameters: Any) -> list[list[int]]:
    """Return the token ids of each chunk of an input."""
    one = item(inputs, **parameters)
    runner(task, model).prepare(one)
    return [chunk["input_ids"][0].tolist() for chunk in one.prepared.chunks]


def test_every_text_task_has_the_parameter() -> None:
    for name, task in TASKS.items():
        if task.kind == "text":
            check_parameters(name, dict.fromkeys(task.required, "a") | {"truncation": True})


@pytest.mark.parametrize(
    ("task", "model", "inputs", "keywords"),
    [
        ("fill-mask", "bert-mlm", "[MASK] " + LONG, {"tokenizer_kwargs": TRUNCATION}),
        ("fill-mask", "roberta-mlm", "a <mask> " + LONG, {"tokenizer_kwargs": TRUNCATION}),
        ("text-classification", "bert-classify", LONG, TRUNCATION),
        ("text-classification", "bert-classify", {"text": LONG, "text_pair": LONG}, TRUNCATION),
        ("feature-extraction", "bert-base", LONG, {"tokenize_kwargs": TRUNCATION}),
        ("token-classification", "bert-ner", LONG, {}),
    ],
)
def test_the_result_is_that_of_the_tokenizers_truncation(
    task: str, model: str, inputs: Any, keywords: dict[str, Any]
) -> None:
    expected = oracle(task, model)(inputs, **keywords)
    if runner(task, model).task.wraps_string and isinstance(inputs, str):
        [expected] = expected  # the endpoint wraps it
    assert_same(result(task, model, inputs, truncation=True), plain(expected))


def test_zero_shot_truncates_the_text_or_both() -> None:
    task, model, labels = "zero-shot-classification", "bert-nli", ["cats and dogs", "a"]
    by_default = result(task, model, LONG, candidate_labels=labels)
    for truncation in (True, "longest_first", "only_first"):
        cut = result(task, model, LONG, candidate_labels=labels, truncation=truncation)
        assert_same(cut, by_default)
    wrong = refusal(task, model, LONG, candidate_labels=labels, truncation="only_second")
    assert wrong.param == "parameters.truncation"
    assert "64" in str(refusal(task, model, LONG, candidate_labels=labels, truncation=False))


def test_strategies_choose_the_text_of_a_pair() -> None:
    task, model = "text-classification", "bert-classify"
    tokenizer = oracle(task, model).tokenizer
    for first, second, strategies in (
        (LONG, words(9), ("only_first", "longest_first")),
        (words(9), LONG, ("only_second", "longest_first")),
    ):
        pair = {"text": first, "text_pair": second}
        for strategy in strategies:
            expected = tokenizer(first, second, truncation=strategy, max_length=LIMIT)
            assert ids(task, model, pair, truncation=strategy) == [expected["input_ids"]]
    wrong = refusal(task, model, {"text": words(9), "text_pair": LONG}, truncation="only_first")
    assert wrong.param == "parameters.truncation"
    assert "only_first" in str(wrong)
    assert refusal(task, model, LONG, truncation="only_second").param == "parameters.truncation"


def test_strides_cover_the_whole_text() -> None:
    task, model = "token-classification", "bert-ner"
    chosen = {"stride": 7, "aggregation_strategy": "simple"}
    assert_parity(task, model, [(LONG, chosen)])
    assert len(ids(task, model, LONG, **chosen, truncation=True)) > 3
    assert_same(
        result(task, model, LONG, **chosen, truncation=True), result(task, model, LONG, **chosen)
    )


def test_a_mask_behind_the_cut_is_named() -> None:
    wrong = refusal("fill-mask", "bert-mlm", LONG + " [MASK]", truncation=True)
    assert str(wrong) == "the first 64 tokens have no [MASK]: the rest is truncated"


def test_a_truncated_prompt_leaves_room_for_new_tokens() -> None:
    task, model = "text-generation", "llama-lm"
    tokenizer = oracle(task, model).tokenizer
    for inputs in (LONG, [{"role": "user", "content": LONG}]):
        assert len(ids(task, model, inputs, truncation=True, max_new_tokens=6)[0]) == 250
        assert len(ids(task, model, inputs, truncation=True)[0]) == 128  # half of the context
    cut = tokenizer(LONG, truncation=True, max_length=250)["input_ids"]
    expected = oracle(task, model)(tokenizer.decode(cut), max_new_tokens=6, do_sample=False)
    chosen = {"max_new_tokens": 6, "do_sample": False, "return_full_text": False}
    [answer] = result(task, model, LONG, truncation=True, **chosen)
    assert expected[0]["generated_text"].endswith(answer["generated_text"])
    wrong = refusal(task, model, LONG, truncation=True, max_new_tokens=256)
    assert wrong.param == "parameters.max_new_tokens"


def test_a_truncated_table_loses_rows() -> None:
    task, model = "table-question-answering", "tapas"
    table = {"name": [f"the {n}" for n in range(60)], "count": ["1"] * 60}
    inputs = {"table": table, "query": "how many?"}
    by_default = result(task, model, inputs)
    assert_same(result(task, model, inputs, truncation=True), by_default)
    assert "the model takes 128" in str(refusal(task, model, inputs, truncation=False))


def test_speech_is_that_of_the_truncated_text(monkeypatch: pytest.MonkeyPatch) -> None:
    task, model = "text-to-audio", "vits"
    run = runner(task, model)
    whole = result(task, model, "hello there")
    tokens = len(run.pipe.tokenizer("hello there")["input_ids"])
    monkeypatch.setattr(run, "limit", tokens)
    monkeypatch.setattr(run.reader, "limit", tokens)
    with pytest.raises(InvalidInput, match="the model takes"):
        run.prepare(item("hello there and more"))
    cut = result(task, model, "hello there and more", truncation=True)
    assert_same(cut, whole)


def test_long_texts_are_truncated_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []

    def recorded(chars: int) -> Any:
        lengths.append(chars)
        return tokenizing(chars)

    monkeypatch.setattr("worker.engines.pipeline.runner.tokenizing", recorded)
    long = "the cat " * 60_000
    expected = oracle("text-classification", "bert-classify").tokenizer(long, **TRUNCATION)
    for inputs in (long, {"text": long}):
        given = ids("text-classification", "bert-classify", inputs, truncation=True)
        assert given == [expected["input_ids"]]
    assert lengths == [len(long)] * 2
    too_long = "a" * (limits.MAX_TEXT_CHARS + 1)
    wrong = refusal("text-classification", "bert-classify", too_long, truncation=True)
    assert "at most 524288 are accepted" in str(wrong)
