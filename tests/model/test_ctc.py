"""Recordings through tiny random wav2vec2: what the pipeline of transformers says to them."""

from pathlib import Path
from typing import Any

import pytest
from transformers import pipeline

from batching.errors import InvalidInput
from tests.transcribing import CTC, RATE, accepted, engine, noise, saved, speech, transcribed
from worker.messages.transcription import TranscriptionInput
from worker.speech.ctc import CHUNK_S


def piped(samples: Any) -> dict[str, Any]:
    made = speech(CTC)
    make: Any = pipeline
    pipe = make(
        "automatic-speech-recognition",
        model=made.model,
        tokenizer=made.tokenizer,
        feature_extractor=made.extractor,
    )
    sound = {"raw": samples, "sampling_rate": RATE}
    answer: dict[str, Any] = pipe(sound, chunk_length_s=CHUNK_S, return_timestamps="word")
    return answer


@pytest.mark.parametrize("seconds", [0.5, 12.0, 30.0, 30.1, 75.0])
def test_a_recording_says_what_the_pipeline_says(tmp_path: Path, seconds: float) -> None:
    samples = noise(seconds)
    path = saved(tmp_path, samples)
    [deltas] = transcribed(engine(CTC), [TranscriptionInput(path, words=True)])
    expected = piped(samples)
    assert "".join(delta.text for delta in deltas) == expected["text"]
    words = [word for delta in deltas if delta.segment for word in delta.segment.words]
    assert [word.text.strip() for word in words] == [each["text"] for each in expected["chunks"]]
    times = [time for each in expected["chunks"] for time in each["timestamp"]]
    ours = [time for word in words for time in (word.start, word.end)]
    assert ours == pytest.approx(times)
    assert deltas[-1].seconds == pytest.approx(seconds)


def test_times_are_right_whatever_the_configuration_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of Parakeet and its like say nothing of samples."""
    samples = noise(2.0)
    expected = piped(samples)["chunks"]
    config = type(speech(CTC).model.config)
    monkeypatch.setattr(config, "inputs_to_logits_ratio", 1)
    payload = TranscriptionInput(saved(tmp_path, samples), words=True)
    [[delta]] = transcribed(engine(CTC), [payload])
    assert delta.segment
    ours = [at for word in delta.segment.words for at in (word.start, word.end)]
    assert ours == pytest.approx([at for each in expected for at in each["timestamp"]])


@pytest.mark.parametrize(
    ("field", "asked"),
    [
        ("language", {"language": "en"}),
        ("prompt", {"prompt": "Hello"}),
        ("temperature", {"temperature": 0.5}),
        ("include[]", {"logprobs": True}),
        ("model", {"task": "translate"}),
    ],
)
def test_what_a_ctc_model_has_no_notion_of_is_refused_by_name(
    tmp_path: Path, field: str, asked: dict[str, Any]
) -> None:
    path = saved(tmp_path, noise(0.5))
    with pytest.raises(InvalidInput) as refusal:
        accepted(engine(CTC), TranscriptionInput(path, **asked))
    assert refusal.value.param == field


def test_times_of_words_and_segments_can_be_sent(tmp_path: Path) -> None:
    """They are counted in numpy's numbers, which JSON has not."""
    path = saved(tmp_path, noise(12.0))
    [deltas] = transcribed(engine(CTC), [TranscriptionInput(path, words=True)])
    segments = [delta.segment for delta in deltas if delta.segment]
    words = [word for segment in segments for word in segment.words]
    assert words
    times = [(each.start, each.end) for each in segments] + [(w.start, w.end) for w in words]
    assert {type(at) for pair in times for at in pair} == {float}
