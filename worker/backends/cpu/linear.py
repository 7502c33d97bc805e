"""Replaces a model's linear layers by those of linear_layers.py, and chooses the native products.

Layers are replaced one by one, so the model exists once in memory, plus one layer.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from worker.backends.cpu.experts import (
    PackedExperts,
    Products,
    expert_weights,
    pack_experts,
    packed_experts,
    unpack_experts,
)
from worker.backends.cpu.functional import MIN_ROWS, names_in_forward, replace_functions
from worker.backends.cpu.fused_linear import FusedSlice, find_shared_inputs, fuse_linears
from worker.backends.cpu.head_linear import HeadLinear, PackedHeads
from worker.backends.cpu.linear_layers import (
    INT4_BYTES,
    INT8_DEPTH,
    Bf16WeightLinear,
    Int4Linear,
    Int8Linear,
    LinearLayer,
    NativeInt4Linear,
    NativeInt8Linear,
    PackedLinear,
    emulates_dtype,
    packed_dtype,
    plain_linear,
    unquantized_linear,
)
from worker.device.large_pages import use_large_pages
from worker.device.self_check import compare

log = logging.getLogger("onequeue.linear")

Layer = TypeVar("Layer", bound=nn.Module)

# Layers by native operations, and by torch's.
QUANTIZED: dict[str, tuple[Any, Any]] = {
    "int8": (NativeInt8Linear, Int8Linear),
    "int4": (NativeInt4Linear, Int4Linear),
}
# Share of the free memory that a second copy of the weights may take.
MAX_COPY_SHARE = 0.5
# Largest difference of two products, relative to the largest value.
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
# The same for the native product of quantized weights, whose inputs may be rounded to 8 bits.
QUANTIZED_ROUNDING = 1.5e-2
# Row counts to compare products with: one, some, more than one and than two AMX tiles.
COMPARED_ROWS = (1, 7, 18, 77)
# The same for products with plain weights; oneDNN's change at 16, 32, 64 and 512.
STACKED_ROWS = (MIN_ROWS, 7, 18, 33, 77, 600)
# Columns per group in which oneDNN may have packed the weights.
GROUP_WIDTHS = (32, 64)


def pack_weights(
    model: nn.Module,
    free_bytes: int,
    check: Callable[[], object] = lambda: None,
    fuse: bool = True,
    bf16_weights: bool = False,
) -> None:
    """Replace all linear layers by packed ones; a weight tied to an embedding is copied.

    Layers stay as they are if that takes too much memory, or if `check`, which runs the model,
    raises afterwards; both are logged. `fuse`: layers called on one input become one product, which
    pays where rows are few. `bf16_weights`: bfloat16 that would be emulated goes to
    Bf16WeightLinear; its operation must be loaded.
    """

    packed = partial(unquantized_linear, bf16_weights=bf16_weights)
    use_linear_layers(model)
    numbers, dtype = _linear_weights(model)
    # bytes that the packed weights take more than the plain ones
    extra = 0 if bf16_weights else numbers * (packed_dtype(dtype).itemsize - dtype.itemsize)
    if extra > MAX_COPY_SHARE * free_bytes:
        log.warning("bfloat16 is emulated: float32 weights would take %.1f GB more", extra / 1e9)
        return
    if extra:
        log.info("bfloat16 weights are kept as float32, which takes %.3f GB more", extra / 1e9)
    try:
        if pack_experts(model, packed):
            check()
    except Exception as error:
        unpack_experts(model)
        log.warning("experts stay as they are: %r", error)
    try:
        fuse_linears(model, find_shared_inputs(model, check) if fuse else (), packed)
        _replace(model, nn.Linear, lambda plain: packed(plain.weight, plain.bias))
        _use_large_pages(model)
        check()
    except Exception as error:  # a model that reads weights without calling their layer
        unpack_weights(model)
        is_slow = emulates_dtype(dtype)
        slow = "this CPU emulates bfloat16: DTYPE=float32 is faster here; " if is_slow else ""
        log.warning("%sweights stay as they are: %r", slow, error)


@torch.inference_mode()
def use_linear_layers(model: nn.Module) -> None:
    """Replace GPT-2's layers, linear ones with a transposed weight [in, out], by nn.Linear, and
    those of classes that are derived from nn.Linear and give its product."""
    _replace(model, Conv1D, lambda layer: plain_linear(layer.weight.detach().T, layer.bias))
    kinds = {type(module) for module in model.modules() if isinstance(module, nn.Linear)}
    for kind in kinds:
        if not kind.__module__.startswith("torch."):  # whose attention reads the weight
            _replace(model, kind, _plain_if_same)


def _plain_if_same(layer: nn.Linear) -> nn.Linear:
    plain = plain_linear(layer.weight.detach(), layer.bias)
    return plain if products_match(plain, layer, layer.in_features, layer.weight.dtype) else layer


def unpack_weights(model: nn.Module) -> None:
    """Put plain linear layers back in place of fused and packed ones, and experts."""
    unpack_experts(model)
    _replace(model, FusedSlice, _unpacked_slice)
    _replace(model, PackedLinear, lambda layer: plain_linear(*layer.unpacked()))
    _replace(model, Bf16WeightLinear, lambda layer: plain_linear(*layer.unpacked()))


def _unpacked_slice(part: FusedSlice) -> nn.Linear:
    layer = part.fused.layer
    weight, bias = (layer.weight, layer.bias) if type(layer) is nn.Linear else layer.unpacked()
    rows = slice(*part.fused.columns[part.index])
    return plain_linear(weight[rows].clone(), bias[rows].clone() if part.has_bias else None)


def quantize_weights(
    model: nn.Module,
    free_bytes: int,
    check: Callable[[], object] = lambda: None,
    native: bool = False,
    quantization: str = "int8",
) -> None:
    """Replace all linear layers by NativeInt8Linear or NativeInt4Linear if `native` and this CPU
    has its kernel, else by Int4Linear or Int8Linear, whose copy for large batches is kept if it
    fits. The output head is int8 in both cases: most of int4's error in the logits would be its.

    `check` runs the model, which shows the layers that share an input. `native`: the operations
    are loaded.
    """
    use_linear_layers(model)
    numbers, dtype = _linear_weights(model)
    copy_bytes = numbers * packed_dtype(dtype).itemsize
    copied = partial(unquantized_linear, bf16_weights=native)
    native = native and native_quantized_matches(quantization, dtype)
    fits = copy_bytes <= MAX_COPY_SHARE * free_bytes
    keep_copy = quantization == "int8" and not native and fits
    stored = 0.0  # bytes

    def quantized(weight: Tensor, bias: Tensor | None, kind: str = quantization) -> nn.Module:
        nonlocal stored
        stored += weight.numel() * (1 if kind == "int8" else INT4_BYTES)
        if keep_copy:
            return Int8Linear(weight, bias, copied)
        layer: nn.Module = QUANTIZED[kind][not native](weight, bias)
        return layer

    groups = find_shared_inputs(model, check)
    if (name := _output_head(model)) and not any(name in group for group in groups):
        head: Any = model.get_submodule(name)
        model.set_submodule(name, quantized(head.weight, head.bias, "int8"))
        del head
    pack_experts(model, quantized)
    if native:
        for experts in packed_experts(model):
            use_native_experts(experts)
    fuse_linears(model, groups, quantized)
    _replace(model, nn.Linear, lambda plain: quantized(plain.weight, plain.bias))
    _use_large_pages(model)
    log.info(
        "%s weights_gb=%.3f copy_gb=%.3f native=%s%s",
        quantization,
        stored / 1e9,
        copy_bytes / 1e9 if keep_copy else 0.0,
        native,
        " the dequantized copy serves larger batches" if keep_copy else "",
    )


def _output_head(model: nn.Module) -> str | None:
    """Return the name of a model's output head; None if it is no plain linear layer, or has been
    rounded to 4 bits before."""
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    if type(head) is not nn.Linear or hasattr(head.weight, "int4_grid"):
        return None
    return next((name for name, module in model.named_modules() if module is head), None)


@torch.inference_mode()
def native_quantized_matches(quantization: str, dtype: torch.dtype) -> bool:
    """Return whether the native operation runs here, and gives the products of torch's."""
    generator = torch.Generator().manual_seed(0)
    weight, bias = (
        torch.randn(shape, generator=generator).to(dtype) for shape in ((80, 70), (80,))
    )
    one, other = (kind(weight, bias) for kind in QUANTIZED[quantization])
    return products_match(one, other, 70, dtype, QUANTIZED_ROUNDING)


@torch.inference_mode()
def use_native_linear(model: nn.Module) -> None:
    """Use the native operation in each packed layer for which it gives oneDNN's product; the model
    may be running meanwhile. The operation must be loaded (backends/native_attention.py)."""
    layers = [module for module in model.modules() if isinstance(module, PackedLinear)]
    for layer in layers:
        _use_native_product(layer)
    for experts in packed_experts(model):
        for alike in (experts.up, experts.down):
            _use_native_products([layer for layer in alike if isinstance(layer, PackedLinear)])
        use_native_experts(experts)
    _replace(model, HeadLinear, _packed_heads)
    using = sum(layer.native_width > 0 for layer in layers)
    if layers:
        log.info("native products layers=%d of %d", using, len(layers))


def _use_native_product(layer: PackedLinear) -> PackedLinear:
    layer.native_width = next((w for w in GROUP_WIDTHS if native_product_matches(layer, w)), 0)
    return layer


def _use_native_products(alike: Sequence[PackedLinear]) -> None:
    """Use the native operation in layers of one shape: one tells for all."""
    width = _use_native_product(alike[0]).native_width if alike else 0
    for layer in alike:
        layer.native_width = width


def _packed_heads(heads: HeadLinear) -> nn.Module:
    """Return the products with rows that do not depend on others, if there is a kernel for them."""
    if emulates_dtype(heads.weight.dtype):
        return PackedHeads([Bf16WeightLinear(weight, None) for weight in heads.weight], None)
    layers = [PackedLinear(weight, None) for weight in heads.weight]
    _use_native_products(layers)
    return PackedHeads(layers, _native_products(layers)) if layers[0].native_width else heads


def use_native_functions(model: nn.Module) -> None:
    """Use the native operation also where modules multiply with a weight of their own."""
    replace_functions(model, lambda weight, bias: _use_native_product(PackedLinear(weight, bias)))


@torch.inference_mode()
def stacked_products_differ(model: nn.Module) -> bool:
    """Return whether a row's product with a matrix, of those that modules keep together in one
    parameter, depends on the number of rows, from MIN_ROWS on."""
    stacks = {
        (parameter.shape, parameter.dtype, "bmm" in names_in_forward(module)): parameter
        for module in model.modules()
        if not type(module).__module__.startswith("torch.")
        for parameter in module.parameters(recurse=False)
        if parameter.dim() == 3 and len(parameter) > 1
    }
    generator = torch.Generator().manual_seed(0)
    for (shape, dtype, is_bmm), matrices in stacks.items():
        multiply, weight = (torch.bmm, matrices) if is_bmm else (nn.functional.linear, matrices[0])
        sizes = (shape[0], STACKED_ROWS[-1], shape[1]) if is_bmm else (STACKED_ROWS[-1], shape[2])
        x = torch.randn(sizes, generator=generator).to(dtype)
        whole = multiply(x, weight)
        for rows in STACKED_ROWS[:-1]:
            if not torch.equal(multiply(x[..., :rows, :], weight), whole[..., :rows, :]):
                return True
    return False


def use_native_experts(experts: PackedExperts) -> None:
    """Multiply by all experts at once, where that gives each one's products."""
    up, down = (_native_products(layers) for layers in (experts.up, experts.down))
    if up and down:
        experts.products = up, down


def _native_products(layers: Sequence[Any]) -> Products | None:
    """Return the products of layers with rows sorted by layer; None if there is no kernel for them
    or they have a bias."""
    first = layers[0]
    kind, columns, inputs = type(first), first.out_features, first.in_features
    if any(type(layer) is not kind or layer.bias is not None for layer in layers):
        return None
    width, scales = 0, None
    if kind is PackedLinear and first.native_width:
        width = first.native_width
        step = 64 // first.dtype.itemsize
        addresses = torch.tensor([torch.ops.mkldnn.data_ptr(layer.packed) for layer in layers])
    elif kind is NativeInt8Linear:
        step = INT8_DEPTH
        addresses = torch.tensor([layer.panels.data_ptr() for layer in layers])
        scales = torch.tensor([layer.scales.data_ptr() for layer in layers])
    else:
        return None
    padded = -(-inputs // step) * step

    def products(rows: Tensor, counts: Tensor) -> Tensor:
        out: Tensor = torch.ops.onequeue.experts_linear(
            rows, counts, addresses, scales, padded, columns, width
        )
        return out

    rows = torch.randn(9, inputs, generator=torch.Generator().manual_seed(0)).to(first.dtype)
    counts = torch.zeros(len(layers), dtype=torch.long)
    counts[0], counts[-1] = 2, counts[-1] + 7
    expected = torch.cat([first(rows[:2]), layers[-1](rows[2:])]) if len(layers) > 1 else None
    matches = expected is not None and torch.equal(products(rows, counts), expected)
    return products if matches else None


def native_product_matches(layer: PackedLinear, width: int) -> bool:
    """Return whether the native product agrees with oneDNN's if `width` columns form a group.

    oneDNN does not document its layout, so a width is accepted by its products.
    """

    def native_product(x: Tensor) -> Tensor:
        out: Tensor = torch.ops.onequeue.packed_linear(x, layer.packed, layer.bias, width)
        return out

    inputs, dtype = layer.in_features, layer.packed.dtype
    return products_match(native_product, layer.onednn_product, inputs, dtype)


def products_match(
    one: Callable[[Tensor], Tensor], other: Callable[[Tensor], Tensor], inputs: int,
    dtype: torch.dtype, rounding: float | None = None,
) -> bool:  # fmt: skip
    """Return whether both functions agree on random rows [R, inputs], up to `rounding`; None: that
    of the dtype."""
    generator = torch.Generator().manual_seed(0)
    try:
        for rows in COMPARED_ROWS:
            x = torch.randn(rows, inputs, generator=generator).to(dtype)
            compare(one(x), other(x), ROUNDING[dtype] if rounding is None else rounding)
    except Exception:  # no kernel for this CPU, another number of outputs, or another layout
        return False
    return True


def _use_large_pages(model: nn.Module) -> None:
    experts = (layer for packed in packed_experts(model) for layer in (*packed.up, *packed.down))
    layers = (layer for layer in (*model.modules(), *experts) if isinstance(layer, LinearLayer))
    use_large_pages((span for layer in layers for span in layer.memory()), collapse=True)


def _linear_weights(model: nn.Module) -> tuple[int, torch.dtype]:
    """Return the number of weights in all linear layers and experts, and their dtype."""
    weights = [module.weight for module in model.modules() if type(module) is nn.Linear]
    dtype = weights[0].dtype if weights else torch.float32
    return sum(weight.numel() for weight in weights) + expert_weights(model), dtype


def _replace(
    model: nn.Module, kind: type[Layer], replacement: Callable[[Layer], nn.Module]
) -> None:
    """Replace each module of exactly this class, one after another."""
    names = [  # a list of the modules would keep all of them in memory
        (parent, name)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is kind
    ]
    for parent, name in names:
        layer: Any = parent.get_submodule(name)
        setattr(parent, name, replacement(layer))
