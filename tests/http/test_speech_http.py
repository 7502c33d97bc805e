"""The real speech engine behind the real app: in every format what `generate` says."""

import html
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.event_streams import CLIENT, chunks
from tests.model.test_speech import generated, says
from tests.serving import Server, serving
from tests.transcribing import WHISPER, noise, saved, speech

PATH = "/v1/audio/transcriptions"
ALL = {"response_format": "verbose_json", "timestamp_granularities[]": ["word", "segment"]}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder, made = tmp_path_factory.mktemp("whisper"), speech(WHISPER)
    for part in (made.model, made.tokenizer, made.extractor):
        part.save_pretrained(folder)
    with serving(transcription_model=str(folder), dtype="float32", compile="off") as serves:
        yield serves


@pytest.fixture
def sound(tmp_path: Path) -> bytes:
    """Four windows."""
    return Path(saved(tmp_path, noise(7.3))).read_bytes()


def post(server: Server, file: bytes, **fields: Any) -> Any:
    answer = CLIENT.post(server.url + PATH, files={"file": ("a.wav", file)}, data=fields)
    assert answer.status_code == 200, answer.text
    return answer


def spoken(samples: NDArray[np.float32]) -> str:
    """By transformers."""
    text: str = speech(WHISPER).tokenizer.decode(says(generated(samples)), skip_special_tokens=True)
    return text


def solid(text: str) -> str:
    """A random model has no words, and its segments begin anywhere."""
    return "".join(text.split())


def cues(subtitles: str) -> str:
    lines = [cue.split("\n")[-1] for cue in subtitles.removesuffix("\n\n").split("\n\n")]
    return html.unescape("".join(lines).removeprefix("WEBVTT"))


def test_a_long_recording_has_the_text_of_generate_in_all_formats(
    server: Server, sound: bytes
) -> None:
    told = {form: post(server, sound, response_format=form).text for form in ("text", "srt", "vtt")}
    document = post(server, sound, **ALL).json()
    said = {
        "json": post(server, sound).json()["text"],
        "text": told["text"],
        "srt": cues(told["srt"]),
        "vtt": cues(told["vtt"]),
        "verbose_json": document["text"],
        "segments": "".join(each["text"] for each in document["segments"]),
        "words": "".join(each["word"] for each in document["words"]),
    }
    expected = solid(spoken(noise(7.3)))
    assert expected
    assert {form: solid(text) for form, text in said.items()} == dict.fromkeys(said, expected)
    assert document["duration"] == 7.3


def test_a_stream_has_the_text_of_generate(server: Server, sound: bytes) -> None:
    *deltas, done = chunks(post(server, sound, stream="true"))
    assert "".join(each["delta"] for each in deltas) == done["text"]
    assert solid(done["text"]) == solid(spoken(noise(7.3)))


def test_recordings_at_the_same_time_have_each_its_own_text(server: Server, tmp_path: Path) -> None:
    lengths = (7.3, 2.0, 3.1, 5.0)
    sounds = [noise(length, seed) for seed, length in enumerate(lengths)]
    files = [Path(saved(tmp_path, each)).read_bytes() for each in sounds]
    with ThreadPoolExecutor(len(files)) as pool:
        answers = list(pool.map(lambda file: post(server, file).json()["text"], files))
    assert [solid(text) for text in answers] == [solid(spoken(each)) for each in sounds]
    assert len(set(answers)) == len(answers)
