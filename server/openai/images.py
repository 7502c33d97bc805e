"""Images of a conversation: parts of a message, checked, and fetched where they are links.

    part → Picture (parse) → its link's bytes (http/fetch.py) → decoded with the prompt (a pool)

A part is a data: URL or a link, never a path. How many a request may have is known before any is
decoded from its base64.
"""

import asyncio
import time
from dataclasses import dataclass, replace
from typing import Literal

from msgspec import Struct
from starlette.types import Receive, Scope

from batching.errors import ClientGone, DeadlineExceeded, InvalidInput, QueueFull
from server.core.worker_client import WorkerClient
from server.http.fetch import Fetcher
from worker.media.data_urls import to_bytes
from worker.messages.generation import Chat, ImageInput
from worker.messages.protocol import TextModel

MOST_PICTURES = 20  # of a request
Detail = Literal["auto", "low", "high", "original"]


class ImageUrl(Struct):
    url: str
    detail: Detail | None = None


def image_input(url: str, detail: Detail | None, path: str) -> ImageInput:
    """Of a part at `path`, whose URL errors call `path`.image_url."""
    detail = detail or "auto"
    param, scheme = f"{path}.image_url", url[:8].lower()
    if scheme.startswith(("http://", "https://")):
        return ImageInput(b"", detail, param, url)
    if not scheme.startswith("data:"):
        raise InvalidInput.at(param, "must be a data: URL, or a link; paths are not opened")
    return ImageInput(to_bytes(url, param), detail, param)


def check_images(chat: Chat, model: TextModel) -> None:
    """InvalidInput for images that the model does not see."""
    if chat.images and model.no_images:
        raise InvalidInput.at(chat.images[0].param, model.no_images)


@dataclass(eq=False)
class ImageLoader:
    """What fetches the images of requests."""

    worker_client: WorkerClient
    fetcher: Fetcher
    fetching: int = 0  # requests: they have no place in the queue yet

    async def fetched(self, scope: Scope, receive: Receive, chat: Chat, deadline: float) -> Chat:
        """With the bytes of its links. InvalidInput where one is not fetched, QueueFull,
        DeadlineExceeded, ClientGone."""
        check_images(chat, self.worker_client.generator)
        links = [each for each in chat.images if each.link]
        if not links:
            return chat
        for each in links:
            self.fetcher.check(each.link, each.param)
        queue = self.worker_client.queue
        if queue.pending + self.fetching >= queue.capacity:
            full = f"the queue is full: {queue.pending + self.fetching} places are taken"
            raise QueueFull(full, 1.0)
        self.fetching += 1
        try:
            async with asyncio.timeout(deadline - time.monotonic()), asyncio.TaskGroup() as group:
                watch = group.create_task(raise_when_gone(receive))
                tasks = [group.create_task(self._picture(scope, each)) for each in chat.images]
                await asyncio.wait(tasks)
                watch.cancel()
        except TimeoutError:
            late = "the images were not fetched within the request's time limit"
            raise DeadlineExceeded(late) from None
        except BaseExceptionGroup as several:
            raise several.exceptions[0] from None
        finally:
            self.fetching -= 1
        return replace(chat, images=tuple(task.result() for task in tasks))

    async def _picture(self, scope: Scope, image_input: ImageInput) -> ImageInput:
        if not image_input.link:
            return image_input
        app = scope["app"]

        def count(more: int) -> None:
            app.count_body(scope, more)

        data = await self.fetcher.fetch(image_input.link, image_input.param, count)
        return replace(image_input, data=data, link="")


async def raise_when_gone(receive: Receive) -> None:
    """ClientGone as soon as the client leaves."""
    while (await receive())["type"] != "http.disconnect":
        pass
    raise ClientGone("the client has gone")
