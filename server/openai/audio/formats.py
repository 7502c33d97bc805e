"""One transcript in five formats: the same words in all.

json and verbose_json are OpenAI's documents; srt and vtt are subtitles, a cue for each segment.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from server.http.json import Document, to_json
from server.openai.audio.request import Format, TranscriptionRequest
from server.openai.logprobs import token_document
from worker.messages.deltas import TokenLogprob
from worker.messages.transcription import Segment, TranscriptDelta, Word

FIELDS = (  # of a segment
    *("id", "seek", "start", "end", "text"),
    *("temperature", "avg_logprob", "compression_ratio", "no_speech_prob"),
)


@dataclass(slots=True)
class TranscriptDocument:
    """What has been said so far."""

    text: str = ""
    segments: list[Segment] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    language: str = ""
    seconds: float = 0.0  # of the whole recording

    def add(self, delta: TranscriptDelta) -> str:
        """What is new in the text; the space before the first word is dropped."""
        new = delta.text if self.text else delta.text.lstrip()
        self.text += new
        if delta.segment is not None:
            self.segments.append(delta.segment)
        self.logprobs += delta.logprobs
        self.language = delta.language or self.language
        self.seconds = delta.seconds or self.seconds
        return new

    @property
    def usage(self) -> Document:
        return {"type": "duration", "seconds": round(self.seconds, 3)}


def render(transcript: TranscriptDocument, request: TranscriptionRequest) -> tuple[bytes, bytes]:
    """A whole answer and its media type."""
    media, make = FORMATS[request.format]
    return make(transcript, request), media


def json_document(transcript: TranscriptDocument, request: TranscriptionRequest) -> Document:
    document: Document = {"text": transcript.text, "usage": transcript.usage}
    if request.include:
        document["logprobs"] = [token_document(each) for each in transcript.logprobs]
    return document


def as_json(transcript: TranscriptDocument, request: TranscriptionRequest) -> bytes:
    return to_json(json_document(transcript, request))


def as_verbose_json(transcript: TranscriptDocument, request: TranscriptionRequest) -> bytes:
    document: Document = {
        "task": request.task,
        "language": "english" if request.task == "translate" else transcript.language,
        "duration": round(transcript.seconds, 3),
        "text": transcript.text,
    }
    if request.segments:
        document["segments"] = [_segment(each) for each in transcript.segments]
    if request.words:
        spoken = [word for segment in transcript.segments for word in segment.words]
        document["words"] = [_word(each) for each in spoken]
    return to_json(document | {"usage": transcript.usage})


def _segment(segment: Segment) -> Document:
    return {name: getattr(segment, name) for name in FIELDS} | {"tokens": list(segment.tokens)}


def _word(word: Word) -> Document:
    return {"word": word.text.strip(), "start": word.start, "end": word.end}


def as_text(transcript: TranscriptDocument, request: TranscriptionRequest) -> bytes:
    return f"{transcript.text}\n".encode()


def as_srt(transcript: TranscriptDocument, request: TranscriptionRequest) -> bytes:
    cues = [
        f"{n}\n{clock(each.start, ',')} --> {clock(each.end, ',')}\n{_line(each.text)}\n\n"
        for n, each in enumerate(_spoken(transcript), start=1)
    ]
    return "".join(cues).encode()


def as_vtt(transcript: TranscriptDocument, request: TranscriptionRequest) -> bytes:
    cues = [
        f"{clock(each.start, '.')} --> {clock(each.end, '.')}\n{_escaped(each.text)}\n\n"
        for each in _spoken(transcript)
    ]
    return "".join(["WEBVTT\n\n", *cues]).encode()


def _spoken(transcript: TranscriptDocument) -> list[Segment]:
    """A cue without a text would end where it begins."""
    return [each for each in transcript.segments if each.text.strip()]


def _line(text: str) -> str:
    """In one line, without what would begin another cue."""
    return " ".join(text.split()).replace("-->", "->")


def _escaped(text: str) -> str:
    return _line(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def clock(seconds: float, point: str) -> str:
    """hours:minutes:seconds, and thousandths after the point."""
    whole, thousandths = divmod(round(seconds * 1000), 1000)
    hours, rest = divmod(whole, 3600)
    return f"{hours:02}:{rest // 60:02}:{rest % 60:02}{point}{thousandths:03}"


Maker = Callable[[TranscriptDocument, TranscriptionRequest], bytes]
FORMATS: Mapping[Format, tuple[bytes, Maker]] = {
    "json": (b"application/json", as_json),
    "verbose_json": (b"application/json", as_verbose_json),
    "text": (b"text/plain; charset=utf-8", as_text),
    "srt": (b"application/x-subrip; charset=utf-8", as_srt),
    "vtt": (b"text/vtt; charset=utf-8", as_vtt),
}
