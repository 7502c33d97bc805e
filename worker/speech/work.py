"""An item on its way through the speech engine, and what that asks of the two kinds of models: a
runner of windows, and of each recording what is heard and what is said.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from worker.transcription import TranscriptDelta, TranscriptionInput


class Audio(Protocol):
    """What is heard of a recording, read in pool threads."""

    seconds: float

    def measure(self) -> bool: ...
    def scan(self, wanted: Callable[[], bool]) -> None: ...
    def read(self, seek: int) -> None: ...
    def close(self) -> None: ...


class Text(Protocol):
    """What is said in a recording: transcript.py and ctc.py have the two kinds."""

    payload: TranscriptionInput
    frames: Any  # an Audio; each kind knows its own
    seek: int
    ended: bool

    def next(self) -> Any: ...
    def again(self, window: Any) -> bool: ...
    def take(self, window: Any, times: Any = None) -> list[TranscriptDelta]: ...


class Runner(Protocol):
    """Of windows, a row each. `prompt` is for those that are said again."""

    rows: int
    running: list[Any]

    def begin(self, windows: Sequence[Any]) -> None: ...
    def prompt(self, windows: Sequence[Any]) -> None: ...
    def step(self, windows: Sequence[Any]) -> None: ...
    def leave(self, window: Any) -> None: ...


# Of a window that has ended, while it has its row: what says when its tokens end, in a pool thread.
Align = Callable[[Any], Callable[[], Sequence[float]]]


@dataclass(eq=False, slots=True)
class Work:
    """An item that is being transcribed."""

    text: Text = field(init=False)  # once it is opened
    error: BaseException | None = None  # of that, or of its scan
    begun: bool = False
    window: Any = None  # the one that runs, or waits for the times of its words
    reading: Future[None] | None = None
    aligning: Future[Sequence[float]] | None = None
