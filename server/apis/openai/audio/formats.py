"""A transcript in five formats, with the same words in all.

json and verbose_json are OpenAI's documents; srt and vtt are subtitles with a cue per segment.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from server.apis.openai.audio.request import AudioFormat, TranscriptionRequest
from server.apis.openai.logprobs import scored_token
from server.apis.openai.response_schemas import ScoredToken
from server.core.delta_stream import UsageCounts
from server.http.json import to_json
from worker.messages.deltas import TokenLogprob
from worker.messages.transcription import Segment, TranscriptDelta, Word


class Duration(Struct, tag_field="type", tag="duration"):
    seconds: float


class TranscribedTokens(Struct, tag_field="type", tag="tokens"):
    """The usage of a chat model."""

    input_tokens: int
    output_tokens: int
    total_tokens: int


class Transcription(Struct):
    text: str
    usage: Duration | TranscribedTokens
    logprobs: list[ScoredToken] | UnsetType = UNSET


class TranscribedSegment(Struct):
    id: int
    seek: int
    start: float
    end: float
    text: str
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float
    tokens: Sequence[int]


class TranscribedWord(Struct):
    word: str
    start: float
    end: float


class VerboseTranscription(Struct, kw_only=True):
    task: Literal["transcribe", "translate"]
    language: str
    duration: float
    text: str
    segments: list[TranscribedSegment] | UnsetType = UNSET
    words: list[TranscribedWord] | UnsetType = UNSET
    usage: Duration


class TranscriptTextDelta(Struct, tag_field="type", tag="transcript.text.delta"):
    delta: str
    logprobs: list[ScoredToken] | UnsetType = UNSET


class TranscriptTextDone(Transcription, tag_field="type", tag="transcript.text.done"): ...


@dataclass(slots=True)
class Transcript:
    """A transcript so far. `seconds` is the length of the whole recording. `counts` are the tokens
    of a chat model."""

    text: str = ""
    segments: list[Segment] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    language: str = ""
    seconds: float = 0.0
    counts: UsageCounts | None = None

    def add(self, delta: TranscriptDelta) -> str:
        """Add a delta; return its text, without the space before the first word."""
        text = delta.text if self.text else delta.text.lstrip()
        self.text += text
        if delta.segment is not None:
            self.segments.append(delta.segment)
        self.logprobs += delta.logprobs
        self.language = delta.language or self.language
        self.seconds = delta.seconds or self.seconds
        return text

    @property
    def duration(self) -> Duration:
        return Duration(round(self.seconds, 3))

    @property
    def usage(self) -> Duration | TranscribedTokens:
        if (counts := self.counts) is None:
            return self.duration
        total = counts.prompt + counts.completion
        return TranscribedTokens(counts.prompt, counts.completion, total)


def as_json(transcript: Transcript, request: TranscriptionRequest) -> bytes:
    logprobs = token_scores(transcript, request)
    return to_json(Transcription(transcript.text.rstrip(), transcript.usage, logprobs))


def as_verbose_json(transcript: Transcript, request: TranscriptionRequest) -> bytes:
    segments = transcript.segments
    words = [word for segment in segments for word in segment.words]
    return to_json(
        VerboseTranscription(
            task=request.task,
            language="english" if request.task == "translate" else transcript.language,
            duration=transcript.duration.seconds,
            text=transcript.text,
            segments=list(map(_segment, segments)) if request.segments else UNSET,
            words=list(map(_word, words)) if request.words else UNSET,
            usage=transcript.duration,
        )
    )


def token_scores(
    transcript: Transcript, request: TranscriptionRequest
) -> list[ScoredToken] | UnsetType:
    return list(map(scored_token, transcript.logprobs)) if request.include else UNSET


def _segment(segment: Segment) -> TranscribedSegment:
    segment = replace(segment, start=round(segment.start, 3), end=round(segment.end, 3))
    fields = TranscribedSegment.__struct_fields__
    return TranscribedSegment(*(getattr(segment, name) for name in fields))


def _word(word: Word) -> TranscribedWord:
    return TranscribedWord(word.text.strip(), round(word.start, 3), round(word.end, 3))


def as_text(transcript: Transcript, request: TranscriptionRequest) -> bytes:
    return f"{transcript.text.rstrip()}\n".encode()


def as_srt(transcript: Transcript, request: TranscriptionRequest) -> bytes:
    cues = enumerate(_cues(transcript, ","), start=1)
    return "".join(f"{n}\n{times}\n{text}\n\n" for n, (times, text) in cues).encode()


def as_vtt(transcript: Transcript, request: TranscriptionRequest) -> bytes:
    cues = (f"{times}\n{escape(text, quote=False)}\n\n" for times, text in _cues(transcript, "."))
    return "".join(["WEBVTT\n\n", *cues]).encode()


def _cues(transcript: Transcript, separator: str) -> Iterator[tuple[str, str]]:
    """Yield the times and the text of each segment, without what would break the file's structure:
    empty cues, line breaks, and `-->`, which starts a cue."""
    for segment in transcript.segments:
        if text := " ".join(segment.text.split()).replace("-->", "->"):
            yield f"{clock(segment.start, separator)} --> {clock(segment.end, separator)}", text


def clock(seconds: float, separator: str) -> str:
    """Return hours:minutes:seconds, and milliseconds after the separator."""
    whole, milliseconds = divmod(round(seconds * 1000), 1000)
    hours, rest = divmod(whole, 3600)
    return f"{hours:02}:{rest // 60:02}:{rest % 60:02}{separator}{milliseconds:03}"


Encoder = Callable[[Transcript, TranscriptionRequest], bytes]
ENCODERS: Mapping[AudioFormat, tuple[bytes, Encoder]] = {
    "json": (b"application/json", as_json),
    "verbose_json": (b"application/json", as_verbose_json),
    "text": (b"text/plain; charset=utf-8", as_text),
    "srt": (b"application/x-subrip; charset=utf-8", as_srt),
    "vtt": (b"text/vtt; charset=utf-8", as_vtt),
}
