"""AMX linear layers are as accurate as float32 (their products: test_linear_kernels.py).

They replace a packed layer only where they give its product.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.model.test_packed_attention import enable_native_kernels, fresh_model
from worker.backends.cpu.amx_linear import AmxLinear, use_amx_linear
from worker.backends.cpu.linear_layers import PackedLinear
from worker.engines.pipeline.packed_attention import Packing, start_native_kernels


@pytest.fixture(autouse=True)
def _needs_amx(native: None) -> None:
    try:
        torch.ops.onequeue.amx_pack(torch.zeros(1, 1))
    except RuntimeError:
        pytest.skip("this CPU has no AMX")


def packed(inputs: int, outputs: int, bias: bool = True, dtype: Any = None) -> PackedLinear:
    torch.manual_seed(inputs + outputs)
    weight = torch.randn(outputs, inputs, dtype=dtype)
    return PackedLinear(weight, torch.randn(outputs, dtype=dtype) if bias else None)


def exact(layer: PackedLinear, x: Tensor) -> Tensor:
    """Return the product in float64."""
    product = x.double() @ layer.packed.to_dense().double().T
    return product if layer.bias is None else product + layer.bias.double()


@pytest.mark.parametrize("size", [(384, 1536), (768, 768), (3072, 768)], ids=str)
@pytest.mark.parametrize("spread", [0, 8], ids=["one magnitude", "many magnitudes"])
def test_float32_is_as_accurate_as_onednns(size: tuple[int, int], spread: int) -> None:
    layer = packed(*size)
    x = torch.randn(128, size[0]) * 10 ** (spread * (torch.rand(128, size[0]) - 0.5))
    right = exact(layer, x)
    scale = x.abs().double() @ layer.packed.to_dense().abs().double().T  # of the summands
    theirs, ours = (
        (out.double() - right) / scale for out in (layer.onednn_product(x), AmxLinear(layer)(x))
    )
    assert ours.abs().max() < 2 * theirs.abs().max()
    assert ours.square().mean() < 2 * theirs.square().mean()


def test_infinite_nan_and_largest_values_give_float32s_result() -> None:
    layer = packed(70, 50)
    amx, largest = AmxLinear(layer), torch.finfo(torch.float32).max
    for number in (torch.inf, -torch.inf, torch.nan, largest, -largest):
        x = torch.randn(40, 70)
        x[3, 69] = number
        right = torch.nn.functional.linear(x, layer.packed.to_dense(), layer.bias)
        torch.testing.assert_close(amx(x), right, rtol=1e-5, atol=1e-4, equal_nan=True)


def test_tiny_values_are_less_exact() -> None:
    """A bfloat16 part below 2**-126 becomes zero."""
    layer = packed(64, 32, bias=False)
    x = torch.randn(5, 64)
    right = exact(layer, x)
    actual = AmxLinear(layer)(x * 2.0**-118).double() * 2.0**118
    torch.testing.assert_close(actual, right, rtol=0, atol=64 * 3 * 2**-8)
    assert AmxLinear(layer)(x * 2.0**-140).abs().max() < 2.0**-126


# ── replacing packed layers ──


def two_layers() -> nn.Sequential:
    return nn.Sequential(packed(64, 32), nn.ReLU(), packed(32, 8))


def test_layers_with_infinite_weights_or_without_memory_stay() -> None:
    weight = torch.randn(8, 32)
    weight[2, 3] = torch.inf
    model = nn.Sequential(*two_layers(), PackedLinear(weight, None))
    use_amx_linear(model, 10**9)
    assert [type(model[at]) for at in (2, 3)] == [AmxLinear, PackedLinear]
    model = two_layers()
    use_amx_linear(model, free_bytes=2 * (64 * 32 + 32 * 8))
    assert [type(model[at]) for at in (0, 2)] == [PackedLinear, PackedLinear]


def test_a_layer_with_a_different_product_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = AmxLinear.forward
    monkeypatch.setattr(AmxLinear, "forward", lambda self, x: forward(self, x) * 1.001)
    model = two_layers()
    use_amx_linear(model, 10**9)
    assert type(model[0]) is PackedLinear


@pytest.mark.parametrize("emulated", [False, True])
def test_bfloat16_layers_stay(emulated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.backends.cpu.linear_layers.has_bfloat16", lambda: not emulated)
    model = nn.Sequential(packed(64, 32, dtype=torch.bfloat16))
    use_amx_linear(model, 10**9)
    assert type(model[0]) is PackedLinear


@pytest.mark.parametrize("name", ["bert-mlm", "modernbert-mlm"])
def test_an_encoders_layers_are_replaced_and_its_head_stays(name: str) -> None:
    """The logits stay as close to float64's as before."""
    model, right = fresh_model(name), logits(fresh_model(name, torch.float64))
    before, packing = logits(model), Packing(model)
    start_native_kernels(model, packing, lambda: logits(model), "off")
    assert linears(model.base_model) == {PackedLinear}
    enable_native_kernels(packing)
    assert linears(model.base_model) == {AmxLinear}
    assert type(model.get_output_embeddings()) is nn.Linear
    assert (logits(model) - right).norm() < 2 * (before - right).norm()


@torch.inference_mode()
def logits(model: nn.Module) -> Tensor:
    output: Tensor = model(input_ids=torch.arange(5, 25)[None]).logits
    return output


def linears(model: nn.Module) -> set[type]:
    kinds = (nn.Linear, PackedLinear, AmxLinear)
    return {type(module) for module in model.modules() if isinstance(module, kinds)}
