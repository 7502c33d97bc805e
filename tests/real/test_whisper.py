"""whisper-tiny.en on a real recording, alone and repeated to long forms: the text of `generate`."""

import difflib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from numpy.typing import NDArray

from tests.event_streams import CLIENT
from tests.real.checkpoints import SPEECH, SPEECH_TEXT, hf, whisper
from tests.serving import Server, serving
from tests.transcribing import LENIENT

pytestmark = pytest.mark.real

RATE = 16000


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(
        transcription_model=whisper(), dtype="float32", compile="off", request_timeout_s=300
    ) as server:
        yield server


@pytest.fixture(scope="module")
def speech() -> NDArray[np.float32]:
    samples, rate = soundfile.read(SPEECH, dtype="float32")
    assert rate == RATE
    single: NDArray[np.float32] = samples
    return single


def transcribe(server: Server, file: Path, **fields: Any) -> Any:
    with file.open("rb") as opened:
        response = CLIENT.post(
            server.url + "/v1/audio/transcriptions", files={"file": opened}, data=fields
        )
    assert response.status_code == 200, response.text
    return response


def generated(samples: NDArray[np.float32]) -> str:
    """Return the text of `generate` at temperature 0."""
    model = hf.WhisperForConditionalGeneration.from_pretrained(whisper()).eval()
    extractor = hf.WhisperFeatureExtractor.from_pretrained(whisper())
    long = len(samples) > 30 * RATE
    padding: dict[str, Any] = {"truncation": False, "padding": "longest"} if long else {}
    features = extractor(
        samples, sampling_rate=RATE, return_tensors="pt", return_attention_mask=True, **padding
    )
    with torch.inference_mode():
        ids = model.generate(**features, return_timestamps=True, temperature=0.0)
    tokenizer = hf.AutoTokenizer.from_pretrained(whisper())
    text: str = tokenizer.batch_decode(ids, skip_special_tokens=True)[0]
    return text.strip()


def test_the_recording_has_its_text(server: Server) -> None:
    assert transcribe(server, SPEECH).json()["text"].strip() == SPEECH_TEXT


def test_segments_words_and_subtitles_have_the_times_of_the_speech(server: Server) -> None:
    times = {"timestamp_granularities[]": ["word", "segment"], "response_format": "verbose_json"}
    output = transcribe(server, SPEECH, **times).json()
    assert output["duration"] == pytest.approx(11, abs=0.1)
    words = [word["word"].strip(" ,.") for word in output["words"]]
    assert words == [word.strip(",.") for word in SPEECH_TEXT.split()]
    starts = [word["start"] for word in output["words"]]
    assert starts == sorted(starts)
    assert all(word["end"] <= 11 for word in output["words"])
    [country] = [w for w in output["words"] if w["word"].strip(" .,") == "country"][:1]
    assert 5 < country["start"] < 8, "after a pause"
    assert " ".join(s["text"].strip() for s in output["segments"]) == SPEECH_TEXT
    subtitles = transcribe(server, SPEECH, response_format="srt").text
    assert subtitles.startswith("1\n00:00:0")
    assert subtitles.rstrip().endswith("country.")


def words(text: str) -> list[str]:
    return re.findall("[a-z]+", text.lower())


@pytest.mark.parametrize("times", [3, pytest.param(12, marks=pytest.mark.slow)])
def test_a_long_form_has_the_text_of_generate(
    server: Server, speech: NDArray[np.float32], tmp_path: Path, times: int
) -> None:
    """A repeated text exceeds the threshold of repetition: OpenAI's fallback, which `generate` has
    only on request, tries each of its windows at higher temperatures."""
    samples, folder = np.tile(speech, times), tmp_path / "model"
    file = tmp_path / "long.wav"
    soundfile.write(file, samples, RATE, subtype="FLOAT")
    retried = words(transcribe(server, file).json()["text"])
    likeness = difflib.SequenceMatcher(None, retried, words(SPEECH_TEXT) * times).ratio()
    assert likeness > 0.9, retried
    folder.mkdir()
    for part in Path(whisper()).iterdir():
        (folder / part.name).symlink_to(part)
    settings = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").unlink()
    (folder / "generation_config.json").write_text(json.dumps(settings | LENIENT))
    with serving(
        transcription_model=str(folder), dtype="float32", compile="off", request_timeout_s=300
    ) as lenient:
        assert transcribe(lenient, file).json()["text"].strip() == generated(samples)
