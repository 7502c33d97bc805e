"""Tiny checkpoints whose only tokenizer is a tekken.json, as Mistral saves them: text models and
Voxtral, with random weights. The package mistral-common reads the file: see tests/packages.py."""

import base64
import json
from functools import cache
from pathlib import Path
from typing import Any

import torch

from tests.tiny import SMALL, hf, saved
from tests.tiny_decoders import with_random_vectors
from tests.tiny_tokenizers import byte_bpe
from worker.text.detokenizer import token_bytes

CONTEXT = 2048
MELS = 16
# By their ids, some of which the library's processor of Voxtral knows.
NAMED = {
    0: "<unk>", 1: "<s>", 2: "</s>", 3: "[INST]", 4: "[/INST]", 5: "[AVAILABLE_TOOLS]",
    6: "[/AVAILABLE_TOOLS]", 7: "[TOOL_RESULTS]", 8: "[/TOOL_RESULTS]", 9: "[TOOL_CALLS]",
    11: "<pad>", 14: "[PREFIX]", 16: "[SUFFIX]", 17: "[SYSTEM_PROMPT]",
    18: "[/SYSTEM_PROMPT]", 19: "[TOOL_CONTENT]", 24: "[AUDIO]", 25: "[BEGIN_AUDIO]", 32: "[ARGS]",
    33: "[CALL_ID]", 34: "[TRANSCRIBE]",
}  # fmt: skip
SPECIAL = [NAMED.get(id_, f"<SPECIAL_{id_}>") for id_ in range(35)]
PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 11}
AUDIO = {
    "sampling_rate": 16_000,
    "frame_rate": 12.5,
    "audio_encoding_config": {"num_mel_bins": MELS, "hop_length": 160, "window_size": 400},
    "chunk_length_s": 30.0,
}


class TekkenFile:
    """Saves a tekken.json, with the merges of the tests' byte-level BPE."""

    def __init__(self, version: str, **more: Any) -> None:
        joined = [token_bytes("".join(pair)) for pair in byte_bpe()[1]]
        ranks = [bytes([byte]) for byte in range(256)] + list(dict.fromkeys(joined))
        self.size = len(ranks) + len(SPECIAL)
        self.contents = {
            "config": {
                "pattern": PATTERN,
                "num_vocab_tokens": len(ranks),
                "default_vocab_size": self.size,
                "default_num_special_tokens": len(SPECIAL),
                "version": version,
            },
            "vocab": [
                {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
                for rank, token in enumerate(ranks)
            ],
            "special_tokens": [
                {"rank": rank, "token_str": token, "is_control": True}
                for rank, token in enumerate(SPECIAL)
            ],
            "version": 1,
            "type": "tekken",
            **more,
        }

    def save_pretrained(self, path: Path) -> None:
        (path / "tekken.json").write_text(json.dumps(self.contents))


@cache
def text_folder(version: str, config: str = "MistralConfig") -> Path:
    file = TekkenFile(version)
    torch.manual_seed(sum(version.encode()))
    sizes = {"vocab_size": file.size, "max_position_embeddings": CONTEXT, "num_key_value_heads": 2}
    settings = getattr(hf, config)(**SMALL, **sizes, **IDS)
    model = with_random_vectors(hf.AutoModelForCausalLM.from_config(settings))
    return saved(f"tekken-{config}-{version}", [model, file])


def voxtral() -> list[Any]:
    file = TekkenFile("v13", audio=AUDIO)
    sizes = {"vocab_size": file.size, "max_position_embeddings": CONTEXT, "num_key_value_heads": 2}
    config = hf.VoxtralConfig(
        audio_config={
            "model_type": "voxtral_encoder", "num_mel_bins": MELS, "hidden_size": 32,
            "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
            "max_source_positions": 1500, "initializer_range": 0.5,
        },
        text_config={**SMALL, **IDS, **sizes, "model_type": "llama", "head_dim": 8},
        audio_token_id=SPECIAL.index("[AUDIO]"),
    )  # fmt: skip
    model = with_random_vectors(hf.VoxtralForConditionalGeneration(config))
    return [model, hf.WhisperFeatureExtractor(feature_size=MELS), file]
