"""Weights of bfloat16 that are made float32 as they are multiplied: the exact product, rounded
once, a row whatever the rows beside it; used where a CPU would emulate bfloat16."""

import copy
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.test_native_linear import threads
from tests.test_shared_products import Fan, parts
from worker.model import cpu_linear
from worker.model.cpu_linear import Int8Linear, PackedLinear, pack, widen
from worker.model.widening_linear import WideningLinear

pytestmark = pytest.mark.usefixtures("native")

# in, out: what groups of columns and pairs of rows divide, and what they don't; summed in chunks
SIZES = [(64, 128), (96, 40), (40, 24), (33, 101), (1, 1), (1025, 70), (2600, 64)]
ROWS = [1, 2, 3, 11, 12, 13, 25, 100, 300]


@pytest.fixture(autouse=True)
def _emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_linear, "has_bfloat16", lambda: False)


def plain(inputs: int, outputs: int, bias: bool = True) -> nn.Linear:
    torch.manual_seed(inputs + outputs)
    return nn.Linear(inputs, outputs, bias=bias).bfloat16().requires_grad_(False)


def widening(given: nn.Linear) -> WideningLinear:
    return WideningLinear(given.weight, given.bias)


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
    for x in (
        torch.randn(1, 3, 48),
        torch.randn(48),
        torch.randn(0, 48),
        torch.randn(2, 0, 48),
        torch.randn(48, 5).T,
        torch.randn(6, 96)[:, ::2],
    ):
        got = made(x.bfloat16())
        assert got.shape == (*x.shape[:-1], 80)
        assert got.is_contiguous()
        right = exact(layer, x.bfloat16())
        torch.testing.assert_close(got.double(), right, atol=1e-6, rtol=2**-8)


def test_what_does_not_fit_raises() -> None:
    made = widening(plain(64, 70))
    product = torch.ops.onequeue.widening_linear
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
    known = (nn.Linear, PackedLinear, WideningLinear)
    return [type(each) for each in model.modules() if isinstance(each, known)]


def test_packed_layers_of_a_cpu_that_emulates_give_way(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "onequeue.linear")
    model = Fan().bfloat16()
    before = copy.deepcopy(model)
    x = torch.randn(1, 5, 48).bfloat16()
    pack(model, 10**9, lambda: model(x))
    assert set(kinds(model)) == {PackedLinear}
    widen(model)
    assert set(kinds(model)) == {WideningLinear}
    assert parts(model) == ["one", "two"]
    assert "layers=2" in caplog.messages[-1]
    torch.testing.assert_close(model(x), before(x), atol=1e-2, rtol=2**-6)
    cpu_linear.unpack(model)
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, before.state_dict()[name])


def test_they_are_used_at_once_where_they_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then no room is needed for float32 weights."""
    model = Fan().bfloat16()
    x = torch.randn(1, 5, 48).bfloat16()
    pack(model, 0, lambda: model(x), widens=True)
    assert set(kinds(model)) == {WideningLinear}
    assert parts(model) == ["one", "two"]
    monkeypatch.setattr(cpu_linear, "has_bfloat16", lambda: True)
    model = Fan().bfloat16()
    pack(model, 0, lambda: model(x), widens=True)
    assert set(kinds(model)) == {PackedLinear}, "where bfloat16 is multiplied, oneDNN does"


def test_plain_layers_for_which_there_was_no_room_give_way_too() -> None:
    model = nn.Sequential(plain(48, 80), plain(80, 3))
    pack(model, 0)
    assert kinds(model) == [nn.Linear] * 2
    widen(model)
    assert kinds(model) == [WideningLinear] * 2


def test_the_copy_beside_int8_weights_gives_way_too() -> None:
    model = nn.Sequential(plain(48, 80))
    cpu_linear.quantise(model, 10**9)
    x = torch.randn(20, 48).bfloat16()
    before = model(x)
    widen(model)
    made: Any = model[0]
    assert isinstance(made, Int8Linear)
    assert isinstance(made.copy, WideningLinear)
    torch.testing.assert_close(model(x), before)


def test_others_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(plain(8, 8).float(), PackedLinear(torch.randn(8, 8), None))
    widen(model)
    assert kinds(model) == [nn.Linear, PackedLinear]
    monkeypatch.setattr(cpu_linear, "has_bfloat16", lambda: True)
    model = nn.Sequential(plain(8, 8))
    widen(model)
    assert kinds(model) == [nn.Linear]


def test_what_says_something_else_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    ordinary: Any = WideningLinear.forward
    monkeypatch.setattr(WideningLinear, "forward", lambda self, x: ordinary(self, x) * 1.1)
    model = nn.Sequential(plain(48, 80))
    widen(model)
    assert kinds(model) == [nn.Linear]
