"""Tiny random-weight models with real tokenizers, built on demand without network or kept files.

Weights have a wide distribution, so that outputs differ between inputs and a leak between sequences
of a batch changes them. `folder(name)` builds a model once per process and returns its path. The
outputs of these models mean nothing.
"""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import importlib
import json
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from tests.tiny_tokenizers import (
    LIMIT,
    bert_tokenizer,
    byte_bpe,
    llama_tokenizer,
    roberta_tokenizer,
    wordpiece,
)

hf: Any = importlib.import_module("transformers")  # mostly not annotated

SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "initializer_range": 0.5,
}


def labels(*names: str) -> dict[str, Any]:
    return {
        "id2label": dict(enumerate(names)),
        "label2id": {name: i for i, name in enumerate(names)},
    }


NLI = labels("contradiction", "neutral", "entailment")
NER = labels("O", "B-PER", "I-PER", "B-LOC", "I-LOC")
STARS = labels("bad", "fair", "good")
IDS: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}  # llama_tokenizer
_root = tempfile.TemporaryDirectory(prefix="tiny-models-")


@cache
def folder(name: str) -> Path:
    torch.manual_seed(sum(name.encode()))
    return saved(name, BUILDERS[name]())


def saved(name: str, parts: list[Any]) -> Path:
    """Save a model and the files beside it, and return their folder. Dictionaries are settings of a
    processor."""
    path = Path(_root.name) / name
    for part in parts:
        if isinstance(part, dict):
            (path / "processor_config.json").write_text(json.dumps(part))
        else:
            part.save_pretrained(path)
    return path


def for_tokenizer(name: str, tokenizer: Any, config: str = "LlamaConfig", **more: Any) -> Path:
    """Save a causal language model with a tokenizer, and return their folder."""
    torch.manual_seed(more.pop("seed", 3))
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": tokenizer.model_max_length}
    settings = getattr(hf, config)(**{**SMALL, **more, **sizes, **IDS})
    return saved(name, [hf.AutoModelForCausalLM.from_config(settings), tokenizer])


# ── text models ──


def encoder(
    config: Any, head: str, tokenizer: Callable[[], Any] = bert_tokenizer, **more: Any
) -> Any:
    """Return a builder of `AutoModelFor<head>` (or `AutoModel`) for a config class."""

    def build() -> list[Any]:
        text_tokenizer = tokenizer()
        pad_token_id = text_tokenizer.pad_token_id
        sizes = {"vocab_size": len(text_tokenizer), "max_position_embeddings": LIMIT, **SMALL}
        auto = getattr(hf, f"AutoModelFor{head}" if head else "AutoModel")
        model = auto.from_config(config(pad_token_id=pad_token_id, **{**sizes, **more}))
        return [model, text_tokenizer]

    return build


def decoder(config: Any, head: str, pads: bool = True, **more: Any) -> Any:
    def build() -> list[Any]:
        tokenizer = llama_tokenizer()
        tokenizer.pad_token = tokenizer.pad_token if pads else None
        sizes = {**SMALL, "vocab_size": len(tokenizer), "max_position_embeddings": 256}
        ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2 if pads else None}
        auto = getattr(hf, f"AutoModelFor{head}" if head else "AutoModel")
        return [auto.from_config(config(**{**sizes, **ids, **more})), tokenizer]

    return build


DISTIL: dict[str, Any] = {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64}
MODERN: dict[str, Any] = {
    "num_hidden_layers": 4,
    "global_attn_every_n_layers": 2,
    "local_attention": 8,
    "cls_token_id": 2,
    "sep_token_id": 3,
    "bos_token_id": 2,
    "eos_token_id": 3,
    # ModernBERT narrows its initialization by depth
    "initializer_range": 2.0,
    "initializer_cutoff_factor": 4.0,
}


def xlnet() -> list[Any]:
    tokenizer = bert_tokenizer()
    config = hf.XLNetConfig(
        vocab_size=len(tokenizer),
        d_model=32,
        n_layer=2,
        n_head=4,
        d_inner=64,
        initializer_range=0.5,
    )
    return [hf.XLNetModel(config), tokenizer]


def tapas() -> list[Any]:
    vocab = Path(_root.name) / "tapas-vocab.txt"
    vocab.write_text("\n".join(sorted(wordpiece(), key=wordpiece().__getitem__)))
    config = hf.TapasConfig(
        vocab_size=len(wordpiece()),
        max_position_embeddings=128,
        num_aggregation_labels=4,
        aggregation_labels={0: "NONE", 1: "SUM", 2: "AVERAGE", 3: "COUNT"},
        no_aggregation_label_index=0,
        **SMALL,
    )
    tokenizer = hf.TapasTokenizer(str(vocab), model_max_length=128)
    return [hf.TapasForQuestionAnswering(config), tokenizer]


# ── images and audio ──


def vit() -> list[Any]:
    config = hf.ViTConfig(image_size=32, patch_size=8, **SMALL, **STARS)
    processor = hf.ViTImageProcessorPil(size={"height": 32, "width": 32})
    return [hf.ViTForImageClassification(config), processor]


WAV2VEC2 = {
    **SMALL,
    "conv_dim": (32, 32),
    "conv_kernel": (10, 8),
    "conv_stride": (10, 8),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
    "layerdrop": 0.0,
}


def wav2vec2(classify: bool) -> list[Any]:
    letters = ["<pad>", "<s>", "</s>", "<unk>", "|", *"abcdefghijklmnopqrstuvwxyz'"]
    extractor = hf.Wav2Vec2FeatureExtractor(
        feature_size=1, sampling_rate=16000, do_normalize=True, return_attention_mask=False
    )
    if classify:
        config = hf.Wav2Vec2Config(**WAV2VEC2, **STARS)
        return [hf.Wav2Vec2ForSequenceClassification(config), extractor]
    vocab = Path(_root.name) / "letters.json"
    vocab.write_text(json.dumps({letter: i for i, letter in enumerate(letters)}))
    config = hf.Wav2Vec2Config(**WAV2VEC2, vocab_size=len(letters), pad_token_id=0)
    return [hf.Wav2Vec2ForCTC(config), extractor, hf.Wav2Vec2CTCTokenizer(str(vocab))]


def whisper() -> list[Any]:
    """A model of 2-second windows; longer audio needs its long-form generation."""
    tasks = ["<|translate|>", "<|transcribe|>", "<|startoflm|>", "<|startofprev|>"]
    special = ["<|startoftranscript|>", "<|en|>", "<|de|>", *tasks, "<|nospeech|>"]
    special.append("<|notimestamps|>")
    vocab, merges = byte_bpe()
    tokenizer = hf.WhisperTokenizer(vocab=dict(vocab), merges=merges, pad_token="<|endoftext|>")
    tokenizer.add_tokens(special, special_tokens=True)
    tokenizer.add_tokens([f"<|{i * 0.02:.2f}|>" for i in range(101)])
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in special}
    end = tokenizer.eos_token_id
    config = hf.WhisperConfig(
        vocab_size=len(tokenizer),
        num_mel_bins=16,
        d_model=32,
        **{f"{side}_layers": 2 for side in ("encoder", "decoder")},
        **{f"{side}_attention_heads": 4 for side in ("encoder", "decoder")},
        **{f"{side}_ffn_dim": 64 for side in ("encoder", "decoder")},
        max_source_positions=100,
        max_target_positions=32,
        init_std=0.5,
        pad_token_id=end,
        bos_token_id=end,
        eos_token_id=end,
        decoder_start_token_id=ids["<|startoftranscript|>"],
        begin_suppress_tokens=None,
    )
    model = hf.WhisperForConditionalGeneration(config)
    model.generation_config = hf.GenerationConfig(
        max_length=32,
        pad_token_id=end,
        eos_token_id=end,
        decoder_start_token_id=config.decoder_start_token_id,
        is_multilingual=True,
        lang_to_id={token: ids[token] for token in ("<|en|>", "<|de|>")},
        task_to_id={"transcribe": ids["<|transcribe|>"], "translate": ids["<|translate|>"]},
        no_timestamps_token_id=ids["<|notimestamps|>"],
        alignment_heads=[[1, 0], [1, 2]],
    )
    return [model, tokenizer, hf.WhisperFeatureExtractor(feature_size=16, chunk_length=2)]


Bert, Llama = hf.BertConfig, hf.LlamaConfig
BUILDERS: dict[str, Callable[[], list[Any]]] = {
    "bert-base": encoder(Bert, ""),
    "bert-mlm": encoder(Bert, "MaskedLM"),
    "bert-classify": encoder(Bert, "SequenceClassification", **STARS),
    "bert-nli": encoder(Bert, "SequenceClassification", **NLI),
    "bert-ner": encoder(Bert, "TokenClassification", **NER),
    "roberta-mlm": encoder(
        hf.RobertaConfig, "MaskedLM", roberta_tokenizer, max_position_embeddings=LIMIT + 2
    ),
    "distilbert-mlm": encoder(hf.DistilBertConfig, "MaskedLM", **DISTIL),
    "electra-classify": encoder(
        hf.ElectraConfig, "SequenceClassification", embedding_size=32, **STARS
    ),
    "modernbert-mlm": encoder(hf.ModernBertConfig, "MaskedLM", **MODERN),
    "deberta-mlm": encoder(
        hf.DebertaV2Config, "MaskedLM", relative_attention=True, pos_att_type=["p2c", "c2p"]
    ),
    "fnet-mlm": encoder(hf.FNetConfig, "MaskedLM"),
    "albert-base": encoder(hf.AlbertConfig, "", embedding_size=32),
    "layoutlm": encoder(hf.LayoutLMConfig, "DocumentQuestionAnswering"),
    "xlnet-base": xlnet,
    "gpt2-base": decoder(hf.GPT2Config, ""),
    "gpt2-lm": decoder(hf.GPT2Config, "CausalLM"),
    "llama-lm": decoder(Llama, "CausalLM", num_key_value_heads=2),
    "gpt2-classify": decoder(hf.GPT2Config, "SequenceClassification", **STARS),
    "llama-classify": decoder(Llama, "SequenceClassification", num_key_value_heads=2, **STARS),
    "gpt2-nopad-lm": decoder(hf.GPT2Config, "CausalLM", pads=False),
    "gpt2-nopad-classify": decoder(hf.GPT2Config, "SequenceClassification", pads=False, **STARS),
    "mistral-classify": decoder(
        hf.MistralConfig, "SequenceClassification", num_key_value_heads=2, sliding_window=8, **STARS
    ),
    "tapas": tapas,
    "vit": vit,
    "wav2vec2-classify": lambda: wav2vec2(classify=True),
    "wav2vec2-ctc": lambda: wav2vec2(classify=False),
    "whisper": whisper,
}
TASKS = {
    model: task
    for task, models in {
        "feature-extraction": "bert-base xlnet-base albert-base gpt2-base",
        "fill-mask": "bert-mlm roberta-mlm distilbert-mlm modernbert-mlm deberta-mlm fnet-mlm",
        "text-classification": (
            "bert-classify electra-classify gpt2-nopad-classify mistral-classify gpt2-classify "
            "llama-classify"
        ),
        "zero-shot-classification": "bert-nli",
        "token-classification": "bert-ner",
        "text-generation": "gpt2-nopad-lm gpt2-lm llama-lm",
        "document-question-answering": "layoutlm",
        "table-question-answering": "tapas",
        "image-classification": "vit",
        "audio-classification": "wav2vec2-classify",
        "automatic-speech-recognition": "wav2vec2-ctc whisper",
    }.items()
    for model in models.split()
}
