"""Tokenize and validate the texts of embedders and rerankers, in pool threads, several at once.

The tokenizer itself neither truncates nor pads, because all threads share its settings for that.
Texts that are too long are refused or truncated here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from transformers import PreTrainedTokenizerBase

from batching.errors import ContextExceeded, InvalidInput
from batching.sequence import TokenList
from worker.device.async_copy import AsyncCopy
from worker.engines.pipeline.limits import MAX_TEXT_CHARS
from worker.messages.generation import Chat
from worker.messages.scoring import Truncation
from worker.text.long_text import TokenLimit, tokenizing

DISABLED = ("truncation", "padding", "verbose", "return_attention_mask", "return_token_type_ids")


@dataclass(slots=True, eq=False)
class TokenRow:
    """The tokens of a text or a pair, special ones included, and its output once run."""

    ids: TokenList
    token_type_ids: TokenList | None = None  # for models that distinguish the texts of a pair
    prompt_tokens: int = 0  # at the start, which pooling may leave out
    is_pooled: bool = True  # False: the output is the states of all tokens, or of `kept` ones
    kept: Sequence[int] | None = None
    attended: int | None = None  # the tokens at the start that all attend to; None: all
    output: AsyncCopy | None = None


class TextTokenizer:
    """Tokenizes up to `limit` tokens per text, with ids below `vocabulary_size`."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, limit: int, vocabulary_size: int, lower_case: bool
    ) -> None:
        self.tokenizer: Any = tokenizer  # its call is overloaded
        self.limit = limit
        self.vocabulary_size = vocabulary_size
        self.lower_case = lower_case
        self._token_limit = TokenLimit(tokenizer, lambda text: self.encode_all([text])[0])

    def tokenize(self, texts: Sequence[str], **options: Any) -> dict[str, list[Any]]:
        """Return the tokenizer's output for the texts, a list per field."""
        if self.lower_case:
            texts = [text.lower() for text in texts]
        disabled = dict.fromkeys(DISABLED, False)
        with tokenizing(max(map(len, texts), default=0)):
            return dict(self.tokenizer(list(texts), **{**disabled, **options}))

    def tokenize_rows(
        self, texts: Sequence[str], params: Sequence[str], prompt: str, truncation: Truncation
    ) -> list[TokenRow]:
        """Return a row per text, each after `prompt`. Raises InvalidInput, which names the entry
        of `params`, for texts that are empty, too long, or have ids outside the vocabulary."""
        for text, param in zip(texts, params, strict=True):
            self.check_length(text, param, truncation)
        output = self.tokenize([prompt + text for text in texts], return_special_tokens_mask=True)
        prompt_tokens = self._count_prompt(prompt) if prompt else 0
        rows = []
        for ids, special, param in zip(
            output["input_ids"], output["special_tokens_mask"], params, strict=True
        ):
            kept, removed = ids, 0  # tokens at the start
            if (length := self.truncated_length(len(ids), param, truncation)) is not None:
                kept = truncate(ids, special, length, truncation.keep_end, param)
                removed = len(ids) - len(kept) if truncation.keep_end else 0
            remaining = max(0, prompt_tokens - removed)
            rows.append(TokenRow(self.check_ids(kept, param), prompt_tokens=remaining))
        return rows

    def check_length(self, text: str, param: str, truncation: Truncation) -> None:
        """Raise InvalidInput for an empty text, for one of too many characters and, without
        truncation, for a long one that cannot fit. Others are tokenized to count them."""
        if not text:
            raise InvalidInput.at(param, "must not be empty")
        if len(text) > MAX_TEXT_CHARS:
            raise InvalidInput.at(
                param, f"has {len(text)} characters; at most {MAX_TEXT_CHARS} are accepted"
            )
        if not truncation.enabled and self._token_limit.is_exceeded(text, self.limit):
            raise ContextExceeded.of(self.limit, param, f"has more than {self.limit} tokens")

    def truncated_length(self, count: int, param: str, truncation: Truncation) -> int | None:
        """Return the tokens to keep of `count`; None for all. Raises InvalidInput for a text that
        is too long and not to be truncated."""
        limit = min(self.limit, truncation.max_tokens or self.limit)
        if count <= limit:
            return None
        if not truncation.enabled:
            raise ContextExceeded.of(self.limit, param, f"has {count} tokens")
        return limit

    def check_ids(self, ids: TokenList, param: str) -> TokenList:
        """Return the ids. Raises InvalidInput for none, and for ids outside the vocabulary."""
        if not ids:
            raise InvalidInput.at(param, "has no tokens")
        if (largest := max(ids)) >= self.vocabulary_size:
            last = self.vocabulary_size - 1
            raise InvalidInput.at(param, f"has the token id {largest}; the model's end at {last}")
        return ids

    # ── TextModel of worker.messages.protocol ──

    def encode(self, prompt: Chat | str, add_special_tokens: bool = True) -> list[int]:
        if isinstance(prompt, Chat):
            prompt = self.render(prompt)
        if prompt:
            self.check_length(prompt, "prompt", Truncation(enabled=True))
        output = self.tokenize([prompt], add_special_tokens=add_special_tokens)
        ids: list[int] = output["input_ids"][0]
        return ids

    def render(self, chat: Chat) -> str:
        raise InvalidInput.at("messages", "this model takes no messages: use prompt")

    def encode_all(self, texts: list[str]) -> list[list[int]]:
        """Return the ids of each text, without special tokens around them."""
        return self.tokenize(texts, add_special_tokens=False)["input_ids"]

    def decode(self, ids: Sequence[int], skip_special: bool = False) -> str:
        text: str = self.tokenizer.decode([*ids], skip_special_tokens=skip_special)
        return text

    def token(self, token_id: int) -> str:
        if token_id >= self.vocabulary_size:
            raise InvalidInput(f"there is no token {token_id}")
        token: str | None = self.tokenizer.convert_ids_to_tokens(token_id)
        return token or ""

    def _count_prompt(self, prompt: str) -> int:
        """Return the prompt's tokens, including special ones before them."""
        output = self.tokenize([prompt], return_special_tokens_mask=True)
        (special,) = output["special_tokens_mask"]
        return len(special) - _count_trailing(special)


def truncate(
    ids: list[int], special: Sequence[int], length: int, left: bool, param: str
) -> list[int]:
    """Return `length` of the ids, including the special tokens at both ends, which `special` marks
    with 1. Raises InvalidInput if only special tokens would remain."""
    tail = _count_trailing(special)
    head = _count_trailing(special[::-1]) if tail < len(ids) else 0
    if (room := length - head - tail) < 1:
        raise InvalidInput.at(
            param, f"{length} tokens leave no room for text beside {head + tail} special tokens"
        )
    end = len(ids) - tail
    content = ids[end - room : end] if left else ids[head : head + room]
    return ids[:head] + content + ids[end:]


def _count_trailing(special: Sequence[int]) -> int:
    return len(list(takewhile(bool, special[::-1])))
