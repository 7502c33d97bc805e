"""Paged attention equals attention written down token by token, however chunks are grouped."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from batching.sequence import Batch, Span
from worker.model.attention import paged
from worker.model.attention.kv_cache import BLOCK, KVCache, LayerShape
from worker.model.attention.paged import (
    SLACK,
    SPREAD,
    AttentionMetadata,
    SpanGroup,
    attend,
    forward_context,
)

FLOAT32 = torch.float32
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """One layer; `kind` says how chunks are drawn."""

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


def mixes(chance: random.Random, kind: str) -> list[tuple[int, int]]:
    """(start, width) of each chunk of a step."""
    if kind == "decodes":
        return [(chance.randrange(1, 90), 1) for _ in range(12)]
    if kind == "spread decodes":  # far apart: not in one call
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
    drawn = [
        each for part in ("decodes", "drafts", "fresh", "continued") for each in mixes(chance, part)
    ]
    chance.shuffle(drawn)
    return drawn


KINDS = ("decodes", "spread decodes", "drafts", "fresh", "continued", "one", "all")


@dataclass
class Memory:
    """A batch in a cache whose blocks are in no order; what is nobody's is NaN."""

    cache: KVCache
    batch: Batch
    step: AttentionMetadata
    keys: list[Tensor]  # [L, heads, size] of each whole sequence
    values: list[Tensor]


def memory(
    case: Case, mix: Sequence[tuple[int, int]], chance: random.Random, broken: int | None = None,
    dtype: torch.dtype = FLOAT32, zeroed: bool = True,
) -> Memory:  # fmt: skip
    """`zeroed`: the rest of a sequence's last block is; otherwise NaN too."""
    shape = LayerShape(case.key_heads, case.key_size, case.value_size, case.chunk)
    tables = [[0] * -(-(start + width) // BLOCK) for start, width in mix]
    count = sum(map(len, tables))
    numbers = chance.sample(range(count + 3), count)
    tables = [[numbers.pop() for _ in table] for table in tables]
    cache = KVCache([shape], count + 3, dtype, CPU)
    keys = [torch.randn(s + w, case.key_heads, case.key_size, dtype=dtype) for s, w in mix]
    values = [torch.randn(s + w, case.key_heads, case.value_size, dtype=dtype) for s, w in mix]
    if broken is not None:
        keys[broken].fill_(float("nan"))
        values[broken].fill_(float("nan"))
    for stored, given in ((cache.keys[0], keys), (cache.values[0], values)):
        stored.fill_(float("nan"))
        for table, (start, _), whole in zip(tables, mix, given, strict=True):
            used = table[: -(-start // BLOCK)]
            if zeroed:
                stored[used] = 0
            places = torch.tensor(table)[:, None] * BLOCK + torch.arange(BLOCK)
            stored.view(-1, *stored.shape[2:])[places.ravel()[:start]] = whole[:start]
    spans = [Span(table, *each) for table, each in zip(tables, mix, strict=True)]
    batch = Batch(spans, [0] * sum(width for _, width in mix), [])
    return Memory(cache, batch, AttentionMetadata(cache, batch), keys, values)


def step_of(mix: Sequence[tuple[int, int]]) -> AttentionMetadata:
    return memory(Case("one", key_heads=1), mix, random.Random(0)).step


def sees(case: Case, position: int, key: int) -> bool:
    near = not case.window or key > position - case.window
    same_chunk = not case.chunk or key // case.chunk == position // case.chunk
    return key <= position and near and same_chunk


def expected(
    case: Case, query: Tensor, keys: Tensor, values: Tensor, start: int, sinks: Tensor
) -> Tensor:
    """[w, H, Dv] for a chunk's [w, H, D], in float64."""
    seen = torch.tensor(
        [[sees(case, start + at, key) for key in range(len(keys))] for at in range(len(query))]
    )
    out = []
    for head in range(case.heads):
        own = head // (case.heads // case.key_heads)
        scores = query[:, head].double() @ keys[:, own].double().T * case.scale
        if case.softcap:
            scores = torch.tanh(scores / case.softcap) * case.softcap
        weights = torch.where(seen, scores.exp(), 0.0)
        extra = float(sinks[head].double().exp()) if case.sinks else 0.0
        out.append(weights / (weights.sum(1, keepdim=True) + extra) @ values[:, own].double())
    return torch.stack(out, 1)


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
]


def name(case: Case) -> str:
    differs = {k: v for k, v in vars(case).items() if v != getattr(Case(case.kind), k)}
    return " ".join([case.kind, *(f"{k}={v}" for k, v in differs.items())])


@pytest.mark.parametrize("case", CASES, ids=name)
def test_each_token_sees_its_own_sequence_only(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one sequence nothing is a number: that is not to be seen by others, even masked. The first
    time all masks are made in pieces."""
    chance, ordinary = random.Random(name(case)), paged.MOST
    torch.manual_seed(len(name(case)))
    for turn in range(3):
        mix = mixes(chance, case.kind)
        broken = (None, 0, len(mix) // 2)[turn]
        monkeypatch.setattr(paged, "MOST", (2000, ordinary, ordinary)[turn])
        there = memory(case, mix, chance, broken)
        query = [torch.randn(width, case.heads, case.key_size) for _, width in mix]
        if broken is not None:
            query[broken].fill_(float("nan"))
        new = [
            torch.cat([whole[start:] for (start, _), whole in zip(mix, given, strict=True)])
            for given in (there.keys, there.values)
        ]
        sinks = torch.randn(case.heads)
        q, k, v = (each.transpose(0, 1)[None] for each in (torch.cat(query), *new))
        with forward_context(there.step):
            out = attend(
                q, k, v, sinks if case.sinks else None, 0, case.scale, case.window, case.softcap
            )
        assert out.shape == (1, q.shape[2], case.heads, case.value_size)
        rows: Any = out[0].double()  # split is not annotated
        got = rows.split([width for _, width in mix])
        for place, (start, _) in enumerate(mix):
            if place == broken:
                assert bool(got[place].isnan().all())
                continue
            keys, values = there.keys[place], there.values[place]
            right = expected(case, query[place], keys, values, start, sinks)
            torch.testing.assert_close(got[place], right, atol=1e-5, rtol=1e-5)


def rows_of(group: SpanGroup, tokens: int) -> list[int]:
    rows = torch.arange(tokens) if group.rows is None else group.rows
    assert (group.target is None) == (group.rows is None)
    listed: list[int] = rows[slice(None) if group.real is None else group.real].tolist()
    assert group.target is None or group.target.tolist() == listed
    return listed


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("window", "chunk"), [(0, 0), (8, 0), (300, 0), (0, 24)])
def test_groups_take_each_row_once_and_pad_little(kind: str, window: int, chunk: int) -> None:
    chance = random.Random(kind)
    for _ in range(20):
        mix = mixes(chance, kind)
        step = step_of(mix)
        tokens = sum(width for _, width in mix)
        for masked in (False, True):
            groups = step.groups(window, chunk, masked)
            assert sorted(r for group in groups for r in rows_of(group, tokens)) == list(
                range(tokens)
            )
            for group in groups:
                chunks, width = group.shape
                assert width <= BLOCK or chunks * width <= SPREAD * len(rows_of(group, tokens))
                if masked:
                    assert group.seen is not None
                if group.seen is not None:
                    first, last = group.seen
                    seen = last.max(1) + 1 - first.min(1)  # keys that matter, of each
                    most = max(float(seen.min()) * SPREAD, float(seen.min()) + SLACK)
                    keys = chunks * width if group.blocks is None else len(group.blocks) * BLOCK
                    assert keys / chunks <= most + 2 * BLOCK


def test_decodes_of_similar_length_share_a_call() -> None:
    step = step_of([(n, 1) for n in range(40, 72)])
    [group] = step.groups(0, 0, False)
    assert group.shape == (32, 1)
    assert group.rows is None
    assert group.real is None


def test_fresh_prompts_of_one_length_need_no_mask_and_no_gathering() -> None:
    step = step_of([(0, 20)] * 3)
    [group] = step.groups(0, 0, False)
    assert (group.blocks, group.seen, group.rows) == (None, None, None)
    [windowed] = step.groups(8, 0, False)
    assert windowed.blocks is None
    assert windowed.seen is not None


def test_a_window_reads_the_blocks_it_sees_only() -> None:
    step = step_of([(1500, 1), (1410, 1)])
    [group] = step.groups(8, 0, False)
    assert group.blocks is not None
    assert len(group.blocks) == 2 * 2


@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (1000, 0.0), (0, 1.5)])
@pytest.mark.parametrize("mix", [[(8192, 8192)], [(6000, 4096), (5000, 4000)]])
def test_masks_of_long_chunks_take_little_memory(
    mix: list[tuple[int, int]], window: int, softcap: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted in places: of masks, and of all heads' scores where they are written out."""
    made: list[int] = []

    def attended(q: Tensor, k: Tensor, v: Tensor, mask: None, *rest: Any) -> Tensor:
        several = 2 if softcap or len(q) > 1 else 1  # query heads of a key head
        several *= case.key_heads if softcap else 1
        made.append(len(q) * q.shape[1] * k.shape[1] * several)
        return q.new_zeros(1)

    monkeypatch.setattr(paged, "mask_of", lambda *arguments: None)
    monkeypatch.setattr(paged, "_attend", attended)
    case = Case("one", window, softcap=softcap)
    step = memory(case, mix, random.Random(0)).step
    tokens = sum(width for _, width in mix)
    q, k, v = (torch.zeros(1, heads, tokens, 8) for heads in (4, 2, 2))
    with forward_context(step):
        attend(q, k, v, None, 0, 0.35, window, softcap)
    assert max(made) <= paged.MOST <= 1 << 26
    assert len(made) > 1
