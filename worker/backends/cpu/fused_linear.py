"""Fuse linear layers that are called on one input (query, key and value; gate and up) into one.

One wide product costs less than several narrow ones, each of which starts and joins all threads,
or a kernel that leaves most of a GPU idle. Which layers share an input is observed in a forward,
not derived from names. The first slice that is called computes the whole product, the others take
their columns of it, also while a graph is traced.
"""

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

# ── finding the groups ──


class PlainLinear(nn.Linear):
    """A linear layer that is neither packed nor fused, as the model reads its weight too."""


def find_shared_inputs(model: nn.Module, run: Callable[[], object]) -> list[list[str]]:
    """Return groups of names of linear layers that can be fused. Layers whose weight is read by
    others become PlainLinear.

    `run` runs the model. A group's layers are called one after another on one tensor, every time
    that any of them is called.
    """
    recorder = _CallRecorder()
    with _observed(model, recorder):
        run()
    for name in recorder.read:
        model.get_submodule(name).__class__ = PlainLinear
    runs = {tuple(run) for run in recorder.runs}
    names = [name for run in runs for name in run]
    groups = [
        run
        for run in runs
        if len(run) > 1 and all(names.count(name) == 1 for name in run)
        if recorder.read.isdisjoint(run)
    ]
    return [list(run) for run in sorted(groups) if _have_same_inputs(model, run)]


class _CallRecorder:
    """`runs`: names of the layers that were called one after another on one tensor. `read`: of
    those whose weight went to another function than their own product."""

    def __init__(self) -> None:
        self.runs: list[list[str]] = []
        self.read: set[str] = set()
        self.called = ""  # its product comes next
        self.x: Tensor | None = None
        self.values: Tensor | None = None  # copy of x, which may be changed in place

    def record(self, name: str, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        self.called = name
        x = arguments[0] if arguments else None
        if self._is_last_input(x) and name not in self.runs[-1]:
            self.runs[-1].append(name)
        else:
            self.runs.append([name])
            self.x, self.values = x, None if x is None else x.clone()

    def record_use(self, name: str, function: Callable[..., Any]) -> None:
        if function is nn.functional.linear and name == self.called:
            self.called = ""
        elif function not in (Tensor.dtype.__get__, Tensor.device.__get__):  # type: ignore[attr-defined]
            self.read.add(name)

    def _is_last_input(self, x: Tensor | None) -> bool:
        if x is None or x is not self.x or self.values is None:
            return False
        return torch.equal(x, self.values)


class _ObservedWeight(Tensor):
    """A weight that reports each function that gets it."""

    report: Callable[[Callable[..., Any]], None]

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        for x in args:
            if isinstance(x, cls):
                x.report(function)
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))


@contextmanager
def _observed(model: nn.Module, recorder: _CallRecorder) -> Iterator[None]:
    """Let linear layers report their calls, and their weights the functions that get them."""
    layers = {name: m for name, m in model.named_modules() if type(m) is nn.Linear}
    weights = {name: layer.weight for name, layer in layers.items()}
    try:
        with ExitStack() as hooks:
            for name, layer in layers.items():
                before = functools.partial(recorder.record, name)
                hooks.callback(layer.register_forward_pre_hook(before).remove)
                observed: Any = layer.weight.detach().as_subclass(_ObservedWeight)
                observed.report = functools.partial(recorder.record_use, name)
                layer._parameters["weight"] = observed
            yield
    finally:
        for name, layer in layers.items():
            layer.weight = weights[name]


def _have_same_inputs(model: nn.Module, names: Sequence[str]) -> bool:
    layers: list[Any] = [model.get_submodule(name) for name in names]
    return len({(x.weight.dtype, x.weight.device, x.in_features) for x in layers}) == 1


# ── the fused product ──


def fuse_linears(
    model: nn.Module,
    groups: Sequence[Sequence[str]],
    make_layer: Callable[[Tensor, Tensor | None], nn.Module],
    contiguous: bool = True,
) -> None:
    """Replace the layers of each group by slices of `make_layer(weight, bias)` of all of them.

    `contiguous`: slices are copied, to be contiguous as the original layers' outputs.
    """
    for names in groups:
        layers: list[Any] = [model.get_submodule(name) for name in names]
        sizes = [layer.out_features for layer in layers]
        has_bias = [layer.bias is not None for layer in layers]
        weight, bias = _concatenated(layers)
        layers.clear()
        for name in names:
            model.set_submodule(name, nn.Identity())  # free the originals before packing
        fused = FusedLinear(make_layer(weight, bias), sizes, contiguous)
        for index, name in enumerate(names):
            model.set_submodule(name, FusedSlice(fused, index, has_bias[index]))


def _concatenated(layers: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """Return the weight [sum of out, in] and bias of all layers; a missing bias becomes zeros."""
    weight: Any = torch.cat([layer.weight.detach() for layer in layers])
    grids: list[Any] = [getattr(layer.weight, "int4_grid", None) for layer in layers]
    if None not in grids:  # of linear_layers.py
        weight.int4_grid = type(grids[0])(*map(torch.cat, zip(*grids, strict=True)))
    if all(layer.bias is None for layer in layers):
        return weight, None
    biases = [weight.new_zeros(x.out_features) if x.bias is None else x.bias for x in layers]
    return weight, torch.cat([bias.detach() for bias in biases])


class FusedLinear(nn.Module):
    """One layer for several: `layer` maps x [..., in] to [..., sum of `sizes`]."""

    def __init__(self, layer: nn.Module, sizes: Sequence[int], contiguous: bool = True) -> None:
        super().__init__()
        self.layer: Any = layer
        self.contiguous = contiguous
        self.columns = list(pairwise(accumulate(sizes, initial=0)))
        # the input and product of the first slice, until the last one is called
        self.output: tuple[weakref.ref[Tensor], Tensor] | None = None
        self.traced: tuple[Tensor, Tensor] | None = None  # input and product, within a trace

    def slice(self, x: Tensor, index: int) -> Tensor:
        """Return slice `index` of the product, [..., its size].

        Slices called in order on one tensor share one product, which is dropped with the last.
        Calls from several threads are safe: each reads `output` once.
        """
        is_tracing = torch.compiler.is_dynamo_compiling()
        out = self._traced_product(x, index) if is_tracing else self._product(x, index)
        start, end = self.columns[index]
        columns = out[..., start:end]
        return columns.contiguous() if self.contiguous else columns

    def _traced_product(self, x: Tensor, index: int) -> Tensor:
        traced = self.traced
        out: Tensor = traced[1] if traced and traced[0] is x else self.layer(x)
        self.traced = None if index + 1 == len(self.columns) else (x, out)
        return out

    def _product(self, x: Tensor, index: int) -> Tensor:
        output = self.output
        out: Tensor = output[1] if index and output and output[0]() is x else self.layer(x)
        self.output = None if index + 1 == len(self.columns) else (weakref.ref(x), out)
        return out


class FusedSlice(nn.Module):
    """x [..., in] → [..., out]: stands in for one of the fused linear layers."""

    def __init__(self, fused: FusedLinear, index: int, has_bias: bool) -> None:
        super().__init__()
        self.fused = fused
        self.index = index
        self.has_bias = has_bias

    @property
    def weight(self) -> SimpleNamespace:
        return weight_stand_in(self.fused.layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.fused.slice(x, self.index)


def weight_stand_in(weight: Tensor) -> SimpleNamespace:
    """Return an object with the attributes of `layer.weight` that some models read."""
    return SimpleNamespace(dtype=weight.dtype, device=weight.device)
