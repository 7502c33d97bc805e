"""Contexts beyond the length that a model was first trained for.

Rotary embeddings of the types `longrope` and `dynamic` choose their factors by the longest sequence
of a batch, where cached keys of shorter sequences have other factors already. A server needs one
set for all lengths. It is chosen at load, by the served length. Those of the type `yarn` have one
set, for `factor` times the original context, whatever context the configuration names.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from worker.device.self_check import CannotRun, compare
from worker.error_classification import first_line

CHANGING_TYPES = ("longrope", "dynamic")
# A type that transformers does not recompute.
FIXED = "fixed"
CHECKED_POSITIONS = 64
# Largest relative difference of two tables of float32 cosines of the same angles.
MAX_ERROR = 1e-4


class RotaryFactors:
    """The factors of a model's rotary embeddings.

    `original`: most tokens of a sequence for which `generate` uses the same factors as for shorter
    ones. `longest`: most tokens for which the checkpoint has factors. `context`: most tokens for
    which the factors are now the same at all lengths.
    """

    def __init__(self, model: PreTrainedModel, config: PretrainedConfig, limit: int) -> None:
        """`limit`: tokens of the context that `config` names."""
        # a type, or one per layer type
        self._types: dict[Any, Any] = {
            module: module.rope_type
            for module in model.modules()
            if any(kind in CHANGING_TYPES for kind in _by_layer_type(module).values())
        }
        self.original = self.longest = limit
        ropes = getattr(config, "rope_parameters", None) or {}
        for rope in (ropes, *ropes.values()):
            if not isinstance(rope, dict):
                continue
            trained = rope.get("original_max_position_embeddings") or limit
            if rope.get("rope_type") == "longrope":
                self.original = min(self.original, trained)
            elif rope.get("rope_type") in ("dynamic", "yarn"):
                self.longest = max(self.longest, int(trained * (rope.get("factor") or 1)))
        if not self._types:
            self.original = self.longest
        self.context = self.original

    @torch.no_grad()
    def fix(self, length: int) -> None:
        """Use the factors that transformers has for `length` tokens at all lengths.

        Raise CannotRun if the model does not keep them; it then has those for `original` tokens,
        as it has if `length` is no larger.
        """
        if self.context > self.original:
            self._release()
            self._tables(torch.tensor([0]))  # only longer sequences replace dynamic factors
        if length <= self.original:
            return
        positions = torch.arange(CHECKED_POSITIONS) * self.original // CHECKED_POSITIONS
        try:
            beyond = self._tables(torch.cat([positions, torch.tensor([length - 1])]))
            for module in self._types:
                module.rope_type = _without_changes(module.rope_type)
            for table, expected in zip(self._tables(positions), beyond, strict=True):
                compare(table, expected[..., :-1, :], MAX_ERROR, "those of its buffers differ")
        except Exception as error:  # model classes take other arguments and raise other types
            self._release()
            raise CannotRun(f"its rotary factors cannot be fixed: {first_line(error)}") from error
        self.context = length

    def _release(self) -> None:
        for module, types in self._types.items():
            module.rope_type = types
        self.context = self.original

    def _tables(self, positions: Tensor) -> list[Tensor]:
        """Return the rotary tables [1, L, D] of each module and layer type."""
        tables: list[Tensor] = []
        for module in self._types:
            device = next(module.buffers()).device
            for layer_type in _by_layer_type(module):
                named = {"layer_type": layer_type} if layer_type else {}
                output = module(torch.empty(0, device=device), positions[None].to(device), **named)
                tables.extend([output] if isinstance(output, Tensor) else output)
        return tables


def factors_change(model: PreTrainedModel, limit: int) -> bool:
    """Return whether a text's rotary factors depend on the others of its batch, of up to `limit`
    tokens each."""
    return RotaryFactors(model, model.config.get_text_config(), limit).original < limit


def _by_layer_type(module: Any) -> dict[str | None, str]:
    """Return a module's rope types by layer type, by None if it has one for all layers."""
    types = getattr(module, "rope_type", None)
    return types if isinstance(types, dict) else {None: str(types)}


def _without_changes(types: Any) -> Any:
    """Return a rope type, or a dict of them, with `FIXED` for those that change."""
    if isinstance(types, dict):
        return {layer_type: _without_changes(kind) for layer_type, kind in types.items()}
    return FIXED if types in CHANGING_TYPES else types
