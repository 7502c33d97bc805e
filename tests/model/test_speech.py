"""Recordings through a tiny random Whisper give the tokens of transformers' `generate`."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.overrides import TorchFunctionMode
from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

from batching.errors import InvalidInput
from tests.matrix import matrix
from tests.transcribing import (
    LENIENT,
    RATE,
    WHISPER,
    checkpoint,
    new_speech_engine,
    noise,
    prepared,
    saved,
    tokens_of,
    transcribed,
    transcript,
)
from worker.engines.speech.whisper import LogitsRules
from worker.messages.transcription import TranscriptionInput


def generated(samples: NDArray[np.float32], **options: Any) -> dict[str, Any]:
    """The output of `generate`, with segments and the language."""
    whisper = checkpoint(WHISPER)
    long = len(samples) > whisper.extractor.n_samples
    padding: dict[str, Any] = {"truncation": False, "padding": "longest"} if long else {}
    features = whisper.extractor(
        samples, sampling_rate=RATE, return_tensors="pt", return_attention_mask=True, **padding
    )
    options = {"task": "transcribe", "return_timestamps": True, "return_segments": True} | options
    options = {"temperature": 0.0, **LENIENT, **options}
    output: dict[str, Any] = whisper.model.generate(**features, **options)
    return output


def segment_tokens(output: dict[str, Any]) -> list[int]:
    segments = output["segments"][0]
    return [token for segment in segments for token in segment["tokens"].tolist()]


END: int = checkpoint(WHISPER).tokenizer.eos_token_id
LENGTHS = {"one window": 2.0, "several windows": 7.3, "several blocks": 70.0}


@pytest.mark.parametrize("seconds", matrix(LENGTHS.values(), 7.3), ids=LENGTHS)
def test_recording_gives_the_tokens_of_generate(tmp_path: Path, seconds: float) -> None:
    samples = noise(seconds)
    deltas = transcript(saved(tmp_path, samples))
    assert tokens_of(deltas) == segment_tokens(generated(samples))


def test_silence_after_a_short_recording_adds_no_segment(tmp_path: Path) -> None:
    samples = noise(0.7)
    deltas = transcript(saved(tmp_path, samples))
    tokens = tokens_of(deltas)
    assert tokens == segment_tokens(generated(samples))[: len(tokens)]
    assert max(delta.segment.end for delta in deltas if delta.segment) <= 0.7


def test_concurrent_recordings_give_the_tokens_of_generate(tmp_path: Path) -> None:
    clips = [noise(seconds, seed) for seed, seconds in enumerate((2.0, 5.0, 2.0, 9.0, 2.1))]
    payloads = [
        TranscriptionInput(saved(tmp_path, clip, f"{n}.wav")) for n, clip in enumerate(clips)
    ]
    for clip, deltas in zip(clips, transcribed(new_speech_engine(), payloads), strict=True):
        assert tokens_of(deltas) == segment_tokens(generated(clip))


def test_rules_of_a_row_do_not_depend_on_longer_rows() -> None:
    model = checkpoint(WHISPER).model
    rules = LogitsRules(model.generation_config, model.device)
    first = model.generation_config.no_timestamps_token_id + 1
    generated = [
        [first + 3],
        [first + 3, 5],
        [first, 5, first + 4],
        [first, 5, first + 2, first + 2],
    ]
    logits = torch.randn(len(generated), model.config.vocab_size)
    together = rules.logprobs(logits, generated)
    alone = [
        rules.logprobs(row[None], [tokens]) for row, tokens in zip(logits, generated, strict=True)
    ]
    assert torch.equal(together, torch.cat(alone))


@pytest.mark.parametrize("language", matrix(["en", "de", "German"], "de"))
@pytest.mark.parametrize("task", ["transcribe", "translate"])
def test_language_and_task_of_the_request_are_used(
    tmp_path: Path, language: str, task: Any
) -> None:
    samples = noise(3.0)
    path = saved(tmp_path, samples)
    deltas = transcript(path, task=task, language=language)
    assert tokens_of(deltas) == segment_tokens(generated(samples, language=language, task=task))
    assert deltas[0].language == {"en": "english"}.get(language, "german")


def test_detected_language_is_that_of_generate(tmp_path: Path) -> None:
    model, extractor = checkpoint(WHISPER).model, checkpoint(WHISPER).extractor
    for seed in range(4):
        samples = noise(2.0, seed)
        features = extractor(samples, sampling_rate=RATE, return_tensors="pt")["input_features"]
        [token] = model.detect_language(features).tolist()
        deltas = transcript(saved(tmp_path, samples))
        assert (
            model.generation_config.lang_to_id[f"<|{TO_LANGUAGE_CODE[deltas[0].language]}|>"]
            == token
        )


def test_english_model_rejects_other_languages_and_translation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = checkpoint(WHISPER).model.generation_config
    monkeypatch.setattr(config, "is_multilingual", False)
    monkeypatch.delattr(config, "lang_to_id")
    monkeypatch.delattr(config, "task_to_id")
    samples = noise(3.0)
    path = saved(tmp_path, samples)
    deltas = transcript(path, language="english")
    tokens, expected = tokens_of(deltas), segment_tokens(generated(samples, task=None))
    assert tokens == expected[: len(tokens)]
    blank = [token for token in expected[len(tokens) :] if token < END]  # a segment without text
    assert not checkpoint(WHISPER).tokenizer.decode(blank).strip()
    german = TranscriptionInput(path, language="de")
    english = TranscriptionInput(path, "translate")
    for field, payload in (("language", german), ("model", english)):
        with pytest.raises(InvalidInput) as error:
            prepared(new_speech_engine(), payload)
        assert error.value.param == field


def test_prompt_is_the_context_of_every_window(tmp_path: Path) -> None:
    samples, prompt = noise(5.0), "Sir Ada and"
    path = saved(tmp_path, samples)
    deltas = transcript(path, prompt=prompt)
    ids = checkpoint(WHISPER).tokenizer.get_prompt_ids(prompt, return_tensors="pt")
    assert tokens_of(deltas) == segment_tokens(generated(samples, prompt_ids=ids))
    without = transcript(path)
    assert tokens_of(deltas) != tokens_of(without)


def test_earlier_windows_are_context_if_the_checkpoint_enables_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = checkpoint(WHISPER).model.generation_config
    before = checkpoint(WHISPER).tokenizer.convert_tokens_to_ids("<|startofprev|>")
    monkeypatch.setattr(config, "prev_sot_token_id", before, raising=False)
    samples, prompt = noise(9.0), "Sir Ada and"
    path = saved(tmp_path, samples)
    without = transcript(path, prompt=prompt)
    monkeypatch.setattr(config, "condition_on_prev_tokens", True, raising=False)
    deltas = transcript(path, prompt=prompt)
    ids = checkpoint(WHISPER).tokenizer.get_prompt_ids(prompt, return_tensors="pt")
    assert tokens_of(deltas) == segment_tokens(generated(samples, prompt_ids=ids))
    assert tokens_of(deltas) != tokens_of(without)


def test_words_have_the_token_times_of_generate(tmp_path: Path) -> None:
    samples = noise(5.0)
    path = saved(tmp_path, samples)
    deltas = transcript(path, words=True)
    output = generated(samples, return_token_timestamps=True)
    for delta, expected in zip(deltas, output["segments"][0], strict=True):
        assert delta.segment is not None
        assert "".join(word.text for word in delta.segment.words) == delta.text
        token_ends = [round(float(end), 2) for end in expected["token_timestamps"]]
        last = max(n for n, token in enumerate(delta.segment.tokens) if token < END)
        assert round(delta.segment.words[-1].end, 2) == token_ends[last]
        first = min(n for n, token in enumerate(delta.segment.tokens) if token < END)
        assert round(delta.segment.words[0].start, 2) == (token_ends[first - 1] if first else 0.0)


@pytest.mark.parametrize("frames", [1, 2, 3])
def test_words_have_times_in_a_window_with_hardly_any_audio(frames: int) -> None:
    """As in the last window of a recording that is slightly longer than a window."""
    engine = new_speech_engine()
    window = engine._example()
    window.audio_frames = frames
    engine.runner.start([window])
    while not window.finished:
        engine.runner.step([window])
    assert engine._align
    times = engine._align(window)()
    assert times == [0.0] * len(window.tokens)


def test_improbable_text_is_retried_at_a_higher_temperature(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint(WHISPER).model.generation_config, "logprob_threshold", -0.01)
    path = saved(tmp_path, noise(2.0))
    first = transcript(path)
    again = transcript(path)
    fixed = transcript(path, temperature=0.3)
    assert {d.segment.temperature for d in first if d.segment} == {1.0}
    assert {d.segment.temperature for d in fixed if d.segment} == {0.3}
    assert first == again


def test_silence_gives_an_empty_transcript(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = checkpoint(WHISPER).model.generation_config
    monkeypatch.setattr(config, "logprob_threshold", 0.0)
    monkeypatch.setattr(config, "no_speech_threshold", -1.0)
    deltas = transcript(saved(tmp_path, noise(5.0)))
    assert [(delta.text, delta.segment, delta.seconds) for delta in deltas] == [("", None, 5.0)]


def test_logprobs_have_the_bytes_of_split_characters(tmp_path: Path) -> None:
    deltas = transcript(saved(tmp_path, noise(5.0)), logprobs=True)
    shared = 0
    for delta in deltas:
        data = b"".join(token.raw for token in delta.logprobs)
        assert data.decode(errors="replace") == delta.text
        shared += sum(token.raw != token.text.encode() for token in delta.logprobs)
    assert shared


class ReadCounter(TorchFunctionMode):
    """Counts the calls that read a tensor's values: on a GPU each waits for the step."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = getattr(function, "__name__", "")
        self.reads += name in ("tolist", "item", "cpu", "__int__", "__float__", "__bool__")
        return function(*args, **(kwargs or {}))


def test_a_step_of_windows_reads_its_tokens_once(tmp_path: Path) -> None:
    """Their number and their temperatures do not matter."""
    engine = new_speech_engine()
    for number, temperature in enumerate((0.0, 0.4, 0.8)):
        path = saved(tmp_path, noise(2.0, number), f"{number}.wav")
        engine.add(prepared(engine, TranscriptionInput(path, temperature=temperature)))
    running = engine.runner.running
    while len(running) < 3:
        engine.step()
    assert {window.temperature for window in running} == {0.0, 0.4, 0.8}
    before = [len(window.tokens) for window in running]
    with ReadCounter() as counter:
        engine.runner.step(running)
    assert [len(window.tokens) for window in running] == [count + 1 for count in before]
    assert counter.reads == 2  # the other one is of ids on the host, by the timestamp rules
