"""Tiny models that speak; importing the module adds them to the builders of tiny.py."""

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import tiny
from tests.tiny import IDS, SMALL, hf, saved
from tests.tiny_media import new_tokenizer, vits
from tests.tiny_tokenizers import llama_tokenizer

GENERATION = "transformers.models.bark.generation_configuration_bark"

VOCODER = {
    "upsample_initial_channel": 16,
    "upsample_rates": [4, 4],
    "upsample_kernel_sizes": [8, 8],
    "resblock_kernel_sizes": [3],
    "resblock_dilation_sizes": [[1, 3]],
    "initializer_range": 0.2,
}
EMBEDDING_SIZE = 8
CSM_TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}]{% for part in message.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% else %}<|AUDIO|><|audio_eos|>{% endif %}"
    "{% endfor %}{% endfor %}"
)
HIGGS_TEMPLATE = (
    "{% if messages[0].role != 'system' %}{{ raise_exception('no system message') }}{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>{% for part in message.content %}"
    "{% if part.type == 'text' %}{{ part.text }}"
    "{% else %}<|audio_out_bos|><|AUDIO_OUT|><|audio_eos|>{% endif %}{% endfor %}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><|audio_out_bos|>{% endif %}"
)
POCKET_TEMPLATE = (
    "{% for part in messages[0].content if messages[0].role == 'user' %}"
    "{% if part.type == 'text' %}{{ part.text }}{% else %}<|voice_bos|><|voice|>{% endif %}"
    "{% endfor %}<|audio_bos|>"
)
VIBEVOICE_TEMPLATE = (
    "{% for message in messages %}{% for part in message.content if part.type == 'audio' %}"
    " Speaker {{ message.role }}:<|vision_start|><|vision_pad|><|vision_end|>"
    "{% endfor %}{% endfor %} Text input:"
    "{% for message in messages %}{% for part in message.content if part.type == 'text' %}"
    " Speaker {{ message.role }}: {{ part.text }}{% endfor %}{% endfor %}"
    " Speech output:<|vision_start|>"
)
RATE = 24_000


def noisy_vits() -> list[Any]:
    """With the noise of real checkpoints, and three speakers."""
    quiet, tokenizer = vits()
    settings = quiet.config.to_dict() | {
        "num_speakers": 3,
        "speaker_embedding_size": 8,
        "use_stochastic_duration_prediction": True,
        "noise_scale": 0.667,
        "noise_scale_duration": 0.8,
        "duration_predictor_num_flows": 2,
    }
    return [hf.VitsModel(hf.VitsConfig(**settings)), tokenizer]


def vocoder(bins: int) -> Any:
    return hf.SpeechT5HifiGan(hf.SpeechT5HifiGanConfig(model_in_dim=bins, **VOCODER))


class InFolder:
    """Saves a part of a model in a folder of its own."""

    def __init__(self, part: Any, name: str) -> None:
        self.part, self.name = part, name

    def save_pretrained(self, path: Path) -> None:
        self.part.save_pretrained(path / self.name)


class JsonFile:
    """A file of a model that no class of the library writes."""

    def __init__(self, name: str, document: Any) -> None:
        self.name, self.document = name, document

    def save_pretrained(self, path: Path) -> None:
        (path / self.name).write_text(json.dumps(self.document))


def speecht5() -> list[Any]:
    tokenizer = new_tokenizer()
    config = hf.SpeechT5Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        encoder_layers=1,
        encoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_layers=1,
        decoder_attention_heads=4,
        decoder_ffn_dim=64,
        num_mel_bins=16,
        reduction_factor=2,
        speech_decoder_prenet_units=16,
        speech_decoder_postnet_units=16,
        speaker_embedding_dim=EMBEDDING_SIZE,
        initializer_range=0.2,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = hf.SpeechT5ForTextToSpeech(config)
    model.speech_decoder_postnet.prob_out.bias.data.fill_(-9.0)  # speak to the longest length
    return [model, tokenizer, InFolder(vocoder(16), "vocoder")]


def fastspeech2() -> list[Any]:
    tokenizer = new_tokenizer()
    sizes: dict[str, Any] = {"num_mel_bins": 16, "hidden_size": 32, "vocab_size": len(tokenizer)}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_layers": 1, f"{side}_num_attention_heads": 4}
        sizes |= {f"{side}_linear_units": 32}
    for part in ("duration", "energy", "pitch"):
        sizes |= {f"{part}_predictor_channels": 16, f"{part}_predictor_layers": 1}
    model = hf.FastSpeech2ConformerConfig(
        speech_decoder_postnet_layers=1,
        speech_decoder_postnet_units=16,
        num_speakers=2,
        **sizes,
    ).to_dict()
    hifigan = hf.FastSpeech2ConformerHifiGanConfig(model_in_dim=16, **VOCODER).to_dict()
    config = hf.FastSpeech2ConformerWithHifiGanConfig(model_config=model, vocoder_config=hifigan)
    return [hf.FastSpeech2ConformerWithHifiGan(config), tokenizer]


def fill_codebooks(codec: Any) -> None:
    """Give each code a random vector: all are zero at first, and each code sounds the same."""
    for layer in codec.quantizer.layers:
        layer.codebook.embed.normal_()


def bark() -> list[Any]:
    tokenizer = new_tokenizer()
    tokenizer.model_max_length = 512
    sizes = {"num_layers": 1, "num_heads": 2, "hidden_size": 16, "block_size": 1024}
    codec = hf.EncodecConfig(
        num_filters=4,
        hidden_size=16,
        codebook_dim=16,
        codebook_size=1024,
        num_residual_layers=1,
        num_lstm_layers=1,
    )
    config = hf.BarkConfig(
        semantic_config=sizes | {"input_vocab_size": 129600, "output_vocab_size": 10048},
        coarse_acoustics_config=sizes | {"input_vocab_size": 12096, "output_vocab_size": 12096},
        fine_acoustics_config=sizes
        | {"input_vocab_size": 1056, "output_vocab_size": 1056, "n_codes_total": 8},
        codec_config=codec.to_dict(),
    )
    kinds = importlib.import_module(GENERATION)
    generation = kinds.BarkGenerationConfig.from_sub_model_configs(
        kinds.BarkSemanticGenerationConfig(max_new_tokens=6, do_sample=True),
        kinds.BarkCoarseGenerationConfig(max_coarse_history=60, do_sample=True),
        kinds.BarkFineGenerationConfig(),
    )
    file = JsonFile("generation_config.json", generation.to_dict())
    model = hf.BarkModel(config)
    fill_codebooks(model.codec_model)
    return [model, hf.BarkProcessor(tokenizer), file]


def musicgen() -> list[Any]:
    tokenizer = llama_tokenizer()
    codec = hf.EncodecConfig(
        num_filters=4,
        hidden_size=16,
        codebook_dim=16,
        codebook_size=32,
        num_residual_layers=1,
        upsampling_ratios=[4, 4],
        num_lstm_layers=1,
    )
    text = hf.T5Config(
        vocab_size=len(tokenizer), d_model=16, d_kv=4, d_ff=32, num_layers=1, num_heads=2
    )
    decoder = hf.MusicgenDecoderConfig(
        vocab_size=32,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        ffn_dim=32,
        num_codebooks=2,
        pad_token_id=32,
        bos_token_id=32,
    )
    config = hf.MusicgenConfig(
        text_encoder=text.to_dict(), audio_encoder=codec.to_dict(), decoder=decoder.to_dict()
    )
    model = hf.MusicgenForConditionalGeneration(config)
    fill_codebooks(model.audio_encoder)
    model.generation_config = hf.GenerationConfig(
        max_length=12, do_sample=True, guidance_scale=3.0, decoder_start_token_id=32,
        pad_token_id=32, bos_token_id=32,
    )  # fmt: skip
    return [model, tokenizer]


def csm() -> list[Any]:
    """Its processor takes recordings in turns of a conversation."""
    tokenizer = llama_tokenizer(CSM_TEMPLATE)
    names = "<|AUDIO|>", "<|audio_eos|>"
    tokenizer.add_special_tokens({"additional_special_tokens": [*names]})
    audio, end = tokenizer.convert_tokens_to_ids([*names])
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "num_codebooks": 4,
        "vocab_size": 64,
    }
    codec = hf.MimiConfig(
        num_filters=4,
        hidden_size=16,
        vector_quantization_hidden_dimension=16,
        codebook_dim=16,
        codebook_size=64,
        num_quantizers=4,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=16,
        upsample_groups=16,
    )
    config = hf.CsmConfig(
        text_vocab_size=len(tokenizer),
        max_position_embeddings=256,
        codec_config=codec.to_dict(),
        depth_decoder_config={**sizes, "backbone_hidden_size": 32, "max_position_embeddings": 9},
        codebook_eos_token_id=0,
        codebook_pad_token_id=63,
        audio_token_id=audio,
        audio_eos_token_id=end,
        **sizes,
        **IDS,
    )
    model = hf.CsmForConditionalGeneration(config)
    for part in (model.backbone_model, model.depth_decoder, model.lm_head):
        for parameter in part.parameters():
            if parameter.ndim > 1:  # narrow by default: each input samples the same codes
                parameter.data.normal_(0, 0.5)
    for name, buffer in model.codec_model.named_buffers():
        if name.endswith("embed_sum"):  # zero by default: all codes sound alike
            buffer.normal_()
    model.generation_config.update(max_new_tokens=6, do_sample=True)
    extractor = hf.EncodecFeatureExtractor(feature_size=1, sampling_rate=24_000)
    return [model, hf.CsmProcessor(extractor, tokenizer, chat_template=CSM_TEMPLATE)]


def reloaded(name: str, codec: Any) -> Any:
    """Return a codec that is loaded from a folder of its own, which a processor names."""
    return type(codec).from_pretrained(saved(name, [codec]))


def with_tokens(template: str, **names: str) -> tuple[Any, dict[str, int]]:
    """Return a tokenizer with named tokens, and their ids by `NAME_id`."""
    tokenizer = llama_tokenizer(template)
    tokenizer.add_special_tokens({"additional_special_tokens": [*names.values()]})
    tokenizer.init_kwargs |= {**names, "extra_special_tokens": names}
    tokenizer._set_model_specific_special_tokens(names)
    ids = {f"{name}_id": tokenizer.convert_tokens_to_ids(token) for name, token in names.items()}
    return tokenizer, ids


def dia() -> list[Any]:
    """Each of its nine codebooks is up to 15 steps late."""
    codec = hf.DacConfig(
        encoder_hidden_size=4, downsampling_ratios=[2, 2], decoder_hidden_size=16,
        codebook_dim=4, sampling_rate=RATE,
    )  # fmt: skip
    sizes = {**SMALL, "num_hidden_layers": 1, "num_key_value_heads": 4, "head_dim": 8}
    cross = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8, "hidden_size": 32}
    decoder = {f"cross_{name}": value for name, value in cross.items()}
    model = hf.DiaForConditionalGeneration(
        hf.DiaConfig(encoder_config=sizes, decoder_config={**sizes, **decoder})
    )
    model.generation_config.update(max_new_tokens=20, do_sample=True, guidance_scale=3.0)
    extractor = hf.DiaFeatureExtractor(sampling_rate=RATE, hop_length=4)
    codec_model = reloaded("dia-codec", hf.DacModel(codec))
    return [model, hf.DiaProcessor(extractor, hf.DiaTokenizer(), codec_model)]


def higgs_audio_v2() -> list[Any]:
    pytest.importorskip("torchaudio")
    sizes = {**SMALL, "num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16}
    codec = hf.HiggsAudioV2TokenizerModel(
        hf.HiggsAudioV2TokenizerConfig(
            sample_rate=RATE, semantic_sample_rate=RATE, codebook_size=64, codebook_dim=8,
            target_bandwidths=[1],
            acoustic_model_config={"encoder_hidden_size": 4, "decoder_hidden_size": 16},
            semantic_model_config={
                **sizes, "conv_dim": [4] * 7, "num_conv_pos_embeddings": 4,
                "num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.0,
            },
        )
    )  # fmt: skip
    for name, buffer in codec.named_buffers():
        if name.endswith("embed"):  # zero by default
            buffer.normal_()
    tokenizer, ids = with_tokens(
        HIGGS_TEMPLATE, audio_token="<|AUDIO_OUT|>", audio_bos_token="<|audio_out_bos|>",
        audio_eos_token="<|audio_eos|>", audio_delay_token="<|delay|>",
    )  # fmt: skip
    del ids["audio_eos_token_id"]
    ends = {"audio_stream_bos_id": 64, "audio_stream_eos_id": 65}
    config = hf.HiggsAudioV2Config(
        **SMALL, **IDS, **ids, **ends, vocab_size=len(tokenizer), num_key_value_heads=2, head_dim=8,
        num_codebooks=codec.config.num_quantizers, codebook_size=66, max_position_embeddings=256,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )  # fmt: skip
    model = hf.HiggsAudioV2ForConditionalGeneration(config)
    model.generation_config.update(max_new_tokens=20, do_sample=True)
    extractor = hf.DacFeatureExtractor(hop_length=1, sampling_rate=RATE)
    processor = hf.HiggsAudioV2Processor(
        extractor, tokenizer, reloaded("higgs-codec", codec), chat_template=HIGGS_TEMPLATE, **ends
    )
    return [model, processor]


def pocket_tts(family: str = "PocketTTS", **more: Any) -> list[Any]:
    """It samples latents of its codec, not tokens."""
    tokenizer, ids = with_tokens(
        POCKET_TEMPLATE, audio_prompt_token="<|voice|>", audio_latent_token="<|latent|>",
        audio_prompt_bos_token="<|voice_bos|>", audio_bos_token="<|audio_bos|>",
    )  # fmt: skip
    codec = hf.PocketTTSAudioTokenizerConfig(
        sampling_rate=RATE, hidden_size=16, num_filters=4, upsampling_ratios=[4, 4],
        upsample_groups=16, num_hidden_layers=1, intermediate_size=16, num_attention_heads=2,
        num_key_value_heads=2, latent_stride=2, latent_dim=8, initializer_range=0.5,
        layer_scale_initial_scale=1.0,
    )  # fmt: skip
    head = {"hidden_size": 16, "num_hidden_layers": 1, "latent_dim": 8, "condition_dim": 32}
    config = getattr(hf, f"{family}Config")(
        **SMALL, **ids, **more, vocab_size=len(tokenizer), latent_dim=8, pad_token_id=2,
        flow_head_config=head,
    )  # fmt: skip
    model = getattr(hf, f"{family}ForConditionalGeneration")(config)
    model.generation_config.update(do_sample=True, max_new_tokens=9, eos_threshold=99.0)
    processor = hf.PocketTTSProcessor(
        hf.PocketTTSFeatureExtractor(sampling_rate=RATE, frame_size=32, pad_to_multiple_of=32),
        tokenizer,
        reloaded("pocket-codec", hf.PocketTTSAudioTokenizerModel(codec)),
        chat_template=POCKET_TEMPLATE,
    )
    return [model, processor]


def vibevoice() -> list[Any]:
    """It speaks as long as it may. Latents are sampled by a scheduler of diffusers."""
    tokenizer, ids = with_tokens(
        VIBEVOICE_TEMPLATE, audio_token="<|vision_pad|>", audio_bos_token="<|vision_start|>",
        audio_eos_token="<|vision_end|>",
    )  # fmt: skip
    codec = {
        "hidden_size": 8, "num_filters": 4, "downsampling_ratios": [4, 4], "depths": [1, 1, 1],
        "layer_scale_init_value": 1.0, "initializer_range": 0.3,
    }  # fmt: skip
    text = {**SMALL, **IDS, "vocab_size": len(tokenizer), "num_key_value_heads": 2}
    config = hf.VibeVoiceConfig(
        audio_config=codec, semantic_model_config=codec, pad_token_id=2, eos_token_id=1, **ids,
        text_config={"model_type": "qwen2", "max_position_embeddings": 256, **text},
        diffusion_head_config={"num_hidden_layers": 1, "intermediate_size": 32},
    )  # fmt: skip
    model = hf.VibeVoiceForConditionalGeneration(config)
    others = [1, ids["audio_bos_token_id"], ids["audio_eos_token_id"]]
    model.generation_config.update(max_new_tokens=10, suppress_tokens=others, guidance_scale=1.3)
    extractor = hf.VibeVoiceAcousticTokenizerFeatureExtractor(
        sampling_rate=RATE, pad_to_multiple_of=16
    )
    return [model, hf.VibeVoiceProcessor(extractor, tokenizer, chat_template=VIBEVOICE_TEMPLATE)]


def write_voices(folder: Path, *names: str) -> str:
    """Write a speaker embedding for each name; return the folder."""
    folder.mkdir(exist_ok=True)
    for n, name in enumerate(names):
        values = np.random.default_rng(n).normal(size=EMBEDDING_SIZE)
        np.save(folder / f"{name}.npy", values.astype(np.float32))
    return str(folder)


tiny.BUILDERS.update(
    {
        "vits-noisy": noisy_vits,
        "speecht5": speecht5,
        "fastspeech2": fastspeech2,
        "bark": bark,
        "musicgen": musicgen,
        "csm": csm,
        "dia": dia,
        "higgs_audio_v2": higgs_audio_v2,
        "pocket_tts": pocket_tts,
        "gradium_phonon_tts": lambda: pocket_tts("GradiumPhononTTS", audio_prompt_dim=8),
        "vibevoice": vibevoice,
    }
)
