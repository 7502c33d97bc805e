"""Native attention equals attention computed token by token."""

import itertools
import random
import threading
import weakref
from collections.abc import Sequence
from functools import partial

import pytest
import torch
from torch import Tensor

from batching.sequence import Batch, Span
from tests.matrix import matrix
from tests.threads import compute_threads, run_together
from tests.unit.test_paged_attention import CASES, LATENT, Case, check, mixes, name
from worker.backends.native_attention import NativeMetadata
from worker.model.attention.kv_cache import BLOCK, KVCache, LayerShape
from worker.model.attention.paged import attend, forward_context

pytestmark = pytest.mark.usefixtures("native")

ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
# Sizes and numbers of heads: multiples of vectors of 16, of pairs, of tiles of 32, and of none.
SIZES = [
    Case("all", heads=heads, key_heads=key_heads, key_size=size, value_size=value_size)
    for (heads, key_heads), (size, value_size) in itertools.product(
        ((14, 2), (3, 3), (8, 1)), ((64, 64), (80, 96), (128, 128), (256, 17), (7, 33))
    )
]
# Longer than a tile's queries and keys.
LONG = [
    Case("long", heads=8, key_heads=2, key_size=16, value_size=16),
    Case("long", heads=8, key_heads=2, window=300, sinks=True),
    Case("long", heads=4, key_heads=4, chunk=200, softcap=2.0),
    Case("long", heads=2, key_heads=1, window=20),
    Case("long", heads=20, **LATENT, key_size=576, value_size=512, scale=0.05),
]


def chunks_of(case: Case, chance: random.Random) -> list[tuple[int, int]]:
    if case.kind != "long":
        return mixes(chance, case.kind)
    return [(0, 210), (2000, 1), (560, 70), (900, 5), (1023, 33)]


@pytest.mark.parametrize("dtype", matrix(ROUNDING, torch.float32))
@pytest.mark.parametrize(
    "case", matrix(CASES + SIZES + LONG, *CASES, *SIZES[::4], LONG[0]), ids=name
)
def test_each_token_attends_to_its_own_sequence_only(case: Case, dtype: torch.dtype) -> None:
    """NaN of another sequence and of the rest of a block must not reach it."""
    chance = random.Random(name(case))
    torch.manual_seed(len(name(case)))
    mix = chunks_of(case, chance)
    rounds = (None, len(mix) // 2)
    with compute_threads(2):
        check(case, mix, chance, NativeMetadata, rounds, dtype, False, ROUNDING[dtype], True)


@pytest.mark.parametrize("threads", [3, 16])
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("case", [*LONG, Case("long", heads=7, key_heads=1, sinks=True)], ids=name)
@pytest.mark.parametrize("mix", [[(5000, 1)], [(3000, 4), (17, 1)]], ids=str)
def test_keys_split_among_threads_are_merged(
    case: Case, mix: list[tuple[int, int]], dtype: torch.dtype, threads: int
) -> None:
    torch.manual_seed(threads)
    chance = random.Random(name(case))
    with compute_threads(threads):
        check(case, mix, chance, NativeMetadata, (None,), dtype, False, ROUNDING[dtype], True)


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("case", [*LONG, Case("long", heads=7, key_heads=1, sinks=True)], ids=name)
def test_a_token_gets_the_same_bits_in_any_chunk_batch_and_number_of_threads(
    case: Case, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    length, blocks = 1100, 69
    shape = LayerShape(case.key_heads, case.key_size, case.value_size, case.chunk)
    heads = (case.heads, case.key_size), (case.key_heads, case.key_size)
    q, k, v = (
        torch.randn(1, count, length, size, dtype=dtype)
        for count, size in (*heads, (case.key_heads, case.value_size))
    )
    sinks = torch.randn(case.heads, dtype=dtype) if case.sinks else None

    def run(borders: Sequence[int], others: int, threads: int) -> Tensor:
        """Return the outputs of chunks with these borders, each beside `others` decoding tokens."""
        count = blocks * (1 + others)
        cache = KVCache([shape], count, dtype, torch.device("cpu"), in_panels=True)
        tables = [range(n, blocks * (1 + others), 1 + others) for n in range(1 + others)]
        outputs = []
        for start, end in itertools.pairwise(borders):
            rows = torch.cat([torch.full((others,), start), torch.arange(start, end)])
            spans = [Span(table, start, 1) for table in tables[1:]]
            batch = Batch([*spans, Span(tables[0], start, end - start)], [0] * len(rows), [])
            with compute_threads(threads), forward_context(NativeMetadata(cache, batch)):
                options = 0, case.scale, case.window, case.softcap
                out = attend(q[:, :, rows], k[:, :, rows], v[:, :, rows], sinks, *options)
            outputs.append(out[0, others:])
        return torch.cat(outputs)

    whole = run([0, length], 0, 1)
    for borders, others, threads in (
        ([0, length], 0, 16),
        ([0, 5, 300, 301, 302, 777, length], 0, 2),
        ([0, 5, 300, 301, 302, 777, length], 0, 16),
        ([0, 256, 900, 1024, length], 9, 3),
        ([0, 1000, *range(1001, length + 1)], 0, 7),
    ):
        assert torch.equal(run(borders, others, threads), whole)


# ── mismatched operands raise before memory is read or written ──


def cache_of(*heads: int) -> KVCache:
    """Return a cache of two blocks, with a layer for each number of heads."""
    layers = [LayerShape(count, 16, 16) for count in heads]
    return KVCache(layers, 2, torch.float32, torch.device("cpu"), in_panels=True)


def step(
    cache: KVCache, span: Span, query: Tensor, key: Tensor, value: Tensor, layer: int = 0
) -> Tensor:
    batch = Batch([span], [0] * span.width, [])
    with forward_context(NativeMetadata(cache, batch)):
        return attend(query, key, value, None, layer, 1.0, 0, 0.0)


@pytest.mark.parametrize("blocks", [[2], [-1], [0, 2]], ids=str)
def test_a_block_outside_the_cache_is_refused(blocks: list[int]) -> None:
    width = len(blocks) * BLOCK
    x = torch.ones(1, 2, width, 16)
    with pytest.raises(RuntimeError, match="block"):
        step(cache_of(2), Span(blocks, 0, width), x, x, x)


def test_a_short_table_is_refused() -> None:
    x = torch.ones(1, 2, 17, 16)
    with pytest.raises(RuntimeError, match="block"):
        step(cache_of(2), Span([0], 0, 17), x, x, x)


@pytest.mark.parametrize(
    ("query", "key", "value", "layer"),
    [
        ((1, 4, 5, 16), (1, 4, 5, 16), (1, 4, 5, 16), 0),  # more heads than the cache
        ((1, 4, 5, 16), (1, 2, 5, 16), (1, 2, 5, 16), 1),  # heads of another layer
        ((1, 2, 5, 32), (1, 2, 5, 32), (1, 2, 5, 16), 0),
        ((1, 2, 5, 16), (1, 2, 5, 16), (1, 2, 5, 32), 0),
        ((1, 2, 5, 16), (1, 2, 4, 16), (1, 2, 5, 16), 0),  # fewer keys
        ((1, 2, 4, 16), (1, 2, 4, 16), (1, 2, 4, 16), 0),  # fewer rows than the span
        ((1, 3, 5, 16), (1, 2, 5, 16), (1, 2, 5, 16), 0),  # heads that do not divide
    ],
    ids=str,
)
def test_mismatched_shapes_are_refused(
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
def test_mismatched_packed_shapes_are_refused(
    query: Sequence[int], key: Sequence[int], value: Sequence[int]
) -> None:
    operands = [torch.ones(shape) for shape in (query, key, value)]
    with pytest.raises(RuntimeError):
        torch.ops.onequeue.packed_attention(*operands, torch.tensor([5]), 1.0, 0, False)


def test_too_few_sinks_are_refused() -> None:
    x = torch.ones(1, 2, 5, 16)
    batch = Batch([Span([0], 0, 5)], [0] * 5, [])
    with (
        forward_context(NativeMetadata(cache_of(2), batch)),
        pytest.raises(RuntimeError, match="sinks"),
    ):
        attend(x, x, x, torch.ones(1), 0, 1.0, 0, 0.0)


def test_a_step_that_raises_keeps_no_reference_to_the_cache() -> None:
    cache = cache_of(2)
    references = weakref.ref(cache.keys[0]), cache.keys[0].untyped_storage()._weak_ref()
    x = torch.ones(1, 3, 5, 16)
    with pytest.raises(RuntimeError):
        step(cache, Span([0], 0, 5), x, x, x)
    del cache
    assert references[0]() is None
    assert torch.UntypedStorage._expired(references[1])


def test_steps_of_two_threads_are_independent() -> None:
    """Each thread is in the middle of its step while the other attends."""
    meet = threading.Barrier(2)
    outputs: dict[int, Tensor] = {}
    written: dict[int, tuple[Tensor, ...]] = {}

    def run(number: int) -> None:
        cache = cache_of(2)
        x = torch.full((1, 2, 5, 16), float(number))
        with forward_context(NativeMetadata(cache, Batch([Span([number], 0, 5)], [0] * 5, []))):
            meet.wait(60)
            outputs[number] = attend(x, x, x, None, 0, 1.0, 0, 0.0)
            meet.wait(60)
        assert cache.panels[0]
        written[number] = cache.panels[0].gather(torch.tensor([number]))

    run_together(partial(run, 0), partial(run, 1))
    assert all(bool((x[0, :5] == n).all()) for n in (0, 1) for x in written[n])
    assert [float(outputs[number].mean()) for number in (0, 1)] == [0.0, 1.0]
