"""Pooling, and the layers that follow it: from the states of a text's tokens to one vector.

Everything runs in float32. Each text is pooled by itself, so that nothing is padded and a vector
does not depend on the other texts of a batch.
"""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from worker.engines.embedding.sentence_transformers import Normalize, SentenceTransformersConfig
from worker.engines.embedding.tokenization import TokenRow

# From a row's states [tokens, H], of all tokens or of the last one, or its logits [labels], to its
# output.
Head = Callable[[Tensor, TokenRow], Tensor]


def _weighted_mean(states: Tensor, start: int) -> Tensor:
    """Weight each token by its position in the text, the first of which is `start`."""
    weights = torch.arange(start + 1, start + 1 + len(states), device=states.device).float()
    return (weights @ states) / weights.sum()


# From a text's states [tokens, H], without the first `start` tokens, to a vector [H].
POOLINGS: Mapping[str, Callable[[Tensor, int], Tensor]] = {
    "cls": lambda states, start: states[0].clone(),  # a copy does not keep the other states alive
    "max": lambda states, start: states.amax(0),
    "mean": lambda states, start: states.mean(0),
    "mean_sqrt_len_tokens": lambda states, start: states.sum(0) / math.sqrt(len(states)),
    "weightedmean": _weighted_mean,
    "lasttoken": lambda states, start: states[-1].clone(),
}


class PoolingHead:
    def __init__(self, config: SentenceTransformersConfig, device: str) -> None:
        self.poolings, self.include_prompt = config.poolings, config.include_prompt
        self.splade = config.splade
        layers, self.is_late = list(config.layers), config.late is not None
        self.normalizes = bool(layers) and not self.is_late and isinstance(layers[-1], Normalize)
        if self.normalizes:
            layers.pop()  # vectors are normalized after they are truncated to `dimensions`
        self.layers = nn.Sequential(*layers).to(device)  # vectors [texts, D] → [texts, D']

    @torch.inference_mode()
    def __call__(self, states: Tensor, row: TokenRow) -> Tensor:
        """Return a text's vector by its states [tokens, H], unless all of them are requested.
        Tokens that are kept for late interaction have a vector each."""
        if row.kept is not None:
            kept = states[torch.tensor(row.kept, device=states.device)]
            vectors: Tensor = self.layers(kept.float())
            return vectors
        if not row.is_pooled:
            return states.to(torch.float32, copy=True)  # does not keep the batch's states alive
        if self.splade:
            pooled = self.splade.pool(states)
        else:
            start = 0 if self.include_prompt else row.prompt_tokens
            start = start if start < len(states) else 0
            parts = [POOLINGS[name](states[start:].float(), start) for name in self.poolings]
            pooled = torch.cat(parts) if len(parts) > 1 else parts[0]
        vector: Tensor = self.layers(pooled[None])[0]
        return vector
