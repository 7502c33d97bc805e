"""Images and sound from bytes, base64 or data URLs, and images in answers; runs in pool threads.

Sizes are read from headers and checked before anything is decoded, against files that unpack
into gigabytes, and no decoder gives more than its header says. How an image file is read is
image_files.py's.
"""

import base64
import io
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import orjson
from PIL import Image

from batching.errors import InvalidInput
from worker.data_urls import to_bytes
from worker.decode_budget import Lease
from worker.image_files import decode_image, open_image

# Values (float32) that an answer may have for each pixel before fewer pixels are taken.
FREE_VALUES_PER_PIXEL = 8
MIN_AUDIO_S = 0.03  # speech models take one frame of 25 ms at least
MAX_AUDIO_S = 2 * 3600
MIN_RATE, MAX_RATE = 1000, 384_000
MAX_SAMPLES = 1 << 30  # of all channels, before resampling
BLOCK = 1 << 20  # samples of all channels decoded at a time


def to_images(
    values: Sequence[tuple[Any, str]], lease: Lease, values_per_pixel: int = 1
) -> list[Image.Image]:
    """Decoded images, each given with its parameter's name, together within the decode budget;
    of fewer pixels where an answer has many values for each. Pipelines turn them upright and make
    them RGB."""
    size = lease.budget.size
    opened = [open_image(to_bytes(value, param), param, size) for value, param in values]
    pixels = sum(image.width * image.height for image in opened)
    most = size * FREE_VALUES_PER_PIXEL // max(FREE_VALUES_PER_PIXEL, values_per_pixel)
    if pixels > most:
        large = f"the image has {opened[0].width} x {opened[0].height} pixels"
        many = f", {pixels} together with the others" if len(opened) > 1 else ""
        why = f" where each gets {values_per_pixel} values (labels, masks)" if most < size else ""
        raise InvalidInput(f"{large}{many}; at most {most} in all are taken{why}", values[0][1])
    lease.take(pixels)
    for image, (_, param) in zip(opened, values, strict=True):
        decode_image(image, param)
    return opened


def to_image(
    value: Any, lease: Lease, param: str = "inputs", values_per_pixel: int = 1
) -> Image.Image:
    """One decoded image; see `to_images`."""
    return to_images([(value, param)], lease, values_per_pixel)[0]


class SoundBytes(io.BytesIO):
    """libsndfile seeks before the start of broken files, and its callbacks must not raise."""

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        try:
            return super().seek(offset, whence)
        except ValueError:
            return super().seek(0)


def to_audio(
    value: Any,
    sampling_rate: int,
    lease: Lease,
    check_seconds: Callable[[float], None] = lambda seconds: None,
    param: str = "inputs",
) -> np.ndarray:
    """Mono float32 samples [n] at `sampling_rate` Hz from a WAV, FLAC, OGG or MP3 file.

    `check_seconds` raises for a length that is not taken."""
    import soundfile

    data = to_bytes(value, param)
    try:
        with soundfile.SoundFile(SoundBytes(data)) as file:
            seconds = _check_header(file, param)
            check_seconds(seconds)
            lease.take(int(seconds * sampling_rate))
            samples = _read_mono(file, sampling_rate)
    except (soundfile.LibsndfileError, TypeError):
        unreadable = "this is not a sound file that can be read (WAV, FLAC, OGG, MP3)"
        raise InvalidInput(unreadable, param) from None
    if len(samples) < MIN_AUDIO_S * sampling_rate:
        raise InvalidInput(f"sound must last at least {MIN_AUDIO_S} seconds", param)
    if not np.isfinite(samples).all():
        raise InvalidInput("the sound has samples that are not finite numbers", param)
    return samples


def _check_header(file: Any, param: str) -> float:
    """The sound's seconds, if it is not too long for what its header says."""
    rate, channels = file.samplerate, file.channels
    if not MIN_RATE <= rate <= MAX_RATE:
        odd = f"the sound has {rate} samples a second; {MIN_RATE} to {MAX_RATE} are taken"
        raise InvalidInput(odd, param)
    seconds: float = file.frames / rate
    if seconds > MAX_AUDIO_S or file.frames * channels > MAX_SAMPLES:
        long = f"the sound lasts {seconds:.0f} seconds in {channels} channels"
        most = f"at most {MAX_AUDIO_S} seconds and {MAX_SAMPLES} samples are taken"
        raise InvalidInput(f"{long}; {most}", param)
    return seconds


def _read_mono(file: Any, sampling_rate: int) -> np.ndarray:
    """Downmixed and resampled block by block, so that the file is never whole in memory."""
    import soxr

    parts = [np.zeros(0, np.float32)]
    same = file.samplerate == sampling_rate
    resampler = None if same else soxr.ResampleStream(file.samplerate, sampling_rate, 1)
    # Never more than the header says, but perhaps less: `file.blocks` would go on with old samples.
    while len(block := file.read(max(1, BLOCK // file.channels), "float32", always_2d=True)):
        with np.errstate(all="ignore"):  # broken files hold any number; to_audio looks at them
            mono = block.mean(axis=1)
        parts.append(mono if resampler is None else resampler.resample_chunk(mono))
    if resampler is not None:
        parts.append(resampler.resample_chunk(np.zeros(0, np.float32), last=True))
    return np.concatenate(parts)


def _plain(value: Any) -> Any:
    if isinstance(value, Image.Image):
        buffer = io.BytesIO()
        value.save(buffer, format="PNG")
        return base64.b64encode(buffer.getvalue()).decode()
    if hasattr(value, "tolist"):  # tensors, arrays that are not contiguous, exotic scalars
        return value.tolist()
    if hasattr(value, "items"):  # ModelOutput and other mappings
        return dict(value.items())
    raise TypeError(f"no JSON form for {type(value).__name__}")


# Tensors and arrays become nested lists, images base64 PNG, NaN and infinities null.
to_json: Callable[[Any], bytes] = partial(
    orjson.dumps, default=_plain, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
)
