"""Image files, within bounds: opened by their header, checked, decoded. In pool threads.

Sizes are read from headers and checked before anything is decoded, against files that unpack
into gigabytes, and no decoder gives more than its header says. Only formats decoded in this
process are read (PostScript would start a program). Of an animation the first frame is taken.
Torch-free.
"""

import io
from typing import Any

from PIL import Image, ImageOps

from batching.errors import InvalidInput

Image.init()
Image.MAX_IMAGE_PIXELS = None  # Pillow's own limit; ours is a setting
# In blocks that malloc maps, and gives back at once: of smaller ones each thread would keep the
# memory of the largest image it has had.
Image.core.set_block_size(64 << 20)  # type: ignore[attr-defined]  # not annotated
KNOWN: list[str] = ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF"]
FORMATS = [kind for kind in KNOWN if kind in Image.OPEN]  # Pillow may be built without some
# Longer images would be blown up: many processors scale by the shorter side.
MOST_RATIO = 200
# A progressive JPEG costs a pass over all its pixels for each scan, and a scan may be empty: in all
# no more than so many passes over the largest image. Cameras and encoders make about ten scans.
MAX_SCANS = 64
# What Pillow's decoders raise for a broken file.
DECODING_ERRORS = (OSError, SyntaxError, ValueError, TypeError, RuntimeError)
TIFF_TILE = 322, 323  # the tags of a tile's width and length
MAX_TILE = 1 << 24  # pixels: a tile is unpacked whole, however small the image is


def open_image(data: bytes, param: str, most: int) -> Image.Image:
    """An image of which only the header has been read; `most` pixels are decoded at a time.
    InvalidInput names `param`."""
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
        tags: Any = getattr(image, "tag_v2", {})
        tile = int(tags.get(TIFF_TILE[0], 0)) * int(tags.get(TIFF_TILE[1], 0))
    except DECODING_ERRORS:
        raise _unreadable(param) from None
    if tile > MAX_TILE:
        raise InvalidInput("the image is stored in tiles that are too large", param)
    width, height = image.size
    if width * height > most:
        large = f"the image has {width} x {height} pixels; at most {most} are taken"
        raise InvalidInput(large, param)
    if max(width, height) > MOST_RATIO * min(width, height):
        long = f"one side may be at most {MOST_RATIO} times the other"
        raise InvalidInput(f"the image has {width} x {height} pixels; {long}", param)
    scans = data.count(b"\xff\xda") if "progressive" in image.info else 0
    if scans * width * height > MAX_SCANS * most:
        raise InvalidInput(f"the image is drawn in {scans} scans: save it with fewer", param)
    return image


def decode_image(image: Image.Image, param: str) -> None:
    """Decode its pixels, in place; InvalidInput if the file is broken. EXIF that is broken turns
    no image: it is dropped, so that nobody reads it again."""
    try:
        image.load()
    except DECODING_ERRORS:
        raise _unreadable(param) from None
    try:
        image.getexif()
    except Exception:
        image.info.pop("exif", None)


def upright_rgb(image: Image.Image) -> Image.Image:
    """A decoded image as it is looked at: turned as its EXIF says, in RGB, what is transparent on
    white."""
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):  # 16 bits, of which RGB would take the lowest
        image = image.point(lambda value: value / 256).convert("L")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image)
    return image.convert("RGB")


def _unreadable(param: str) -> InvalidInput:
    names = ", ".join(FORMATS)
    return InvalidInput(f"this is not an image that can be read ({names})", param)
