"""`POST /v1/audio/transcriptions` and `/v1/audio/translations`: a recording in, what it says out.

    upload → fields → submit → first segment or refusal → headers → events, or one document

The recording is on disk until it is answered, and is read from there (worker/speech). A stream's
headers wait for the first segment, so that refusals are real status codes.
"""

import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from starlette.types import Receive, Scope, Send

from batching.errors import ClientGone
from server.engine import Engine
from server.http.errors import as_http_error
from server.http.json import Document, to_json
from server.http.request import abort_on_disconnect
from server.http.sse import DONE, EventStream
from server.http.upload import Uploads
from server.openai.audio.formats import Transcript, render
from server.openai.audio.request import TranslationRequest, read_fields
from server.openai.audio.transcript_stream import Heard, TranscriptStream
from server.openai.models import ModelNames
from server.openai.request import token_document
from server.settings import Settings
from worker.transcription import TranscriptDelta

log = logging.getLogger("onequeue.transcription")

PATHS = "/v1/audio/transcriptions", "/v1/audio/translations"


@dataclass(eq=False)
class SpeechEndpoint:
    """A bare ASGI app; `kind` says whether it transcribes or translates."""

    settings: Settings
    engine: Engine
    models: ModelNames
    uploads: Uploads
    kind: type[TranslationRequest]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self.uploads.form(scope, receive, "transcription") as (form, deadlines):
            request = read_fields(form.fields, self.kind)
            request.model = self.models.names.of(request.model)
            stream = TranscriptStream(self.engine, request.input(form.path), deadlines)
            self.engine.loop.create_task(abort_on_disconnect(receive, stream.items))
            try:
                if request.streams:
                    await self._stream(scope, send, request, stream)
                else:
                    await self._answer(send, request, stream)
            finally:
                stream.close()

    async def _answer(
        self, send: Send, request: TranslationRequest, stream: TranscriptStream
    ) -> None:
        transcript = Transcript()
        async for delta in deltas(stream):
            if delta is not None:
                transcript.add(delta)
        self.engine.metrics.audio_s.inc(transcript.seconds)
        content, media = render(transcript, request)
        headers = [(b"content-type", media), (b"content-length", b"%d" % len(content))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": content})

    async def _stream(
        self, scope: Scope, send: Send, request: TranslationRequest, stream: TranscriptStream
    ) -> None:
        first = await stream.read()
        connection = EventStream(send, stream.arrival.set)
        try:
            await connection.open()
            try:
                async for event in events(stream, first, request):
                    if event is None:
                        await connection.comment()
                    else:
                        await connection.write(b"data: %b\n\n" % to_json(event))
            except ClientGone:
                raise
            except Exception as error:
                envelope = as_http_error(error, scope, self.settings.debug)
                self.engine.metrics.errors.labels(envelope.kind).inc()
                await connection.write(b"data: %b\n\n" % to_json(envelope.document))
            await connection.end(DONE)
        except ClientGone as error:
            self.engine.metrics.errors.labels("client_gone").inc()
            log.info("stream ended id=%s because=%r", scope["request_id"].decode(), str(error))
        finally:
            connection.close()


async def deltas(
    stream: TranscriptStream, first: Sequence[TranscriptDelta] = ()
) -> AsyncIterator[TranscriptDelta | None]:
    """From the first on, to the recording's end; None if the reader was woken."""
    for delta in first:
        yield delta
    while True:
        try:
            new = await stream.read()
        except Heard:
            return
        for delta in new:
            yield delta
        if not new:
            yield None


async def events(
    stream: TranscriptStream, first: Sequence[TranscriptDelta], request: TranslationRequest
) -> AsyncIterator[Document | None]:
    """As OpenAI's SDKs type them; None if the reader was woken."""
    transcript = Transcript()
    async for delta in deltas(stream, first):
        if delta is None:
            yield None
        elif new := transcript.add(delta):
            event: Document = {"type": "transcript.text.delta", "delta": new}
            if request.logprobs:
                event["logprobs"] = list(map(token_document, delta.logprobs))
            yield event
    stream.engine.metrics.audio_s.inc(transcript.seconds)
    done: Document = {"type": "transcript.text.done", "text": transcript.text}
    done["usage"] = transcript.usage
    if request.logprobs:
        done["logprobs"] = transcript.logprob_documents()
    yield done
