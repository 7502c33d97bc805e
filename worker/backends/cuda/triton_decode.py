"""Triton kernels for steps of few rows on a GPU: one query token over paged keys and values.

Each row has a block table and a position, both read from memory, so that a captured graph of a step
serves sequences of any length. Few rows leave a GPU idle: a row's keys are split among programs,
and a second kernel merges the parts, as in Dao et al., "Flash-Decoding" (2023).
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE_KEYS = 64  # keys that a program loads at a time
# Of longer keys a tile has fewer, so that it fits into shared memory. They are loaded in two parts,
# a power of two and the rest, by programs of MIN_DOT_SIZE query heads.
MAX_TILE_KEY_BYTES = 512
MAX_SPLITS = 16  # parts of a row's keys
MIN_DOT_SIZE = 16  # smallest dimension of tl.dot
MAX_ROWS = 512  # of a launch: bounds the memory of their parts


@triton.jit
def _write(
    key, value, keys, values, slots, tails,
    key_row, key_head, value_row, value_head, value_slot,
    heads: tl.constexpr, key_size: tl.constexpr, key_pad: tl.constexpr,
    value_size: tl.constexpr, value_pad: tl.constexpr,
):  # fmt: skip
    """Store a row's key and value in its slot, and zero the `tails` slots after it, which eager
    steps mask but multiply."""
    row, head = tl.program_id(0), tl.program_id(1)
    slot, tail = tl.load(slots + row), tl.load(tails + row)
    d, e = tl.arange(0, key_pad), tl.arange(0, value_pad)
    new_key = tl.load(key + row * key_row + head * key_head + d, mask=d < key_size, other=0.0)
    new_value = tl.load(
        value + row * value_row + head * value_head + e, mask=e < value_size, other=0.0
    )
    tl.store(keys + (slot * heads + head) * key_size + d, new_key, mask=d < key_size)
    tl.store(values + slot * value_slot + head * value_size + e, new_value, mask=e < value_size)
    for after in range(1, tail + 1):
        zeroed = slot + after
        k = keys + (zeroed * heads + head) * key_size + d
        v = values + zeroed * value_slot + head * value_size + e
        tl.store(k, tl.zeros_like(new_key), mask=d < key_size)
        tl.store(v, tl.zeros_like(new_value), mask=e < value_size)


@triton.jit
def _attend(
    query, keys, values, tables, table_starts, positions, maxima, totals, sums, scale, softcap,
    query_row, query_head, value_slot,
    heads: tl.constexpr, group: tl.constexpr, group_pad: tl.constexpr,
    key_size: tl.constexpr, key_pad: tl.constexpr, rest_pad: tl.constexpr,
    value_size: tl.constexpr, value_pad: tl.constexpr,
    block_size: tl.constexpr, tile_size: tl.constexpr, count: tl.constexpr,
    window: tl.constexpr, chunk: tl.constexpr, capped: tl.constexpr, values_in_keys: tl.constexpr,
):  # fmt: skip
    """Compute one part of a row's attention for up to group_pad queries of one key head: the
    maximum score, and the sums of the weights relative to it and of the weighted values.

    The first `key_pad` numbers of a key are loaded together, then up to `rest_pad` others.
    `values_in_keys`: the first ones are the value.
    """
    row, part = tl.program_id(0), tl.program_id(2)
    pieces: tl.constexpr = (group + group_pad - 1) // group_pad
    head, piece = tl.program_id(1) // pieces, tl.program_id(1) % pieces
    last = tl.load(positions + row)
    table = tables + tl.load(table_starts + row)
    first = last * 0
    if window:
        first = tl.maximum(first, last - window + 1)
    if chunk:
        first = tl.maximum(first, last // chunk * chunk)
    begin = first // tile_size
    tiles = (last // tile_size - begin + count) // count  # of a part, rounded up
    begin += part * tiles
    end = tl.minimum(begin + tiles, last // tile_size + 1)
    g, d, e = tl.arange(0, group_pad), tl.arange(0, key_pad), tl.arange(0, value_pad)
    g += piece * group_pad
    q_pointers = query + row * query_row + (head * group + g)[:, None] * query_head
    q_mask = (g < group)[:, None]
    q = tl.load(q_pointers + d[None, :], mask=q_mask & (d < key_size)[None, :], other=0.0)
    if rest_pad:
        r = key_pad + tl.arange(0, rest_pad)
        q_rest = tl.load(q_pointers + r[None, :], mask=q_mask & (r < key_size)[None, :], other=0.0)
    maximum = tl.full([group_pad], float("-inf"), tl.float32)
    total = tl.zeros([group_pad], tl.float32)
    values_sum = tl.zeros([group_pad, value_pad], tl.float32)
    for tile in range(begin, end):
        position = tile * tile_size + tl.arange(0, tile_size)
        visible = (position >= first) & (position <= last)
        block = tl.load(table + position // block_size, mask=visible, other=0)
        slot = block.to(tl.int64) * block_size + position % block_size
        k_pointers = keys + (slot * heads + head)[:, None] * key_size
        k_mask = visible[:, None] & (d < key_size)[None, :]
        k = tl.load(k_pointers + d[None, :], mask=k_mask, other=0.0)
        scores = tl.dot(q.to(k.dtype), tl.trans(k), input_precision="ieee")
        if rest_pad:
            rest_mask = visible[:, None] & (r < key_size)[None, :]
            k_rest = tl.load(k_pointers + r[None, :], mask=rest_mask, other=0.0)
            scores += tl.dot(q_rest.to(k.dtype), tl.trans(k_rest), input_precision="ieee")
        scores *= scale
        if capped:  # softcap · tanh(scores / softcap)
            scores = softcap - 2 * softcap / (tl.exp(2 * scores / softcap) + 1)
        scores = tl.where(visible[None, :], scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        weights = tl.exp(scores - new_maximum[:, None])
        rescale = tl.exp(maximum - new_maximum)
        if values_in_keys:
            v = k
        else:
            v_pointers = values + slot[:, None] * value_slot + head * value_size + e[None, :]
            v_mask = visible[:, None] & (e < value_size)[None, :]
            v = tl.load(v_pointers, mask=v_mask, other=0.0)
        weighted = tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        values_sum = values_sum * rescale[:, None] + weighted
        total = total * rescale + tl.sum(weights, 1)
        maximum = new_maximum
    at = ((row * heads + head) * group + g) * count + part
    tl.store(maxima + at, maximum, mask=g < group)
    tl.store(totals + at, total, mask=g < group)
    out_mask = (g < group)[:, None] & (e < value_size)[None, :]
    tl.store(sums + at[:, None] * value_size + e[None, :], values_sum, mask=out_mask)


@triton.jit
def _merge(
    maxima, totals, sums, sinks, out,
    heads: tl.constexpr, value_size: tl.constexpr, value_pad: tl.constexpr,
    count: tl.constexpr, has_sinks: tl.constexpr,
):  # fmt: skip
    """Merge the parts of one row and query head into its output."""
    row, head = tl.program_id(0), tl.program_id(1)
    p, e = tl.arange(0, count), tl.arange(0, value_pad)
    at = (row * heads + head) * count + p
    maximum = tl.load(maxima + at)
    row_maximum = tl.max(maximum, 0)
    weight = tl.exp(maximum - row_maximum)  # 0 for a part without keys
    total = tl.sum(weight * tl.load(totals + at), 0)
    if has_sinks:
        total += tl.exp(tl.load(sinks + head).to(tl.float32) - row_maximum)
    values_sum = tl.load(
        sums + at[:, None] * value_size + e[None, :], mask=(e < value_size)[None, :], other=0.0
    )
    attended = tl.sum(weight[:, None] * values_sum, 0) / total
    tl.store(out + (row * heads + head) * value_size + e, attended, mask=e < value_size)


def write(
    key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slots: Tensor, tails: Tensor
) -> None:
    """Write key and value [T, heads, size] into keys and values [blocks, BLOCK, heads, size].

    Row t goes to slot slots[t], counted over all blocks; the tails[t] slots after it are zeroed.
    """
    rows, heads, _ = key.shape
    key_size, value_size = key.shape[2], value.shape[2]
    _write[rows, heads](
        key, value, keys, values, slots, tails, *key.stride()[:2], *value.stride()[:2],
        values.stride(1), heads=heads, key_size=key_size, key_pad=triton.next_power_of_2(key_size),
        value_size=value_size, value_pad=triton.next_power_of_2(value_size),
    )  # fmt: skip


def attend(
    query: Tensor, keys: Tensor, values: Tensor, tables: Tensor, table_starts: Tensor,
    positions: Tensor, *, programs: int, scale: float, window: int = 0, chunk: int = 0,
    softcap: float = 0.0, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attend from each query [T, H, D], at positions [T], over the blocks of its table, which
    begins in `tables` at table_starts[t].

    keys, values: [blocks, BLOCK, Hkv, size]; sinks: [H]. `window`, `chunk`: limits of the attention
    in tokens, 0: none. `programs`: least number of programs to launch, as far as MAX_SPLITS allows.
    Return [T, H, Dv] in the queries' dtype; sums are float32.
    """
    rows, query_heads, size = query.shape
    if rows > MAX_ROWS:
        by_row = query, table_starts, positions
        slices = zip(*(torch.split(x, MAX_ROWS) for x in by_row), strict=True)
        return torch.cat([
            attend(
                q, keys, values, tables, starts, at, programs=programs, scale=scale,
                window=window, chunk=chunk, softcap=softcap, sinks=sinks,
            )
            for q, starts, at in slices
        ])  # fmt: skip
    _, block, heads, value_size = values.shape
    group = query_heads // heads
    key_bytes = size * keys.element_size()
    tile = min(TILE_KEYS, triton.next_power_of_2(TILE_KEYS * MAX_TILE_KEY_BYTES // key_bytes))
    group_pad = max(MIN_DOT_SIZE, triton.next_power_of_2(group))
    key_pad = max(MIN_DOT_SIZE, triton.next_power_of_2(size))
    rest_pad = 0
    if key_bytes > MAX_TILE_KEY_BYTES:
        group_pad = MIN_DOT_SIZE
        if key_pad > size:
            key_pad //= 2
            rest_pad = max(MIN_DOT_SIZE, triton.next_power_of_2(size - key_pad))
    pieces = triton.cdiv(group, group_pad)
    parts = min(MAX_SPLITS, triton.next_power_of_2(-(-programs // (rows * heads * pieces))))
    options: dict[str, Any] = {"device": query.device, "dtype": torch.float32}
    maxima = torch.empty(rows, query_heads, parts, **options)
    totals = torch.empty_like(maxima)
    sums = torch.empty(rows, query_heads, parts, value_size, **options)
    value_pad = max(MIN_DOT_SIZE, triton.next_power_of_2(value_size))
    in_keys = values.data_ptr() == keys.data_ptr() and value_size == key_pad
    _attend[rows, heads * pieces, parts](
        query, keys, values, tables, table_starts, positions, maxima, totals, sums, scale, softcap,
        *query.stride()[:2], values.stride(1),
        heads=heads, group=group, group_pad=group_pad,
        key_size=size, key_pad=key_pad, rest_pad=rest_pad,
        value_size=value_size, value_pad=value_pad,
        block_size=block, tile_size=tile, count=parts,
        window=window, chunk=chunk, capped=softcap > 0, values_in_keys=in_keys,
    )  # fmt: skip
    out = query.new_empty(rows, query_heads, value_size)
    _merge[rows, query_heads](
        maxima, totals, sums, totals if sinks is None else sinks, out,
        heads=query_heads, value_size=value_size, value_pad=value_pad,
        count=parts, has_sinks=sinks is not None,
    )  # fmt: skip
    return out
