"""Tiny models that take videos, built like those of tiny_multimodal.py with the video processor of
their checkpoints. It needs torchvision: see tests/packages.py."""

from collections.abc import Callable
from typing import Any

from tests import tiny_audio, tiny_multimodal
from tests.tiny import SMALL
from tests.tiny import hf as hf
from tests.tiny_multimodal import (
    CLIP_TOKENS,
    CROPS,
    PATCH,
    SIDE,
    SIZE,
    VISION,
    assembled,
    new_tokenizer,
    text,
)

TEXT_PART = "{% else %}{{ part.text }}"
QWEN_VIDEO = "<|vision_start|><|video_pad|><|vision_end|>"
PINPOINTS = [[SIDE, SIDE], [SIDE, 2 * SIDE], [2 * SIDE, SIDE]]


def with_videos(tokenizer: Any, video: str) -> Any:
    """Let a chat template render a video."""
    part = f"{{% elif part.type == 'video' %}}{video}{TEXT_PART}"
    tokenizer.chat_template = tokenizer.chat_template.replace(TEXT_PART, part)
    return tokenizer


def qwen(build: Callable[[], list[Any]], family: str) -> list[Any]:
    model, images, tokenizer = build()
    sizes = {"shortest_edge": 16 * 16, "longest_edge": 64 * 64 * 4}
    videos = getattr(hf, f"{family}VideoProcessor")(patch_size=PATCH, merge_size=2, size=sizes)
    return [model, images, with_videos(tokenizer, QWEN_VIDEO), videos]


def glm4v() -> list[Any]:
    model, images, tokenizer = tiny_multimodal.glm4v()
    sizes = {"shortest_edge": 2 * 16 * 16, "longest_edge": 16 * 64 * 64}
    videos = hf.Glm4vVideoProcessor(patch_size=PATCH, size=sizes)
    video = "<|begin_of_video|><|video|><|end_of_video|>"
    return [model, images, with_videos(tokenizer, video), videos]


def smolvlm() -> list[Any]:
    model, images, tokenizer, settings = tiny_multimodal.split("SmolVLM")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<video>"]})
    videos = hf.SmolVLMVideoProcessor(
        size={"longest_edge": 2 * SIDE},
        max_image_size={"longest_edge": SIDE},
        video_sampling={"fps": 1, "max_frames": 8, "video_size": {"longest_edge": SIDE}},
        num_frames=8,
        fps=1,
    )
    model.resize_token_embeddings(len(tokenizer))
    return [model, images, with_videos(tokenizer, "<video>"), videos, settings]


def llava(
    family: str, processor: Callable[[Any], tuple[Any, ...]], decoder: str = "LlamaConfig",
    vision: str = "CLIP", kept: dict[str, Any] = CLIP_TOKENS, **more: Any,
) -> list[Any]:  # fmt: skip
    """`processor` returns the processor's parts for a tokenizer; `kept`: the tokens of an image."""
    tokenizer = with_videos(new_tokenizer("<image>", "<video>", image="<image>"), "<video>")
    image, video = tokenizer.convert_tokens_to_ids(["<image>", "<video>"])
    config = getattr(hf, f"{family}Config")(
        vision_config=getattr(hf, f"{vision}VisionConfig")(**VISION),
        text_config=text(tokenizer, decoder),
        image_token_index=image,
        video_token_index=video,
        vision_feature_layer=-1,
        **more,
    )
    return assembled(family, config, tokenizer, *processor(tokenizer), **kept)


def llava_onevision() -> list[Any]:
    images = hf.LlavaOnevisionImageProcessorPil(size=SIZE, image_grid_pinpoints=PINPOINTS)
    videos = hf.LlavaOnevisionVideoProcessor(size=SIZE)
    kept = {"num_image_tokens": 16, "vision_feature_select_strategy": "full"}
    return llava(
        "LlavaOnevision", lambda tokenizer: (images, tokenizer, videos), "Qwen2Config", "Siglip",
        kept, image_grid_pinpoints=PINPOINTS,
    )  # fmt: skip


def llava_next_video() -> list[Any]:
    videos = hf.LlavaNextVideoVideoProcessor(**CROPS)
    images = hf.LlavaNextImageProcessorPil(image_grid_pinpoints=PINPOINTS, **CROPS)
    return llava(
        "LlavaNextVideo", lambda tokenizer: (videos, images, tokenizer),
        image_grid_pinpoints=PINPOINTS,
    )  # fmt: skip


def video_llava() -> list[Any]:
    images = hf.VideoLlavaImageProcessor(**CROPS)
    videos = hf.VideoLlavaVideoProcessor(num_frames=8, **CROPS)
    return llava(
        "VideoLlava", lambda tokenizer: (images, videos, tokenizer),
        image_seq_length=16, video_seq_length=17 * 8,
    )  # fmt: skip


def internvl() -> list[Any]:
    named = {
        "start_image_token": "<img>", "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>", "video_token": "<video>",
    }  # fmt: skip
    tokenizer = with_videos(new_tokenizer(*named.values(), image="<IMG_CONTEXT>"), "<video>")
    tokenizer._set_model_specific_special_tokens(named)
    tokenizer.init_kwargs |= {**named, "extra_special_tokens": named}
    config = hf.InternVLConfig(
        vision_config={
            **SMALL, "image_size": [SIDE, SIDE], "patch_size": [PATCH, PATCH],
            "initializer_range": 0.5,
        },
        text_config=text(tokenizer, "Qwen2Config").to_dict(),
        image_token_id=tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>"),
        image_seq_length=4,
    )  # fmt: skip
    images = hf.GotOcr2ImageProcessorPil(size=SIZE, max_patches=2)
    parts = images, tokenizer, hf.InternVLVideoProcessor(size=SIZE)
    return assembled("InternVL", config, tokenizer, *parts, image_seq_length=4)


def omni_thinker(build: Callable[[], list[Any]]) -> list[Any]:
    """Its processor enlarges frames, and takes recordings of 8 seconds."""
    model, images, tokenizer, settings = build()
    length = {"chunk_length": 8, "n_samples": 8 * tiny_audio.RATE, "nb_max_frames": 800}
    settings["feature_extractor"] |= length
    model.config.text_config.max_position_embeddings = tokenizer.model_max_length = 6400
    sizes = {"shortest_edge": 16 * 16, "longest_edge": 64 * 64 * 4}
    videos = hf.Qwen2VLVideoProcessor(patch_size=PATCH, merge_size=2, size=sizes)
    video = "<|vision_bos|><|VIDEO|><|vision_eos|>"
    return [model, images, with_videos(tokenizer, video), videos, settings]


def gemma4(build: Callable[[], list[Any]] = tiny_multimodal.gemma4_small) -> list[Any]:
    model, images, tokenizer, settings = build()
    videos = hf.Gemma4VideoProcessor(patch_size=4, max_soft_tokens=70, num_frames=4)
    return [model, images, with_videos(tokenizer, "<|video|>"), videos, settings]


BUILDERS: dict[str, Callable[[], list[Any]]] = {
    "qwen2-vl": lambda: qwen(tiny_multimodal.qwen2_vl, "Qwen2VL"),
    "qwen2.5-vl": lambda: qwen(tiny_multimodal.qwen2_5_vl, "Qwen2VL"),
    "qwen3-vl": lambda: qwen(tiny_multimodal.qwen3_vl, "Qwen3VL"),
    "qwen3.5-vl": lambda: qwen(tiny_multimodal.qwen3_5_vl, "Qwen3VL"),
    "glm4v": glm4v,
    "smolvlm": smolvlm,
    "llava-onevision": llava_onevision,
    "llava-next-video": llava_next_video,
    "video-llava": video_llava,
    "internvl": internvl,
    "qwen2.5-omni-thinker": lambda: omni_thinker(tiny_audio.qwen2_5_omni_thinker),
    "gemma4": gemma4,
}
# by these names in tests/multimodal.py
tiny_multimodal.BUILDERS.update({f"video-{name}": build for name, build in BUILDERS.items()})
tiny_multimodal.BUILDERS["video-qwen3-omni-thinker"] = lambda: omni_thinker(
    tiny_audio.qwen3_omni_moe_thinker
)
tiny_multimodal.BUILDERS["video-gemma4-with-sound"] = lambda: gemma4(tiny_audio.gemma4)
