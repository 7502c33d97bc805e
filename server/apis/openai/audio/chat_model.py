"""Transcripts by a chat model that takes recordings: a message with the recording and a request for
its text, and the response as a transcript without times.

    upload → bytes → Chat → submit → deltas of text → json or text
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from anyio.to_thread import run_sync
from starlette.types import Send

from batching.errors import InvalidInput
from server.apis.openai.audio.formats import (
    TranscribedTokens,
    Transcription,
    TranscriptTextDelta,
    TranscriptTextDone,
)
from server.apis.openai.audio.request import TranscriptionRequest
from server.apis.openai.endpoint import ResponseBuilder, respond
from server.apis.openai.media import check_media
from server.apis.openai.models import NamedModel
from server.core.delta_stream import TokenStream, UsageCounts
from server.core.worker_client import IncomingRequest, WorkerClient
from server.http.json import to_json
from server.http.sse import data_frame
from worker.messages.deltas import Delta
from worker.messages.generation import Chat, GenerationInput, MediaInput, Sampling

FORMATS = ("json", "text")


class ChatTranscriptBuilder(ResponseBuilder[Delta]):
    def __init__(self, request: TranscriptionRequest, usage: UsageCounts) -> None:
        self.request = request
        self.streams = bool(request.stream)
        self._usage = usage
        self._text = ""

    def entries(self, delta: Delta) -> int:
        return 1

    def add(self, delta: Delta) -> Iterator[bytes]:
        if delta.text:
            self._text += delta.text
            yield data_frame(TranscriptTextDelta(delta.text))

    def finish(self) -> Iterator[bytes]:
        yield data_frame(TranscriptTextDone(self._text.strip(), self._tokens))

    def build(self, deltas: Sequence[Delta]) -> bytes:
        text = "".join(delta.text for delta in deltas).strip()
        if self.request.format == "text":
            self.media_type = b"text/plain; charset=utf-8"
            return f"{text}\n".encode()
        return to_json(Transcription(text, self._tokens))

    @property
    def _tokens(self) -> TranscribedTokens:
        usage = self._usage
        total = usage.prompt + usage.completion
        return TranscribedTokens(usage.prompt, usage.completion, total)


def check_request(request: TranscriptionRequest) -> None:
    """Raise InvalidInput for what a chat model does not give."""
    if request.format not in FORMATS:
        reason = f"{request.format} needs a speech model: a chat model gives {' or '.join(FORMATS)}"
        raise InvalidInput.at("response_format", reason)
    if request.task == "translate":
        raise InvalidInput.at("model", "is a chat model, which transcribes only: ask it in a chat")
    if request.include:
        raise InvalidInput.at("include", "needs a speech model")


async def transcribe(
    worker_client: WorkerClient,
    model: NamedModel,
    request: TranscriptionRequest,
    path: str,
    incoming: IncomingRequest,
    send: Send,
) -> None:
    """Respond with the transcript of the recording at `path`."""
    check_request(request)
    scope = incoming.scope
    recording = MediaInput(b"", "auto", "file", kind="audio")
    async with model.loaded(incoming) as text_model:
        check_media(Chat((), media=(recording,)), text_model)
        chat = text_model.transcription_chat(request.prompt, request.language)
    file = await run_sync(Path(path).stat)
    scope["app"].count_body(scope, file.st_size)  # it is in memory from here on
    recording = replace(recording, data=await run_sync(Path(path).read_bytes))
    payload = GenerationInput(
        replace(chat, media=(recording,)),
        Sampling(temperature=request.temperature or 0.0),
        adapter=model.adapter,
        cache_namespace=scope["context"].cache_namespace(model.id, None),
    )
    try:
        with TokenStream(worker_client, model.registry_name, [payload], incoming) as stream:
            await respond(scope, send, stream, ChatTranscriptBuilder(request, stream.usage))
    except InvalidInput as error:
        if error.param == "messages":
            error.param = "prompt" if request.prompt else "language" if request.language else None
        raise
