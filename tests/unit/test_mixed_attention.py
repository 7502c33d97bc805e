"""On a GPU, decodes attend by the decode kernel also in a step with prompts.

Python functions stand in for the kernels: no GPU is needed.
"""

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import decode_kernels
from tests.matrix import matrix
from tests.unit.test_paged_attention import CASES, Case, check, memory, mixes, name
from worker.backends import cuda as cuda_package
from worker.backends.cuda.mixed import MAX_SPAN_WIDTH, MixedMetadata
from worker.model.attention.paged import SpanGroup


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each call of the decode kernel."""
    counts: list[int] = []

    def attend(query: Tensor, *arguments: Any, **named: Any) -> Tensor:
        counts.append(len(query))
        return decode_kernels.attend(query, *arguments, **named)

    kernels = SimpleNamespace(attend=attend)
    monkeypatch.setattr(cuda_package, "triton_decode", kernels, raising=False)
    return counts


@pytest.mark.parametrize("case", matrix(CASES, *CASES[::4]), ids=name)
def test_each_token_attends_to_its_own_sequence_only(case: Case, rows: list[int]) -> None:
    torch.manual_seed(0)
    chance = random.Random(name(case))
    for _ in range(2):
        mix = mixes(chance, case.kind)
        rows.clear()
        check(case, mix, chance, MixedMetadata)
        short = sum(width for _, width in mix if width <= MAX_SPAN_WIDTH)
        assert rows == ([short] if short else [])


def test_only_prompts_are_gathered(rows: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[int, int]] = []
    attend = SpanGroup.attend

    def recorded(group: SpanGroup, *arguments: Any) -> Tensor:
        shapes.append(group.shape)
        return attend(group, *arguments)

    monkeypatch.setattr(SpanGroup, "attend", recorded)
    mix = [(700, 1), (5, 1), (64, 40), (30, 4), (1500, 1)]
    check(Case("all"), mix, random.Random(0), MixedMetadata)
    assert shapes == [(1, 40)]
    assert rows == [7]


def test_blocks_of_a_row_are_those_of_its_span() -> None:
    cached = memory(Case("all"), [(40, 1), (0, 33), (3, 2)], random.Random(0))
    metadata = MixedMetadata(cached.cache, cached.batch)
    first, _, last = (span.blocks for span in cached.batch.spans)
    assert metadata._tables.tolist() == [*first, *last]
    assert metadata._table_starts.tolist() == [0, len(first), len(first)]
    assert metadata._row_positions.tolist() == [40, 3, 4]
