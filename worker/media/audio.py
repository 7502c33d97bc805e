"""A recording, from its file to windows of samples: read in order, never whole in memory.

    file → header, within bounds → blocks, mono → resampled as a stream → window, window, …

WAV, FLAC, OGG, Opus and MP3 are read by libsndfile; what phones and browsers record, m4a and WebM,
by FFmpeg in a process of its own (container.py). Headers are believed only as far as what follows
bears them out. One thread at a time reads a recording.
"""

import math
from collections.abc import Iterator
from typing import Any, Self

import numpy as np

from batching.errors import InvalidInput, QueueFull
from worker.media.container import Container, TooMany, Unreadable, container_format

MIN_AUDIO_S = 0.03  # speech models take one frame of 25 ms at least
MAX_AUDIO_S = 2 * 3600.0
MIN_RATE, MAX_RATE = 1000, 384_000
MAX_SAMPLES = 1 << 30  # of all channels, before resampling
BLOCK = 1 << 18  # samples of all channels decoded at a time, or made of them
LOUDEST = 1e9  # a sample, where 1 is full scale: powers of larger ones are no numbers
UNKNOWN = (1 << 63) - 1  # frames of a FLAC file that was piped, in libsndfile's words
NOTHING = np.zeros(0, np.float32)
UNREADABLE = "this is not a sound file that can be read (WAV, FLAC, OGG, MP3, m4a, WebM)"


class Recording:
    """Windows of a file's samples: mono, float32, at `rate` Hz. Close it in the end."""

    def __init__(
        self, path: str, rate: int, max_s: float = MAX_AUDIO_S, param: str = "file"
    ) -> None:
        """InvalidInput for what cannot be read, or lasts longer than `max_s`, and names the
        request's field `param`."""
        self.path = path
        self.rate = rate
        self.max_s = max_s
        self.param = param
        self.seconds = 0.0  # by its header, if that says; once it is read to its end, the truth
        self._begin()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """Nothing more is read."""
        self._ended = True
        self._source.close()

    def _begin(self) -> None:
        self._source = self._open()
        self._start = 0  # where what is kept begins, in samples
        self._kept = NOTHING
        self._ended = False
        try:
            self.seconds = self.seconds or self._check_header()
        except BaseException:
            self.close()
            raise
        self._blocks = blocks(self._source, self.rate, self.max_s, self.param)

    def length(self) -> float:
        """Its seconds; where the header does not say, all of it is read to tell."""
        at = 0
        while not self.seconds and not self._ended:
            at += len(self.window(at, BLOCK))
        return self.seconds

    def window(self, start: int, count: int) -> np.ndarray:
        """Samples [n] from the recording's `start`-th on; n is less than `count` at its end only,
        and 0 beyond. Where `start` lies before that of an earlier call, the file is read anew.
        InvalidInput where it is broken."""
        if start < self._start:
            self.close()
            self._begin()
        parts, end = [self._kept], self._start + len(self._kept)
        while end < start + count and not self._ended:
            block = next(self._blocks, None)
            if block is None:
                self._end(end)
            elif end + len(block) > start:
                parts.append(block)
            else:  # skipped
                parts = [NOTHING]
                self._start = end + len(block)
            end += 0 if block is None else len(block)
        kept = np.concatenate(parts) if len(parts) > 1 else parts[0]
        dropped = min(max(0, start - self._start), len(kept))
        self._kept = kept[dropped:].copy() if dropped else kept
        self._start += dropped
        return self._kept[:count] if self._start == start else NOTHING

    def _end(self, samples: int) -> None:
        self._ended = True
        self.seconds = samples / self.rate
        if self.seconds < MIN_AUDIO_S:
            raise InvalidInput(f"sound must last at least {MIN_AUDIO_S} seconds", self.param)

    def _open(self) -> "Container | SoundFile":
        """By libsndfile, or by FFmpeg what begins like something that is left to that."""
        try:
            kind = container_format(self.path)
            return Container(self.path, kind) if kind else SoundFile(self.path)
        except TooMany:
            raise QueueFull("as many m4a and WebM recordings are being read as may be") from None
        except Unreadable as error:
            raise InvalidInput(str(error) or UNREADABLE, self.param) from None

    def _check_header(self) -> float:
        """The sound's seconds, if it is not too long for what its header says."""
        source = self._source
        if not MIN_RATE <= source.rate <= MAX_RATE:
            odd = f"the sound has {source.rate} samples a second"
            raise InvalidInput(f"{odd}; {MIN_RATE} to {MAX_RATE} are taken", self.param)
        return check_length(source, source.frames, self.max_s, self.param)


def check_length(source: "Container | SoundFile", frames: int, max_s: float, param: str) -> float:
    """The seconds of so many samples of each channel, if they are not too many."""
    seconds, channels = frames / source.rate, source.channels
    if seconds > max_s or frames * channels > MAX_SAMPLES:
        long = f"the sound lasts {seconds:.0f} seconds in {channels} channels"
        most = f"at most {max_s:g} seconds and {MAX_SAMPLES} samples are taken"
        raise InvalidInput(f"{long}; {most}", param)
    return seconds


def blocks(
    source: "Container | SoundFile", rate: int, max_s: float, param: str
) -> Iterator[np.ndarray]:
    """A source's samples at `rate`, block by block. It knows no recording: one that is forgotten
    would wait for the garbage collector to be closed."""
    import soxr

    resampler = None if source.rate == rate else soxr.ResampleStream(source.rate, rate, 1)
    grows = math.ceil(rate / source.rate)
    count, frames = max(1, BLOCK // max(source.channels, grows)), 0
    while len(mono := read_block(source, count, param)):
        frames += len(mono)
        check_length(source, frames, max_s, param)
        yield mono if resampler is None else resampler.resample_chunk(mono)
    if resampler is not None:
        yield resampler.resample_chunk(NOTHING, last=True)


def read_block(source: "Container | SoundFile", count: int, param: str) -> np.ndarray:
    try:
        mono = source.read(count)
    except Unreadable:
        raise InvalidInput(f"{UNREADABLE}, or it is broken", param) from None
    if not (np.abs(mono) <= LOUDEST).all():
        raise InvalidInput("samples of the sound are not finite numbers, or too large", param)
    return mono


class SoundFile:
    """What libsndfile reads. Never more than the header says, if it does, but perhaps less. `rate`:
    samples a second; `frames`: samples of a channel, 0 where the header does not say."""

    def __init__(self, path: str) -> None:
        import soundfile

        self._broken: type[Exception] = soundfile.LibsndfileError
        try:
            self._file: Any = soundfile.SoundFile(path)
        except (self._broken, TypeError):  # the latter of what has no header
            raise Unreadable from None
        self.rate, self.channels = int(self._file.samplerate), int(self._file.channels)
        self.frames = int(self._file.frames)
        if self.frames == UNKNOWN:
            self.frames = 0
            # else soundfile looks for its place after each read, and at the end there is none
            self._file.seekable = lambda: False

    def read(self, count: int) -> np.ndarray:
        """Mono float32 [n], at most `count`; none at the end. Unreadable for a broken file."""
        try:
            block = self._file.read(count, "float32", always_2d=True)
        except self._broken as error:
            raise Unreadable from error
        with np.errstate(all="ignore"):  # broken files hold any number
            mono: np.ndarray = block.mean(axis=1)
        return mono

    def close(self) -> None:
        self._file.close()
