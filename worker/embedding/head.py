"""From tokens' states to vectors: pooling, and the layers that follow it. In float32.

A text is pooled by itself, so that nothing is padded and its vector does not depend on its mates.
"""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn.functional import linear, normalize

from worker.embedding.files import Dense, Normalize, SentenceFiles
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
    def __init__(self, files: SentenceFiles, device: torch.device) -> None:
        self.poolings, self.include_prompt = files.poolings, files.include_prompt
        layers = list(files.layers)
        self.normalizes = bool(layers) and isinstance(layers[-1], Normalize)
        if self.normalizes:
            layers.pop()  # its place is after a vector has been shortened
        self.layers = [_on(layer, device) for layer in layers]

    def pool(self, states: Tensor, row: Row) -> Tensor:
        """A text's states [tokens, H] as one vector."""
        skip = 0 if self.include_prompt or row.skip >= len(states) else row.skip
        pooled = [POOL[name](states[skip:].float(), skip) for name in self.poolings]
        return torch.cat(pooled) if len(pooled) > 1 else pooled[0]

    def __call__(self, vectors: Tensor) -> Tensor:
        """What follows pooling: vectors [texts, D] of those."""
        for layer in self.layers:
            vectors = _through(layer, vectors)
        return vectors


def _on(layer: Dense | Normalize, device: torch.device) -> Dense | Normalize:
    if isinstance(layer, Normalize):
        return layer
    weights = (layer.weight, layer.bias, layer.residual_weight)
    weight, bias, residual = (None if each is None else each.to(device) for each in weights)
    assert weight is not None
    return Dense(weight, bias, layer.activation, layer.residual, residual)


def _through(layer: Dense | Normalize, vectors: Tensor) -> Tensor:
    if isinstance(layer, Normalize):
        return normalize(vectors, dim=-1)
    out: Tensor = layer.activation(linear(vectors, layer.weight, layer.bias))
    if not layer.residual:
        return out
    weight = layer.residual_weight
    return out + (vectors if weight is None else linear(vectors, weight))
