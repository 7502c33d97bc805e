"""Measurements without a server, each in a process of its own: `measure(name, model)`.

bench_in_process.py {fill-mask,speech,encoder} MODEL    prints a number
"""

import io
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import environment

TEXTS, WARM_UPS = 44, 4
ENCODER_RUNS = 6


def measure(name: str, model: str) -> float:
    """Run one of MEASUREMENTS in a new process and return its number."""
    command = [sys.executable, __file__, name, model]
    process = subprocess.run(
        command, cwd=environment.ROOT, stdout=subprocess.PIPE, text=True, check=True
    )
    return float(process.stdout)


def fill_mask_ms(model: str) -> float:
    """Return the median milliseconds of a fill-mask pipeline, called in a loop."""
    from transformers import pipeline

    from server.commands.load_test.request_bodies import WORDS

    pipe = pipeline("fill-mask", model=model)
    rng, milliseconds = random.Random(1), []
    for _ in range(TEXTS):
        words = [rng.choice(WORDS.split()) for _ in range(rng.randint(4, 60))]
        words[rng.randrange(len(words))] = "[MASK]"
        started = time.perf_counter()
        pipe(" ".join(words))
        milliseconds.append((time.perf_counter() - started) * 1e3)
    return statistics.median(milliseconds[WARM_UPS:])


def speech_s(model: str) -> float:
    """Return the seconds in which the speech recognition pipeline transcribes all clips."""
    import soundfile
    from bench_speech import clips
    from transformers import pipeline

    pipe: Any = pipeline("automatic-speech-recognition", model=model, device="cpu")
    options = {"num_beams": 1, "language": "en", "task": "transcribe"}

    def transcribe(clip: bytes) -> None:
        samples, rate = soundfile.read(io.BytesIO(clip), dtype="float32")
        audio = {"raw": samples, "sampling_rate": rate}
        pipe(audio, return_timestamps=True, generate_kwargs=options)

    all_clips = clips()
    transcribe(all_clips[0])
    started = time.perf_counter()
    for clip in all_clips:
        transcribe(clip)
    return time.perf_counter() - started


def encoder_s(model: str) -> float:
    """Return the median seconds of a speech model's encoder for one window."""
    import torch

    from worker.speech.loading import SpeechOptions, load_speech
    from worker.speech.whisper import WhisperRunner

    engine = load_speech(SpeechOptions(model))
    assert isinstance(engine.runner, WhisperRunner)
    features = engine.run_example().features[None].to(engine.runner.model.dtype)
    seconds = []
    for _ in range(ENCODER_RUNS):
        started = time.perf_counter()
        with torch.inference_mode():
            engine.runner.encoder(features)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])


MEASUREMENTS: dict[str, Callable[[str], float]] = {
    "fill-mask": fill_mask_ms,
    "speech": speech_s,
    "encoder": encoder_s,
}

if __name__ == "__main__":
    print(MEASUREMENTS[sys.argv[1]](sys.argv[2]))
