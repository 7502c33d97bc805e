"""Activations, and modules that multiply without a linear layer, give a row the same bits among any
other rows."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.threads import compute_threads
from worker.backends.cpu.functional import OWN_LAYER, align_activations
from worker.backends.cpu.linear import stacked_products_differ, use_native_functions

pytestmark = pytest.mark.usefixtures("native")

DEPTH = 1056  # so deep that oneDNN divides the sums of a product


class Router(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).softmax(-1)


class OwnWeight(nn.Module):
    def __init__(self, depth: int, experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(experts, depth) / depth**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight).softmax(-1)


class ReadsLayer(nn.Module):
    def __init__(self, depth: int, experts: int) -> None:
        super().__init__()
        self.layer = nn.Linear(depth, experts, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x.float(), self.layer.weight.float()).softmax(-1)


class Experts(nn.Module):
    """`linear` multiplies by one expert, and `bmm` by all."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight[0]) + torch.bmm(x.expand(3, -1, -1), self.weight)


@pytest.mark.parametrize("kind", [Router, OwnWeight, ReadsLayer])
def test_a_row_has_the_same_bits_alone_and_in_a_batch(
    kind: type[Router] | type[OwnWeight] | type[ReadsLayer],
) -> None:
    torch.manual_seed(0)
    plain = kind(DEPTH, 60).requires_grad_(False)
    model = nn.Sequential(plain)
    x = torch.randn(301, DEPTH)
    expected = model(x)
    use_native_functions(model)
    alone = torch.cat([model(row[None]) for row in x])
    torch.testing.assert_close(alone, expected)
    for rows in (7, 33, 77, 150, 301):
        assert torch.equal(model(x[:rows]), alone[:rows])
    assert hasattr(plain, OWN_LAYER)


@pytest.mark.parametrize("kind", [Router, OwnWeight, ReadsLayer])
def test_the_compiler_takes_the_modules_own_product(
    kind: type[Router] | type[OwnWeight] | type[ReadsLayer],
) -> None:
    plain = kind(8, 6).requires_grad_(False)
    model = nn.Sequential(plain)
    x = torch.randn(5, 8)
    expected = model(x)
    use_native_functions(model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), expected)
    assert not hasattr(plain, OWN_LAYER)


class OneByOne(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 8, 6))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight[0])


@pytest.mark.parametrize("differs", [False, True])
@pytest.mark.parametrize("kind", [Experts, OneByOne])
def test_products_that_depend_on_the_number_of_rows_are_found(
    kind: type[nn.Module], differs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def product(x: Tensor, weight: Tensor) -> Tensor:
        out = (x[..., None, :] * (weight if x.dim() == 2 else weight.mT[:, None])).sum(-1)
        return out + (x.shape[-2] > 64) if differs else out

    bases: dict[Any, tuple[Any, str]] = {
        Experts: (torch, "bmm"), OneByOne: (nn.functional, "linear"),
    }  # fmt: skip
    monkeypatch.setattr(*bases[kind], product)
    assert stacked_products_differ(nn.Sequential(kind())) is differs
    assert not stacked_products_differ(nn.Sequential(nn.Conv1d(4, 4, 4)))


# ── activations ──


@pytest.mark.parametrize("width", [1056, 1000, 4864])
@pytest.mark.parametrize("threads", [2, 3, 5])
def test_a_row_of_an_activation_has_the_same_bits_alone_and_in_a_batch(
    width: int, threads: int
) -> None:
    torch.manual_seed(0)
    x = torch.randn(301, width)
    plain, aligned = nn.SiLU(), nn.Sequential(nn.SiLU())
    align_activations(aligned)
    with compute_threads(threads):
        alone = torch.cat([aligned(row[None]) for row in x])
        for rows in (7, 33, 77, 150, 301):
            assert torch.equal(aligned(x[None, :rows])[0], alone[:rows])
        torch.testing.assert_close(alone, plain(x))


def test_compiled_activations_are_not_divided() -> None:
    model = nn.Sequential(nn.Linear(8, 40), nn.SiLU())
    expected = model(torch.ones(3, 8))
    align_activations(model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(torch.ones(3, 8)), expected)
