"""Images and audio are decoded within limits; strings are never opened as paths or links."""

import base64
import io
import random
import resource
import struct
import tempfile
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from PIL import Image, ImageOps

from batching.errors import ClientGone, InvalidInput, QueueFull
from worker.engines.pipeline.limits import check_audio
from worker.media import audio, images, inputs, jpeg
from worker.media.data_urls import to_bytes
from worker.media.decode_limiter import DecodeLimiter
from worker.media.inputs import to_images
from worker.media.media_process import AudioProcess

RATE = 16000
PIXELS = 64_000_000


def to_image(value: Any, param: str = "inputs", values: int = 1) -> Image.Image:
    with DecodeLimiter(PIXELS).lease() as lease:
        return inputs.to_image(value, lease, param, values)


def to_audio(value: Any, rate: int, **more: Any) -> np.ndarray:
    with DecodeLimiter(PIXELS).lease() as lease:
        return inputs.to_audio(value, rate, lease, **more)


def image(kind: str = "PNG", size: tuple[int, int] = (9, 5)) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size, (10, 200, 30)).save(buffer, format=kind)
    return buffer.getvalue()


def tone(seconds: float, rate: int = RATE, channels: int = 1, kind: str = "WAV") -> bytes:
    samples = 0.3 * np.sin(2 * np.pi * 440 * np.arange(int(seconds * rate)) / rate)
    buffer = io.BytesIO()
    soundfile.write(buffer, np.stack([samples] * channels, axis=1), rate, format=kind)
    return buffer.getvalue()


def without_length(flac: bytes) -> bytes:
    """Return FLAC as written to a pipe: without the length in its header."""
    data = bytearray(flac)
    data[21] &= 0xF0  # the first 4 of 36 bits
    data[22:26] = bytes(4)
    return bytes(data)


def chunk(kind: bytes, data: bytes = b"") -> bytes:
    """Return a chunk of a PNG."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_header(width: int, height: int) -> bytes:
    """Return a small file whose header claims a large image."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 99))


def segment(kind: int, data: bytes) -> bytes:
    """Return a segment of a JPEG."""
    return struct.pack(">BBH", 0xFF, kind, len(data) + 2) + data


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_image_formats_are_read(kind: str) -> None:
    assert to_image(image(kind)).size == (9, 5)


def test_base64_and_data_urls_are_decoded() -> None:
    encoded = base64.b64encode(image()).decode()
    in_lines = base64.encodebytes(image() * 3).decode()
    assert to_image(encoded).size == (9, 5)
    assert to_image(f"data:image/png;base64,{encoded}").size == (9, 5)
    assert to_bytes(in_lines, "inputs") == image() * 3


@pytest.mark.parametrize(
    "name",
    [
        "https://example.com/cat.png",
        "file:///etc/passwd",
        "data:text/plain,hello",
        "../cat.png",
        "",
    ],
)
def test_links_and_paths_are_not_opened(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.open", None)
    with pytest.raises(InvalidInput) as caught:
        to_image(name, "inputs.image")
    assert caught.value.param == "inputs.image"
    monkeypatch.undo()
    opened: list[str] = []

    def record(file: str, *arguments: Any) -> Any:
        opened.append(file)
        return io.open(file, *arguments)  # noqa: UP020  # not the patched one

    monkeypatch.setattr("builtins.open", record)
    with pytest.raises(InvalidInput):
        to_audio(name, RATE)
    assert all(file.startswith(tempfile.gettempdir()) for file in opened)


def test_the_path_of_an_existing_image_is_not_opened(tmp_path: Path) -> None:
    path = tmp_path / "cat.png"
    path.write_bytes(image())
    with pytest.raises(InvalidInput):
        to_image(str(path))


@pytest.mark.parametrize("size", [(60_000, 60_000), (10_000, 10_000), (8_001, 8_000)])
def test_an_image_with_too_many_pixels_is_refused_before_decoding(size: tuple[int, int]) -> None:
    with pytest.raises(InvalidInput, match="pixels"):
        to_image(png_header(*size))


def test_formats_that_start_a_program_are_refused() -> None:
    with pytest.raises(InvalidInput, match="not an image"):
        to_image(image("EPS"))


@pytest.mark.parametrize("kind", ["WAV", "FLAC", "OGG", "MP3"])
def test_audio_formats_are_read(kind: str) -> None:
    samples = to_audio(tone(0.5, kind=kind), RATE)
    assert samples.dtype == np.float32
    assert len(samples) == pytest.approx(8000, abs=2500)  # MP3 pads
    assert np.abs(samples).max() == pytest.approx(0.3, abs=0.05)


@pytest.mark.parametrize("rate", [8000, 22050, 44100, 48000])
def test_audio_is_mixed_down_and_resampled(rate: int) -> None:
    samples = to_audio(tone(3.0, rate, channels=2), RATE)
    assert len(samples) == pytest.approx(3 * RATE, abs=2)
    expected = 0.3 * np.sin(2 * np.pi * 440 * np.arange(len(samples)) / RATE)
    assert np.abs(samples - expected)[500:-500].max() < 1e-2


BROKEN: list[tuple[Callable[[bytes], object], list[bytes], list[bytes], str]] = [
    (
        to_image,
        [image(kind, (40, 30)) for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")],
        [b"", b"hello", b"\0" * 1000, png_header(5, 5)[:40]],
        "not an image",
    ),
    (
        partial(to_audio, rate=RATE),
        [tone(0.2, kind=kind) for kind in ("WAV", "FLAC", "OGG", "MP3")],
        [b"", b"hello", b"\0" * 1000, image()],
        "not an audio file",
    ),
]


@pytest.mark.filterwarnings("ignore::UserWarning")  # of the TIFF reader
@pytest.mark.parametrize(("read", "files", "garbage", "message"), BROKEN)
def test_broken_files_are_refused(
    read: Callable[[bytes], object],
    files: list[bytes],
    garbage: list[bytes],
    message: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    rng = random.Random(0)
    for whole in files:
        for _ in range(50):
            broken = bytearray(whole[: rng.randrange(1, len(whole))])
            broken[rng.randrange(min(len(broken), 60))] = rng.randrange(256)
            with suppress(InvalidInput):
                read(bytes(broken))
    for content in garbage:
        with pytest.raises(InvalidInput, match=message):
            read(content)
    assert "Traceback" not in capfd.readouterr().err


def test_a_full_disk_refuses_audio_for_now() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(QueueFull, match="disk"):
            to_audio(tone(1.0), RATE)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(
    ("seconds", "rate", "channels", "message"),
    [
        (3.0, RATE, 1, "3 seconds"),
        (1.0, RATE, 2, "2 channels"),
        *(
            (7000 / rate, rate, 1, f"{rate} samples a second; 1000 to 384000 are accepted")
            for rate in (1, 999, 400_000)
        ),
    ],
)
def test_audio_beyond_the_limits_is_refused_before_decoding(
    seconds: float, rate: int, channels: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = tone(seconds, rate, channels)
    monkeypatch.setattr(inputs, "MAX_AUDIO_S", 2 if rate == RATE else 7001)
    monkeypatch.setattr(audio, "MAX_SAMPLES", 30_000)
    monkeypatch.setattr(AudioProcess, "read", None)
    with pytest.raises(InvalidInput, match=message):
        to_audio(sound, RATE)


def test_samples_that_are_not_finite_are_refused() -> None:
    samples = np.zeros(8000, np.float32)
    samples[77] = np.nan
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, RATE, format="WAV", subtype="FLOAT")
    with pytest.raises(InvalidInput, match="finite"):
        to_audio(buffer.getvalue(), RATE)


def test_too_short_audio_is_refused() -> None:
    with pytest.raises(InvalidInput, match="at least"):
        to_audio(tone(0.001), RATE)


def test_a_length_above_the_models_limit_is_refused_before_decoding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(AudioProcess, "read", None)
    check = partial(check_audio, parameters={}, window_s=0.0)
    with pytest.raises(InvalidInput, match="has 301 seconds; this model takes 300"):
        to_audio(tone(301, 1000), RATE, check_seconds=check)


def test_the_images_of_one_input_share_the_pixel_limit() -> None:
    half = image(size=(6000, 5400))
    with DecodeLimiter(PIXELS).lease() as lease, pytest.raises(InvalidInput) as caught:
        to_images([(half, "inputs.images[0]"), (half, "inputs.images[1]")], lease)
    assert "64800000 together with the others; at most 64000000" in str(caught.value)
    with DecodeLimiter(PIXELS).lease() as lease:
        assert len(to_images([(image(), "one"), (image(), "two")], lease)) == 2
        assert lease.taken == 2 * 9 * 5


def test_fewer_pixels_are_accepted_where_the_output_has_many_values_per_pixel() -> None:
    fine, large = image(size=(1000, 1000)), image(size=(1001, 1000))
    assert to_image(fine, values=64 * inputs.FREE_VALUES_PER_PIXEL).size == (1000, 1000)
    with pytest.raises(
        InvalidInput, match="at most 1000000 in all are accepted where each gets 512"
    ):
        to_image(large, values=64 * inputs.FREE_VALUES_PER_PIXEL)


@pytest.mark.parametrize("size", [(1, 201), (201, 1)])
def test_an_extreme_aspect_ratio_is_refused(size: tuple[int, int]) -> None:
    """Processors that scale the shorter side would enlarge the image."""
    with pytest.raises(InvalidInput, match="at most 200 times the other"):
        to_image(image(size=size))
    assert to_image(image(size=(200, 1))).size == (200, 1)


def test_a_small_image_in_a_large_tile_is_refused() -> None:
    """libtiff decodes whole tiles."""
    name, long, side = range(256, 260), 4, 30_000
    tags = [*zip(name, (10, 10, 8, 5), strict=True), (262, 1), (277, 1), (322, side), (323, side)]
    tags += [(324, 200), (325, 12)]
    entries = b"".join(struct.pack("<HHII", tag, long, 1, value) for tag, value in tags)
    file = b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + b"\0" * 100
    with pytest.raises(InvalidInput, match="tiles that are too large"):
        to_image(file)


def test_a_progressive_image_with_too_many_scans_is_refused() -> None:
    buffer = io.BytesIO()
    Image.new("L", (800, 800)).save(buffer, format="JPEG", progressive=True)
    once = buffer.getvalue()
    scan = once[once.rindex(b"\xff\xda") : -2]
    assert to_image(once[:-2] + 50 * scan + once[-2:]).size == (800, 800)
    with pytest.raises(InvalidInput, match="scans"):
        to_image(once[:-2] + 6400 * scan + once[-2:])


def empty_scans(count: int) -> bytes:
    """Return a baseline JPEG that has components in scans of their own."""
    whole = image("JPEG", (800, 800))
    scan = segment(0xDA, b"\1\1\0\0\x3f\0")
    return whole[: whole.rindex(b"\xff\xda")] + count * scan + b"\xff\xd9"


def inserted(kind: str, content: bytes) -> bytes:
    """Return an image with metadata before its pixels."""
    whole = image(kind, (40, 30))
    starts = {"JPEG": 2, "PNG": 33, "GIF": whole.find(b"\x21\xf9") if kind == "GIF" else 0}
    at = starts[kind] if starts[kind] > 0 else 13 + 3 * (2 << (whole[10] & 7))
    return whole[:at] + content + whole[at:]


def bmp(width: int, height: int, run: int) -> bytes:
    """Return a BMP of runs of equal pixels."""
    pixels = (bytes([run, 3]) * (width // run) + b"\0\0") * height + b"\0\1"
    sizes = 40, width, height, 1, 8, 1, len(pixels), 0, 0, 256, 256
    header = struct.pack("<IiiHHIIiiII", *sizes) + bytes(4 * 256)
    return (
        b"BM"
        + struct.pack("<III", 14 + len(header + pixels), 0, 14 + len(header))
        + header
        + pixels
    )


COMPLEX = {
    "empty scans": lambda: empty_scans(20_000),
    "EXIF segments": lambda: inserted("JPEG", 300_000 * segment(0xE1, b"Exif\0\0ab")),
    "comments": lambda: inserted("JPEG", 1_000_000 * segment(0xFE, b"")),
    "empty chunks": lambda: inserted("PNG", 1_000_000 * chunk(b"tEXt")),
    "empty chunks of pixels": lambda: inserted("PNG", 1_000_000 * chunk(b"IDAT")),
    "chunks behind the pixels": lambda: image()[:-12] + 1_000_000 * chunk(b"teXt"),
    "blocks of a comment": lambda: inserted("GIF", b"!\xfe" + 1_000_000 * b"\1x" + b"\0"),
    "extensions": lambda: inserted("GIF", 1_000_000 * b"!\1\0"),
    "runs of one pixel": lambda: bmp(1000, 1000, 1),
    "run-length encoded pixels": lambda: bmp(5477, 5477, 255),
}


@pytest.mark.parametrize("name", COMPLEX)
def test_an_image_that_takes_much_work_to_read_is_refused(name: str) -> None:
    data = COMPLEX[name]()
    started = time.thread_time()
    with pytest.raises(InvalidInput, match=r"too complex|run-length"):
        to_image(data)
    assert time.thread_time() - started < 1


def test_metadata_is_skipped() -> None:
    tables = 400 * segment(0xED, b"Photoshop 3.0\0" + 5000 * b"8BIM\4\4\0\0\0\0\0\0")
    junk = segment(0xFE, b"") + 1_000_000 * b"junk"
    for data in (tables, junk):
        started = time.thread_time()
        assert to_image(inserted("JPEG", data)).size == (40, 30)
        assert time.thread_time() - started < 0.2


def test_a_search_for_segments_holds_the_interpreter_lock_for_a_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    searched = []

    class Marker:
        def search(self, data: bytes, at: int, end: int | None = None) -> Any:
            searched.append(min(len(data), end or len(data)) - at)
            return pattern.search(data, at, len(data) if end is None else end)

    pattern = jpeg.MARKER
    monkeypatch.setattr(jpeg, "MARKER", Marker())
    assert to_image(inserted("JPEG", 30_000_000 * b"\xff")).size == (40, 30)
    assert sum(searched) > 30_000_000
    assert max(searched) < 1_000_000  # megabytes take milliseconds each


def test_ordinary_images_are_read() -> None:
    orientation = Image.Exif()
    orientation[0x0112] = 6
    photo = segment(0xE1, orientation.tobytes())
    photo += 200 * segment(0xE1, b"Exif\0\0" + bytes(60_000))
    turned = ImageOps.exif_transpose(to_image(inserted("JPEG", photo)))
    assert turned.size == (30, 40)
    progressive = io.BytesIO()
    Image.new("RGB", (4000, 3000)).save(progressive, format="JPEG", progressive=True)
    assert to_image(progressive.getvalue()).size == (4000, 3000)
    assert to_image(empty_scans(90)).size == (800, 800)
    assert to_image(bmp(640, 480, 20)).size == (640, 480)


def test_decoding_ends_when_the_client_has_left() -> None:
    reads = 0

    def is_wanted() -> bool:
        nonlocal reads
        reads += 1
        return reads < 20

    noise = io.BytesIO()
    Image.effect_noise((1000, 1000), 100).save(noise, format="JPEG")
    with DecodeLimiter(PIXELS).lease(is_wanted=is_wanted) as lease, pytest.raises(ClientGone):
        inputs.to_image(noise.getvalue(), lease)
    assert reads == 20


def test_decoding_has_a_limit_of_cpu_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "CPU_S", 0)
    monkeypatch.setattr(images, "MIN_SPEED", 1e12)
    with pytest.raises(InvalidInput, match="takes too long to read"):
        to_image(image("JPEG", (1000, 1000)))
