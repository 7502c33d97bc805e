"""Image files of a conversation as they are looked at: decoded within bounds, one after the other.

    headers of all → sizes and their sum → one: in the album, or decoded, upright, RGB, a View → the
    next → the text with all views (processor.py)

In pool threads. Of requests with pictures that are new, one is read at a time, so that those of
text have the other threads; what their tensors take until the model has looked at them is bounded:
beyond that, requests wait without a thread.
"""

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

from PIL import Image

from batching.errors import InvalidInput
from worker.media.decode_limiter import DecodeLimiter, Lease
from worker.media.images import decode_image, open_image, upright_rgb
from worker.messages.generation import ImageInput
from worker.messages.protocol import Pending
from worker.vision.encoder import EncoderCache
from worker.vision.processor import ImageFeatures, Processor, ProcessorOutput

# Pixels of a request's images together: so many times those that one may have.
TIMES_IN_ALL = 4
ROUGH_SIDE = 512  # pixels, of what is looked at with `detail: low`
HELD_BYTES = 1 << 30


class ImagePreprocessor:
    """How a model sees. `most_pixels`: of an image, and of all that are decoded at a time."""

    def __init__(
        self, processor: Processor, most_pixels: int, held_bytes: int = HELD_BYTES
    ) -> None:
        self.processor = processor
        self.budget = DecodeLimiter(most_pixels)
        self.held = MemoryLimiter(held_bytes)
        self.album = EncoderCache()
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="pictures")  # for those put back

    @contextmanager
    def turn(self, pictures: Sequence[ImageInput]) -> Iterator[None]:
        """To `process` them. Pending while those of another request are read, or take all memory
        there is for them, unless all of these are known."""
        if all(self.album.view(each.digest) for each in pictures):
            yield
            return
        if not self.held.enter():
            raise Pending(self.held.then)
        try:
            yield
        finally:
            self.held.leave()

    def process(
        self, text: str, pictures: Sequence[ImageInput], anew: bool = False
    ) -> ProcessorOutput:
        """As processor.py's; InvalidInput for images that are broken or too large. `anew`: pixels
        and all, also of those that are known."""
        made = self._made(text, pictures, anew)
        self.held.take(made)
        return made

    def again(self, text: str, pictures: Sequence[ImageInput]) -> Future[ProcessorOutput]:
        """The same, pixels and all, in a thread of its own, whatever memory others take: they may
        wait for it."""
        return self._threads.submit(self.process, text, pictures, anew=True)

    def ids(self, text: str, pictures: Sequence[ImageInput]) -> list[int]:
        """Those of `process`, in that thread: no request takes more than it does."""
        return self._threads.submit(self._made, text, pictures).result().ids

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _made(
        self, text: str, pictures: Sequence[ImageInput], anew: bool = False
    ) -> ProcessorOutput:
        ids = self.processor.words(text)
        self._check_sizes(ids, pictures)
        views: list[ImageFeatures] = []
        for each in pictures:
            known = None if anew else self.album.view(each.digest)
            views.append(known or self._view(each))
            ids += views[-1].count
            self.processor.check_fits(ids, each.param)
        return self.processor.process(text, views)

    def _check_sizes(self, ids: int, pictures: Sequence[ImageInput]) -> None:
        """InvalidInput for what is too much by the headers alone, beside so many ids of text."""
        pixels = 0
        for each in pictures:
            width, height = self._opened(each).size
            pixels += width * height
            if pixels > TIMES_IN_ALL * self.budget.size:
                most = f"at most {TIMES_IN_ALL * self.budget.size} are taken"
                raise InvalidInput.at(each.param, f"the images have {pixels} pixels so far; {most}")
            ids += 0 if each.is_low_detail else self.processor.filled(width, height)
            self.processor.check_fits(ids, each.param)

    def _view(self, picture: ImageInput) -> ImageFeatures:
        with self.budget.lease() as lease:
            image = self._decoded(picture, lease)
            return self.processor.look(image, picture.digest, picture.is_low_detail, picture.param)

    def _decoded(self, picture: ImageInput, lease: Lease) -> Image.Image:
        """Upright, RGB; a rough one small."""
        image = self._opened(picture)
        if picture.is_low_detail:
            image.draft("RGB", (ROUGH_SIDE, ROUGH_SIDE))  # of JPEG, fewer are decoded
        lease.take(image.width * image.height)
        decode_image(image, picture.param)
        image = upright_rgb(image)
        if picture.is_low_detail:
            image.thumbnail((ROUGH_SIDE, ROUGH_SIDE))
        return image

    def _opened(self, picture: ImageInput) -> Image.Image:
        """Its header alone has been read."""
        return open_image(picture.data, picture.param, self.budget.size)


class MemoryLimiter:
    """Bytes of tensors that wait for the model, of all requests; whether one's are being read; who
    waits for room."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.taken = 0
        self.reading = False
        self._waiting: list[Callable[[], None]] = []
        self._lock = threading.RLock()  # taking may collect garbage, and that give back

    @property
    def full(self) -> bool:
        return self.reading or self.taken >= self.most

    def enter(self) -> bool:
        """False if there is no room."""
        with self._lock:
            if self.full:
                return False
            self.reading = True
            return True

    def leave(self) -> None:
        with self._lock:
            self.reading = False
        self._call_those_that_wait()

    def take(self, made: ProcessorOutput) -> None:
        """Until nobody has it any more."""
        size = made.nbytes
        weakref.finalize(made, self._give_back, size)
        with self._lock:
            self.taken += size

    def then(self, wanted: Callable[[], bool], again: Callable[[], None]) -> None:
        """Call `again` once there is room."""
        with self._lock:
            self._waiting.append(lambda: again() if wanted() else None)
        self._call_those_that_wait()

    def _give_back(self, size: int) -> None:
        with self._lock:
            self.taken -= size
        self._call_those_that_wait()

    def _call_those_that_wait(self) -> None:
        with self._lock:
            ready, self._waiting = (self._waiting, []) if not self.full else ([], self._waiting)
        for call in ready:
            call()
