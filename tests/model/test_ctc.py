"""Recordings through a tiny random wav2vec2 give the text of transformers' pipeline."""

from pathlib import Path
from typing import Any

import pytest
from transformers import pipeline

from batching.errors import InvalidInput
from tests.matrix import matrix
from tests.transcribing import (
    CTC,
    RATE,
    checkpoint,
    new_speech_engine,
    noise,
    prepared,
    saved,
    transcribed,
)
from worker.engines.speech.ctc import WINDOW_S
from worker.messages.transcription import TranscriptionInput


def pipeline_output(samples: Any) -> dict[str, Any]:
    ctc = checkpoint(CTC)
    untyped: Any = pipeline
    pipe = untyped(
        "automatic-speech-recognition",
        model=ctc.model,
        tokenizer=ctc.tokenizer,
        feature_extractor=ctc.extractor,
    )
    audio = {"raw": samples, "sampling_rate": RATE}
    output: dict[str, Any] = pipe(audio, chunk_length_s=WINDOW_S, return_timestamps="word")
    return output


@pytest.mark.parametrize("seconds", matrix([0.5, 12.0, 30.0, 30.1, 75.0], 0.5, 30.1))
def test_recording_gives_text_and_times_of_the_pipeline(tmp_path: Path, seconds: float) -> None:
    samples = noise(seconds)
    path = saved(tmp_path, samples)
    [deltas] = transcribed(new_speech_engine(CTC), [TranscriptionInput(path, words=True)])
    expected = pipeline_output(samples)
    assert "".join(delta.text for delta in deltas) == expected["text"]
    words = [word for delta in deltas if delta.segment for word in delta.segment.words]
    assert [word.text.strip() for word in words] == [chunk["text"] for chunk in expected["chunks"]]
    times = [time for chunk in expected["chunks"] for time in chunk["timestamp"]]
    ours = [time for word in words for time in (word.start, word.end)]
    assert ours == pytest.approx(times)
    segments = [delta.segment for delta in deltas if delta.segment]
    ours += [time for segment in segments for time in (segment.start, segment.end)]
    assert {*map(type, ours)} == {float}, "JSON encodes no numbers of numpy"
    assert deltas[-1].seconds == pytest.approx(seconds)


def test_times_do_not_depend_on_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Configurations such as Parakeet's do not give samples per frame."""
    samples = noise(2.0)
    expected = pipeline_output(samples)["chunks"]
    config = type(checkpoint(CTC).model.config)
    monkeypatch.setattr(config, "inputs_to_logits_ratio", 1)
    payload = TranscriptionInput(saved(tmp_path, samples), words=True)
    [[delta]] = transcribed(new_speech_engine(CTC), [payload])
    assert delta.segment
    ours = [time for word in delta.segment.words for time in (word.start, word.end)]
    assert ours == pytest.approx([time for chunk in expected for time in chunk["timestamp"]])


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("language", {"language": "en"}),
        ("prompt", {"prompt": "Hello"}),
        ("temperature", {"temperature": 0.5}),
        ("include[]", {"logprobs": True}),
        ("model", {"task": "translate"}),
    ],
)
def test_options_that_ctc_models_do_not_support_are_rejected(
    tmp_path: Path, field: str, options: dict[str, Any]
) -> None:
    path = saved(tmp_path, noise(0.5))
    with pytest.raises(InvalidInput) as error:
        prepared(new_speech_engine(CTC), TranscriptionInput(path, **options))
    assert error.value.param == field
