"""Tiny speech engines, recordings for them, and what transformers itself says to those."""

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
from worker.messages.protocol import Pending
from worker.messages.transcription import TranscriptDelta, TranscriptionInput
from worker.speech.engine import SpeechEngine
from worker.speech.loading import Speech, SpeechOptions, speech_engine

RATE = 16000
WHISPER, CTC = "whisper", "wav2vec2-ctc"
# Thresholds that no attempt exceeds: what random models say looks wrong by any other.
LENIENT = {
    "compression_ratio_threshold": 1e9,
    "logprob_threshold": -1e9,
    "no_speech_threshold": 1.0,
}


@cache
def speech(name: str) -> Speech:
    torch.manual_seed(0)
    model, *rest = BUILDERS[name]()
    tokenizer, extractor = sorted(rest, key=lambda each: hasattr(each, "sampling_rate"))
    model.eval()
    if name == WHISPER:
        for key, value in LENIENT.items():
            setattr(model.generation_config, key, value)
    return Speech(model, tokenizer, extractor)


def engine(name: str = WHISPER, **settings: Any) -> SpeechEngine:
    return speech_engine(speech(name), SpeechOptions("tiny", **settings))


def noise(seconds: float, seed: int = 0) -> NDArray[np.float32]:
    """That changes twice a second, in pitch and in loudness."""
    generator = np.random.default_rng(seed)
    count = int(seconds * RATE)
    pieces = generator.uniform((100, 0.02), (3000, 0.5), (count // (RATE // 2) + 1, 2))
    pitch, loud = pieces.repeat(RATE // 2, 0)[:count].T
    tone = np.sin(2 * np.pi * np.cumsum(pitch) / RATE)
    made: NDArray[np.float32] = (loud * (tone + generator.normal(size=count) / 4)).astype("float32")
    return made


def saved(folder: Path, samples: NDArray[np.float32], name: str = "sound.wav") -> str:
    path = folder / name
    soundfile.write(path, samples, RATE, subtype="FLOAT")
    return str(path)


def accepted(engine: SpeechEngine, payload: TranscriptionInput) -> WorkItem:
    """Prepared as pool threads do it."""
    item = WorkItem(payload, float("inf"), 0.0)
    while True:
        try:
            engine.prepare(item)
            return item
        except Pending as pending:
            ready = threading.Event()
            pending.then(lambda: True, ready.set)
            assert ready.wait(60)


def transcribed(
    engine: SpeechEngine, payloads: Sequence[TranscriptionInput]
) -> list[list[TranscriptDelta]]:
    """What the engine says of recordings that are there at the same time."""
    items = [accepted(engine, payload) for payload in payloads]
    deltas: dict[WorkItem, list[TranscriptDelta]] = {item: [] for item in items}
    for item in items:
        engine.add(item)
    while engine.busy:
        outcome = engine.step()
        for item, delta in outcome.deltas:
            deltas[item].append(delta)
        for _, error in outcome.done:
            if error:
                raise error
    return list(deltas.values())


def tokens_of(deltas: Sequence[TranscriptDelta]) -> list[int]:
    return [token for delta in deltas if delta.segment for token in delta.segment.tokens]
