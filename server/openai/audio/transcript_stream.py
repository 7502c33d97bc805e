"""What has been heard of a recording, on its way to the client.

    submit → first segment, or the refusal → more segments → the recording's end

Of answer_stream.py's kind, which keeps the time limits.
"""

from collections import deque

from server.answer_stream import AnswerStream
from server.engine import Engine
from server.http.request import Deadlines
from worker.transcription import TranscriptDelta, TranscriptionInput


class Heard(Exception):
    """All of it, to its end."""


class TranscriptStream(AnswerStream[TranscriptDelta]):
    """One recording's deltas; Heard is raised after the last."""

    def __init__(self, engine: Engine, payload: TranscriptionInput, deadlines: Deadlines) -> None:
        self._unread: deque[TranscriptDelta] = deque()
        super().__init__(engine, "transcription", [payload], deadlines)

    def push(self, delta: TranscriptDelta) -> None:
        self._unread.append(delta)
        self.arrival.set()

    def take(self) -> list[TranscriptDelta]:
        deltas = list(self._unread)
        self._unread.clear()
        return deltas

    def ended(self) -> BaseException:
        return Heard()
