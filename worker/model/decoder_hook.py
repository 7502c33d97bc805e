"""The way into a model's decoder: what its forward passes there is seen, and pictures join in.

By a copy of the model down to there (decoder_hook.py), which itself knows nothing of it. Which
tokens see each other is read off the rule that its masks are made by, at one place a token.

A copy of a model down to one part: the modules on the way there are copies, all others and the
weights are shared. So that part can be called in another way, and the model itself knows nothing.
"""

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionMaskInterface

from worker.device.self_check import CannotRun

READ = "onequeue_masks_read"
# Tensors that a decoder is given and no picture changes, or that are told in other ways.
ORDINARY = ("input_ids", "attention_mask", "position_ids", "cache_position")

# What is passed to a decoder in pictures' places, by its arguments' names: [N, …] a row a token. Of
# a list of tensors each has its number after a point; a tensor of booleans says of which rows they
# are, and the others are zeros.
Rows = Mapping[str, Tensor]


class StopForward(Exception):
    """At the decoder, with what it was to be given: by its arguments' names."""


class DecoderHook:
    """On the worker's thread. `model`: the copy; run inside `inject`, or by `capture`.
    `argument_names`: of its forward."""

    def __init__(self, model: Any) -> None:
        self.model, decoder = _reading(model)
        self.argument_names = frozenset(inspect.signature(model.forward).parameters)
        self._decode: Callable[..., Any] = decoder.forward
        decoder.forward = self._enter
        self._brought: tuple[Tensor, Rows] | None = None

    @torch.inference_mode()
    def capture(self, **inputs: Any) -> dict[str, Any]:
        """What the decoder would be given; CannotRun if it is not called by names."""
        try:
            self.model(**inputs, use_cache=False)
        except StopForward as arrived:
            given: dict[str, Any] = arrived.args[0]
            return given
        raise CannotRun("its decoder is not run")

    @contextmanager
    def inject(self, places: Tensor, rows: Rows) -> Iterator[None]:
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
            raise StopForward(given)
        places, rows = self._brought
        shape = given["inputs_embeds"].shape[:2]
        lists: dict[str, list[Tensor]] = {}
        for name, each in rows.items():
            name, in_list, _ = name.partition(".")
            if in_list:
                [mask] = _masks(rows)
                lists.setdefault(name, []).append(each[mask])
                continue
            before = given.get(name)
            joined = each.new_zeros(shape) if before is None else before.clone()
            joined[0, places] = each.to(joined.dtype)
            given[name] = joined
        return self._decode(**{**given, **lists, "attention_mask": None})


def rows_of(given: Mapping[str, Any], count: int, width: int) -> Sequence[Rows]:
    """Of `count` prompts of `width` tokens each, all of them a picture's; CannotRun where the
    decoder is given what cannot be told apart by token."""
    found = {n: each for n, each in given.items() if n not in ORDINARY and _holds_tensors(each)}
    masks = _masks(found)
    by_token: dict[str, Tensor] = {}
    for name, each in found.items():
        if isinstance(each, Tensor):
            by_token[name] = each
        elif len(masks) == 1:
            by_token |= {f"{name}.{n}": _spread(layer, masks[0]) for n, layer in enumerate(each)}
        else:
            raise CannotRun(f"its decoder is given {name}, of which tokens is not told")
    for name, each in by_token.items():
        if each.shape[:2] != (count, width):
            raise CannotRun(f"its decoder is given {name}, which is not of tokens")
    return [{name: each[n].clone() for name, each in by_token.items()} for n in range(count)]


def attends_to_next(given: Mapping[str, Any]) -> Tensor:
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


def _reading(model: Any) -> tuple[Any, Any]:
    """A copy of the model that reads masks, and its decoder."""
    *parts, decoder = copied_down_to(model, path_to_decoder(model))
    for part in parts:
        if hasattr(part, "config"):
            part.config = config = copy.deepcopy(part.config)
            config.get_text_config()._attn_implementation_internal = READ
    return parts[0], decoder


def _masks(values: Mapping[str, Any]) -> list[Tensor]:
    return [v for v in values.values() if isinstance(v, Tensor) and v.dtype == torch.bool]


def _holds_tensors(value: Any) -> bool:
    first = value[0] if isinstance(value, list | tuple) and value else value
    return isinstance(first, Tensor)


def _spread(rows: Tensor, mask: Tensor) -> Tensor:
    """[B, T, …] with the rows in the places of the mask [B, T], zeros elsewhere."""
    if len(rows) != int(mask.sum()):
        raise CannotRun("its decoder is given more rows than its mask says")
    spread = rows.new_zeros(*mask.shape, *rows.shape[1:])
    spread[mask] = rows
    return spread


def path_to_decoder(model: Any) -> str:
    """Its name; CannotRun if the model does not tell."""
    decoder = model.get_decoder()
    for name, module in model.named_modules():
        if module is decoder and name:
            return str(name)
    raise CannotRun("which part is its decoder is not known")


def copied_down_to(model: Any, path: str) -> list[Any]:
    """The model's copy first, that of the part which has this name in it last."""
    parts = [_copied(model)]
    for name in path.split("."):
        inner = parts[-1]._modules[name] = _copied(parts[-1]._modules[name])
        parts.append(inner)
    return parts


def _copied(module: Any) -> Any:
    made = copy.copy(module)
    made._modules = {**module._modules}
    return made
