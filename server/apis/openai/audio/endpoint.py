"""`POST /v1/audio/transcriptions` and `/v1/audio/translations`: a recording in, its text out.

    upload → fields → submit → first segment or refusal → headers → events, or one document

The recording is a temporary file, which the worker reads (engines/speech), until the response is
sent. A chat model gets it in a message (chat_model.py).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from msgspec import UNSET
from prometheus_client import Counter
from starlette.types import Receive, Scope, Send

from server.apis.openai.audio.chat_model import transcribe
from server.apis.openai.audio.formats import (
    ENCODERS,
    Transcript,
    Transcription,
    TranscriptTextDelta,
    TranscriptTextDone,
    VerboseTranscription,
    token_scores,
)
from server.apis.openai.audio.request import (
    TranscriptionRequest,
    TranslationRequest,
    form_schema,
    read_fields,
)
from server.apis.openai.endpoint import ResponseBuilder, respond
from server.apis.openai.logprobs import scored_token
from server.apis.openai.models import ModelGroup
from server.core.delta_stream import DeltaStream
from server.core.worker_client import IncomingRequest, WorkerClient
from server.http.operation import FORM, TEXT, Operation
from server.http.sse import data_frame
from server.http.upload import Uploads
from worker.messages.transcription import TranscriptDelta

SUBTITLES = TEXT, "application/x-subrip", "text/vtt"
STREAM = "With stream: true. Deltas of the text, then the whole text, then [DONE]."
OPERATIONS = {
    kind: Operation(
        f"POST /v1/audio/{name}",
        summary,
        Transcription,
        {FORM: form_schema(kind)},
        [404],
        stream,
        others=SUBTITLES,
        alternatives=[VerboseTranscription],
    )
    for kind, name, summary, stream in (
        (TranscriptionRequest, "transcriptions", "The text of a recording", STREAM),
        (TranslationRequest, "translations", "The English translation of a recording", None),
    )
}


class TranscriptBuilder(ResponseBuilder[TranscriptDelta]):
    """Builds a transcript. `seconds` counts the transcribed seconds of all recordings."""

    def __init__(self, request: TranscriptionRequest, seconds: Counter) -> None:
        self.request = request
        self.seconds = seconds
        self.streams = bool(request.stream)
        self.transcript = Transcript()

    def entries(self, delta: TranscriptDelta) -> int:
        return 1 + len(delta.logprobs)

    def add(self, delta: TranscriptDelta) -> Iterator[bytes]:
        if text := self.transcript.add(delta):
            logprobs = list(map(scored_token, delta.logprobs)) if self.request.include else UNSET
            yield data_frame(TranscriptTextDelta(text, logprobs))

    def finish(self) -> Iterator[bytes]:
        transcript = self.transcript
        self.seconds.inc(transcript.seconds)
        logprobs = token_scores(transcript, self.request)
        yield data_frame(TranscriptTextDone(transcript.text, transcript.duration, logprobs))

    def build(self, deltas: Sequence[TranscriptDelta]) -> bytes:
        for delta in deltas:
            self.transcript.add(delta)
        self.seconds.inc(self.transcript.seconds)
        self.media_type, encode = ENCODERS[self.request.format]
        return encode(self.transcript, self.request)


@dataclass(eq=False)
class TranscriptionEndpoint:
    """An ASGI app that takes recordings. `kind`: whether it transcribes or translates."""

    worker_client: WorkerClient
    models: ModelGroup
    uploads: Uploads
    kind: type[TranscriptionRequest]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        default = self.models.default.registry_name
        async with self.uploads.form(scope, receive, default) as (form, deadlines):
            request = read_fields(form.fields, self.kind, scope)
            model = await self.models.look_up(request.model)
            request.model = model.id
            incoming, name = IncomingRequest(scope, receive, deadlines), model.registry_name
            if model.kind == "generation":
                client = self.worker_client
                return await transcribe(client, model, request, form.path, incoming, send)
            payloads = [request.transcription_input(form.path)]
            builder = TranscriptBuilder(request, self.worker_client.metrics.audio_s)
            stream = DeltaStream[TranscriptDelta](self.worker_client, name, payloads, incoming)
            with stream:
                await respond(scope, send, stream, builder)
