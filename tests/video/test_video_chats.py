"""Videos in chats, and sound with the families whose processors need torchvision, give the output
of the library's own processor and `generate`."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import transformers
from transformers.models.auto import modeling_auto, processing_auto

from batching.errors import InvalidInput
from tests import tiny_video
from tests.clips import clip
from tests.generating import serve
from tests.matrix import matrix
from tests.model.test_media_chats import SOUNDS, questions
from tests.multimodal import (
    assert_generated,
    assert_preempted_continue,
    assert_prefixes_are_of_equal_media,
    assert_same_beside_others,
    engine,
    loaded,
    max_recordings,
    png,
    prompt_of,
    request,
    unpaged,
    wav,
)
from tests.tiny_audio import WITH_TORCHVISION
from worker.messages.generation import MediaInput
from worker.vision import decoders

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


@cache
def noisy(seed: int, frames: int = 20) -> bytes:
    rng = np.random.default_rng(seed)
    base = rng.integers(0, 256, (frames, 6, 8, 3), np.uint8).repeat(8, 1).repeat(8, 2)
    return clip(frames=frames, make=lambda number: base[number])


ONE, OTHER, LONG = noisy(0), noisy(1), noisy(2, 44)


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
    items = [
        request("What is ", ONE, "here?"),
        request("No video here, but words."),
        request("And ", OTHER, " with ", ONE, "?"),
        request("A picture: ", png(0)),
        request(LONG, "Tell me."),
    ]
    assert_same_beside_others(f"video-{family}", items, tokens)


@pytest.mark.parametrize("family", matrix(FAMILIES, "qwen2-vl", "smolvlm"))
def test_images_and_videos_are_mixed_or_refused(family: str) -> None:
    model = f"video-{family}"
    item = request("A picture ", png(0), " and ", ONE, " and ", png(1))
    if family in EXCLUSIVE:
        with pytest.raises(InvalidInput, match="does not take images and videos in one prompt"):
            serve(engine(model), [item])
    else:
        served, _ = serve(engine(model), [item])
        assert_generated(model, served)


# Recurrent layers continue at few places.
@pytest.mark.parametrize(
    "family", matrix([name for name in FAMILIES if name != "qwen3.5-vl"], "qwen3-vl")
)
def test_prefix_cache_is_shared_by_equal_videos_only(family: str) -> None:
    assert_prefixes_are_of_equal_media(f"video-{family}", ONE, OTHER)


def test_preempted_videos_are_decoded_again() -> None:
    assert_preempted_continue("video-qwen2-vl", list(map(noisy, range(6))), blocks=22)


def test_frames_are_chosen_as_a_request_asks() -> None:
    """Equal videos with other frames have other digests."""
    model = "video-qwen3-vl"
    generator = engine(model)
    lengths = set()
    for limits in ({"fps": 5.0}, {"num_frames": 6}, {"fps": 5.0}):
        item = request("Here: ", ONE, limits=tuple(limits.items()))
        [served], driver = serve(generator, [item])
        assert_generated(model, [served])
        lengths.add(len(served.prompt))
    assert driver.total("cached_tokens") > prompt_of(served).spans[0][0]
    assert len(lengths) == 2


@pytest.mark.parametrize("family", matrix(FAMILIES, "qwen2-vl"))
def test_output_is_the_same_with_the_library_cache(family: str) -> None:
    model = f"video-{family}"
    served, _ = serve(unpaged(model), [request("What is ", ONE, "here?")])
    assert_generated(model, served)


@pytest.mark.parametrize("family", matrix(FAMILIES, "qwen2.5-vl"))
def test_videos_are_encoded_in_tiles(family: str) -> None:
    """One run of the encoder has a frame or two."""
    [served], _ = serve(engine(f"video-{family}"), [request("What is ", LONG, "here?")])
    assert (len(prompt_of(served).digests) > 1) == (family not in WHOLE)


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
    monkeypatch.setattr(type(modality.part), "sample_frames", None)
    with pytest.raises(InvalidInput, match="chooses no frames"):
        modality._choose(video, {}, {})


def test_a_processor_of_pairs_of_frames_takes_one() -> None:
    model, one = "video-qwen2-vl", clip(frames=1)
    for video, limits in ((ONE, (("num_frames", 1),)), (one, (("num_frames", 4),)), (one, ())):
        [served], _ = serve(engine(model), [request("Here: ", video, limits=limits)])
        assert served.choices[0].tokens > 0


def test_videos_that_cannot_be_joined_are_refused() -> None:
    with pytest.raises(InvalidInput, match="the same number of frames"):
        serve(engine("video-llava-onevision"), [request(ONE, LONG)])


def test_too_many_frames_are_refused() -> None:
    many = clip(frames=800, size=(16, 16), rate=10)
    with pytest.raises(InvalidInput, match="chooses 800 frames of the video"):
        serve(engine("video-llava-onevision"), [request(many, limits=(("fps", 10.0),))])
    with pytest.raises(InvalidInput, match="fill more than"):
        serve(engine("video-video-llava"), [request(*[ONE] * 9)])


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


# ── sound ──

# Their attention adds a bias, or their model does not call its decoder with embeddings.
UNPAGED_SOUND = ("inkling_mm_model", "phi4_multimodal")
PAGED_SOUND = [name for name in WITH_TORCHVISION if name not in UNPAGED_SOUND]


@pytest.mark.parametrize("tokens", [None, 5])
@pytest.mark.parametrize("model", matrix(PAGED_SOUND, "gemma4_unified"))
def test_output_about_recordings_is_the_same(model: str, tokens: int | None) -> None:
    assert_same_beside_others(model, questions(model), tokens)


@pytest.mark.parametrize("model", matrix(UNPAGED_SOUND))
def test_output_about_recordings_is_the_same_with_the_library_cache(model: str) -> None:
    assert loaded(model).info.batching == "static"
    served, _ = serve(unpaged(model), questions(model), seed=1)
    assert_generated(model, served)


@pytest.mark.parametrize("model", matrix([*PAGED_SOUND, "inkling_mm_model"]))
def test_recordings_and_images_share_a_prompt(model: str) -> None:
    generator = unpaged(model) if model in UNPAGED_SOUND else engine(model)
    sound, other, short = SOUNDS
    item = request("What is ", png(0), " beside ", sound, " and ", other, " and ", png(1), "?")
    served, _ = serve(generator, [item, request(png(1), short, "this?")])
    assert_generated(model, served)


def test_a_mask_that_one_recording_lacks_is_one_recording_in_a_prompt() -> None:
    assert max_recordings("phi4_multimodal") == 1


# ── the sound of a video ──

OMNI = "video-qwen2.5-omni-thinker"


@cache
def heard(seed: int, sound_seed: int = 0, sound_s: float = 3.0, frames: int = 44) -> bytes:
    """A clip of four seconds with a sound, which the processors put among its frames."""
    return clip(
        frames=frames, make=lambda n: np.full((48, 64, 3), 9 * seed + 5 * n % 250, np.uint8),
        sound_s=sound_s, sound_seed=sound_seed,
    )  # fmt: skip


@pytest.mark.parametrize("tokens", [None, 5])
def test_sound_is_among_the_frames_of_its_video(tokens: int | None) -> None:
    items = [
        request("What is ", heard(0), "here?", sound=True),
        request("No video here, but words."),
        request("And ", heard(1), " with ", wav(0), " and ", heard(0, 1, 5.0), "?", sound=True),
        request("A recording ", wav(1), " first, then ", heard(2), sound=True),
        request(heard(0), "Tell me.", limits=(("fps", 4.0),), sound=True),
        request(heard(0), "Without it."),
    ]
    assert_same_beside_others(OMNI, items, tokens)


def test_sound_is_among_the_frames_on_the_librarys_cache() -> None:
    model = "video-qwen3-omni-thinker"
    items = [request("What is ", heard(0, frames=20), "here?", sound=True), request(heard(1))]
    served, _ = serve(loaded(model), items)
    assert_generated(model, served)


def test_sound_is_behind_its_video_where_the_processor_does_not_mix_them() -> None:
    items = [request("What is ", noisy_with_sound(), "here?", sound=True), request(ONE)]
    assert_same_beside_others("video-gemma4-with-sound", items, None)


@cache
def noisy_with_sound() -> bytes:
    return clip(sound_s=0.9)


def test_prefixes_with_sound_are_of_equal_sound_only() -> None:
    generator, cached = engine(OMNI, blocks=1000), list[int]()
    one, other = heard(0), heard(0, 1)
    items = [request(file, f"Tell me{end}", sound=True) for end in "!?" for file in (one, other)]
    for item in [*items, request(one, "Tell me!")]:
        [served], _ = serve(generator, [item])
        assert_generated(OMNI, [served])
        cached.append(served.deltas[0].cached_tokens)
    sounds = [position for position, _ in prompt_of(served).spans]
    assert max(cached[:2]) <= sounds[0]
    assert min(cached[2:4]) > sounds[-1]
    assert cached[4] <= sounds[0]  # its frames have other positions


def test_preempted_videos_with_sound_continue() -> None:
    files = [heard(n, n, 1.5, frames=20) for n in range(3)]
    items = [
        request("One ", file, "or two", max_tokens=40 + n, sound=True)
        for n, file in enumerate(files)
    ]
    served, driver = serve(engine(OMNI, blocks=115), items)
    assert driver.total("preempted")
    assert_generated(OMNI, served)
