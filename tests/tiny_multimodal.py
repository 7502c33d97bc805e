"""Tiny vision-language models of several families with random weights, built like those of tiny.py.

Their chat template renders an image as the family's image token. Images are resized to few patches.
The output of these models is meaningless.
"""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from tests.tiny import IDS, SMALL, saved
from tests.tiny import hf as hf
from tests.tiny_decoders import MIXED, small_settings, with_random_vectors
from tests.tiny_tokenizers import llama_tokenizer

CONTEXT = 1024
SIDE = 32
PATCH = 8
SIZE = {"height": SIDE, "width": SIDE}
VISION = {**SMALL, "image_size": SIDE, "patch_size": PATCH}

TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}"
    "{% if part.type == 'image' %}IMAGE{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@cache
def folder(name: str) -> Path:
    torch.manual_seed(sum(name.encode()))
    return saved(f"multimodal-{name}", BUILDERS[name]())


def new_tokenizer(*tokens: str, image: str, template: str = TEMPLATE, **named: str) -> Any:
    """A tokenizer with special tokens for images. `image`: what the template renders for one."""
    tokenizer = llama_tokenizer(template.replace("IMAGE", image))
    tokenizer.add_special_tokens({"additional_special_tokens": list(tokens)})
    for name, token in named.items():
        setattr(tokenizer, name, token)
    tokenizer.model_max_length = CONTEXT
    return tokenizer


def text(tokenizer: Any, config: str, **more: Any) -> Any:
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": CONTEXT}
    return getattr(hf, config)(**{**SMALL, **small_settings(config), **IDS, **sizes, **more})


def assembled(family: str, config: Any, tokenizer: Any, *parts: Any, **more: Any) -> list[Any]:
    """Return a model, and its processor of these parts."""
    model = with_random_vectors(getattr(hf, f"{family}ForConditionalGeneration")(config))
    processor = getattr(hf, f"{family}Processor")
    return [model, processor(*parts, chat_template=tokenizer.chat_template, **more)]


CROPS = {"size": {"shortest_edge": SIDE}, "crop_size": SIZE}
CLIP_TOKENS = {
    "patch_size": PATCH, "vision_feature_select_strategy": "default",
    "num_additional_image_tokens": 1,
}  # fmt: skip


def llava() -> list[Any]:
    tokenizer = new_tokenizer("<image>", image="<image>")
    config = hf.LlavaConfig(
        vision_config=hf.CLIPVisionConfig(**VISION),
        text_config=text(tokenizer, "LlamaConfig"),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        vision_feature_layer=-1,
    )
    images = hf.CLIPImageProcessorPil(**CROPS)
    return assembled("Llava", config, tokenizer, images, tokenizer, **CLIP_TOKENS)


QWEN_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
QWEN_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
QWEN_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
QWEN_VISION = {
    "depth": 2, "num_heads": 4, "patch_size": PATCH, "temporal_patch_size": 2,
    "spatial_merge_size": 2, "in_channels": 3, "initializer_range": 0.5,
}  # fmt: skip


def qwen(family: str, vision: dict[str, Any], **more: Any) -> list[Any]:
    tokenizer = new_tokenizer(*QWEN_TOKENS, image=QWEN_IMAGE)
    ids = dict(zip(
        ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id"),
        tokenizer.convert_tokens_to_ids(list(QWEN_TOKENS)), strict=True,
    ))  # fmt: skip
    config = getattr(hf, f"{family}Config")(
        vision_config={**QWEN_VISION, **vision},
        text_config=text(
            tokenizer, f"{family}TextConfig", rope_parameters={**QWEN_ROPE}, **more
        ).to_dict(),
        **ids,
    )
    model = getattr(hf, f"{family}ForConditionalGeneration")(config)
    images = hf.Qwen2VLImageProcessorPil(
        patch_size=PATCH, min_pixels=16 * 16, max_pixels=64 * 64, merge_size=2
    )
    return [with_random_vectors(model), images, tokenizer]


def qwen2_vl() -> list[Any]:
    return qwen("Qwen2VL", {"embed_dim": 32, "hidden_size": 32, "mlp_ratio": 2})


def qwen2_5_vl() -> list[Any]:
    sizes = {"hidden_size": 32, "out_hidden_size": 32, "intermediate_size": 64}
    return qwen("Qwen2_5_VL", {**sizes, "window_size": 32, "fullatt_block_indexes": [1]})


def qwen3_vl() -> list[Any]:
    sizes = {"hidden_size": 32, "out_hidden_size": 32, "intermediate_size": 64}
    more = {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}
    return qwen("Qwen3VL", {**sizes, **more}, head_dim=8)


def qwen3_5_vl() -> list[Any]:
    sizes = {"hidden_size": 32, "out_hidden_size": 32, "intermediate_size": 64}
    # a quarter of a head's size is rotated
    return qwen("Qwen3_5", {**sizes, "num_position_embeddings": 16}, head_dim=32)


SPLIT = [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)]
SPLIT_TOKENS = ("<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>")


def split(family: str) -> list[Any]:
    """Images are split into four tiles, plus one of the whole image."""
    tokenizer = new_tokenizer(*SPLIT_TOKENS, *SPLIT, image="<image>")
    config = getattr(hf, f"{family}Config")(
        vision_config=VISION,
        text_config=text(tokenizer, "LlamaConfig").to_dict(),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=2,
        pad_token_id=2,
    )
    images = getattr(hf, f"{family}ImageProcessorPil")(
        size={"longest_edge": 2 * SIDE}, max_image_size={"longest_edge": SIDE}
    )
    model = getattr(hf, f"{family}ForConditionalGeneration")(config)
    return [with_random_vectors(model), images, tokenizer, {"image_seq_len": 4}]


def gemma3() -> list[Any]:
    tokens = ("<start_of_image>", "<image_soft_token>", "<end_of_image>")
    tokenizer = new_tokenizer(*tokens, image="<start_of_image>")
    boi, soft, eoi = tokenizer.convert_tokens_to_ids(list(tokens))
    tokenizer.init_kwargs |= {
        "boi_token": tokens[0], "image_token": tokens[1], "eoi_token": tokens[2],
        "extra_special_tokens": {
            "boi_token": tokens[0], "image_token": tokens[1], "eoi_token": tokens[2]
        },
    }  # fmt: skip
    config = hf.Gemma3Config(
        vision_config=hf.SiglipVisionConfig(**VISION).to_dict(),
        text_config=text(
            tokenizer, "Gemma3TextConfig"
        ).to_dict(),
        mm_tokens_per_image=4,
        boi_token_index=boi,
        eoi_token_index=eoi,
        image_token_index=soft,
        image_token_id=soft,
    )  # fmt: skip
    images = hf.Gemma3ImageProcessorPil(size=SIZE, image_seq_length=4)
    model = with_random_vectors(hf.Gemma3ForConditionalGeneration(config))
    return [model, images, tokenizer, {"image_seq_length": 4}]


def paligemma() -> list[Any]:
    tokenizer = new_tokenizer("<image>", image="<image>")
    config = hf.PaliGemmaConfig(
        vision_config=hf.SiglipVisionConfig(**VISION).to_dict(),
        text_config=text(
            tokenizer, "GemmaConfig", num_key_value_heads=1, head_dim=8
        ).to_dict(),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        projection_dim=32,
    )  # fmt: skip
    images = hf.SiglipImageProcessorPil(size=SIZE)
    images.image_seq_length = 16
    return [with_random_vectors(hf.PaliGemmaForConditionalGeneration(config)), images, tokenizer]


def glm4v() -> list[Any]:
    tokens = (
        "<|image|>", "<|video|>", "<|begin_of_image|>", "<|end_of_image|>",
        "<|begin_of_video|>", "<|end_of_video|>",
    )  # fmt: skip
    tokenizer = new_tokenizer(*tokens, image="<|begin_of_image|><|image|><|end_of_image|>")
    names = ("image", "video", "image_start", "image_end", "video_start", "video_end")
    ids = zip(names, tokenizer.convert_tokens_to_ids(list(tokens)), strict=True)
    sizes = {"hidden_size": 32, "out_hidden_size": 32, "intermediate_size": 64, "image_size": SIDE}
    config = hf.Glm4vConfig(
        vision_config={**QWEN_VISION, **sizes},
        text_config=text(tokenizer, "Glm4vTextConfig", rope_parameters=QWEN_ROPE).to_dict(),
        **{f"{name}_token_id": number for name, number in ids},
    )
    images = hf.Glm4vImageProcessorPil(
        patch_size=PATCH, size={"shortest_edge": 2 * 16 * 16, "longest_edge": 2 * 64 * 64}
    )
    return [with_random_vectors(hf.Glm4vForConditionalGeneration(config)), images, tokenizer]


def gemma4(**more: Any) -> list[Any]:
    """Images fill at most 70 tokens, the smallest number that the processor supports."""
    named = {
        "boi_token": "<|image>", "image_token": "<|image|>", "eoi_token": "<image|>",
        "boa_token": "<|audio>", "audio_token": "<|audio|>", "eoa_token": "<audio|>",
    }  # fmt: skip
    tokenizer = new_tokenizer(*named.values(), "<|video|>", image=named["image_token"])
    tokenizer.init_kwargs |= {**named, "extra_special_tokens": named}
    config = hf.Gemma4Config(
        vision_config={
            **SMALL, "num_key_value_heads": 4, "head_dim": 8, "patch_size": 4,
            "position_embedding_size": 256, "initializer_range": 0.5,
        },
        text_config=text(
            tokenizer, "Gemma4TextConfig", head_dim=8, global_head_dim=16, **more,
        ).to_dict(),
        tie_word_embeddings=False,
        **{f"{name}_id": tokenizer.convert_tokens_to_ids(token) for name, token in named.items()},
        video_token_id=tokenizer.convert_tokens_to_ids("<|video|>"),
    )  # fmt: skip
    images = hf.Gemma4ImageProcessorPil(patch_size=4, max_soft_tokens=70)
    model = with_random_vectors(hf.Gemma4ForConditionalGeneration(config))
    audio = json.loads(hf.Gemma4AudioFeatureExtractor().to_json_string())
    return [model, images, tokenizer, {"feature_extractor": audio}]


def gemma4_small() -> list[Any]:
    """Layers have per-layer embeddings, and the last ones share keys and values."""
    return gemma4(
        num_hidden_layers=4, num_kv_shared_layers=2, layer_types=[*MIXED, *MIXED],
        hidden_size_per_layer_input=8, vocab_size_per_layer_input=400,
    )  # fmt: skip


def gemma4_large() -> list[Any]:
    """Sliding-window layers attend to images in both directions, the others do not."""
    return gemma4(
        layer_types=MIXED, hidden_size_per_layer_input=0, use_bidirectional_attention="vision"
    )


def mllama() -> list[Any]:
    """The decoder reads images by cross-attention, not at their positions in the prompt."""
    tokenizer = new_tokenizer("<|image|>", image="<|image|>")
    config = hf.MllamaConfig(
        vision_config={
            **SMALL, "attention_heads": 4, "num_global_layers": 1, "image_size": SIDE,
            "patch_size": PATCH, "intermediate_layers_indices": [0], "vision_output_dim": 64,
        },
        text_config=text(
            tokenizer, "MllamaTextConfig", vocab_size=len(tokenizer) - 1,
            cross_attention_layers=[1],
        ).to_dict(),
        image_token_index=tokenizer.convert_tokens_to_ids("<|image|>"),
    )  # fmt: skip
    images = hf.MllamaImageProcessorPil(size=SIZE, max_image_tiles=4)
    return [with_random_vectors(hf.MllamaForConditionalGeneration(config)), images, tokenizer]


def paddleocr_vl() -> list[Any]:
    names = "<|IMAGE_START|>", "<|IMAGE_END|>", "<|IMAGE_PLACEHOLDER|>"
    tokenizer = new_tokenizer(*names, image=f"{names[0]}{names[2]}{names[1]}")
    tokenizer._set_model_specific_special_tokens({"image_token": names[2]})  # read by the processor
    start, end, image = tokenizer.convert_tokens_to_ids(list(names))
    config = hf.PaddleOCRVLConfig(
        vision_config={**VISION, "image_size": 64, "spatial_merge_size": 2},
        text_config={
            **SMALL, **IDS, "vocab_size": len(tokenizer), "max_position_embeddings": CONTEXT,
            "num_key_value_heads": 2, "head_dim": 8, "rope_parameters": {**QWEN_ROPE},
        },
        image_token_id=image, vision_start_token_id=start, vision_end_token_id=end,
    )  # fmt: skip
    images = hf.PaddleOCRVLImageProcessorPil(
        patch_size=PATCH, merge_size=2, min_pixels=16 * 16, max_pixels=64 * 64
    )
    model = hf.PaddleOCRVLForConditionalGeneration(config)
    return [with_random_vectors(model), images, tokenizer]


UNPAGED = "gemma4-large", "mllama"
BUILDERS: dict[str, Callable[[], list[Any]]] = {
    "llava": llava,
    "qwen2-vl": qwen2_vl,
    "qwen2.5-vl": qwen2_5_vl,
    "qwen3-vl": qwen3_vl,
    "qwen3.5-vl": qwen3_5_vl,
    "smolvlm": lambda: split("SmolVLM"),
    "idefics3": lambda: split("Idefics3"),
    "gemma3": gemma3,
    "paligemma": paligemma,
    "glm4v": glm4v,
    "gemma4-small": gemma4_small,
    "gemma4-large": gemma4_large,
    "mllama": mllama,
    "paddleocr-vl": paddleocr_vl,
}
FAMILIES = [*BUILDERS]  # those with images
