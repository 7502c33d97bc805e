"""`POST /v1/audio/speech`: a text in, its audio out; `GET /v1/audio/voices`.

    body → sentences, a work item each → samples → encoder (pool thread) → body or events

A sentence is sent when it is spoken. Requests of others come between two sentences. The headers
wait for the first sentence, so refusals and early failures have real status codes.
"""

import time
from base64 import b64encode
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, cast

from anyio.to_thread import run_sync
from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.types import Scope, Send

from batching.errors import InvalidInput
from server.apis.openai.audio.encoding import CODECS, SpeechEncoder, SpeechFormat, check_format
from server.apis.openai.audio.sentences import split_sentences
from server.apis.openai.endpoint import MAX_INLINE_ENTRIES, BodyEndpoint, ResponseBuilder, respond
from server.apis.openai.models import NamedModel
from server.apis.openai.request_fields import Seed, decode, required
from server.core.delta_stream import DeltaStream
from server.core.worker_client import IncomingRequest
from server.http.ignored_fields import ignore_fields
from server.http.json import Document, parse_json
from server.http.operation import JSON, Operation, Schema
from server.http.request import send_at_pace, send_json
from server.http.sse import data_frame
from worker.messages.synthesis import DEFAULT_VOICE, SpeechInput, SpokenAudio

MAX_INPUT = 4096  # characters, as OpenAI has it
NOTHING = "has no text that the model speaks"
TOKENS_PER_S = 20  # of audio, in `usage`
BINARY: Schema = {"type": "string", "format": "binary"}


class VoiceId(Struct):
    id: Annotated[str, Meta(min_length=1, max_length=200)]


class SpeechRequest(Struct, kw_only=True):
    unimplemented: ClassVar[dict[str, tuple[Any, ...]]] = {"instructions": ("",)}

    model: str | None = None
    input: Annotated[str, Meta(min_length=1, max_length=MAX_INPUT)] | None = None
    voice: Annotated[str, Meta(min_length=1, max_length=200)] | VoiceId | None = None
    response_format: SpeechFormat | None = None
    speed: Annotated[float, Meta(ge=0.25, le=4)] | None = None
    stream_format: Literal["audio", "sse"] | None = None
    seed: Seed | None = None

    @property
    def format(self) -> SpeechFormat:
        return self.response_format or "mp3"


SpeechTask = tuple[SpeechRequest, NamedModel, Sequence[SpeechInput]]


class SpeechStream(DeltaStream[SpokenAudio]):
    """The sentences of a request, in their order. Unread audio counts as memory of the request:
    where that is short, the connections of the slowest readers end."""

    def __post_init__(self) -> None:
        self._num_pushed = self._read_bytes = 0
        super().__post_init__()

    def _on_done(self, future: Any) -> None:
        super()._on_done(future)
        if self._end is not None:
            return
        scope, _, deadlines = self.incoming
        now, transfer = time.monotonic(), scope["transfer"]
        for item in self.items:  # progress gives the later sentences more time
            item.progress_at = now
            item.deadline = min(now + deadlines.idle_s, deadlines.whole)
        for item in self.items[self._num_pushed :]:
            done = item.future
            if not done.done() or done.cancelled() or done.exception():
                break
            self._num_pushed += 1
            audio = cast(SpokenAudio, done.result())
            self.worker_client.metrics.spoken_s.inc(len(audio.samples) / audio.rate)
            scope["app"].memory.hold(transfer, transfer.held + audio.samples.nbytes)
            self.push(audio)

    async def read(self) -> list[SpokenAudio]:
        scope = self.incoming.scope
        scope["app"].memory.give_back(scope["transfer"], self._read_bytes)  # those were sent
        audios = await super().read()
        self._read_bytes = sum(audio.samples.nbytes for audio in audios)
        return audios


class SpeechBuilder(ResponseBuilder[SpokenAudio]):
    """Builds the response of `count` sentences, as bytes of a format or as events with them."""

    streams = True

    def __init__(self, request: SpeechRequest, count: int) -> None:
        self.request, self._left = request, count
        self._encoder: SpeechEncoder | None = None
        self._tokens, self._seconds = 0, 0.0

    def entries(self, delta: SpokenAudio) -> int:
        return MAX_INLINE_ENTRIES + 1  # encoded in a pool thread

    def encode(self, audio: SpokenAudio) -> bytes:
        self._encoder = self._encoder or SpeechEncoder(self.request.format, audio.rate)
        self._left -= 1
        self._tokens += audio.tokens
        self._seconds += len(audio.samples) / audio.rate
        return self._encoder.encode(audio.samples, is_last=not self._left)

    def add(self, delta: SpokenAudio) -> Iterator[bytes]:
        audio = b64encode(self.encode(delta)).decode()
        yield data_frame({"type": "speech.audio.delta", "audio": audio})

    def finish(self) -> Iterator[bytes]:
        if not self._seconds:
            raise InvalidInput.at("input", NOTHING)
        tokens, output = self._tokens, round(self._seconds * TOKENS_PER_S)
        usage = {"input_tokens": tokens, "output_tokens": output, "total_tokens": tokens + output}
        yield data_frame({"type": "speech.audio.done", "usage": usage})

    def build(self, deltas: Sequence[SpokenAudio]) -> bytes:
        return b"".join(map(self.encode, deltas))


@Operation(
    "POST /v1/audio/speech",
    "The audio of a text",
    {codec.media.decode(): BINARY for codec in CODECS.values()},
    SpeechRequest,
    stream="With stream_format: sse. speech.audio.delta with base64, speech.audio.done, [DONE].",
)
@dataclass(eq=False)
class SpeechEndpoint(BodyEndpoint[SpeechTask]):
    def parse(self, body: bytes, scope: Scope) -> SpeechTask:
        request = decode(parse_json(body), SpeechRequest, self.models.id_for, scope)
        check_format(request.format)
        if not (sentences := split_sentences(required(request.input, "input"))):
            raise InvalidInput.at("input", "has no letter and no digit to speak")
        model, seed, voice = self.models.find(request.model), request.seed, request.voice
        name = voice.id if isinstance(voice, VoiceId) else voice
        if name not in (None, DEFAULT_VOICE) and (info := model.served.info) and not info.voices:
            ignore_fields(["voice"], scope)
        seed = self.settings.default_seed if seed is None else seed
        values = {"voice": name, "speed": request.speed, "seed": seed}
        parameters = {name: value for name, value in values.items() if value is not None}
        speak = partial(SpeechInput, parameters=parameters, is_part=len(sentences) > 1)
        return request, model, [*map(speak, sentences)]

    async def serve(self, incoming: IncomingRequest, send: Send, request: SpeechTask) -> None:
        body, model, payloads = request
        scope, builder = incoming.scope, SpeechBuilder(body, len(payloads))
        with SpeechStream(self.worker_client, model.registry_name, payloads, incoming) as stream:
            if body.stream_format == "sse":
                return await respond(scope, send, stream, builder)
            audios = await stream.read()
            while stream.unfinished and not any(len(audio.samples) for audio in audios):
                audios += await stream.read()
            if not any(len(audio.samples) for audio in audios):
                raise InvalidInput.at("input", NOTHING)
            headers, media = stream.timing_headers(), CODECS[body.format].media
            if not stream.unfinished:
                content = await run_sync(builder.build, audios)
                return await send_json(send, content, headers=headers, media=media)
            headers = [(b"content-type", media), *headers]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            while audios:
                for audio in audios:
                    piece = await run_sync(builder.encode, audio)
                    message = {"type": "http.response.body", "body": piece, "more_body": True}
                    await send_at_pace(send, scope["transfer"], message)
                audios = await stream.read() if stream.unfinished else []
            await send({"type": "http.response.body", "body": b""})

    @Operation("GET /v1/audio/voices", "The voices of the loaded models", {JSON: {}})
    async def voices(self, request: Request) -> Document:
        described = [(model.id, model.served.info) for model in self.models.models]
        voices = [
            {"id": voice, "name": voice, "model": id}
            for id, info in described
            if info
            for voice in info.voices or [DEFAULT_VOICE]
        ]
        return {"voices": voices}
