"""`parameters.truncation`: the tokenizer's own truncation, also where a pipeline sets none.

A pipeline calls its tokenizer in `preprocess` with arguments of its own. For the time of that call
the tokenizer is wrapped, so that a request's `truncation` replaces theirs.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from batching.errors import InvalidInput
from worker.model.loading import Pipe


@contextmanager
def truncating(pipe: Pipe, truncation: bool | str, max_tokens: int) -> Iterator[None]:
    """Let a replica's tokenizer truncate to at most `max_tokens`."""
    tokenizer = pipe.tokenizer
    pipe.tokenizer = TruncatingTokenizer(tokenizer, truncation, max_tokens)
    try:
        yield
    finally:
        pipe.tokenizer = tokenizer


class TruncatingTokenizer:
    """A tokenizer with a fixed truncation. Raises InvalidInput for a strategy that does not suit
    the texts, such as `only_second` for a single one."""

    def __init__(self, tokenizer: Any, truncation: bool | str, max_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._options: dict[str, Any] = {"truncation": truncation}
        if truncation not in (False, "do_not_truncate"):
            self._options["max_length"] = max_tokens

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(self._tokenizer, *args, **{**kwargs, **self._options})

    def apply_chat_template(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(self._tokenizer.apply_chat_template, *args, **{**kwargs, **self._options})

    def _run(self, tokenize: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return tokenize(*args, **kwargs)
        except Exception as error:  # tokenizers raise no other class
            if "truncat" not in str(error).lower():
                raise
            reason = f"is {self._options['truncation']}; with it the text cannot be cut to fit"
            raise InvalidInput.at("parameters.truncation", f"{reason} ({error})") from error
