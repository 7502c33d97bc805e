"""The way into a model's decoder: what its forward passes there is seen, and pictures join in.

A view of the model, with the same modules and weights but for those on the way to the decoder,
which are copies: so the model itself, that is compiled and captured, knows nothing of it. Which
tokens see each other is read off the rule that the model makes its masks by, at one place a token.
"""

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionMaskInterface

from worker.model.self_check import CannotRun

READ = "onequeue_masks_read"
# What a decoder is given that no picture changes, or that is told in other ways.
ORDINARY = {
    "input_ids", "attention_mask", "position_ids", "past_key_values", "use_cache",
    "cache_position", "return_dict", "output_attentions", "output_hidden_states",
}  # fmt: skip

# What is passed to a decoder in pictures' places, by its arguments' names: [N, …] a row a token. A
# tensor of booleans says of which rows the lists of tensors are; the other rows of those are zeros.
Rows = Mapping[str, Tensor | list[Tensor]]


class Arrived(Exception):
    """At the decoder, with what it was to be given."""

    def __init__(self, given: dict[str, Any]) -> None:
        super().__init__()
        self.given = given


class Entrance:
    """On the worker's thread. `model`: the view; run inside `bringing`, or by `captured`. `takes`:
    names of its forward's arguments."""

    def __init__(self, model: Any) -> None:
        self.model, decoder = _view(model)
        self.takes = frozenset(inspect.signature(model.forward).parameters)
        self._decode: Callable[..., Any] = decoder.forward
        decoder.forward = self._enter
        self._brought: tuple[Tensor, Rows] | None = None

    @torch.inference_mode()
    def captured(self, **inputs: Any) -> dict[str, Any]:
        """What the decoder would be given; CannotRun if it is not called by names."""
        try:
            self.model(**inputs, use_cache=False)
        except Arrived as arrived:
            return arrived.given
        raise CannotRun("its decoder is not run")

    @contextmanager
    def bringing(self, places: Tensor, rows: Rows) -> Iterator[None]:
        """A forward inside has these rows at these places [N] of its tokens."""
        self._brought = places, rows
        try:
            yield
        finally:
            self._brought = None

    def _enter(self, *unnamed: Any, **given: Any) -> Any:
        if unnamed or given.get("inputs_embeds") is None:
            raise CannotRun("its decoder is not given embeddings by name")
        if self._brought is None:
            raise Arrived(given)
        places, rows = self._brought
        width = given["inputs_embeds"].shape[1]
        masks = {name: each for name, each in rows.items() if _is_mask(each)}
        for name, each in rows.items():
            if isinstance(each, list):
                [mask] = masks.values()
                given[name] = [layer[mask] for layer in each]
            elif name in masks:
                nowhere = given["inputs_embeds"].new_zeros(1, width, dtype=torch.bool)
                given[name] = _at(nowhere, places, each)
            else:
                given[name] = _at(given[name], places, each)
        return self._decode(**{**given, "attention_mask": None})


def rows_of(given: Mapping[str, Any], count: int, width: int) -> Sequence[Rows]:
    """Of `count` prompts of `width` tokens each, all of them a picture's; CannotRun where the
    decoder is given what cannot be told apart by token."""
    found = {name: each for name, each in given.items() if name not in ORDINARY}
    found = {name: each for name, each in found.items() if _holds_tensors(each)}
    masks = [each for each in found.values() if _is_mask(each)]
    made: list[dict[str, Tensor | list[Tensor]]] = [{} for _ in range(count)]
    for name, each in found.items():
        if isinstance(each, Tensor):
            by_token: list[Tensor] = [each]
        elif len(masks) == 1:
            by_token = [_spread(layer, masks[0]) for layer in each]
        else:
            raise CannotRun(f"its decoder is given {name}, of which tokens is not told")
        if any(tensor.shape[:2] != (count, width) for tensor in by_token):
            raise CannotRun(f"its decoder is given {name}, which is not of tokens")
        for number, rows in enumerate(made):
            parts = [tensor[number].clone() for tensor in by_token]
            rows[name] = parts[0] if isinstance(each, Tensor) else parts
    return made


def sees_next(given: Mapping[str, Any]) -> Tensor:
    """[T] of the prompt that was captured: whether a token sees the one that follows it."""
    masks = given.get("attention_mask")
    made = [*masks.values()] if isinstance(masks, Mapping) else [masks]
    known = [each for each in made if isinstance(each, Tensor)]
    width = given["inputs_embeds"].shape[1]
    if any(each.shape != (width,) for each in known):
        raise CannotRun("its masks are made in a way of its own")
    if any(not torch.equal(each, known[0]) for each in known):
        raise CannotRun("its layers see in different directions")
    return known[0] if known else torch.zeros(width, dtype=torch.bool)


def _read_mask(
    q_length: int, mask_function: Callable[..., Any], device: Any = None, **others: Any
) -> Tensor:
    """In place of a mask [T, T]: whether each of T tokens sees the next."""
    tokens = torch.arange(q_length - 1, device=device)
    none = torch.zeros((), dtype=torch.long, device=device)
    seen = torch.zeros(q_length, dtype=torch.bool, device=device)
    seen[:-1] = mask_function(none, none, tokens, tokens + 1)
    return seen


AttentionMaskInterface.register(READ, _read_mask)


def _view(model: Any) -> tuple[Any, Any]:
    """A copy of the modules on the way to the decoder, and of that; they read masks."""
    decoder = model.get_decoder()
    paths = [name for name, module in model.named_modules() if module is decoder and name]
    if not paths:
        raise CannotRun("which part is its decoder is not known")
    configs: dict[int, Any] = {}
    view = part = _copied(model)
    for name in paths[0].split("."):
        if (config := getattr(part, "config", None)) is not None:
            part.config = configs.setdefault(id(config), copy.deepcopy(config))
            part.config.get_text_config()._attn_implementation_internal = READ
        inner = part._modules[name] = _copied(part._modules[name])
        part = inner
    return view, part


def _copied(module: Any) -> Any:
    made = copy.copy(module)
    made._modules = {**module._modules}
    return made


def _is_mask(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.bool


def _holds_tensors(value: Any) -> bool:
    several = isinstance(value, list | tuple) and bool(value)
    return isinstance(value, Tensor) or (several and isinstance(value[0], Tensor))


def _spread(rows: Tensor, mask: Tensor) -> Tensor:
    """[B, T, …] with the rows in the places of the mask [B, T], zeros elsewhere."""
    if len(rows) != int(mask.sum()):
        raise CannotRun("its decoder is given more rows than its mask says")
    spread = rows.new_zeros(*mask.shape, *rows.shape[1:])
    spread[mask] = rows
    return spread


def _at(given: Tensor, places: Tensor, rows: Tensor) -> Tensor:
    """[1, T, …] with other rows in these places."""
    changed = given.clone()
    changed[0, places] = rows.to(given.dtype)
    return changed
