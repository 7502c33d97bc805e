"""Attention of single tokens over paged keys and values, in Triton: for steps of few rows on a GPU.

Every row has a table of blocks and a position, read from memory: a captured graph of a
step serves any lengths. Few rows leave a GPU idle, so a row's keys are split among programs and the
parts put together by a second kernel, as in Dao et al., "Flash-Decoding" (2023).
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 64  # keys that a program looks at together
WIDE = 512  # bytes of a key beyond which it looks at half as many: they are to fit on the chip
SPLITS = 16  # parts at most that a row's keys are split into
# What the matrix units take at least in each direction.
LEAST = 16


@triton.jit
def _write(
    key, value, keys, values, slots, rests,
    key_row, key_head, value_row, value_head,
    heads: tl.constexpr, key_size: tl.constexpr, key_pad: tl.constexpr,
    value_size: tl.constexpr, value_pad: tl.constexpr,
):  # fmt: skip
    """A row's key and value go to its slot; the `rests` slots after it are zeroed, as eager steps
    multiply what they mask there."""
    row, head = tl.program_id(0), tl.program_id(1)
    slot, rest = tl.load(slots + row), tl.load(rests + row)
    d, e = tl.arange(0, key_pad), tl.arange(0, value_pad)
    new_key = tl.load(key + row * key_row + head * key_head + d, mask=d < key_size, other=0.0)
    new_value = tl.load(
        value + row * value_row + head * value_head + e, mask=e < value_size, other=0.0
    )
    tl.store(keys + (slot * heads + head) * key_size + d, new_key, mask=d < key_size)
    tl.store(values + (slot * heads + head) * value_size + e, new_value, mask=e < value_size)
    for after in range(1, rest + 1):
        place = (slot + after) * heads + head
        tl.store(keys + place * key_size + d, tl.zeros_like(new_key), mask=d < key_size)
        tl.store(values + place * value_size + e, tl.zeros_like(new_value), mask=e < value_size)


@triton.jit
def _attend(
    query, keys, values, tables, positions, peaks, totals, parts, scale, softcap,
    query_row, query_head, table_row,
    heads: tl.constexpr, group: tl.constexpr, group_pad: tl.constexpr,
    key_size: tl.constexpr, key_pad: tl.constexpr,
    value_size: tl.constexpr, value_pad: tl.constexpr,
    block_size: tl.constexpr, tile_size: tl.constexpr, count: tl.constexpr,
    window: tl.constexpr, chunk: tl.constexpr, capped: tl.constexpr,
):  # fmt: skip
    """One part of what a row sees, for the queries of one key head: the sums of weighted values and
    of weights, and the largest score, which weights are relative to."""
    row, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    last = tl.load(positions + row)
    first = last * 0
    if window:
        first = tl.maximum(first, last - window + 1)
    if chunk:
        first = tl.maximum(first, last // chunk * chunk)
    begin = first // tile_size
    each = (last // tile_size - begin + count) // count  # tiles a part, rounded up
    begin += part * each
    end = tl.minimum(begin + each, last // tile_size + 1)
    g, d, e = tl.arange(0, group_pad), tl.arange(0, key_pad), tl.arange(0, value_pad)
    asking = query + row * query_row + (head * group + g)[:, None] * query_head + d[None, :]
    q = tl.load(asking, mask=(g < group)[:, None] & (d < key_size)[None, :], other=0.0)
    peak = tl.full([group_pad], float("-inf"), tl.float32)
    total = tl.zeros([group_pad], tl.float32)
    summed = tl.zeros([group_pad, value_pad], tl.float32)
    for tile in range(begin, end):
        place = tile * tile_size + tl.arange(0, tile_size)
        seen = (place >= first) & (place <= last)
        block = tl.load(tables + row * table_row + place // block_size, mask=seen, other=0)
        slot = (block.to(tl.int64) * block_size + place % block_size) * heads + head
        wanted = seen[:, None] & (d < key_size)[None, :]
        k = tl.load(keys + slot[:, None] * key_size + d[None, :], mask=wanted, other=0.0)
        scores = tl.dot(q.to(k.dtype), tl.trans(k), input_precision="ieee") * scale
        if capped:  # softcap · tanh(scores / softcap)
            scores = softcap - 2 * softcap / (tl.exp(2 * scores / softcap) + 1)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        largest = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp(scores - largest[:, None])
        shrink = tl.exp(peak - largest)
        wanted = seen[:, None] & (e < value_size)[None, :]
        v = tl.load(values + slot[:, None] * value_size + e[None, :], mask=wanted, other=0.0)
        more = tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        summed = summed * shrink[:, None] + more
        total = total * shrink + tl.sum(weights, 1)
        peak = largest
    at = ((row * heads + head) * group + g) * count + part
    tl.store(peaks + at, peak, mask=g < group)
    tl.store(totals + at, total, mask=g < group)
    stored = (g < group)[:, None] & (e < value_size)[None, :]
    tl.store(parts + at[:, None] * value_size + e[None, :], summed, mask=stored)


@triton.jit
def _together(
    peaks, totals, parts, sinks, out,
    heads: tl.constexpr, value_size: tl.constexpr, value_pad: tl.constexpr,
    count: tl.constexpr, has_sinks: tl.constexpr,
):  # fmt: skip
    """The parts of one row and query head become its output."""
    row, head = tl.program_id(0), tl.program_id(1)
    p, e = tl.arange(0, count), tl.arange(0, value_pad)
    at = (row * heads + head) * count + p
    peak = tl.load(peaks + at)
    largest = tl.max(peak, 0)
    weight = tl.exp(peak - largest)  # none where a part saw nothing
    total = tl.sum(weight * tl.load(totals + at), 0)
    if has_sinks:
        total += tl.exp(tl.load(sinks + head).to(tl.float32) - largest)
    summed = tl.load(
        parts + at[:, None] * value_size + e[None, :], mask=(e < value_size)[None, :], other=0.0
    )
    made = tl.sum(weight[:, None] * summed, 0) / total
    tl.store(out + (row * heads + head) * value_size + e, made, mask=e < value_size)


def write(
    key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slots: Tensor, rests: Tensor
) -> None:
    """[T, heads, size] into [blocks, BLOCK, heads, size] at slots [T]; `rests` [T] are zeroed."""
    rows, heads, _ = key.shape
    key_size, value_size = key.shape[2], value.shape[2]
    _write[rows, heads](
        key, value, keys, values, slots, rests, *key.stride()[:2], *value.stride()[:2],
        heads=heads, key_size=key_size, key_pad=triton.next_power_of_2(key_size),
        value_size=value_size, value_pad=triton.next_power_of_2(value_size),
    )  # fmt: skip


def attend(
    query: Tensor, keys: Tensor, values: Tensor, tables: Tensor, positions: Tensor, *,
    programs: int, scale: float, window: int = 0, chunk: int = 0, softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """[T, H, D] queries at positions [T], each over the blocks in its row of tables [T, n], to
    [T, H, Dv]. `programs`: how many the device should be given, at least."""
    rows, query_heads, size = query.shape
    _, block, heads, value_size = values.shape
    group = query_heads // heads
    parts = min(SPLITS, triton.next_power_of_2(-(-programs // (rows * heads))))
    made: dict[str, Any] = {"device": query.device, "dtype": torch.float32}
    peaks = torch.empty(rows, query_heads, parts, **made)
    totals = torch.empty_like(peaks)
    summed = torch.empty(rows, query_heads, parts, value_size, **made)
    value_pad = max(LEAST, triton.next_power_of_2(value_size))
    wide = size * keys.element_size() > WIDE
    _attend[rows, heads, parts](
        query, keys, values, tables, positions, peaks, totals, summed, scale, softcap,
        *query.stride()[:2], tables.stride(0),
        heads=heads, group=group, group_pad=max(LEAST, triton.next_power_of_2(group)),
        key_size=size, key_pad=max(LEAST, triton.next_power_of_2(size)),
        value_size=value_size, value_pad=value_pad,
        block_size=block, tile_size=TILE // 2 if wide else TILE, count=parts,
        window=window, chunk=chunk, capped=softcap > 0,
    )  # fmt: skip
    out = query.new_empty(rows, query_heads, value_size)
    _together[rows, query_heads](
        peaks, totals, summed, totals if sinks is None else sinks, out,
        heads=query_heads, value_size=value_size, value_pad=value_pad,
        count=parts, has_sinks=sinks is not None,
    )  # fmt: skip
    return out
