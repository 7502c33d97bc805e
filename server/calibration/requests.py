"""Requests for what is served, none like another, as a calibration sends them."""

import io
import itertools
import json
import random
import wave
from collections.abc import Iterator
from dataclasses import dataclass

from PIL import Image

from server.engine import Engine
from server.settings import SettingsError
from worker.tasks import TASKS

WORDS = """
the a old new small river city morning engine letter music winter garden teacher window quiet
bright heavy simple open runs keeps finds moves answers over under beside before after and but
""".split()  # noqa: SIM905
SIDE = 320  # pixels of a picture, of which there are a few
SOUND_S, SOUND_HZ = 3, 16_000
JSON = "application/json"
BOUNDARY = "a-part-of-a-calibration"


@dataclass(frozen=True, slots=True)
class Requests:
    """`serves` is a model's name in the registry."""

    serves: str
    path: str
    media: str
    bodies: Iterator[bytes]


def requests_for(
    engine: Engine, serves: str, words: tuple[int, int], tokens: int, file: bytes | None
) -> Requests:
    """`words` of a text, at least and at most; `tokens` of a chat's answer. `file` is the body
    where one is given. SettingsError where a task needs one that nobody can guess."""
    rng = random.Random(0)
    texts = (" ".join(rng.choices(WORDS, k=rng.randint(*words))) for _ in itertools.count())
    if file is not None and serves == "pipeline":
        media = JSON if file.lstrip()[:1] == b"{" else "application/octet-stream"
        return Requests(serves, "/", media, itertools.repeat(file))
    if serves == "generation":
        asked = ({"messages": [{"role": "user", "content": text}]} for text in texts)
        bodies = (json.dumps({**each, "max_tokens": tokens}).encode() for each in asked)
        return Requests(serves, "/v1/chat/completions", JSON, bodies)
    if serves == "embedding":
        bodies = (json.dumps({"input": text}).encode() for text in texts)
        return Requests(serves, "/v1/embeddings", JSON, bodies)
    if serves == "transcription":
        sounds = [_form(_sound(n)) for n in range(4)] if file is None else [_form(file)]
        media = f"multipart/form-data; boundary={BOUNDARY}"
        return Requests(serves, "/v1/audio/transcriptions", media, itertools.cycle(sounds))
    if serves == "rerank":
        bodies = (
            json.dumps({"query": text, "documents": [next(texts)]}).encode() for text in texts
        )
        return Requests(serves, "/rerank", JSON, bodies)
    return _of_pipeline(engine, texts)


def _of_pipeline(engine: Engine, texts: Iterator[str]) -> Requests:
    info = engine.models["pipeline"].loaded.info
    task = TASKS[info.task]
    if task.required or task.kind == "json":
        raise SettingsError(f"--input FILE is needed: {info.task} takes JSON of its own")
    if task.kind == "text":
        bodies = (f"{text} {info.mask}".strip().encode() for text in texts)
        return Requests("pipeline", "/", "text/plain", bodies)
    made = [_picture(n) if task.kind == "image" else _sound(n) for n in range(4)]
    return Requests("pipeline", "/", "application/octet-stream", itertools.cycle(made))


def _picture(seed: int) -> bytes:
    file, pixels = io.BytesIO(), random.Random(seed).randbytes(3 * SIDE * SIDE)
    Image.frombytes("RGB", (SIDE, SIDE), pixels).save(file, "JPEG")
    return file.getvalue()


def _sound(seed: int) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(SOUND_HZ)
        sound.writeframes(random.Random(seed).randbytes(2 * SOUND_HZ * SOUND_S))
    return file.getvalue()


def _form(file: bytes) -> bytes:
    head = f'--{BOUNDARY}\r\ncontent-disposition: form-data; name="file"; filename="sound"\r\n\r\n'
    return head.encode() + file + f"\r\n--{BOUNDARY}--\r\n".encode()
