"""From texts to token ids that the model takes, in pool threads, several at once.

The tokenizer truncates and pads nothing, as its settings for that are shared by all threads: what
is too long is refused or cut here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from transformers import PreTrainedTokenizerBase

from batching.block_pool import ROOT
from batching.errors import InvalidInput
from worker.messages.generation import Chat
from worker.messages.scoring import Truncation
from worker.pipeline.limits import MAX_CHARS_PER_TOKEN

OFF = ("truncation", "padding", "verbose", "return_attention_mask", "return_token_type_ids")


@dataclass(slots=True, eq=False)
class Row:
    """A text's tokens, special ones included, and at last the result: what is kept of their
    states."""

    ids: list[int]
    types: list[int] | None = None  # which of a pair's texts each is of, where the model asks
    skip: int = 0  # how many at the start are a prompt that is not pooled
    root: bytes = ROOT  # it shares its beginning with those of the same root alone
    doubted: bool = False  # a step that it was in has failed
    result: Any = None


class TextReader:
    """`limit` tokens are taken at most, of ids below `vocabulary`."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, limit: int, vocabulary: int, lower_case: bool
    ) -> None:
        self.tokenizer: Any = tokenizer  # whose call is overloaded
        self.limit = limit
        self.vocabulary = vocabulary
        self.lower_case = lower_case

    def tokenize(self, texts: Sequence[str], **options: Any) -> dict[str, list[Any]]:
        """As the tokenizer answers, a list of each field."""
        if self.lower_case:
            texts = [text.lower() for text in texts]
        off = dict.fromkeys(OFF, False)
        return dict(self.tokenizer(list(texts), **{**off, **options}))

    def rows(
        self, texts: Sequence[str], paths: Sequence[str], prompt: str, truncation: Truncation
    ) -> list[Row]:
        """InvalidInput names what is empty, too long, or has tokens that the model does not
        know."""
        texts = [
            self.bounded(text, path, truncation) for text, path in zip(texts, paths, strict=True)
        ]
        made = self.tokenize([prompt + text for text in texts], return_special_tokens_mask=True)
        skip = self._count_prompt(prompt) if prompt else 0
        rows = []
        for ids, special, path in zip(
            made["input_ids"], made["special_tokens_mask"], paths, strict=True
        ):
            most = self.most(len(ids), path, truncation)
            kept = ids if most is None else cut(ids, special, most, truncation.left, path)
            gone = len(ids) - len(kept) if truncation.left else 0
            rows.append(Row(self.checked(kept, path), skip=max(0, skip - gone)))
        return rows

    def bounded(self, text: str, path: str, truncation: Truncation) -> str:
        """A text of no more characters than the model's tokens may have."""
        if not text:
            raise InvalidInput.at(path, "must not be empty")
        most = MAX_CHARS_PER_TOKEN * self.limit
        if len(text) <= most:
            return text
        if not truncation.cuts:
            many = f"has {len(text)} characters; the model takes {self.limit} tokens"
            raise InvalidInput.at(path, many)
        return text[-most:] if truncation.left else text[:most]

    def most(self, count: int, path: str, truncation: Truncation) -> int | None:
        """How many of a text's `count` tokens are kept; None: all. InvalidInput where it is too
        long and is not to be cut."""
        most = min(self.limit, truncation.tokens or self.limit)
        if count <= most:
            return None
        if not truncation.cuts:
            raise InvalidInput.at(path, f"has {count} tokens; the model takes {self.limit}")
        return most

    def checked(self, ids: list[int], path: str) -> list[int]:
        if not ids:
            raise InvalidInput.at(path, "has no tokens")
        if (largest := max(ids)) >= self.vocabulary:
            raise InvalidInput.at(path, f"has a token that the model does not know: {largest}")
        return ids

    # ── for whoever asks for tokens ──

    def encode(self, prompt: Chat | str, add_special_tokens: bool = True) -> list[int]:
        if isinstance(prompt, Chat):
            raise InvalidInput.at("messages", "this model takes texts: use prompt")
        made = self.tokenize([prompt], add_special_tokens=add_special_tokens)
        ids: list[int] = made["input_ids"][0]
        return ids

    def encode_all(self, texts: list[str]) -> list[list[int]]:
        """Without special tokens around them."""
        return self.tokenize(texts, add_special_tokens=False)["input_ids"]

    def decode(self, ids: list[int]) -> str:
        text: str = self.tokenizer.decode(ids)
        return text

    def token(self, token_id: int) -> str:
        if token_id >= self.vocabulary:
            raise InvalidInput(f"there is no token {token_id}")
        token: str | None = self.tokenizer.convert_ids_to_tokens(token_id)
        return token or ""

    def _count_prompt(self, prompt: str) -> int:
        """Its tokens, with the special ones before them."""
        made = self.tokenize([prompt], return_special_tokens_mask=True)
        (special,) = made["special_tokens_mask"]
        return len(special) - _trailing(special)


def cut(ids: list[int], special: Sequence[int], most: int, left: bool, path: str) -> list[int]:
    """At most so many tokens, the special ones at both ends among them; `special`: 1 for those."""
    tail = _trailing(special)
    head = _trailing(special[::-1]) if tail < len(ids) else 0
    if (room := most - head - tail) < 1:
        raise InvalidInput.at(path, f"{most} tokens leave no room beside the special ones")
    end = len(ids) - tail
    content = ids[end - room : end] if left else ids[head : head + room]
    return ids[:head] + content + ids[end:]


def _trailing(special: Sequence[int]) -> int:
    """How many special tokens there are at the end."""
    return len(list(takewhile(bool, special[::-1])))
