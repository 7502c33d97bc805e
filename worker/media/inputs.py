"""Images and sound from bytes, base64 or data URLs, and images in answers; runs in pool threads.

Sizes are read from headers and checked before anything is decoded, against files that unpack
into gigabytes, and no decoder gives more than its header says. How an image file is read is
images.py's.
"""

import base64
import io
from collections.abc import Callable, Sequence
from functools import partial
from tempfile import NamedTemporaryFile
from typing import Any

import numpy as np
import orjson
from PIL import Image

from batching.errors import InvalidInput
from worker.media.audio import MAX_AUDIO_S, Recording
from worker.media.data_urls import to_bytes
from worker.media.decode_limiter import Lease
from worker.media.images import decode_image, open_image

# Values (float32) that an answer may have for each pixel before fewer pixels are taken.
FREE_VALUES_PER_PIXEL = 8


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


def to_audio(
    value: Any,
    sampling_rate: int,
    lease: Lease,
    check_seconds: Callable[[float], None] = lambda seconds: None,
) -> np.ndarray:
    """Mono float32 samples [n] at `sampling_rate` Hz of a sound file (audio.py).

    `check_seconds` raises for a length that is not taken."""
    sound = to_bytes(value, "inputs")
    with NamedTemporaryFile() as file:
        file.write(sound)
        file.flush()
        with Recording(file.name, sampling_rate, MAX_AUDIO_S, "inputs") as recording:
            seconds = recording.length()
            check_seconds(seconds)
            count = int(seconds * sampling_rate)
            lease.take(count)
            return recording.window(0, count + sampling_rate)  # a header may be a little off


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
