"""Image files: opened by their header, checked, decoded. Runs in pool threads.

Sizes are checked in the header, before decoding, against files that unpack into gigabytes; no
decoder returns more than its header states. Only formats that are decoded in this process are read
(PostScript would start a program). Of an animation the first frame is used. No torch.
"""

import io
from typing import Any

from PIL import Image, ImageOps

from batching.errors import InvalidInput

Image.init()
Image.MAX_IMAGE_PIXELS = None  # Pillow's own limit; the setting replaces it
# Blocks that malloc maps, and unmaps at once: of smaller blocks each thread would keep the memory
# of the largest image that it has decoded.
Image.core.set_block_size(64 << 20)  # type: ignore[attr-defined]  # not annotated
ALL_FORMATS: list[str] = ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF"]
FORMATS = [kind for kind in ALL_FORMATS if kind in Image.OPEN]  # some are optional in Pillow
# Many processors scale by the shorter side, which would enlarge longer images.
MAX_ASPECT_RATIO = 200
# A progressive JPEG costs a pass over all pixels per scan, and a scan may be empty. The limit is in
# passes over the largest accepted image; cameras and encoders write about ten scans.
MAX_SCANS = 64
# Raised by Pillow's decoders for a broken file.
DECODING_ERRORS = (OSError, SyntaxError, ValueError, TypeError, RuntimeError)
TIFF_TILE = 322, 323  # the tags of a tile's width and length
MAX_TILE = 1 << 24  # pixels: a whole tile is decoded, also for a small image


def open_image(data: bytes, param: str, max_pixels: int) -> Image.Image:
    """Return an image whose header has been read and checked. Raises InvalidInput, which names
    `param`, for a file that cannot be read and for more than `max_pixels`."""
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
        tags: Any = getattr(image, "tag_v2", {})
        tile = int(tags.get(TIFF_TILE[0], 0)) * int(tags.get(TIFF_TILE[1], 0))
    except DECODING_ERRORS:
        raise _unreadable(param) from None
    if tile > MAX_TILE:
        raise InvalidInput("the image is stored in tiles that are too large", param)
    width, height = image.size
    if width * height > max_pixels:
        large = f"the image has {width} x {height} pixels; at most {max_pixels} are accepted"
        raise InvalidInput(large, param)
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        long = f"one side may be at most {MAX_ASPECT_RATIO} times the other"
        raise InvalidInput(f"the image has {width} x {height} pixels; {long}", param)
    scans = data.count(b"\xff\xda") if "progressive" in image.info else 0
    if scans * width * height > MAX_SCANS * max_pixels:
        raise InvalidInput(
            f"the image has {scans} scans, too many for its size: save it with fewer", param
        )
    return image


def decode_image(image: Image.Image, param: str) -> None:
    """Decode an image's pixels in place. Raises InvalidInput if the file is broken. Broken EXIF is
    dropped."""
    try:
        image.load()
    except DECODING_ERRORS:
        raise _unreadable(param) from None
    try:
        image.getexif()
    except Exception:
        image.info.pop("exif", None)


def upright_rgb(image: Image.Image) -> Image.Image:
    """Return a decoded image in RGB, rotated by its EXIF, with transparency on white."""
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):  # 16 bits: RGB would keep the lowest 8
        image = image.point(lambda value: value / 256).convert("L")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image)
    return image.convert("RGB")


def _unreadable(param: str) -> InvalidInput:
    names = ", ".join(FORMATS)
    return InvalidInput(f"this is not an image that can be read ({names})", param)
