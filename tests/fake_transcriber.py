"""A transcriber without a model: reads the recording and sends scripted segments, one per step.

The prompt of a request selects the script:

    "refused"      prepare raises InvalidInput
    "bad"          the first step fails the item; "bad later": the third does
    "hang"         the transcript never starts
    "silence"      the transcript is empty
    anything else  SAID

Steps wait for `gate`.
"""

import math
from typing import Any

from batching.errors import InvalidInput, ItemFailed
from batching.request_queue import WorkItem
from tests.fake_generator import FakeGenerator, Running
from worker.media.audio import Recording
from worker.messages.deltas import TokenLogprob
from worker.messages.protocol import ModelInfo, StepOutcome
from worker.messages.transcription import Segment, TranscriptDelta, TranscriptionInput, Word

RATE = 16_000
LANGUAGES = {"de": "german", "en": "english"}
SAID = [[" Good", " morning", ","], [" <Jürgen>", " &", " co", "."], [" Three", " -->", " four"]]


class FakeTranscriber(FakeGenerator):
    info = ModelInfo("automatic-speech-recognition", "fake", "cpu", "float32", 0, "continuous")
    text_model: Any = None

    def __init__(self, max_s: float = 7200.0) -> None:
        super().__init__()
        self.max_s = max_s

    def prepare(self, item: WorkItem[Any, Any]) -> None:
        payload: TranscriptionInput = item.payload
        if payload.prompt == "refused":
            raise InvalidInput.at("prompt", "it is refused")
        with Recording(payload.path, RATE, self.max_s) as recording:
            start = 0
            while len(window := recording.window(start, 30 * RATE)):
                start += len(window)
            item.prepared = recording.seconds

    def add(self, item: WorkItem[Any, Any]) -> None:
        self.payloads.append(item.payload)
        self.running.append(Running(item, item.payload.prompt))

    def _advance(self, request: Running, outcome: StepOutcome) -> None:
        payload: Any = request.item.payload
        seconds: Any = request.item.prepared
        n, prompt = request.steps - 1, request.prompt
        if prompt == "hang":
            return
        if prompt.startswith("bad") and n == 2 * (prompt == "bad later"):
            self.end(request, ItemFailed("the model failed on this input"), outcome)
            return
        if prompt == "silence":
            delta = TranscriptDelta("", None, (), "en", seconds)
        else:
            delta = scripted_delta(n, payload, seconds)
        outcome.deltas.append((request.item, delta))
        if prompt == "silence" or n == len(SAID) - 1:
            self.end(request, None, outcome)


def scripted_delta(n: int, payload: TranscriptionInput, seconds: float) -> TranscriptDelta:
    """The n-th segment: one second long, a word each quarter of a second. Times are inexact, as
    those of frames are."""
    words = SAID[n]
    text = "".join(words)
    start = n + 1e-12
    timed = [Word(word, start + k / 4, start + k / 4 + 0.2, 0.9) for k, word in enumerate(words)]
    scored = [
        TokenLogprob(k, word, word.encode(), math.log(0.9), (), 1) for k, word in enumerate(words)
    ]
    segment = Segment(
        n, 0, start, start + 1, text, (n, n + 1), words=tuple(timed) if payload.words else ()
    )
    logprobs = scored if payload.logprobs else []
    return TranscriptDelta(text, segment, logprobs, LANGUAGES[payload.language or "en"], seconds)
