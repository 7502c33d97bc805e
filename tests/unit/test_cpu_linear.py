"""Packed, int8 and int4 linear layers give the products of the plain layers."""

import logging
import mmap
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from worker.backends.cpu.linear import pack_weights, quantize_weights, unpack_weights
from worker.backends.cpu.linear_layers import (
    INT8_ROWS,
    Int4Grid,
    Int4Linear,
    Int8Linear,
    MakeLayer,
    PackedLinear,
    _quantize_int4,
    packed_dtype,
    unquantized_linear,
)
from worker.device.large_pages import LARGE_PAGE_BYTES, MADV_COLLAPSE
from worker.model.attention.kv_cache import KVCache, LayerShape


def layer(bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(48, 80, bias=bias).requires_grad_(False)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 48), (1, 7, 48), (300, 48), (1, 0, 48)])
def test_packed_weights_give_the_same_products(bias: bool, shape: tuple[int, ...]) -> None:
    plain = layer(bias)
    packed = PackedLinear(plain.weight, plain.bias)
    x = torch.randn(shape)
    torch.testing.assert_close(packed(x), plain(x), atol=1e-5, rtol=1e-5)
    assert packed(x).shape == plain(x).shape


@pytest.mark.parametrize("change", [pack_weights, quantize_weights])
def test_each_original_is_freed_before_the_next_is_converted(
    change: Callable[[nn.Module, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(*(layer() for _ in range(5)))
    originals = [weakref.ref(layer.weight) for layer in model]
    alive: list[int] = []
    for kind in (PackedLinear, Int8Linear):

        def init(layer: Any, *arguments: Any, original: Any = kind.__init__) -> None:
            alive.append(sum(ref() is not None for ref in originals))
            original(layer, *arguments)

        monkeypatch.setattr(kind, "__init__", init)
    change(model, 0)
    assert alive == [5, 4, 3, 2, 1]


@pytest.mark.parametrize("bias", [True, False])
def test_emulated_bfloat16_gives_bfloat16_products(
    bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exact product, rounded once."""
    monkeypatch.setattr("worker.backends.cpu.linear_layers.has_bfloat16", lambda: False)
    plain = layer(bias).bfloat16()
    model = nn.Sequential(plain)
    pack_weights(model, free_bytes=10**9)
    packed = model[0]
    assert isinstance(packed, PackedLinear)
    assert packed.packed.dtype == torch.float32
    x = torch.randn(30, 48).bfloat16()
    exact = nn.functional.linear(
        x.double(), plain.weight.double(), plain.bias.double() if bias else None
    )
    assert packed(x).dtype == torch.bfloat16
    torch.testing.assert_close(packed(x), exact.bfloat16(), atol=1e-6, rtol=2**-7)
    unpack_weights(model)
    back = model[0]
    assert isinstance(back, nn.Linear)
    assert back.weight.dtype == torch.bfloat16
    assert torch.equal(back.weight, plain.weight)
    assert not bias or torch.equal(back.bias, plain.bias)


def test_weights_are_not_widened_without_enough_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("worker.backends.cpu.linear_layers.has_bfloat16", lambda: False)
    model = nn.Sequential(layer().bfloat16())
    pack_weights(model, free_bytes=2 * 48 * 80)
    assert type(model[0]) is nn.Linear
    assert "bfloat16 is emulated" in caplog.records[0].message
    pack_weights(model.float(), free_bytes=0)
    assert isinstance(model[0], PackedLinear), "float32 takes no more than it did"


def test_native_bfloat16_weights_stay_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.backends.cpu.linear_layers.has_bfloat16", lambda: True)
    assert packed_dtype(torch.bfloat16) == torch.bfloat16


def test_classes_that_are_derived_from_linear_are_packed_if_they_give_its_product() -> None:
    class Same(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight.T + self.bias

    class Other(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).softmax(-1)

    model = nn.Sequential(Same(4, 4), Other(4, 4)).requires_grad_(False)
    x = torch.randn(3, 4)
    exact = model(x)
    pack_weights(model, free_bytes=10**9)
    assert type(model[0]) is PackedLinear
    assert type(model[1]) is Other
    torch.testing.assert_close(model(x), exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make_copy", [unquantized_linear, None])
def test_int8_products_are_close_for_few_and_many_rows(
    dtype: torch.dtype, make_copy: MakeLayer | None
) -> None:
    plain = layer().to(dtype)
    quantized = Int8Linear(plain.weight, plain.bias, make_copy)
    x = torch.randn(1, 2 * INT8_ROWS, 48).to(dtype)
    exact, ours = plain(x).float(), quantized(x).float()
    assert ours.dtype == torch.float32
    assert quantized(x).dtype == dtype
    assert float((ours - exact).norm() / exact.norm()) < 0.02
    few = torch.cat([quantized(x[:, n : n + 1]) for n in range(x.shape[1])], 1).float()
    assert float((few - ours).norm() / ours.norm()) < 5e-3  # the same weights, other roundings


@pytest.mark.parametrize("inputs", [1, 33, 70])
@pytest.mark.parametrize("make_copy", [unquantized_linear, None])
def test_int8_products_of_any_depth_are_close(inputs: int, make_copy: MakeLayer | None) -> None:
    """torch's kernel reads beyond the rows of other depths."""
    torch.manual_seed(0)
    weight = torch.randn(80, inputs)
    quantized = Int8Linear(weight, None, make_copy)
    for rows in (1, 2 * INT8_ROWS):
        x = torch.randn(rows, inputs)
        exact = x @ weight.T
        assert float((quantized(x) - exact).norm() / exact.norm()) < 0.02


def test_a_copy_is_kept_only_with_enough_memory_and_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "onequeue.linear")
    for free, is_kept in ((0, False), (10**9, True)):
        model = nn.Sequential(layer())
        quantize_weights(model, free)
        quantized = model[0]
        assert isinstance(quantized, Int8Linear)
        assert (quantized.dequantized is not None) is is_kept
        assert ("the dequantized copy serves" in caplog.records[-1].message) is is_kept
    assert "weights_gb=0.000" in caplog.records[0].message


@pytest.mark.parametrize("kind", [Int8Linear, Int4Linear])
def test_a_row_of_zeros_is_quantized_to_zeros(kind: type[Int8Linear] | type[Int4Linear]) -> None:
    assert not kind(torch.zeros(16, 32), None)(torch.randn(3, 32)).any()


# ── int4 weights ──


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [(1, 80), (33, 80), (70, 5), (256, 4200)], ids=str)
def test_int4_products_of_any_size_are_close(size: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    inputs, outputs = size
    plain = nn.Linear(inputs, outputs).to(dtype).requires_grad_(False)
    quantized = Int4Linear(plain.weight, plain.bias)
    for shape in ((inputs,), (1, inputs), (2, 30, inputs)):
        x = torch.randn(shape).to(dtype)
        exact, ours = plain(x).float(), quantized(x)
        assert (ours.dtype, ours.shape) == (dtype, exact.shape)
        assert float((ours.float() - exact).norm() / exact.norm()) < 0.15


def test_an_int4_row_is_independent_of_other_rows() -> None:
    torch.manual_seed(0)
    quantized, x = Int4Linear(torch.randn(100, 200), None), torch.randn(130, 200)
    together = quantized(x)
    for rows in range(1, 130):
        assert torch.equal(quantized(x[:rows]), together[:rows])


def test_int4_codes_are_within_half_a_step_of_the_weights() -> None:
    torch.manual_seed(0)
    weight = torch.randn(64, 96) + 3  # an offset that symmetric codes would waste
    codes, scale, offset = _quantize_int4(weight)
    back = (codes.float() - 8).view(64, 3, 32) * scale[..., None] + offset[..., None]
    step = scale.float()[..., None]
    error = (back - weight.view(64, 3, 32)).abs()
    assert codes.max() == 15
    assert bool((error <= 0.5 * step + 16 * 2**-8 * step + 2**-8 * offset[..., None].abs()).all())


class WithHead(nn.Sequential):
    def get_output_embeddings(self) -> nn.Module:
        return self[-1]


@pytest.mark.parametrize(("is_rounded", "head"), [(False, Int8Linear), (True, Int4Linear)])
def test_the_output_head_is_int8_unless_it_has_int4_codes(
    is_rounded: bool, head: type[nn.Module]
) -> None:
    model, copy = WithHead(layer(), layer()), WithHead(layer(), layer())
    if is_rounded:
        grid: Any = Int4Grid(*(torch.ones(80, 2).bfloat16() for _ in range(2)))
        last: Any = model[-1]
        last.weight.int4_grid = grid
    quantize_weights(model, 10**9, quantization="int4")
    quantize_weights(copy, 10**9, quantization="int8")
    assert [type(module) for module in model] == [Int4Linear, head]
    assert [type(module) for module in copy] == [Int8Linear, Int8Linear]
    if not is_rounded:
        x = torch.randn(2, 48)
        assert torch.equal(model[-1](x), copy[-1](x))


# ── packed weights lie in large pages where the system provides them ──


def large_page_bytes() -> int:
    """Return the bytes of this process that lie in large pages."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("AnonHugePages:"))


def has_large_pages() -> bool:
    """Return whether the system backs an anonymous mapping by large pages."""
    if sys.platform != "linux":
        return False
    with mmap.mmap(-1, 4 * LARGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE) as memory:
        memory.write(b"\1" * len(memory))
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
            memory.madvise(MADV_COLLAPSE)
        except OSError:
            return False
        return True


def test_weights_smaller_than_a_page_lie_in_large_pages() -> None:
    if not has_large_pages():
        pytest.skip("the system provides no large pages")
    layers: list[Any] = [nn.Linear(512, 512, bias=False) for _ in range(40)]  # 1 MB each
    weights = [layer.weight.detach().clone() for layer in layers]
    model = nn.Sequential(*layers)
    before = large_page_bytes()
    pack_weights(model, free_bytes=1 << 40)
    assert large_page_bytes() - before >= 20 * weights[0].nbytes
    packed: Any = model
    assert all(torch.equal(x.unpacked()[0], y) for x, y in zip(packed, weights, strict=True))


def test_a_kv_cache_takes_large_pages_when_it_is_written() -> None:
    if not has_large_pages():
        pytest.skip("the system provides no large pages")
    shape = LayerShape(heads=4, key_size=64, value_size=64)
    before = large_page_bytes()
    cache = KVCache([shape], 1 << 15, torch.float32, torch.device("cpu"))  # 512 MB, by mmap
    assert large_page_bytes() == before
    written = cache.keys[0][:2048].zero_()
    assert large_page_bytes() - before >= written.nbytes - 2 * LARGE_PAGE_BYTES
