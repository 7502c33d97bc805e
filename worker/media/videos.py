"""Videos: from a file to the metadata by which frames are chosen, and to those frames as RGB.

A process of its own decodes the file with FFmpeg (media_process.py): MP4, QuickTime, WebM and
Matroska with H.264, H.265, VP8, VP9, AV1 or MPEG-4. Sizes and lengths that a file states are not
trusted: packets are counted, and the first frame is decoded.
"""

import importlib.util
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any, NamedTuple

import numpy as np

from batching.errors import ClientGone, InvalidInput
from worker.media.audio import failure_to_open
from worker.media.media_process import MAX_CPU_S, UnreadableMedia, VideoProcess, container_format

MAX_VIDEO_S = 2 * 3600.0
NO_DECODER = "videos need the server's extra [video], which is not installed"
UNREADABLE = "this is not a video that can be read (MP4, QuickTime, WebM, Matroska)"


class VideoMetadata(NamedTuple):
    """`frames`, `fps`: numbered at a constant rate. `width`, `height`: of an upright frame."""

    frames: int
    fps: float
    seconds: float
    width: int
    height: int


def probe_video(path: str, param: str, max_pixels: int) -> VideoMetadata:
    """Return the metadata of a file. Raises InvalidInput, naming `param`, for one that cannot be
    read, is too long, or has more than `max_pixels` in a frame."""
    with closing(_open(path, param, "probe")) as process:
        metadata = VideoMetadata(**process.header)
    if metadata.seconds > MAX_VIDEO_S:
        long = f"the video lasts {metadata.seconds:.0f} seconds"
        raise InvalidInput(f"{long}; at most {MAX_VIDEO_S:g} are accepted", param)
    if metadata.width * metadata.height > max_pixels:
        large = f"the video has {metadata.width} x {metadata.height} pixels"
        raise InvalidInput(f"{large}; at most {max_pixels} are accepted", param)
    return metadata


def read_frames(
    path: str,
    indices: Sequence[int],
    size: tuple[int, int],
    param: str,
    is_wanted: Callable[[], bool] = lambda: True,
) -> np.ndarray:
    """Return frames [n, height, width, 3] uint8 scaled to `size` (width, height), in the order of
    `indices`, which may repeat.

    Raises InvalidInput, naming `param`, for a file that cannot be read, and ClientGone once not
    `is_wanted()`."""
    width, height = size
    numbers = sorted(set(indices))
    frames = np.empty((len(numbers), height, width, 3), np.uint8)
    with closing(_open(path, param, "frames", numbers=numbers, size=size)) as process:
        for frame in frames:
            if not process.wait(is_wanted):
                raise ClientGone
            try:
                frame[:] = process.read(width, height)
            except UnreadableMedia:
                reason = f"{UNREADABLE}, is broken, or takes over {MAX_CPU_S} s to decode"
                raise InvalidInput(reason, param) from None
    return frames if numbers == list(indices) else frames[np.searchsorted(numbers, indices)]


def _open(path: str, param: str, task: str, **options: Any) -> VideoProcess:
    kind = container_format(path)
    if not kind:
        raise InvalidInput(UNREADABLE, param)
    if importlib.util.find_spec("av") is None:
        raise InvalidInput(NO_DECODER, param)
    try:
        return VideoProcess(path, task, kind, **options)
    except (UnreadableMedia, OSError) as error:
        raise failure_to_open(error, UNREADABLE, param) from error
