"""Tiny models that speak; importing the module adds them to the builders of tiny.py."""

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from tests import tiny
from tests.tiny import IDS, hf
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
    }
)
