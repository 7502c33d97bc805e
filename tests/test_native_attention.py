"""The native attention equals attention written down token by token, as torch's does."""

import itertools
import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.test_paged_attention import CASES, Case, expected, memory, mixes, name
from worker.model.attention_function import attend, forward_context
from worker.model.native_attention import NativeMetadata

pytestmark = pytest.mark.usefixtures("native")

ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
# What sizes and numbers of heads are made of: vectors of 16, pairs, tiles of 32, and none of those.
SIZES = [
    Case("all", heads=heads, key_heads=key_heads, key_size=size, value_size=value_size)
    for (heads, key_heads), (size, value_size) in itertools.product(
        ((14, 2), (3, 3), (8, 1)), ((64, 64), (80, 96), (128, 128), (256, 17), (7, 33))
    )
]
# Longer than a tile of queries and one of keys.
LONG = [
    Case("long", heads=8, key_heads=2, key_size=16, value_size=16),
    Case("long", heads=8, key_heads=2, window=300, sinks=True),
    Case("long", heads=4, key_heads=4, chunk=200, softcap=2.0),
    Case("long", heads=2, key_heads=1, window=20),
]


def chunks_of(case: Case, chance: random.Random) -> list[tuple[int, int]]:
    if case.kind != "long":
        return mixes(chance, case.kind)
    return [(0, 300), (2000, 1), (515, 280), (900, 5), (1023, 65)]


def attended(
    case: Case, mix: Sequence[tuple[int, int]], dtype: torch.dtype, broken: int | None, threads: int
) -> tuple[list[Tensor], list[Tensor]]:
    """What each chunk is given by the operation, [w, H, Dv], and what it should be."""
    chance = random.Random(name(case))
    there = memory(case, mix, chance, broken, dtype, zeroed=False)
    query = [torch.randn(width, case.heads, case.key_size, dtype=dtype) for _, width in mix]
    new = [
        torch.cat([whole[start:] for (start, _), whole in zip(mix, given, strict=True)])
        for given in (there.keys, there.values)
    ]
    sinks = torch.randn(case.heads, dtype=dtype)
    q, k, v = (each.transpose(0, 1)[None] for each in (torch.cat(query), *new))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with forward_context(NativeMetadata(there.cache, there.batch)):
            looks = 0, case.scale, case.window, case.softcap
            out = attend(q, k, v, sinks if case.sinks else None, *looks)
    finally:
        torch.set_num_threads(before)
    assert out.shape == (1, q.shape[2], case.heads, case.value_size)
    assert out.dtype == dtype
    assert out.is_contiguous()
    right = [
        expected(case, query[n], there.keys[n], there.values[n], start, sinks)
        for n, (start, _) in enumerate(mix)
    ]
    rows: Any = out[0].double()  # split is not annotated
    return list(rows.split([width for _, width in mix])), right


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("case", CASES + SIZES + LONG, ids=name)
def test_each_token_sees_its_own_sequence_only(case: Case, dtype: torch.dtype) -> None:
    """Nothing that is not a number is seen: not another sequence's, not the rest of a block."""
    chance = random.Random(name(case))
    torch.manual_seed(len(name(case)))
    mix = chunks_of(case, chance)
    for broken in (None, len(mix) // 2):
        for place, (got, right) in enumerate(
            zip(*attended(case, mix, dtype, broken, 2), strict=True)
        ):
            if place == broken:
                assert bool(got.isnan().all())
            else:
                torch.testing.assert_close(got, right, atol=ROUNDING[dtype], rtol=ROUNDING[dtype])


@pytest.mark.parametrize("threads", [1, 3, 16])
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("case", [*LONG, Case("long", heads=7, key_heads=1, sinks=True)], ids=name)
@pytest.mark.parametrize("mix", [[(5000, 1)], [(3000, 4), (17, 1)]], ids=str)
def test_keys_split_among_threads_are_put_together(
    case: Case, mix: list[tuple[int, int]], dtype: torch.dtype, threads: int
) -> None:
    torch.manual_seed(threads)
    for got, right in zip(*attended(case, mix, dtype, None, threads), strict=True):
        torch.testing.assert_close(got, right, atol=ROUNDING[dtype], rtol=ROUNDING[dtype])


def test_a_thread_keeps_its_number_of_threads_whatever_others_are_told() -> None:
    """Once another has been told to compute alone, as a pool's threads are."""
    seen: list[int] = []
    states, lengths = torch.randn(1, 2, 64, 16), torch.tensor([40, 24])

    def attends() -> None:
        torch.set_num_threads(3)
        torch.get_num_threads()  # torch asks once for the number that was told last
        in_thread(lambda: torch.set_num_threads(1))
        torch.ops.onequeue.packed_attention(states, states, states, lengths, 1.0, 0, False)
        seen.append(torch.get_num_threads())

    before = torch.get_num_threads()
    in_thread(attends)
    torch.set_num_threads(before)
    assert seen == [3]


def in_thread(work: Callable[[], None]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
