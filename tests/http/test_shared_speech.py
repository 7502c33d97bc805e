"""POST / and the transcription endpoint share one loaded model; and transcripts of a CTC model in
every format."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import pipeline

from tests.event_streams import CLIENT, chunks
from tests.serving import Server, serving
from tests.tiny import BUILDERS, folder
from tests.transcribing import CTC, RATE, WHISPER, noise, saved
from worker.engines.speech.ctc import WINDOW_S

ASR = "automatic-speech-recognition"
PATH = "/v1/audio/transcriptions"
LONG_S = 75.0  # three windows and a part


def serving_both(model: Path) -> Any:
    both: Any = dict.fromkeys(("pipeline_model", "transcription_model"), str(model))
    return serving(pipeline_task=ASR, **both)


@pytest.fixture(scope="module")
def speaker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random wav2vec2 whose output ends a word at a third of all frames."""
    path = tmp_path_factory.mktemp("ctc")
    model, extractor, tokenizer = BUILDERS[CTC]()
    inputs = extractor(noise(5.0), sampling_rate=RATE, return_tensors="pt")
    with torch.inference_mode():
        logits = model.eval()(**inputs).logits[0]
    end = tokenizer.word_delimiter_token_id
    gap = logits.amax(-1) - logits[:, end]
    model.lm_head.bias.data[end] += gap.quantile(1 / 3)
    for part in (model, extractor, tokenizer):
        part.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def server(speaker: Path) -> Iterator[Server]:
    with serving_both(speaker) as server:
        yield server


@pytest.fixture(scope="module")
def audio(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return Path(saved(tmp_path_factory.mktemp("sound"), noise(LONG_S))).read_bytes()


@pytest.fixture(scope="module")
def expected(speaker: Path) -> dict[str, Any]:
    """The output of transformers' pipeline."""
    untyped: Any = pipeline
    pipe = untyped(ASR, model=str(speaker))
    audio = {"raw": noise(LONG_S), "sampling_rate": RATE}
    output: dict[str, Any] = pipe(audio, chunk_length_s=WINDOW_S, return_timestamps="word")
    return output


def post(server: Server, audio: bytes, **fields: Any) -> Any:
    return CLIENT.post(server.url + PATH, files={"file": ("a.wav", audio)}, data=fields)


@pytest.mark.parametrize("name", [CTC, WHISPER])
def test_model_of_both_settings_is_loaded_once(name: str) -> None:
    with serving_both(folder(name)) as server:
        assert CLIENT.get(f"{server.url}/ready").json()["transcription_model"] == folder(name).name
        models: Any = server.worker_client.models
        recognizer, transcriber = models["pipeline"].engine.runner, models["transcription"].engine
        assert transcriber.runner.model is recognizer.pipe.model


def test_both_endpoints_give_the_same_text(server: Server, tmp_path: Path) -> None:
    short = Path(saved(tmp_path, noise(3.0))).read_bytes()
    recognized = CLIENT.post(server.url, content=short).json()["text"]
    assert post(server, short).json()["text"] == recognized.strip()


def test_stream_has_the_text_of_the_pipeline(
    server: Server, audio: bytes, expected: dict[str, Any]
) -> None:
    *deltas, done = chunks(post(server, audio, stream="true"))
    assert len(deltas) > 1
    assert "".join(delta["delta"] for delta in deltas) == done["text"] == expected["text"].strip()
    assert done["usage"] == {"type": "duration", "seconds": LONG_S}
