"""Fill-in-the-middle prompts: a model trained for them writes what comes between two texts.

Tokenizers do not say which tokens mark the parts; checkpoints have one of a few sets of them.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from batching.errors import InvalidInput

# Before the text, before the text after the gap, and before what the model writes.
MARKERS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    ("<PRE>", "<SUF>", "<MID>"),
)
SUFFIX_FIRST = ("[PREFIX]", "[SUFFIX]")  # Codestral: the text before the gap comes last


class FillInMiddle(NamedTuple):
    """The ids of the marking tokens. `middle`: None if the model continues the prefix."""

    prefix: int
    suffix: int
    middle: int | None

    def prompt(self, before: Sequence[int], after: Sequence[int]) -> list[int]:
        """Return the token ids of a prompt, from those of the texts around the gap."""
        if self.middle is None:
            return [self.suffix, *after, self.prefix, *before]
        return [self.prefix, *before, self.suffix, *after, self.middle]


def fill_in_middle(tokenizer: Any) -> FillInMiddle:
    """Return the marking tokens of a tokenizer. Raises InvalidInput if it has none."""
    for names in (*MARKERS, SUFFIX_FIRST):
        ids = tokenizer.convert_tokens_to_ids([*names])  # of the unknown token where it has none
        if None not in ids and tokenizer.convert_ids_to_tokens(ids) == [*names]:
            prefix, suffix, *middle = ids
            return FillInMiddle(prefix, suffix, middle[0] if middle else None)
    raise InvalidInput("this model's tokenizer has no fill-in-the-middle tokens", "suffix")
