"""The transcript of one recording by a Whisper-type model.

    window → (retry at a higher temperature)* → segments → next window, where the last segment ends

This is the sequential long-form method of section 3.8 of "Robust Speech Recognition via Large-Scale
Weak Supervision", as transformers' `generate` implements it. A window whose text is repetitive or
improbable is retried at a higher temperature, unless the request sets one. A window without speech
adds nothing.
"""

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers.models.whisper.tokenization_whisper import LANGUAGES

from worker.engines.speech.interfaces import Decoder
from worker.engines.speech.log_mel import LogMelReader
from worker.engines.speech.vocabulary import WhisperVocabulary
from worker.engines.speech.whisper import WhisperWindow
from worker.messages.deltas import TokenLogprob
from worker.messages.transcription import Segment, TranscriptDelta, TranscriptionInput, Word

# Of the attempts at a window, unless the request sets one.
TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
# At this temperature and above, the text is too random to be context of the next window.
MAX_CONTEXT_TEMPERATURE = 0.5
FRAMES_PER_TIMESTAMP = 2
# When an attempt is retried: OpenAI's values in the units of `generate`, unless the checkpoint's
# generation_config has others. The compression ratio is that of the tokens' bytes.
THRESHOLDS = {
    "compression_ratio_threshold": 1.35,
    "logprob_threshold": -1.0,
    "no_speech_threshold": 0.6,
}


@dataclass(frozen=True, slots=True)
class SegmentSpan:
    """Tokens [begin, end) of a window, and the frames of the window in which they are spoken."""

    begin: int
    end: int
    start_frame: int
    end_frame: int


class WhisperDecoder(Decoder[WhisperWindow]):
    """`config`: the checkpoint's generation_config. Raises InvalidInput for a language, task or
    prompt that the model does not support. `seek` counts frames."""

    reader: LogMelReader

    def __init__(
        self,
        payload: TranscriptionInput,
        reader: LogMelReader,
        vocabulary: WhisperVocabulary,
        config: Any,
    ) -> None:
        super().__init__(payload, reader)
        self.vocabulary = vocabulary
        self.max_compression_ratio, self.min_logprob, self.max_no_speech_prob = (
            default if getattr(config, name, None) is None else float(getattr(config, name))
            for name, default in THRESHOLDS.items()
        )
        self.hop_s = reader.mel.hop_samples / reader.mel.sampling_rate
        self.language = vocabulary.parse_language(payload.language)
        vocabulary.task_tokens(payload.task)
        self.prompt = vocabulary.context_tokens(payload.prompt)
        self.temperatures = (payload.temperature,) if payload.temperature else TEMPERATURES
        self.uses_previous_text = bool(getattr(config, "condition_on_prev_tokens", False))
        self.token_size = int(math.log2(len(vocabulary.tokenizer)) / 8) + 1  # bytes
        self.segments = 0
        self._context = self.prompt
        self._previous_text = self.prompt[1:]  # tokens of earlier windows

    def next_window(self) -> WhisperWindow | None:
        if (features := self.reader.window(self.seek)) is None:
            return None
        audio_frames = min(self.reader.mel.window_frames, self.reader.audio_frames - self.seek)
        return WhisperWindow(
            features, audio_frames, self.seek, self._context, self.language, self.payload.task,
            self.temperatures[0],
        )  # fmt: skip

    def retry(self, window: WhisperWindow) -> bool:
        remaining = self.temperatures[window.attempt + 1 :]
        if not remaining or self._is_silent(window) or not self._looks_wrong(window):
            return False
        window.restart(remaining[0])
        return True

    def accept(
        self, window: WhisperWindow, token_ends: Sequence[float] | None = None
    ) -> list[TranscriptDelta]:
        self.language = window.language
        frames = min(self.reader.mel.window_frames, self.reader.total_frames - self.seek)
        ends_text = window.tokens[-1] == self.vocabulary.end
        tokens = window.tokens[:-1] if ends_text else window.tokens
        deltas: list[TranscriptDelta] = []
        covered = frames
        if not self._is_silent(window) and tokens:
            spans, covered = split_segments(tokens, self.vocabulary.first_timestamp, frames)
            deltas = [delta for span in spans if (delta := self._delta(window, span, token_ends))]
            self._update_context(window, [tokens[span.begin : span.end] for span in spans])
        self.seek += covered
        self.finished = self.seek >= self.reader.audio_frames
        if self.finished and not self.segments:
            deltas.append(
                TranscriptDelta("", language=self._language_name, seconds=self.reader.seconds)
            )
        return deltas

    # ── judging an attempt ──

    def _is_silent(self, window: WhisperWindow) -> bool:
        improbable = _mean_logprob(window) < self.min_logprob
        return improbable and window.no_speech_prob > self.max_no_speech_prob

    def _looks_wrong(self, window: WhisperWindow) -> bool:
        data = b"".join(token.to_bytes(self.token_size, "little") for token in window.tokens)
        repetitive = _compression_ratio(data) > self.max_compression_ratio
        return repetitive or _mean_logprob(window) < self.min_logprob

    def _update_context(self, window: WhisperWindow, segments: Sequence[Sequence[int]]) -> None:
        if not self.uses_previous_text:
            return
        first_timestamp = self.vocabulary.first_timestamp
        for tokens in segments:
            ends_in_pair = len(tokens) > 2 and tokens[-2] >= first_timestamp
            self._previous_text += tokens[:-1] if ends_in_pair else tokens
        self._previous_text = self._previous_text[-self.vocabulary.max_context :]
        if window.temperature < MAX_CONTEXT_TEMPERATURE:
            self._context = [self.vocabulary.start_of_previous, *self._previous_text]
        else:
            self._context = self.prompt

    # ── segments ──

    def _delta(
        self, window: WhisperWindow, span: SegmentSpan, token_ends: Sequence[float] | None
    ) -> TranscriptDelta | None:
        """Return the segment of a span; None if it has no text."""
        tokens = window.tokens[span.begin : span.end]
        text = self.vocabulary.text(tokens)
        if not text.strip():
            return None
        start, end = (
            min((self.seek + frame) * self.hop_s, self.reader.seconds)
            for frame in (span.start_frame, span.end_frame)
        )
        segment = Segment(
            id=self.segments,
            seek=self.seek,
            start=start,
            end=end,
            text=text,
            tokens=tuple(tokens),
            temperature=window.temperature,
            avg_logprob=_mean_logprob(window),
            compression_ratio=_compression_ratio(text.encode()),
            no_speech_prob=window.no_speech_prob,
            words=() if token_ends is None else self._words(window, span, token_ends),
        )
        self.segments += 1
        logprobs = self._logprobs(window, span) if self.payload.logprobs else ()
        return TranscriptDelta(text, segment, logprobs, self._language_name, self.reader.seconds)

    @property
    def _language_name(self) -> str:
        """The name that OpenAI uses, such as `english`; empty if it is not known."""
        return LANGUAGES.get(self.language, self.language) if self.language else ""

    def _words(
        self, window: WhisperWindow, span: SegmentSpan, token_ends: Sequence[float]
    ) -> tuple[Word, ...]:
        positions = self._text_positions(window, span)
        offset = self.seek * self.hop_s
        tokens = [window.tokens[position] for position in positions]
        words = []
        for text, indices in self.vocabulary.words(tokens, self.language or "en"):
            first, last = positions[indices[0]], positions[indices[-1]]
            start = token_ends[first - 1] if first else 0.0
            probabilities = [math.exp(window.logprobs[positions[index]]) for index in indices]
            start_s, end_s = (
                min(offset + seconds, self.reader.seconds) for seconds in (start, token_ends[last])
            )
            words.append(Word(text, start_s, end_s, sum(probabilities) / len(probabilities)))
        return tuple(words)

    def _logprobs(self, window: WhisperWindow, span: SegmentSpan) -> list[TokenLogprob]:
        logprobs = []
        for position in self._text_positions(window, span):
            token = window.tokens[position]
            text, raw = self.vocabulary.text([token]), self.vocabulary.token_bytes(token)
            logprobs.append(TokenLogprob(token, text, raw, window.logprobs[position]))
        return logprobs

    def _text_positions(self, window: WhisperWindow, span: SegmentSpan) -> list[int]:
        end = self.vocabulary.end
        return [n for n in range(span.begin, span.end) if window.tokens[n] < end]


def split_segments(
    tokens: Sequence[int], first_timestamp: int, frames: int
) -> tuple[list[SegmentSpan], int]:
    """Split the tokens of a window, without the end of text, into segments at pairs of timestamps.

    Returns the segments and how many of the window's `frames` they cover. Tokens after the last
    pair are left to the next window, unless the window ends with a single timestamp or has no pair.
    """
    is_timestamp = [token >= first_timestamp for token in tokens]
    pairs = [n + 1 for n in range(len(tokens) - 1) if is_timestamp[n] and is_timestamp[n + 1]]
    if not pairs:
        timestamps = [token - first_timestamp for token in tokens if token >= first_timestamp]
        last = timestamps[-1] if timestamps and timestamps[-1] else frames // FRAMES_PER_TIMESTAMP
        return [SegmentSpan(0, len(tokens), 0, last * FRAMES_PER_TIMESTAMP)], frames
    single_ending = is_timestamp[-2:] == [False, True]
    ends = [*pairs, len(tokens)] if single_ending else [*pairs[:-1], pairs[-1] + 1]
    spans = []
    begin = 0
    for end in ends:
        closing = end - 1 if end != ends[-1] or single_ending else end - 2
        start_frame, end_frame = (
            (tokens[n] - first_timestamp) * FRAMES_PER_TIMESTAMP for n in (begin, closing)
        )
        spans.append(SegmentSpan(begin, end, start_frame, end_frame))
        begin = end
    return spans, frames if single_ending else spans[-1].end_frame


def _mean_logprob(window: WhisperWindow) -> float:
    return sum(window.logprobs) / len(window.logprobs)


def _compression_ratio(data: bytes) -> float:
    return len(data) / len(zlib.compress(data))
