"""`POST /v1/audio/transcriptions` and `/v1/audio/translations`: a recording in, its text out.

    upload → fields → submit → first segment or refusal → headers → events, or one document

The recording is a temporary file, which the worker reads (engines/speech), until the response is
sent. A chat model gets it in a message that asks for its text: a transcript without times.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from anyio.to_thread import run_sync
from msgspec import UNSET
from prometheus_client import Counter
from starlette.types import Receive, Scope, Send

from batching.errors import InvalidInput
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
from server.apis.openai.media import check_media
from server.apis.openai.models import ModelGroup, NamedModel
from server.core.delta_stream import DeltaStream, TokenStream
from server.core.worker_client import IncomingRequest, WorkerClient
from server.http.operation import FORM, TEXT, Operation
from server.http.sse import data_frame
from server.http.upload import Uploads
from worker.messages.generation import Chat, GenerationInput, MediaInput, Sampling
from worker.messages.transcription import TranscriptDelta

CHAT_FORMATS = ("json", "text")  # of a chat model's transcripts
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

    def add(self, delta: TranscriptDelta) -> Iterator[bytes]:
        if text := self.transcript.add(delta):
            logprobs = list(map(scored_token, delta.logprobs)) if self.request.include else UNSET
            yield data_frame(TranscriptTextDelta(text, logprobs))

    def finish(self) -> Iterator[bytes]:
        transcript = self.transcript
        self.seconds.inc(transcript.seconds)
        logprobs = token_scores(transcript, self.request)
        yield data_frame(TranscriptTextDone(transcript.text.rstrip(), transcript.usage, logprobs))

    def build(self, deltas: Sequence[TranscriptDelta]) -> bytes:
        for delta in deltas:
            self.transcript.add(delta)
        self.seconds.inc(self.transcript.seconds)
        self.media_type, encode = ENCODERS[self.request.format]
        return encode(self.transcript, self.request)


class ChatTranscriptStream(TokenStream):
    """The text of a chat model, in the deltas of a speech model."""

    def take(self) -> list[Any]:
        return [TranscriptDelta(delta.text) for delta in super().take()]


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
            incoming = IncomingRequest(scope, receive, deadlines)
            builder = TranscriptBuilder(request, self.worker_client.metrics.audio_s)
            kind: type[DeltaStream[Any]] = DeltaStream
            payload: object = request.transcription_input(form.path)
            if model.kind == "generation":
                kind = ChatTranscriptStream
                payload = await chat_input(incoming, model, request, Path(form.path))
            with kind(self.worker_client, model.registry_name, [payload], incoming) as stream:
                if isinstance(stream, TokenStream):
                    builder.transcript.counts = stream.usage
                await respond(scope, send, stream, builder)


async def chat_input(
    incoming: IncomingRequest, model: NamedModel, request: TranscriptionRequest, path: Path
) -> GenerationInput:
    """Return a message with the recording. Raises InvalidInput for what a chat model does not
    give."""
    if request.format not in CHAT_FORMATS:
        accepted = " or ".join(CHAT_FORMATS)
        reason = f"{request.format} needs a speech model: a chat model gives {accepted}"
        raise InvalidInput.at("response_format", reason)
    if request.task == "translate":
        raise InvalidInput.at("model", "is a chat model, which transcribes only: ask it in a chat")
    if request.include:
        raise InvalidInput.at("include", "needs a speech model")
    scope = incoming.scope
    recording = MediaInput(b"", "auto", "file", kind="audio")
    async with model.loaded(incoming) as text_model:
        check_media(Chat((), media=(recording,)), text_model)
        chat = text_model.transcription_chat(request.prompt, request.language)
    file = await run_sync(path.stat)
    scope["app"].count_body(scope, file.st_size)  # it is in memory from here on
    recording = replace(recording, data=await run_sync(path.read_bytes))
    return GenerationInput(
        replace(chat, media=(recording,)),
        Sampling(temperature=request.temperature or 0.0),
        param="prompt" if request.prompt else "language" if request.language else "file",
        adapter=model.adapter,
        cache_namespace=scope["context"].cache_namespace(model.id, None),
    )
