"""One recording's way through a Whisper-type model: window after window, each where the last one's
timestamps end, and what was said in them as segments.

    window → (judge → again, at a higher temperature)* → segments → window → …

The sequential long-form method of section 3.8 of "Robust Speech Recognition via Large-Scale Weak
Supervision", as transformers' `generate` does it. A window that repeats itself, or that the model
is unsure of, is said again at a higher temperature, where the request leaves the temperature to us;
one that has nothing but silence in it is left out.
"""

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from worker.messages.deltas import TokenLogprob
from worker.messages.transcription import Segment, TranscriptDelta, TranscriptionInput, Word
from worker.speech.features import Frames
from worker.speech.vocabulary import WhisperVocabulary
from worker.speech.whisper import Window
from worker.speech.work import Decoder

# Of the attempts at a window, where the request does not say which.
TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
# From here on, what was said is too random to be shown to the next window.
RANDOM = 0.5
FRAMES = 2  # of the features, that a timestamp counts
# When an attempt looks wrong: OpenAI's, in `generate`'s units, unless the checkpoint's
# generation_config has others. Of its tokens' bytes; a mean; a probability.
THRESHOLDS = {
    "compression_ratio_threshold": 1.35,
    "logprob_threshold": -1.0,
    "no_speech_threshold": 0.6,
}


@dataclass(frozen=True, slots=True)
class TranscriptPart:
    """Tokens `begin` to `end` of a window, and from which frame of it to which they are said."""

    begin: int
    end: int
    first: int
    last: int


class WhisperDecoder(Decoder):
    frames: Frames

    def __init__(
        self,
        payload: TranscriptionInput,
        frames: Frames,
        vocabulary: WhisperVocabulary,
        config: Any,
    ) -> None:
        """`config` is the generation_config. InvalidInput if the model cannot do what is asked."""
        super().__init__(payload, frames)
        self.vocabulary = vocabulary
        self.compression, self.logprob, self.no_speech = (
            default if getattr(config, name, None) is None else float(getattr(config, name))
            for name, default in THRESHOLDS.items()
        )
        self.hop_s = frames.mel.hop / frames.mel.rate
        self.language = vocabulary.language(payload.language)
        vocabulary.task(payload.task)
        self.prompt = vocabulary.prompt(payload.prompt)
        self.temperatures = (payload.temperature,) if payload.temperature else TEMPERATURES
        self.conditions = bool(getattr(config, "condition_on_prev_tokens", False))
        self.vocabulary_bytes = int(math.log2(len(vocabulary.tokenizer)) / 8) + 1
        self.segments = 0
        self._before = self.prompt
        self._said = self.prompt[1:]  # in earlier windows, as far as the next is shown it

    def next(self) -> Window | None:
        if (features := self.frames.window(self.seek)) is None:
            return None
        sound = min(self.frames.mel.window, self.frames.end - self.seek)
        task, temperature = self.payload.task, self.temperatures[0]
        return Window(features, sound, self.seek, self._before, self.language, task, temperature)

    def again(self, window: Window) -> bool:
        untried = self.temperatures[window.attempt + 1 :]
        if not untried or self._is_silent(window) or not self._looks_wrong(window):
            return False
        window.begin_again(untried[0])
        return True

    def take(self, window: Window, times: Sequence[float] | None = None) -> list[TranscriptDelta]:
        self.language = window.language
        left = self.frames.total - self.seek
        frames = min(self.frames.mel.window, left)
        said = window.said[:-1] if window.said[-1] == self.vocabulary.end else window.said
        deltas: list[TranscriptDelta] = []
        covered = frames
        if not self._is_silent(window) and said:
            parts, covered = parts_of(said, self.vocabulary.timestamps, frames)
            deltas = [delta for part in parts if (delta := self._delta(window, part, times))]
            self._remember(window, [said[part.begin : part.end] for part in parts])
        self.seek += covered
        self.ended = self.seek >= self.frames.end
        if self.ended and not self.segments:
            deltas.append(TranscriptDelta("", language=self._language, seconds=self.frames.seconds))
        return deltas

    def _is_silent(self, window: Window) -> bool:
        return _mean(window) < self.logprob and window.no_speech > self.no_speech

    def _looks_wrong(self, window: Window) -> bool:
        size = self.vocabulary_bytes
        data = b"".join(token.to_bytes(size, "little") for token in window.said)
        return _compression(data) > self.compression or _mean(window) < self.logprob

    def _remember(self, window: Window, parts: Sequence[Sequence[int]]) -> None:
        """What the next window's prompt begins with."""
        if not self.conditions:
            return
        first, most = self.vocabulary.timestamps, self.vocabulary.most_prompt
        for part in parts:
            doubled = len(part) > 2 and part[-2] >= first
            self._said += part[:-1] if doubled else part
        self._said = self._said[-most:]
        shown = window.temperature < RANDOM
        self._before = [self.vocabulary.before, *self._said] if shown else self.prompt

    # ── what is sent ──

    def _delta(
        self, window: Window, part: TranscriptPart, times: Sequence[float] | None
    ) -> TranscriptDelta | None:
        """None: it has no text."""
        tokens = window.said[part.begin : part.end]
        text = self.vocabulary.text(tokens)
        if not text.strip():
            return None
        start, end = ((self.seek + frame) * self.hop_s for frame in (part.first, part.last))
        segment = Segment(
            id=self.segments,
            seek=self.seek,
            start=min(start, self.frames.seconds),
            end=min(end, self.frames.seconds),
            text=text,
            tokens=tuple(tokens),
            temperature=window.temperature,
            avg_logprob=_mean(window),
            compression_ratio=_compression(text.encode()),
            no_speech_prob=window.no_speech,
            words=() if times is None else self._words(window, part, times),
        )
        self.segments += 1
        logprobs = self._logprobs(window, part) if self.payload.logprobs else ()
        return TranscriptDelta(text, segment, logprobs, self._language, self.frames.seconds)

    @property
    def _language(self) -> str:
        return self.vocabulary.language_name(self.language)

    def _words(
        self, window: Window, part: TranscriptPart, times: Sequence[float]
    ) -> tuple[Word, ...]:
        places = self._text_places(window, part)
        offset = self.seek * self.hop_s
        tokens = [window.said[at] for at in places]
        words = []
        for text, indices in self.vocabulary.words(tokens, self.language or "en"):
            first, last = places[indices[0]], places[indices[-1]]
            start = times[first - 1] if first else 0.0
            likely = [math.exp(window.logprobs[places[index]]) for index in indices]
            first_s, last_s = (min(offset + at, self.frames.seconds) for at in (start, times[last]))
            words.append(Word(text, first_s, last_s, sum(likely) / len(likely)))
        return tuple(words)

    def _logprobs(self, window: Window, part: TranscriptPart) -> list[TokenLogprob]:
        made = []
        for at in self._text_places(window, part):
            token = window.said[at]
            text, raw = self.vocabulary.text([token]), self.vocabulary.raw(token)
            made.append(TokenLogprob(token, text, raw, window.logprobs[at]))
        return made

    def _text_places(self, window: Window, part: TranscriptPart) -> list[int]:
        end = self.vocabulary.end
        return [at for at in range(part.begin, part.end) if window.said[at] < end]


def parts_of(said: Sequence[int], timestamps: int, frames: int) -> tuple[list[TranscriptPart], int]:
    """Parts of what was said in a window of so many frames, the end of text left out, and how many
    of them it covers; `timestamps` is the first token that is one. What comes after the last pair
    of timestamps is heard again, unless the window ends with a single one, or has no pair."""
    timed = [token >= timestamps for token in said]
    pairs = [at + 1 for at in range(len(said) - 1) if timed[at] and timed[at + 1]]
    if not pairs:
        times = [token - timestamps for token in said if token >= timestamps]
        last = times[-1] if times and times[-1] else frames // FRAMES
        return [TranscriptPart(0, len(said), 0, last * FRAMES)], frames
    single = timed[-2:] == [False, True]
    ends = [*pairs, len(said)] if single else [*pairs[:-1], pairs[-1] + 1]
    parts = []
    begin = 0
    for end in ends:
        closing = end - 1 if end != ends[-1] or single else end - 2
        first, last = (said[at] - timestamps for at in (begin, closing))
        parts.append(TranscriptPart(begin, end, first * FRAMES, last * FRAMES))
        begin = end
    covered = frames if single else (said[begin - 2] - timestamps) * FRAMES
    return parts, covered


def _mean(window: Window) -> float:
    return sum(window.logprobs) / len(window.logprobs)


def _compression(data: bytes) -> float:
    return len(data) / len(zlib.compress(data))
