"""Recordings: from an audio file to windows of samples, in order, never whole in memory.

    file → header, checked → blocks of mono samples → resampled as a stream → windows

A process of its own decodes the file (media_process.py): libsndfile reads WAV, FLAC, OGG, Opus and
MP3, FFmpeg the formats of phones and browsers, m4a and WebM. A header's length is not trusted: the
samples are counted while they are read. One thread at a time reads a recording.
"""

import math
from collections.abc import Callable, Iterator
from typing import Self

import numpy as np

from batching.errors import ClientGone, InvalidInput, OnequeueError, QueueFull
from worker.media.media_process import (
    MAX_PROCESSES,
    AudioProcess,
    TooManyProcesses,
    UnreadableMedia,
)

MIN_AUDIO_S = 0.03  # speech models need one frame of 25 ms
MAX_AUDIO_S = 2 * 3600.0
MIN_RATE, MAX_RATE = 1000, 384_000
MAX_SAMPLES = 1 << 30  # of all channels, before resampling
BLOCK = 1 << 18  # samples per block: decoded, of all channels, or resampled
MAX_AMPLITUDE = 1e9  # 1 is full scale; the power of larger samples overflows
NO_SAMPLES = np.zeros(0, np.float32)
UNREADABLE = "this is not an audio file that can be read (WAV, FLAC, OGG, MP3, m4a, WebM)"


class Recording:
    """Windows of a file's samples: mono float32 at `rate` Hz. Close it after use."""

    def __init__(
        self, path: str, rate: int, max_s: float = MAX_AUDIO_S, param: str = "file"
    ) -> None:
        """Raises InvalidInput, which names the field `param`, for a file that cannot be read or is
        longer than `max_s`."""
        self.path = path
        self.rate = rate
        self.max_s = max_s
        self.param = param
        self.seconds = 0.0  # by the header, 0 if unknown; exact after the last sample
        self._restart()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process that reads the file."""
        self._ended = True
        self._source.close()

    def _restart(self) -> None:
        try:
            self._source = AudioProcess(self.path)
        except (UnreadableMedia, OSError) as error:
            raise failure_to_open(error, UNREADABLE, self.param) from error
        self._start = 0  # of the buffer, in samples from the beginning
        self._buffer = NO_SAMPLES
        self._ended = False
        try:
            self.seconds = self.seconds or self._check_header()
        except BaseException:
            self.close()
            raise
        self._blocks = blocks(self._source, self.rate, self.max_s, self.param)

    def length(self) -> float:
        """Return the length in seconds. Reads the whole file if its header has no length."""
        at = 0
        while not self.seconds and not self._ended:
            at += len(self.window(at, BLOCK))
        return self.seconds

    def read(self, is_wanted: Callable[[], bool] = lambda: True) -> np.ndarray:
        """Return all samples [n]. Raises ClientGone once not `is_wanted()`."""
        parts = [NO_SAMPLES]
        while len(block := self.window(sum(map(len, parts)), BLOCK)):
            if not is_wanted():
                raise ClientGone
            parts.append(block)
        return np.concatenate(parts)

    def window(self, start: int, count: int) -> np.ndarray:
        """Return samples [n] from `start` on; n is less than `count` at the end only, 0 after it.

        A `start` before that of an earlier call reads the file again. Raises InvalidInput where the
        file is broken."""
        if start < self._start:
            self.close()
            self._restart()
        parts, end = [self._buffer], self._start + len(self._buffer)
        while end < start + count and not self._ended:
            block = next(self._blocks, None)
            if block is None:
                self._finish(end)
            elif end + len(block) > start:
                parts.append(block)
            else:  # before the window
                parts = [NO_SAMPLES]
                self._start = end + len(block)
            end += 0 if block is None else len(block)
        samples = np.concatenate(parts) if len(parts) > 1 else parts[0]
        dropped = min(max(0, start - self._start), len(samples))
        self._buffer = samples[dropped:].copy() if dropped else samples
        self._start += dropped
        return self._buffer[:count] if self._start == start else NO_SAMPLES

    def _finish(self, samples: int) -> None:
        self._ended = True
        self.seconds = samples / self.rate
        if self.seconds < MIN_AUDIO_S:
            raise InvalidInput(
                f"the audio lasts {self.seconds:g} seconds; at least {MIN_AUDIO_S} are needed",
                self.param,
            )

    def _check_header(self) -> float:
        """Return the length in seconds by the header, after checking it."""
        source = self._source
        if not MIN_RATE <= source.rate <= MAX_RATE:
            rate = f"the audio has {source.rate} samples a second"
            raise InvalidInput(f"{rate}; {MIN_RATE} to {MAX_RATE} are accepted", self.param)
        return check_length(source, source.frames, self.max_s, self.param)


def failure_to_open(error: UnreadableMedia | OSError, unreadable: str, param: str) -> OnequeueError:
    """Return the error of a request whose file a process does not read. `unreadable`: that of a
    file for which the process gives no reason."""
    if isinstance(error, UnreadableMedia):
        return InvalidInput(str(error) or unreadable, param)
    if isinstance(error, TooManyProcesses):
        return QueueFull(f"the limit of {MAX_PROCESSES} files decoded at a time is reached")
    return QueueFull("no process can be started to decode the file")


def check_length(source: AudioProcess, frames: int, max_s: float, param: str) -> float:
    """Return the seconds of `frames` samples per channel. Raises InvalidInput for too many."""
    seconds, channels = frames / source.rate, source.channels
    if seconds > max_s or frames * channels > MAX_SAMPLES:
        long = f"the audio lasts {round(seconds, 1):g} seconds in {channels} channels"
        limit = f"at most {max_s:g} seconds and {MAX_SAMPLES} samples are accepted"
        raise InvalidInput(f"{long}; {limit}", param)
    return seconds


def blocks(source: AudioProcess, rate: int, max_s: float, param: str) -> Iterator[np.ndarray]:
    """Yield a source's samples at `rate` in blocks.

    Not a method: a reference to the recording would leave the closing of a dropped one to the
    garbage collector."""
    import soxr

    resampler = None if source.rate == rate else soxr.ResampleStream(source.rate, rate, 1)
    growth = math.ceil(rate / source.rate)
    count, frames = max(1, BLOCK // max(source.channels, growth)), 0
    while len(mono := read_block(source, count, param)):
        frames += len(mono)
        check_length(source, frames, max_s, param)
        yield mono if resampler is None else resampler.resample_chunk(mono)
    if resampler is not None:
        yield resampler.resample_chunk(NO_SAMPLES, last=True)


def read_block(source: AudioProcess, count: int, param: str) -> np.ndarray:
    try:
        mono = source.read(count)
    except UnreadableMedia:
        raise InvalidInput(f"{UNREADABLE}, or it is broken", param) from None
    if not (np.abs(mono) <= MAX_AMPLITUDE).all():
        raise InvalidInput("samples of the audio are not finite numbers, or too large", param)
    return mono
