"""Paged attention equals attention computed token by token, however spans are grouped."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from batching.sequence import Batch, Span
from worker.model.attention import paged
from worker.model.attention.kv_cache import BLOCK, KVCache, LayerShape
from worker.model.attention.paged import (
    AttentionBackend,
    AttentionMetadata,
    attend,
    forward_context,
)

FLOAT32 = torch.float32
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """One layer; `kind` selects the mix of spans."""

    kind: str
    window: int = 0
    chunk: int = 0
    heads: int = 4
    key_heads: int = 2
    key_size: int = 8
    value_size: int = 8
    softcap: float = 0.0
    sinks: bool = False
    scale: float = 0.35
    values_in_keys: bool = False


def mixes(chance: random.Random, kind: str) -> list[tuple[int, int]]:
    """Return (start, width) of each span of a step."""
    if kind == "decodes":
        return [(chance.randrange(1, 90), 1) for _ in range(12)]
    if kind == "spread decodes":  # of reaches too different for one call
        return [(chance.choice((0, 3, 40, 700, 1500)) + n, 1) for n in range(8)]
    if kind == "drafts":
        return [(chance.randrange(1, 90), chance.randrange(1, 8)) for _ in range(8)]
    if kind == "fresh":
        return [(0, chance.choice((1, 2, 15, 16, 17, 40, 70))) for _ in range(8)]
    if kind == "continued":
        return [(chance.randrange(1, 60), chance.choice((1, 5, 16, 30, 90))) for _ in range(6)]
    if kind == "one":
        return [(chance.choice((0, 0, 7, 16, 31)), chance.choice((1, 2, 16, 17, 33)))]
    assert kind == "all"
    spans = [
        span for part in ("decodes", "drafts", "fresh", "continued") for span in mixes(chance, part)
    ]
    chance.shuffle(spans)
    return spans


KINDS = ("decodes", "spread decodes", "drafts", "fresh", "continued", "one", "all")


@dataclass
class Memory:
    """A batch in a cache whose blocks are in random order; unused memory is NaN."""

    cache: KVCache
    batch: Batch
    metadata: AttentionMetadata
    keys: list[Tensor]  # [L, heads, size] of each whole sequence
    values: list[Tensor]

    def break_sequence(self, number: int) -> None:
        blocks = [*self.batch.spans[number].blocks]
        for stored in (self.cache.keys[0], self.cache.values[0]):
            stored[blocks] = float("nan")
        for sequences in (self.keys, self.values):
            sequences[number].fill_(float("nan"))


def memory(
    case: Case, mix: Sequence[tuple[int, int]], chance: random.Random,
    dtype: torch.dtype = FLOAT32, zeroed: bool = True, panels: bool = False,
) -> Memory:  # fmt: skip
    """`zeroed`: the rest of a sequence's last block is zeros, otherwise NaN. `panels`: as on a
    CPU."""
    shape = LayerShape(
        case.key_heads, case.key_size, case.value_size, case.chunk,
        values_in_keys=case.values_in_keys,
    )  # fmt: skip
    tables = [[0] * -(-(start + width) // BLOCK) for start, width in mix]
    count = sum(map(len, tables))
    numbers = chance.sample(range(count + 3), count)
    tables = [[numbers.pop() for _ in table] for table in tables]
    cache = KVCache([shape], count + 3, dtype, CPU, in_panels=panels)
    keys = [torch.randn(s + w, case.key_heads, case.key_size, dtype=dtype) for s, w in mix]
    values = [torch.randn(s + w, case.key_heads, case.value_size, dtype=dtype) for s, w in mix]
    if case.values_in_keys:
        values = [key[..., : case.value_size] for key in keys]
    for stored in (cache.keys[0], cache.values[0]):
        stored.fill_(float("nan"))
    for table, (start, _), key, value in zip(tables, mix, keys, values, strict=True):
        used = table[: -(-start // BLOCK)]
        if zeroed:
            cache.keys[0][used] = cache.values[0][used] = 0
        slots = (torch.tensor(table)[:, None] * BLOCK + torch.arange(BLOCK)).ravel()[:start]
        if order := cache.panels[0]:
            order.write(slots, key[:start], value[:start])
        else:
            cache.keys[0].flatten(0, 1)[slots] = key[:start]
            cache.values[0].flatten(0, 1)[slots] = value[:start]
    spans = [Span(table, *bounds) for table, bounds in zip(tables, mix, strict=True)]
    batch = Batch(spans, [0] * sum(width for _, width in mix), [])
    return Memory(cache, batch, AttentionMetadata(cache, batch), keys, values)


def metadata_of(mix: Sequence[tuple[int, int]]) -> AttentionMetadata:
    return memory(Case("one", key_heads=1), mix, random.Random(0)).metadata


def expected(
    case: Case, query: Tensor, keys: Tensor, values: Tensor, start: int, sinks: Tensor
) -> Tensor:
    """Return a span's output [w, H, Dv] for its queries [w, H, D], in float64."""
    position = torch.arange(start, start + len(query))[:, None]
    key = torch.arange(len(keys))
    visible = key <= position
    if case.window:
        visible &= key > position - case.window
    if case.chunk:
        visible &= key // case.chunk == position // case.chunk
    # heads that share a key head
    grouped = query.double().view(len(query), case.key_heads, -1, case.key_size)
    scores = torch.einsum("qghd,kgd->ghqk", grouped, keys.double()) * case.scale
    if case.softcap:
        scores = torch.tanh(scores / case.softcap) * case.softcap
    weights = torch.where(visible, scores.exp(), 0.0)
    total = weights.sum(3, keepdim=True)
    if case.sinks:
        total += sinks.double().exp().view(case.key_heads, -1, 1, 1)
    return torch.einsum("ghqk,kgd->qghd", weights / total, values.double()).flatten(1, 2)


LATENT: dict[str, Any] = {"key_heads": 1, "values_in_keys": True}
CASES = [
    *(Case(kind) for kind in KINDS),
    *(Case(kind, window=8) for kind in KINDS),
    *(Case(kind, window=20, key_heads=1) for kind in KINDS),
    *(Case(kind, chunk=8, key_heads=4) for kind in KINDS),
    *(Case(kind, chunk=24, value_size=12) for kind in KINDS),
    *(Case(kind, softcap=1.5) for kind in KINDS),
    *(Case(kind, softcap=1.5, window=8, key_heads=1) for kind in KINDS),
    *(Case(kind, sinks=True) for kind in KINDS),
    *(Case(kind, sinks=True, window=8) for kind in KINDS),
    *(Case(kind, sinks=True, softcap=3.0, heads=6, key_heads=3, value_size=4) for kind in KINDS),
    *(Case(kind, heads=1, key_heads=1) for kind in KINDS),
    *(Case(kind, **LATENT, key_size=24, value_size=16) for kind in KINDS),
]


def name(case: Case) -> str:
    differs = {k: v for k, v in vars(case).items() if v != getattr(Case(case.kind), k)}
    return " ".join([case.kind, *(f"{k}={v}" for k, v in differs.items())])


@pytest.mark.parametrize("case", CASES, ids=name)
def test_each_token_attends_to_its_own_sequence_only(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sequence is all NaN, which must not reach others, not even masked. In the first round all
    masks are made in pieces."""
    chance, limit = random.Random(name(case)), paged.MAX_MASK_ELEMENTS
    torch.manual_seed(len(name(case)))
    for turn in range(3):
        mix = mixes(chance, case.kind)
        broken = (None, 0, len(mix) // 2)[turn]
        monkeypatch.setattr(paged, "MAX_MASK_ELEMENTS", (2000, limit, limit)[turn])
        dtype, rounding = (FLOAT32, 1e-5) if turn < 2 else (torch.bfloat16, 2e-2)
        for panels in (False, True):
            check(case, mix, chance, AttentionMetadata, (broken,), dtype, True, rounding, panels)


def check(
    case: Case, mix: Sequence[tuple[int, int]], chance: random.Random,
    backend: Callable[[KVCache, Batch], AttentionBackend], rounds: Sequence[int | None] = (None,),
    dtype: torch.dtype = FLOAT32, zeroed: bool = True, rounding: float = 1e-5,
    panels: bool = False,
) -> None:  # fmt: skip
    """`rounds`: the sequence that is NaN from each round on, if any."""
    cached = memory(case, mix, chance, dtype, zeroed, panels)
    query = [torch.randn(width, case.heads, case.key_size, dtype=dtype) for _, width in mix]
    sinks = torch.randn(case.heads, dtype=dtype)
    right = [
        expected(case, of_span, keys, values, start, sinks)
        for of_span, keys, values, (start, _) in zip(
            query, cached.keys, cached.values, mix, strict=True
        )
    ]
    for broken in rounds:
        if broken is not None:
            cached.break_sequence(broken)
            query[broken].fill_(float("nan"))
            right[broken].fill_(float("nan"))
        new = [
            torch.cat([whole[start:] for (start, _), whole in zip(mix, sequences, strict=True)])
            for sequences in (cached.keys, cached.values)
        ]
        q, k, v = (x.transpose(0, 1)[None] for x in (torch.cat(query), *new))
        with forward_context(backend(cached.cache, cached.batch)):
            out = attend(
                q, k, v, sinks if case.sinks else None, 0, case.scale, case.window, case.softcap
            )
        assert out.shape == (1, q.shape[2], case.heads, case.value_size)
        assert out.dtype == dtype
        assert out.is_contiguous()
        torch.testing.assert_close(
            out[0].double(), torch.cat(right), atol=rounding, rtol=rounding, equal_nan=True
        )


def test_spans_are_grouped_with_few_masks_and_only_blocks_within_reach() -> None:
    [decodes] = metadata_of([(n, 1) for n in range(40, 72)]).groups(0, 0, False)
    assert (decodes.shape, decodes.rows, decodes.unpadded) == ((32, 1), None, None)
    prompts = metadata_of([(0, 20)] * 3)
    [group] = prompts.groups(0, 0, False)
    assert (group.blocks, group.ranges, group.rows) == (None, None, None)
    [windowed] = prompts.groups(8, 0, False)
    assert windowed.blocks is None
    assert windowed.ranges is not None
    [within] = metadata_of([(1500, 1), (1410, 1)]).groups(8, 0, False)
    assert within.blocks is not None
    assert len(within.blocks) == 2 * 2


@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (1000, 0.0), (0, 1.5)])
@pytest.mark.parametrize("mix", [[(8192, 8192)], [(6000, 4096), (5000, 4000)]])
def test_masks_of_long_chunks_take_little_memory(
    mix: list[tuple[int, int]], window: int, softcap: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counts elements of masks, or of all heads' scores where those are materialized."""
    elements: list[int] = []

    def attended(q: Tensor, k: Tensor, v: Tensor, mask: None, *rest: Any) -> Tensor:
        several = 2 if softcap or len(q) > 1 else 1  # query heads of a key head
        several *= case.key_heads if softcap else 1
        elements.append(len(q) * q.shape[1] * k.shape[1] * several)
        return q.new_zeros(1)

    monkeypatch.setattr(paged, "make_mask", lambda *arguments: None)
    monkeypatch.setattr(paged, "_masked_attention", attended)
    case = Case("one", window, softcap=softcap)
    metadata = memory(case, mix, random.Random(0)).metadata
    tokens = sum(width for _, width in mix)
    q, k, v = (torch.zeros(1, heads, tokens, 8) for heads in (4, 2, 2))
    with forward_context(metadata):
        attend(q, k, v, None, 0, 0.35, window, softcap)
    assert max(elements) <= paged.MAX_MASK_ELEMENTS <= 1 << 26
    assert len(elements) > 1
