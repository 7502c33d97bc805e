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
from tests.tiny import IDS, SMALL
from tests.tiny import hf as hf
from tests.tiny_decoders import MIXED, with_random_vectors
from tests.tiny_multimodal import CONTEXT, PATCH, SIDE, SIZE, TEMPLATE, VISION, assembled, text
from tests.tiny_multimodal import folder as folder
from tests.tiny_tekken import voxtral
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
    return tiny_multimodal.new_tokenizer(*tokens, image=image, template=template, **named)


def mels(**more: Any) -> Any:
    return hf.WhisperFeatureExtractor(feature_size=MELS, chunk_length=SECONDS, **more)


def listening(
    family: str,
    token: str,
    decoder: str,
    audio: dict[str, Any],
    extractor: Any,
    *,
    around: tuple[str, ...] = (),
    id_setting: str = "audio_token_id",
    processor: dict[str, Any] | None = None,
    **settings: Any,
) -> list[Any]:
    """A model that takes sound alone. `around`: the tokens before and behind a recording's."""
    before, behind = around or ("", "")
    tokenizer = new_tokenizer(token, *around, audio=before + token + behind)
    config = getattr(hf, f"{family}Config")(
        audio_config=audio,
        text_config=text(tokenizer, decoder).to_dict(),
        **{id_setting: tokenizer.convert_tokens_to_ids(token)},
        **settings,
    )
    return assembled(family, config, tokenizer, extractor, tokenizer, **(processor or {}))


def named(tokenizer: Any, names: dict[str, str]) -> Any:
    """Give a tokenizer the names by which a processor reads tokens."""
    tokenizer.init_kwargs |= {**names, "extra_special_tokens": names}
    tokenizer._set_model_specific_special_tokens(names)
    return tokenizer


def qwen2_audio() -> list[Any]:
    around = "<|audio_bos|>", "<|audio_eos|>"
    return listening(
        "Qwen2Audio", "<|AUDIO|>", "Qwen2Config", WHISPER, mels(), around=around,
        id_setting="audio_token_index",
    )  # fmt: skip


def flamingo(family: str, **more: Any) -> list[Any]:
    names = "<sound>", "<|sound_bos|>", "<|sound_eos|>"
    tokenizer = new_tokenizer(*names, audio=names[0])
    sound, bos, eos = tokenizer.convert_tokens_to_ids([*names])
    config = getattr(hf, f"{family}Config")(
        audio_config={
            **SMALL, "num_mel_bins": MELS, "max_source_positions": 50 * SECONDS,
            "model_type": "audioflamingo3_encoder",
        },
        text_config=text(tokenizer, "Qwen2Config").to_dict(),
        audio_token_id=sound,
        **more,
        **({"audio_bos_token_id": bos, "audio_eos_token_id": eos} if more else {}),
    )  # fmt: skip
    return assembled(family, config, tokenizer, mels(), tokenizer)


def glmasr() -> list[Any]:
    encoder = {**SMALL, "num_mel_bins": MELS, "max_position_embeddings": 50 * SECONDS}
    token = {"audio_token": "<|audio|>"}
    return listening("GlmAsr", "<|audio|>", "LlamaConfig", encoder, mels(), processor=token)


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
    extractor = hf.GraniteSpeechFeatureExtractor()
    return assembled("GraniteSpeech", config, tokenizer, extractor, tokenizer)


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
    names = {
        "audio_token": "<|audio_pad|>", "audio_bos_token": "<|audio_start|>",
        "audio_eos_token": "<|audio_end|>",
    }  # fmt: skip
    token, before, behind = names.values()
    tokenizer = named(new_tokenizer(*names.values(), audio=before + token + behind, **names), names)
    config = hf.Qwen3ASRConfig(
        audio_config={
            **WHISPER, "num_mel_bins": 128, "downsample_hidden_size": 8, "output_dim": 32,
        },
        text_config=text(tokenizer, "Qwen3Config").to_dict(),
        audio_token_id=tokenizer.convert_tokens_to_ids(token),
        **{"eos_token_id": 1, "pad_token_id": 2},
    )  # fmt: skip
    return assembled("Qwen3ASR", config, tokenizer, hf.Qwen3ASRFeatureExtractor(), tokenizer)


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


def moss_transcribe_diarize() -> list[Any]:
    """Its processor writes the seconds between the placeholders of a recording."""
    family = "MossTranscribeDiarize"
    encoder = {**SMALL, "num_mel_bins": MELS, "max_source_positions": 50 * SECONDS}
    extractor = hf.MossTranscribeDiarizeFeatureExtractor(feature_size=MELS, chunk_length=SECONDS)
    around, times = ("<|audio_start|>", "<|audio_end|>"), {"time_marker_every_seconds": 1}
    return listening(
        family, "<|audio_pad|>", "Qwen3Config", encoder, extractor, around=around,
        processor=times, audio_chunk_size=RATE * SECONDS,
    )  # fmt: skip


def omniasr() -> list[Any]:
    convolutions = {"conv_kernel": [10, 3, 3], "conv_stride": [10, 8, 8]}
    encoder = {
        **SMALL, **convolutions, "conv_dim": [16, 16, 16], "num_conv_pos_embeddings": 8,
        "num_conv_pos_embedding_groups": 4, "layerdrop": 0.0,
    }  # fmt: skip
    return listening(
        "OmniASR", "<extra_id_1>", "LlamaConfig", encoder, hf.OmniASRFeatureExtractor(),
        processor=convolutions, initializer_range=0.5, **IDS,
    )  # fmt: skip


HYBRID = ["linear_attention", "moe", "full_attention"]


def nemo_speechlm() -> list[Any]:
    tokenizer = new_tokenizer("<|audio|>", audio="<|audio|>")
    sizes = {**SMALL, "num_mel_bins": MELS}
    config = hf.Nemotron3_5TranscribeConfig(
        audio_config={
            "asr_config": sizes,
            "diarization_config": {
                "audio_config": sizes, "initializer_range": 0.5,
                "head_config": {"hidden_size": 16, "num_speakers": 2, "audio_hidden_size": 32},
                "streaming_config": {"num_speakers": 2, "speaker_cache_length": 16},
            },
        },
        text_config=text(tokenizer, "NemotronHConfig", layers_block_type=HYBRID).to_dict(),
        word_timestamp_config={**SMALL, "vocab_size": 20, "blank_token_id": 19},
        audio_token_id=tokenizer.convert_tokens_to_ids("<|audio|>"),
    )  # fmt: skip
    extractor = hf.NemotronAsrStreamingFeatureExtractor(feature_size=MELS)
    parts = extractor, tokenizer, llama_tokenizer()
    return assembled("Nemotron3_5Transcribe", config, tokenizer, *parts)


def fun_asr_nano() -> list[Any]:
    pytest.importorskip("torchaudio")
    layers = {"num_hidden_layers": 4, "num_timestamp_prediction_layers": 1}
    return listening(
        "FunAsrNano", "<|object_ref_start|>", "Qwen3Config",
        {**SMALL, "num_mel_bins": MELS, **layers}, hf.FunAsrNanoFeatureExtractor(feature_size=MELS),
        adaptor_config={**SMALL, "intermediate_size": 8, "projector_hidden_size": 32},
    )  # fmt: skip


def granite_speech_plus() -> list[Any]:
    model, processor = granite_speech()
    settings = model.config.to_dict()
    del settings["model_type"]
    config = hf.GraniteSpeechPlusConfig(**settings)
    return [
        with_random_vectors(hf.GraniteSpeechPlusForConditionalGeneration(config)),
        processor,
    ]


def inkling() -> list[Any]:
    """It takes images, too, like the next ones. Its encoder of sound is a sum of embeddings."""
    names = {
        "image_token": "<|unused_200054|>", "audio_token": "<|unused_200053|>",
        "image_bos_token": "<|content_image|>", "audio_bos_token": "<|content_audio_input|>",
    }  # fmt: skip
    tokenizer = new_tokenizer(
        *names.values(),
        audio=names["audio_bos_token"] + names["audio_token"],
        image=names["image_bos_token"] + names["image_token"],
    )
    ids = {f"{name}_id": tokenizer.convert_tokens_to_ids(token) for name, token in names.items()}
    config = hf.InklingConfig(
        text_config=text(
            tokenizer, "InklingTextConfig", swa_num_attention_heads=4, swa_num_key_value_heads=2,
            swa_head_dim=8, layer_types=["hybrid_sliding", "hybrid"], rel_extent=16, d_rel=4,
            mlp_layer_types=["dense", "sparse"], logits_mup_width_multiplier=1.0,
        ).to_dict(),
        audio_config={"n_mel_bins": 8, "mel_vocab_size": 16, "initializer_range": 0.5},
        vision_config={
            "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
            "patch_size": PATCH, "initializer_range": 0.5,
        },
        **ids,
    )  # fmt: skip
    extractor = hf.InklingFeatureExtractor(feature_size=8)
    images = hf.InklingImageProcessor(size={"height": PATCH, "width": PATCH})
    return assembled("Inkling", config, tokenizer, extractor, images, tokenizer)


def apertus1p5() -> list[Any]:
    """Images and recordings become tokens of the vocabulary."""
    names = {
        "image_token": "<|image|>", "audio_token": "<|audio|>", "boi_token": "<boi>",
        "eoi_token": "<eoi>", "image_wrapper_token": "<iw>", "eol_token": "<eol>",
        "boa_token": "<boa>", "eoa_token": "<eoa>",
    }  # fmt: skip
    tokenizer = new_tokenizer(*names.values(), audio="<|audio|>", image="<|image|>")
    tokenizer = named(tokenizer, names)
    count, codes = len(tokenizer), 64
    config = hf.Apertus1p5Config(
        text_config=text(
            tokenizer, "Apertus1p5TextConfig", vocab_size=count + 2 * codes,
            output_vocab_size=count,
        ).to_dict(),
        vision_config={
            "codebook_size": codes, "embed_dim": 8, "latent_channels": 8, "base_channels": 32,
            "channel_multiplier": [1, 1], "num_res_blocks": 1, "attn_resolutions": [],
            "resolution": SIDE,
        },
        audio_config={
            "codebook_size": codes, "codebook_dim": 16, "hidden_size": 16, "num_filters": 4,
            "num_lstm_layers": 1, "decoder_num_layers": 1, "decoder_hidden_size": 16,
            "decoder_intermediate_size": 16, "decoder_attention_num_groups": 4,
        },
        image_token_id=tokenizer.convert_tokens_to_ids("<|image|>"),
        audio_token_id=tokenizer.convert_tokens_to_ids("<|audio|>"),
        image_token_offset=count, audio_token_offset=count + codes,
    )  # fmt: skip
    sizes = {"min_pixels": 16 * 16, "max_pixels": 32 * 32}
    images = hf.Apertus1p5ImageProcessor(size=sizes, spatial_factor=2)
    extractor = hf.WavTokenizerFeatureExtractor(sampling_rate=RATE)
    return assembled("Apertus1p5", config, tokenizer, images, extractor, tokenizer)


def phi4_multimodal() -> list[Any]:
    names = {"image_token": "<|image|>", "audio_token": "<|audio|>"}
    tokenizer = new_tokenizer(*names.values(), audio="<|audio|>", image="<|image|>")
    tokenizer = named(tokenizer, names)
    image, audio = tokenizer.convert_tokens_to_ids([*names.values()])
    config = hf.Phi4MultimodalConfig(
        **SMALL, **IDS, num_key_value_heads=2, vocab_size=len(tokenizer),
        max_position_embeddings=CONTEXT, original_max_position_embeddings=CONTEXT,
        vision_config={**VISION, "crop_size": SIDE, "image_token_id": image},
        audio_config={
            "hidden_size": 32, "intermediate_size": 64, "num_blocks": 2, "num_attention_heads": 4,
            "ext_pw_out_channel": 32, "depthwise_separable_out_channel": 32,
            "nemo_conv_channels": 16, "initializer_range": 0.5, "audio_token_id": audio,
        },
    )  # fmt: skip
    model = with_random_vectors(hf.Phi4MultimodalForCausalLM(config))
    processor = hf.Phi4MultimodalProcessor(
        hf.Phi4MultimodalImageProcessor(size=SIZE, patch_size=PATCH, dynamic_hd=2),
        hf.Phi4MultimodalFeatureExtractor(),
        tokenizer,
        chat_template=tokenizer.chat_template,
    )
    return [model, processor]


def gemma4_unified() -> list[Any]:
    """Samples and pixels are projected, without an encoder."""
    model, _, tokenizer, _ = tiny_multimodal.gemma4()
    part = "{% if part.type == 'audio' %}<|audio|>{% elif part.type == 'image' %}"
    tokenizer.chat_template = tokenizer.chat_template.replace("{% if part.type == 'image' %}", part)
    tokenizer._set_model_specific_special_tokens(tokenizer.init_kwargs["extra_special_tokens"])
    kinds = ("boi", "image", "eoi", "boa", "audio", "video")
    config = hf.Gemma4UnifiedConfig(
        text_config=text(tokenizer, "Gemma4UnifiedTextConfig", head_dim=8).to_dict(),
        vision_config={
            "patch_size": 4, "mm_embed_dim": 32, "mm_posemb_size": 256, "output_proj_dims": 32,
            "initializer_range": 0.5,
        },
        audio_config={"audio_embed_dim": 640, "initializer_range": 0.5},
        tie_word_embeddings=False,
        **{f"{kind}_token_id": getattr(model.config, f"{kind}_token_id") for kind in kinds},
    )  # fmt: skip
    extractor = hf.Gemma4UnifiedAudioFeatureExtractor()
    images = hf.Gemma4UnifiedImageProcessor(patch_size=4, max_soft_tokens=70)
    parts = extractor, images, tokenizer, hf.Gemma4UnifiedVideoProcessor(patch_size=4)
    return assembled("Gemma4Unified", config, tokenizer, *parts)


def gemma3n() -> list[Any]:
    """Its encoder of images is one of timm's, and a recording has the same tokens whatever its
    length."""
    pytest.importorskip("timm")
    names = {
        "boi_token": "<start_of_image>", "image_token": "<image_soft_token>",
        "eoi_token": "<end_of_image>", "boa_token": "<start_of_audio>",
        "audio_token": "<audio_soft_token>", "eoa_token": "<end_of_audio>",
    }  # fmt: skip
    audio, image = names["audio_token"], names["image_token"]
    tokenizer = named(new_tokenizer(*names.values(), audio=audio, image=image), names)
    count, embeddings, tokens = len(tokenizer), 16, {"audio": 40, "image": 4}
    config = hf.Gemma3nConfig(
        text_config=text(
            tokenizer, "Gemma3nTextConfig", head_dim=8, num_hidden_layers=4,
            num_kv_shared_layers=2, layer_types=[*MIXED, *MIXED], laurel_rank=4,
            altup_num_inputs=2, activation_sparsity_pattern=[0.5, 0.0, 0.0, 0.0],
            vocab_size=count + 2 * embeddings, vocab_size_per_layer_input=count,
            hidden_size_per_layer_input=8, intermediate_size=64,
        ).to_dict(),
        vision_config={
            "architecture": "mobilenetv3_small_050", "hidden_size": 288, "vocab_size": embeddings,
            "vocab_offset": count,
        },
        audio_config={
            "hidden_size": 32, "conf_num_attention_heads": 4, "conf_num_hidden_layers": 2,
            "sscp_conv_channel_size": [8, 4], "vocab_size": embeddings,
            "vocab_offset": count + embeddings,
        },
        audio_soft_tokens_per_image=tokens["audio"], vision_soft_tokens_per_image=tokens["image"],
        **{f"{name}_id": tokenizer.convert_tokens_to_ids(token) for name, token in names.items()},
    )  # fmt: skip
    images = hf.SiglipImageProcessor(size={"height": 64, "width": 64})
    parts = hf.Gemma3nAudioFeatureExtractor(), images, tokenizer
    lengths = {f"{kind}_seq_length": number for kind, number in tokens.items()}
    return assembled("Gemma3n", config, tokenizer, *parts, **lengths)


def nemotron_h_omni() -> list[Any]:
    names = {"image_token": "<image>", "audio_token": "<so_embedding>"}
    marks = "<so_start>", "<so_end>", "<img>", "</img>", "<video>"
    tokenizer = new_tokenizer(*names.values(), *marks, audio="<so_embedding>", image="<image>")
    tokenizer.init_kwargs |= {**names, "extra_special_tokens": names}
    image, audio, video = tokenizer.convert_tokens_to_ids([*names.values(), "<video>"])
    config = hf.NemotronH_Omni_Reasoning_V3_Config(
        text_config=text(tokenizer, "NemotronHConfig", layers_block_type=HYBRID).to_dict(),
        vision_config={
            "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
            "patch_size": PATCH, "image_size": SIDE, "max_img_size": 2 * SIDE, "patch_dim": 192,
            "video_temporal_patch_size": 2, "initializer_range": 0.5,
        },
        audio_config={
            **SMALL, "num_mel_bins": MELS, "subsampling_conv_channels": 8, "layerdrop": 0.0,
            "projection_hidden_size": 32, "projection_bias": False,
        },
        force_image_size=SIDE, projector_hidden_size=32, vision_hidden_size=32,
        image_token_id=image, audio_token_id=audio, video_token_id=video,
    )  # fmt: skip
    model = with_random_vectors(hf.NemotronH_Omni_Reasoning_V3(config))
    processor = hf.NemotronH_Omni_Reasoning_V3Processor(
        hf.NemotronH_Omni_Reasoning_V3ImageProcessor(
            patch_size=PATCH, min_num_patches=4, max_num_patches=16
        ),
        hf.NemotronH_Omni_Reasoning_V3VideoProcessor(patch_size=PATCH),
        tokenizer,
        hf.ParakeetFeatureExtractor(feature_size=MELS),
        chat_template=tokenizer.chat_template,
    )
    return [model, processor]


def muse_spark() -> list[Any]:
    names = "<|patch|>", "<|video|>", "<|audio|>"
    tokenizer = new_tokenizer(
        *names, "<|image_start|>", "<|image_end|>", "<|vid_frame_separator|>", "<|vid_start|>",
        "<|vid_end|>", "<|soft_audio_start|>", "<|soft_audio_end|>", audio=names[2], image=names[0],
    )  # fmt: skip
    image, video, audio = tokenizer.convert_tokens_to_ids([*names])
    config = hf.MuseSparkConfig(
        text_config=text(
            tokenizer, "MuseSparkTextConfig", head_dim=8, moe_hidden_size=16, layer_types=MIXED,
            output_multiplier=1.0,
        ).to_dict(),
        vision_config={
            **SMALL, "patch_size": PATCH, "pos_emb_height": 8, "pos_emb_width": 8,
            "max_position_embeddings": 64,
        },
        audio_config={
            "patch_sizes": [16, 120], "hidden_sizes": [16, 32], "depths": [1, 1],
            "num_hidden_layers": 2, "out_hidden_size": 32, "initializer_range": 0.5,
        },
        image_token_id=image, video_token_id=video, audio_token_id=audio,
        out_hidden_size=4 * 32, projector_hidden_size=32,
    )  # fmt: skip
    images = hf.MuseGlimmerImageProcessor(patch_size=PATCH, merge_size=2)
    videos = hf.MuseGlimmerVideoProcessor(patch_size=PATCH, merge_size=2)
    parts = images, videos, tokenizer, hf.MuseSparkFeatureExtractor(sampling_rate=RATE)
    return assembled("MuseSpark", config, tokenizer, *parts)


BUILDERS: dict[str, Callable[[], list[Any]]] = {
    "qwen2_audio": qwen2_audio,
    "audioflamingo3": lambda: flamingo("AudioFlamingo3"),
    "musicflamingo": lambda: flamingo(
        "MusicFlamingo", rope_parameters={"rope_type": "default", "rope_theta": 200.0}
    ),
    "glmasr": glmasr,
    "granite_speech": granite_speech,
    "granite_speech_plus": granite_speech_plus,
    "moss_transcribe_diarize": moss_transcribe_diarize,
    "omniasr": omniasr,
    "nemo_speechlm": nemo_speechlm,
    "fun_asr_nano": fun_asr_nano,
    "gemma4": gemma4,
    "qwen3_asr": qwen3_asr,
    "qwen2_5_omni_thinker": qwen2_5_omni_thinker,
    "qwen3_omni_moe_thinker": qwen3_omni_moe_thinker,
}
# Their processors need torchvision: see tests/video.
WITH_TORCHVISION: dict[str, Callable[[], list[Any]]] = {
    "inkling_mm_model": inkling,
    "apertus1p5": apertus1p5,
    "phi4_multimodal": phi4_multimodal,
    "gemma4_unified": gemma4_unified,
    "gemma3n": gemma3n,
    "nemotron_h_omni": nemotron_h_omni,
    "muse_spark": muse_spark,
}
# Its processor needs mistral-common: see tests/mistral.
WITH_MISTRAL_COMMON: dict[str, Callable[[], list[Any]]] = {"voxtral": voxtral}
tiny_multimodal.BUILDERS |= BUILDERS | WITH_TORCHVISION | WITH_MISTRAL_COMMON
