"""The next-token distribution of a Whisper decoder: suppressed tokens and the rules of timestamps.

transformers' processor implements the rules: timestamps come first, come in pairs except for the
last, never decrease, and are chosen where all of them together are more likely than any text token
(section 3.8 of "Robust Speech Recognition via Large-Scale Weak Supervision").
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import WhisperTimeStampLogitsProcessor


class LogitsRules:
    """`config`: the checkpoint's generation_config."""

    def __init__(self, config: Any, device: torch.device) -> None:
        self._first_timestamp: int = config.no_timestamps_token_id + 1
        self._timestamp_rules = WhisperTimeStampLogitsProcessor(config, begin_index=0)
        # an index: SuppressTokensLogitsProcessor searches the whole vocabulary in each call
        self._suppressed, self._suppressed_at_begin = (
            torch.tensor(tokens or (), device=device, dtype=torch.long)
            for tokens in (config.suppress_tokens, config.begin_suppress_tokens)
        )

    def logprobs(self, logits: Tensor, generated: Sequence[Sequence[int]]) -> Tensor:
        """Return float32 log-probabilities [R, V] of logits [R, V]. `generated`: the tokens of each
        row, none in all rows or at least one in each."""
        scores: Any = logits.to(torch.float32, copy=True)
        scores.index_fill_(1, self._suppressed, -torch.inf)
        width = max(map(len, generated))
        if not width:
            scores.index_fill_(1, self._suppressed_at_begin, -torch.inf)
        # rows begin with a timestamp: an earlier one in front of it, as padding, changes no rule
        padded = [[self._first_timestamp] * (width - len(ids)) + [*ids] for ids in generated]
        input_ids: Any = torch.tensor(padded, dtype=torch.long)
        return torch.log_softmax(self._timestamp_rules(input_ids, scores), 1)
