"""The native linear operation gives oneDNN's products from the same weights, or is unused."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from tests.threads import compute_threads
from worker.device.device import has_bfloat16
from worker.model.cpu.linear import (
    GROUP_WIDTHS,
    ROUNDING,
    native_product_matches,
    native_quantized_matches,
    quantize_weights,
    use_native_linear,
)
from worker.model.cpu.linear_layers import (
    Int4Linear,
    Int8Linear,
    NativeInt4Linear,
    NativeInt8Linear,
    PackedLinear,
)

pytestmark = pytest.mark.usefixtures("native")

# in, out: multiples of column groups and row pairs, and others; deeper than the caches take at once
SIZES = [(64, 128), (96, 40), (40, 24), (33, 101), (512, 768), (1100, 96)]
# one, around an AMX tile, around two, more than a thread multiplies at a time
ROWS = [1, 2, 8, 15, 16, 17, 31, 32, 33, 48, 100, 257, 600, 1100]


def packed(
    inputs: int, outputs: int, dtype: torch.dtype, bias: bool = True, native: bool = True
) -> PackedLinear:
    """Return a packed layer; skip the test if this CPU has no kernel for the dtype."""
    torch.manual_seed(inputs + outputs)
    weight = torch.randn(outputs, inputs, dtype=dtype)
    layer = PackedLinear(weight, torch.randn(outputs, dtype=dtype) if bias else None)
    if native:
        use_native_linear(nn.Sequential(layer))
        if not layer.native_width or layer.packed.dtype != dtype:
            pytest.skip(f"no kernel for {dtype}")
    return layer


def of_any_shape(size: int, dtype: torch.dtype = torch.float32) -> Iterator[Tensor]:
    """Yield inputs [..., size] with few and many rows and with various strides."""
    for shape in ((1, 3, size), (size,), (0, size), (2, 0, size), (2, 35, size)):
        yield torch.randn(shape, dtype=dtype)
    yield torch.randn(size, 5, dtype=dtype).T
    for rows in (6, 70):
        yield torch.randn(rows, 2 * size, dtype=dtype)[:, ::2]


def assert_close(actual: Tensor, right: Tensor) -> None:
    largest = float(right.abs().max()) if right.numel() else 0.0
    torch.testing.assert_close(actual, right, rtol=0, atol=ROUNDING[right.dtype] * largest)


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_products_are_onednns(size: tuple[int, int], bias: bool, dtype: torch.dtype) -> None:
    layer = packed(*size, dtype, bias)
    for rows in ROWS:
        x = torch.randn(rows, size[0], dtype=dtype)
        assert_close(layer(x), layer.onednn_product(x))


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("count", [1, 3, 16])
def test_a_row_is_independent_of_other_rows_and_of_the_thread_count(
    dtype: torch.dtype, count: int
) -> None:
    layer = packed(1056, 200, dtype)  # oneDNN divides this depth
    x = torch.randn(1200, 1056, dtype=dtype)
    x[20] = torch.nan
    together = layer(x)
    assert together[20].isnan().all()
    with compute_threads(count):
        for first, last in ((0, 1), (1, 9), (9, 19), (21, 32), (3, 20), (21, 70), (21, 1100)):
            assert torch.equal(layer(x[first:last]), together[first:last])


@pytest.mark.parametrize("dtype", ROUNDING)
def test_any_shape_and_strides_are_accepted(dtype: torch.dtype) -> None:
    layer = packed(48, 80, dtype)
    for x in of_any_shape(48, dtype):
        assert_close(layer(x), layer.onednn_product(x.contiguous()))
        assert layer(x).shape == (*x.shape[:-1], 80)
        assert layer(x).is_contiguous()


@pytest.mark.parametrize("dtype", ROUNDING)
def test_weights_in_another_layout_are_left_to_onednn(dtype: torch.dtype) -> None:
    layer = packed(64, 128, dtype)
    [other] = set(GROUP_WIDTHS) - {layer.native_width}
    assert native_product_matches(layer, layer.native_width)
    assert not native_product_matches(layer, other)
    assert not native_product_matches(layer, 16)
    use_native_linear(nn.Sequential(layer))
    assert layer.native_width not in (0, other)


@pytest.mark.parametrize("dtype", ROUNDING)
def test_mismatched_operands_raise(dtype: torch.dtype) -> None:
    layer = packed(64, 128, dtype)
    product = torch.ops.onequeue.packed_linear
    x, width = torch.randn(2, 64, dtype=dtype), layer.native_width
    other = torch.float32 if dtype == torch.bfloat16 else torch.bfloat16
    for arguments in (
        (x[:, :63], layer.packed, None, width),
        (x.to(other), layer.packed, None, width),
        (x, layer.packed, torch.zeros(127, dtype=dtype), width),
        (x, layer.packed, torch.zeros(128, dtype=other), width),
        (x, layer.packed, None, 48),
    ):
        with pytest.raises(RuntimeError, match=r"packed_linear of|no kernel"):
            product(*arguments)


def test_plain_layers_stay() -> None:
    model = nn.Sequential(nn.Linear(8, 8), packed(64, 64, torch.float32))
    use_native_linear(model)
    assert [getattr(module, "native_width", None) is None for module in model] == [True, False]


# ── quantized weights ──

KINDS: dict[str, Callable[[Tensor, Tensor | None], nn.Module]] = {
    "int8": NativeInt8Linear,
    "int4": NativeInt4Linear,
}


@pytest.fixture(params=KINDS)
def quantization(request: pytest.FixtureRequest) -> str:
    if not native_quantized_matches(request.param, torch.bfloat16):
        pytest.skip(f"no kernel for {request.param} weights on this CPU")
    return str(request.param)


def by_torch(quantization: str, weight: Tensor, bias: Tensor | None) -> nn.Module:
    """Return a layer of the same weights that torch multiplies."""
    if quantization == "int8":
        return Int8Linear(weight, bias, keep_copy=False)
    return Int4Linear(weight, bias)


@pytest.mark.parametrize("kind", KINDS)
def test_a_cpu_with_bfloat16_instructions_has_the_kernel(kind: str) -> None:
    assert native_quantized_matches(kind, torch.bfloat16) == has_bfloat16()


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_quantized_products_are_torchs(
    size: tuple[int, int], bias: bool, quantization: str, dtype: torch.dtype
) -> None:
    inputs, outputs = size
    torch.manual_seed(inputs)
    weight = torch.randn(outputs, inputs, dtype=dtype)
    offsets = torch.randn(outputs, dtype=dtype) if bias else None
    native, plain = (
        KINDS[quantization](weight, offsets),
        by_torch(quantization, weight, offsets),
    )
    for rows in ROWS:
        x = torch.randn(rows, inputs, dtype=dtype)
        right = plain(x).float()
        largest = float(right.abs().max())
        assert native(x).dtype == dtype
        torch.testing.assert_close(native(x).float(), right, rtol=0, atol=1e-2 * largest)
    for x in of_any_shape(inputs, dtype):
        assert native(x).shape == (*x.shape[:-1], outputs)


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("count", [1, 3, 16])
def test_a_quantized_row_is_independent_of_other_rows_and_of_the_thread_count(
    count: int, quantization: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    layer = KINDS[quantization](torch.randn(200, 1056, dtype=dtype), None)
    x = torch.randn(1200, 1056, dtype=dtype)
    with compute_threads(1):
        together = layer(x)
    with compute_threads(3):
        for start in range(0, 1200 - count, 97):
            assert torch.equal(layer(x[start : start + count]), together[start : start + count])


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
    assert type(layer) is KINDS[kind]
    assert sum(buffer.nbytes for buffer in layer.buffers()) < bytes_per_weight * 256 * 128


def test_mismatched_int4_operands_raise() -> None:
    if not native_quantized_matches("int4", torch.bfloat16):
        pytest.skip("no kernel for int4 weights on this CPU")
    layer, x = NativeInt4Linear(torch.randn(128, 64), None), torch.randn(2, 64)
    for arguments in (
        (x[:, :31], layer.blocks, None, 128),
        (x, layer.blocks[:1], None, 128),
        (x, layer.blocks, None, 64),
        (x, layer.blocks, torch.zeros(127), 128),
        (x, layer.blocks, torch.zeros(128, dtype=torch.bfloat16), 128),
        (x, layer.blocks.char(), None, 128),
    ):
        with pytest.raises(RuntimeError, match="int4_linear of"):
            torch.ops.onequeue.int4_linear(*arguments)
