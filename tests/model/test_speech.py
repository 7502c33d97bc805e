"""Recordings through tiny random Whisper: token for token what `generate` of transformers says."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

from batching.errors import InvalidInput
from tests.transcribing import (
    LENIENT,
    RATE,
    WHISPER,
    accepted,
    engine,
    noise,
    saved,
    speech,
    tokens_of,
    transcribed,
)
from worker.messages.transcription import TranscriptionInput


def generated(samples: NDArray[np.float32], **options: Any) -> dict[str, Any]:
    """By transformers, with the segments and the language."""
    made = speech(WHISPER)
    long = len(samples) > made.extractor.n_samples
    asked: dict[str, Any] = {"truncation": False, "padding": "longest"} if long else {}
    features = made.extractor(
        samples, sampling_rate=RATE, return_tensors="pt", return_attention_mask=True, **asked
    )
    options = {"task": "transcribe", "return_timestamps": True, "return_segments": True} | options
    options = {"temperature": 0.0, **LENIENT, **options}
    answer: dict[str, Any] = made.model.generate(**features, **options)
    return answer


def says(answer: dict[str, Any]) -> list[int]:
    return [token for part in answer["segments"][0] for token in part["tokens"].tolist()]


END: int = speech(WHISPER).tokenizer.eos_token_id
LENGTHS = {"a window": 2.0, "windows": 7.3, "many blocks": 70.0}


@pytest.mark.parametrize("seconds", LENGTHS.values(), ids=LENGTHS)
def test_a_recording_says_what_generate_says(tmp_path: Path, seconds: float) -> None:
    samples = noise(seconds)
    [deltas] = transcribed(engine(), [TranscriptionInput(saved(tmp_path, samples))])
    assert tokens_of(deltas) == says(generated(samples))


def test_after_a_short_recording_nothing_is_said_of_the_silence(tmp_path: Path) -> None:
    samples = noise(0.7)
    [deltas] = transcribed(engine(), [TranscriptionInput(saved(tmp_path, samples))])
    said = tokens_of(deltas)
    assert said == says(generated(samples))[: len(said)]
    assert max(delta.segment.end for delta in deltas if delta.segment) <= 0.7


def test_recordings_share_steps_and_each_says_what_it_says_alone(tmp_path: Path) -> None:
    clips = [noise(seconds, seed) for seed, seconds in enumerate((2.0, 5.0, 2.0, 9.0, 2.1))]
    payloads = [
        TranscriptionInput(saved(tmp_path, clip, f"{n}.wav")) for n, clip in enumerate(clips)
    ]
    for clip, deltas in zip(clips, transcribed(engine(), payloads), strict=True):
        assert tokens_of(deltas) == says(generated(clip))


@pytest.mark.parametrize("language", ["en", "de", "German"])
@pytest.mark.parametrize("task", ["transcribe", "translate"])
def test_language_and_task_are_told_to_the_model(tmp_path: Path, language: str, task: Any) -> None:
    samples = noise(3.0)
    path = saved(tmp_path, samples)
    [deltas] = transcribed(engine(), [TranscriptionInput(path, task, language)])
    assert tokens_of(deltas) == says(generated(samples, language=language, task=task))
    assert deltas[0].language == {"en": "english"}.get(language, "german")


def test_the_language_is_that_which_generate_detects(tmp_path: Path) -> None:
    model, extractor = speech(WHISPER).model, speech(WHISPER).extractor
    for seed in range(4):
        samples = noise(2.0, seed)
        features = extractor(samples, sampling_rate=RATE, return_tensors="pt")["input_features"]
        [token] = model.detect_language(features).tolist()
        [deltas] = transcribed(engine(), [TranscriptionInput(saved(tmp_path, samples))])
        assert (
            model.generation_config.lang_to_id[f"<|{TO_LANGUAGE_CODE[deltas[0].language]}|>"]
            == token
        )


def test_a_model_of_one_language_is_told_none_and_refuses_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = speech(WHISPER).model.generation_config
    monkeypatch.setattr(config, "is_multilingual", False)
    monkeypatch.delattr(config, "lang_to_id")
    monkeypatch.delattr(config, "task_to_id")
    samples = noise(3.0)
    path = saved(tmp_path, samples)
    [deltas] = transcribed(engine(), [TranscriptionInput(path, language="english")])
    said, expected = tokens_of(deltas), says(generated(samples, task=None))
    assert said == expected[: len(said)]
    blank = [token for token in expected[len(said) :] if token < END]  # a segment without text
    assert not speech(WHISPER).tokenizer.decode(blank).strip()
    german = TranscriptionInput(path, language="de")
    english = TranscriptionInput(path, "translate")
    for field, payload in (("language", german), ("model", english)):
        with pytest.raises(InvalidInput) as refusal:
            accepted(engine(), payload)
        assert refusal.value.param == field


def test_a_prompt_comes_before_every_window(tmp_path: Path) -> None:
    samples, prompt = noise(5.0), "Sir Ada and"
    path = saved(tmp_path, samples)
    [deltas] = transcribed(engine(), [TranscriptionInput(path, prompt=prompt)])
    ids = speech(WHISPER).tokenizer.get_prompt_ids(prompt, return_tensors="pt")
    assert tokens_of(deltas) == says(generated(samples, prompt_ids=ids))
    [without] = transcribed(engine(), [TranscriptionInput(path)])
    assert tokens_of(deltas) != tokens_of(without)


def test_earlier_windows_are_shown_where_the_checkpoint_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = speech(WHISPER).model.generation_config
    before = speech(WHISPER).tokenizer.convert_tokens_to_ids("<|startofprev|>")
    monkeypatch.setattr(config, "prev_sot_token_id", before, raising=False)
    samples, prompt = noise(9.0), "Sir Ada and"
    path = saved(tmp_path, samples)
    [without] = transcribed(engine(), [TranscriptionInput(path, prompt=prompt)])
    monkeypatch.setattr(config, "condition_on_prev_tokens", True, raising=False)
    [deltas] = transcribed(engine(), [TranscriptionInput(path, prompt=prompt)])
    ids = speech(WHISPER).tokenizer.get_prompt_ids(prompt, return_tensors="pt")
    assert tokens_of(deltas) == says(generated(samples, prompt_ids=ids))
    assert tokens_of(deltas) != tokens_of(without)


def test_words_have_the_times_that_generate_gives_their_tokens(tmp_path: Path) -> None:
    samples = noise(5.0)
    path = saved(tmp_path, samples)
    [deltas] = transcribed(engine(), [TranscriptionInput(path, words=True)])
    answer = generated(samples, return_token_timestamps=True)
    for delta, part in zip(deltas, answer["segments"][0], strict=True):
        assert delta.segment is not None
        assert "".join(word.text for word in delta.segment.words) == delta.text
        known = [round(float(at), 2) for at in part["token_timestamps"]]
        last = max(at for at, token in enumerate(delta.segment.tokens) if token < END)
        assert round(delta.segment.words[-1].end, 2) == known[last]
        first = min(at for at, token in enumerate(delta.segment.tokens) if token < END)
        assert round(delta.segment.words[0].start, 2) == (known[first - 1] if first else 0.0)


@pytest.mark.parametrize("frames", [1, 2, 3])
def test_words_of_hardly_any_sound_have_times(frames: int) -> None:
    """As at the end of a recording that is a little longer than a window."""
    speaking = engine()
    window = speaking._example()
    window.frames = frames
    speaking.runner.begin([window])
    while not window.ended:
        speaking.runner.step([window])
    assert speaking._align
    times = speaking._align(window)()
    assert times == [0.0] * len(window.said)


def test_an_attempt_that_looks_wrong_is_followed_by_one_at_a_higher_temperature(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speech(WHISPER).model.generation_config, "logprob_threshold", -0.01)
    path = saved(tmp_path, noise(2.0))
    [first] = transcribed(engine(), [TranscriptionInput(path)])
    [again] = transcribed(engine(), [TranscriptionInput(path)])
    [fixed] = transcribed(engine(), [TranscriptionInput(path, temperature=0.3)])
    assert {d.segment.temperature for d in first if d.segment} == {1.0}
    assert {d.segment.temperature for d in fixed if d.segment} == {0.3}
    assert first == again


def test_silence_says_nothing_and_still_has_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = speech(WHISPER).model.generation_config
    monkeypatch.setattr(config, "logprob_threshold", 0.0)
    monkeypatch.setattr(config, "no_speech_threshold", -1.0)
    [deltas] = transcribed(engine(), [TranscriptionInput(saved(tmp_path, noise(5.0)))])
    assert [(delta.text, delta.segment, delta.seconds) for delta in deltas] == [("", None, 5.0)]


def test_logprobs_have_the_bytes_of_characters_that_tokens_share(tmp_path: Path) -> None:
    payload = TranscriptionInput(saved(tmp_path, noise(5.0)), logprobs=True)
    [deltas] = transcribed(engine(), [payload])
    shared = 0
    for delta in deltas:
        data = b"".join(each.raw for each in delta.logprobs)
        assert data.decode(errors="replace") == delta.text
        shared += sum(each.raw != each.text.encode() for each in delta.logprobs)
    assert shared
