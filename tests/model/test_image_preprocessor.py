"""Image files of a prompt: accepted formats, and limits on pixels, tokens and memory."""

import io
import struct
import threading
import zlib
from functools import partial
from typing import Any, cast

import pytest
from PIL import Image, ImageOps

from batching.errors import InvalidInput
from batching.fair_share import NO_OWNER, WorkOwner
from tests import multimodal, tiny_multimodal
from tests.generating import load, serve
from tests.model.test_multimodal_processor import loaded
from tests.multimodal import assert_generated, png, request
from tests.threads import run_together
from worker.engines.generation import loading
from worker.media.decode_limiter import DecodeLimiter
from worker.media.inputs import to_image
from worker.messages.generation import MediaInput
from worker.messages.protocol import Pending
from worker.vision.decoders import REQUEST_PIXELS_RATIO, ImageDecoder
from worker.vision.media_preprocessor import MediaPreprocessor, MemoryLimiter, Waiting
from worker.vision.processor import MediaFeatures, Processor

MEGAPIXEL = 1_000_000
RED, WHITE = (255, 0, 0), (255, 255, 255)


def file(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def plain(width: int = 40, height: int = 20, mode: str = "RGB", color: Any = RED) -> Image.Image:
    return Image.new(mode, (width, height), color)


def png_header(width: int, height: int) -> bytes:
    """A PNG whose header gives this size and whose pixels are zero."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        checksum = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + checksum

    sizes = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    rows = zlib.compress(bytes(min(4 * MEGAPIXEL, height * (3 * width + 1))), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", sizes) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def media_preprocessor(megapixels: int = 1, **options: Any) -> MediaPreprocessor:
    return MediaPreprocessor(loaded("llava"), megapixels * MEGAPIXEL, **options)


def decoded(data: bytes, detail: str = "auto") -> Image.Image:
    return ImageDecoder(MEGAPIXEL, 1000).decode(MediaInput(data, detail, "here"), lambda: True)


def rejection(*files: bytes) -> str:
    images = [MediaInput(data, "auto", f"image {n}") for n, data in enumerate(files)]
    with pytest.raises(InvalidInput) as error:
        media_preprocessor().process("<image>" * len(files), images)
    assert error.value.param == f"image {len(files) - 1}"
    return str(error.value)


def test_total_pixels_are_checked_before_any_image_is_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("worker.vision.decoders.decode_image", None)
    large = png_header(1000, 1000)
    message = rejection(*[large] * (REQUEST_PIXELS_RATIO + 1))
    assert f"at most {REQUEST_PIXELS_RATIO * MEGAPIXEL}" in message


def test_text_beyond_the_context_is_rejected_before_any_image_is_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = loaded("qwen2-vl")
    processor = Processor(known._processor, known.config, 100)
    preprocessor = MediaPreprocessor(processor, MEGAPIXEL)
    monkeypatch.setattr("worker.vision.decoders.decode_image", None)
    images = [MediaInput(file(plain(64, 64)), "auto", f"image {n}") for n in range(20)]
    with pytest.raises(InvalidInput, match="fill more than the 100 tokens") as error:
        preprocessor.process("word " * 100 + known.modalities["image"].token * 20, images)
    assert error.value.param == "image 0"


def test_processing_stops_at_the_first_image_beyond_the_context(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    preprocessor, processed, original = media_preprocessor(), [], Processor.process_media
    known = loaded("llava")
    preprocessor.processor = Processor(known._processor, known.config, 20)

    def process_media(
        self: Processor, kind: Any, image: Any, digest: bytes, low: bool, param: str, *more: Any
    ) -> MediaFeatures:
        processed.append(param)
        return original(self, kind, image, digest, low, param, *more)

    monkeypatch.setattr(Processor, "process_media", process_media)
    images = [MediaInput(png(n), "auto", f"image {n}") for n in range(5)]
    with pytest.raises(InvalidInput, match="fill more than the 20 tokens") as error:
        preprocessor.process("<image>" * 5, images)
    assert (processed, error.value.param) == (["image 0", "image 1"], "image 1")


def test_requests_for_token_ids_process_images_one_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    preprocessor = media_preprocessor()
    images = [MediaInput(file(plain()), "auto", "here")]
    original, reading, start = Processor.process_media, threading.Semaphore(1), threading.Barrier(3)

    def process_media(self: Processor, *args: Any) -> MediaFeatures:
        assert reading.acquire(blocking=False)
        try:
            return original(self, *args)
        finally:
            reading.release()

    def ask() -> None:
        start.wait()
        results.extend(preprocessor.token_ids("<image>", images) for _ in range(20))

    monkeypatch.setattr(Processor, "process_media", process_media)
    results: list[list[int]] = []
    run_together(*[ask] * 3)
    preprocessor.close()
    assert len(results) == 60


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (file(plain(mode="CMYK", color=(0, 255, 255, 0)), "JPEG"), RED),
        (file(plain().quantize(4)), RED),
        (file(plain(mode="L", color=255)), WHITE),
        (file(plain(mode="1", color=1)), WHITE),
        (file(plain(mode="RGBA", color=(0, 0, 0, 0))), WHITE),
        (file(plain(mode="RGBA", color=(*RED, 255))), RED),
        (file(plain(mode="LA", color=(0, 0))), WHITE),
        (file(plain(mode="P", color=0), transparency=0), WHITE),
        (file(plain(mode="I;16", color=65535)), WHITE),
        (file(plain(mode="I;16", color=32768)), (128, 128, 128)),
        (
            file(plain(), "GIF", save_all=True, append_images=[plain(color=WHITE)], duration=10),
            RED,
        ),
    ],
)
def test_images_are_converted_to_rgb_on_white(data: bytes, expected: tuple[int, int, int]) -> None:
    image = decoded(data)
    assert (image.mode, image.size) == ("RGB", (40, 20))
    assert image.getpixel((20, 10)) == pytest.approx(expected, abs=3)


def test_photo_is_rotated_upright_by_its_exif() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # rotate clockwise
    image = plain(40, 20)
    image.paste(WHITE, (0, 0, 20, 20))  # the left side, which becomes the top
    upright = decoded(file(image, exif=exif))
    assert upright.size == (20, 40)
    assert (upright.getpixel((10, 5)), upright.getpixel((10, 35))) == (WHITE, RED)


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
@pytest.mark.parametrize("broken", [b"garbage!", b"Exif\0\0garbage!"])
def test_photo_with_broken_exif_is_not_rotated(kind: str, broken: bytes) -> None:
    data = file(plain(40, 20), kind, exif=broken)
    assert decoded(data).size == (40, 20)
    with DecodeLimiter(MEGAPIXEL).lease() as lease:  # pipelines rotate images themselves
        assert ImageOps.exif_transpose(to_image(data, lease)).size == (40, 20)


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_low_detail_image_is_downscaled(kind: str) -> None:
    large = file(plain(1000, 500), kind)
    assert decoded(large, "low").size == (512, 256)
    for detail in ("auto", "high", "original"):
        assert decoded(large, detail).size == (1000, 500)
    assert decoded(file(plain()), "low").size == (40, 20)


def test_requests_wait_while_tensors_of_others_fill_the_memory_limit() -> None:
    preprocessor = media_preprocessor(max_bytes=1)
    images = [MediaInput(file(plain()), "auto", "here")]
    first = preprocessor.process("<image>", images)
    with pytest.raises(Pending) as pending, preprocessor.admit(images):
        pass
    called, unwanted = threading.Event(), threading.Event()
    pending.value.then(NO_OWNER, lambda: True, called.set)
    pending.value.then(NO_OWNER, lambda: False, unwanted.set)
    assert not called.is_set()
    assert preprocessor.recompute("<image>", images).result().ids == first.ids
    preprocessor.close()
    del first
    assert called.is_set()
    assert not unwanted.is_set()
    assert preprocessor.memory_limiter.used_bytes == 0
    with preprocessor.admit(images):
        preprocessor.process("<image>", images)


def test_images_of_one_request_are_decoded_at_a_time() -> None:
    """Other requests with images wait without holding a thread."""
    preprocessor = media_preprocessor()
    images = [MediaInput(file(plain()), "auto", "here")]
    with preprocessor.admit(images):
        with pytest.raises(Pending) as pending, preprocessor.admit(images):
            pass
        called = threading.Event()
        pending.value.then(NO_OWNER, lambda: True, called.set)
        assert not called.is_set()
    assert called.is_set()
    broken = [MediaInput(b"", "auto", "here")]
    with pytest.raises(InvalidInput), preprocessor.admit(broken):
        preprocessor.process("<image>", broken)
    with preprocessor.admit(images):
        preprocessor.process("<image>", images)


def test_clients_take_turns_at_decoding() -> None:
    limiter = media_preprocessor().memory_limiter
    owners = {name: WorkOwner(name[0]) for name in ("a1", "a2", "a3", "b1")}
    order: list[str] = []

    def start(name: str) -> None:
        if limiter.start_decoding(True):
            order.append(name)
        else:
            limiter.call_when_free(True, owners[name], lambda: True, lambda: start(name))

    for name in owners:
        start(name)
    for _ in owners:
        limiter.end_decoding(True)
    assert order == ["a1", "a2", "b1", "a3"]


class Output:
    nbytes = 1000


def test_memory_that_is_released_during_a_call_calls_no_request_twice() -> None:
    class Releasing(MemoryLimiter):
        def _is_full(self, has_video: bool) -> bool:
            is_full = super()._is_full(has_video)
            outputs.clear()  # as the garbage collector may do anywhere
            return is_full

    outputs, called = list[Any](), list[str]()
    limiter = Releasing(2000)
    limiter.start_decoding(False)
    for name in ("a", "b"):
        limiter.call_when_free(False, NO_OWNER, lambda: True, partial(called.append, name))
    outputs.append(Output())
    limiter.reserve(outputs[0])
    limiter.end_decoding(False)
    assert (called, limiter.used_bytes) == (["a", "b"], 0)


def test_memory_that_is_released_during_a_call_is_not_missed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    outputs, called = [Output()], list[str]()

    def make(*fields: Any) -> Waiting:
        outputs.clear()  # as the garbage collector may do anywhere
        return Waiting(*fields)

    monkeypatch.setattr("worker.vision.media_preprocessor.Waiting", make)
    limiter = MemoryLimiter(1000)
    limiter.reserve(cast(Any, outputs[0]))
    limiter.call_when_free(False, NO_OWNER, lambda: True, partial(called.append, "a"))
    assert called == ["a"]


def test_images_do_not_wait_for_a_video() -> None:
    preprocessor = media_preprocessor()
    images = [MediaInput(file(plain()), "auto", "here")]
    assert preprocessor.memory_limiter.start_decoding(has_video=True)
    with preprocessor.admit(images):
        preprocessor.process("<image>", images)
    video = MediaInput(b"", "auto", "here", kind="video")
    with pytest.raises(Pending), preprocessor.admit([*images, video]):
        pass


def import_error(cause: Exception) -> ImportError:
    error = ImportError("Could not import module 'Processor'. Are its requirements there?")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ImportError("\nPackage `num2words` is required"), "num2words"),
        (import_error(ImportError("No module named 'torchvision'")), "torchvision"),
        (import_error(OSError("/a/path")), "Could not import"),
        (OSError("/a/path"), "log"),
    ],
)
def test_model_whose_processor_does_not_load_serves_text(
    monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str
) -> None:
    def fail(folder: str) -> None:
        raise error

    monkeypatch.setattr(loading, "load_processor", fail)
    generator = load(tiny_multimodal.folder("llava"))
    monkeypatch.undo()  # the reference model loads the processor
    served, _ = serve(generator, [request("Only words.")])
    assert_generated("llava", served)
    with pytest.raises(InvalidInput, match=reason) as rejected:
        generator.prepare(request("What is ", png(0), "here?"))
    assert "/a/path" not in str(rejected.value)
    assert reason in generator.text_model.refused_media["image"]


def test_model_that_does_not_run_with_images_serves_text(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise TypeError("the encoder requires more\nthan one argument")

    monkeypatch.setattr(tiny_multimodal.hf.MllamaVisionModel, "forward", fail)
    generator = load(tiny_multimodal.folder("mllama"))
    monkeypatch.undo()
    expected = "images are refused, the model does not run with them: the encoder requires more"
    messages = [record.message for record in caplog.records]
    assert [message for message in messages if "images" in message] == [expected]
    served, _ = serve(generator, [request("Only words.")])
    assert_generated("mllama", served)
    with pytest.raises(InvalidInput, match="does not run with images here"):
        generator.prepare(request("What is ", png(0), "here?"))


def test_the_background_of_transparent_pixels_is_the_requests() -> None:
    data = file(plain(mode="RGBA", color=(0, 0, 0, 0)))
    images = [MediaInput(data, "auto", "here"), MediaInput(data, "auto", "here", background=RED)]
    pixels = [
        ImageDecoder(MEGAPIXEL, 1000).decode(image, lambda: True).getpixel((0, 0))
        for image in images
    ]
    assert pixels == [WHITE, RED]
    assert images[0].digest != images[1].digest


def test_limits_of_pixels_are_the_processors_own() -> None:
    """They make fewer or more tokens, and an image with other limits is another image."""
    processor = multimodal.loaded("qwen2-vl").input_processor.media_preprocessor
    assert processor
    data, token = file(plain(200, 160)), processor.processor.modalities["image"].token

    def process(**limits: int) -> list[MediaFeatures]:
        image = MediaInput(data, "auto", "here", limits=tuple(limits.items()))
        return [*processor.process(token, [image]).media]

    [plain_one], [small], [large] = (
        process(), process(max_pixels=600), process(min_pixels=9_000, max_pixels=20_000),
    )  # fmt: skip
    assert small.token_count < plain_one.token_count < large.token_count
    assert len({image.digest for image in (plain_one, small, large)}) == 3
    with pytest.raises(InvalidInput) as refused:
        process(min_pixels=10**9)
    assert refused.value.param == "mm_processor_kwargs.min_pixels"
    image = MediaInput(data, "auto", "here", limits=(("max_pixels", 100),))
    with pytest.raises(InvalidInput) as refused:
        media_preprocessor().process("<image>", [image])
    assert refused.value.param == "mm_processor_kwargs.max_pixels"
