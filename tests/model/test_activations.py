"""Activation functions give a row the same bits among any other rows."""

import pytest
import torch
from torch import nn

from tests.threads import compute_threads
from worker.backends.cpu.functional import align_activations


@pytest.mark.parametrize("width", [1056, 1000, 4864])
@pytest.mark.parametrize("threads", [2, 3, 5])
def test_a_row_has_the_same_bits_alone_and_in_a_batch(width: int, threads: int) -> None:
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
