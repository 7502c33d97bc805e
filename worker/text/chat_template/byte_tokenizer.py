"""A byte-level tokenizer for a chat template without a checkpoint, for the template tool.

It encodes any text. Each delimiter in the template's source is one token, as in a checkpoint's
tokenizer, so that outputs split into the same tokens.
"""

import re
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

BOS, EOS = "<s>", "</s>"
DELIMITER = re.compile(
    r"""<\|[^\s<>{}']{1,40}>|<[^\s<>{}='"]{1,40}>|\[/?[A-Z][A-Z_]{1,30}\]|\[e~\[|\]~!?b\[|\]~b\]"""
)


def byte_tokenizer(source: str, special: bool = False) -> PreTrainedTokenizerFast:
    """Return a tokenizer for a template's source. `special`: its delimiters are special tokens;
    else they are plain added tokens."""
    chars = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({char: id for id, char in enumerate(chars)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer_class: Any = PreTrainedTokenizerFast
    tokenizer: PreTrainedTokenizerFast = tokenizer_class(
        tokenizer_object=backend, bos_token=BOS, eos_token=EOS, chat_template=source
    )
    delimiters = sorted({*DELIMITER.findall(source)} - {BOS, EOS})
    tokenizer.add_tokens(
        [AddedToken(text, normalized=False, special=special) for text in delimiters],
        special_tokens=special,
    )
    return tokenizer
