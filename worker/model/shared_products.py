"""Which linear layers are called on one input (queries, keys and values; gate and up), so that they
can be one product (cpu_linear.py): seen in a forward, not told by names.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


def find_shared(model: nn.Module, run: Callable[[], object]) -> list[list[str]]:
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
