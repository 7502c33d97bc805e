"""The packed rows of a generation step over paged keys and values.

A step is one row of tokens, chunk after chunk, each chunk some tokens of one sequence. Their keys
and values go into the blocks that the scheduler gave the sequence (batching/block_pool.py), then
each token sees its own sequence only. Chunks of similar reach share a call: their blocks are
gathered side by side, what is not theirs is masked. Full, sliding-window and chunked attention,
grouped queries, soft-capping and attention sinks; for one device as for another, since everything
is tensor operations. Few rows on a GPU go another way (cuda_graphs.py).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

BLOCK = 16  # token positions in a block
# Chunks share a call while the farthest reach is at most this factor and this many tokens more.
SPREAD, SLACK = 1.5, 256


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer keeps per token, and how far it looks back."""

    heads: int  # of keys and values
    key_size: int
    value_size: int
    chunk: int = 0  # tokens see their own chunk of so many only (Llama 4); 0: no such limit
    # Llama 4 warms queries by their place in the row: its floor_scale and attn_scale
    warming: tuple[float, float] | None = None


class AttentionParams(NamedTuple):
    """What a layer asks of attention."""

    layer: int
    scale: float
    window: int  # 0: all before
    softcap: float  # 0: none


class PagedCache:
    """Keys and values of all layers, [blocks, BLOCK, heads, size] each.

    Reserved, not touched: a system gives memory when it is first written to. Masked positions are
    multiplied, not skipped, so what was there before must not be seen even there: a block's rest is
    zeroed when its first token is written, and padding repeats what is one's own.
    """

    def __init__(
        self, layers: Sequence[LayerShape], blocks: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.layers = layers
        self.device = device

        def reserved(heads: int, size: int) -> Tensor:
            return torch.empty(blocks, BLOCK, heads, size, dtype=dtype, device=device)

        self.keys = [reserved(layer.heads, layer.key_size) for layer in layers]
        self.values = [reserved(layer.heads, layer.value_size) for layer in layers]


def block_bytes(layers: Sequence[LayerShape], dtype: torch.dtype) -> int:
    sizes = sum(layer.heads * (layer.key_size + layer.value_size) for layer in layers)
    return BLOCK * sizes * dtype.itemsize


@dataclass(frozen=True, slots=True)
class Group:
    """Chunks that share one attention call, padded to the widest."""

    rows: Tensor | None  # [b * t] rows of the step, padding repeats the last; None: all, in order
    inverse: Tensor | None  # places of `rows` that are no padding; None: all are real
    shape: tuple[int, int]  # b chunks, t tokens each
    blocks: Tensor | None  # [b * n] blocks to gather; None: a chunk sees nothing but itself
    mask: Tensor | None  # [b, 1, t, keys], 0 or -inf; None: causal


# Of each chunk: the blocks of its sequence, the position of its first token, how many they are.
Chunks = Sequence[tuple[Sequence[int], int, int]]


class Step:
    """Where a step's tokens are: built once, used by every layer."""

    def __init__(self, cache: PagedCache, chunks: Chunks, dtype: Any) -> None:
        self.cache = cache
        self.dtype = dtype
        self.blocks = [blocks for blocks, _, _ in chunks]
        self.starts = np.array([start for _, start, _ in chunks])
        self.widths = np.array([width for _, _, width in chunks])
        self.offsets = np.cumsum(self.widths) - self.widths  # first row of each chunk
        positions = np.concatenate([np.arange(s, s + w) for _, s, w in chunks])
        slots = np.concatenate(
            [
                np.asarray(blocks)[np.arange(s, s + w) // BLOCK] * BLOCK
                + np.arange(s, s + w) % BLOCK
                for blocks, s, w in chunks
            ]
        )
        self.positions = torch.from_numpy(positions).to(cache.device)  # [T]
        self.slots = torch.from_numpy(slots).to(cache.device)  # [T], block and place in one
        # blocks that the step begins and does not fill
        begun = [b[(s + w) // BLOCK] for b, s, w in chunks if 0 < (s + w) % BLOCK <= w]
        self.begun = torch.tensor(begun, dtype=torch.long, device=cache.device)
        self._groups: dict[tuple[int, int, bool], list[Group]] = {}
        self._rewarmed: dict[tuple[float, float], Tensor] = {}

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, how: AttentionParams
    ) -> Tensor:
        """Of one layer, [1, heads, T, size] in, [1, T, heads, size] out."""
        layer, scale, window, softcap = how
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))  # [T, heads, size]
        shape = self.cache.layers[layer]
        if shape.warming:
            q = (q * self.rewarmed(*shape.warming)).to(q.dtype)
        if len(self.begun):
            keys.index_fill_(0, self.begun, 0)
            values.index_fill_(0, self.begun, 0)
        keys.view(-1, *keys.shape[2:]).index_copy_(0, self.slots, k)
        values.view(-1, *values.shape[2:]).index_copy_(0, self.slots, v)
        out = q.new_empty(q.shape[0], q.shape[1], v.shape[2])
        by_hand = softcap > 0 or sinks is not None
        for group in self.groups(window, shape.chunk, by_hand):
            b, t = group.shape
            qs = q if group.rows is None else q.index_select(0, group.rows)
            if group.blocks is not None:
                ks = keys.index_select(0, group.blocks).view(b, -1, *keys.shape[2:])
                vs = values.index_select(0, group.blocks).view(b, -1, *values.shape[2:])
            else:
                ks, vs = (
                    (p if group.rows is None else p.index_select(0, group.rows)).view(
                        b, t, *p.shape[1:]
                    )
                    for p in (k, v)
                )
            qs = qs.view(b, t, *q.shape[1:])
            attended = _attend_group(qs, ks, vs, group.mask, scale, softcap, sinks)  # [b, t, H, Dv]
            attended = attended.reshape(b * t, *out.shape[1:])
            if group.rows is None:
                out = attended.contiguous()  # as the compiler was told
            elif group.inverse is None:
                out.index_copy_(0, group.rows, attended)
            else:
                rows = group.rows.index_select(0, group.inverse)
                out.index_copy_(0, rows, attended.index_select(0, group.inverse))
        return out.unsqueeze(0)

    def groups(self, window: int, chunk: int, masked: bool) -> list[Group]:
        """For layers that look back `window` tokens (0: all) or to their chunk's beginning;
        `masked`: causal is not enough, write it down."""
        key = (window, chunk, masked)
        if key not in self._groups:
            self._groups[key] = [
                self._group(members, *key) for members in self._members(window, chunk)
            ]
        return self._groups[key]

    def rewarmed(self, floor: float, scale: float) -> Tensor:
        """[T, 1, 1], once for all layers."""
        if (floor, scale) not in self._rewarmed:
            self._rewarmed[floor, scale] = rewarmed(self.positions, floor, scale)
        return self._rewarmed[floor, scale]

    def _members(self, window: int, chunk: int) -> Iterator[Any]:
        """Chunks by what they see: themselves, or blocks, of similar number and width."""
        first = self._first_seen(self.starts, window, chunk)
        reach = self.starts + self.widths - first // BLOCK * BLOCK
        fresh = self.starts == 0
        for kind in (fresh & (self.widths > 1), ~(fresh & (self.widths > 1))):
            members = np.flatnonzero(kind)
            if not len(members):
                continue
            if reach[members].max() > _limit(reach[members].min()) or _ragged(self.widths[members]):
                members = members[np.lexsort((reach[members], self.widths[members] > BLOCK))]
            begin = 0
            for end in range(1, len(members) + 1):
                part = members[begin:end]
                if end == len(members) or self._splits(part, members[end], reach):
                    yield np.sort(part)
                    begin = end

    def _splits(self, part: Any, following: int, reach: Any) -> bool:
        widths = self.widths[[*part, following]]
        return bool(reach[following] > _limit(reach[part].min()) or _ragged(widths))

    def _first_seen(self, position: Any, window: int, chunk: int) -> Any:
        first = np.zeros_like(position)
        if window:
            first = np.maximum(first, position - window + 1)
        if chunk:
            first = np.maximum(first, position // chunk * chunk)
        return first

    def _group(self, members: Any, window: int, chunk: int, masked: bool) -> Group:
        starts, widths = self.starts[members], self.widths[members]
        b, t = len(members), int(widths.max())
        within = np.arange(t)
        real = within < widths[:, None]  # [b, t]
        rows = self.offsets[members, None] + np.minimum(within, widths[:, None] - 1)
        every = b == len(self.widths) and bool(real.all())
        inverse = None if real.all() else np.flatnonzero(real)
        queries = starts[:, None] + within  # [b, t] positions
        own = bool((starts == 0).all()) and t > 1
        if own and not masked and not (window and t > window) and not (chunk and t > chunk):
            blocks, mask = None, None
        elif own:
            blocks, keys = None, np.broadcast_to(within, (b, t))
            mask = self._mask(queries, keys, window, chunk)
        else:
            blocks, keys = self._gathered(members, window, chunk)
            mask = self._mask(queries, keys, window, chunk)
        return Group(
            None if every else self._tensor(rows.ravel()),
            None if inverse is None else self._tensor(inverse),
            (b, t),
            None if blocks is None else self._tensor(blocks.ravel()),
            mask,
        )

    def _gathered(self, members: Any, window: int, chunk: int) -> tuple[Any, Any]:
        """The members' blocks [b, n] from the first that is seen, and the positions in them."""
        starts, widths = self.starts[members], self.widths[members]
        first = self._first_seen(starts, window, chunk) // BLOCK
        last = (starts + widths - 1) // BLOCK
        n = int((last - first).max()) + 1
        blocks = np.empty((len(members), n), dtype=np.int64)
        for row, member in enumerate(members):
            own = self.blocks[member][first[row] : last[row] + 1]
            blocks[row, : len(own)] = own
            blocks[row, len(own) :] = own[-1]
        return blocks, first[:, None] * BLOCK + np.arange(n * BLOCK)

    def _mask(self, queries: Any, keys: Any, window: int, chunk: int) -> Tensor:
        position = queries[:, :, None]
        seen = keys[:, None, :] <= position
        if window or chunk:
            seen &= keys[:, None, :] >= self._first_seen(position, window, chunk)
        mask = torch.zeros(seen.shape, dtype=self.dtype)
        mask.masked_fill_(torch.from_numpy(~seen), float("-inf"))
        return mask.unsqueeze(1).to(self.cache.device)

    def _tensor(self, values: Any) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.cache.device)


def rewarmed(positions: Tensor, floor: float, scale: float) -> Tensor:
    """[T, 1, 1]: what makes queries that were warmed by their row warmed by their position."""
    rows = torch.arange(len(positions), device=positions.device)
    right, was = (
        torch.log1p(torch.floor((place.float() + 1) / floor)) * scale + 1
        for place in (positions, rows)
    )
    return (right / was)[:, None, None]


def _limit(shortest: int) -> float:
    return max(shortest * SPREAD, shortest + SLACK)


def _ragged(widths: Any) -> bool:
    """Whether padding all to the widest would cost more than a call of their own."""
    return bool(widths.max() > BLOCK and widths.max() > SPREAD * widths.min())


def _attend_group(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    """[b, t, H, D] over [b, keys, Hkv, D]. A key head's queries become rows of one head, so keys
    are not repeated."""
    b, t, heads, _ = q.shape
    groups = heads // k.shape[2]
    k, v = k.transpose(1, 2), v.transpose(1, 2)  # [b, Hkv, keys, D]
    if mask is None:
        done = scaled_dot_product_attention(
            q.transpose(1, 2), k, v, is_causal=True, scale=scale, enable_gqa=groups > 1
        )
        return done.transpose(1, 2)
    q = q.view(b, t, -1, groups, q.shape[3]).permute(0, 2, 3, 1, 4).flatten(2, 3)
    if groups > 1:
        mask = mask.unsqueeze(2).expand(-1, -1, groups, -1, -1).flatten(2, 3)
    if softcap > 0 or sinks is not None:
        done = _by_hand(q, k, v, mask, scale, softcap, sinks, t)
    else:
        done = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    done = done.view(b, -1, groups, t, done.shape[3])
    return done.permute(0, 3, 1, 2, 4).flatten(2, 3)  # [b, t, H, Dv]


def _by_hand(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    scale: float,
    softcap: float,
    sinks: Tensor | None,
    t: int,
) -> Tensor:
    """For what the fused function lacks: capped scores (Gemma 2), sinks (GPT-OSS)."""
    scores = torch.matmul(q, k.transpose(2, 3)) * scale
    if softcap > 0:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores + mask
    if sinks is None:
        return torch.matmul(torch.softmax(scores.float(), -1).to(v.dtype), v)
    heads = k.shape[1]
    sink = sinks.view(1, heads, -1, 1).expand(len(q), -1, -1, t).flatten(2).unsqueeze(-1)
    weights = torch.softmax(torch.cat([scores, sink.to(scores.dtype)], -1).float(), -1)
    return torch.matmul(weights[..., :-1].to(v.dtype), v)
