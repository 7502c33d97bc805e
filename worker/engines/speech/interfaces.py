"""The parts of the speech engine that differ between kinds of models.

    AudioReader → Decoder.next_window → SpeechRunner → Decoder.accept → TranscriptDelta

A reader reads a recording ahead in pool threads. A decoder chooses the windows of a recording and
makes segments of their results. A runner computes windows of many recordings together. Whisper's
are in log_mel.py, transcript.py and whisper.py, those of CTC models in ctc.py.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from batching.request_queue import WorkItem
from worker.media.audio import Recording
from worker.messages.protocol import IsWanted
from worker.messages.transcription import TranscriptDelta, TranscriptionInput


@dataclass(eq=False, slots=True, kw_only=True)
class Window:
    """A stretch of a recording that a model computes at once."""

    item: WorkItem | None = None  # of the recording; None: a warm-up
    finished: bool = False  # the runner has nothing more to compute


W = TypeVar("W", bound=Window)

# Called on the worker's thread with a finished window that still has its row. The function that it
# returns runs in a pool thread and gives the end of each token in seconds of the window.
Align = Callable[[W], Callable[[], Sequence[float]]]


class AudioReader(ABC):
    """Reads a recording in pool threads, one at a time. Methods that read raise InvalidInput."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._reading = threading.Lock()

    @property
    def seconds(self) -> float:
        """The recording's duration; that of its header until it has been read to the end."""
        return self._recording.seconds

    def read_if_short(self) -> bool:
        """Read the first windows. Return False if `scan` is needed before."""
        self.read_ahead(0)
        return True

    def scan(self, is_wanted: IsWanted) -> None:  # noqa: B027  # optional
        """Read the recording to its end while `is_wanted()`."""

    @abstractmethod
    def read_ahead(self, seek: int) -> None:
        """Read the window at `seek` and the one after, and drop everything before `seek`."""

    def close(self) -> None:
        with self._reading:
            self._recording.close()


class Decoder(ABC, Generic[W]):
    """The transcript of one recording. Constructed in a pool thread; methods run on the worker's.

    `seek`: where the next window starts, in units of the reader. `finished`: no window follows.
    """

    def __init__(self, payload: TranscriptionInput, reader: AudioReader) -> None:
        self.payload = payload
        self.reader = reader
        self.seek = 0
        self.finished = False

    @abstractmethod
    def next_window(self) -> W | None:
        """Return the window at `seek`; None if it is not read yet."""

    def retry(self, window: W) -> bool:
        """Return whether a finished window is computed again; if so, reset it."""
        return False

    @abstractmethod
    def accept(self, window: W, token_ends: Sequence[float] | None = None) -> list[TranscriptDelta]:
        """Return what a finished window adds to the transcript, and advance `seek`. `token_ends`:
        in seconds of the window, if words are requested and an `Align` computes them."""


class SpeechRunner(ABC, Generic[W]):
    """Computes windows on the worker's thread. `running`: at most `max_rows` of them."""

    def __init__(self, model: Any, max_rows: int) -> None:
        self.model = model
        self.max_rows = max_rows
        self.running: list[W] = []

    @abstractmethod
    def start(self, windows: Sequence[W]) -> None:
        """Add windows, encode them and generate their first token, or all of them."""

    def step(self, windows: Sequence[W]) -> None:  # optional
        """Generate the next token of each window; of one that is retried, the first."""

    @abstractmethod
    def remove(self, window: W) -> None:
        """Free the window's row, if it has one."""
