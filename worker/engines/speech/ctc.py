"""CTC models (wav2vec2 and others): one forward predicts a letter or a blank for each frame.

A recording is cut into overlapping windows. Of each overlap, either window keeps the half that it
has more context for, as transformers' pipeline does with `chunk_length_s`. Text is sent up to the
last whole word of a window. A frame, some 20 ms, has one prediction.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from batching.errors import InvalidInput, ItemFailed
from worker.engines.speech.interfaces import AudioReader, Decoder, SpeechRunner, Window
from worker.media.audio import Recording
from worker.messages.transcription import Segment, TranscriptDelta, TranscriptionInput, Word

WINDOW_S = 30.0
STRIDE_S = WINDOW_S / 6  # context on either side of a window, whose output is dropped


@dataclass(eq=False, slots=True)
class CtcWindow(Window):
    """`left_stride` and `right_stride`: how many of the `samples` are context."""

    inputs: dict[str, Tensor]  # [1, …] each
    samples: int
    left_stride: int
    right_stride: int
    is_last: bool
    ids: list[int] = field(default_factory=list)  # the most likely of each frame
    probabilities: list[float] = field(default_factory=list)  # of the ids


class CtcReader(AudioReader):
    """Windows of one recording, read one ahead. Positions are in samples."""

    def __init__(self, extractor: Any, samples_per_frame: int, recording: Recording) -> None:
        super().__init__(recording)
        self.extractor = extractor
        self._windows: dict[int, CtcWindow] = {}
        self.length, self.stride = (
            int(round(seconds * recording.rate / samples_per_frame) * samples_per_frame)
            for seconds in (WINDOW_S, STRIDE_S)
        )
        self.step = self.length - 2 * self.stride

    def read_ahead(self, seek: int) -> None:
        with self._reading:
            windows = {start: window for start, window in self._windows.items() if start >= seek}
            for start in (seek, seek + self.step):
                if start not in windows and (start == seek or not windows[seek].is_last):
                    windows[start] = self._read(start)
            self._windows = windows

    def window(self, seek: int) -> CtcWindow | None:
        """Return the window at sample `seek`; None if it is not read yet."""
        return self._windows.get(seek)

    def _read(self, start: int) -> CtcWindow:
        read = self._recording.window(start, self.length + 1)
        samples, is_last = read[: self.length], len(read) <= self.length
        if is_last:
            self._recording.close()
        inputs = extract(self.extractor, samples)
        left, right = (self.stride if start else 0), (0 if is_last else self.stride)
        return CtcWindow(inputs, len(samples), left, right, is_last)


def extract(extractor: Any, samples: NDArray[np.float32]) -> dict[str, Tensor]:
    """Return the model's inputs, [1, …] each, of samples at the extractor's rate."""
    options = {"return_tensors": "pt", "return_attention_mask": True}
    return dict(extractor(samples, sampling_rate=extractor.sampling_rate, **options))


class CtcDecoder(Decoder[CtcWindow]):
    """Raises InvalidInput for options that CTC models do not support. `seek` counts samples."""

    reader: CtcReader

    def __init__(
        self,
        payload: TranscriptionInput,
        reader: CtcReader,
        tokenizer: Any,
        seconds_per_frame: float,
    ) -> None:
        super().__init__(payload, reader)
        self.tokenizer = tokenizer
        self.seconds_per_frame = seconds_per_frame
        self.word_delimiter = getattr(tokenizer, "word_delimiter_token_id", None)
        check_options(payload, has_words=self.word_delimiter is not None)
        self._segments = 0
        # of frames that are not sent yet, the first of which is `_frame`
        self._ids: list[int] = []
        self._probabilities: list[float] = []
        self._frame = 0

    def next_window(self) -> CtcWindow | None:
        return self.reader.window(self.seek)

    def accept(
        self, window: CtcWindow, token_ends: Sequence[float] | None = None
    ) -> list[TranscriptDelta]:
        frames = len(window.ids)
        left, right = (
            round(stride / window.samples * frames)
            for stride in (window.left_stride, window.right_stride)
        )
        self._ids += window.ids[left : frames - right]
        self._probabilities += window.probabilities[left : frames - right]
        self.seek += self.reader.step
        self.finished = window.is_last
        end = len(self._ids)
        while end and not window.is_last and self._ids[end - 1] != self.word_delimiter:
            end -= 1  # after the last whole word
        delta = self._delta(end)
        self._frame += end
        del self._ids[:end], self._probabilities[:end]
        if delta is None and self.finished:
            delta = TranscriptDelta("", seconds=self.reader.seconds)
        return [delta] if delta else []

    def _delta(self, end: int) -> TranscriptDelta | None:
        """Return the segment of the first `end` frames to send; None if it has no text."""
        ids, start = self._ids[:end], self._frame
        has_words = self.word_delimiter is not None
        options = {"output_word_offsets": True} if has_words else {}
        decoded = self.tokenizer.decode(ids, skip_special_tokens=False, **options)
        text = str(decoded.text if has_words else decoded)
        if not text.strip():
            return None
        space = " " if self._segments else ""
        words = self._words(decoded.word_offsets, space) if has_words else ()
        segment = Segment(
            id=self._segments,
            seek=int(start * self.seconds_per_frame * 100),
            start=words[0].start if words else start * self.seconds_per_frame,
            end=words[-1].end if words else (start + end) * self.seconds_per_frame,
            text=space + text,
            tokens=(),
            words=words if self.payload.words else (),
        )
        self._segments += 1
        return TranscriptDelta(segment.text, segment, seconds=self.reader.seconds)

    def _words(self, offsets: Sequence[dict[str, Any]], space: str) -> tuple[Word, ...]:
        words: list[Word] = []
        for offset in offsets:
            # offsets are numpy's integers, which JSON does not encode
            first, end = int(offset["start_offset"]), int(offset["end_offset"])
            probabilities = self._probabilities[first:end]
            start_s, end_s = (
                (self._frame + frame) * self.seconds_per_frame for frame in (first, end)
            )
            text = (space if not words else " ") + offset["word"]
            words.append(Word(text, start_s, end_s, sum(probabilities) / len(probabilities)))
        return tuple(words)


def check_options(payload: TranscriptionInput, has_words: bool) -> None:
    """Raise InvalidInput for unsupported options. `has_words`: the model marks ends of words."""
    if payload.task != "transcribe":
        raise InvalidInput.at("model", "it does not translate")
    for name, value in (
        ("language", payload.language),
        ("prompt", payload.prompt),
        ("temperature", payload.temperature),
        ("include[]", payload.logprobs),
        ("timestamp_granularities[]", payload.words and not has_words),
    ):
        if value:
            raise InvalidInput.at(name, "the model does not support it (CTC)")


class CtcRunner(SpeechRunner[CtcWindow]):
    """Windows of equal length share a forward, which finishes them."""

    @torch.inference_mode()
    def start(self, windows: Sequence[CtcWindow]) -> None:
        self.running += [window for window in windows if window not in self.running]
        for _, group in groupby(windows, lambda window: window.samples):
            self._run(list(group))

    def remove(self, window: CtcWindow) -> None:
        if window in self.running:
            self.running.remove(window)

    def _run(self, windows: Sequence[CtcWindow]) -> None:
        model, names = self.model, windows[0].inputs
        inputs = {name: torch.cat([window.inputs[name] for window in windows]) for name in names}
        moved = {
            name: tensor.to(model.device, model.dtype if tensor.is_floating_point() else None)
            for name, tensor in inputs.items()
        }
        probabilities, ids = model(**moved).logits.float().softmax(-1).max(-1)
        if not bool(probabilities.isfinite().all()):
            raise ItemFailed("the model's output for this input is not a number")
        rows = zip(windows, ids.tolist(), probabilities.tolist(), strict=True)
        for window, window_ids, window_probabilities in rows:
            window.ids, window.probabilities = window_ids, window_probabilities
            window.finished = True
