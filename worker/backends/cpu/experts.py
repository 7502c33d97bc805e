"""Mixtures of experts on a CPU: an implementation for transformers' ExpertsInterface.

The rows of a step are sorted by expert, and only the experts that are hit are read, each as a pair
of linear layers in the layout of the CPU's kernels (linear_layers.py). transformers keeps the
weights of all experts of a layer in two 3-D parameters, which other linear layers' packing does not
reach.

A row's result is the sum over its experts in the order of the router, whatever other rows there
are.
"""

import itertools
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from worker.backends.cpu.linear_layers import MakeLayer
from worker.backends.cpu.torch_only import is_torch_only

NAME = "onequeue"
# Maps rows that are sorted by expert, and their number for each, to the experts' outputs.
Products = Callable[[Tensor, Tensor], Tensor]

_numbers = itertools.count()
_packed: weakref.WeakValueDictionary[int, "PackedExperts"] = weakref.WeakValueDictionary()


class PackedExperts(nn.Module):
    """The layers of all experts of one module; `up` computes gate and up where there are both.

    They are no submodules: a model may have ten thousand.
    """

    def __init__(self, experts: Any, make_layer: MakeLayer) -> None:
        super().__init__()
        self.number = next(_numbers)
        self.before: Any = None  # the implementation that this one replaces
        self.up_name = "gate_up_proj" if experts.has_gate else "up_proj"
        self._experts = weakref.ref(experts)
        self.up = self._take(experts, self.up_name, make_layer)
        self.down = self._take(experts, "down_proj", make_layer)
        # the product of all experts at once, of `up` and of `down`; None: one after another
        self.products: tuple[Products, Products] | None = None
        _packed[self.number] = self

    @staticmethod
    def _take(experts: Any, name: str, make_layer: MakeLayer) -> list[Any]:
        """Replace a parameter by a layer for each expert."""
        weights = getattr(experts, name).detach()
        biases = getattr(experts, f"{name}_bias").detach() if experts.has_bias else None
        layers = []
        for number, weight in enumerate(weights):
            matrix = weight.T.contiguous() if experts.is_transposed else weight
            layers.append(make_layer(matrix, None if biases is None else biases[number]))
        delattr(experts, name)
        return layers

    def restore(self) -> None:
        self.products = None
        experts: Any = self._experts()
        for name, layers in ((self.up_name, self.up), ("down_proj", self.down)):
            weights = [layer.unpacked()[0] for layer in layers]
            layers.clear()
            stacked = torch.stack([w.T if experts.is_transposed else w for w in weights])
            setattr(experts, name, nn.Parameter(stacked.contiguous(), requires_grad=False))

    def run(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Return [S, H] for rows hidden [S, H] with experts `index` and their `weights` [S, K]."""
        experts: Any = self._experts()
        choices = index.shape[-1]
        order = index.reshape(-1).argsort(stable=True)
        counts = index.reshape(-1).bincount(minlength=len(self.up))
        products = None if is_torch_only() else self.products
        up, down = products or (partial(_products, self.up), partial(_products, self.down))
        out = up(hidden[order // choices], counts)
        out = experts._apply_gate(out) if experts.has_gate else experts.act_fn(out)
        out = down(out, counts)
        if experts.has_post_expert_norm:
            out = experts.post_expert_norm(out)
        out = out * weights.reshape(-1, 1)[order]
        unsorted = torch.empty_like(out).index_copy_(0, order, out)
        return unsorted.view(*index.shape, -1).sum(1).to(hidden.dtype)


def _products(layers: list[Any], rows: Tensor, counts: Tensor) -> Tensor:
    """Return each layer's product of its part of the rows, of so many."""
    sizes = counts.tolist()
    parts = torch.split(rows, sizes)
    hit = [number for number, size in enumerate(sizes) if size]
    return torch.cat([layers[number](parts[number]) for number in hit])


# ── the implementation ──


def run_experts(hidden: Tensor, index: Tensor, weights: Tensor, number: int) -> Tensor:
    return _packed[number].run(hidden, index, weights)


# opaque to the compiler: which experts are hit is known when it runs
_experts_op = torch.library.custom_op("onequeue::experts", run_experts, mutates_args=())


@_experts_op.register_fake
def _(hidden: Any, index: Any, weights: Any, number: int) -> Any:
    return torch.empty_like(hidden)


def experts_forward(
    module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Implement transformers' experts interface."""
    packed = getattr(module, "onequeue_packed", None)
    if packed is None:  # of a class that keeps its weights in another way
        out: Tensor = type(module).forward.__wrapped__(
            module, hidden_states, top_k_index, top_k_weights
        )
        return out
    run = torch.ops.onequeue.experts if torch.compiler.is_dynamo_compiling() else run_experts
    result: Tensor = run(hidden_states, top_k_index, top_k_weights, packed.number)
    return result


ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)


# ── a model's experts ──


def pack_experts(model: Any, make_layer: MakeLayer) -> int:
    """Pack the experts of all layers, one layer after another, and use this implementation. Return
    how many layers have experts."""
    found = list(experts_of(model))
    if not found:
        return 0
    before = model.get_experts_implementation()
    model.set_experts_implementation(NAME)
    if any(module.config._experts_implementation != NAME for module in found):
        model.set_experts_implementation(before)
        return 0
    for module in found:
        module.onequeue_packed = PackedExperts(module, make_layer)
        module.onequeue_packed.before = before
    return len(found)


def unpack_experts(model: Any) -> None:
    """Put the parameters of all experts back, and their implementation."""
    for packed in packed_experts(model):
        packed.restore()
        model.set_experts_implementation(packed.before)
        experts: Any = packed._experts()
        del experts.onequeue_packed


def packed_experts(model: nn.Module) -> list[PackedExperts]:
    return [module for module in model.modules() if isinstance(module, PackedExperts)]


def experts_of(model: nn.Module) -> Iterator[Any]:
    """Yield the modules whose forward transformers dispatches, with their weights in 3-D
    parameters of floating-point numbers."""
    for module in model.modules():
        if not all(hasattr(module, name) for name in ("has_gate", "has_bias", "is_transposed")):
            continue
        name = "gate_up_proj" if module.has_gate else "up_proj"
        weights = [getattr(module, one, None) for one in (name, "down_proj")]
        if all(isinstance(w, nn.Parameter) and w.dim() == 3 for w in weights):
            yield module


def expert_weights(model: nn.Module) -> int:
    """Return the number of weights of all experts that can be packed."""
    return sum(
        parameter.numel()
        for module in experts_of(model)
        for name, parameter in module.named_parameters(recurse=False)
        if not name.endswith("_bias")
    )
