"""What crosses between the event loop, the pool and the worker thread for transcriptions.

A recording is on disk, and is read window by window. What it says comes to the item's stream in
deltas, a segment each, as windows are finished; the item's future resolves to None after the last.
One transcript feeds all formats of an answer. No torch here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from worker.messages.deltas import TokenLogprob


@dataclass(frozen=True, slots=True)
class TranscriptionInput:
    """Errors name `file`, `language` or `prompt`, the fields of a request."""

    path: str  # of the recording, which stays there until the item is answered
    task: Literal["transcribe", "translate"] = "transcribe"
    language: str | None = None  # a code or a name; None: the model tells
    prompt: str = ""
    temperature: float = 0.0  # 0: rises by itself where an attempt looks wrong
    words: bool = False  # each with its times
    logprobs: bool = False


@dataclass(frozen=True, slots=True)
class Word:
    """`text` as it stands in the transcript, with the space before it. Times in seconds."""

    text: str
    start: float
    end: float
    probability: float


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of the transcript. Times in seconds from the recording's beginning.

    Texts of segments, joined, are the transcript. What a CTC model has no notion of is zero.
    """

    id: int
    seek: int  # where the window that it was heard in begins, in frames of 10 ms
    start: float
    end: float
    text: str
    tokens: tuple[int, ...]
    temperature: float = 0.0  # that it was sampled at
    avg_logprob: float = 0.0
    compression_ratio: float = 0.0  # of its text's bytes: much above 2, it repeats itself
    no_speech_prob: float = 0.0
    words: tuple[Word, ...] = ()  # if they were asked for


@dataclass(frozen=True, slots=True)
class TranscriptDelta:
    """What was added to a transcript: a segment, or none where nothing was said. There is at least
    one; `language` is a name such as `english`, or empty where the model has no notion of it."""

    text: str
    segment: Segment | None = None
    logprobs: Sequence[TokenLogprob] = ()  # of the tokens of text, if they were asked for
    language: str = ""
    seconds: float = 0.0  # that the whole recording lasts
