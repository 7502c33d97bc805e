"""Functions that modules call directly instead of a layer: products with weights of their own, as
routers and experts of mixtures do, and activation functions.

torch rounds a few rows otherwise than many. Such modules get copies of their forwards that call a
packed layer, or products of MIN_ROWS rows at least where there are many matrices, so a row does not
depend on the others. The compiler takes their own forwards.

Activations run in whole blocks. torch divides the elements of a tensor between threads. A thread
computes the elements beyond its last whole block of vectors with scalar functions, which may round
differently. The number of rows decides which elements those are.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.activations import ACT2CLS
from transformers.utils import deprecation

from worker.backends.cpu.linear_layers import MakeLayer
from worker.backends.cpu.torch_only import EagerForward, is_torch_only

OWN_LAYER = "onequeue_linear"  # the packed layer's name in its module
MAX_WEIGHTS = 1 << 23  # of a module: the packed layer is a second copy
BLOCK = 32  # elements that torch computes together
MIN_ROWS = 4  # of a product
GRAIN = 32768  # at::internal::GRAIN_SIZE: fewer elements run in one thread
BLOCK_BYTES = 128  # of a loop's step: two vectors of AVX-512
_kinds: Any = ACT2CLS.values()  # not annotated
KINDS = tuple({kind[0] if isinstance(kind, tuple) else kind for kind in _kinds})
ACTIVATIONS = ("sigmoid", "softplus", "silu", "gelu", "tanh")  # of torch or torch.nn.functional


def align_activations(model: nn.Module) -> None:
    """Let the model's eager activation functions run on whole blocks alone."""
    for module in model.modules():
        if isinstance(module, KINDS) and "forward" not in vars(module):
            module.forward = EagerForward(module, partial(in_blocks, module.forward))


def in_blocks(activation: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return the activation of x [..., W]."""
    width, block = x.shape[-1], BLOCK_BYTES // x.dtype.itemsize
    threads = min(torch.get_num_threads(), -(-x.numel() // GRAIN))
    if width % block == 0 and x.numel() % (block * max(threads, 1)) == 0:
        # some functions round otherwise where x is not contiguous, as a slice of several rows
        return activation(x.contiguous())
    rows = pad(x.reshape(-1, width), (0, -width % block))
    parts: tuple[Tensor, ...] = torch.split(rows, max(1, GRAIN // rows.shape[1] - 1))
    return torch.cat([activation(part) for part in parts])[:, :width].reshape(x.shape)


def _by_blocks(activation: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return in_blocks(lambda part: activation(part, *args, **kwargs), x)

    return run


def _changed(base: ModuleType, **changed: Any) -> ModuleType:
    """Return a copy of a Python module with some other attributes."""
    copied = ModuleType(base.__name__)
    vars(copied).update({**vars(base), **changed})
    return copied


def _of_some_rows(product: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the product of x [..., R, in], computed with MIN_ROWS rows at least."""

    def run(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        rows = x.shape[-2] if x.dim() > 1 else MIN_ROWS
        padded = pad(x, (0, 0, 0, max(0, MIN_ROWS - rows)))
        out = product(padded, *args, **kwargs)
        return out if rows >= MIN_ROWS else out[..., :rows, :].contiguous()

    return run


linear = _of_some_rows(nn.functional.linear)


def replace_functions(model: nn.Module, make_layer: MakeLayer) -> None:
    """Replace the functions that modules call directly. `make_layer` packs a module's own weight
    on its first call; the model may be running meanwhile."""
    for module in list(model.modules()):
        forward, names = _forward(module), names_in_forward(module)
        is_plain = not hasattr(forward, "__wrapped__") and "forward" not in vars(module)
        if not is_plain or type(module).__module__.startswith("torch."):
            continue
        layers = [child for child in module.children() if isinstance(child, nn.Linear)]
        own: list[Tensor] = [p for p in module.parameters(recurse=False) if p.dim() == 2]
        own += [layer.weight for layer in layers]
        calls_linear = "linear" in names or isinstance(module, nn.Linear)
        if calls_linear and len(own) == 1 and own[0].numel() <= MAX_WEIGHTS:
            product = _OwnLinear(module, own[0], make_layer)
            if isinstance(module, nn.Linear):
                _use_in_super(module, product)
            run = partial(_in_blocks_of_rows, _copied(module, product), len(own[0]))
            module.forward = EagerForward(module, run)
        elif not {"linear", "bmm", *ACTIVATIONS}.isdisjoint(names):
            run = _copied(module, linear)
            module.forward = EagerForward(module, run)


def _forward(module: nn.Module) -> Any:
    """Return the forward of the module's class, without the wrapper that renames old arguments."""
    forward: Any = type(module).forward
    while getattr(forward, "__globals__", {}).get("__name__") == deprecation.__name__:
        forward = forward.__wrapped__
    return forward


def names_in_forward(module: nn.Module) -> tuple[str, ...]:
    """Return the names of functions and attributes that the forward of the module's class uses."""
    return getattr(getattr(_forward(module), "__code__", None), "co_names", ())


class _LinearBase(nn.Linear):
    """A base class, before nn.Linear, of classes that are derived from it."""

    own_linear: Callable[..., Tensor]

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_dynamo_compiling() or is_torch_only():
            return super().forward(x)
        return self.own_linear(x, self.weight, self.bias)


def _use_in_super(module: nn.Linear, linear: "_OwnLinear") -> None:
    """Let `super().forward` in a class that is derived from nn.Linear call `linear`."""
    kind = type(module)
    module.own_linear = linear  # type: ignore[assignment]  # no module
    module.__class__ = type(kind.__name__, (kind, _LinearBase), {"__module__": kind.__module__})


class _OwnLinear:
    """torch.nn.functional.linear in the forward of a module with one matrix."""

    def __init__(self, module: nn.Module, own: Tensor, make_layer: MakeLayer) -> None:
        self.module, self.own, self.make_layer = module, own, make_layer
        self.is_new = True

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if self.is_new:
            self.is_new = False
            self._pack(weight, bias)
        layer: Any = getattr(self.module, OWN_LAYER, None)
        if layer is None or x.dtype != layer.weight.dtype:
            return linear(x, weight, bias)
        out: Tensor = layer(x)
        return out

    def _pack(self, weight: Tensor, bias: Tensor | None) -> None:
        """Pack the module's own weight, as it is or widened, with its own bias."""
        has_own_bias = bias is None or any(bias is p for p in self.module.parameters(recurse=False))
        if has_own_bias and torch.equal(weight, self.own.to(weight.dtype)):
            self.module.add_module(OWN_LAYER, self.make_layer(weight, bias))


def _copied(module: nn.Module, product: Any) -> Any:
    """Return the module's forward with these functions."""
    changed = [
        {name: _by_blocks(vars(base)[name]) for name in ACTIVATIONS if name in vars(base)}
        for base in (nn.functional, torch)
    ]
    functional = _changed(nn.functional, linear=product, **changed[0])
    networks = _changed(nn, functional=functional)
    replaced = {
        nn.functional: functional,
        nn: networks,
        torch: _changed(torch, nn=networks, bmm=_of_some_rows(torch.bmm), **changed[1]),
    }
    forward = _forward(module)
    modules = {
        name: replaced[value]
        for name, value in forward.__globals__.items()
        if name in forward.__code__.co_names and isinstance(value, ModuleType) and value in replaced
    }
    return copied_method(module, forward, modules)


def copied_method(module: nn.Module, forward: Any, replaced: Mapping[str, Any]) -> Any:
    """Return a copy of a forward, with other globals, as a method of the module."""
    copied = FunctionType(
        forward.__code__, {**forward.__globals__, **replaced}, forward.__name__,
        forward.__defaults__, forward.__closure__,
    )  # fmt: skip
    copied.__kwdefaults__ = forward.__kwdefaults__
    return MethodType(copied, module)


def _in_blocks_of_rows(forward: Any, width: int, *args: Any, **kwargs: Any) -> Any:
    """Run a router of `width` experts on rows [T, H] or [1, T, H], filled up to whole blocks of its
    scores [T, width], if it returns a tensor of rows, or several [T, ...]."""
    hidden = args[0] if len(args) == 1 and not kwargs else None
    if not isinstance(hidden, Tensor):
        return forward(*args, **kwargs)
    rows = hidden.numel() // hidden.shape[-1]
    missing = -rows % (BLOCK // math.gcd(BLOCK, width))
    if not missing or hidden.shape[-2] != rows:
        return forward(hidden)
    outputs = forward(pad(hidden, (0, 0, 0, missing)))
    if isinstance(outputs, Tensor) and outputs.shape[:-1] == (*hidden.shape[:-2], rows + missing):
        return outputs[..., :rows, :]
    if isinstance(outputs, tuple) and all(len(out) == rows + missing for out in outputs):
        return tuple(out[:rows] for out in outputs)
    return forward(hidden)
