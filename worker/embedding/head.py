"""From tokens' states to vectors: pooling, and the layers that follow it. In float32.

A text is pooled by itself, so that nothing is padded and its vector does not depend on its mates.
"""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from worker.embedding.sentence_transformers import Normalize, SentenceTransformersConfig
from worker.embedding.texts import Row


def _weighted(states: Tensor, first: int) -> Tensor:
    """A token counts as much as its place in the text, which begins at `first`."""
    weights = torch.arange(first + 1, first + 1 + len(states), device=states.device).float()
    return (weights @ states) / weights.sum()


# From a text's states [tokens, H], after `first` that are left out, to a vector [H].
POOL: Mapping[str, Callable[[Tensor, int], Tensor]] = {
    "cls": lambda states, first: states[0].clone(),  # the rest is not to be kept
    "max": lambda states, first: states.amax(0),
    "mean": lambda states, first: states.mean(0),
    "mean_sqrt_len_tokens": lambda states, first: states.sum(0) / math.sqrt(len(states)),
    "weightedmean": _weighted,
    "lasttoken": lambda states, first: states[-1].clone(),
}


class Head:
    def __init__(self, files: SentenceTransformersConfig, device: torch.device) -> None:
        self.poolings, self.include_prompt = files.poolings, files.include_prompt
        layers = list(files.layers)
        self.normalizes = bool(layers) and isinstance(layers[-1], Normalize)
        if self.normalizes:
            layers.pop()  # its place is after a vector has been shortened
        self.layers = nn.Sequential(*layers).to(device)  # from vectors [texts, D] to those

    def pool(self, states: Tensor, row: Row) -> Tensor:
        """A text's states [tokens, H] as one vector."""
        skip = 0 if self.include_prompt or row.skip >= len(states) else row.skip
        pooled = [POOL[name](states[skip:].float(), skip) for name in self.poolings]
        return torch.cat(pooled) if len(pooled) > 1 else pooled[0]
