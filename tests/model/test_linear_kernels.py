"""Each native linear operation gives the product of its reference, for each row on its own.

It accepts inputs of any shape and strides, and no operands that do not fit each other.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from tests.threads import compute_threads
from worker.backends.cpu import linear
from worker.backends.cpu.amx_linear import AmxLinear
from worker.backends.cpu.linear import (
    GROUP_WIDTHS,
    QUANTIZED_ROUNDING,
    ROUNDING,
    native_product_matches,
    native_quantized_matches,
    quantize_weights,
    use_native_linear,
)
from worker.backends.cpu.linear_layers import (
    Bf16WeightLinear,
    Int4Linear,
    Int8Linear,
    NativeInt4Linear,
    NativeInt8Linear,
    PackedLinear,
)
from worker.model.check import run_in_float32

pytestmark = pytest.mark.usefixtures("native")

# in, out: multiples of tiles, panels, column groups and row pairs, and others; deeper than the
# caches take at once, and so deep that chunks or chains are summed
SIZES = [(64, 128), (96, 40), (40, 24), (33, 101), (1, 1), (512, 768), (1100, 96), (1700, 70)]
SIZES += [(1025, 70), (2600, 64)]
# one, around a tile of AMX or a panel, around two, more than a thread multiplies at a time
ROWS = [1, 2, 3, 8, 11, 12, 13, 15, 16, 17, 25, 31, 32, 33, 48, 100, 257, 300, 600, 1100]
Product = Callable[[Tensor], Tensor]


class Kernel(NamedTuple):
    dtype: torch.dtype
    layer: Callable[[Tensor, Tensor | None], Any]
    reference: Callable[[Tensor, Tensor | None], Product]
    atol: float  # relative to the largest product
    rtol: float = 0.0


def native_packed(weight: Tensor, bias: Tensor | None) -> PackedLinear:
    """Return a packed layer. Skip the test if this CPU has no kernel for the dtype."""
    layer = PackedLinear(weight, bias)
    use_native_linear(nn.Sequential(layer))
    if not layer.native_width or layer.packed.dtype != weight.dtype:
        pytest.skip(f"no kernel for {weight.dtype}")
    return layer


def native_quantized(kind: str) -> Callable[[Tensor, Tensor | None], nn.Module]:
    def build(weight: Tensor, bias: Tensor | None) -> nn.Module:
        if not native_quantized_matches(kind, torch.bfloat16):
            pytest.skip(f"no kernel for {kind} weights on this CPU")
        return QUANTIZED[kind](weight, bias)

    return build


def amx(weight: Tensor, bias: Tensor | None) -> AmxLinear:
    try:
        torch.ops.onequeue.amx_pack(torch.zeros(1, 1))
    except RuntimeError:
        pytest.skip("this CPU has no AMX")
    return AmxLinear(PackedLinear(weight, bias))


def onednn(weight: Tensor, bias: Tensor | None) -> Product:
    return PackedLinear(weight, bias).onednn_product


def exact(weight: Tensor, bias: Tensor | None) -> Product:
    """Return the product in float64."""
    offsets = None if bias is None else bias.double()
    return lambda x: nn.functional.linear(x.double(), weight.double(), offsets)


def int8(weight: Tensor, bias: Tensor | None) -> Product:
    return Int8Linear(weight, bias)


BF16 = torch.bfloat16
QUANTIZED: dict[str, type[nn.Module]] = {"int8": NativeInt8Linear, "int4": NativeInt4Linear}
TORCHS: dict[str, Any] = {"int8": int8, "int4": Int4Linear}
KERNELS = {
    **{f"{dtype}": Kernel(dtype, native_packed, onednn, near) for dtype, near in ROUNDING.items()},
    **{
        f"{kind}, {dtype}": Kernel(dtype, native_quantized(kind), TORCHS[kind], QUANTIZED_ROUNDING)
        for kind in QUANTIZED
        for dtype in ROUNDING
    },
    "AMX": Kernel(torch.float32, amx, exact, 1e-6),
    "bfloat16 weights": Kernel(BF16, Bf16WeightLinear, exact, 1e-6, 2**-8),
}
each_kernel = pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)


def operands(kernel: Kernel, inputs: int, outputs: int, bias: bool = True) -> tuple[Any, ...]:
    torch.manual_seed(inputs + outputs)
    weight = torch.randn(outputs, inputs, dtype=kernel.dtype)
    return weight, torch.randn(outputs, dtype=kernel.dtype) if bias else None


def of_any_shape(size: int, dtype: torch.dtype = torch.float32) -> Iterator[Tensor]:
    """Yield inputs [..., size] with few and many rows and with various strides."""
    for shape in ((1, 3, size), (size,), (0, size), (2, 0, size), (2, 35, size)):
        yield torch.randn(shape, dtype=dtype)
    yield torch.randn(size, 5, dtype=dtype).T
    for rows in (6, 70):
        yield torch.randn(rows, 2 * size, dtype=dtype)[:, ::2]


def assert_close(kernel: Kernel, actual: Tensor, right: Tensor) -> None:
    assert actual.dtype == kernel.dtype
    largest = float(right.abs().max()) if right.numel() else 0.0
    torch.testing.assert_close(
        actual.double(), right.double(), rtol=kernel.rtol, atol=kernel.atol * largest
    )


@each_kernel
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_products_are_the_references(kernel: Kernel, size: tuple[int, int], bias: bool) -> None:
    weights = operands(kernel, *size, bias)
    layer, reference = kernel.layer(*weights), kernel.reference(*weights)
    for rows in ROWS:
        x = torch.randn(rows, size[0], dtype=kernel.dtype)
        assert_close(kernel, layer(x), reference(x))


def rounded_inputs(x: Tensor) -> Tensor:
    """Return rows rounded to 8 bits, with a scale for each 32 inputs; on a CPU with AMX, rows
    rounded to bfloat16."""
    if torch.cpu._is_amx_tile_supported():
        return x.bfloat16().float()
    groups = nn.functional.pad(x.float(), (0, -x.shape[1] % 32)).view(len(x), -1, 32)
    scales = groups.abs().amax(2, keepdim=True) / 127
    codes = (groups / scales.where(scales > 0, 1)).round()
    return (codes * scales).flatten(1)[:, : x.shape[1]]


@torch.inference_mode()
@pytest.mark.parametrize("kind", QUANTIZED)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_quantized_products_are_exact_but_for_rounded_inputs(
    kind: str, size: tuple[int, int]
) -> None:
    kernel = Kernel(torch.float32, native_quantized(kind), exact, 1e-5)
    layer = kernel.layer(*operands(kernel, *size))
    # codes of inputs are whole numbers: no ties that float32 rounds one way or another
    x = torch.randint(-127, 128, (77, size[0])).float()
    x[:, ::32] = 127.0
    x[3] = 0.0
    x *= 2.0 ** torch.randint(-3, 4, (77, 1))
    assert torch.equal(rounded_inputs(x), x)
    assert_close(kernel, layer(x), run_in_float32(layer, x))


@torch.inference_mode()
@pytest.mark.parametrize("kind", QUANTIZED)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 3e38, 1e-38])
def test_an_extreme_input_changes_its_row_only(kind: str, value: float) -> None:
    layer: Any = native_quantized(kind)(torch.randn(80, 70), None)
    x = torch.randn(5, 70)
    expected = layer(x)
    x[2] = 0.0
    x[2, 33] = value
    actual = layer(x)
    assert torch.equal(actual[[0, 1, 3, 4]], expected[[0, 1, 3, 4]])
    if abs(value) < 1:
        assert float(actual[2].abs().max()) < 1e-30
    elif value != 3e38:
        assert not actual[2].isfinite().any()


FAULTS: dict[str, Callable[[Any], None]] = {
    "int8, a scale": lambda layer: layer.scales[3].mul_(1.05),
    "int8, the zero": lambda layer: layer.panels.add_(1),
    "int8, columns": lambda layer: swap(layer.panels, 2, 3, 1),
    "int8, inputs": lambda layer: swap(layer.panels, 3, 0, 1),
    "int8, blocks": lambda layer: swap(layer.panels, 1, 0, 8),
    "int4, scales": lambda layer: layer.blocks[..., 1:128:2].add_(1),
    "int4, offsets": lambda layer: layer.blocks[..., 128:256].zero_(),
    "int4, columns": lambda layer: swap(layer.blocks, 2, 256, 4),
    "int4, inputs": lambda layer: swap(layer.blocks, 2, 256, 1),
    "int4, blocks": lambda layer: swap(layer.blocks, 1, 0, 1),
}


def swap(stored: Tensor, dim: int, start: int, distance: int) -> None:
    """Swap two parts of equal length along `dim`: the code, or the lines of a block."""
    one, other = (stored.narrow(dim, at, distance) for at in (start, start + distance))
    before = one.clone()
    one.copy_(other)
    other.copy_(before)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_refused_at_load(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = fault[:4]
    native, torchs = linear.QUANTIZED[kind]
    native_quantized(kind)(torch.randn(80, 70), None)

    def faulty(*weights: Any) -> Any:
        layer = native(*weights)
        FAULTS[fault](layer)
        return layer

    monkeypatch.setitem(linear.QUANTIZED, kind, (faulty, torchs))
    assert not native_quantized_matches(kind, torch.float32)


@each_kernel
@pytest.mark.parametrize("count", [1, 3, 16])
def test_a_row_is_independent_of_other_rows_and_of_the_thread_count(
    kernel: Kernel, count: int
) -> None:
    layer = kernel.layer(*operands(kernel, 1056, 200))  # oneDNN divides this depth
    x = torch.randn(1200, 1056, dtype=kernel.dtype)
    x[20] = torch.nan
    together = layer(x)
    assert together[20].isnan().all()
    assert together.isfinite().all(1).sum() == 1199
    rows = [(0, 1), (1, 9), (9, 19), (21, 32), (3, 20), (21, 70), (60, 93), (130, 400), (21, 1100)]
    with compute_threads(count):
        for first, last in rows:
            assert torch.equal(layer(x[first:last]), together[first:last])


@each_kernel
def test_any_shape_and_strides_are_accepted(kernel: Kernel) -> None:
    weights = operands(kernel, 48, 80)
    layer, reference = kernel.layer(*weights), kernel.reference(*weights)
    for x in of_any_shape(48, kernel.dtype):
        assert_close(kernel, layer(x), reference(x.contiguous()))
        assert layer(x).shape == (*x.shape[:-1], 80)
        assert layer(x).is_contiguous()


def mismatches(name: str, layer: Any, x: Tensor) -> tuple[str, list[tuple[Any, ...]]]:
    """Return an operation of 64 inputs and 128 outputs, and arguments that do not fit each
    other."""
    other = x.to(torch.float32 if x.dtype == BF16 else BF16)
    short, wrong = torch.zeros(127, dtype=x.dtype), torch.zeros(128, dtype=other.dtype)
    if name == "AMX":
        return "amx_linear", [
            (x[:, :32], layer.tiles, None, 128),
            (other, layer.tiles, None, 128),
            (x, layer.tiles, None, 129),
            (x, layer.tiles, short, 128),
            (x, layer.tiles, wrong, 128),
        ]
    if name == "bfloat16 weights":
        return "bf16_weight_linear", [
            (x[:, :62], layer.panels, layer.bias, 128),
            (other, layer.panels, layer.bias, 128),
            (x, layer.panels.float(), layer.bias, 128),
            (x, layer.panels, short, 128),
            (x, layer.panels, wrong, 128),
            (x, layer.panels, None, 161),
            (x, layer.panels.transpose(0, 1), None, 128),
        ]
    if name.startswith("int4"):
        return "int4_linear", [
            (x[:, :31], layer.blocks, None, 128),
            (x, layer.blocks[:1], None, 128),
            (x, layer.blocks, None, 64),
            (x, layer.blocks, short, 128),
            (x, layer.blocks, wrong, 128),
            (x, layer.blocks.char(), None, 128),
        ]
    return "packed_linear", [
        (x[:, :63], layer.packed, None, layer.native_width),
        (other, layer.packed, None, layer.native_width),
        (x, layer.packed, short, layer.native_width),
        (x, layer.packed, wrong, layer.native_width),
        (x, layer.packed, None, 48),
    ]


@pytest.mark.parametrize("name", [name for name in KERNELS if not name.startswith("int8")])
def test_mismatched_operands_raise(name: str) -> None:
    kernel = KERNELS[name]
    layer = kernel.layer(*operands(kernel, 64, 128))
    operation, refused = mismatches(name, layer, torch.randn(2, 64, dtype=kernel.dtype))
    for arguments in refused:
        with pytest.raises(RuntimeError, match=f"{operation} of|no kernel"):
            getattr(torch.ops.onequeue, operation)(*arguments)


# ── the layers that use them ──


def packed_with(dtype: torch.dtype) -> PackedLinear:
    return native_packed(torch.randn(128, 64, dtype=dtype), None)


@pytest.mark.parametrize("dtype", ROUNDING)
def test_weights_in_another_layout_are_left_to_onednn(dtype: torch.dtype) -> None:
    layer = packed_with(dtype)
    [other] = set(GROUP_WIDTHS) - {layer.native_width}
    assert native_product_matches(layer, layer.native_width)
    assert not native_product_matches(layer, other)
    assert not native_product_matches(layer, 16)
    use_native_linear(nn.Sequential(layer))
    assert layer.native_width not in (0, other)


def test_plain_layers_stay() -> None:
    model = nn.Sequential(nn.Linear(8, 8), packed_with(torch.float32))
    use_native_linear(model)
    assert [getattr(module, "native_width", None) is None for module in model] == [True, False]


@pytest.mark.parametrize("kind", QUANTIZED)
def test_a_cpu_that_multiplies_integers_has_the_kernel(kind: str) -> None:
    has_vnni: bool = torch.cpu._is_vnni_supported()
    assert native_quantized_matches(kind, torch.bfloat16) == has_vnni


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize(("kind", "bytes_per_weight"), [("int8", 1.1), ("int4", 0.65)])
def test_native_quantized_weights_have_no_copy(
    kind: str, bytes_per_weight: float, dtype: torch.dtype
) -> None:
    if not native_quantized_matches(kind, dtype):
        pytest.skip(f"no kernel for {kind} weights on this CPU")
    model = nn.Sequential(nn.Linear(256, 128, bias=False).to(dtype))
    quantize_weights(model, 10**9, native=True, quantization=kind)
    [layer] = model
    assert type(layer) is QUANTIZED[kind]
    assert sum(buffer.nbytes for buffer in layer.buffers()) < bytes_per_weight * 256 * 128
