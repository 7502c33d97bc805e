"""Attention of spans side by side by torch's functions, as attention/paged.py calls it.

A query sees a stretch of its span's keys, which a mask shows. Masks are made on the device, from
where the stretches begin and end. Those of long spans are made again for each layer, of so few
queries at a time that they take little memory however far the queries reach.

Attention over the paged KV cache: what layers call, and how they attend by torch's functions.

Layers find a step's metadata through the thread, on which it is told before the model runs. A batch
is one row of tokens, span after span, each some tokens of one sequence. A layer's keys and values
go into the blocks that the scheduler gave the sequence (batching/block_pool.py), then each token
sees its sequence only. Spans of similar reach share a call (attention/paged.py): their blocks are
gathered side by side, what is not theirs is masked. Elsewhere: few rows on a GPU (cuda_graphs.py),
a CPU with a compiler (attention/native.py).

Paged attention where parts of prompts are seen in both directions, as pictures are by some
models, beside what is seen causally, by torch's functions (attention/paged.py).

Such a part is run in one step, or its beginning was found in the cache.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from batching.sequence import Batch
from worker.device.async_copy import to_device
from worker.model.attention.kv_cache import BLOCK, KVCache

# Places of a mask, 64 MB of them in two bytes; or of scores, where they are written out.
MOST = 1 << 25


@dataclass(frozen=True, slots=True)
class SpanGroup:
    """Spans that share one attention call, padded to the widest."""

    rows: Tensor | None  # [b * t] rows of the step, padding repeats the last; None: all, in order
    real: Tensor | None  # places of `rows` that are no padding; None: all
    target: Tensor | None  # the rows at those places; None: all, in order
    shape: tuple[int, int]  # b spans, t tokens each
    blocks: Tensor | None  # [b * n] blocks to gather; None: a span sees nothing but itself
    seen: Any  # [2, b, t] of the span's keys, the first and last that a query sees; None: causal
    stretches: Tensor | None  # the same on the device
    mask: Tensor | None  # of short spans: all layers' one

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float, sinks: Tensor | None
    ) -> Tensor:
        """[b, t, H, D] over [b, keys, Hkv, D] to [b, t, H, Dv]."""
        groups = q.shape[2] // k.shape[2]
        if self.stretches is None:
            q, k, v = (each.transpose(1, 2) for each in (q, k, v))
            gqa = groups > 1
            done = scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=scale, enable_gqa=gqa
            )
            return done.transpose(1, 2)
        if self.mask is not None:
            return _attend(q, k, v, self.mask, scale, softcap, sinks)
        most = MOST, MOST // groups  # of one span, and of several, whose masks are repeated
        if _written_out(softcap, sinks):
            most = MOST // q.shape[2], MOST // q.shape[2]
        out = q.new_empty(*q.shape[:3], v.shape[3])
        b, t = self.shape
        for spans, queries, keys in _pieces(self.seen, slice(0, b), slice(0, t), most):
            mask = mask_of(self.stretches[:, spans, queries], keys, q.dtype)
            out[spans, queries] = _attend(
                q[spans, queries], k[spans, keys], v[spans, keys], mask, scale, softcap, sinks
            )
        return out


def mask_of(stretches: Tensor, keys: slice, dtype: torch.dtype) -> Tensor:
    """[b, 1, t, keys], 0 where a query sees a key, or -inf, for the stretches [2, b, t]."""
    first, last = stretches.unsqueeze(-1)
    places = torch.arange(keys.start, keys.stop, device=stretches.device)
    hidden = (places < first).logical_or_(places > last)
    mask = torch.zeros(hidden.shape, dtype=dtype, device=stretches.device)
    return mask.masked_fill_(hidden, -torch.inf).unsqueeze(1)


def _pieces(
    seen: Any, spans: slice, queries: slice, most: tuple[int, int]
) -> Iterator[tuple[slice, slice, slice]]:
    """Spans, queries of them and the keys that these see, so few together that their mask has at
    most so many places: `most[0]` of one span, `most[1]` of several."""
    first, last = seen[:, spans, queries]
    keys = slice(int(first.min()), int(last.max()) + 1)
    b, t = first.shape
    if b * t == 1 or b * t * (keys.stop - keys.start) <= most[b > 1]:
        yield spans, queries, keys
    elif b > 1:
        middle = spans.start + b // 2
        yield from _pieces(seen, slice(spans.start, middle), queries, most)
        yield from _pieces(seen, slice(middle, spans.stop), queries, most)
    else:
        middle = queries.start + t // 2
        yield from _pieces(seen, spans, slice(queries.start, middle), most)
        yield from _pieces(seen, spans, slice(middle, queries.stop), most)


def _written_out(softcap: float, sinks: Tensor | None) -> bool:
    return softcap > 0 or sinks is not None


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float,
    sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """[b, t, H, D] over [b, keys, Hkv, D] to [b, t, H, Dv]. Keys are not repeated: a key head's
    queries become rows of one head. For many queries that would repeat much of a mask: of one span,
    they become a batch."""
    b, t, heads, size = q.shape
    groups = heads // k.shape[2]
    k, v = k.transpose(1, 2), v.transpose(1, 2)  # [b, Hkv, keys, D]
    q = q.view(b, t, -1, groups, size).permute(0, 3, 2, 1, 4)  # [b, groups, Hkv, t, D]
    if b == 1 and t > BLOCK and not _written_out(softcap, sinks):
        k, v = (each.expand(groups, -1, -1, -1) for each in (k, v))
        done = scaled_dot_product_attention(q[0], k, v, attn_mask=mask, scale=scale)
        return done.permute(2, 1, 0, 3).flatten(1, 2).unsqueeze(0)
    q = q.transpose(1, 2).flatten(2, 3)
    if _written_out(softcap, sinks):
        done = _softmax_attention(q, k, v, mask, scale, softcap, sinks)
    else:
        mask = mask.unsqueeze(2).expand(-1, -1, groups, -1, -1).flatten(2, 3)
        done = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    done = done.view(b, -1, groups, t, done.shape[3])
    return done.permute(0, 3, 1, 2, 4).flatten(2, 3)


def _softmax_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float,
    sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """Attention written out, for what the fused function lacks: capped scores (Gemma 2), and sinks
    [H] (GPT-OSS)."""
    scores = torch.matmul(q, k.transpose(2, 3)) * scale
    if softcap > 0:
        scores = torch.tanh(scores / softcap) * softcap
    scores.view(*scores.shape[:2], -1, *mask.shape[2:]).add_(mask.unsqueeze(2))
    if sinks is not None:
        b, heads, rows, _ = scores.shape
        each = sinks.view(1, heads, -1, 1).repeat(b, 1, 1, rows * heads // len(sinks))
        scores = torch.cat([scores, each.flatten(2).unsqueeze(-1).to(scores.dtype)], -1)
    weights = torch.softmax(scores.float(), -1)[..., : k.shape[2]]
    return torch.matmul(weights.to(v.dtype), v)


ATTENTION = "onequeue_paged"
# Spans share a call while the farthest reach is at most this factor and this many tokens more.
SPREAD, SLACK = 1.5, 256


class AttentionBackend(ABC):
    """A step's metadata: where its tokens lie, and how layers attend to them. `begin` and `end`:
    before and after they run, on their thread."""

    cache: KVCache
    positions: Tensor  # [T]

    @abstractmethod
    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None,
        layer: int, scale: float, window: int, softcap: float,
    ) -> Tensor:  # fmt: skip
        """Of one layer, [1, heads, T, size] in, [1, T, heads, size] out. `window`: how many tokens
        back are seen, 0: all. `softcap`: what scores are capped to, 0: nothing."""

    def begin(self) -> None: ...  # noqa: B027  # nothing to do for most
    def end(self) -> None: ...  # noqa: B027


_context = threading.local()  # .metadata: of the step that runs on this thread


@contextmanager
def forward_context(metadata: AttentionBackend) -> Iterator[None]:
    """The layers of a model that is run inside, on this thread, attend by this metadata."""
    _context.metadata = metadata
    try:
        metadata.begin()
        yield
    finally:
        metadata.end()
        _context.metadata = None


def attend(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None,
    layer: int, scale: float, window: int, softcap: float,
) -> Tensor:  # fmt: skip
    metadata: AttentionBackend = _context.metadata
    return metadata.attend(query, key, value, sinks, layer, scale, window, softcap)


# The same, opaque to the compiler: its graph depends on the number of tokens only. The cache is
# found through the thread, not passed, and each layer writes its part alone. On a CPU, the native
# operation takes the first one's place once it is loaded, and leaves steps that are not its own to
# the second.
_attend_op = torch.library.custom_op("onequeue::paged_attention", attend, mutates_args=())
torch.library.custom_op("onequeue::torch_attention", attend, mutates_args=())


@_attend_op.register_fake
def _(query: Any, key: Any, value: Any, sinks: Any, *rest: Any) -> Any:
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])


def attention_function(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any,
    scaling: float | None = None, sliding_window: int | None = None, softcap: float | None = None,
    s_aux: Tensor | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """transformers' attention interface: [1, heads, T, size] in, [1, T, heads, size] out."""
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    options = (module.layer_idx, scale, sliding_window or 0, softcap or 0.0)
    if torch.compiler.is_compiling():
        return torch.ops.onequeue.paged_attention(query, key, value, s_aux, *options), None
    return attend(query, key, value, s_aux, *options), None


# No function that makes its mask is registered: for such, transformers makes none, and does not
# look at the positions, which a GPU would have to wait for.
AttentionInterface.register(ATTENTION, attention_function)


class AttentionMetadata(AttentionBackend):
    """Where a step's tokens are: built once, used by every layer."""

    def __init__(self, cache: KVCache, batch: Batch) -> None:
        self.cache = cache
        self.blocks = [span.blocks for span in batch.spans]
        self.starts = np.array([span.start for span in batch.spans])
        self.widths = np.array([span.width for span in batch.spans])
        self.offsets = np.array(batch.offsets)  # first row of each span
        positions = np.array(batch.positions)
        blocks = [
            np.repeat(b[s // BLOCK : (s + w - 1) // BLOCK + 1], BLOCK)[s % BLOCK : s % BLOCK + w]
            for b, s, w in batch.spans
        ]
        slots = np.concatenate(blocks) * BLOCK + positions % BLOCK
        begun = [b[(s + w) // BLOCK] for b, s, w in batch.spans if 0 < (s + w) % BLOCK <= w]
        self.positions = to_device(positions, cache.device)  # [T]
        self.slots = to_device(slots, cache.device)  # [T]
        self.begun = to_device(begun, cache.device)  # blocks that the step begins, not to fill them
        self._groups: dict[tuple[int, int, bool], list[SpanGroup]] = {}

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None,
        layer: int, scale: float, window: int, softcap: float,
    ) -> Tensor:  # fmt: skip
        cache, shape = self.cache, self.cache.layers[layer]
        keys, values = cache.keys[layer], cache.values[layer]
        if shape.temperature:
            query = shape.rescaled(query, self.positions)
        q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))  # [T, heads, size]
        for stored, new in ((keys, k), (values, v)):
            if len(self.begun):
                stored.index_fill_(0, self.begun, 0)
            stored.view(-1, *stored.shape[2:]).index_copy_(0, self.slots, new)
        out = q.new_empty(q.shape[0], q.shape[1], v.shape[2])
        masked = softcap > 0 or sinks is not None
        for group in self.groups(window, shape.chunk, masked):
            b, t = group.shape
            if group.blocks is not None:
                ks, vs = (each.index_select(0, group.blocks) for each in (keys, values))
            else:
                ks, vs = (_rows(each, group.rows) for each in (k, v))
            ks, vs = (each.view(b, -1, *each.shape[-2:]) for each in (ks, vs))
            qs = _rows(q, group.rows).view(b, t, *q.shape[1:])
            attended = group.attend(qs, ks, vs, scale, softcap, sinks)  # [b, t, H, Dv]
            attended = attended.reshape(b * t, *out.shape[1:])
            if group.target is None:
                out = attended.contiguous()  # as the op's fake says of it
            else:
                out.index_copy_(0, group.target, _rows(attended, group.real))
        return out.unsqueeze(0)

    def groups(self, window: int, chunk: int, masked: bool) -> list[SpanGroup]:
        """For layers that look back `window` tokens (0: all) or to their chunk's beginning;
        `masked`: a mask is wanted even where it is the causal one."""
        key = (window, chunk, masked)
        if key not in self._groups:
            self._groups[key] = [self._group(m, *key) for m in self._members(window, chunk)]
        return self._groups[key]

    def _members(self, window: int, chunk: int) -> Iterator[Any]:
        """Numbers of the spans of each group: they see themselves, or blocks, alike in reach."""
        first = self._first_gathered(slice(None), window, chunk)
        reach = self.starts + self.widths - first // BLOCK * BLOCK
        fresh = (self.starts == 0) & (self.widths > 1)
        for members in (np.flatnonzero(fresh), np.flatnonzero(~fresh)):
            if len(members) and _share_a_call(reach[members], self.widths[members]):
                yield members
                continue
            members = members[np.lexsort((reach[members], self.widths[members] > BLOCK))]
            begin = 0
            for end in range(1, len(members) + 1):
                more = members[begin : end + 1]
                if end == len(members) or not _share_a_call(reach[more], self.widths[more]):
                    yield np.sort(members[begin:end])
                    begin = end

    def _first_gathered(self, members: Any, window: int, chunk: int) -> Any:
        return self._first_seen(self.starts[members], window, chunk)

    def _first_seen(self, position: Any, window: int, chunk: int) -> Any:
        first = np.maximum(position - window + 1, 0) if window else np.zeros_like(position)
        return np.maximum(first, position // chunk * chunk) if chunk else first

    def _group(self, members: Any, window: int, chunk: int, masked: bool) -> SpanGroup:
        starts, widths = self.starts[members], self.widths[members]
        b, t, device = len(members), int(widths.max()), self.cache.device
        within = np.arange(t)
        queries = starts[:, None] + within  # [b, t] positions
        real = within < widths[:, None]  # [b, t]
        rows = self.offsets[members, None] + np.minimum(within, widths[:, None] - 1)
        places = None if real.all() else to_device(np.flatnonzero(real), device)
        every = places is None and b == len(self.widths)
        blocks = seen = stretches = mask = None
        begin, keys = np.zeros_like(starts), t
        if t == 1 or starts.any():
            gathered, begin = self._gathered(members, window, chunk)
            blocks, keys = to_device(gathered.ravel(), device), gathered.shape[1] * BLOCK
        if blocks is not None or masked or 0 < window < t or 0 < chunk < t:
            stretch = np.stack(self._seen(queries, window, chunk, rows))
            seen = np.clip(stretch - begin[:, None], 0, keys - 1)
            stretches = to_device(seen, device)
            mask = mask_of(stretches, slice(0, keys), self.cache.dtype) if t <= BLOCK else None
        target = None if every else to_device(rows[real], device)
        rows = None if every else to_device(rows.ravel(), device)
        return SpanGroup(rows, places, target, (b, t), blocks, seen, stretches, mask)

    def _gathered(self, members: Any, window: int, chunk: int) -> tuple[Any, Any]:
        """The members' blocks [b, n] from the first that is seen, and where those begin [b]."""
        starts, widths = self.starts[members], self.widths[members]
        first = self._first_gathered(members, window, chunk) // BLOCK
        last = (starts + widths - 1) // BLOCK
        n = int((last - first).max()) + 1
        blocks = np.empty((len(members), n), dtype=np.int64)
        for row, member in enumerate(members):
            seen = self.blocks[member][first[row] : last[row] + 1]
            blocks[row, : len(seen)] = seen
            blocks[row, len(seen) :] = seen[-1]
        return blocks, first * BLOCK

    def _seen(self, queries: Any, window: int, chunk: int, rows: Any) -> Any:
        """[b, t] first and last position that each query sees; `rows`: of the queries in the
        step."""
        return self._first_seen(queries, window, chunk), queries


def _rows(tensor: Tensor, rows: Tensor | None) -> Tensor:
    return tensor if rows is None else tensor.index_select(0, rows)


def _share_a_call(reach: Any, widths: Any) -> bool:
    """Whether that costs less than a call each: padding all to the farthest and the widest."""
    near = reach.max() <= max(reach.min() * SPREAD, reach.min() + SLACK)
    return bool(near and widths.max() <= max(BLOCK, widths.min() * SPREAD))


def has_blocks(batch: Batch) -> bool:
    inputs = (batch.chunks[number].sequence.multimodal for number in batch.multimodal_spans)
    return any(multimodal and multimodal.bidirectional_spans for multimodal in inputs)


class BidirectionalMetadata(AttentionMetadata):
    """A row of the step sees, beside what it sees anyway, `firsts` to `lasts` [T] of its
    sequence."""

    def __init__(self, cache: KVCache, batch: Batch) -> None:
        super().__init__(cache, batch)
        self.firsts = np.array(batch.positions)
        self.lasts = self.firsts.copy()
        for number in batch.multimodal_spans:
            multimodal = batch.chunks[number].sequence.multimodal
            _, start, width = batch.spans[number]
            shift = batch.offsets[number] - start
            for first, stop in multimodal.bidirectional_spans if multimodal else ():
                begin, end = max(first, start), min(stop, start + width)
                if begin < end:
                    self.firsts[begin + shift : end + shift] = first
                    self.lasts[begin + shift : end + shift] = stop - 1

    def groups(self, window: int, chunk: int, masked: bool) -> list[SpanGroup]:
        return super().groups(window, chunk, True)

    def _first_gathered(self, members: Any, window: int, chunk: int) -> Any:
        first = super()._first_gathered(members, window, chunk)
        return np.minimum(first, self.firsts[self.offsets[members]])

    def _seen(self, queries: Any, window: int, chunk: int, rows: Any) -> Any:
        first, last = super()._seen(queries, window, chunk, rows)
        return np.minimum(first, self.firsts[rows]), np.maximum(last, self.lasts[rows])
