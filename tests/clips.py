"""Small videos, made by PyAV. The color of a frame tells its number."""

import io
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
from transformers.video_utils import VideoMetadata

av: Any = pytest.importorskip("av")
SIDE = 64, 48
SAMPLING_RATE = 16000


def frame(number: int, size: tuple[int, int] = SIDE) -> np.ndarray:
    """Return RGB [height, width, 3]: a grey of 8 levels a frame, and a bright upper left corner."""
    width, height = size
    pixels = np.full((height, width, 3), 20 + number % 28 * 8, np.uint8)
    pixels[: height // 4, : width // 4] = 250
    return pixels


def number_of(pixels: np.ndarray) -> int:
    """Return the number (modulo 28) of a decoded frame."""
    height, width, _ = pixels.shape
    return round((float(pixels[height // 3 :, width // 3 :].mean()) - 20) / 8)


def clip(
    frames: int = 20,
    rate: int = 10,
    kind: str = "mp4",
    codec: str = "h264",
    size: tuple[int, int] = SIDE,
    pixel_format: str = "yuv420p",
    times: Sequence[int] | None = None,
    rotation: int = 0,
    options: dict[str, str] | None = None,
    make: Callable[[int], np.ndarray] | None = None,
    sound_s: float = 0.0,
    sound_seed: int = 0,
) -> bytes:
    """Return a video. `times`: of the frames, in thousandths of a second."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=kind) as file:
        stream = file.add_stream(codec, rate=1000 if times else rate)
        stream.width, stream.height = size
        stream.pix_fmt = pixel_format
        stream.options = {"g": "8", **(options or {})}
        if rotation:
            stream.set_display_rotation(rotation)
        if sound_s:
            rng, length = np.random.default_rng(sound_seed), int(sound_s * SAMPLING_RATE)
            noise = rng.normal(0, 0.1, (1, length))
            samples = av.AudioFrame.from_ndarray(noise.astype(np.float32), "fltp", "mono")
            samples.rate = SAMPLING_RATE
            sound = file.add_stream("aac", rate=SAMPLING_RATE, layout="mono")
            for packet in [*sound.encode(samples), *sound.encode(None)]:
                file.mux(packet)
        for number in range(frames):
            pixels = make(number) if make else frame(number, size)
            picture = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            picture.pts = times[number] if times else number
            for packet in stream.encode(picture):
                file.mux(packet)
        for packet in stream.encode(None):
            file.mux(packet)
    return buffer.getvalue()


@cache
def sound_of(video: bytes) -> np.ndarray:
    """Return the samples of a clip's sound."""
    with av.open(io.BytesIO(video)) as file:
        return np.concatenate([each.to_ndarray()[0] for each in file.decode(audio=0)])


@cache
def decoded(video: bytes) -> tuple[np.ndarray, VideoMetadata]:
    """Return all frames of a clip of 10 frames a second, and their metadata."""
    with av.open(io.BytesIO(video)) as file:
        frames = np.stack([each.to_ndarray(format="rgb24") for each in file.decode(video=0)])
    count, height, width, _ = frames.shape
    return frames, VideoMetadata(count, 10.0, width, height, count / 10)
