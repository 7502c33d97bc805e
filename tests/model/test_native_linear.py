"""The native linear layer gives oneDNN's products from the same packed weights, or is not used."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from worker.model.cpu.linear import (
    MADE_ROWS,
    ROUNDING,
    WIDTHS,
    PackedLinear,
    native_product_matches,
    use_native_linear,
    warm_up_onednn,
)

pytestmark = pytest.mark.usefixtures("native")

# in, out: what groups of columns and pairs of rows divide, and what they don't
SIZES = [(64, 128), (96, 40), (40, 24), (33, 101), (512, 768)]
# alone, around a tile of rows, as many as are few, more, with and without rows filled up
ROWS = [1, 2, 8, 15, 16, 17, 31, 32, 33, 48, 100, 257, 600]


def packed(
    inputs: int, outputs: int, dtype: torch.dtype, bias: bool = True, native: bool = True
) -> PackedLinear:
    """Skips where this CPU has no kernel for the type."""
    torch.manual_seed(inputs + outputs)
    weight = torch.randn(outputs, inputs, dtype=dtype)
    made = PackedLinear(weight, torch.randn(outputs, dtype=dtype) if bias else None)
    if native:
        use_native_linear(nn.Sequential(made))
        if not made.native_width or made.packed.dtype != dtype:
            pytest.skip(f"no kernel for {dtype}")
    return made


def of_any_shape(size: int, dtype: torch.dtype = torch.float32) -> Iterator[Tensor]:
    """[..., size], few rows and many, of all strides."""
    for shape in ((1, 3, size), (size,), (0, size), (2, 0, size), (2, 35, size)):
        yield torch.randn(shape, dtype=dtype)
    yield torch.randn(size, 5, dtype=dtype).T
    for rows in (6, 70):
        yield torch.randn(rows, 2 * size, dtype=dtype)[:, ::2]


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def close(got: Tensor, right: Tensor) -> None:
    largest = float(right.abs().max()) if right.numel() else 0.0
    torch.testing.assert_close(got, right, rtol=0, atol=ROUNDING[right.dtype] * largest)


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_products_are_those_of_the_packed_weights(
    size: tuple[int, int], bias: bool, dtype: torch.dtype
) -> None:
    layer = packed(*size, dtype, bias)
    for rows in ROWS:
        x = torch.randn(rows, size[0], dtype=dtype)
        close(layer(x), layer.packed_product(x))


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("count", [1, 3, 16])
def test_a_row_does_not_depend_on_the_others_nor_on_the_threads(
    dtype: torch.dtype, count: int
) -> None:
    layer = packed(96, 200, dtype)
    x = torch.randn(32, 96, dtype=dtype)
    x[20] = torch.nan
    together = layer(x)
    assert together[20].isnan().all()
    with threads(count):
        for first, last in ((0, 1), (1, 9), (9, 19), (21, 32), (3, 20)):
            assert torch.equal(layer(x[first:last]), together[first:last])


@pytest.mark.parametrize("dtype", ROUNDING)
def test_any_shape_and_strides_are_taken(dtype: torch.dtype) -> None:
    layer = packed(48, 80, dtype)
    for x in of_any_shape(48, dtype):
        close(layer(x), layer.packed_product(x.contiguous()))
        assert layer(x).shape == (*x.shape[:-1], 80)
        assert layer(x).is_contiguous()


def rows_given_to_onednn(run: Callable[[], object]) -> set[int]:
    with torch.profiler.profile(record_shapes=True) as profile:
        run()
    found = [e.input_shapes for e in profile.events() if e.name == "mkldnn::_linear_pointwise"]
    return {shapes[0][0] for shapes in found}


@pytest.mark.parametrize("dtype", ROUNDING)
def test_onednn_sees_few_numbers_of_rows_and_those_of_usual_prompts_beforehand(
    dtype: torch.dtype,
) -> None:
    layer = packed(64, 128, dtype)
    given = dict[int, int]()
    for rows in range(33, 600):
        [given[rows]] = rows_given_to_onednn(partial(layer, torch.randn(rows, 64, dtype=dtype)))
    assert all(rows <= seen < rows * 9 / 8 + 16 for rows, seen in given.items())
    assert len(set(given.values())) < 32
    made = rows_given_to_onednn(partial(warm_up_onednn, nn.Sequential(layer)))
    assert {given[rows] for rows in range(33, MADE_ROWS + 1)} <= made


@pytest.mark.parametrize("dtype", ROUNDING)
def test_weights_that_lie_otherwise_are_left_to_onednn(dtype: torch.dtype) -> None:
    layer = packed(64, 128, dtype)
    [other] = set(WIDTHS) - {layer.native_width}
    assert native_product_matches(layer, layer.native_width)
    assert not native_product_matches(layer, other)
    assert not native_product_matches(layer, 16)
    use_native_linear(nn.Sequential(layer))
    assert layer.native_width not in (0, other)


@pytest.mark.parametrize("dtype", ROUNDING)
def test_what_does_not_fit_raises(dtype: torch.dtype) -> None:
    layer = packed(64, 128, dtype)
    product = torch.ops.onequeue.linear
    x, width = torch.randn(2, 64, dtype=dtype), layer.native_width
    other = torch.float32 if dtype == torch.bfloat16 else torch.bfloat16
    for arguments in (
        (x[:, :63], layer.packed, None, width),
        (x.to(other), layer.packed, None, width),
        (x, layer.packed, torch.zeros(127, dtype=dtype), width),
        (x, layer.packed, torch.zeros(128, dtype=other), width),
        (x, layer.packed, None, 48),
    ):
        with pytest.raises(RuntimeError, match=r"a product of|no such kernel"):
            product(*arguments)


def test_layers_of_other_weights_are_left_alone() -> None:
    model = nn.Sequential(nn.Linear(8, 8), packed(64, 64, torch.float32))
    use_native_linear(model)
    assert [getattr(each, "native_width", None) is None for each in model] == [True, False]
