"""Weights of bfloat16 that are made float32 as they are multiplied: the exact product, rounded
once, a row whatever the rows beside it; used where a CPU would emulate bfloat16."""

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests import tiny
from tests.model.test_native_linear import of_any_shape, threads
from tests.unit.test_fused_linear import Fan, parts
from worker.model import language_model
from worker.model.attention.native import _library, build_native_ops, native_ops_loaded
from worker.model.cpu.linear import (
    Bf16WeightLinear,
    Int8Linear,
    PackedLinear,
    pack_weights,
    quantize_weights,
    unpack_weights,
    use_bf16_weights,
)
from worker.model.language_model import GeneratorOptions, load_language_model

pytestmark = pytest.mark.usefixtures("native")

# in, out: what groups of columns and pairs of rows divide, and what they don't; summed in chunks
SIZES = [(64, 128), (96, 40), (40, 24), (33, 101), (1, 1), (1025, 70), (2600, 64)]
ROWS = [1, 2, 3, 11, 12, 13, 25, 100, 300]


@pytest.fixture(autouse=True)
def _emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.model.cpu.linear.has_bfloat16", lambda: False)


def plain(inputs: int, outputs: int, bias: bool = True) -> nn.Linear:
    torch.manual_seed(inputs + outputs)
    return nn.Linear(inputs, outputs, bias=bias).bfloat16().requires_grad_(False)


def widening(given: nn.Linear) -> Bf16WeightLinear:
    return Bf16WeightLinear(given.weight, given.bias)


def exact(layer: nn.Linear, x: Tensor) -> Tensor:
    bias = None if layer.bias is None else layer.bias.double()
    return nn.functional.linear(x.double(), layer.weight.double(), bias)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_products_are_exact_but_for_one_rounding(size: tuple[int, int], bias: bool) -> None:
    layer = plain(*size, bias)
    made = widening(layer)
    for rows in ROWS:
        x = torch.randn(rows, size[0]).bfloat16()
        right = exact(layer, x)
        torch.testing.assert_close(made(x).double(), right, atol=1e-6, rtol=2**-8)


@pytest.mark.parametrize("count", [1, 3, 16])
def test_a_row_does_not_depend_on_the_others_nor_on_the_threads(count: int) -> None:
    made = widening(plain(1100, 200))
    x = torch.randn(400, 1100).bfloat16()
    x[20] = torch.nan
    together = made(x)
    assert together[20].isnan().all()
    assert together.isfinite().all(1).sum() == 399
    with threads(count):
        for first, last in ((0, 1), (1, 9), (9, 19), (21, 32), (130, 400), (399, 400)):
            assert torch.equal(made(x[first:last]), together[first:last])


def test_numbers_that_are_not_finite_stay_in_their_columns() -> None:
    layer = plain(64, 70)
    layer.weight[3, 5], layer.weight[69, 0] = torch.inf, torch.nan
    got = widening(layer)(torch.ones(2, 64).bfloat16())
    assert got[:, 3].isinf().all()
    assert got[:, 69].isnan().all()
    assert got.isfinite().sum() == 2 * 68


def test_any_shape_and_strides_are_taken() -> None:
    layer = plain(48, 80)
    made = widening(layer)
    for x in of_any_shape(48):
        got = made(x.bfloat16())
        assert got.shape == (*x.shape[:-1], 80)
        assert got.is_contiguous()
        right = exact(layer, x.bfloat16())
        torch.testing.assert_close(got.double(), right, atol=1e-6, rtol=2**-8)


def test_what_does_not_fit_raises() -> None:
    made = widening(plain(64, 70))
    product = torch.ops.onequeue.bf16_weight_linear
    x = torch.randn(2, 64).bfloat16()
    for arguments in (
        (x[:, :62], made.panels, made.bias, 70),
        (x.float(), made.panels, made.bias, 70),
        (x, made.panels.float(), made.bias, 70),
        (x, made.panels, torch.zeros(70).bfloat16(), 70),
        (x, made.panels, torch.zeros(69), 70),
        (x, made.panels, None, 97),
        (x, made.panels.transpose(0, 1), None, 70),
    ):
        with pytest.raises(RuntimeError, match="a product of"):
            product(*arguments)


# ── in place of layers ──


def kinds(model: nn.Module) -> list[type]:
    known = (nn.Linear, PackedLinear, Bf16WeightLinear)
    return [type(each) for each in model.modules() if isinstance(each, known)]


def test_packed_layers_of_a_cpu_that_emulates_give_way(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "onequeue.linear")
    model = Fan().bfloat16()
    before = copy.deepcopy(model)
    x = torch.randn(1, 5, 48).bfloat16()
    pack_weights(model, 10**9, lambda: model(x))
    assert set(kinds(model)) == {PackedLinear}
    use_bf16_weights(model)
    assert set(kinds(model)) == {Bf16WeightLinear}
    assert parts(model) == ["one", "two"]
    assert "layers=2" in caplog.messages[-1]
    torch.testing.assert_close(model(x), before(x), atol=1e-2, rtol=2**-6)
    unpack_weights(model)
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, before.state_dict()[name])


def test_they_are_used_at_once_where_they_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then no room is needed for float32 weights."""
    model = Fan().bfloat16()
    x = torch.randn(1, 5, 48).bfloat16()
    pack_weights(model, 0, lambda: model(x), widens=True)
    assert set(kinds(model)) == {Bf16WeightLinear}
    assert parts(model) == ["one", "two"]
    monkeypatch.setattr("worker.model.cpu.linear.has_bfloat16", lambda: True)
    model = Fan().bfloat16()
    pack_weights(model, 0, lambda: model(x), widens=True)
    assert set(kinds(model)) == {PackedLinear}, "where bfloat16 is multiplied, oneDNN does"


def test_layers_that_were_put_back_stay() -> None:
    """Their model uses their weights without calling them."""
    model = nn.Sequential(plain(48, 80), plain(80, 3))

    def looks() -> None:
        weight: Any = model[1].weight
        weight.sum()

    for widens in (False, True):
        pack_weights(model, 10**9, looks, widens=widens)
        assert kinds(model) == [nn.Linear] * 2
        use_bf16_weights(model)
        assert kinds(model) == [nn.Linear] * 2


@pytest.mark.parametrize("float_first", [True, False])
def test_layers_of_another_dtype_are_packed_beside_them(float_first: bool) -> None:
    model = nn.Sequential(plain(48, 48), plain(48, 48))
    model[not float_first].float()

    def run() -> None:
        layers: Any = model
        for each in layers:
            each(torch.ones(2, 48, dtype=each.weight.dtype))

    pack_weights(model, 10**9, run, widens=True)
    expected: list[type] = [PackedLinear, Bf16WeightLinear]
    assert kinds(model) == (expected if float_first else expected[::-1])


def test_what_makes_its_activation_stays() -> None:
    layer = PackedLinear(plain(48, 80).weight, None)
    layer.activation = "gelu", "tanh"
    model = nn.Sequential(layer)
    use_bf16_weights(model)
    assert kinds(model) == [PackedLinear]


@pytest.mark.parametrize("room", ["no room", "room"])
def test_where_there_is_no_room_for_float32_the_operation_is_built_at_once(
    room: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = GeneratorOptions(str(tiny.folder("llama-lm")), device="cpu", dtype="bfloat16")
    language = load_language_model(options)
    asked: list[bool] = []

    def loaded(build: bool) -> bool:
        asked.append(build)
        return build

    monkeypatch.setattr("worker.model.language_model.native_ops_loaded", loaded)
    free = 0 if room == "no room" else 10**9
    monkeypatch.setattr(language_model, "free_bytes", lambda device: free)
    language.pack_weights("none", lambda: None)
    assert not asked, "native operations are not wanted"
    language = load_language_model(options)
    language.pack_weights("none", lambda: None, native=True)
    assert asked == [room == "no room"]
    assert set(kinds(language.model)) == {Bf16WeightLinear if asked[0] else PackedLinear}


def test_a_library_that_does_not_load_is_told_and_not_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    _library.cache_clear()
    assert not native_ops_loaded(build=False)
    build_native_ops(needed=False).write_bytes(b"half")
    assert not native_ops_loaded(build=False)
    assert "no native operations" in caplog.messages[-1]
    monkeypatch.undo()
    assert native_ops_loaded(build=False)


def test_the_copy_beside_int8_weights_gives_way_too() -> None:
    model = nn.Sequential(plain(48, 80))
    quantize_weights(model, 10**9)
    x = torch.randn(20, 48).bfloat16()
    before = model(x)
    use_bf16_weights(model)
    made: Any = model[0]
    assert isinstance(made, Int8Linear)
    assert isinstance(made.copy, Bf16WeightLinear)
    torch.testing.assert_close(model(x), before)


def test_others_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(plain(8, 8).float(), PackedLinear(torch.randn(8, 8), None))
    use_bf16_weights(model)
    assert kinds(model) == [nn.Linear, PackedLinear]
    monkeypatch.setattr("worker.model.cpu.linear.has_bfloat16", lambda: True)
    model = nn.Sequential(PackedLinear(plain(8, 8).weight, None))
    use_bf16_weights(model)
    assert kinds(model) == [PackedLinear]


def test_what_says_something_else_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    ordinary: Any = Bf16WeightLinear.forward
    monkeypatch.setattr(Bf16WeightLinear, "forward", lambda self, x: ordinary(self, x) * 1.1)
    model = nn.Sequential(PackedLinear(plain(48, 80).weight, None))
    use_bf16_weights(model)
    assert kinds(model) == [PackedLinear]
