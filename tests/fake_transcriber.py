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
import threading
from dataclasses import dataclass, field
from typing import Any, Literal

from batching.errors import ClientGone, InvalidInput, ItemFailed
from batching.request_queue import WorkItem
from batching.step_times import StepTimes
from worker.media.audio import Recording
from worker.messages.deltas import TokenLogprob
from worker.messages.protocol import (
    ALONE,
    Fallback,
    ModelInfo,
    OtherModels,
    StepOutcome,
    StepReport,
)
from worker.messages.transcription import Segment, TranscriptDelta, TranscriptionInput, Word

RATE = 16_000
LANGUAGES = {"de": "german", "en": "english"}
SAID = [[" Good", " morning", ","], [" <Jürgen>", " &", " co", "."], [" Three", " -->", " four"]]


@dataclass
class RunningItem:
    item: WorkItem[TranscriptionInput, float]
    seconds: float
    steps: int = 0


@dataclass
class FakeTranscriber:
    info: ModelInfo = field(
        default=ModelInfo("automatic-speech-recognition", "fake", "cpu", "float32", 0, "continuous")
    )
    running: list[RunningItem] = field(default_factory=list)
    payloads: list[TranscriptionInput] = field(default_factory=list)
    dropped: int = 0  # items that were cancelled
    max_s: float = 7200.0
    text_model: None = None
    others: OtherModels = ALONE
    compile_state: Literal["running", "done", "off"] = "off"
    stage = ""
    fallbacks: tuple[Fallback, ...] = ()
    times: StepTimes = field(default_factory=StepTimes)

    def __post_init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()

    # ── in pool threads ──

    def prepare(self, item: WorkItem[Any, Any]) -> None:
        payload: TranscriptionInput = item.payload
        if payload.prompt == "refused":
            raise InvalidInput.at("prompt", "it is refused")
        with Recording(payload.path, RATE, self.max_s) as recording:
            start = 0
            while len(window := recording.window(start, 30 * RATE)):
                start += len(window)
            item.prepared = recording.seconds

    # ── on the worker's thread ──

    def warm_up(self) -> None: ...

    def add(self, item: WorkItem[Any, Any]) -> None:
        self.payloads.append(item.payload)
        self.running.append(RunningItem(item, item.prepared))

    @property
    def busy(self) -> bool:
        return bool(self.running)

    def due_at(self, idle_since: float) -> float | None:
        return idle_since if self.running else None

    def finish(self, item: WorkItem, raw: Any) -> Any:
        raise NotImplementedError

    def step(self, idle_since: float = 0.0) -> StepOutcome:
        assert self.gate.wait(60)
        outcome = StepOutcome(StepReport(admitted=1, running=len(self.running)))
        for running in list(self.running):
            if not running.item.open:
                self.dropped += 1
                self._end(running, ClientGone("the client has gone"), outcome)
                continue
            running.steps += 1
            self._advance(running, outcome)
        if not outcome.deltas:
            threading.Event().wait(0.002)  # the item is due again at once: avoid a busy loop
        return outcome

    def _advance(self, running: RunningItem, outcome: StepOutcome) -> None:
        payload = running.item.payload
        n, prompt = running.steps - 1, payload.prompt
        if prompt == "hang":
            return
        if prompt.startswith("bad") and n == 2 * (prompt == "bad later"):
            self._end(running, ItemFailed("the model failed on this input"), outcome)
            return
        if prompt == "silence":
            delta = TranscriptDelta("", None, (), "en", running.seconds)
        else:
            delta = scripted_delta(n, payload, running.seconds)
        outcome.deltas.append((running.item, delta))
        if prompt == "silence" or n == len(SAID) - 1:
            self._end(running, None, outcome)

    def _end(self, running: RunningItem, error: Exception | None, outcome: StepOutcome) -> None:
        self.running.remove(running)
        outcome.done.append((running.item, error))

    def clear(self) -> list[WorkItem]:
        items: list[WorkItem] = [running.item for running in self.running]
        self.running.clear()
        return items

    def close(self) -> None: ...


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
