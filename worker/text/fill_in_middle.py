"""Fill-in-the-middle (FIM) prompts: the model generates the text between a prefix and a suffix.

A tokenizer does not declare its FIM tokens. They are found by the names that families use.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from batching.errors import InvalidInput

# The tokens before the prefix, before the suffix, and before the generated middle.
FIM_TOKENS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    ("<PRE>", "<SUF>", "<MID>"),
)
SUFFIX_FIRST = ("[PREFIX]", "[SUFFIX]")  # Codestral: the prefix comes last, without a middle


class FillInMiddle(NamedTuple):
    """The ids of the FIM tokens. `middle`: None if the model continues the prefix."""

    prefix: int
    suffix: int
    middle: int | None

    def prompt(self, before: Sequence[int], after: Sequence[int]) -> list[int]:
        """Return the token ids of a prompt, from those of the prefix and the suffix."""
        if self.middle is None:
            return [self.suffix, *after, self.prefix, *before]
        return [self.prefix, *before, self.suffix, *after, self.middle]


def fill_in_middle(tokenizer: Any) -> FillInMiddle:
    """Return the FIM tokens of a tokenizer. Raises InvalidInput if it has none."""
    for names in (*FIM_TOKENS, SUFFIX_FIRST):
        ids = tokenizer.convert_tokens_to_ids([*names])  # of the unknown token where it has none
        if None not in ids and tokenizer.convert_ids_to_tokens(ids) == [*names]:
            prefix, suffix, *middle = ids
            return FillInMiddle(prefix, suffix, middle[0] if middle else None)
    raise InvalidInput("this model's tokenizer has no fill-in-the-middle tokens", "suffix")
