"""A tokenizer for a chat template that came without one: it can spell everything, byte by byte.

What looks like a mark in the template's source is a token of its own, as in a checkpoint's
tokenizer, so that answers fall into the same pieces as there.
"""

import re
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

START, END = "<s>", "</s>"
DELIMITER = re.compile(
    r"""<\|[^\s<>{}']{1,40}>|<[^\s<>{}='"]{1,40}>|\[/?[A-Z][A-Z_]{1,30}\]|\[e~\[|\]~!?b\[|\]~b\]"""
)


def byte_tokenizer(source: str, special: bool = False) -> PreTrainedTokenizerFast:
    """`source`: of the template. `special`: its marks are special tokens, else plain added ones."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: id for id, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    make: Any = PreTrainedTokenizerFast
    tokenizer: PreTrainedTokenizerFast = make(
        tokenizer_object=backend, bos_token=START, eos_token=END, chat_template=source
    )
    marks = sorted({*DELIMITER.findall(source)} - {START, END})
    tokenizer.add_tokens(
        [AddedToken(mark, normalized=False, special=special) for mark in marks],
        special_tokens=special,
    )
    return tokenizer
