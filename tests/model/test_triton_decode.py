"""The Triton kernels for rows of single tokens, run by Triton's interpreter: no GPU is needed."""

import os
import random
from functools import partial

import pytest
import torch

from batching.sequence import Batch
from tests.unit.test_paged_attention import LATENT, Case, check, memory
from worker.backends.cuda.cuda_graphs import RowsMetadata
from worker.model.attention.kv_cache import BLOCK, KVCache

pytest.importorskip("triton", reason="triton exists for Linux only")
from worker.backends.cuda import triton_decode

if not os.environ.get("TRITON_INTERPRET"):
    pytest.skip("the GPU runs them in test_gpu.py", allow_module_level=True)

DECODES = [(0, 1), (1, 1), (15, 1), (63, 1), (64, 1), (200, 1)]
DRAFTS = [(0, 3), (14, 5), (60, 6), (33, 2)]
CASES = [
    (Case("decodes"), DECODES, 1),
    (Case("decodes"), DECODES, 200),
    (Case("drafts", heads=6, key_heads=2, value_size=12), DRAFTS, 1),
    (Case("drafts", key_heads=1, window=20, softcap=1.5), DRAFTS, 40),
    (Case("drafts", chunk=24, sinks=True, heads=2), DRAFTS, 40),
    (Case("decodes", window=70, sinks=True, heads=2), DECODES, 100),
    (Case("decodes", **LATENT, key_size=24, value_size=16), DECODES, 1),
    (Case("decodes", **LATENT, heads=20, key_size=160, value_size=128), DECODES, 40),
]


def rows_metadata(cache: KVCache, batch: Batch, programs: int = 1) -> RowsMetadata:
    """Return the same step; unused table entries are no valid block."""
    rows = len(batch.ids)
    step = RowsMetadata(cache, rows, 3 + max(len(span.blocks) for span in batch.spans))
    step.tables.fill_(9999)
    step.fill(batch, rows, 0)
    step.programs = programs
    return step


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter, about NaN
@pytest.mark.parametrize(("case", "mix", "programs"), CASES)
def test_each_row_attends_to_its_own_sequence_only(
    case: Case, mix: list[tuple[int, int]], programs: int
) -> None:
    """Unused memory and one of the sequences are NaN, which must not reach other rows."""
    torch.manual_seed(0)
    check(case, mix, random.Random(0), partial(rows_metadata, programs=programs), (len(mix) - 2,))


def test_the_rest_of_a_started_block_is_zeroed() -> None:
    """Eager steps multiply masked positions, so no old values may be left in a block."""
    cached = memory(Case("drafts"), DRAFTS, random.Random(0))
    step = rows_metadata(cached.cache, cached.batch)
    stored = cached.cache.keys[0], cached.cache.values[0]
    for tensor in stored:
        tensor.fill_(float("nan"))
    new = torch.ones(len(step.ids), 2, 8)
    triton_decode.write(new, new, *stored, step.slots, step.tails)
    used = {block for span in cached.batch.spans for block in span.blocks}
    for tensor in stored:
        for blocks, start, width in cached.batch.spans:
            whole = tensor[list(blocks)].flatten(0, 1)
            assert bool(whole[:start].isnan().all()), "it wrote before its first token"
            assert bool((whole[start : start + width] == 1).all())
            started = start == 0 or start + width > -(-start // BLOCK) * BLOCK  # its last block
            rest = whole[start + width :]
            assert bool((rest == 0).all() if started else rest.isnan().all())
        assert bool(tensor[[n for n in range(len(tensor)) if n not in used]].isnan().all())
