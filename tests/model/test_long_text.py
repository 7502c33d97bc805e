"""Long texts are refused in pieces; the ids of others are those of the whole text."""

import random
from pathlib import Path
from typing import Any

import pytest
import transformers as hf
from tokenizers import Tokenizer, models, pre_tokenizers

from batching.errors import InvalidInput
from tests.generating import engine, request
from tests.matrix import matrix
from tests.tiny_embedders import checkpoint, load
from tests.tiny_tokenizers import bert_tokenizer, byte_bpe, llama_tokenizer, roberta_tokenizer
from worker.engines.embedding.tokenization import TextTokenizer
from worker.messages.scoring import Truncation
from worker.text import long_text
from worker.text.long_text import PIECE_CHARS, TokenLimit

LONG = 20 * PIECE_CHARS


def long_spaces_tokenizer() -> Any:
    """Return a tokenizer with a token of 128 spaces."""
    vocab, merges = byte_bpe()
    vocab, merges = dict(vocab), list(merges)
    for log in range(7):
        spaces = "Ġ" * 2**log
        merges.append((spaces, spaces))
        vocab.setdefault(2 * spaces, len(vocab))
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast: Any = hf.PreTrainedTokenizerFast  # its constructor is not annotated
    return fast(tokenizer_object=backend)


TOKENIZERS = {
    "bert": bert_tokenizer,
    "roberta": roberta_tokenizer,
    "llama": llama_tokenizer,
    "spaces": long_spaces_tokenizer,
}
TEXTS = {
    "words": "the cat sat on the mat ",
    "spaces": " ",
    "letters": "a",
    "digits": "1234567890",
    "lines": "x = 1\n\n\t\t",
    "masks": 1000 * " " + "<mask>" + 1000 * " ",
    "words among spaces": "hello" + 5000 * " ",
}


def ids_of(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids


@pytest.mark.parametrize("name", matrix(TOKENIZERS, "bert", "spaces"))
def test_no_text_that_fits_is_refused_by_its_pieces(name: str) -> None:
    tokenizer = TOKENIZERS[name]()
    limit = TokenLimit(tokenizer, lambda text: ids_of(tokenizer, text))
    rng = random.Random(0)
    for unit in (*TEXTS.values(), "".join(rng.choices("ab \n.,1é漢<>", k=5000))):
        text = (unit * (4 * PIECE_CHARS // len(unit)))[: 4 * PIECE_CHARS - 1]
        tokens = len(ids_of(tokenizer, text))
        assert not limit.is_exceeded(text, tokens)
        if tokens > PIECE_CHARS // 10:
            assert limit.is_exceeded(text, tokens // 3)


def test_a_text_of_few_long_tokens_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_text, "PIECE_CHARS", 1000)
    tokenizer = long_spaces_tokenizer()
    limit = TokenLimit(tokenizer, lambda text: ids_of(tokenizer, text))
    assert not limit.is_exceeded(128 * 255 * " ", 256)
    assert limit.is_exceeded(20_000 * "a b ", 256)


class Recorder:
    """A tokenizer that records the lengths of its texts."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.longest = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, texts: Any, **options: Any) -> Any:
        one = [texts] if isinstance(texts, str) else texts
        self.longest = max(self.longest, *map(len, one))
        return self._tokenizer(texts, **options)


def test_a_chat_that_is_too_long_is_refused_by_its_pieces() -> None:
    processor = engine("llama").input_processor
    recorder = processor._tokenizer = Recorder(processor._tokenizer)
    with pytest.raises(InvalidInput, match=r"more than .* tokens"):
        processor.prepare(request(LONG * "a "))
    with pytest.raises(InvalidInput, match=r"more than .* tokens"):
        processor.encode(LONG * "a ")
    assert recorder.longest == PIECE_CHARS
    with pytest.raises(InvalidInput, match="characters; at most"):
        processor.prepare(request(5 * 2**20 * "a "))
    assert recorder.longest == PIECE_CHARS


def test_an_input_that_is_too_long_is_refused_by_its_pieces(tmp_path: Path) -> None:
    tokenizer = load(checkpoint(tmp_path / "m")).tokenizer
    recorder = tokenizer.tokenizer = Recorder(tokenizer.tokenizer)
    with pytest.raises(InvalidInput, match=r"here: has more than .* tokens"):
        tokenizer.tokenize_rows(["a " * 200_000], ["here"], "", Truncation())
    assert recorder.longest == PIECE_CHARS
    for text in ("a" * 10**6, "a " * 10**6):
        with pytest.raises(InvalidInput, match="characters; at most"):
            tokenizer.tokenize_rows([text], ["here"], "", Truncation(enabled=True))
        with pytest.raises(InvalidInput, match="characters; at most"):
            tokenizer.encode(text)
    assert recorder.longest == PIECE_CHARS


@pytest.mark.parametrize("side", ["left", "right"])
def test_truncated_ids_are_the_tokenizers_own(side: str) -> None:
    ours = TextTokenizer(bert_tokenizer(), 64, 1000, lower_case=False)
    theirs = bert_tokenizer()
    theirs.truncation_side = side
    truncation = Truncation(enabled=True, max_tokens=10, keep_end=side == "left")
    for text in (
        "the cat " * 50_000,
        300_000 * " " + "a cat",
        "a cat" + 300_000 * " ",
        "a" * 300_000,
    ):
        [row] = ours.tokenize_rows([text], ["here"], "", truncation)
        assert row.ids == theirs(text, truncation=True, max_length=10)["input_ids"]
