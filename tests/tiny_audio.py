"""Tiny models of several families that take sound, with random weights, built like those of
tiny_multimodal.py.

Their chat template renders a recording as the family's audio token, and an image as its image
token. The output of these models is meaningless.
"""

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests import tiny_multimodal
from tests.tiny import SMALL
from tests.tiny import hf as hf
from tests.tiny_decoders import with_random_vectors
from tests.tiny_multimodal import CONTEXT, TEMPLATE, text
from tests.tiny_multimodal import folder as folder
from tests.tiny_tokenizers import llama_tokenizer

MELS = 16
SECONDS = 2  # of a window
RATE = 16_000
WHISPER = {
    "num_mel_bins": MELS, "d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 4,
    "encoder_ffn_dim": 64, "max_source_positions": 50 * SECONDS, "initializer_range": 0.5,
}  # fmt: skip


def new_tokenizer(*tokens: str, audio: str, image: str = "IMAGE", **named: str) -> Any:
    """A tokenizer with special tokens. `audio` and `image`: what the template renders for one."""
    audio_part = "{% if part.type == 'audio' %}" + audio + "{% elif part.type == 'image' %}IMAGE"
    template = TEMPLATE.replace("{% if part.type == 'image' %}IMAGE", audio_part)
    tokenizer = llama_tokenizer(template.replace("IMAGE", image))
    tokenizer.add_special_tokens({"additional_special_tokens": list(tokens)})
    for name, token in named.items():
        setattr(tokenizer, name, token)
    tokenizer.model_max_length = CONTEXT
    return tokenizer


def mels(**more: Any) -> Any:
    return hf.WhisperFeatureExtractor(feature_size=MELS, chunk_length=SECONDS, **more)


def qwen2_audio() -> list[Any]:
    names = "<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"
    tokenizer = new_tokenizer(*names, audio=f"{names[1]}{names[0]}{names[2]}")
    config = hf.Qwen2AudioConfig(
        audio_config=WHISPER,
        text_config=text(tokenizer, "Qwen2Config").to_dict(),
        audio_token_index=tokenizer.convert_tokens_to_ids(names[0]),
    )
    model = with_random_vectors(hf.Qwen2AudioForConditionalGeneration(config))
    return [model, hf.Qwen2AudioProcessor(mels(), tokenizer, chat_template=tokenizer.chat_template)]


def flamingo(family: str, **more: Any) -> list[Any]:
    names = "<sound>", "<|sound_bos|>", "<|sound_eos|>"
    tokenizer = new_tokenizer(*names, audio=names[0])
    sound, bos, eos = tokenizer.convert_tokens_to_ids([*names])
    encoder = {
        **SMALL, "num_mel_bins": MELS, "max_source_positions": 50 * SECONDS,
        "model_type": "audioflamingo3_encoder",
    }  # fmt: skip
    config = getattr(hf, f"{family}Config")(
        audio_config=encoder,
        text_config=text(tokenizer, "Qwen2Config").to_dict(),
        audio_token_id=sound,
        **more,
        **({"audio_bos_token_id": bos, "audio_eos_token_id": eos} if more else {}),
    )
    model = with_random_vectors(getattr(hf, f"{family}ForConditionalGeneration")(config))
    template = tokenizer.chat_template
    kind = getattr(hf, f"{family}Processor")
    return [model, kind(mels(), tokenizer, chat_template=template)]


def glmasr() -> list[Any]:
    tokenizer = new_tokenizer("<|audio|>", audio="<|audio|>")
    config = hf.GlmAsrConfig(
        audio_config={
            **SMALL, "num_mel_bins": MELS, "max_position_embeddings": 50 * SECONDS,
        },
        text_config=text(tokenizer, "LlamaConfig").to_dict(),
        audio_token_id=tokenizer.convert_tokens_to_ids("<|audio|>"),
    )  # fmt: skip
    model = with_random_vectors(hf.GlmAsrForConditionalGeneration(config))
    processor = hf.GlmAsrProcessor(
        mels(), tokenizer, chat_template=tokenizer.chat_template, audio_token="<|audio|>"
    )
    return [model, processor]


def granite_speech() -> list[Any]:
    pytest.importorskip("torchaudio")
    tokenizer = new_tokenizer("<|audio|>", audio="<|audio|>")
    config = hf.GraniteSpeechConfig(
        encoder_config={
            "input_dim": 160, "num_layers": 2, "hidden_dim": 32, "num_heads": 4, "output_dim": 12,
            "context_size": 20, "max_pos_emb": 32, "conv_kernel_size": 3,
        },
        projector_config={
            **SMALL, "encoder_hidden_size": 32, "cross_attention_frequency": 1,
            "model_type": "blip_2_qformer",
        },
        text_config=text(tokenizer, "GraniteConfig").to_dict(),
        audio_token_index=tokenizer.convert_tokens_to_ids("<|audio|>"),
        has_lora_adapter=False,
    )  # fmt: skip
    model = with_random_vectors(hf.GraniteSpeechForConditionalGeneration(config))
    processor = hf.GraniteSpeechProcessor(
        hf.GraniteSpeechFeatureExtractor(), tokenizer, chat_template=tokenizer.chat_template
    )
    return [model, processor]


def gemma4() -> list[Any]:
    """It takes images, too."""
    model, images, tokenizer, settings = tiny_multimodal.gemma4_small()
    part = "{% if part.type == 'audio' %}<|audio|>{% elif part.type == 'image' %}"
    tokenizer.chat_template = tokenizer.chat_template.replace("{% if part.type == 'image' %}", part)
    model.config.audio_config = hf.Gemma4AudioConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, output_proj_dims=32,
        subsampling_conv_channels=[128, 4], initializer_range=0.5,
    )  # fmt: skip
    model = with_random_vectors(hf.Gemma4ForConditionalGeneration(model.config))
    return [model, images, tokenizer, settings]


def qwen3_asr() -> list[Any]:
    names = "<|audio_pad|>", "<|audio_start|>", "<|audio_end|>"
    tokenizer = new_tokenizer(*names, audio=f"{names[1]}{names[0]}{names[2]}")
    named = dict(zip(("audio_token", "audio_bos_token", "audio_eos_token"), names, strict=True))
    tokenizer.init_kwargs |= {**named, "extra_special_tokens": named}
    for name, token in named.items():
        setattr(tokenizer, name, token)
    config = hf.Qwen3ASRConfig(
        audio_config={
            **WHISPER, "num_mel_bins": 128, "downsample_hidden_size": 8, "output_dim": 32,
        },
        text_config=text(tokenizer, "Qwen3Config").to_dict(),
        audio_token_id=tokenizer.convert_tokens_to_ids(names[0]),
        **{"eos_token_id": 1, "pad_token_id": 2},
    )  # fmt: skip
    model = with_random_vectors(hf.Qwen3ASRForConditionalGeneration(config))
    extractor = hf.Qwen3ASRFeatureExtractor()
    processor = hf.Qwen3ASRProcessor(extractor, tokenizer, chat_template=tokenizer.chat_template)
    return [model, processor]


def omni_thinker(
    family: str, vision: dict[str, Any], audio: dict[str, Any], extractor: Any, **more: Any
) -> list[Any]:
    """It takes images, too. The processor is saved in parts: its class needs torchvision."""
    tokens = {
        "image_token": "<|IMAGE|>", "audio_token": "<|AUDIO|>", "video_token": "<|VIDEO|>",
        "vision_bos_token": "<|vision_bos|>", "vision_eos_token": "<|vision_eos|>",
        "audio_bos_token": "<|audio_bos|>", "audio_eos_token": "<|audio_eos|>",
    }  # fmt: skip
    tokenizer = new_tokenizer(
        *tokens.values(),
        audio="<|audio_bos|><|AUDIO|><|audio_eos|>",
        image="<|vision_bos|><|IMAGE|><|vision_eos|>",
    )
    tokenizer.init_kwargs |= {**tokens, "extra_special_tokens": tokens}
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in tokens.items()}
    sizes = {"hidden_size": 32, "out_hidden_size": 32, "intermediate_size": 64}
    config = getattr(hf, f"{family}ThinkerConfig")(
        vision_config={**tiny_multimodal.QWEN_VISION, **sizes, **vision},
        audio_config={**WHISPER, "output_dim": 32, **audio},
        text_config=text(
            tokenizer, f"{family}TextConfig", rope_parameters=tiny_multimodal.QWEN_ROPE, **more
        ).to_dict(),
        image_token_id=ids["image_token"], video_token_id=ids["video_token"],
        audio_token_id=ids["audio_token"],
        vision_start_token_id=ids["vision_bos_token"], vision_end_token_id=ids["vision_eos_token"],
        audio_start_token_id=ids["audio_bos_token"], audio_end_token_id=ids["audio_eos_token"],
    )  # fmt: skip
    model = with_random_vectors(getattr(hf, f"{family}ThinkerForConditionalGeneration")(config))
    images = hf.Qwen2VLImageProcessorPil(
        patch_size=tiny_multimodal.PATCH, min_pixels=16 * 16, max_pixels=64 * 64, merge_size=2
    )
    saved_extractor = json.loads(extractor.to_json_string())
    named = {"processor_class": f"{family}Processor", "feature_extractor": saved_extractor}
    return [model, images, tokenizer, named]


def qwen2_5_omni_thinker() -> list[Any]:
    vision = {"window_size": 32, "fullatt_block_indexes": [1]}
    return omni_thinker("Qwen2_5Omni", vision, {"n_window": 50}, mels())


def qwen3_omni_moe_thinker() -> list[Any]:
    vision = {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}
    audio = {"num_mel_bins": 128, "downsample_hidden_size": 8}
    extractor = hf.WhisperFeatureExtractor(feature_size=128)
    return omni_thinker("Qwen3OmniMoe", vision, audio, extractor, head_dim=8)


def voxtral() -> list[Any]:
    """Its processor renders a conversation with sound itself, and is not called with it."""
    tokenizer = new_tokenizer("[AUDIO]", audio="[AUDIO]")
    config = hf.VoxtralConfig(
        audio_config={**WHISPER, "model_type": "voxtral_encoder"},
        text_config=text(tokenizer, "LlamaConfig").to_dict(),
        audio_token_id=24,
    )
    model = with_random_vectors(hf.VoxtralForConditionalGeneration(config))
    return [model, hf.VoxtralProcessor(mels(), tokenizer)]


REFUSED: dict[str, Callable[[], list[Any]]] = {"voxtral": voxtral}
BUILDERS: dict[str, Callable[[], list[Any]]] = {
    "qwen2_audio": qwen2_audio,
    "audioflamingo3": lambda: flamingo("AudioFlamingo3"),
    "musicflamingo": lambda: flamingo(
        "MusicFlamingo", rope_parameters={"rope_type": "default", "rope_theta": 200.0}
    ),
    "glmasr": glmasr,
    "granite_speech": granite_speech,
    "gemma4": gemma4,
    "qwen3_asr": qwen3_asr,
    "qwen2_5_omni_thinker": qwen2_5_omni_thinker,
    "qwen3_omni_moe_thinker": qwen3_omni_moe_thinker,
}
tiny_multimodal.BUILDERS |= BUILDERS | REFUSED
