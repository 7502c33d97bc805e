"""What a Whisper decoder may say next, and how likely it finds it.

The checkpoint's suppressed tokens, and the rules of timestamps: they come first, in pairs but for
the last, never decrease, and are said wherever all together are likelier than any text (section 3.8
of "Robust Speech Recognition via Large-Scale Weak Supervision").
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from worker.speech.vocabulary import WhisperVocabulary

NEVER = float("-inf")


class LogitsRules:
    def __init__(self, vocabulary: WhisperVocabulary, device: torch.device) -> None:
        self.vocabulary = vocabulary
        never = [*vocabulary.never, vocabulary.no_timestamps]
        self._never = torch.tensor(never, device=device)
        self._never_first = torch.tensor(vocabulary.never_first, device=device, dtype=torch.long)

    def logprobs(self, logits: Tensor, said: Sequence[Sequence[int]]) -> Tensor:
        """float32 [R, V] of logits [R, V], after the tokens that each row has said."""
        scores = logits.to(torch.float32, copy=True)
        scores.index_fill_(1, self._never, NEVER)
        for row, tokens in zip(scores, said, strict=True):
            self._restrict(row, tokens)
        first = self.vocabulary.timestamps
        logprobs = scores.log_softmax(1)
        together = logprobs[:, first:].logsumexp(1, keepdim=True)
        timed = together > logprobs[:, :first].amax(1, keepdim=True)
        logprobs[:, :first].masked_fill_(timed, NEVER)
        logprobs[:, first:].sub_(torch.where(timed, together, 0.0))
        return logprobs

    def _restrict(self, scores: Tensor, said: Sequence[int]) -> None:
        """One row [V], in place."""
        vocabulary = self.vocabulary
        first = vocabulary.timestamps
        if not said:
            scores[self._never_first] = NEVER
            scores[:first] = NEVER
            if vocabulary.latest_first is not None:
                scores[first + vocabulary.latest_first + 1 :] = NEVER
            return
        times = [token for token in said if token >= first]
        opens = said[-1] >= first  # a text, or is the first of a pair
        if opens and (len(said) < 2 or said[-2] >= first):
            scores[first:] = NEVER
        elif opens:
            scores[: vocabulary.end] = NEVER
            scores[first : times[-1]] = NEVER
        elif times:
            scores[first : times[-1] + 1] = NEVER
