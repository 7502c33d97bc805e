"""SPLADE: a weight for each token of the vocabulary, from the states of a text's tokens.

states → head of the masked language model → logits → log(1 + relu) → max or sum over the tokens
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput

from worker.device.self_check import TOLERANCE, relative_error
from worker.model.loading import LoadingFailed

CHUNK = 128  # tokens whose logits are in memory at a time
REDUCTIONS: dict[str, Callable[[Tensor, int], Tensor]] = {"max": torch.amax, "sum": torch.sum}
LOGARITHMS = {"relu": 1, "log1p_relu": 2}  # by activation function


class SpladeHead:
    """Runs the head of a masked language model on states, and pools the logits."""

    def __init__(self, config: Mapping[str, Any], max_active_dims: int | None = None) -> None:
        """`config`: the file of the module. Raises LoadingFailed for a value that is unknown."""
        pooling = config.get("pooling_strategy", "max"), config.get("activation_function", "relu")
        if pooling[0] not in REDUCTIONS or pooling[1] not in LOGARITHMS:
            raise LoadingFailed(f"its SPLADE pooling is not supported: {pooling}"[:200])
        self._reduce, self._logarithms = REDUCTIONS[pooling[0]], LOGARITHMS[pooling[1]]
        self._max_active_dims = max_active_dims

    @torch.inference_mode()
    def attach(self, model: Any) -> None:
        """Use the head of a model. Raises LoadingFailed unless it gives the model's own logits."""
        self._model = copy.copy(model)  # shares the modules of the head
        vars(self._model)[model.base_model_prefix] = self._body
        ids = torch.arange(1, 8, device=model.device)[None]
        logits, states = model(input_ids=ids).logits[0], model.base_model(input_ids=ids)[0][0]
        if not relative_error(self.logits(states), logits) <= TOLERANCE[model.dtype]:
            raise LoadingFailed("its logits are not those of its head for its last states")

    def logits(self, states: Tensor) -> Tensor:
        """Return logits [tokens, V] of states [tokens, H]."""
        self._states = states[None]
        logits: Tensor = self._model().logits[0]
        return logits

    def _body(self, *_: Any, **inputs: Any) -> BaseModelOutput:
        """Return the states, in place of the model's body."""
        return BaseModelOutput(last_hidden_state=self._states)

    def pool(self, states: Tensor) -> Tensor:
        """Return the weights [V] of a text by the states [tokens, H]."""
        parts = []
        for chunk in torch.split(states, CHUNK):
            weights = self.logits(chunk).float().relu_()
            for _ in range(self._logarithms):
                weights = weights.log1p_()
            parts.append(self._reduce(weights, 0))
        weights = self._reduce(torch.stack(parts), 0)
        if self._max_active_dims:
            values, indices = weights.topk(min(self._max_active_dims, len(weights)))
            weights = torch.zeros_like(weights).scatter_(0, indices, values)
        return weights
