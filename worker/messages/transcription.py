"""Messages of transcriptions and translations of audio.

A recording is a file that is read window by window. Its transcript arrives at the item's stream in
deltas of one segment, as windows are decoded; the item's future resolves to None after the last.
The deltas serve all response formats. No torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from worker.messages.deltas import TokenLogprob


@dataclass(frozen=True, slots=True)
class TranscriptionInput:
    """A recording and the options of a request. Errors name `file`, `language` or `prompt`."""

    path: str  # the file must exist until the item is resolved
    task: Literal["transcribe", "translate"] = "transcribe"
    language: str | None = None  # a code or a name; None: detected
    prompt: str = ""
    temperature: float = 0.0  # 0: raised where an attempt fails the quality checks
    words: bool = False  # word timestamps
    logprobs: bool = False


@dataclass(frozen=True, slots=True)
class Word:
    """A word with its timestamps in seconds. `text` includes the space before it."""

    text: str
    start: float
    end: float
    probability: float


@dataclass(frozen=True, slots=True)
class Segment:
    """A segment of the transcript. Times are seconds from the start of the recording.

    The joined texts of all segments are the transcript. Fields that a CTC model does not compute
    are zero.
    """

    id: int
    seek: int  # start of the window, in frames of 10 ms
    start: float
    end: float
    text: str
    tokens: tuple[int, ...]
    temperature: float = 0.0  # of the sampling
    avg_logprob: float = 0.0
    compression_ratio: float = 0.0  # of the text's bytes; well above 2 means repetition
    no_speech_prob: float = 0.0
    words: tuple[Word, ...] = ()  # if requested


@dataclass(frozen=True, slots=True)
class TranscriptDelta:
    """An addition to a transcript: a segment, or None for silence. Each item gets at least one."""

    text: str
    segment: Segment | None = None
    logprobs: Sequence[TokenLogprob] = ()  # of the text's tokens, if requested
    language: str = ""  # a name such as `english`; empty if the model does not detect it
    seconds: float = 0.0  # the length of the whole recording
