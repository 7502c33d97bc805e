"""Image files of a conversation as they are looked at: decoded within bounds, one after the other.

    headers of all → sizes and their sum → one: decoded, upright, RGB → processor.py → the next

In pool threads, a request at a time, so that those of text have the others. What the tensors of all
take until the model has looked at them is bounded: beyond that, requests wait without a thread.
"""

import threading
import weakref
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing

from PIL import Image
from torch import Tensor

from batching.errors import InvalidInput
from worker.decode_budget import DecodeBudget
from worker.image_files import decode_image, open_image, upright_rgb
from worker.protocol import Pending, Picture
from worker.vision.processor import Processed, Processor, Seen

# Pixels of a request's images together: so many times those that one may have.
TIMES_IN_ALL = 4
ROUGH_SIDE = 512  # pixels, of what is looked at with `detail: low`
HELD_BYTES = 1 << 30


class Sight:
    """How a model sees. `most_pixels`: of an image, and of all that are decoded at a time."""

    def __init__(
        self, processor: Processor, most_pixels: int, held_bytes: int = HELD_BYTES
    ) -> None:
        self.processor = processor
        self.budget = DecodeBudget(most_pixels)
        self.held = Held(held_bytes)
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="pictures")  # for those put back

    def process(self, text: str, pictures: Sequence[Picture]) -> Processed:
        """As processor.py's; InvalidInput for images that are broken or too large, and Pending
        while those of another request are read, or take all memory there is for them."""
        if not self.held.enter():
            raise Pending(self.held.then)
        try:
            return self._held(text, pictures)
        finally:
            self.held.leave()

    def check_room(self) -> None:
        """Pending where `process` would raise it: before the text is made."""
        if self.held.full:
            raise Pending(self.held.then)

    def again(self, text: str, pictures: Sequence[Picture]) -> Future[Processed]:
        """The same in a thread of its own, whatever memory others take: they may wait for it."""
        return self._threads.submit(self._held, text, pictures)

    def ids(self, text: str, pictures: Sequence[Picture]) -> list[int]:
        """Those of `process`, in that thread: no request takes more than it does."""
        return self._threads.submit(self._made, text, pictures).result().ids

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _held(self, text: str, pictures: Sequence[Picture]) -> Processed:
        made = self._made(text, pictures)
        self.held.take(made)
        return made

    def _made(self, text: str, pictures: Sequence[Picture]) -> Processed:
        self._check_sizes(text, pictures)
        with closing(self._seen(pictures)) as images:
            return self.processor.process(text, images)

    def _check_sizes(self, text: str, pictures: Sequence[Picture]) -> None:
        """InvalidInput for what is too much by the headers alone."""
        pixels, ids = 0, self.processor.words(text)
        for each in pictures:
            width, height = self._opened(each).size
            pixels += width * height
            if pixels > TIMES_IN_ALL * self.budget.size:
                most = f"at most {TIMES_IN_ALL * self.budget.size} are taken"
                raise InvalidInput.at(each.param, f"the images have {pixels} pixels so far; {most}")
            ids += self.processor.filled(width, height) if each.detail != "low" else 0
            self.processor.check_fits(ids, each.param)

    def _seen(self, pictures: Sequence[Picture]) -> Generator[Seen, None, None]:
        for each in pictures:
            with self.budget.lease() as lease:
                image, rough = self._opened(each), each.detail == "low"
                if rough:
                    image.draft("RGB", (ROUGH_SIDE, ROUGH_SIDE))  # of JPEG, fewer are decoded
                lease.take(image.width * image.height)
                yield Seen(_looked_at(image, rough, each.param), rough, each.param)

    def _opened(self, picture: Picture) -> Image.Image:
        """Its header alone has been read."""
        image = open_image(picture.data, picture.param, self.budget.size)
        width, height = image.size
        if width * height > self.budget.size:
            large = f"the image has {width} x {height} pixels; at most {self.budget.size} are taken"
            raise InvalidInput.at(picture.param, large)
        return image


def _looked_at(image: Image.Image, rough: bool, param: str) -> Image.Image:
    decode_image(image, param)
    image = upright_rgb(image)
    if rough:
        image.thumbnail((ROUGH_SIDE, ROUGH_SIDE))
    return image


class Held:
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

    def take(self, made: Processed) -> None:
        """Until nobody has it any more."""
        parts = [each for part in (made.inputs, *made.images) for each in part.values()]
        size = sum(each.nbytes for each in parts if isinstance(each, Tensor))
        weakref.finalize(made, self._give_back, size)
        with self._lock:
            self.taken += size

    def then(self, wanted: Callable[[], bool], again: Callable[[], None]) -> None:
        """Call `again` once there is room."""

        def call() -> None:
            if wanted():
                again()

        with self._lock:
            if self.full:
                self._waiting.append(call)
                return
        call()

    def _give_back(self, size: int) -> None:
        with self._lock:
            self.taken -= size
        self._call_those_that_wait()

    def _call_those_that_wait(self) -> None:
        with self._lock:
            ready, self._waiting = (self._waiting, []) if not self.full else ([], self._waiting)
        for call in ready:
            call()
