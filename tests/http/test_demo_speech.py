"""The demo of speech, end to end: recordings of known digits give their known words."""

import io
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import huggingface_hub
import numpy as np
import openai
import pytest
import soundfile
from huggingface_hub import InferenceClient

from tests.event_streams import CLIENT, chunks
from tests.serving import Server, serving

DEMO = Path(__file__).parents[2] / "worker" / "demo" / "speech"
SHORT = [[3, 1, 4], [1, 5]]
LONG = [[1, 2, 3], [4, 5], [6, 7, 8], [0, 9], [8, 7, 6], [5, 4, 3], [2, 1, 7], [0, 1, 2], [3, 4, 5]]
LONG += [[7, 8, 9], [6, 0, 1], [5, 0, 4], [4, 4], [7, 1, 8], [6, 2]]


@pytest.fixture(scope="module")
def demo() -> Iterator[ModuleType]:
    """What the model was trained on."""
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
    ) as made:
        yield made


def file_of(sound: np.ndarray, kind: str = "WAV") -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, sound, 16_000, format=kind)
    return buffer.getvalue()


def post(server: Server, sound: np.ndarray, path: str = "transcriptions", **fields: Any) -> Any:
    files = {"file": ("a.wav", file_of(sound))}
    answer = CLIENT.post(f"{server.url}/v1/audio/{path}", files=files, data=fields)
    assert answer.status_code == 200, answer.text
    return answer


def words(demo: ModuleType, phrases: list[list[int]], language: str = "en") -> str:
    return " ".join(demo.WORDS[language][digit] for digits in phrases for digit in digits)


@pytest.mark.parametrize("voice", ["en", "de"])
def test_readme_s_recording_is_written_and_heard(
    voice: str,
    demo: ModuleType,
    server: Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = str(tmp_path / "talk.mp3")
    monkeypatch.setattr("sys.argv", ["demo_tones.py", file, "314", "15", "--voice", voice])
    demo.main()
    sound, rate = soundfile.read(file, dtype="float32")
    assert rate == demo.SAMPLING_RATE
    assert post(server, sound).json()["text"] == words(demo, SHORT, voice)


def test_a_recording_gives_its_text(demo: ModuleType, server: Server) -> None:
    sound, _ = demo.say(SHORT)
    assert post(server, sound).json()["text"] == "three one four one five"


def test_a_voice_is_its_language_and_is_translated(demo: ModuleType, server: Server) -> None:
    sound, _ = demo.say(SHORT, "de")
    verbose = post(server, sound, response_format="verbose_json").json()
    assert (verbose["text"], verbose["language"]) == ("drei eins vier eins fünf", "german")
    assert post(server, sound, "translations").json()["text"] == words(demo, SHORT)


@pytest.mark.parametrize(("border", "late"), [(6, 2), (30, 13)], ids=["the window's", "a later"])
def test_a_word_on_a_border_is_heard_once(
    demo: ModuleType, server: Server, border: float, late: int
) -> None:
    pauses = [0.8] * len(LONG)
    _, said = demo.say(LONG, "en", pauses)
    pauses[late] += border - (said[late].start + 0.5 + 0.175)  # its second digit's middle
    sound, said = demo.say(LONG, "en", pauses)
    assert said[late].start + 0.6 < border < said[late].start + 0.8
    document = post(server, sound, response_format="verbose_json").json()
    assert document["text"] == words(demo, LONG)
    assert document["duration"] == pytest.approx(len(sound) / 16_000, abs=0.01)


def test_all_formats_have_the_same_words(demo: ModuleType, server: Server) -> None:
    sound, _ = demo.say(LONG)
    fields: dict[str, Any] = {
        "response_format": "verbose_json",
        "timestamp_granularities[]": ["word", "segment"],
    }
    document = post(server, sound, **fields).json()
    heard = {
        "verbose_json": document["text"],
        "segments": "".join(each["text"] for each in document["segments"]).strip(),
        "words": " ".join(each["word"] for each in document["words"]),
        "json": post(server, sound).json()["text"],
    }
    for form in ("text", "srt", "vtt"):
        told = post(server, sound, response_format=form).text
        heard[form] = " ".join(re.findall(r"^ *([a-z].*)$", told, re.MULTILINE))
    assert heard == dict.fromkeys(heard, words(demo, LONG))


def test_words_have_the_times_of_their_tones(demo: ModuleType, server: Server) -> None:
    sound, said = demo.say(SHORT)
    fields = {"response_format": "verbose_json", "timestamp_granularities[]": "word"}
    told = post(server, sound, **fields).json()["words"]
    assert [each["word"] for each in told] == words(demo, SHORT).split()
    starts = [phrase.start + 0.5 * n for phrase in said for n in range(len(phrase.digits))]
    assert told[0]["start"] < starts[0] + 0.25  # with the silence before it, as in all windows
    for each, start in zip(told[1:], starts[1:], strict=True):
        assert each["start"] == pytest.approx(start, abs=0.25)
    for each, start in zip(told, starts, strict=True):
        assert each["end"] == pytest.approx(start + 0.35, abs=0.25)


def test_a_stream_says_the_same(demo: ModuleType, server: Server) -> None:
    sound, _ = demo.say(LONG[:6])
    *deltas, done = chunks(post(server, sound, stream="true"))
    assert "".join(each["delta"] for each in deltas) == done["text"] == words(demo, LONG[:6])
    assert len(deltas) > 2


def test_openais_sdk_has_the_text_and_the_stream(demo: ModuleType, server: Server) -> None:
    sound, _ = demo.say(LONG[:6])
    asked: dict[str, Any] = {"model": "demo", "file": ("a.flac", file_of(sound, "FLAC"))}
    with openai.OpenAI(base_url=server.url + "/v1", api_key="-", max_retries=0) as client:
        transcriptions = client.audio.transcriptions
        assert transcriptions.create(**asked).text == words(demo, LONG[:6])
        events = list(transcriptions.create(**asked, stream=True))
        assert client.audio.translations.create(**asked).text == words(demo, LONG[:6])
    assert events[-1].text == words(demo, LONG[:6])


def test_hugging_faces_client_is_answered_by_the_same_model(
    demo: ModuleType, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)  # it bars us too
    sound, _ = demo.say(SHORT)
    client = InferenceClient(server.url, timeout=60)
    heard = client.automatic_speech_recognition(file_of(sound, "FLAC"))
    assert heard.text.strip() == words(demo, SHORT)
