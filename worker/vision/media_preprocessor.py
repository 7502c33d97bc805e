"""Turns the files of a chat into a processed prompt, within limits of sizes and memory.

    headers → sizes of all files → each file: cached, or decoded (decoders.py) and processed → the
    text with the features of all files (processor.py)

Runs in pool threads. The files of one request with videos and of one without are decoded at a time.
Requests of clients take turns. The bytes of tensors that wait for the encoder are limited; beyond
the limit, requests wait without holding a thread.
"""

import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, cast

from batching.errors import ClientGone, DeadlineExceeded
from batching.fair_share import WorkOwner, in_turn
from worker.engines.pipeline.yield_points import YieldPoints
from worker.messages.generation import MediaInput, MediaKind
from worker.messages.protocol import IsWanted, Notify, Pending
from worker.model.paged_runner import PagedRunner
from worker.vision.decoders import AudioDecoder, ImageDecoder, VideoDecoder, check_seconds
from worker.vision.encoder import EncoderCache, VisionEncoder, divide_products
from worker.vision.encoder_scheduler import EncoderScheduler, OnFailure
from worker.vision.processor import MediaFeatures, Processor, ProcessorOutput

MAX_WAITING_BYTES = 1 << 30
MAX_COUNT_S = 10  # that media are read to count the tokens of a prompt


class MediaPreprocessor:
    """`max_pixels`: of one image. `max_bytes`: of tensors that wait for the encoder."""

    def __init__(
        self, processor: Processor, max_pixels: int, max_bytes: int = MAX_WAITING_BYTES
    ) -> None:
        self.processor = processor
        self.decoders: dict[MediaKind, ImageDecoder | AudioDecoder | VideoDecoder] = {
            "image": ImageDecoder(max_pixels, processor.max_tokens),
            "video": VideoDecoder(max_pixels),
        }
        if audio := processor.modalities.get("audio"):
            self.decoders["audio"] = AudioDecoder(audio, processor.max_tokens)
        # also held by `recompute`
        self._decode_locks = {kind: threading.Lock() for kind in self.decoders}
        self.memory_limiter = MemoryLimiter(max_bytes)
        self.cache = EncoderCache()
        self._recompute_thread = ThreadPoolExecutor(1, thread_name_prefix="media")
        self._yield_points: YieldPoints | None = None

    def new_scheduler(self, runner: PagedRunner, on_failure: OnFailure) -> EncoderScheduler:
        """Return a scheduler of the encoder, with an empty cache."""
        self.cache, model = EncoderCache(), cast(Any, runner.language.model)
        if not self._yield_points:
            self._yield_points = YieldPoints(None)
            if model.device.type == "cpu":
                modules = {*model.modules()} - {*model.get_decoder().modules()}
                divide_products(modules, self._yield_points.before_layer)
        encoder = VisionEncoder(runner, self.cache)
        return EncoderScheduler(encoder, self._yield_points, on_failure)

    @contextmanager
    def admit(self, media: Sequence[MediaInput], cache_namespace: bytes = b"") -> Iterator[None]:
        """Call `process` inside. Raises Pending while another request decodes such files or the
        memory limit is reached, unless all of these files are cached."""
        if all(self.cache.get(file.cache_key(cache_namespace)) for file in media):
            yield
            return
        has_video = any(file.kind == "video" for file in media)
        if not self.memory_limiter.start_decoding(has_video):
            raise Pending(partial(self.memory_limiter.call_when_free, has_video))
        try:
            yield
        finally:
            self.memory_limiter.end_decoding(has_video)

    def process(
        self,
        text: str,
        media: Sequence[MediaInput],
        cache_namespace: bytes = b"",
        is_wanted: IsWanted = lambda: True,
        use_cache: bool = True,
    ) -> ProcessorOutput:
        """Return the processed prompt. Cached features are shared within `cache_namespace` only;
        without `use_cache` all have their encoder inputs. Raises InvalidInput for files that are
        broken or too large, ClientGone once not `is_wanted()`."""
        tokens = self.processor.count_text_tokens(text)
        self.processor.check_fits(tokens, media[0].param)
        for kind in dict.fromkeys(file.kind for file in media):
            of_kind = [file for file in media if file.kind == kind]
            self.decoders[kind].check_sizes(of_kind, is_wanted)
        processed: list[MediaFeatures] = []
        seconds = 0.0  # a header may state less
        for file in media:
            key = file.cache_key(cache_namespace)
            cached = self.cache.get(key) if use_cache else None
            processed.append(cached or self._features(file, key, is_wanted))
            seconds += processed[-1].seconds
            check_seconds(seconds, file.param)
            tokens += processed[-1].token_count
            self.processor.check_fits(tokens, file.param)
        options = None
        if self.processor.interleaves_sound and any(file.in_video for file in media):
            options = next(dict(file.limits) for file in media if file.kind == "video")
        output = self.processor.process_text(text, processed, options)
        self.memory_limiter.reserve(output)
        return output

    def recompute(
        self, text: str, media: Sequence[MediaInput], cache_namespace: bytes = b""
    ) -> Future[ProcessorOutput]:
        """Call `process` without the cache in a thread of its own. It does not wait for the memory
        limit, since the requests that hold the memory may wait for this prompt."""
        return self._recompute_thread.submit(
            self.process, text, media, cache_namespace, use_cache=False
        )

    def token_ids(self, text: str, media: Sequence[MediaInput]) -> list[int]:
        """Return the token ids of a prompt. Runs in the thread of `recompute`, so that concurrent
        calls take no more memory than one. Raises DeadlineExceeded after MAX_COUNT_S, in which the
        thread is free for others again."""
        deadline = time.monotonic() + MAX_COUNT_S

        def process() -> list[int]:
            return self.process(text, media, is_wanted=lambda: time.monotonic() < deadline).ids

        try:
            return self._recompute_thread.submit(process).result()
        except ClientGone:
            reason = f"the media were not read within {MAX_COUNT_S} s"
            raise DeadlineExceeded(reason) from None

    def close(self) -> None:
        self._recompute_thread.shutdown(wait=False, cancel_futures=True)

    def _features(self, file: MediaInput, digest: bytes, is_wanted: IsWanted) -> MediaFeatures:
        with self._decode_locks[file.kind]:
            decoded = self.decoders[file.kind].decode(file, is_wanted)
            return self.processor.process_media(
                file.kind, decoded, digest, file.is_low_detail, file.param, dict(file.limits)
            )


class Waiting(NamedTuple):
    owner: WorkOwner
    is_wanted: IsWanted
    notify: Notify


class MemoryLimiter:
    """Limits the bytes of tensors that wait for the encoder, and lets one request with videos and
    one without decode at a time: a video may take many seconds. Thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.used_bytes = 0
        self._decoding: set[bool] = set()  # whether with videos
        self._waiting: dict[bool, list[Waiting]] = {True: [], False: []}  # likewise
        # reentrant: reserving may collect garbage, whose finalizers release
        self._lock = threading.RLock()

    def _is_full(self, has_video: bool) -> bool:
        return has_video in self._decoding or self.used_bytes >= self.max_bytes

    def start_decoding(self, has_video: bool) -> bool:
        """Return False if the limiter is full."""
        with self._lock:
            if self._is_full(has_video):
                return False
            self._decoding.add(has_video)
            return True

    def end_decoding(self, has_video: bool) -> None:
        with self._lock:
            self._decoding.remove(has_video)
        self._call_waiting()

    def reserve(self, output: ProcessorOutput) -> None:
        """Count the bytes of `output` until it is garbage."""
        size = output.nbytes
        weakref.finalize(output, self._release, size)
        with self._lock:
            self.used_bytes += size

    def call_when_free(
        self, has_video: bool, owner: WorkOwner, is_wanted: IsWanted, notify: Notify
    ) -> None:
        """Call `notify` once the limiter is not full, if `is_wanted()` then."""
        waiting = Waiting(owner, is_wanted, notify)  # as below: allocating may collect
        with self._lock:
            self._waiting[has_video].append(waiting)
        self._call_waiting()

    def _release(self, size: int) -> None:
        with self._lock:
            self.used_bytes -= size
        self._call_waiting()

    def _call_waiting(self) -> None:
        """Call those that may start, in turn: the first decodes, the others wait again."""
        for has_video in self._waiting:
            none: list[Waiting] = []
            with self._lock:
                if self._is_full(has_video):
                    continue
                # nothing is allocated meanwhile: a finalizer would call some of them, too
                called, self._waiting[has_video] = self._waiting[has_video], none
            for each in in_turn(called):
                if each.is_wanted():
                    each.notify()
