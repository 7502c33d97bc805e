"""The media of a conversation: checked when parsed, and fetched where they are links.

    content part → MediaInput → bytes of its link (http/fetch.py) → decoded by the worker's pool

A file is a data: URL or a link, never a path.
"""

import asyncio
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

from msgspec import Meta, Struct

from batching.errors import ClientGone, DeadlineExceeded, InvalidInput, QueueFull
from server.core.worker_client import IncomingRequest, WorkerClient, wait_for_disconnect
from server.http.fetch import Fetcher
from worker.media.data_urls import to_bytes
from worker.messages.generation import (
    LIMITS,
    MAX_FRAMES,
    MAX_MEDIA,
    WHITE,
    Chat,
    MediaInput,
    MediaKind,
)
from worker.messages.protocol import TextModel
from worker.registry import TextModelInfo

Detail = Literal["auto", "low", "high", "original"]
T = TypeVar("T")
# The container is read from the data: these names are checked, and nothing more.
FORMATS: Mapping[MediaKind, Sequence[str]] = {
    "audio": ("wav", "mp3", "flac", "ogg", "opus", "m4a", "mp4", "aac", "webm"),
    "video": ("mp4", "m4v", "mov", "webm", "mkv"),
}
Pixels = Annotated[int, Meta(ge=1)]
Byte = Annotated[int, Meta(ge=0, le=255)]
FrameRate = Annotated[float, Meta(gt=0, le=1000)]
FrameCount = Annotated[int, Meta(ge=1, le=MAX_FRAMES)]


class MediaLimits(Struct):
    """`min_pixels`, `max_pixels`: of each image, as Qwen's processors and those after them have
    them. `fps`, `num_frames`: of the frames that are chosen of each video. `use_audio_in_video`:
    each video is followed by its sound."""

    min_pixels: Pixels | None = None
    max_pixels: Pixels | None = None
    fps: FrameRate | None = None
    num_frames: FrameCount | None = None
    use_audio_in_video: bool | None = None


class ImageDecoding(Struct):
    image_mode: Literal["RGB"] | None = None
    rgba_background_color: tuple[Byte, Byte, Byte] | None = None


class VideoDecoding(Struct):
    fps: FrameRate | None = None
    num_frames: FrameCount | None = None


class MediaDecoding(Struct):
    image: ImageDecoding | None = None
    video: VideoDecoding | None = None


class ImageUrl(Struct):
    url: str
    detail: Detail | None = None


class FileUrl(Struct):
    url: str


class FileData(Struct):
    """`data`: of the file, in base64."""

    data: str
    format: str

    def media_input(self, param: str, kind: MediaKind) -> MediaInput:
        if self.format.lower() not in FORMATS[kind]:
            accepted = f"is not {self.format[:20]!r} but one of {', '.join(FORMATS[kind])}"
            raise InvalidInput.at(f"{param}.format", accepted)
        return MediaInput(to_bytes(self.data, f"{param}.data"), "auto", param, kind=kind)


def url_input(url: str, detail: Detail | None, param: str, kind: MediaKind = "image") -> MediaInput:
    """Return the file of the URL in a field; InvalidInput for an unsupported URL."""
    detail, scheme = detail or "auto", url[:8].lower()
    if scheme.startswith(("http://", "https://")):
        return MediaInput(b"", detail, param, url, kind=kind)
    if not scheme.startswith("data:"):
        raise InvalidInput.at(param, "must be a data: URL or a link; file paths are not opened")
    return MediaInput(to_bytes(url, param), detail, param, kind=kind)


def check_media(chat: Chat, model: TextModel | TextModelInfo) -> None:
    """Raise InvalidInput if there are media of a kind that the model takes none of."""
    for file in chat.media:
        if reason := model.refused_media.get(file.kind):
            raise InvalidInput.at(file.param, reason)


def with_options(chat: Chat, limits: MediaLimits | None, decoding: MediaDecoding | None) -> Chat:
    """Return a chat whose files have the options that a request has for all of their kind."""
    limits, decoding = limits or MediaLimits(), decoding or MediaDecoding()
    image, video = decoding.image or ImageDecoding(), decoding.video or VideoDecoding()
    pixels = _given({"min_pixels": limits.min_pixels, "max_pixels": limits.max_pixels})
    frames = _given({"fps": limits.fps, "num_frames": limits.num_frames})
    frames = frames or _given({"fps": video.fps, "num_frames": video.num_frames})
    if len(frames) > 1:
        raise InvalidInput.at(f"{LIMITS}.num_frames", "cannot be combined with fps")
    by_kind = {"image": pixels, "video": frames}
    background = image.rgba_background_color or WHITE
    media = tuple(
        replace(file, limits=by_kind.get(file.kind, ()), background=background)
        for file in chat.media
    )
    chat = replace(chat, media=media)
    return with_sound(chat) if limits.use_audio_in_video else chat


def with_sound(chat: Chat) -> Chat:
    """Return a chat in which the sound of each video is a recording behind it."""
    files, messages, media = iter(chat.media), list[Mapping[str, Any]](), list[MediaInput]()
    for message in chat.messages:
        parts = message["content"]
        if isinstance(parts, list):
            content = list[Mapping[str, Any]]()
            for part in parts:
                content.append(part)
                if part["type"] != "text":
                    media.append(next(files))
                if part["type"] == "video":
                    content.append({"type": "audio", "in_video": True})
                    media.append(replace(media[-1], kind="audio", limits=(), in_video=True))
            message = {**message, "content": content}
        messages.append(message)
    if len(media) > MAX_MEDIA:
        reason = f"makes {len(media)} media of a request; at most {MAX_MEDIA} are accepted"
        raise InvalidInput.at(f"{LIMITS}.use_audio_in_video", reason)
    return replace(chat, messages=tuple(messages), media=tuple(media))


def _given(limits: Mapping[str, float | None]) -> tuple[tuple[str, float], ...]:
    return tuple((name, value) for name, value in limits.items() if value is not None)


@dataclass(eq=False)
class MediaLoader:
    """Fetches the files of requests. `fetching` counts requests, which are not queued yet."""

    worker_client: WorkerClient
    fetcher: Fetcher
    fetching: int = 0

    async def load(self, incoming: IncomingRequest, chat: Chat) -> Chat:
        """Return the chat with the bytes of its links; a disconnect or a failure cancels all.

        InvalidInput for a file that cannot be fetched, QueueFull, DeadlineExceeded, ClientGone."""
        if not any(file.link for file in chat.media):
            return chat
        scope, queue = incoming.scope, self.worker_client.queue
        if self.fetching >= queue.capacity or not queue.has_room(scope["context"]):
            taken = f"{queue.pending + self.fetching} of {queue.capacity} slots are in use"
            raise QueueFull(f"the queue is full: {taken}", 1.0)
        self.fetching += 1
        first = {file.link: file for file in reversed(chat.media) if file.link}
        count = partial(scope["app"].count_body, scope)
        fetches = [
            self.fetcher.fetch(link, file.param, count, file.kind) for link, file in first.items()
        ]
        try:
            fetched = await while_connected(incoming, fetches, "the files were not fetched")
        finally:
            self.fetching -= 1
        data = dict(zip(first, fetched, strict=True))
        media = (
            replace(file, data=data[file.link], link="") if file.link else file
            for file in chat.media
        )
        return replace(chat, media=tuple(media))


async def while_connected(
    incoming: IncomingRequest, work: Sequence[Coroutine[Any, Any, T]], failure: str
) -> list[T]:
    """Return the results of coroutines that run side by side. A disconnect, the deadline and the
    first error cancel all. Raises ClientGone, that error, and DeadlineExceeded with `failure`."""
    left_s = incoming.deadlines.first - time.monotonic()

    async def watch_client() -> None:
        if incoming.receive:
            await wait_for_disconnect(incoming.receive)
            raise ClientGone("the client has gone")

    try:
        async with asyncio.timeout(left_s), asyncio.TaskGroup() as group:
            watch = group.create_task(watch_client())
            tasks = [group.create_task(coroutine) for coroutine in work]
            await asyncio.wait(tasks)
            watch.cancel()
    except TimeoutError:
        raise DeadlineExceeded(f"{failure} within the request's time limit") from None
    except BaseExceptionGroup as group_error:
        # `receive` also tells of a disconnect once the coroutines have sent the whole response
        if any(task.cancelled() for task in tasks):
            raise group_error.exceptions[0] from None
    return [task.result() for task in tasks]
