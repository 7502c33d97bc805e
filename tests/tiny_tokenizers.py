"""Small tokenizers of the usual kinds, trained on a few sentences."""

import importlib
import json
from functools import cache
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

hf: Any = importlib.import_module("transformers")  # mostly not annotated

SENTENCES = (
    "The capital of France is Paris, and the capital of Japan is Tokyo.",
    "Angela Merkel met Barack Obama in Berlin on a rainy Tuesday in 2011.",
    "A quick brown fox jumps over the lazy dog while seven cats watch it.",
    "The film was wonderful, touching and funny; the sequel was a disappointment.",
    "Grass is green, snow is white, and the sky over Lisbon is a deep blue.",
    "She opened the letter slowly, read it twice and put it back on the table.",
    "How many people live in the largest city of the country, and since when?",
    "This example is about politics, sports, science, music or something else.",
)
CHATML = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
LIMIT = 64


@cache
def wordpiece() -> dict[str, int]:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[EMPTY]"]
    trainer = trainers.WordPieceTrainer(vocab_size=260, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator([s.lower() for s in SENTENCES], trainer)
    return tokenizer.get_vocab()


@cache
def byte_bpe(*special: str) -> tuple[dict[str, int], list[tuple[str, str]]]:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=360,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], [tuple(pair) for pair in model["merges"]]


def bert_tokenizer(limit: int = LIMIT) -> Any:
    return hf.BertTokenizer(vocab=wordpiece(), do_lower_case=True, model_max_length=limit)


def roberta_tokenizer() -> Any:
    vocab, merges = byte_bpe("<s>", "<pad>", "</s>", "<unk>", "<mask>")
    return hf.RobertaTokenizer(vocab=vocab, merges=merges)  # only the model has the limit


def llama_tokenizer(template: str | None = CHATML) -> Any:
    vocab, merges = byte_bpe("<s>", "</s>", "<pad>", "<|user|>", "<|assistant|>", "<|system|>")
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        chat_template=template,
        model_max_length=256,
    )
