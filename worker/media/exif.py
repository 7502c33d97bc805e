"""The orientation of an image, the only part of its EXIF that is read.

Pillow copies every value of EXIF, and several values may share the same bytes: a few megabytes make
gigabytes. No torch.
"""

import struct

from PIL import Image

ORIENTATION = 0x0112
NUMBERS = {1: "B", 3: "H", 4: "I"}  # by EXIF's type
ENTRY_BYTES = 12
HEADER = b"Exif\0\0"


def orientation(exif: bytes) -> int:
    """Return an EXIF orientation, 1 to 8; 0 if there is none."""
    tiff = exif.removeprefix(HEADER)
    order = {b"II": "<", b"MM": ">"}.get(tiff[:2])
    if order is None:
        return 0
    try:
        (start,) = struct.unpack_from(f"{order}I", tiff, 4)
        (count,) = struct.unpack_from(f"{order}H", tiff, start)
        for at in range(start + 2, start + 2 + count * ENTRY_BYTES, ENTRY_BYTES):
            tag, kind = struct.unpack_from(f"{order}HH", tiff, at)
            if tag == ORIENTATION and kind in NUMBERS:
                (value,) = struct.unpack_from(order + NUMBERS[kind], tiff, at + 8)
                return value if 1 <= value <= 8 else 0
    except struct.error:  # it is broken
        pass
    return 0


def with_orientation(value: int) -> bytes:
    """Return EXIF that has an orientation only."""
    exif = Image.Exif()
    exif[ORIENTATION] = value
    return exif.tobytes()
