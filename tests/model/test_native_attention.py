"""The native attention equals attention written down token by token, as torch's does."""

import itertools
import random
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from timeit import repeat
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.cpp_builder import CppBuilder

from batching.block_pool import BlockPool
from batching.sequence import Batch, Span
from tests.unit.test_paged_attention import CASES, Case, expected, memory, mixes, name
from worker.model import cuda_graphs
from worker.model.attention.kv_cache import BLOCK, KVCache, LayerShape
from worker.model.attention.native import NativeMetadata, build_native_ops
from worker.model.attention.paged import attend, forward_context
from worker.model.cuda_graphs import RowsMetadata

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


def test_a_library_is_at_its_place_only_as_a_whole(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whoever is killed while building it leaves nothing that a later start would load."""
    there: list[list[Path]] = []

    def build(builder: CppBuilder) -> None:
        target = Path(builder.get_target_file_path())
        target.write_bytes(b"half")
        there.append(list(tmp_path.glob("*.so")))
        target.write_bytes(b"whole")

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(CppBuilder, "build", build)
    places = [build_native_ops(), build_native_ops()]
    assert there == [[]]
    assert list(tmp_path.iterdir()) == [places[0]] == [places[1]]
    assert places[0].read_bytes() == b"whole"


# ── what does not fit raises, and is not read or written ──


def cache_of(*heads: int) -> KVCache:
    """Two blocks, a layer for each."""
    layers = [LayerShape(each, 16, 16) for each in heads]
    return KVCache(layers, 2, torch.float32, torch.device("cpu"))


def step(
    cache: KVCache, span: Span, query: Tensor, key: Tensor, value: Tensor, layer: int = 0
) -> Tensor:
    batch = Batch([span], [0] * span.width, [])
    with forward_context(NativeMetadata(cache, batch)):
        return attend(query, key, value, None, layer, 1.0, 0, 0.0)


@pytest.mark.parametrize("blocks", [[2], [-1], [0, 2]], ids=str)
def test_a_block_that_the_cache_does_not_have_is_refused(blocks: list[int]) -> None:
    width = len(blocks) * BLOCK
    given = torch.ones(1, 2, width, 16)
    with pytest.raises(RuntimeError, match="block"):
        step(cache_of(2), Span(blocks, 0, width), given, given, given)


def test_a_table_that_is_too_short_is_refused() -> None:
    given = torch.ones(1, 2, 17, 16)
    with pytest.raises(RuntimeError, match="block"):
        step(cache_of(2), Span([0], 0, 17), given, given, given)


@pytest.mark.parametrize(
    ("query", "key", "value", "layer"),
    [
        ((1, 4, 5, 16), (1, 4, 5, 16), (1, 4, 5, 16), 0),  # heads that the cache lacks
        ((1, 4, 5, 16), (1, 2, 5, 16), (1, 2, 5, 16), 1),  # another layer's
        ((1, 2, 5, 32), (1, 2, 5, 32), (1, 2, 5, 16), 0),
        ((1, 2, 5, 16), (1, 2, 5, 16), (1, 2, 5, 32), 0),
        ((1, 2, 5, 16), (1, 2, 4, 16), (1, 2, 5, 16), 0),  # a key is missing
        ((1, 2, 4, 16), (1, 2, 4, 16), (1, 2, 4, 16), 0),  # so is a row
        ((1, 3, 5, 16), (1, 2, 5, 16), (1, 2, 5, 16), 0),  # heads that don't divide
    ],
    ids=str,
)
def test_shapes_that_do_not_fit_are_refused(
    query: Sequence[int], key: Sequence[int], value: Sequence[int], layer: int
) -> None:
    q, k, v = (torch.ones(shape) for shape in (query, key, value))
    with pytest.raises(RuntimeError):
        step(cache_of(2, 1), Span([0], 0, 5), q, k, v, layer)


@pytest.mark.parametrize(
    ("query", "key", "value"),
    [
        ((1, 2, 5, 16), (1, 2, 4, 16), (1, 2, 5, 16)),
        ((1, 2, 5, 16), (1, 2, 5, 16), (1, 2, 4, 16)),
        ((1, 3, 5, 16), (1, 2, 5, 16), (1, 2, 5, 16)),
        ((1, 2, 5, 16), (1, 2, 5, 8), (1, 2, 5, 16)),
        ((1, 2, 5, 16), (1, 2, 5, 16), (1, 1, 5, 16)),
        ((2, 2, 5, 16), (2, 2, 5, 16), (2, 2, 5, 16)),
    ],
    ids=str,
)
def test_packed_shapes_that_do_not_fit_are_refused(
    query: Sequence[int], key: Sequence[int], value: Sequence[int]
) -> None:
    given = [torch.ones(shape) for shape in (query, key, value)]
    with pytest.raises(RuntimeError):
        torch.ops.onequeue.packed_attention(*given, torch.tensor([5]), 1.0, 0, False)


def test_too_few_sinks_are_refused() -> None:
    given = torch.ones(1, 2, 5, 16)
    batch = Batch([Span([0], 0, 5)], [0] * 5, [])
    with (
        forward_context(NativeMetadata(cache_of(2), batch)),
        pytest.raises(RuntimeError, match="sinks"),
    ):
        attend(given, given, given, torch.ones(1), 0, 1.0, 0, 0.0)


def test_a_step_that_raises_keeps_nothing_of_the_cache() -> None:
    cache = cache_of(2)
    kept = weakref.ref(cache.keys[0]), cache.keys[0].untyped_storage()._weak_ref()
    given = torch.ones(1, 3, 5, 16)
    with pytest.raises(RuntimeError):
        step(cache, Span([0], 0, 5), given, given, given)
    del cache
    assert kept[0]() is None
    assert torch.UntypedStorage._expired(kept[1])


def test_steps_of_two_threads_are_kept_apart() -> None:
    """Each in the middle of its own while the other attends."""
    meet = threading.Barrier(2)
    made: dict[int, Tensor] = {}

    def run(number: int) -> None:
        cache = cache_of(2)
        given = torch.full((1, 2, 5, 16), float(number))
        with forward_context(NativeMetadata(cache, Batch([Span([number], 0, 5)], [0] * 5, []))):
            meet.wait(60)
            made[number] = attend(given, given, given, None, 0, 1.0, 0, 0.0)
            meet.wait(60)
        assert bool((cache.keys[0][number, :5] == number).all())

    threads = [threading.Thread(target=run, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [float(made[number].mean()) for number in (0, 1)] == [0.0, 1.0]


@pytest.mark.parametrize("kind", ["native", "rows"])
def test_tables_of_blocks_are_copied_as_a_whole(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a pool, beside lists of the same numbers."""
    blocks, rows = 2000, 30
    table = BlockPool(blocks, 1).open(range(blocks), [])
    assert table is not None
    cache = KVCache([LayerShape(1, 1, 1)], 1, torch.float32, torch.device("cpu"))
    monkeypatch.setattr(cuda_graphs, "to_device", lambda numbers, device: torch.zeros(rows, 5))
    captured = RowsMetadata(cache, rows, 0)

    def seconds(table: Sequence[int]) -> float:
        batch = Batch([Span(table, BLOCK * blocks - 1, 1)] * rows, [1] * rows, range(rows))
        made = {
            "native": lambda: NativeMetadata(cache, batch),
            "rows": lambda: captured.fill(batch, rows, 0),
        }
        return min(repeat(made[kind], number=1, repeat=5))

    assert seconds(table.blocks) * 3 < seconds(list(table.blocks))
