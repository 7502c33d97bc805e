"""The real speech engine in the real app gives the text of `generate` in every format."""

import html
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.event_streams import CLIENT, chunks
from tests.model.test_speech import generated, segment_tokens
from tests.serving import Server, serving
from tests.transcribing import WHISPER, checkpoint, noise, saved

PATH = "/v1/audio/transcriptions"
ALL = {"response_format": "verbose_json", "timestamp_granularities[]": ["word", "segment"]}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder, whisper = tmp_path_factory.mktemp("whisper"), checkpoint(WHISPER)
    for part in (whisper.model, whisper.tokenizer, whisper.extractor):
        part.save_pretrained(folder)
    with serving(transcription_model=str(folder), dtype="float32", compile="off") as server:
        yield server


@pytest.fixture
def audio(tmp_path: Path) -> bytes:
    """A file of four windows."""
    return Path(saved(tmp_path, noise(7.3))).read_bytes()


def post(server: Server, file: bytes, **fields: Any) -> Any:
    response = CLIENT.post(server.url + PATH, files={"file": ("a.wav", file)}, data=fields)
    assert response.status_code == 200, response.text
    return response


def reference_text(samples: NDArray[np.float32]) -> str:
    """The text of `generate`."""
    tokens = segment_tokens(generated(samples))
    text: str = checkpoint(WHISPER).tokenizer.decode(tokens, skip_special_tokens=True)
    return text


def without_spaces(text: str) -> str:
    """Formats join segments differently, and segments of a random model begin within words."""
    return "".join(text.split())


def cue_text(subtitles: str) -> str:
    lines = [cue.split("\n")[-1] for cue in subtitles.removesuffix("\n\n").split("\n\n")]
    return html.unescape("".join(lines).removeprefix("WEBVTT"))


def test_all_formats_have_the_text_of_generate(server: Server, audio: bytes) -> None:
    raw = {form: post(server, audio, response_format=form).text for form in ("text", "srt", "vtt")}
    document = post(server, audio, **ALL).json()
    texts = {
        "json": post(server, audio).json()["text"],
        "text": raw["text"],
        "srt": cue_text(raw["srt"]),
        "vtt": cue_text(raw["vtt"]),
        "verbose_json": document["text"],
        "segments": "".join(segment["text"] for segment in document["segments"]),
        "words": "".join(word["word"] for word in document["words"]),
    }
    expected = without_spaces(reference_text(noise(7.3)))
    assert expected
    for form, text in texts.items():
        assert without_spaces(text) == expected, form
    assert document["duration"] == 7.3


def test_stream_has_the_text_of_generate(server: Server, audio: bytes) -> None:
    *deltas, done = chunks(post(server, audio, stream="true"))
    assert "".join(delta["delta"] for delta in deltas) == done["text"]
    assert without_spaces(done["text"]) == without_spaces(reference_text(noise(7.3)))
