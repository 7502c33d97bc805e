"""The Triton kernels of single tokens, run by Triton's interpreter: no GPU is needed."""

import os
import random
from typing import Any

import pytest
import torch

from tests.unit.test_paged_attention import Case, Memory, expected, memory
from worker.model.attention.kv_cache import BLOCK
from worker.model.attention.paged import attend, forward_context
from worker.model.cuda_graphs import RowsMetadata

pytest.importorskip("triton", reason="triton is made for Linux only")
from worker.model.attention import triton_decode

if not os.environ.get("TRITON_INTERPRET"):
    pytest.skip("they run on the GPU: test_gpu.py", allow_module_level=True)

DECODES = [(0, 1), (1, 1), (15, 1), (63, 1), (64, 1), (200, 1)]
DRAFTS = [(0, 3), (14, 5), (60, 6), (33, 2)]
CASES = [
    (Case("decodes"), DECODES, 1),
    (Case("decodes"), DECODES, 200),
    (Case("drafts", heads=6, key_heads=2, value_size=12), DRAFTS, 1),
    (Case("drafts", key_heads=1, window=20, softcap=1.5), DRAFTS, 40),
    (Case("drafts", chunk=24, sinks=True, heads=2), DRAFTS, 40),
    (Case("decodes", window=70, sinks=True, heads=2), DECODES, 100),
]


def rows_of(there: Memory) -> RowsMetadata:
    """The same step; what its tables do not say is no block."""
    rows = len(there.batch.ids)
    step = RowsMetadata(there.cache, rows, 3 + max(len(s.blocks) for s in there.batch.spans))
    step.tables.fill_(9999)
    step.fill(there.batch, rows, 0)
    return step


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter, about no numbers
@pytest.mark.parametrize(("case", "mix", "programs"), CASES)
def test_each_row_sees_its_own_sequence_only(
    case: Case, mix: list[tuple[int, int]], programs: int
) -> None:
    """What is nobody's, and one of the sequences, is no number: not to be seen by others."""
    torch.manual_seed(0)
    broken = len(mix) - 2
    there = memory(case, mix, random.Random(0), broken)
    step = rows_of(there)
    step.programs = programs
    query = [torch.randn(width, case.heads, case.key_size) for _, width in mix]
    query[broken].fill_(float("nan"))
    new = [
        torch.cat([whole[start:] for (start, _), whole in zip(mix, given, strict=True)])
        for given in (there.keys, there.values)
    ]
    sinks = torch.randn(case.heads)
    q, k, v = (each.transpose(0, 1)[None] for each in (torch.cat(query), *new))
    with forward_context(step):
        out = attend(
            q, k, v, sinks if case.sinks else None, 0, case.scale, case.window, case.softcap
        )
    assert out.shape == (1, len(step.ids), case.heads, case.value_size)
    rows: Any = out[0].double()  # split is not annotated
    for place, got in enumerate(rows.split([width for _, width in mix])):
        if place == broken:
            assert bool(got.isnan().all())
            continue
        keys, values = there.keys[place], there.values[place]
        right = expected(case, query[place], keys, values, mix[place][0], sinks)
        torch.testing.assert_close(got, right, atol=1e-5, rtol=1e-5)


def test_what_follows_a_sequences_last_token_is_zeroed() -> None:
    """Plain steps multiply what they mask: nothing of others must be left there."""
    there = memory(Case("drafts"), DRAFTS, random.Random(0))
    step = rows_of(there)
    stored = there.cache.keys[0], there.cache.values[0]
    for each in stored:
        each.fill_(float("nan"))
    new = torch.ones(len(step.ids), 2, 8)
    triton_decode.write(new, new, *stored, step.slots, step.rests)
    taken = {block for span in there.batch.spans for block in span.blocks}
    for each in stored:
        for blocks, start, width in there.batch.spans:
            whole = each[list(blocks)].flatten(0, 1)
            assert bool(whole[:start].isnan().all()), "it writes before its first token"
            assert bool((whole[start : start + width] == 1).all())
            begun = start == 0 or start + width > -(-start // BLOCK) * BLOCK  # its last block
            rest = whole[start + width :]
            assert bool((rest == 0).all() if begun else rest.isnan().all())
        assert bool(each[[n for n in range(len(each)) if n not in taken]].isnan().all())
