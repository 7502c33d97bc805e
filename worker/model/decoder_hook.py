"""Hook into the inputs of a multimodal model's decoder: capture them, or inject rows into them.

The hook runs a copy of the model in which only the modules on the path to the decoder are copied;
weights and all other modules are shared, and the model itself stays unchanged. Which tokens attend
to later ones is read from the model's mask function, one flag per token.
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

MASK_READER = "onequeue_masks_read"
# Decoder inputs that images do not change, or that a batch passes separately.
TEXT_INPUTS = ("input_ids", "attention_mask", "position_ids", "cache_position")

# Decoder inputs of N image tokens, by argument name: each [N, …], one row per token. The tensors of
# a list argument are named `<argument>.<number>`. A boolean tensor marks the tokens that a list's
# rows belong to; the list's rows of other tokens are zeros.
DecoderRows = Mapping[str, Tensor]


class StopForward(Exception):
    """Raised at the decoder, with the decoder's arguments by name."""


class DecoderHook:
    """A copy of a model whose decoder call is intercepted; used on the worker's thread only.

    `model`: the copy, to be called inside `inject`. `argument_names`: of the model's forward.
    """

    def __init__(self, model: Any) -> None:
        self.model, decoder = _copy_with_mask_reader(model)
        self.argument_names = frozenset(inspect.signature(model.forward).parameters)
        self._decode: Callable[..., Any] = decoder.forward
        decoder.forward = self._intercept
        self._injected: tuple[Tensor, DecoderRows] | None = None

    @torch.inference_mode()
    def capture(self, **inputs: Any) -> dict[str, Any]:
        """Run the model up to its decoder and return the decoder's arguments.

        Raise CannotRun if the decoder is not called, or not by argument names.
        """
        try:
            self.model(**inputs, use_cache=False)
        except StopForward as stopped:
            arguments: dict[str, Any] = stopped.args[0]
            return arguments
        raise CannotRun("its decoder is not run")

    @contextmanager
    def inject(self, indices: Tensor, rows: DecoderRows) -> Iterator[None]:
        """Let forwards of `model` in the context take `rows` for the tokens at `indices` [N]."""
        self._injected = indices, rows
        try:
            yield
        finally:
            self._injected = None

    def _intercept(self, *positional: Any, **arguments: Any) -> Any:
        if positional or arguments.get("inputs_embeds") is None:
            raise CannotRun("its decoder is called without embeddings by name")
        if self._injected is None:
            raise StopForward(arguments)
        indices, rows = self._injected
        shape = arguments["inputs_embeds"].shape[:2]
        lists: dict[str, list[Tensor]] = {}
        for name, values in rows.items():
            name, in_list, _ = name.partition(".")
            if in_list:
                [mask] = _boolean_tensors(rows)
                lists.setdefault(name, []).append(values[mask])
                continue
            before = arguments.get(name)
            merged = values.new_zeros(shape) if before is None else before.clone()
            merged[0, indices] = values.to(merged.dtype)
            arguments[name] = merged
        return self._decode(**{**arguments, **lists, "attention_mask": None})


# ── captured arguments ──


def split_by_item(arguments: Mapping[str, Any], count: int, width: int) -> Sequence[DecoderRows]:
    """Return the rows of each of `count` prompts of `width` image tokens from one captured call.

    Raise CannotRun if an argument cannot be divided by token.
    """
    inputs = {
        name: value
        for name, value in arguments.items()
        if name not in TEXT_INPUTS and _holds_tensors(value)
    }
    masks = _boolean_tensors(inputs)
    by_token: dict[str, Tensor] = {}
    for name, value in inputs.items():
        if isinstance(value, Tensor):
            by_token[name] = value
        elif len(masks) == 1:
            by_token |= {f"{name}.{n}": _scatter(layer, masks[0]) for n, layer in enumerate(value)}
        else:
            raise CannotRun(f"its decoder input {name} has no mask of its tokens")
    for name, value in by_token.items():
        if value.shape[:2] != (count, width):
            raise CannotRun(f"its decoder input {name} has no row for each token")
    return [{name: value[n].clone() for name, value in by_token.items()} for n in range(count)]


def attends_to_next(arguments: Mapping[str, Any]) -> Tensor:
    """Return bool [T]: whether each token of the captured prompt attends to its successor.

    Raise CannotRun if the masks do not come from transformers' mask functions, or differ by layer.
    """
    masks = arguments.get("attention_mask")
    by_layer_type = [*masks.values()] if isinstance(masks, Mapping) else [masks]
    width = arguments["inputs_embeds"].shape[1]
    flags = [mask for mask in by_layer_type if isinstance(mask, Tensor)]
    flags = [mask for mask in flags if mask.shape != (1, width)]  # the padding, passed on
    if any(mask.shape != (width,) for mask in flags):
        raise CannotRun("it makes its attention masks itself")
    if any(not torch.equal(mask, flags[0]) for mask in flags):
        raise CannotRun("its layers attend in different directions")
    return flags[0] if flags else torch.zeros(width, dtype=torch.bool)


def _boolean_tensors(values: Mapping[str, Any]) -> list[Tensor]:
    return [v for v in values.values() if isinstance(v, Tensor) and v.dtype == torch.bool]


def _holds_tensors(value: Any) -> bool:
    first = value[0] if isinstance(value, list | tuple) and value else value
    return isinstance(first, Tensor)


def _scatter(rows: Tensor, mask: Tensor) -> Tensor:
    """Return [B, T, …] with `rows` where `mask` [B, T] is true and zeros elsewhere."""
    if len(rows) != int(mask.sum()):
        raise CannotRun("the rows of a decoder input do not match its mask")
    scattered = rows.new_zeros(*mask.shape, *rows.shape[1:])
    scattered[mask] = rows
    return scattered


# ── the copy ──


def _copy_with_mask_reader(model: Any) -> tuple[Any, Any]:
    """Return a copy of the model that makes flags in place of masks, and the copy's decoder."""
    *parts, decoder = copy_path(model, path_to_decoder(model))
    for part in parts:
        if hasattr(part, "config"):
            part.config = config = copy.deepcopy(part.config)
            config.get_text_config()._attn_implementation_internal = MASK_READER
    return parts[0], decoder


def _read_mask(
    q_length: int, mask_function: Callable[..., Any], device: Any = None, **others: Any
) -> Tensor:
    """Return bool [T] in place of a mask [T, T]: whether each token attends to its successor."""
    tokens = torch.arange(q_length - 1, device=device)
    zero = torch.zeros((), dtype=torch.long, device=device)
    flags = torch.zeros(q_length, dtype=torch.bool, device=device)
    flags[:-1] = mask_function(zero, zero, tokens, tokens + 1)
    return flags


AttentionMaskInterface.register(MASK_READER, _read_mask)


def path_to_decoder(model: Any) -> str:
    """Return the decoder's module name; raise CannotRun if it is no submodule."""
    decoder = model.get_decoder()
    for name, module in model.named_modules():
        if module is decoder and name:
            return str(name)
    raise CannotRun("its decoder is not one of its submodules")


def copy_path(model: Any, path: str) -> list[Any]:
    """Copy the model and the modules on the dotted `path`, sharing weights and other modules.

    Return the copies, the model's first.
    """
    parts = [shallow_copy(model)]
    for name in path.split("."):
        child = parts[-1]._modules[name] = shallow_copy(parts[-1]._modules[name])
        parts.append(child)
    return parts


def shallow_copy(module: Any) -> Any:
    """Return a copy of a module with the same weights and submodules, which may be replaced."""
    duplicate = copy.copy(module)
    duplicate._modules = {**module._modules}
    return duplicate
