"""AVIF files: boxes of metadata, limited before libavif reads them.

libavif looks for each item among all others. EXIF is dropped: its orientation does not count, but
Pillow would parse it. No torch.
"""

from worker.media.bounded_file import TooComplex

MAX_METADATA_BYTES = 1 << 18  # of a file; an image of a phone has some kilobytes
MAX_BOXES = 100  # at the top level
METADATA = (b"meta", b"moov")


def reduce_avif(data: bytes) -> bytes:
    """Return the file without EXIF. Raises TooComplex."""
    boxes, at, metadata_bytes = [], 0, 0
    while at < len(data):
        size, kind = int.from_bytes(data[at : at + 4], "big"), data[at + 4 : at + 8]
        if size == 1:
            size = int.from_bytes(data[at + 8 : at + 16], "big")
        end = at + max(size, 8) if size else len(data)
        box = data[at:end]
        if kind in METADATA:
            metadata_bytes += len(box)
            box = box.replace(b"Exif", b"none")  # the type of an item
        boxes.append(box)
        if metadata_bytes > MAX_METADATA_BYTES or len(boxes) > MAX_BOXES:
            raise TooComplex(f"its metadata has more than {MAX_METADATA_BYTES} bytes")
        at = end
    return b"".join(boxes)
