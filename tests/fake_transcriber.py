"""A transcriber without a model: reads the recording, and says scripted segments, one a step.

A request is scripted by its prompt:

    "refused"      prepare raises InvalidInput
    "bad"          the first step fails the item; "bad later": the third does
    "hang"         never says anything
    "silence"      says nothing, to the end
    anything else  SAID

Steps wait for `gate`.
"""

import math
import threading
from dataclasses import dataclass, field
from typing import Any

from batching.errors import ClientGone, InvalidInput, ItemFailed
from batching.request_queue import WorkItem
from worker.media.audio import Recording
from worker.messages.deltas import TokenLogprob
from worker.messages.protocol import ModelInfo, StepOutcome, StepReport
from worker.messages.transcription import Segment, TranscriptDelta, TranscriptionInput, Word

RATE = 16_000
LANGUAGES = {"de": "german", "en": "english"}
SAID = [[" Good", " morning", ","], [" <Jürgen>", " &", " co", "."], [" Three", " -->", " four"]]


@dataclass
class Running:
    item: WorkItem
    seconds: float
    steps: int = 0


@dataclass
class FakeTranscriber:
    info: ModelInfo = field(
        default=ModelInfo("automatic-speech-recognition", "fake", "cpu", "float32", 0, "continuous")
    )
    running: list[Running] = field(default_factory=list)
    payloads: list[TranscriptionInput] = field(default_factory=list)
    dropped: int = 0  # whose clients had left
    max_s: float = 7200.0
    text_model: None = None

    def __post_init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()

    # ── in pool threads ──

    def prepare(self, item: WorkItem) -> None:
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

    def add(self, item: WorkItem) -> None:
        self.payloads.append(item.payload)
        self.running.append(Running(item, item.prepared))

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
        for each in list(self.running):
            if not each.item.open:
                self.dropped += 1
                self._end(each, ClientGone("the client has gone"), outcome)
                continue
            each.steps += 1
            self._advance(each, outcome)
        if not outcome.deltas:
            threading.Event().wait(0.002)  # there is always a step to do: not in a hot loop
        return outcome

    def _advance(self, each: Running, outcome: StepOutcome) -> None:
        payload: TranscriptionInput = each.item.payload
        n, prompt = each.steps - 1, payload.prompt
        if prompt == "hang":
            return
        if prompt.startswith("bad") and n == 2 * (prompt == "bad later"):
            self._end(each, ItemFailed("the model failed on this input"), outcome)
            return
        if prompt == "silence":
            delta = TranscriptDelta("", None, (), "en", each.seconds)
        else:
            delta = said(n, payload, each.seconds)
        outcome.deltas.append((each.item, delta))
        if prompt == "silence" or n == len(SAID) - 1:
            self._end(each, None, outcome)

    def _end(self, each: Running, error: Exception | None, outcome: StepOutcome) -> None:
        self.running.remove(each)
        outcome.done.append((each.item, error))

    def clear(self) -> list[WorkItem]:
        items = [each.item for each in self.running]
        self.running.clear()
        return items

    def close(self) -> None: ...


def said(n: int, payload: TranscriptionInput, seconds: float) -> TranscriptDelta:
    """The n-th segment: a second long, a word every quarter of it."""
    words = SAID[n]
    text = "".join(words)
    timed = [Word(word, n + k / 4, n + k / 4 + 0.2, 0.9) for k, word in enumerate(words)]
    scored = [
        TokenLogprob(k, word, word.encode(), math.log(0.9), (), 1) for k, word in enumerate(words)
    ]
    segment = Segment(
        n, 0, float(n), n + 1.0, text, (n, n + 1), words=tuple(timed) if payload.words else ()
    )
    logprobs = scored if payload.logprobs else []
    return TranscriptDelta(text, segment, logprobs, LANGUAGES[payload.language or "en"], seconds)
