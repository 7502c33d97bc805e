"""Escapes special tokens in a client's text, so that only the template writes them in a prompt and
no text can end a message or the document that is judged.

    text --escape--> without special tokens --template--> prompt --ids--> each of them as plain text

As in transformers' `decision` pipeline: special tokens, and other added tokens that the template
contains. Called in several pool threads at once.
"""

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from batching.errors import InvalidInput

# Encoded before a continued text, then removed: some tokenizers encode the start differently.
BREAK = "\n"

# From texts to token ids; recognizes special tokens and adds none.
Encode = Callable[[list[str]], Sequence[list[int]]]


class SpecialTokenEscaper:
    """Escapes the special tokens of one tokenizer and its chat template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, encode: Encode) -> None:
        self._tokenizer: Any = tokenizer
        self._encode = encode
        template = str(tokenizer.chat_template or "")
        self._ids = {
            token.content: id_
            for id_, token in self._tokenizer.added_tokens_decoder.items()
            if token.special or (token.content in template and not token.content.isspace())
        }
        self._tokens = {id_: token for token, id_ in self._ids.items()}
        longest_first = sorted(self._ids, key=len, reverse=True)
        # (?!) never matches
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._plain_ids_cache: dict[str, list[int]] = {}

    @staticmethod
    def new_key() -> str:
        """Return a key of a prompt's placeholders: no client guesses it, no template splits it."""
        return secrets.token_hex(8)

    def escape(self, value: Any, key: str) -> Any:
        """Replace special tokens by placeholders, in a text or all texts in lists and mappings."""
        if isinstance(value, str):
            return self._pattern.sub(lambda match: f"{key}{self._ids[match[0]]}x", value)
        if isinstance(value, Mapping):
            return {self.escape(name, key): self.escape(item, key) for name, item in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(self.escape(item, key) for item in value)
        return value

    def ids(self, text: str, key: str) -> list[int]:
        """Encode a prompt with placeholders; InvalidInput if a special token has no plain ids."""
        first, *others = re.split(rf"{key}(\d+)x", text)
        [first_ids] = self._encode([first])
        if not others:
            return first_ids
        ids = [*first_ids]
        for id_, following in zip(others[::2], self._continued_ids(others[1::2]), strict=True):
            ids += self._plain_ids(self._tokens[int(id_)])
            ids += following
        return ids

    def _continued_ids(self, texts: list[str]) -> list[list[int]]:
        """Encode texts that follow other texts."""
        start, *encoded = self._encode([BREAK, *(BREAK + text for text in texts)])
        return [
            ids[len(start) :] if ids[: len(start)] == start else self._encode([text])[0]
            for text, ids in zip(texts, encoded, strict=True)
        ]

    def _plain_ids(self, token: str) -> list[int]:
        if token not in self._plain_ids_cache:
            ids, start = self._encode_plain(BREAK + token), self._encode_plain(BREAK)
            ids = ids[len(start) :] if ids[: len(start)] == start else self._encode_plain(token)
            if not ids or self._ids[token] in ids:
                raise InvalidInput(f"the tokenizer cannot encode {token!r} as plain text")
            self._plain_ids_cache[token] = ids
        return self._plain_ids_cache[token]

    def _encode_plain(self, text: str) -> list[int]:
        """Encode a text without added tokens."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            ids: list[int] = self._tokenizer.encode(
                text, add_special_tokens=False, split_special_tokens=True
            )
            return ids
        if backend.normalizer is not None:
            text = backend.normalizer.normalize_str(text)
        words = [text]
        if backend.pre_tokenizer is not None:
            words = [word for word, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
        return [token.id for word in words for token in backend.model.tokenize(word)]
