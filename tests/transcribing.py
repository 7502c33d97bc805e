"""Tiny speech engines and recordings for them."""

import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch
from numpy.typing import NDArray

from batching.request_queue import WorkItem
from tests.tiny import BUILDERS
from worker.engines.speech.engine import SpeechEngine, SpeechItem
from worker.engines.speech.loading import SpeechCheckpoint, SpeechOptions, new_engine
from worker.messages.protocol import Pending
from worker.messages.transcription import TranscriptDelta, TranscriptionInput

RATE = 16000
WHISPER, CTC = "whisper", "wav2vec2-ctc"
# Thresholds that no attempt exceeds: output of random models exceeds the default ones.
LENIENT = {
    "compression_ratio_threshold": 1e9,
    "logprob_threshold": -1e9,
    "no_speech_threshold": 1.0,
}


@cache
def checkpoint(name: str) -> SpeechCheckpoint:
    torch.manual_seed(0)
    model, *rest = BUILDERS[name]()
    tokenizer, extractor = sorted(rest, key=lambda part: hasattr(part, "sampling_rate"))
    model.eval()
    if name == WHISPER:
        for key, value in LENIENT.items():
            setattr(model.generation_config, key, value)
    return SpeechCheckpoint(model, tokenizer, extractor)


def new_speech_engine(name: str = WHISPER, **settings: Any) -> SpeechEngine[Any]:
    return new_engine(checkpoint(name), SpeechOptions("tiny", **settings))


def noise(seconds: float, seed: int = 0) -> NDArray[np.float32]:
    """Samples whose pitch and loudness change twice a second."""
    generator = np.random.default_rng(seed)
    count = int(seconds * RATE)
    pieces = generator.uniform((100, 0.02), (3000, 0.5), (count // (RATE // 2) + 1, 2))
    pitch, loudness = pieces.repeat(RATE // 2, 0)[:count].T
    tone = np.sin(2 * np.pi * np.cumsum(pitch) / RATE)
    samples = loudness * (tone + generator.normal(size=count) / 4)
    single: NDArray[np.float32] = samples.astype("float32")
    return single


def saved(folder: Path, samples: NDArray[np.float32], name: str = "sound.wav") -> str:
    path = folder / name
    soundfile.write(path, samples, RATE, subtype="FLOAT")
    return str(path)


def prepared(engine: SpeechEngine[Any], payload: TranscriptionInput) -> SpeechItem[Any]:
    """An item, prepared as pool threads do it."""
    item: SpeechItem[Any] = WorkItem(payload, float("inf"), 0.0)
    while True:
        try:
            engine.prepare(item)
            return item
        except Pending as pending:
            ready = threading.Event()
            pending.then(item.owner, lambda: True, ready.set)
            assert ready.wait(60)


def transcribed(
    engine: SpeechEngine[Any], payloads: Sequence[TranscriptionInput]
) -> list[list[TranscriptDelta]]:
    """The engine's deltas for concurrent recordings."""
    items = [prepared(engine, payload) for payload in payloads]
    deltas: dict[WorkItem, list[TranscriptDelta]] = {item: [] for item in items}
    for item in items:
        engine.add(item)
    while engine.busy:
        outcome = engine.step()
        for receiver, delta in outcome.deltas:
            deltas[receiver].append(delta)
        for _, error in outcome.done:
            if error:
                raise error
    return list(deltas.values())


def tokens_of(deltas: Sequence[TranscriptDelta]) -> list[int]:
    return [token for delta in deltas if delta.segment for token in delta.segment.tokens]


def transcript(path: str, **options: Any) -> list[TranscriptDelta]:
    """The deltas of a recording alone, from a new engine of Whisper."""
    [deltas] = transcribed(new_speech_engine(), [TranscriptionInput(path, **options)])
    return deltas
