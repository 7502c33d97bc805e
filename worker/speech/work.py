"""An item on its way through the speech engine, and what that asks of the two kinds of models: a
runner of windows, and of each recording what is heard and what is said.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from worker.media.audio import Recording
from worker.messages.transcription import TranscriptDelta, TranscriptionInput


class Audio(ABC):
    """What is heard of a recording, read in pool threads, one of them at a time."""

    def __init__(self, recording: Recording) -> None:
        """InvalidInput from any method that reads the recording."""
        self._recording = recording
        self._reading = threading.Lock()

    @property
    def seconds(self) -> float:
        """The recording's, by its header until it has been read."""
        return self._recording.seconds

    def measure(self) -> bool:
        """Whether all is known now that windows are made by; if not, `scan`."""
        self.read(0)
        return True

    def scan(self, wanted: Callable[[], bool]) -> None:  # noqa: B027  # for what is not known yet
        """Read all of it, as long as that is wanted."""

    @abstractmethod
    def read(self, seek: int) -> None:
        """What a window from `seek` on needs, and some more; what is before is dropped."""

    def close(self) -> None:
        with self._reading:
            self._recording.close()


class Decoder(ABC):
    """What is said in a recording. All but the making of it is for the worker's thread."""

    def __init__(self, payload: TranscriptionInput, frames: Any) -> None:
        """`frames`: its Audio; each kind knows its own."""
        self.payload = payload
        self.frames = frames
        self.seek = 0
        self.ended = False

    @abstractmethod
    def next(self) -> Any:
        """The next window; None if it is not read yet."""

    def again(self, window: Any) -> bool:
        """Whether a window that has ended is to be said again; then it is made ready for that."""
        return False

    @abstractmethod
    def take(self, window: Any, times: Any = None) -> list[TranscriptDelta]:
        """What a window adds, and on to the next one. `times` are the ends of its tokens in
        seconds of the window, if words are wanted and the text does not know of itself."""


class SpeechRunner(ABC):
    """Of windows, a row each: `rows` at most. On the worker's thread."""

    def __init__(self, model: Any, rows: int) -> None:
        self.model = model
        self.rows = rows
        self.running: list[Any] = []

    @abstractmethod
    def begin(self, windows: Sequence[Any]) -> None:
        """Windows join; each is heard, and its first token said, or all."""

    def step(self, windows: Sequence[Any]) -> None:  # noqa: B027  # for those who say one by one
        """A token more of each; the first, where a window is said again."""

    @abstractmethod
    def leave(self, window: Any) -> None:
        """Its row is free, if it has one."""


# Of a window that has ended, while it has its row: what says when its tokens end, in a pool thread.
Align = Callable[[Any], Callable[[], Sequence[float]]]


@dataclass(eq=False, slots=True)
class Work:
    """An item that is being transcribed."""

    audio: Audio | None = None  # once it is opened
    text: Decoder = field(init=False)
    error: BaseException | None = None  # of that, or of its scan
    begun: bool = False
    window: Any = None  # the one that runs, or waits for the times of its words
    reading: Future[None] | None = None
    aligning: Future[Sequence[float]] | None = None
