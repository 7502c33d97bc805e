"""The requests of a calibration: bodies for each kind of model, no text repeated."""

import io
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import numpy as np
import orjson
import soundfile
from PIL import Image

from server.commands.load_test.request_bodies import WORDS
from server.core.settings import SettingsError
from server.core.worker_client import WorkerClient
from worker.tasks import TASKS

IMAGE_SIDE = 320  # pixels
AUDIO_S, AUDIO_HZ = 3, 16_000
FILES = 4  # different images or recordings, sent in turn
JSON, BYTES = "application/json", "application/octet-stream"
FORM = "multipart/form-data; boundary=a-part-of-a-calibration"


@dataclass(frozen=True, slots=True)
class RequestGenerator:
    """Requests to one model of the registry."""

    registry_name: str
    path: str
    media: str
    bodies: Iterator[bytes]


def requests_for(
    worker_client: WorkerClient,
    registry_name: str,
    words: tuple[int, int],
    tokens: int,
    file: bytes | None,
) -> RequestGenerator:
    """Return requests for one of the models.

    `words`: fewest and most words of a text; `tokens`: length of a chat's response; `file`: the
    body, if given. Raises SettingsError where the task needs a file."""
    rng, vocabulary = random.Random(0), WORDS.split()
    texts = (" ".join(rng.choices(vocabulary, k=rng.randint(*words))) for _ in itertools.count())
    if registry_name == "pipeline":
        return _pipeline_requests(worker_client, texts, file)
    if registry_name == "transcription":
        files = [file] if file is not None else [_audio_file(seed) for seed in range(FILES)]
        bodies = itertools.cycle([_form(content) for content in files])
        return RequestGenerator(registry_name, "/v1/audio/transcriptions", FORM, bodies)
    path, documents = {
        "generation": (
            "/v1/chat/completions",
            ({"messages": [{"role": "user", "content": t}], "max_tokens": tokens} for t in texts),
        ),
        "embedding": ("/v1/embeddings", ({"input": text} for text in texts)),
        "rerank": ("/rerank", ({"query": text, "documents": [next(texts)]} for text in texts)),
    }[registry_name]
    return RequestGenerator(registry_name, path, JSON, map(orjson.dumps, documents))


def _pipeline_requests(
    worker_client: WorkerClient, texts: Iterator[str], file: bytes | None
) -> RequestGenerator:
    info = worker_client.models["pipeline"].engine.info
    task, media = TASKS[info.task], BYTES
    bodies: Iterator[bytes]
    if file is not None:
        bodies, media = itertools.repeat(file), JSON if file.lstrip()[:1] == b"{" else BYTES
    elif task.required or task.kind == "json":
        raise SettingsError(f"--input FILE is required: the task {info.task} takes JSON")
    elif task.kind == "text":
        bodies, media = (f"{text} {info.mask}".strip().encode() for text in texts), "text/plain"
    else:
        make_file = _image_file if task.kind == "image" else _audio_file
        bodies = itertools.cycle([make_file(seed) for seed in range(FILES)])
    return RequestGenerator("pipeline", "/", media, bodies)


def _image_file(seed: int) -> bytes:
    file, pixels = io.BytesIO(), random.Random(seed).randbytes(3 * IMAGE_SIDE * IMAGE_SIDE)
    Image.frombytes("RGB", (IMAGE_SIDE, IMAGE_SIDE), pixels).save(file, "JPEG")
    return file.getvalue()


def _audio_file(seed: int) -> bytes:
    file, noise = io.BytesIO(), np.random.default_rng(seed).uniform(-1, 1, AUDIO_S * AUDIO_HZ)
    soundfile.write(file, noise, AUDIO_HZ, format="WAV")
    return file.getvalue()


def _form(file: bytes) -> bytes:
    media, files = {"content-type": FORM}, {"file": ("sound", file)}
    return httpx.Request("POST", "http://localhost", headers=media, files=files).read()
