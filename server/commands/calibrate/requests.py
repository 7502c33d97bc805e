"""Requests for what is served, none like another, as a calibration sends them."""

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

from server.core.settings import SettingsError
from server.core.worker_client import WorkerClient
from worker.tasks import TASKS

WORDS = """
the a old new small river city morning engine letter music winter garden teacher window quiet
bright heavy simple open runs keeps finds moves answers over under beside before after and but
""".split()  # noqa: SIM905
SIDE = 320  # pixels of a picture, of which there are a few
SOUND_S, SOUND_HZ = 3, 16_000
JSON, BYTES = "application/json", "application/octet-stream"
FORM = "multipart/form-data; boundary=a-part-of-a-calibration"


@dataclass(frozen=True, slots=True)
class RequestGenerator:
    """`serves` is a model's name in the registry."""

    serves: str
    path: str
    media: str
    bodies: Iterator[bytes]


def requests_for(
    worker_client: WorkerClient,
    serves: str,
    words: tuple[int, int],
    tokens: int,
    file: bytes | None,
) -> RequestGenerator:
    """`words` of a text, at least and at most; `tokens` of a chat's answer. `file` is the body
    where one is given. SettingsError where a task needs one that nobody can guess."""
    rng = random.Random(0)
    texts = (" ".join(rng.choices(WORDS, k=rng.randint(*words))) for _ in itertools.count())
    if serves == "pipeline":
        return _of_pipeline(worker_client, texts, file)
    if serves == "transcription":
        files = [file] if file is not None else [_sound(n) for n in range(4)]
        bodies = itertools.cycle([_form(each) for each in files])
        return RequestGenerator(serves, "/v1/audio/transcriptions", FORM, bodies)
    path, documents = {
        "generation": (
            "/v1/chat/completions",
            ({"messages": [{"role": "user", "content": t}], "max_tokens": tokens} for t in texts),
        ),
        "embedding": ("/v1/embeddings", ({"input": text} for text in texts)),
        "rerank": ("/rerank", ({"query": text, "documents": [next(texts)]} for text in texts)),
    }[serves]
    return RequestGenerator(serves, path, JSON, map(orjson.dumps, documents))


def _of_pipeline(
    worker_client: WorkerClient, texts: Iterator[str], file: bytes | None
) -> RequestGenerator:
    info = worker_client.models["pipeline"].loaded.info
    task, media = TASKS[info.task], BYTES
    bodies: Iterator[bytes]
    if file is not None:
        bodies, media = itertools.repeat(file), JSON if file.lstrip()[:1] == b"{" else BYTES
    elif task.required or task.kind == "json":
        raise SettingsError(f"--input FILE is needed: {info.task} takes JSON of its own")
    elif task.kind == "text":
        bodies, media = (f"{text} {info.mask}".strip().encode() for text in texts), "text/plain"
    else:
        make = _picture if task.kind == "image" else _sound
        bodies = itertools.cycle([make(n) for n in range(4)])
    return RequestGenerator("pipeline", "/", media, bodies)


def _picture(seed: int) -> bytes:
    file, pixels = io.BytesIO(), random.Random(seed).randbytes(3 * SIDE * SIDE)
    Image.frombytes("RGB", (SIDE, SIDE), pixels).save(file, "JPEG")
    return file.getvalue()


def _sound(seed: int) -> bytes:
    file, noise = io.BytesIO(), np.random.default_rng(seed).uniform(-1, 1, SOUND_S * SOUND_HZ)
    soundfile.write(file, noise, SOUND_HZ, format="WAV")
    return file.getvalue()


def _form(file: bytes) -> bytes:
    media, files = {"content-type": FORM}, {"file": ("sound", file)}
    return httpx.Request("POST", "http://localhost", headers=media, files=files).read()
