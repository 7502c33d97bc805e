"""Images and audio of pipelines: inputs from bytes, base64 or data URLs, and responses as JSON.

Runs in pool threads. Sizes are checked before decoding (images.py, audio.py), and a DecodeLimiter
bounds what all threads decode at a time.
"""

import base64
import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import numpy as np
import orjson
from PIL import Image

from batching.errors import InvalidInput, QueueFull
from worker.media.audio import MAX_AUDIO_S, Recording
from worker.media.data_urls import to_bytes
from worker.media.decode_limiter import Lease
from worker.media.images import decode_image, open_image

# Output values (float32) per pixel above which fewer pixels are accepted.
FREE_VALUES_PER_PIXEL = 8


def to_images(
    values: Sequence[tuple[Any, str]], lease: Lease, values_per_pixel: int = 1
) -> list[Image.Image]:
    """Decode images in one lease. `values`: the images, each with the field that errors name.

    Fewer pixels are accepted where the output has many values per pixel. Pipelines rotate the
    images and convert them to RGB themselves."""
    size = lease.limiter.size
    images = [
        open_image(to_bytes(value, param), param, size, lease.is_wanted) for value, param in values
    ]
    pixels = sum(image.width * image.height for image in images)
    limit = size * FREE_VALUES_PER_PIXEL // max(FREE_VALUES_PER_PIXEL, values_per_pixel)
    if pixels > limit:
        large = f"the image has {images[0].width} x {images[0].height} pixels"
        many = f", {pixels} together with the others" if len(images) > 1 else ""
        why = f" where each gets {values_per_pixel} values (labels, masks)" if limit < size else ""
        raise InvalidInput(f"{large}{many}; at most {limit} in all are accepted{why}", values[0][1])
    lease.take(pixels)
    for image, (_, param) in zip(images, values, strict=True):
        decode_image(image, param)
    return images


def to_image(
    value: Any, lease: Lease, param: str = "inputs", values_per_pixel: int = 1
) -> Image.Image:
    """Decode one image; see `to_images`."""
    return to_images([(value, param)], lease, values_per_pixel)[0]


def to_audio(
    value: Any,
    sampling_rate: int,
    lease: Lease,
    check_seconds: Callable[[float], None] = lambda seconds: None,
) -> np.ndarray:
    """Return mono float32 samples [n] at `sampling_rate` Hz of an audio file. Raises QueueFull if
    the disk is full.

    `check_seconds` raises for a length that is not accepted."""
    with (
        saved(to_bytes(value, "inputs")) as path,
        Recording(path, sampling_rate, MAX_AUDIO_S, "inputs") as recording,
    ):
        seconds = recording.length()
        check_seconds(seconds)
        count = int(seconds * sampling_rate)
        lease.take(count)
        return recording.window(0, count + sampling_rate)  # the header's length may be inexact


@contextmanager
def saved(data: bytes) -> Iterator[str]:
    """Yield the path of a temporary file. Raises QueueFull if the disk is full."""
    with ExitStack() as stack:
        try:
            file = stack.enter_context(NamedTemporaryFile())
            Path(file.name).write_bytes(data)
        except OSError as error:
            raise QueueFull("the server's disk has no space for the file") from error
        yield file.name


def _json_value(value: Any) -> Any:
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
    orjson.dumps, default=_json_value, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
)
