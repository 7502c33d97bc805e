"""Videos in chats give the output of the library's own processor and `generate`."""

import io
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import transformers
from PIL import Image
from transformers import AutoProcessor
from transformers.models.auto import modeling_auto, processing_auto
from transformers.video_utils import VideoMetadata

from batching.errors import InvalidInput
from batching.request_queue import WorkItem
from tests import tiny_video
from tests.clips import av, clip
from tests.generating import Request, Served, serve
from tests.matrix import matrix
from tests.multimodal import (
    OUTPUT_TOKENS,
    assert_generated,
    engine,
    in_small_chunks,
    png,
    reference_model,
    request,
    unpaged,
)
from tests.tiny_multimodal import folder
from worker.messages.generation import Chat, MediaInput, MediaKind
from worker.vision import decoders
from worker.vision.multimodal_prompt import MultimodalPrompt

FAMILIES = [*tiny_video.BUILDERS]
EXCLUSIVE = ("glm4v", "smolvlm")  # in the library
# LLaVA-OneVision adds a token at the end, Gemma 4 has positions of patches for each frame.
WHOLE = ("llava-onevision", "gemma4")
TESTED = {
    "gemma4", "glm4v", "internvl", "llava_next_video", "llava_onevision", "qwen2_5_vl", "qwen2_vl",
    "qwen3_5", "qwen3_vl", "smolvlm", "video_llava",
}  # fmt: skip
# The other model types whose processor takes videos. No tiny model of them is built.
UNTESTED = {
    "the processor of a family above": {
        "exaone4_5", "glm46v", "glm4v_moe", "qwen2_5_omni", "qwen3_5_moe", "qwen3_omni_moe",
        "qwen3_vl_moe", "qwen4_exp",
    },
    "a diffusion model": {"diffusion_gemma"},
    "not built yet": {
        "cohere_compass", "cosmos3_edge", "dots3_note", "ernie4_5_vl_moe", "gemma4_unified",
        "glm5_next", "hy_v4_vl", "hyperclovax_vision_v2", "instructblipvideo", "kimi_k25",
        "lfm3_vl", "minicpm_ocr", "minicpmv4_6", "minicpmv4_7", "minimax_m3_vl", "molmo2",
        "muse_glimmer", "muse_spark", "nemotron_h_omni", "perception_lm", "qianfan_ocr",
        "video_llama_3",
    },
}  # fmt: skip
# Of the families without the options of their own, as a request has them.
DEFAULT = {"fps": 2.0}


@cache
def noisy(seed: int, frames: int = 20) -> bytes:
    rng = np.random.default_rng(seed)
    base = rng.integers(0, 256, (frames, 6, 8, 3), np.uint8).repeat(8, 1).repeat(8, 2)
    return clip(frames=frames, make=lambda number: base[number])


ONE, OTHER, LONG = noisy(0), noisy(1), noisy(2, 44)


@cache
def decoded(video: bytes) -> tuple[np.ndarray, Any]:
    """All frames, and their metadata."""
    with av.open(io.BytesIO(video)) as file:
        frames = np.stack([each.to_ndarray(format="rgb24") for each in file.decode(video=0)])
    count, height, width, _ = frames.shape
    return frames, VideoMetadata(count, 10.0, width, height, count / 10)


@cache
def library(model: str) -> Any:
    auto: Any = AutoProcessor
    return auto.from_pretrained(folder(model))


Parts = Sequence[str | bytes]


def expected(model: str, parts: Parts, **options: Any) -> tuple[list[int], list[int]]:
    """The prompt and output of the library."""
    processor = library(model)
    content = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": kind_of(part)}
        for part in parts
    ]
    text = processor.tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    files = [part for part in parts if isinstance(part, bytes)]
    videos = [decoded(part) for part in files if kind_of(part) == "video"]
    images = [Image.open(io.BytesIO(part)) for part in files if kind_of(part) == "image"]
    own = processor.video_processor
    if not options and own.fps is None and own.num_frames is None:
        options = DEFAULT
    given: dict[str, Any] = {}
    if videos:
        given = {
            "videos": [frames for frames, _ in videos],
            "video_metadata": [metadata for _, metadata in videos],
            "do_sample_frames": True,
            **options,
        }
    if images:
        given["images"] = images
    inputs = processor(text=[text], add_special_tokens=False, return_tensors="pt", **given)
    prompt = inputs["input_ids"][0].tolist()
    output = reference_model(model).generate(
        **inputs, do_sample=False, max_new_tokens=OUTPUT_TOKENS, pad_token_id=2
    )
    return prompt, output[0, len(prompt) :].tolist()


def ask(*parts: str | bytes, limits: tuple[tuple[str, float], ...] = (), **more: Any) -> Request:
    """A message of texts, images and videos."""
    item = request(*parts, **more)
    content = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": kind_of(part)}
        for part in parts
    ]
    media = tuple(
        MediaInput(part, "auto", "messages[0].content", limits=limits, kind=kind_of(part))
        for part in parts
        if isinstance(part, bytes)
    )
    chat = Chat(({"role": "user", "content": content},), media=media)
    return WorkItem(replace(item.payload, prompt=chat), float("inf"), 0.0)


def kind_of(file: bytes) -> MediaKind:
    return "image" if file.startswith(b"\x89PNG") else "video"


def assert_equal(model: str, served: Served, parts: Parts, **options: Any) -> None:
    assert served.error is None, served.error
    prompt, output = expected(model, parts, **options)
    assert list(served.prompt) == prompt
    for ids in served.ids:
        assert ids == output


def test_each_family_of_the_library_is_tested_or_named() -> None:
    names = vars(processing_auto)["PROCESSOR_MAPPING_NAMES"]
    types = {
        name
        for name in vars(modeling_auto)["MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES"]
        if "video_processor" in parts_of(names.get(name))
    }
    assert types - TESTED <= {name for names in UNTESTED.values() for name in names}


def parts_of(name: Any) -> Sequence[str]:
    """Return the parts of a processor class; one whose packages are missing has none here."""
    cls: Any = getattr(transformers, name[0] if isinstance(name, tuple) else str(name), None)
    if cls is None or getattr(cls, "is_dummy", False):
        return ()
    parts: Sequence[str] = cls.get_attributes()
    return parts


@pytest.mark.parametrize("family", matrix(FAMILIES, "qwen2.5-vl", "internvl"))
@pytest.mark.parametrize("tokens", [None, 5])
def test_output_is_the_same_beside_other_requests_and_in_chunks(
    family: str, tokens: int | None
) -> None:
    model = f"video-{family}"
    generator = engine(model)
    if tokens:
        in_small_chunks(generator, tokens)
    prompts: list[Parts] = [
        ("What is ", ONE, "here?"),
        ("No video here, but words.",),
        ("And ", OTHER, " with ", ONE, "?"),
        ("A picture: ", png(0)),
        (LONG, "Tell me."),
    ]
    served, driver = serve(generator, [ask(*parts) for parts in prompts], seed=1)
    for one, parts in zip(served, prompts, strict=True):
        assert_equal(model, one, parts)
    assert driver.partial or not tokens


@pytest.mark.parametrize("family", matrix(FAMILIES, "qwen2-vl", "smolvlm"))
def test_images_and_videos_are_mixed_or_refused(family: str) -> None:
    model, parts = f"video-{family}", ("A picture ", png(0), " and ", ONE, " and ", png(1))
    if family in EXCLUSIVE:
        with pytest.raises(InvalidInput, match="does not take images and videos in one prompt"):
            serve(engine(model), [ask(*parts)])
    else:
        [served], _ = serve(engine(model), [ask(*parts)])
        assert_equal(model, served, parts)


@pytest.mark.parametrize("family", matrix(FAMILIES, "qwen3-vl"))
def test_prefix_cache_is_shared_by_equal_videos_only(family: str) -> None:
    model = f"video-{family}"
    generator = engine(model)
    text = " Tell me what you see here, please, in a few words of yours!"
    for video, is_known in ((ONE, False), (OTHER, False), (ONE, True), (OTHER, True)):
        parts = ("What is it? ", video, text)
        [served], driver = serve(generator, [ask(*parts)])
        assert_equal(model, served, parts)
        place = prompt_start(served)
        if family != "qwen3.5-vl":  # it keeps states at few places
            assert (driver.total("cached_tokens") > place) == is_known
        assert driver.total("cached_tokens") <= place or is_known


def prompt_start(served: Served) -> int:
    """Return where the first video starts."""
    prompt = served.item.prepared[0].prepared.multimodal
    assert isinstance(prompt, MultimodalPrompt)
    return prompt.spans[0][0]


def test_frames_are_chosen_as_a_request_asks() -> None:
    """Equal videos with other frames have other digests."""
    model = "video-qwen3-vl"
    generator = engine(model)
    lengths = set()
    for limits in ({"fps": 5.0}, {"num_frames": 6}, {"fps": 5.0}):
        item = ask("Here: ", ONE, limits=tuple(limits.items()))
        [served], driver = serve(generator, [item])
        assert_equal(model, served, ("Here: ", ONE), **{"fps": None, **limits})
        lengths.add(len(served.prompt))
    assert driver.total("cached_tokens") > prompt_start(served)
    assert len(lengths) == 2


def test_a_model_with_a_number_of_frames_takes_shorter_clips_and_a_rate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    preprocessor = engine("video-gemma4").input_processor.media_preprocessor
    assert preprocessor
    modality: Any = preprocessor.processor.modalities["video"]
    monkeypatch.setattr(modality.part, "num_frames", 32)
    video = modality.samples()[0]  # of 16 frames in 4 seconds
    for requested, count in (({}, 16), ({"fps": 1.0}, 4), ({"num_frames": 3}, 3)):
        assert len(modality._choose(video, {}, requested).frames_indices) == count


def test_preempted_videos_are_decoded_again() -> None:
    model = "video-qwen2-vl"
    items = [ask("One ", noisy(seed), "or two", max_tokens=40 + seed) for seed in range(6)]
    served, driver = serve(engine(model, blocks=22), items)
    assert driver.total("preempted")
    assert_generated(model, served)


@pytest.mark.parametrize("family", matrix(FAMILIES, "qwen2-vl"))
def test_output_is_the_same_with_the_library_cache(family: str) -> None:
    model, parts = f"video-{family}", ("What is ", ONE, "here?")
    [served], _ = serve(unpaged(model), [ask(*parts)])
    assert_equal(model, served, parts)


@pytest.mark.parametrize("family", matrix(FAMILIES, "qwen2.5-vl"))
def test_videos_are_encoded_in_tiles(family: str) -> None:
    """One run of the encoder has a frame or two."""
    item = ask("What is ", LONG, "here?")
    [served], _ = serve(engine(f"video-{family}"), [item])
    prompt = served.item.prepared[0].prepared.multimodal
    assert isinstance(prompt, MultimodalPrompt)
    assert (len(prompt.digests) > 1) == (family not in WHOLE)


def test_videos_that_cannot_be_joined_are_refused() -> None:
    with pytest.raises(InvalidInput, match="the same number of frames"):
        serve(engine("video-llava-onevision"), [ask(ONE, LONG)])


def test_too_many_frames_are_refused() -> None:
    many = clip(frames=800, size=(16, 16), rate=10)
    with pytest.raises(InvalidInput, match="chooses 800 frames of the video"):
        serve(engine("video-llava-onevision"), [ask(many, limits=(("fps", 10.0),))])
    with pytest.raises(InvalidInput, match="chooses no frames"):
        serve(engine("video-qwen2-vl"), [ask(ONE, limits=(("num_frames", 1),))])
    with pytest.raises(InvalidInput, match="fill more than"):
        serve(engine("video-video-llava"), [ask(*[ONE] * 9)])


def test_large_frames_are_scaled_down(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = decoders.VideoDecoder(64 * 48)
    file = MediaInput(ONE, "auto", "video", kind="video")
    decoder.check_sizes([file], lambda: True)
    video = decoder.decode(file, lambda: True)
    assert video.read([3]).shape == (1, 48, 64, 3)
    assert video.read(range(4)).shape == (4, 24, 32, 3)
    monkeypatch.setattr(decoders, "MAX_VIDEO_S", 3.0)
    with pytest.raises(InvalidInput, match="the videos last 4 seconds so far"):
        decoder.check_sizes([file, file], lambda: True)
