"""Turns the image files of a chat into a processed prompt, within limits of pixels and memory.

    headers → sizes of all images → each image: cached, or decoded, upright, RGB, processed → the
    text with the features of all images (processor.py)

Runs in pool threads. The images of one request are decoded at a time, so that requests of text have
the other threads. The bytes of tensors that wait for the encoder are limited; beyond the limit,
requests wait without holding a thread.
"""

import threading
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

from PIL import Image

from batching.errors import InvalidInput
from worker.media.images import decode_image, open_image, upright_rgb
from worker.messages.generation import LIMITS, ImageInput
from worker.messages.protocol import IsWanted, Notify, Pending
from worker.model.paged_runner import PagedRunner
from worker.vision.encoder import EncoderCache, VisionEncoder
from worker.vision.encoder_scheduler import EncoderScheduler, OnFailure
from worker.vision.processor import ImageFeatures, Processor, ProcessorOutput

# The images of a request may have this many times the pixels of a single image.
REQUEST_PIXELS_RATIO = 4
LOW_DETAIL_SIDE = 512  # pixels of the longer side of an image with `detail: low`
MAX_WAITING_BYTES = 1 << 30
MAX_LIMIT = 16384 * 28 * 28  # pixels: the largest that Qwen's processors have themselves
MAX_TOKEN_PIXELS = 1 << 10  # of an image, for each token: images with more do not fit the context


class ImagePreprocessor:
    """`max_pixels`: of one image, and of all that are decoded at the same time. `max_bytes`: of
    tensors that wait for the encoder."""

    def __init__(
        self, processor: Processor, max_pixels: int, max_bytes: int = MAX_WAITING_BYTES
    ) -> None:
        self.processor = processor
        self.max_pixels = max_pixels
        self._decode_lock = threading.Lock()  # also held by `recompute`
        self.memory_limiter = MemoryLimiter(max_bytes)
        self.cache = EncoderCache()
        self._recompute_thread = ThreadPoolExecutor(1, thread_name_prefix="images")

    def new_scheduler(self, runner: PagedRunner, on_failure: OnFailure) -> EncoderScheduler:
        """Return a scheduler of the encoder, with an empty cache."""
        self.cache = EncoderCache()
        return EncoderScheduler(VisionEncoder(runner, self.cache), on_failure)

    @contextmanager
    def admit(self, images: Sequence[ImageInput], cache_namespace: bytes = b"") -> Iterator[None]:
        """Call `process` inside. Raises Pending while another request decodes its images or the
        memory limit is reached, unless all of these images are cached."""
        if all(self.cache.get(image.cache_key(cache_namespace)) for image in images):
            yield
            return
        if not self.memory_limiter.start_decoding():
            raise Pending(self.memory_limiter.call_when_free)
        try:
            yield
        finally:
            self.memory_limiter.end_decoding()

    def process(
        self,
        text: str,
        images: Sequence[ImageInput],
        cache_namespace: bytes = b"",
        is_wanted: IsWanted = lambda: True,
        use_cache: bool = True,
    ) -> ProcessorOutput:
        """Return the processed prompt. Cached images are shared within `cache_namespace` only;
        without `use_cache` all images have their pixels. Raises InvalidInput for images that are
        broken or too large, ClientGone once not `is_wanted()`."""
        tokens = self.processor.count_text_tokens(text)
        self.processor.check_fits(tokens, images[0].param)
        self._check_sizes(images, is_wanted)
        processed: list[ImageFeatures] = []
        for image in images:
            key = image.cache_key(cache_namespace)
            cached = self.cache.get(key) if use_cache else None
            processed.append(cached or self._features(image, key, is_wanted))
            tokens += processed[-1].token_count
            self.processor.check_fits(tokens, image.param)
        output = self.processor.process_text(text, processed)
        self.memory_limiter.reserve(output)
        return output

    def recompute(
        self, text: str, images: Sequence[ImageInput], cache_namespace: bytes = b""
    ) -> Future[ProcessorOutput]:
        """Call `process` without the cache in a thread of its own. It does not wait for the memory
        limit, since the requests that hold the memory may wait for this prompt."""
        return self._recompute_thread.submit(
            self.process, text, images, cache_namespace, use_cache=False
        )

    def token_ids(self, text: str, images: Sequence[ImageInput]) -> list[int]:
        """Return the token ids of a prompt. Runs in the thread of `recompute`, so that concurrent
        calls take no more memory than one."""
        return self._recompute_thread.submit(self.process, text, images).result().ids

    def close(self) -> None:
        self._recompute_thread.shutdown(wait=False, cancel_futures=True)

    def _check_sizes(self, images: Sequence[ImageInput], is_wanted: IsWanted) -> None:
        """Raise InvalidInput if the headers of the images alone exceed the limit of pixels."""
        pixels = 0
        max_pixels = REQUEST_PIXELS_RATIO * self.max_pixels
        fitting = MAX_TOKEN_PIXELS * self.processor.max_tokens
        most = min(self.max_pixels, fitting, MAX_LIMIT)
        for image in images:
            for name, limit in image.limits:
                if limit > most:
                    reason = f"{limit} exceeds the {most} pixels that an image may have"
                    raise InvalidInput.at(f"{LIMITS}.{name}", reason)
            width, height = self._open(image, is_wanted).size
            pixels += width * height
            if pixels > max_pixels:
                raise InvalidInput.at(
                    image.param,
                    f"the images have {pixels} pixels so far; at most {max_pixels} are accepted",
                )

    def _features(self, image: ImageInput, digest: bytes, is_wanted: IsWanted) -> ImageFeatures:
        with self._decode_lock:
            decoded = self._decode(image, is_wanted)
            return self.processor.process_image(
                decoded, digest, image.is_low_detail, image.param, dict(image.limits)
            )

    def _decode(self, image: ImageInput, is_wanted: IsWanted) -> Image.Image:
        """Return an upright RGB image, downscaled if it has low detail."""
        opened = self._open(image, is_wanted)
        if image.is_low_detail:
            opened.draft("RGB", (LOW_DETAIL_SIDE, LOW_DETAIL_SIDE))  # JPEG decodes fewer pixels
        decode_image(opened, image.param)
        upright = upright_rgb(opened, image.background)
        if image.is_low_detail:
            upright.thumbnail((LOW_DETAIL_SIDE, LOW_DETAIL_SIDE))
        return upright

    def _open(self, image: ImageInput, is_wanted: IsWanted) -> Image.Image:
        """Read the header alone."""
        return open_image(image.data, image.param, self.max_pixels, is_wanted)


class MemoryLimiter:
    """Limits the bytes of tensors that wait for the encoder, and lets one request decode at a time.
    Thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.used_bytes = 0
        self.is_decoding = False
        self._waiting: list[Notify] = []
        # reentrant: reserving may collect garbage, whose finalizers release
        self._lock = threading.RLock()

    @property
    def is_full(self) -> bool:
        return self.is_decoding or self.used_bytes >= self.max_bytes

    def start_decoding(self) -> bool:
        """Return False if the limiter is full."""
        with self._lock:
            if self.is_full:
                return False
            self.is_decoding = True
            return True

    def end_decoding(self) -> None:
        with self._lock:
            self.is_decoding = False
        self._call_waiting()

    def reserve(self, output: ProcessorOutput) -> None:
        """Count the bytes of `output` until it is garbage."""
        size = output.nbytes
        weakref.finalize(output, self._release, size)
        with self._lock:
            self.used_bytes += size

    def call_when_free(self, is_wanted: IsWanted, notify: Notify) -> None:
        """Call `notify` once the limiter is not full, if `is_wanted()` then."""
        with self._lock:
            self._waiting.append(lambda: notify() if is_wanted() else None)
        self._call_waiting()

    def _release(self, size: int) -> None:
        with self._lock:
            self.used_bytes -= size
        self._call_waiting()

    def _call_waiting(self) -> None:
        with self._lock:
            if self.is_full:
                return
            callbacks, self._waiting = self._waiting, []
        for callback in callbacks:
            callback()
