"""POST / and the endpoints of transcriptions with one model, which is loaded once for both; and
what a CTC model says there, in every format."""

import html
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import pipeline

from tests.event_streams import CLIENT, chunks
from tests.http.test_pipeline_http import error_of
from tests.serving import Server, serving
from tests.tiny import BUILDERS, folder
from tests.transcribing import CTC, RATE, WHISPER, noise, saved
from worker.speech.ctc import CHUNK_S

ASR = "automatic-speech-recognition"
PATH = "/v1/audio/transcriptions"
LONG_S = 75.0  # three chunks and a part


def serving_both(model: Path) -> Any:
    both: Any = dict.fromkeys(("pipeline_model", "transcription_model"), str(model))
    return serving(pipeline_task=ASR, **both)


@pytest.fixture(scope="module")
def speaker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random wav2vec2, which is made to say the end of a word at a third of all moments."""
    path = tmp_path_factory.mktemp("ctc")
    model, extractor, tokenizer = BUILDERS[CTC]()
    inputs = extractor(noise(5.0), sampling_rate=RATE, return_tensors="pt")
    with torch.inference_mode():
        logits = model.eval()(**inputs).logits[0]
    end = tokenizer.word_delimiter_token_id
    lacking = logits.amax(-1) - logits[:, end]
    model.lm_head.bias.data[end] += lacking.quantile(1 / 3)
    for part in (model, extractor, tokenizer):
        part.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def server(speaker: Path) -> Iterator[Server]:
    with serving_both(speaker) as made:
        yield made


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return Path(saved(tmp_path_factory.mktemp("sound"), noise(LONG_S))).read_bytes()


@pytest.fixture(scope="module")
def piped(speaker: Path) -> dict[str, Any]:
    """What the pipeline says, chunk by chunk."""
    make: Any = pipeline
    pipe = make(ASR, model=str(speaker))
    given = {"raw": noise(LONG_S), "sampling_rate": RATE}
    said: dict[str, Any] = pipe(given, chunk_length_s=CHUNK_S, return_timestamps="word")
    return said


def post(server: Server, sound: bytes, **fields: Any) -> Any:
    return CLIENT.post(server.url + PATH, files={"file": ("a.wav", sound)}, data=fields)


@pytest.mark.parametrize("name", [CTC, WHISPER])
def test_one_model_for_both_is_loaded_once(name: str) -> None:
    with serving_both(folder(name)) as server:
        assert CLIENT.get(f"{server.url}/ready").json()["transcription_model"] == str(folder(name))
        models: Any = server.worker_client.models
        recognizer, transcriber = models["pipeline"].engine.runner, models["transcription"].engine
        assert transcriber.runner.model is recognizer.pipe.model


def test_both_say_the_same(server: Server, tmp_path: Path) -> None:
    short = Path(saved(tmp_path, noise(3.0))).read_bytes()
    recognized = CLIENT.post(server.url, content=short).json()["text"]
    assert post(server, short).json()["text"] == recognized.strip()


def test_every_format_has_the_text_of_the_pipeline(
    server: Server, sound: bytes, piped: dict[str, Any]
) -> None:
    heard = {
        form: post(server, sound, response_format=form).text
        for form in ("json", "verbose_json", "text", "srt", "vtt")
    }
    verbose = json.loads(heard["verbose_json"])
    heard["json"], heard["verbose_json"] = json.loads(heard["json"])["text"], verbose["text"]
    heard["segments"] = "".join(segment["text"] for segment in verbose["segments"])
    for form in ("srt", "vtt"):
        cues = re.findall(r"-->.*\n((?:.+\n)+)", heard[form])
        heard[form] = html.unescape(" ".join(cues))
    said = {form: text.split() for form, text in heard.items()}
    assert len(verbose["segments"]) > 1
    assert said == dict.fromkeys(said, piped["text"].split())
    assert verbose["duration"] == LONG_S


def test_a_stream_has_the_text_of_the_pipeline(
    server: Server, sound: bytes, piped: dict[str, Any]
) -> None:
    *deltas, done = chunks(post(server, sound, stream="true"))
    assert len(deltas) > 1
    assert "".join(each["delta"] for each in deltas) == done["text"] == piped["text"].strip()
    assert done["usage"] == {"type": "duration", "seconds": LONG_S}


def test_words_have_the_times_of_the_pipeline(
    server: Server, sound: bytes, piped: dict[str, Any]
) -> None:
    fields = {"response_format": "verbose_json", "timestamp_granularities[]": "word"}
    words = post(server, sound, **fields).json()["words"]
    assert [each["word"] for each in words] == [each["text"] for each in piped["chunks"]]
    times = [at for each in words for at in (each["start"], each["end"])]
    wanted = [at for each in piped["chunks"] for at in each["timestamp"]]
    assert times == pytest.approx(wanted, abs=0.001)


def test_what_the_model_has_no_notion_of_is_refused_by_name(server: Server, sound: bytes) -> None:
    answer = post(server, sound, language="en")
    assert (answer.status_code, error_of(answer)["param"]) == (400, "language")
