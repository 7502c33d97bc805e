"""Long texts: refused in little memory where they have too many tokens, tokenized one at a time.

A tokenizer needs about 300 bytes of memory and a microsecond per character. A lower bound of the
tokens is counted on pieces; it may only decide that a text is too long. Token ids always come from
the whole text.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

PIECE_CHARS = 1 << 16
LONG_CHARS = 1 << 17
# Tokens of a piece that the whole text may not have: of a word or a special token that is cut.
CUT_TOKENS = 64

_long_text = threading.Lock()


class TokenLimit:
    """`encode`: from a text to its token ids, without special tokens around them."""

    def __init__(self, tokenizer: Any, encode: Callable[[str], Sequence[int]]) -> None:
        self._encode = encode
        added = tokenizer.added_tokens_decoder.values()
        # Such a token, as RoBERTa's <mask>, takes any whitespace beside it.
        self._takes_spaces = any(token.lstrip or token.rstrip for token in added)

    def is_exceeded(self, text: str, limit: int) -> bool:
        """Return whether a text certainly has more than `limit` tokens; False for a short text.

        A cut changes the tokens near it. So a piece counts with half of its tokens."""
        if len(text) <= PIECE_CHARS:
            return False
        tokens = 0
        for start in range(0, len(text), PIECE_CHARS):
            piece = text[start : start + PIECE_CHARS]
            if self._takes_spaces:
                piece = piece.strip()
            tokens += max(0, len(self._encode(piece)) - CUT_TOKENS) // 2
            if tokens > limit:
                return True
        return False


def tokenizing(chars: int) -> AbstractContextManager[object]:
    """Wait while another long text is tokenized, if this one is long."""
    return _long_text if chars > LONG_CHARS else nullcontext()
