"""Speech models that say a letter, or none, for each moment (CTC): wav2vec2 and its like.

A recording is cut into chunks that overlap; of each, what lies in the middle of an overlap and
beyond is left to its neighbour, as transformers' pipeline does with `chunk_length_s`. A text is
sent as far as its last whole word. One forward is all that a window needs.
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
from worker.media.audio import Recording
from worker.messages.transcription import Segment, TranscriptDelta, TranscriptionInput, Word
from worker.speech.work import Audio, Decoder, SpeechRunner

CHUNK_S = 30.0
# Of a chunk, so much on either side is heard for the sake of the rest.
STRIDE_S = CHUNK_S / 6


@dataclass(eq=False, slots=True)
class AudioChunk:
    """A window; `left` and `right` of its `samples` are its neighbours'."""

    inputs: dict[str, Tensor]  # [1, …] each
    samples: int
    left: int
    right: int
    last: bool
    said: list[int] = field(default_factory=list)  # the likeliest of each moment
    probabilities: list[float] = field(default_factory=list)
    ended: bool = False
    owner: Any = None  # the item that it is of


class AudioChunks(Audio):
    """Of one recording, read a chunk ahead."""

    def __init__(self, extractor: Any, moment: int, recording: Recording) -> None:
        """`moment`: samples for which a letter is said."""
        super().__init__(recording)
        self.extractor = extractor
        self._kept: dict[int, AudioChunk] = {}
        samples = [int(round(s * recording.rate / moment) * moment) for s in (CHUNK_S, STRIDE_S)]
        self.length, self.stride = samples
        self.step = self.length - 2 * self.stride

    def read(self, seek: int) -> None:
        with self._reading:
            kept = {at: chunk for at, chunk in self._kept.items() if at >= seek}
            for at in (seek, seek + self.step):
                if at not in kept and (at == seek or not kept[seek].last):
                    kept[at] = self._chunk(at)
            self._kept = kept

    def chunk(self, seek: int) -> AudioChunk | None:
        """From sample `seek` on; None: it is not read yet."""
        return self._kept.get(seek)

    def _chunk(self, at: int) -> AudioChunk:
        read = self._recording.window(at, self.length + 1)
        samples, last = read[: self.length], len(read) <= self.length
        if last:
            self._recording.close()
        inputs = inputs_of(self.extractor, samples)
        left, right = (self.stride if at else 0), (0 if last else self.stride)
        return AudioChunk(inputs, len(samples), left, right, last)


def inputs_of(extractor: Any, samples: NDArray[np.float32]) -> dict[str, Tensor]:
    """Of samples at the extractor's rate, what the model takes: [1, …] each."""
    asked = {"return_tensors": "pt", "return_attention_mask": True}
    return dict(extractor(samples, sampling_rate=extractor.sampling_rate, **asked))


class CtcDecoder(Decoder):
    frames: AudioChunks

    def __init__(
        self, payload: TranscriptionInput, frames: AudioChunks, tokenizer: Any, moment_s: float
    ) -> None:
        """`moment_s`: seconds for which a letter is said."""
        super().__init__(payload, frames)
        self.tokenizer = tokenizer
        self.moment_s = moment_s
        self.delimiter = getattr(tokenizer, "word_delimiter_token_id", None)
        check(payload, words=self.delimiter is not None)
        self._segments = 0
        self._ids: list[int] = []  # that are no text yet
        self._probabilities: list[float] = []
        self._moment = 0  # the first of them

    def next(self) -> AudioChunk | None:
        return self.frames.chunk(self.seek)

    def take(self, window: AudioChunk, times: None = None) -> list[TranscriptDelta]:
        total = len(window.said)
        left, right = (round(side / window.samples * total) for side in (window.left, window.right))
        self._ids += window.said[left : total - right]
        self._probabilities += window.probabilities[left : total - right]
        self.seek += self.frames.step
        self.ended = window.last
        end = len(self._ids)
        while end and not window.last and self._ids[end - 1] != self.delimiter:
            end -= 1  # to the end of the last whole word
        delta = self._delta(end)
        self._moment += end
        del self._ids[:end], self._probabilities[:end]
        if delta is None and self.ended:
            delta = TranscriptDelta("", seconds=self.frames.seconds)
        return [delta] if delta else []

    def _delta(self, end: int) -> TranscriptDelta | None:
        """Of so many ids; None: they say nothing."""
        ids, start = self._ids[:end], self._moment
        asked = {"output_word_offsets": True} if self.delimiter is not None else {}
        decoded = self.tokenizer.decode(ids, skip_special_tokens=False, **asked)
        text = str(decoded.text if asked else decoded)
        if not text.strip():
            return None
        space = " " if self._segments else ""
        words = self._words(decoded.word_offsets, space) if asked else ()
        segment = Segment(
            id=self._segments,
            seek=int(start * self.moment_s * 100),
            start=words[0].start if words else start * self.moment_s,
            end=words[-1].end if words else (start + end) * self.moment_s,
            text=space + text,
            tokens=(),
            words=words if self.payload.words else (),
        )
        self._segments += 1
        return TranscriptDelta(segment.text, segment, seconds=self.frames.seconds)

    def _words(self, offsets: Sequence[dict[str, Any]], space: str) -> tuple[Word, ...]:
        words: list[Word] = []
        for offset in offsets:
            first, end = int(offset["start_offset"]), int(offset["end_offset"])  # numpy's
            likely = self._probabilities[first:end]
            start_s, end_s = ((self._moment + at) * self.moment_s for at in (first, end))
            before = space if not words else " "
            words.append(Word(before + offset["word"], start_s, end_s, sum(likely) / len(likely)))
        return tuple(words)


def check(payload: TranscriptionInput, words: bool) -> None:
    """InvalidInput for what no CTC model does; `words`: this one says where words end."""
    if payload.task != "transcribe":
        raise InvalidInput.at("model", "it does not translate")
    for name, given in (
        ("language", payload.language),
        ("prompt", payload.prompt),
        ("temperature", payload.temperature),
        ("include[]", payload.logprobs),
        ("timestamp_granularities[]", payload.words and not words),
    ):
        if given:
            raise InvalidInput.at(name, "the model has no notion of it (CTC)")


class CtcRunner(SpeechRunner):
    """Windows of one length run together, and all is said at once."""

    @torch.inference_mode()
    def begin(self, windows: Sequence[AudioChunk]) -> None:
        self.running += [window for window in windows if window not in self.running]
        for _, group in groupby(windows, lambda window: window.samples):
            self._run(list(group))

    def leave(self, window: AudioChunk) -> None:
        if window in self.running:
            self.running.remove(window)

    def _run(self, windows: Sequence[AudioChunk]) -> None:
        model, names = self.model, windows[0].inputs
        inputs = {name: torch.cat([each.inputs[name] for each in windows]) for name in names}
        moved = {
            name: each.to(model.device, model.dtype if each.is_floating_point() else None)
            for name, each in inputs.items()
        }
        probabilities, ids = model(**moved).logits.float().softmax(-1).max(-1)
        if not bool(probabilities.isfinite().all()):
            raise ItemFailed("the model's output for this input is no number")
        rows = zip(windows, ids.tolist(), probabilities.tolist(), strict=True)
        for window, window_ids, window_probabilities in rows:
            window.said, window.probabilities = window_ids, window_probabilities
            window.ended = True
