"""Images and sound from bytes, base64 or data URLs; runs in pool threads.

Strings are decoded here and never handed on: pipelines open strings as local paths or URLs.
Sizes are checked before anything is decoded, against files that unpack into gigabytes, and
only image formats decoded in this process are read (PostScript would start a program).
"""

import base64
import binascii
import io
from typing import Any

import numpy as np
from PIL import Image

from batching.errors import InvalidInput

MAX_PIXELS = 64_000_000
Image.init()
WANTED: list[str] = ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF"]
FORMATS = [kind for kind in WANTED if kind in Image.OPEN]  # Pillow may be built without some
MIN_AUDIO_S = 0.03  # speech models take one frame of 25 ms at least
MAX_AUDIO_S = 2 * 3600
MAX_SAMPLES = 1 << 30  # of all channels, before resampling
BLOCK = 1 << 20  # frames decoded at a time


def to_bytes(value: Any, param: str) -> bytes:
    """Bytes as they are; a JSON string must be base64 or a base64 data URL."""
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str):
        raise InvalidInput("must be a base64 string or a data: URL", param)
    encoded = value
    if value.startswith("data:"):
        header, _, encoded = value.partition(",")
        if not header.endswith(";base64"):
            raise InvalidInput("a data: URL must be base64-encoded", param)
    try:
        return base64.b64decode("".join(encoded.split()), validate=True)
    except (binascii.Error, ValueError):
        raise InvalidInput(
            "must be a base64 string or a data: URL; paths and links are not opened", param
        ) from None


def to_image(value: Any, param: str = "inputs") -> Image.Image:
    """A decoded image of at most MAX_PIXELS; pipelines turn it upright and make it RGB."""
    data = to_bytes(value, param)
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
        if image.width * image.height > MAX_PIXELS:
            size = f"has {image.width} x {image.height} pixels"
            raise InvalidInput(f"the image {size}; at most {MAX_PIXELS} in all are taken", param)
        image.load()
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise InvalidInput(f"the image has more than {MAX_PIXELS} pixels", param) from None
    except (OSError, SyntaxError, ValueError, RuntimeError):  # as Pillow's decoders please
        names = ", ".join(FORMATS)
        raise InvalidInput(f"this is not an image that can be read ({names})", param) from None
    return image


class SoundBytes(io.BytesIO):
    """libsndfile seeks before the start of broken files, and its callbacks must not raise."""

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        try:
            return super().seek(offset, whence)
        except ValueError:
            return super().seek(0)


def to_audio(value: Any, sampling_rate: int, param: str = "inputs") -> np.ndarray:
    """Mono float32 samples [n] at `sampling_rate` Hz from a WAV, FLAC, OGG or MP3 file."""
    import soundfile

    data = to_bytes(value, param)
    try:
        with soundfile.SoundFile(SoundBytes(data)) as file:
            seconds = file.frames / file.samplerate
            if seconds > MAX_AUDIO_S or file.frames * file.channels > MAX_SAMPLES:
                raise InvalidInput(
                    f"the sound lasts {seconds:.0f} seconds in {file.channels} channels; at most "
                    f"{MAX_AUDIO_S} seconds and {MAX_SAMPLES} samples are taken",
                    param,
                )
            samples = _read_mono(file, sampling_rate)
    except (soundfile.LibsndfileError, TypeError):
        raise InvalidInput(
            "this is not a sound file that can be read (WAV, FLAC, OGG, MP3)", param
        ) from None
    if len(samples) < MIN_AUDIO_S * sampling_rate:
        raise InvalidInput(f"sound must last at least {MIN_AUDIO_S} seconds", param)
    if not np.isfinite(samples).all():
        raise InvalidInput("the sound has samples that are not finite numbers", param)
    return samples


def _read_mono(file: Any, sampling_rate: int) -> np.ndarray:
    """Downmixed and resampled block by block, so that the file is never whole in memory."""
    import soxr

    parts = [np.zeros(0, np.float32)]
    same = file.samplerate == sampling_rate
    resampler = None if same else soxr.ResampleStream(file.samplerate, sampling_rate, 1)
    for block in file.blocks(BLOCK, dtype="float32", always_2d=True):
        with np.errstate(all="ignore"):  # broken files hold any number; to_audio looks at them
            mono = block.mean(axis=1)
        parts.append(mono if resampler is None else resampler.resample_chunk(mono))
    if resampler is not None:
        parts.append(resampler.resample_chunk(np.zeros(0, np.float32), last=True))
    return np.concatenate(parts)
