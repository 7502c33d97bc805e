"""Linear layers that are called on one input (queries, keys and values; gate and up) become one
product: seen in a forward, not told by names.

A wide product costs less than several narrow ones, each of which is started, and waits for its
threads, anew. The first layer that is called computes all, the others take their columns. In a
compiled graph each asks for the whole, and the compiler merges what is the same.
"""

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


def find_shared_inputs(model: nn.Module, run: Callable[[], object]) -> list[list[str]]:
    """Names of linear layers that `run`, which runs the model, calls one after another on one
    tensor, each time that it calls any of them."""
    calls = _Calls()
    with _hooked(model, calls):
        run()
    runs = {tuple(run) for run in calls.runs}
    seen = [name for run in runs for name in run]
    groups = [run for run in runs if len(run) > 1 and all(seen.count(name) == 1 for name in run)]
    return [list(run) for run in sorted(groups) if _alike(model, run)]


class _Calls:
    """`runs`: names of the layers that were called on one tensor, one after another."""

    def __init__(self) -> None:
        self.runs: list[list[str]] = []
        self.x: Tensor | None = None
        self.values: Tensor | None = None  # of x, which might be changed in place

    def note(self, name: str, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        x = arguments[0] if arguments else None
        if self._is_last(x) and name not in self.runs[-1]:
            self.runs[-1].append(name)
        else:
            self.runs.append([name])
            self.x, self.values = x, None if x is None else x.clone()

    def _is_last(self, x: Tensor | None) -> bool:
        if x is None or x is not self.x or self.values is None:
            return False
        return torch.equal(x, self.values)


@contextmanager
def _hooked(model: nn.Module, calls: _Calls) -> Iterator[None]:
    hooks = [
        module.register_forward_pre_hook(functools.partial(calls.note, name))
        for name, module in model.named_modules()
        if type(module) is nn.Linear
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _alike(model: nn.Module, names: Sequence[str]) -> bool:
    layers: list[Any] = [model.get_submodule(name) for name in names]
    return len({(each.weight.dtype, each.weight.device, each.in_features) for each in layers}) == 1


# ── one product in their place ──


def share(
    model: nn.Module, groups: Sequence[Sequence[str]], make: Callable[..., nn.Module]
) -> None:
    """The layers of each group become parts of what is made of their weights and biases."""
    for names in groups:
        layers: list[Any] = [model.get_submodule(name) for name in names]
        sizes = [each.out_features for each in layers]
        biased = [each.bias is not None for each in layers]
        weight, bias = _joined(layers)
        layers.clear()
        for name in names:
            model.set_submodule(name, nn.Identity())  # the original goes before it is there thrice
        shared = FusedLinear(make(weight, bias), sizes)
        for place, name in enumerate(names):
            model.set_submodule(name, FusedSlice(shared, place, biased[place]))


def _joined(layers: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """Weight [sum of out, in] and bias of all; a missing one is zeros beside those of others."""
    weight = torch.cat([each.weight.detach() for each in layers])
    if all(each.bias is None for each in layers):
        return weight, None
    biases = [weight.new_zeros(e.out_features) if e.bias is None else e.bias for e in layers]
    return weight, torch.cat([each.detach() for each in biases])


class FusedOutput(NamedTuple):
    """A product between the calls of its parts."""

    x: weakref.ref[Tensor]
    version: int
    place: int  # of the part that is to be called next
    made: Tensor


class FusedLinear(nn.Module):
    """`layer` makes the columns of all parts, x [..., in] → [..., sum of `sizes`]."""

    def __init__(self, layer: nn.Module, sizes: Sequence[int]) -> None:
        super().__init__()
        self.layer: Any = layer
        self.columns = list(pairwise(accumulate(sizes, initial=0)))
        self.kept: FusedOutput | None = None

    def part(self, x: Tensor, place: int) -> Tensor:
        """[..., its size]. Parts that are called in turn on one tensor share what the first made,
        which is kept no longer than that. Other threads may do the same."""
        if torch.compiler.is_compiling():
            made: Tensor = self.layer(x)
        else:
            made = self._made(x, place)
        start, end = self.columns[place]
        return made[..., start:end].contiguous()  # as the layer's own

    def _made(self, x: Tensor, place: int) -> Tensor:
        kept, version = self.kept, _version(x)
        if kept and kept.x() is x and kept[1:3] == (version, place):
            made = kept.made
        else:
            made = self.layer(x)
        more = place + 1 < len(self.columns)
        self.kept = FusedOutput(weakref.ref(x), version, place + 1, made) if more else None
        return made


class FusedSlice(nn.Module):
    """x [..., in] → [..., out], as the linear layer in whose place it is."""

    def __init__(self, shared: FusedLinear, place: int, biased: bool) -> None:
        super().__init__()
        self.shared = shared
        self.place = place
        self.biased = biased

    def forward(self, x: Tensor) -> Tensor:
        return self.shared.part(x, self.place)


def _version(x: Tensor) -> int:
    """Changes when its values are changed in place, where that is known."""
    return 0 if x.is_inference() else x._version
