"""Results for images, audio, documents and tables equal the pipeline's."""

import io
from typing import Any

import numpy as np
import soundfile
from PIL import Image

from tests.parity import (
    assert_same,
    item,
    oracle,
    plain,
    runner,
    serve,
)


def png(seed: int, size: tuple[int, int], mode: str = "RGB") -> bytes:
    channels = {"RGB": 3, "L": 1, "RGBA": 4}[mode]
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, channels), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels.squeeze(), mode).save(buffer, format="PNG")
    return buffer.getvalue()


def wav(samples: np.ndarray, rate: int = 16000) -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, rate, format="WAV", subtype="FLOAT")
    return buffer.getvalue()


def noise(seed: int, seconds: float) -> np.ndarray:
    rng = np.random.default_rng(seed)
    n = int(16000 * seconds)
    loudness = np.repeat(rng.random(n // 800 + 1), 800)[:n]
    return (loudness * rng.standard_normal(n) * 0.3).astype(np.float32)


def assert_files_equal_the_pipeline(
    task: str, model: str, files: list[tuple[bytes, Any]], *parameters: dict[str, Any]
) -> list[Any]:
    """Give the runner bytes, and the pipeline the decoded image or samples."""
    calls = [(data, decoded, chosen) for data, decoded in files for chosen in parameters]
    items = [item(data, **chosen) for data, _, chosen in calls]
    results = serve(runner(task, model), items)
    for result, (_, decoded, chosen) in zip(results, calls, strict=True):
        decoded = decoded.copy()
        assert_same(result, plain(oracle(task, model)(decoded, **chosen)))
    return items


def test_image_classification_equals_the_pipeline() -> None:
    shapes = [(40, 30), (32, 32), (100, 7), (64, 64)]
    data = [png(i, size) for i, size in enumerate(shapes)]
    data += [png(7, (33, 20), "L"), png(8, (20, 33), "RGBA")]
    files = [(png_file, Image.open(io.BytesIO(png_file))) for png_file in data]
    items = assert_files_equal_the_pipeline(
        "image-classification", "vit", files, {}, {"top_k": 2}, {"function_to_apply": "none"}
    )
    assert {item.batch_size for item in items} == {len(items)}


def test_audio_classification_equals_the_pipeline() -> None:
    recordings = [noise(i, seconds) for i, seconds in enumerate((0.5, 0.8, 0.5, 0.5, 0.31))]
    files = [(wav(samples), samples) for samples in recordings]
    items = assert_files_equal_the_pipeline(
        "audio-classification", "wav2vec2-classify", files, {}, {"top_k": 1}, {"top_k": None}
    )
    assert max(item.batch_size for item in items) == 9, "recordings of one length share a batch"


def test_speech_recognition_with_ctc_equals_the_pipeline() -> None:
    recordings = [noise(i, seconds) for i, seconds in enumerate((0.5, 2.7, 0.5, 1.3))]
    files = [(wav(samples), samples) for samples in recordings]
    chunked = {"chunk_length_s": 0.6, "stride_length_s": 0.1}
    items = assert_files_equal_the_pipeline(
        "automatic-speech-recognition",
        "wav2vec2-ctc",
        files,
        {},
        chunked,
        {"chunk_length_s": 0.5},
        {**chunked, "return_timestamps": "word"},
        {"return_timestamps": "char"},
    )
    assert max(item.rows for item in items) > 5


def test_speech_recognition_with_whisper_equals_the_pipeline() -> None:
    recordings = [noise(i, seconds) for i, seconds in enumerate((0.5, 1.1, 3.5, 3.5))]
    files = [(wav(samples), samples) for samples in recordings]
    short = {"max_new_tokens": 6}
    items = assert_files_equal_the_pipeline(
        "automatic-speech-recognition",
        "whisper",
        files,
        {"language": "en", **short},
        {"language": "de", "task": "translate", "return_timestamps": True, **short},
        {"return_timestamps": "word", **short},
        {"return_timestamps": True, "chunk_length_s": 1.5, **short},
    )
    assert max(item.batch_size for item in items) >= 2, (
        "recordings of up to two seconds are stacked"
    )
