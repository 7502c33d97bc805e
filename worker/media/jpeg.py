"""JPEG files, reduced to the segments that decoding needs.

Pillow parses and joins segments in Python; a file may have millions of them. libjpeg makes a pass
over all pixels for each scan; a scan may be empty. So segments and scans are counted here, and of
EXIF and XMP the orientation is kept. No torch.
"""

import re

from worker.media import exif
from worker.media.bounded_file import TooComplex

MAX_SEGMENTS = 2000  # scans and tables included
MAX_SCANS = 100  # cameras and encoders write about ten
MAX_TABLE_BYTES = 4096  # the tables of one segment
# Neither a zero behind FF in compressed data nor a restart marker.
MARKER = re.compile(rb"\xff[\xc0-\xcf\xd8-\xfe]")
SEARCH_BYTES = 1 << 17  # searched at once: a search holds the interpreter lock
START, END, SCAN, EXIF_OR_XMP = 0xD8, 0xD9, 0xDA, 0xE1
TABLES = (0xC4, 0xCC, 0xDB)
# Frames, tables, scans, and the two segments that name the color space.
DECODED = (*range(0xC0, 0xD0), *range(0xDA, 0xE0), 0xE0, 0xEE)
XMP_ORIENTATION = re.compile(rb'tiff:Orientation(?:="|>)([1-8])')


def reduce_jpeg(data: bytes) -> tuple[bytes, int]:
    """Return the reduced file, up to the end of its first image, and the number of scans. Raises
    ValueError for a broken file, and TooComplex."""
    kept: list[bytes] = []
    exif_parts: list[bytes] = []
    scans, at, xmp_orientation = 0, 2, 0
    for _ in range(MAX_SEGMENTS):
        marker = _next_marker(data, at)
        if scans:  # compressed data lies between
            kept.append(data[at : marker.start() if marker else len(data)])
        if marker is None:
            break
        kind, start = data[marker.end() - 1], marker.end()
        if kind == END:
            kept.append(marker[0])
            break
        if kind == START:
            raise ValueError("a second image starts")
        size = int.from_bytes(data[start : start + 2], "big")
        at = start + size
        if size < 2 or at > len(data) or (kind in TABLES and size > MAX_TABLE_BYTES):
            raise ValueError("a segment has no valid size")
        if kind in DECODED:
            kept.append(data[marker.start() : at])
            scans += kind == SCAN
            if scans > MAX_SCANS:
                raise TooComplex(f"it has more than {MAX_SCANS} scans")
        elif kind == EXIF_OR_XMP:
            content = data[start + 2 : at]
            if content.startswith(exif.HEADER):
                exif_parts.append(content.removeprefix(exif.HEADER))
            elif match := XMP_ORIENTATION.search(content):
                xmp_orientation = int(match[1])
    else:
        raise TooComplex(f"it has more than {MAX_SEGMENTS} segments")
    if orientation := exif.orientation(b"".join(exif_parts)) or xmp_orientation:
        content = exif.with_orientation(orientation)
        length = (len(content) + 2).to_bytes(2, "big")
        kept.insert(0, b"\xff%c%b%b" % (EXIF_OR_XMP, length, content))
    return b"".join([data[:2], *kept]), scans


def _next_marker(data: bytes, at: int) -> re.Match[bytes] | None:
    for start in range(at, len(data), SEARCH_BYTES):
        if marker := MARKER.search(data, start, start + SEARCH_BYTES + 1):
            return marker
    return None
