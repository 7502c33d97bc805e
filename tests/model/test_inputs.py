"""Unsuitable inputs are refused quickly, with messages that name what is accepted."""

import io
import json
import shutil
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import soundfile
from transformers import pipeline

from batching.errors import InvalidInput
from tests import tiny
from tests.parity import item, refusal, runner, serve
from tests.tiny_tokenizers import llama_tokenizer, wordpiece
from tests.unit.test_media import tone
from worker.engines.pipeline import limits
from worker.engines.pipeline.loading import PipelineOptions, load_runner


def words(count: int) -> list[str]:
    """Return words of the vocabulary."""
    return sorted(wordpiece())[:count]


ASR = "automatic-speech-recognition"

# ── texts ──


def test_text_without_a_mask_is_refused_with_the_mask_to_write() -> None:
    wrong = refusal("fill-mask", "roberta-mlm", "The capital of France is [MASK].")
    assert "the text has no <mask>: write it" in str(wrong)
    assert wrong.param == "inputs"


def test_text_beyond_the_context_is_refused_with_both_counts() -> None:
    for task, model in (
        ("text-classification", "bert-classify"),
        ("feature-extraction", "bert-base"),
    ):
        wrong = refusal(task, model, "the " * 100)
        counts = "the text has 102 tokens; the model takes 64"
        assert str(wrong) == counts + '; "parameters": {"truncation": true} truncates it'
    run = runner("feature-extraction", "bert-base")
    run.prepare(item("the " * 62))
    assert len(serve(run, [item("the " * 100, truncation=True)])[0][0]) == 64


def test_the_context_of_models_that_count_positions_from_padding_is_shorter() -> None:
    run = runner("fill-mask", "roberta-mlm")
    assert run.pipe.model.config.max_position_embeddings == 66
    assert run.limit == 64
    texts = ["the " * n + "<mask>" for n in range(70)]
    by_count = {len(run.pipe.tokenizer(value)["input_ids"]): value for value in texts}
    assert len(serve(run, [item(by_count[64])])[0]) == 5
    assert "65 tokens" in str(refusal("fill-mask", "roberta-mlm", by_count[65]))


@pytest.mark.parametrize(
    ("task", "model", "wrap"),
    [
        ("text-classification", "bert-classify", lambda text: text),
        ("text-classification", "bert-classify", lambda text: {"text": "short", "text_pair": text}),
        ("text-generation", "llama-lm", lambda text: [{"role": "user", "content": text}]),
        ("zero-shot-classification", "bert-nli", lambda text: text),
        (
            "table-question-answering",
            "tapas",
            lambda text: {"query": "how?", "table": {"a": [text]}},
        ),
        ("table-question-answering", "tapas", lambda text: {"query": text, "table": {"a": ["1"]}}),
        (
            "document-question-answering",
            "layoutlm",
            lambda text: {"question": text, "word_boxes": []},
        ),
    ],
)
def test_hundred_thousand_words_are_refused_in_under_a_second(
    task: str, model: str, wrap: Any
) -> None:
    inputs = wrap("hello " * 100_000)
    labels = {"candidate_labels": "a"} if task == "zero-shot-classification" else {}
    runner(task, model)
    started = time.process_time()  # of this process only: the machine may be busy
    refusal(task, model, inputs, **labels)
    assert time.process_time() - started < 1


@pytest.mark.parametrize(
    ("task", "model"),
    [
        ("text-classification", "bert-classify"),
        ("token-classification", "bert-ner"),
        ("feature-extraction", "bert-base"),
        ("text-generation", "llama-lm"),
    ],
)
def test_inputs_other_than_texts_are_refused(task: str, model: str) -> None:
    for inputs in ("", None, 7, True, ["a"], [["a", "b"]], {"a": "b"}, b"bytes", {}, []):
        assert refusal(task, model, inputs).param in ("inputs", "inputs[0]")
    if task != "text-generation":
        assert str(refusal(task, model, " \n\t")) == "the text is empty"


def test_malformed_pairs_are_refused() -> None:
    for pair in ({"text_pair": "a"}, {"text": "a", "text_pair": 5}, {"text": "a", "other": "b"}):
        assert "a pair of texts must be" in str(
            refusal("text-classification", "bert-classify", pair)
        )


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (
            [{"role": "user", "content": [{"type": "image", "url": "http://127.0.0.1/x.png"}]}],
            "inputs[0].content",
        ),
        ([{"role": "user", "content": [{"type": "text", "text": "hello"}]}], "inputs[0].content"),
        ([{"role": "user", "content": "a"}, {"role": 7, "content": "a"}], "inputs[1].role"),
        ([{"role": "user"}], "inputs[0].content"),
        ([{"role": "user", "content": "a", "image": "/etc/passwd"}], "inputs[0]"),
        (["hello"], "inputs[0]"),
        ([], "inputs"),
    ],
)
def test_messages_of_other_than_strings_are_refused(messages: list[Any], param: str) -> None:
    assert refusal("text-generation", "llama-lm", messages).param == param


def test_a_conversation_needs_a_chat_template() -> None:
    run = runner("text-generation", "gpt2-nopad-lm")
    assert run.pipe.tokenizer.chat_template
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(run.pipe.tokenizer), "chat_template", None, raising=False)
        make: Any = pipeline
        plain = make("text-generation", model=run.pipe.model, tokenizer=llama_tokenizer(None))
        patch.setattr(run, "_replica", lambda: nullcontext(plain))
        with pytest.raises(InvalidInput, match="no chat template"):
            run.prepare(item([{"role": "user", "content": "hello"}]))


@pytest.mark.parametrize(
    ("model", "accepted", "too_many"),
    [
        ("bert-mlm", {"top_k": 100}, {"top_k": 101}),
        ("deberta-mlm", {"top_k": 100}, {"top_k": 101}),  # it is not packed
        ("bert-mlm", {"top_k": 200, "targets": words(100)}, {"top_k": 200, "targets": words(101)}),
    ],
)
def test_a_fill_mask_response_that_repeats_a_long_text_is_refused(
    monkeypatch: pytest.MonkeyPatch, model: str, accepted: Any, too_many: Any
) -> None:
    monkeypatch.setattr(limits, "MAX_FILLED_TOKENS", 20 * 100 * 35)  # 140 characters
    runner("fill-mask", model).prepare(item("[MASK] " * 20, **accepted))
    assert refusal("fill-mask", model, "[MASK] " * 20, **too_many).param == "parameters.top_k"
    monkeypatch.setattr(limits, "MAX_FILLED_TOKENS", 20 * 4 * 35)
    assert refusal("fill-mask", model, "[MASK] " * 20).param == "inputs"


def test_too_many_masks_for_the_vocabulary_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "MAX_MASK_SCORES", 20 * 260)
    runner("fill-mask", "bert-mlm").prepare(item("[MASK] " * 20))
    wrong = refusal("fill-mask", "bert-mlm", "[MASK] " * 21, top_k=1)
    assert str(wrong) == "the text has 21 masks; at most 20 are accepted"


@pytest.mark.parametrize(
    ("labels", "longest"), [(["a"] * 10, 40), (",".join(["many words"] * 10), 40), (["a"] * 40, 10)]
)
def test_a_text_with_many_labels_must_be_short(
    monkeypatch: pytest.MonkeyPatch, labels: Any, longest: int
) -> None:
    monkeypatch.setattr("worker.engines.pipeline.inputs.MAX_LABELLED_CHARS", 400)
    task, model = "zero-shot-classification", "bert-nli"
    runner(task, model).prepare(item("a" * longest, candidate_labels=labels))
    wrong = refusal(task, model, "a" * (longest + 1), candidate_labels=labels)
    assert "at most 400 characters times labels are accepted" in str(wrong)


# ── objects ──

BOX = [0, 0, 10, 10]


@pytest.mark.parametrize(
    ("inputs", "param"),
    [
        ("a string", "inputs"),
        ({"question": "what?"}, "inputs"),
        ({"question": "", "word_boxes": [["one", BOX]]}, "inputs.question"),
        ({"question": ["what?"], "word_boxes": [["one", BOX]]}, "inputs.question"),
        ({"question": "what?", "word_boxes": "one"}, "inputs.word_boxes"),
        ({"question": "what?", "word_boxes": [["one", [0, 0, 10]]]}, "inputs.word_boxes"),
        ({"question": "what?", "word_boxes": [["one", [0, 0, 10, 1001]]]}, "inputs.word_boxes"),
        ({"question": "what?", "word_boxes": [["one", [0, 0, 1.5, 10]]]}, "inputs.word_boxes"),
        ({"question": "what?", "word_boxes": [["one", [20, 0, 10, 10]]]}, "inputs.word_boxes"),
        ({"question": "what?", "word_boxes": [["one", BOX]], "other": 1}, "inputs"),
        ({"question": "what?", "image": "/etc/passwd"}, "inputs.image"),
        ({"question": "what?", "image": "http://127.0.0.1/x.png"}, "inputs.image"),
    ],
)
def test_malformed_documents_are_refused(inputs: Any, param: str) -> None:
    assert refusal("document-question-answering", "layoutlm", inputs).param == param


@pytest.mark.parametrize(
    "table",
    ["/etc/passwd", [], {}, {"a": "b"}, {"a": ["1"], "b": []}, {"a": [["1"]]}, [{"a": "1"}], 7],
)
def test_malformed_tables_are_refused(table: Any) -> None:
    inputs = {"table": table, "query": "how many?"}
    assert refusal("table-question-answering", "tapas", inputs).param == "inputs.table"


def test_cells_that_are_numbers_or_empty_are_read_as_text() -> None:
    inputs = {"table": {"a": [1, 2.5, None, True]}, "query": "how many?"}
    assert "answer" in serve(runner("table-question-answering", "tapas"), [item(inputs)])[0]


# ── audio ──


def test_audio_chunks_that_only_overlap_are_refused() -> None:
    for chunk_s, stride_s in ((0.2, 0.1), (0.1, 0.049995)):
        wrong = refusal(
            ASR,
            "wav2vec2-ctc",
            tone(20),
            chunk_length_s=chunk_s,
            stride_length_s=stride_s,
        )
        assert wrong.param == "parameters.chunk_length_s"


def test_the_number_of_padded_chunks_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whisper runs a whole window, here of two seconds, for a chunk of any length."""
    monkeypatch.setattr(limits, "MAX_UNCHUNKED_S", 10.0)
    wrong = refusal(ASR, "whisper", tone(20), chunk_length_s=0.4, stride_length_s=0)
    assert "cut the 20 seconds into at most 45 chunks" in str(wrong)
    assert wrong.param == "parameters.chunk_length_s"
    accepted = item(tone(20), chunk_length_s=0.5, stride_length_s=0)
    runner(ASR, "whisper").prepare(accepted)
    assert accepted.rows == 40


def test_a_long_recording_must_be_cut_into_chunks() -> None:
    wrong = refusal(ASR, "wav2vec2-ctc", tone(301))
    assert "set chunk_length_s" in str(wrong)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("language", "klingon"),
        ("language", "fr"),  # the model has no token for it
        ("max_new_tokens", 29),  # of 32 positions
        ("return_timestamps", "word"),
        ("task", "translate"),
    ],
)
def test_parameters_that_whisper_does_not_support_are_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, value: Any
) -> None:
    config = runner(ASR, "whisper").pipe.model.generation_config
    monkeypatch.setattr(config, "task_to_id", {"transcribe": config.task_to_id["transcribe"]})
    monkeypatch.delattr(config, "alignment_heads")
    assert refusal(ASR, "whisper", tone(1), **{name: value}).param == f"parameters.{name}"
    monkeypatch.setattr(config, "is_multilingual", False)
    if name in ("language", "task"):
        refusal(ASR, "whisper", tone(1), language="en")


def test_a_long_recording_is_transcribed_without_timestamps_by_default(
    tmp_path: Path,
) -> None:
    """OpenAI's own checkpoints have this setting."""
    shutil.copytree(tiny.folder("whisper"), tmp_path, dirs_exist_ok=True)
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "return_timestamps": False}))
    run = load_runner(PipelineOptions(str(tmp_path), task=ASR, device="cpu"), 8)
    parameters: list[dict[str, Any]] = [
        {},
        {"return_timestamps": False},
        {"return_timestamps": True},
    ]
    results = serve(run, [item(tone(3), max_new_tokens=6, **chosen) for chosen in parameters])
    assert results[0] == results[1] == {"text": results[2]["text"]}
    assert results[2]["chunks"]
    short = serve(run, [item(tone(1), max_new_tokens=6)])[0]
    make: Any = pipeline
    samples, _ = soundfile.read(io.BytesIO(tone(1)), dtype="float32")
    assert short == make(ASR, model=str(tmp_path), device="cpu")(samples, max_new_tokens=6)
