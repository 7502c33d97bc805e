"""Images and sound from bytes, base64 or data URLs, and images in answers; runs in pool threads.

Strings are decoded here and never handed on: pipelines open strings as local paths or URLs.
Sizes are read from headers and checked before anything is decoded, against files that unpack
into gigabytes, and no decoder gives more than its header says. Only image formats decoded in
this process are read (PostScript would start a program).
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
from worker.decode_budget import Lease
from worker.speech.recording import Recording

Image.init()
Image.MAX_IMAGE_PIXELS = None  # Pillow's own limit; ours is a setting
# In blocks that malloc maps, and gives back at once: of smaller ones each thread would keep the
# memory of the largest image it has had.
Image.core.set_block_size(64 << 20)  # type: ignore[attr-defined]  # not annotated
KNOWN: list[str] = ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF"]
FORMATS = [kind for kind in KNOWN if kind in Image.OPEN]  # Pillow may be built without some
# A progressive JPEG costs a pass over all its pixels for each scan, and a scan may be empty: in all
# no more than so many passes over the largest image. Cameras and encoders make about ten scans.
MAX_SCANS = 64
# Values (float32) that an answer may have for each pixel before fewer pixels are taken.
FREE_VALUES_PER_PIXEL = 8
# What Pillow's decoders raise for a broken file.
DECODING_ERRORS = (OSError, SyntaxError, ValueError, TypeError, RuntimeError)
TIFF_TILE = 322, 323  # the tags of a tile's width and length
MAX_TILE = 1 << 24  # pixels: a tile is unpacked whole, however small the image is
MAX_AUDIO_S = 2 * 3600.0


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
    except ValueError:  # also what is not ASCII
        unopened = "must be a base64 string or a data: URL; paths and links are not opened"
        raise InvalidInput(unopened, param) from None


def to_images(
    values: Sequence[tuple[Any, str]], lease: Lease, values_per_pixel: int = 1
) -> list[Image.Image]:
    """Decoded images, each given with its parameter's name, together within the decode budget;
    of fewer pixels where an answer has many values for each. Pipelines turn them upright and make
    them RGB."""
    size = lease.budget.size
    opened = [_open(value, param, size) for value, param in values]
    pixels = sum(image.width * image.height for image in opened)
    most = size * FREE_VALUES_PER_PIXEL // max(FREE_VALUES_PER_PIXEL, values_per_pixel)
    if pixels > most:
        large = f"the image has {opened[0].width} x {opened[0].height} pixels"
        many = f", {pixels} together with the others" if len(opened) > 1 else ""
        why = f" where each gets {values_per_pixel} values (labels, masks)" if most < size else ""
        raise InvalidInput(f"{large}{many}; at most {most} in all are taken{why}", values[0][1])
    lease.take(pixels)
    for image, (_, param) in zip(opened, values, strict=True):
        try:
            image.load()
        except DECODING_ERRORS:
            raise _unreadable(param) from None
    return opened


def to_image(
    value: Any, lease: Lease, param: str = "inputs", values_per_pixel: int = 1
) -> Image.Image:
    """One decoded image; see `to_images`."""
    return to_images([(value, param)], lease, values_per_pixel)[0]


def _open(value: Any, param: str, most: int) -> Image.Image:
    """An image of which only the header has been read; `most` pixels are decoded at a time."""
    data = to_bytes(value, param)
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
        tags: Any = getattr(image, "tag_v2", {})
        tile = int(tags.get(TIFF_TILE[0], 0)) * int(tags.get(TIFF_TILE[1], 0))
    except DECODING_ERRORS:
        raise _unreadable(param) from None
    if tile > MAX_TILE:
        raise InvalidInput("the image is stored in tiles that are too large", param)
    scans = data.count(b"\xff\xda") if "progressive" in image.info else 0
    if scans * image.width * image.height > MAX_SCANS * most:
        raise InvalidInput(f"the image is drawn in {scans} scans: save it with fewer", param)
    return image


def _unreadable(param: str) -> InvalidInput:
    names = ", ".join(FORMATS)
    return InvalidInput(f"this is not an image that can be read ({names})", param)


def to_audio(
    value: Any,
    sampling_rate: int,
    lease: Lease,
    check_seconds: Callable[[float], None] = lambda seconds: None,
    param: str = "inputs",
) -> np.ndarray:
    """Mono float32 samples [n] at `sampling_rate` Hz of a sound file (speech/recording.py).

    `check_seconds` raises for a length that is not taken."""
    with Recording(to_bytes(value, param), sampling_rate, MAX_AUDIO_S, param) as recording:
        check_seconds(recording.seconds)
        count = int(recording.seconds * sampling_rate)
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
