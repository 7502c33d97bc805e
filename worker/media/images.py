"""Image files: opened by their header, checked, decoded.

Sizes are checked in the header, before decoding, against files that unpack into gigabytes; no
decoder returns more than its header states. The work of parsing and decoding is limited
(bounded_file.py, jpeg.py). Only formats that are decoded in this process are read
(PostScript would start a program). Of an animation the first frame is used. No torch.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from PIL import Image, ImageOps
from PIL.ImageFile import ImageFile

from batching.errors import InvalidInput
from worker.media import exif
from worker.media.bounded_file import BoundedFile, TooComplex
from worker.media.jpeg import reduce_jpeg

# Pillow warns of each tag of a TIFF that it skips.
warnings.filterwarnings("ignore", category=UserWarning, module="PIL")
Image.init()
Image.MAX_IMAGE_PIXELS = None  # Pillow's own limit; the setting replaces it
with suppress(ImportError):  # in newer versions
    from PIL import AvifImagePlugin

    AvifImagePlugin.DEFAULT_MAX_THREADS = 1
# Blocks that malloc maps, and unmaps at once: of smaller blocks each thread would keep the memory
# of the largest image that it has decoded.
Image.core.set_block_size(64 << 20)  # type: ignore[attr-defined]  # not annotated
ALL_FORMATS: list[str] = ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF"]
FORMATS = [kind for kind in ALL_FORMATS if kind in Image.OPEN]  # some are optional in Pillow
# Many processors scale by the shorter side, which would enlarge longer images.
MAX_ASPECT_RATIO = 200
# A JPEG costs a pass over its pixels per scan, and a scan may be empty. The limit is in passes over
# the largest accepted image.
MAX_PASSES = 20
MIN_SPEED = 10_000_000  # pixels decoded per second of CPU time; 60 million are usual
CPU_S = 1.0  # for small images
JPEG_BLOCK = 8192  # bytes of a JPEG that are decoded without a check of the limits
MAX_RLE_PIXELS = 4_000_000  # of a run-length encoded BMP, which Pillow decodes in Python
# Raised by Pillow's decoders for a broken file.
DECODING_ERRORS = (OSError, SyntaxError, ValueError, TypeError, RuntimeError)
TIFF_TILE = 322, 323  # the tags of a tile's width and length
TIFF_OFFSETS = 273, 324  # of strips and of tiles
MAX_TILE = 1 << 24  # pixels: a whole tile is decoded, also for a small image
MAX_METADATA_BYTES = 1 << 18  # of an AVIF file; an image of a phone has some kilobytes
MAX_BOXES = 100  # of an AVIF file, at the top level
AVIF_METADATA = (b"meta", b"moov")


@contextmanager
def decoding_errors(param: str) -> Iterator[None]:
    """Raise InvalidInput, which names `param`, for what is raised while an image is decoded."""
    try:
        yield
    except TooComplex as error:
        reason = f"the image is too complex: {error}; save it again"
        raise InvalidInput(reason, param) from None
    except DECODING_ERRORS:
        names = ", ".join(FORMATS)
        raise InvalidInput(f"this is not an image that can be read ({names})", param) from None


def open_image(
    data: bytes, param: str, max_pixels: int, is_wanted: Callable[[], bool]
) -> Image.Image:
    """Return an image whose header has been read and checked. To be decoded in the same thread.

    Raises InvalidInput, which names `param`, for a file that cannot be read, is too complex or has
    more than `max_pixels`, and ClientGone once not `is_wanted()`, also while it is decoded."""
    scans, strips = 0, 1
    with decoding_errors(param):
        if data.startswith(b"\xff\xd8\xff"):
            data, scans = reduce_jpeg(data)
        elif data[4:8] == b"ftyp":
            data = reduce_avif(data)
        image = Image.open(BoundedFile(data, is_wanted), formats=FORMATS)
        tags: Any = getattr(image, "tag_v2", {})
        tile = int(tags.get(TIFF_TILE[0], 0)) * int(tags.get(TIFF_TILE[1], 0))
        if "jpeg" in str(image.info.get("compression")):
            scans = data.count(b"\xff\xda")
            strips = max(len(tags.get(tag, ())) for tag in TIFF_OFFSETS)
    if tile > MAX_TILE:
        raise InvalidInput("the image is stored in tiles that are too large", param)
    width, height = image.size
    if width * height > max_pixels:
        large = f"the image has {width} x {height} pixels; at most {max_pixels} are accepted"
        raise InvalidInput(large, param)
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        long = f"one side may be at most {MAX_ASPECT_RATIO} times the other"
        raise InvalidInput(f"the image has {width} x {height} pixels; {long}", param)
    if scans * width * height > MAX_PASSES * max_pixels * strips:
        raise InvalidInput(
            f"the image has {scans} scans, too many for its size: save it with fewer", param
        )
    if image.tile and image.tile[0][0] == "bmp_rle" and width * height > MAX_RLE_PIXELS:
        raise InvalidInput(
            f"the image has {width} x {height} pixels; at most {MAX_RLE_PIXELS} are accepted in a "
            "run-length encoded BMP",
            param,
        )
    return image


def reduce_avif(data: bytes) -> bytes:
    """Return an AVIF file without EXIF, which does not count, but Pillow would parse it. Raises
    TooComplex for more metadata than libavif should read: it looks for each item among all others.
    """
    boxes, at, metadata_bytes = [], 0, 0
    while at < len(data):
        size, kind = int.from_bytes(data[at : at + 4], "big"), data[at + 4 : at + 8]
        if size == 1:
            size = int.from_bytes(data[at + 8 : at + 16], "big")
        end = at + max(size, 8) if size else len(data)
        box = data[at:end]
        if kind in AVIF_METADATA:
            metadata_bytes += len(box)
            box = box.replace(b"Exif", b"none")  # the type of an item
        boxes.append(box)
        if metadata_bytes > MAX_METADATA_BYTES or len(boxes) > MAX_BOXES:
            raise TooComplex(f"its metadata has more than {MAX_METADATA_BYTES} bytes")
        at = end
    return b"".join(boxes)


def decode_image(image: Image.Image, param: str) -> None:
    """Decode the pixels of an image from `open_image` in place. Raises as `open_image` does."""
    assert isinstance(image, ImageFile)
    assert isinstance(image.fp, BoundedFile)
    image.fp.allow_cpu(CPU_S + image.width * image.height / MIN_SPEED)
    if image.format == "JPEG":
        image.decodermaxblock = JPEG_BLOCK
    with decoding_errors(param):
        image.load()
    keep_orientation(image)


def keep_orientation(image: Image.Image) -> None:
    """Reduce EXIF to the orientation."""
    content = image.info.pop("exif", b"")
    if as_text := image.info.pop("Raw profile type exif", None):  # in a PNG
        with suppress(ValueError):
            content = content or bytes.fromhex("".join(as_text.split("\n")[3:]))
    if value := exif.orientation(content):
        image.info["exif"] = exif.with_orientation(value)


def upright_rgb(image: Image.Image, background: tuple[int, int, int]) -> Image.Image:
    """Return a decoded image in RGB, rotated by its EXIF, with transparency on `background`."""
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):  # 16 bits: RGB would keep the lowest 8
        image = image.point(lambda value: value / 256).convert("L")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, background), image)
    return image.convert("RGB")
