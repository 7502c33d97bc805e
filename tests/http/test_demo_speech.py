"""The speech demo, end to end: recordings of digits give their words."""

import io
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import soundfile
from huggingface_hub import InferenceClient

from tests.event_streams import CLIENT
from tests.serving import Server, serving

DEMO = Path(__file__).parents[2] / "worker" / "demo" / "speech"
SHORT = [[3, 1, 4], [1, 5]]
LONG = [[1, 2, 3], [4, 5], [6, 7, 8], [0, 9], [8, 7, 6], [5, 4, 3], [2, 1, 7], [0, 1, 2], [3, 4, 5]]
LONG += [[7, 8, 9], [6, 0, 1], [5, 0, 4], [4, 4], [7, 1, 8], [6, 2]]


@pytest.fixture(scope="module")
def demo() -> Iterator[ModuleType]:
    """The module that generates the training data."""
    scripts = str(Path(__file__).parents[2] / "scripts")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(scripts)
        import demo_tones

        yield demo_tones


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    task = "automatic-speech-recognition"
    with serving(
        transcription_model="demo", pipeline_model=str(DEMO), pipeline_task=task, compile="off"
    ) as server:
        yield server


def file_of(audio: np.ndarray, kind: str = "WAV") -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, audio, 16_000, format=kind)
    return buffer.getvalue()


def post(server: Server, audio: np.ndarray, path: str = "transcriptions", **fields: Any) -> Any:
    files = {"file": ("a.wav", file_of(audio))}
    response = CLIENT.post(f"{server.url}/v1/audio/{path}", files=files, data=fields)
    assert response.status_code == 200, response.text
    return response


def words(demo: ModuleType, phrases: list[list[int]], language: str = "en") -> str:
    return " ".join(demo.WORDS[language][digit] for digits in phrases for digit in digits)


@pytest.mark.parametrize("voice", ["en", "de"])
def test_recording_of_the_readme_is_written_and_transcribed(
    voice: str,
    demo: ModuleType,
    server: Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = str(tmp_path / "talk.mp3")
    monkeypatch.setattr("sys.argv", ["demo_tones.py", file, "314", "15", "--voice", voice])
    demo.main()
    audio, rate = soundfile.read(file, dtype="float32")
    assert rate == demo.SAMPLING_RATE
    assert post(server, audio).json()["text"] == words(demo, SHORT, voice)


def test_language_is_detected_and_translated(demo: ModuleType, server: Server) -> None:
    audio, _ = demo.say(SHORT, "de")
    verbose = post(server, audio, response_format="verbose_json").json()
    assert (verbose["text"], verbose["language"]) == ("drei eins vier eins fünf", "german")
    assert post(server, audio, "translations").json()["text"] == words(demo, SHORT)


@pytest.mark.parametrize(("border", "late"), [(6, 2), (30, 13)], ids=["the window's", "a later"])
def test_word_across_a_window_border_appears_once(
    demo: ModuleType, server: Server, border: float, late: int
) -> None:
    pauses = [0.8] * len(LONG)
    _, phrases = demo.say(LONG, "en", pauses)
    pauses[late] += border - (phrases[late].start + 0.5 + 0.175)  # the middle of its second digit
    audio, phrases = demo.say(LONG, "en", pauses)
    assert phrases[late].start + 0.6 < border < phrases[late].start + 0.8
    document = post(server, audio, response_format="verbose_json").json()
    assert document["text"] == words(demo, LONG)
    assert document["duration"] == pytest.approx(len(audio) / 16_000, abs=0.01)


def test_words_have_the_times_of_their_tones(demo: ModuleType, server: Server) -> None:
    audio, phrases = demo.say(SHORT)
    fields = {"response_format": "verbose_json", "timestamp_granularities[]": "word"}
    timed = post(server, audio, **fields).json()["words"]
    assert [word["word"] for word in timed] == words(demo, SHORT).split()
    starts = [phrase.start + 0.5 * n for phrase in phrases for n in range(len(phrase.digits))]
    # the first word of a window includes the silence before it
    assert timed[0]["start"] < starts[0] + 0.25
    for word, start in zip(timed[1:], starts[1:], strict=True):
        assert word["start"] == pytest.approx(start, abs=0.25)
    for word, start in zip(timed, starts, strict=True):
        assert word["end"] == pytest.approx(start + 0.35, abs=0.25)


def test_hugging_faces_client_uses_the_same_model(
    demo: ModuleType, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    # offline mode also blocks local servers
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    audio, _ = demo.say(SHORT)
    client = InferenceClient(server.url, timeout=60)
    output = client.automatic_speech_recognition(file_of(audio, "FLAC"))
    assert output.text.strip() == words(demo, SHORT)
