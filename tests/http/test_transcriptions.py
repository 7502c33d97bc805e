"""/v1/audio over real sockets: forms, responses in five formats, errors."""

import io
import json
import subprocess
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import soundfile

from server.http.form import PREFIX
from tests.event_streams import CLIENT, assert_refused, error_of
from tests.fake_transcriber import RATE, SAID, FakeTranscriber
from tests.sdk import run_node
from tests.serving import Server, metric, serving, wait_until
from tests.unit.test_media import tone

PATH = "/v1/audio/transcriptions"
TEXT = "".join(word for words in SAID for word in words).strip()


@pytest.fixture(scope="module")
def spool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return the folder of uploads."""
    folder = tmp_path_factory.mktemp("spool")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(folder))
        yield folder


@pytest.fixture(scope="module")
def server(spool: Path) -> Iterator[Server]:
    with serving(load_transcriber=partial(FakeTranscriber, max_s=60), max_audio_mb=2) as started:
        yield started


@pytest.fixture
def speaker(server: Server) -> Iterator[FakeTranscriber]:
    engine: Any = server.worker_client.models["transcription"].engine
    engine.payloads.clear()
    engine.gate.set()
    yield engine
    engine.gate.set()


@pytest.fixture(autouse=True)
def _all_is_removed(spool: Path) -> Iterator[None]:
    yield
    wait_until(lambda: not list(spool.glob(PREFIX + "*")))


def wav(seconds: float = 1.0) -> bytes:
    return tone(seconds, RATE)


def post(
    server: Server, file: bytes | None = None, path: str = PATH, **fields: Any
) -> httpx.Response:
    files = {"file": ("a.wav", wav() if file is None else file)}
    return CLIENT.post(server.url + path, files=files, data=fields)


# ── clients ──


def test_openai_sdk_reads_every_format(server: Server) -> None:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="-", max_retries=0) as client:
        create = client.audio.transcriptions.create
        sound: Any = ("a.wav", wav())
        assert create(file=sound, model="demo").text == TEXT
        for form in ("text", "srt", "vtt"):
            assert isinstance(create(file=sound, model="demo", response_format=form), str)
        verbose = create(
            file=sound,
            model="demo",
            response_format="verbose_json",
            timestamp_granularities=["word", "segment"],
        )
        assert [word.word for word in verbose.words or ()][:2] == ["Good", "morning"]
        assert [segment.text for segment in verbose.segments or ()][1] == " <Jürgen> & co."
        assert getattr(verbose.usage, "seconds", 0) == 1.0
        scored = create(file=sound, model="demo", include=["logprobs"])
        assert next(token.token for token in scored.logprobs or ()) == " Good"
        events = list(create(file=sound, model="demo", stream=True))
        assert [event.type for event in events][-1] == "transcript.text.done"
        assert client.audio.translations.create(file=sound, model="demo").text == TEXT


def test_openai_node_sdk_reads_every_format(server: Server, tmp_path: Path) -> None:
    (tmp_path / "a.wav").write_bytes(wav())
    sound = str(tmp_path / "a.wav")
    transcript = run_node("transcriptions.mjs", URL=server.url + "/v1", SOUND=sound)
    assert transcript["whole"] == transcript["translated"] == "".join(transcript["deltas"]) == TEXT
    assert transcript["done"]["usage"] == {"type": "duration", "seconds": 1.0}
    assert transcript["words"] == 10
    assert transcript["srt"].startswith("1\n00:00:00,000 --> ")
    assert transcript["refused"] == "response_format"


def test_curl_sends_a_form(server: Server, tmp_path: Path) -> None:
    (tmp_path / "a.wav").write_bytes(wav(20.0))
    command = ["curl", "-s", server.url + PATH, "-F", f"file=@{tmp_path / 'a.wav'}"]
    done = subprocess.run([*command, "-F", "response_format=text"], capture_output=True, check=True)
    assert done.stdout.decode() == TEXT + "\n"
    forgot = ["curl", "-s", server.url + PATH, "-F", "file=a.wav"]
    refused = json.loads(subprocess.run(forgot, capture_output=True, check=True).stdout)
    assert "-F file=@PATH" in refused["error"]["message"]


def test_model_is_listed_and_selected_by_name(server: Server) -> None:
    [model] = CLIENT.get(server.url + "/v1/models").json()["data"]
    assert model["id"] == "demo"
    assert "max_model_len" not in model
    assert post(server, model="demo").status_code == 200
    unknown = post(server, model="whisper-9")
    assert (unknown.status_code, error_of(unknown)["code"]) == (404, "model_not_found")


# ── what is refused ──


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": "diarized_json"}, "response_format"),
        ({"response_format": "yaml"}, "response_format"),
        ({"known_speaker_names[]": "Ann"}, "known_speaker_names"),
        ({"known_speaker_references[]": "data:,"}, "known_speaker_references"),
        ({"chunking_strategy": '{"type": "server_vad"}'}, "chunking_strategy"),
        ({"keywords[]": "a"}, "keywords"),
        ({"languages[]": "en"}, "languages"),
        ({"temperature": "1.5"}, "temperature"),
        ({"temperature": "warm"}, "temperature"),
        ({"stream": "perhaps"}, "stream"),
        ({"stream": "true", "response_format": "srt"}, "stream"),
        ({"include[]": "logprobs", "response_format": "text"}, "include"),
        ({"include[]": "all"}, "include[0]"),
        ({"chunking_strategy[type]": "server_vad"}, "chunking_strategy"),
        ({"timestamp_granularities[]": "word"}, "timestamp_granularities"),
        ({"timestamp_granularities[0]": "word"}, "timestamp_granularities"),
        ({"language": "x" * 41}, "language"),
        ({"model": ["demo", "demo"]}, "model"),
        ({"prompt": "refused"}, "prompt"),
        ({"prompt": "x" * 70_000}, "prompt"),
        ({"path": "/v1/audio/translations", "language": "de"}, "language"),
        ({"path": "/v1/audio/translations", "stream": "true"}, "stream"),
    ],
)
def test_error_names_the_invalid_field(fields: dict[str, Any], param: str, server: Server) -> None:
    assert_refused(post(server, **fields), param, reason=param)


def test_files_that_are_not_audio_are_refused(server: Server) -> None:
    silence = io.BytesIO()
    soundfile.write(silence, np.zeros(61 * RATE, np.int16), RATE, format="FLAC")
    flac = tone(3.0, RATE, kind="FLAC")
    for file, message in (
        (b"Dear Sir or Madam", "not an audio file that can be read"),
        (tone(100, 1), "the audio has 1 samples a second"),
        (silence.getvalue(), "lasts 61 seconds in 1 channels; at most 60"),
        (tone(0.001, RATE), "at least 0.03 are needed"),
        (flac[: len(flac) // 2], "can be read"),
    ):
        answer = post(server, file)
        assert answer.status_code == 400, answer.text
        assert message in error_of(answer)["message"]
        assert error_of(answer)["param"] == "file"


def test_metrics_count_the_seconds(server: Server) -> None:
    name = "onequeue_transcribed_seconds_total"
    before = metric(server, name)
    assert post(server, wav(1.5)).status_code == 200
    assert metric(server, name) == pytest.approx(before + 1.5)
    assert metric(server, f'onequeue_requests_total{{endpoint="{PATH}",status="200"}}') > 0
