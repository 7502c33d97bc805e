"""`POST /v1/audio/transcriptions` and `/v1/audio/translations`: a recording in, what it says out.

    upload → fields → submit → first segment or refusal → headers → events, or one document

The recording is on disk until it is answered, and is read from there (worker/speech). A stream's
headers wait for the first segment, so that refusals are real status codes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from prometheus_client import Counter
from starlette.types import Receive, Scope, Send

from server.core.answer_stream import AnswerStream
from server.core.worker_client import Deadlines
from server.http.errors import HttpError
from server.http.json import Document
from server.http.sse import data_frame
from server.http.upload import Uploads
from server.openai.audio.formats import TranscriptDocument, json_document, render
from server.openai.audio.request import TranscriptionRequest, read_fields
from server.openai.endpoint import Endpoint, ResponseBuilder
from server.openai.logprobs import token_document
from worker.messages.transcription import TranscriptDelta, TranscriptionInput

PATHS = "/v1/audio/transcriptions", "/v1/audio/translations"


class TranscriptResponseBuilder(ResponseBuilder[TranscriptDelta]):
    """Events are as OpenAI's SDKs type them. `seconds` counts what has been transcribed."""

    def __init__(
        self, request: TranscriptionRequest, payload: TranscriptionInput, seconds: Counter
    ) -> None:
        self.request = request
        self.payload = payload
        self.seconds = seconds
        self.streams = bool(request.stream)
        self.transcript = TranscriptDocument()

    def documents(self, delta: TranscriptDelta) -> int:
        return 1 + len(delta.logprobs)

    def add(self, delta: TranscriptDelta) -> Iterator[bytes]:
        if new := self.transcript.add(delta):
            event: Document = {"type": "transcript.text.delta", "delta": new}
            if self.request.include:
                event["logprobs"] = list(map(token_document, delta.logprobs))
            yield data_frame(event)

    def finish(self) -> Iterator[bytes]:
        self.seconds.inc(self.transcript.seconds)
        done = {"type": "transcript.text.done"}
        yield data_frame(done | json_document(self.transcript, self.request))

    def fail(self, error: HttpError) -> Iterator[bytes]:
        yield data_frame(error.document)

    def whole(self, deltas: Sequence[TranscriptDelta]) -> bytes:
        for delta in deltas:
            self.transcript.add(delta)
        self.seconds.inc(self.transcript.seconds)
        content, self.media = render(self.transcript, self.request)
        return content


@dataclass(eq=False)
class SpeechEndpoint(Endpoint[TranscriptResponseBuilder]):
    """`kind` says whether it transcribes or translates."""

    uploads: Uploads
    kind: type[TranscriptionRequest]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self.uploads.form(scope, receive, "transcription") as (form, deadlines):
            request = read_fields(form.fields, self.kind)
            request.model = self.models.called(request.model)
            payload, seconds = request.input(form.path), self.worker_client.metrics.audio_s
            reply = TranscriptResponseBuilder(request, payload, seconds)
            await self.answer(scope, receive, send, reply, deadlines)

    def submit(
        self, reply: TranscriptResponseBuilder, deadlines: Deadlines, receive: Receive
    ) -> AnswerStream[TranscriptDelta]:
        payloads = [reply.payload]
        return AnswerStream(self.worker_client, "transcription", payloads, deadlines, receive)
