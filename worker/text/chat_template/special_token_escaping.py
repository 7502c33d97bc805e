"""A client's text in a prompt that a template writes: what reads like a control token in it stays
text, so that nobody ends a message, or the document that is judged, but the template.

    text --hidden--> no control tokens --template--> prompt --ids--> each of them as plain text

As transformers' `decision` pipeline has it: special tokens, and other added ones that the template
writes. In pool threads, several at once.
"""

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from batching.errors import InvalidInput

# Encoded before a text that goes on, as some tokenizers begin one otherwise; and taken off again.
BREAK = "\n"

# Texts to token ids, which knows control tokens and adds none.
Encode = Callable[[list[str]], Sequence[list[int]]]


class SpecialTokenEscaper:
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
        # (?!) is never found
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._as_text: dict[str, list[int]] = {}  # made as they are met

    @staticmethod
    def new_key() -> str:
        """What stands for control tokens in one prompt: nobody can write it beforehand, and no
        template takes it apart."""
        return secrets.token_hex(8)

    def hidden(self, given: Any, key: str) -> Any:
        """A text, or all texts in lists and mappings, without control tokens."""
        if isinstance(given, str):
            return self._pattern.sub(lambda found: f"{key}{self._ids[found[0]]}x", given)
        if isinstance(given, Mapping):
            each = given.items()
            return {self.hidden(name, key): self.hidden(value, key) for name, value in each}
        if isinstance(given, (list, tuple)):
            return type(given)(self.hidden(each, key) for each in given)
        return given

    def ids(self, text: str, key: str) -> list[int]:
        """Of a prompt in which such were hidden; InvalidInput if one cannot be written as text."""
        first, *others = re.split(rf"{key}(\d+)x", text)
        [ids] = self._encode([first])
        if not others:
            return ids
        made = [*ids]
        for id_, following in zip(others[::2], self._going_on(others[1::2]), strict=True):
            made += self._plain(self._tokens[int(id_)])
            made += following
        return made

    def _going_on(self, texts: list[str]) -> list[list[int]]:
        """Of texts that have others before them."""
        start, *made = self._encode([BREAK, *(BREAK + text for text in texts)])
        return [
            ids[len(start) :] if ids[: len(start)] == start else self._encode([text])[0]
            for text, ids in zip(texts, made, strict=True)
        ]

    def _plain(self, token: str) -> list[int]:
        if token not in self._as_text:
            ids, start = self._spelled(BREAK + token), self._spelled(BREAK)
            ids = ids[len(start) :] if ids[: len(start)] == start else self._spelled(token)
            if not ids or self._ids[token] in ids:
                raise InvalidInput(f"this model cannot read {token!r} as text")
            self._as_text[token] = ids
        return self._as_text[token]

    def _spelled(self, text: str) -> list[int]:
        """Without added tokens, whatever they are."""
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
