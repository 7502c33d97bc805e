"""Image files on their way into a prompt: what they may be, and what they may cost."""

import io
import struct
import threading
import tracemalloc
import zlib
from typing import Any

import pytest
from PIL import Image, ImageOps

from batching.errors import InvalidInput
from tests import tiny_seeing
from tests.generating import serve
from tests.model.test_processors import loaded
from tests.seeing import assert_generated, png, request
from worker.generation import loading
from worker.generation.loading import load_generator
from worker.media.inputs import to_image
from worker.messages.generation import ImageInput
from worker.messages.protocol import Pending
from worker.model.language_model import GeneratorOptions
from worker.vision.image_preprocessor import TIMES_IN_ALL, ImagePreprocessor
from worker.vision.processor import ImageFeatures, Processor

MEGAPIXEL = 1_000_000
RED, WHITE = (255, 0, 0), (255, 255, 255)


def file(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    made = io.BytesIO()
    image.save(made, kind, **options)
    return made.getvalue()


def plain(width: int = 40, height: int = 20, mode: str = "RGB", color: Any = RED) -> Image.Image:
    return Image.new(mode, (width, height), color)


def header_of(width: int, height: int) -> bytes:
    """A PNG of so many pixels, all of them zero."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        checksum = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + checksum

    sizes = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    rows = zlib.compress(bytes(min(4 * MEGAPIXEL, height * (3 * width + 1))), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", sizes) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def sight(megapixels: int = 1, **options: Any) -> ImagePreprocessor:
    return ImagePreprocessor(loaded("llava"), megapixels * MEGAPIXEL, **options)


def looked_at(data: bytes, detail: str = "auto") -> Image.Image:
    eyes = sight()
    with eyes.budget.lease() as lease:
        return eyes._decoded(ImageInput(data, detail, "here"), lease)


def refusal(*files: bytes) -> str:
    pictures = [ImageInput(data, "auto", f"image {n}") for n, data in enumerate(files)]
    with pytest.raises(InvalidInput) as refused:
        sight().process("<image>" * len(files), pictures)
    assert refused.value.param == f"image {len(files) - 1}"
    return str(refused.value)


SVG = b'<svg xmlns="http://www.w3.org/2000/svg" width="4" height="4"><rect width="4"/></svg>'
EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 4 4\n%%EndComments\nshowpage\n"


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (file(Image.effect_noise((400, 300), 90))[:-4000], "not an image that can be read"),
        (SVG, "not an image that can be read"),
        (EPS, "not an image that can be read"),
        (b"", "not an image that can be read"),
        (b"GIF89a", "not an image that can be read"),
        (header_of(20_000, 20_000), "20000 x 20000 pixels; at most 1000000 are taken"),
        (header_of(1001, 1000), "1001 x 1000 pixels"),
        (file(plain(1, 201)), "at most 200 times the other"),
    ],
)
def test_files_that_are_refused(data: bytes, says: str) -> None:
    assert says in refusal(data)
    assert says in refusal(file(plain()), data)


def test_bomb_takes_no_memory() -> None:
    bomb = header_of(20_000, 20_000)
    assert len(bomb) < 10_000
    tracemalloc.start()
    refusal(bomb)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 5_000_000


def test_images_have_a_sum_that_is_known_before_any_is_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("worker.vision.image_preprocessor.decode_image", None)
    large = header_of(1000, 1000)
    assert f"at most {TIMES_IN_ALL * MEGAPIXEL}" in refusal(*[large] * (TIMES_IN_ALL + 1))


@pytest.mark.parametrize("model", ["qwen2-vl", "smolvlm"])
def test_images_that_do_not_fit_are_refused_before_any_is_decoded(
    monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    known = loaded(model)
    eyes = ImagePreprocessor(Processor(known._processor, known.image_id, 100), MEGAPIXEL)
    monkeypatch.setattr("worker.vision.image_preprocessor.decode_image", None)
    pictures = [ImageInput(file(plain(64, 64)), "auto", f"image {n}") for n in range(20)]
    for words in ("", "word " * 100):
        with pytest.raises(InvalidInput, match="fill more than the 100 tokens") as refused:
            eyes.process(words + known.mark * 20, pictures)
        assert (refused.value.param == "image 0") == bool(words)


def test_images_beyond_the_context_end_the_looking(monkeypatch: pytest.MonkeyPatch) -> None:
    eyes, looked, original = sight(), [], Processor.look
    eyes.processor = Processor(loaded("llava")._processor, loaded("llava").image_id, 20)

    def look(
        self: Processor, image: Image.Image, digest: bytes, rough: bool, param: str
    ) -> ImageFeatures:
        looked.append(param)
        return original(self, image, digest, rough, param)

    monkeypatch.setattr(Processor, "look", look)
    pictures = [ImageInput(png(n), "auto", f"image {n}") for n in range(5)]
    with pytest.raises(InvalidInput, match="fill more than the 20 tokens") as refused:
        eyes.process("<image>" * 5, pictures)
    assert (looked, refused.value.param) == (["image 0", "image 1"], "image 1")


def test_only_one_request_for_token_ids_has_its_images_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    eyes, asked = sight(), ("<image>", [ImageInput(file(plain()), "auto", "here")])
    original, reading, start = Processor.look, threading.Semaphore(1), threading.Barrier(3)

    def look(self: Processor, *given: Any) -> ImageFeatures:
        assert reading.acquire(blocking=False)
        try:
            return original(self, *given)
        finally:
            reading.release()

    def ask() -> None:
        start.wait()
        answers.extend(eyes.ids(*asked) for _ in range(20))

    monkeypatch.setattr(Processor, "look", look)
    answers: list[list[int]] = []
    threads = [threading.Thread(target=ask) for _ in range(3)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    eyes.close()
    assert len(answers) == 60


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
def test_images_are_seen_in_rgb(data: bytes, expected: tuple[int, int, int]) -> None:
    image = looked_at(data)
    assert (image.mode, image.size) == ("RGB", (40, 20))
    assert image.getpixel((20, 10)) == pytest.approx(expected, abs=3)


def test_photo_is_turned_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turn it to the right
    image = plain(40, 20)
    image.paste(WHITE, (0, 0, 20, 20))  # on the left, that is on top
    upright = looked_at(file(image, exif=exif))
    assert upright.size == (20, 40)
    assert (upright.getpixel((10, 5)), upright.getpixel((10, 35))) == (WHITE, RED)


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
@pytest.mark.parametrize("broken", [b"garbage!", b"Exif\0\0garbage!"])
def test_photo_whose_exif_is_broken_stays_as_it_is(kind: str, broken: bytes) -> None:
    data = file(plain(40, 20), kind, exif=broken)
    assert looked_at(data).size == (40, 20)
    with sight().budget.lease() as lease:  # pipelines turn images themselves
        assert ImageOps.exif_transpose(to_image(data, lease)).size == (40, 20)


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_glance_sees_fewer_pixels(kind: str) -> None:
    large = file(plain(1000, 500), kind)
    assert looked_at(large, "low").size == (512, 256)
    for detail in ("auto", "high", "original"):
        assert looked_at(large, detail).size == (1000, 500)
    assert looked_at(file(plain()), "low").size == (40, 20)


def test_budget_is_free_again_after_a_failure() -> None:
    eyes = sight()
    broken = file(Image.effect_noise((900, 900), 90))[:-4000]
    kept = []
    for _ in range(3):
        with pytest.raises(InvalidInput) as refused:
            eyes.process("<image>", [ImageInput(broken, "auto", "here")])
        kept.append(refused)
    assert eyes.budget.taken == 0


def test_requests_wait_while_the_tensors_of_others_take_all_memory() -> None:
    eyes, asked = sight(held_bytes=1), ("<image>", [ImageInput(file(plain()), "auto", "here")])
    first = eyes.process(*asked)
    with pytest.raises(Pending) as pending, eyes.turn(asked[1]):
        pass
    called, gone = threading.Event(), threading.Event()
    pending.value.then(lambda: True, called.set)
    pending.value.then(lambda: False, gone.set)
    assert not called.is_set()
    assert eyes.again(*asked).result().ids == first.ids
    eyes.close()
    del first
    assert called.is_set()
    assert not gone.is_set()
    assert eyes.held.taken == 0
    with eyes.turn(asked[1]):
        eyes.process(*asked)


def test_images_of_one_request_are_read_at_a_time() -> None:
    """Those of others take no thread meanwhile."""
    eyes, asked = sight(), ("<image>", [ImageInput(file(plain()), "auto", "here")])
    with eyes.turn(asked[1]):
        with pytest.raises(Pending) as pending, eyes.turn(asked[1]):
            pass
        called = threading.Event()
        pending.value.then(lambda: True, called.set)
        assert not called.is_set()
    assert called.is_set()
    broken = [ImageInput(b"", "auto", "here")]
    with pytest.raises(InvalidInput), eyes.turn(broken):
        eyes.process("<image>", broken)
    with eyes.turn(asked[1]):
        eyes.process(*asked)


def import_error(cause: Exception) -> ImportError:
    error = ImportError("Could not import module 'Processor'. Are its requirements there?")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ImportError("\nPackage `num2words` is required"), "num2words"),
        (import_error(ImportError("No module named 'torchvision'")), "torchvision"),
        (import_error(OSError("/a/path")), "Could not import"),
        (OSError("/a/path"), "log"),
    ],
)
def test_a_model_whose_processor_does_not_load_serves_text(
    monkeypatch: pytest.MonkeyPatch, error: Exception, told: str
) -> None:
    def fail(folder: str) -> None:
        raise error

    monkeypatch.setattr(loading, "load_processor", fail)
    folder = str(tiny_seeing.folder("llava"))
    options = GeneratorOptions(folder, dtype="float32", device="cpu", kv_cache_gb=0.01)
    generator = load_generator(options)
    monkeypatch.undo()  # what the answers are compared with loads it
    served, _ = serve(generator, [request("Only words.")])
    assert_generated("llava", served)
    with pytest.raises(InvalidInput, match=told) as refused:
        generator.prepare(request("What is ", png(0), "here?"))
    assert "/a/path" not in str(refused.value)
    assert told in generator.no_images


def test_a_model_that_does_not_run_with_pictures_serves_text(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise TypeError("the tower wants more\nthan it is given")

    monkeypatch.setattr(tiny_seeing.hf.MllamaVisionModel, "forward", fail)
    options = GeneratorOptions(str(tiny_seeing.folder("mllama")), dtype="float32", device="cpu")
    generator = load_generator(options)
    monkeypatch.undo()
    told = "images are refused, the model does not run with them: the tower wants more"
    assert [each.message for each in caplog.records if "images" in each.message] == [told]
    served, _ = serve(generator, [request("Only words.")])
    assert_generated("mllama", served)
    with pytest.raises(InvalidInput, match="does not run with images here"):
        generator.prepare(request("What is ", png(0), "here?"))
