"""POST / and the endpoints of transcriptions with one model, which is loaded once for both."""

from pathlib import Path
from typing import Any

import httpx

from tests.serving import serving
from tests.speaking import CTC, noise, saved
from tests.tiny import folder
from worker.models import PipelineModel, SpeechModel

ASR = "automatic-speech-recognition"


def test_one_model_for_both_is_loaded_once_and_says_the_same(tmp_path: Path) -> None:
    model, sound = str(folder(CTC)), Path(saved(tmp_path, noise(3.0))).read_bytes()
    named: dict[str, Any] = {"pipeline_model": model, "transcription_model": model}
    with serving(pipeline_task=ASR, **named) as server:
        assert httpx.get(f"{server.url}/ready").json()["transcription_model"] == model
        models = server.engine.models
        recognizer, transcriber = models["pipeline"], models["transcription"]
        assert isinstance(recognizer, PipelineModel)
        assert isinstance(transcriber, SpeechModel)
        pipe, speaking = vars(recognizer.loaded)["pipe"], vars(transcriber.loaded)
        assert speaking["runner"].model is pipe.model
        recognized = httpx.post(server.url, content=sound).json()
        path = f"{server.url}/v1/audio/transcriptions"
        form = {"model": model, "response_format": "json"}
        transcribed = httpx.post(path, files={"file": ("a.wav", sound)}, data=form).json()
    assert transcribed["text"].strip() == recognized["text"].strip()
