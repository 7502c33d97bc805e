"""Bf16WeightLinear gives the exact product, rounded once (test_linear_kernels.py).

It replaces packed layers where a CPU emulates bfloat16; the fixture pretends that this one does.
"""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests import tiny
from tests.unit.test_fused_linear import Fan, parts
from worker.backends.cpu.linear import pack_weights, quantize_weights, unpack_weights
from worker.backends.cpu.linear_layers import Bf16WeightLinear, Int8Linear, PackedLinear
from worker.backends.native_attention import (
    library_path,
    load_native_ops,
    try_load_native_ops,
)
from worker.model.language_model import GeneratorOptions, load_language_model

pytestmark = pytest.mark.usefixtures("native")


needs_onednn_bfloat16 = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="oneDNN has no bfloat16 on this CPU"
)


@pytest.fixture(autouse=True)
def _emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.backends.cpu.linear_layers.has_bfloat16", lambda: False)


def plain(inputs: int, outputs: int, bias: bool = True) -> nn.Linear:
    torch.manual_seed(inputs + outputs)
    return nn.Linear(inputs, outputs, bias=bias).bfloat16().requires_grad_(False)


def converted(layer: nn.Linear) -> Bf16WeightLinear:
    return Bf16WeightLinear(layer.weight, layer.bias)


def test_infinite_and_nan_weights_affect_only_their_columns() -> None:
    layer = plain(64, 70)
    layer.weight[3, 5], layer.weight[69, 0] = torch.inf, torch.nan
    actual = converted(layer)(torch.ones(2, 64).bfloat16())
    assert actual[:, 3].isinf().all()
    assert actual[:, 69].isnan().all()
    assert actual.isfinite().sum() == 2 * 68


# ── replacing layers ──


def kinds(model: nn.Module) -> list[type]:
    linear = (nn.Linear, PackedLinear, Bf16WeightLinear)
    return [type(module) for module in model.modules() if isinstance(module, linear)]


def test_layers_of_an_emulating_cpu_keep_their_weights() -> None:
    model = Fan().bfloat16()
    before = copy.deepcopy(model)
    x = torch.randn(1, 5, 48).bfloat16()
    pack_weights(model, 10**9, lambda: model(x))
    assert set(kinds(model)) == {PackedLinear}, "the operation is not loaded"
    unpack_weights(model)
    pack_weights(model, 10**9, lambda: model(x), bf16_weights=True)
    assert set(kinds(model)) == {Bf16WeightLinear}
    torch.testing.assert_close(model(x), before(x), atol=1e-2, rtol=2**-6)
    unpack_weights(model)
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, before.state_dict()[name])


@needs_onednn_bfloat16
def test_loaded_operations_are_used_without_packing_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """No memory is needed for float32 weights."""
    model = Fan().bfloat16()
    x = torch.randn(1, 5, 48).bfloat16()
    pack_weights(model, 0, lambda: model(x), bf16_weights=True)
    assert set(kinds(model)) == {Bf16WeightLinear}
    assert parts(model) == ["one", "two"]
    monkeypatch.setattr("worker.backends.cpu.linear_layers.has_bfloat16", lambda: True)
    model = Fan().bfloat16()
    pack_weights(model, 0, lambda: model(x), bf16_weights=True)
    assert set(kinds(model)) == {PackedLinear}, "native bfloat16 stays with oneDNN"


@pytest.mark.parametrize("float_first", [True, False])
def test_layers_of_another_dtype_are_packed_beside_them(float_first: bool) -> None:
    model = nn.Sequential(plain(48, 48), plain(48, 48))
    model[not float_first].float()

    def run() -> None:
        layers: Any = model
        for layer in layers:
            layer(torch.ones(2, 48, dtype=layer.weight.dtype))

    pack_weights(model, 10**9, run, bf16_weights=True)
    expected: list[type] = [PackedLinear, Bf16WeightLinear]
    assert kinds(model) == (expected if float_first else expected[::-1])


@pytest.mark.parametrize("is_built", [True, False])
def test_the_operation_is_built_before_weights_are_laid_out(
    is_built: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = GeneratorOptions(str(tiny.folder("llama-lm")), device="cpu", dtype="bfloat16")
    language = load_language_model(options)
    builds: list[bool] = []

    def loaded(build: bool) -> bool:
        builds.append(build)
        return is_built

    monkeypatch.setattr("worker.model.language_model.try_load_native_ops", loaded)
    language.pack_weights("none", lambda: None)
    assert not builds, "native operations were not requested"
    language = load_language_model(options)
    language.pack_weights("none", lambda: None, native=True)
    assert builds == [True]
    assert set(kinds(language.model)) == {Bf16WeightLinear if is_built else PackedLinear}


def test_a_library_that_does_not_load_is_logged_and_unused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    load_native_ops.cache_clear()
    assert not try_load_native_ops(build=False)
    library_path(build=False).write_bytes(b"half")
    assert not try_load_native_ops(build=False)
    assert "no native operations" in caplog.messages[-1]
    monkeypatch.undo()
    assert try_load_native_ops(build=False)


def test_the_copy_of_int8_weights_is_bfloat16_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.backends.cpu.linear.native_quantized_matches", lambda *_: False)
    model = nn.Sequential(plain(48, 80))
    x = torch.randn(20, 48).bfloat16()
    quantize_weights(model, 10**9, native=True)
    layer: Any = model[0]
    assert isinstance(layer, Int8Linear)
    assert isinstance(layer.dequantized, Bf16WeightLinear)
    other = nn.Sequential(plain(48, 80))
    quantize_weights(other, 10**9)
    torch.testing.assert_close(model(x), other(x))
