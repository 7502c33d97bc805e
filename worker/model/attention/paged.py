"""Attention over the paged KV cache: the function that layers call, and its torch backend.

A batch is one row of tokens, span after span, each the tokens of one sequence. The layers find the
step's backend through the thread that runs the model. A layer first writes keys and values into the
blocks that the scheduler assigned (batching/block_pool.py); then each token attends to its own
sequence. AttentionMetadata does this with torch's functions; other backends are NativeMetadata
(native.py, CPUs with a compiler), RowsMetadata (backends/cuda/cuda_graphs.py, few rows on a GPU),
MixedMetadata (mixed.py, prompts beside such rows), VarlenMetadata (varlen.py, the same by flash
attention) and BidirectionalMetadata (bidirectional.py, images whose tokens attend to later ones).
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from batching.sequence import Batch
from worker.backends.cpu.torch_only import running_step
from worker.device.async_copy import to_device
from worker.model.attention.kv_cache import BLOCK, KVCache

ATTENTION = "onequeue_paged"
LATENT = "onequeue_latent"  # the name of a layer's LatentProjections (latent.py)
SHARED_LAYER = -1  # the first layer's number in a graph of several; that of the next is -2
# Spans share a call if the longest reach is at most MAX_REACH_RATIO times the shortest, or at most
# MAX_REACH_EXCESS tokens longer.
MAX_REACH_RATIO, MAX_REACH_EXCESS = 1.5, 256
# Elements of a mask (64 MB in two bytes), or of scores where those are materialized.
MAX_MASK_ELEMENTS = 1 << 25
MAX_FLASH_SIZE = 256  # of a query, in flash attention

# ── what layers call ──


class AttentionBackend(ABC):
    """The layout of a step's tokens, and how layers attend to them.

    `begin` and `end` run on the model's thread before and after the layers, `begin_layers` before
    compiled code of several layers, of which the first has that number.
    """

    cache: KVCache
    positions: Tensor  # [T]
    torch_only = False  # the model's layers run torch's operations too

    @abstractmethod
    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None,
        layer: int, scale: float, window: int, softcap: float,
    ) -> Tensor:  # fmt: skip
        """Write one layer's keys and values to the cache and attend.

        query, key, value: [1, heads, T, size]; sinks: [query heads]. Return [1, T, heads, size].
        `window`: number of tokens to attend to, the own one included; 0: all. `softcap`: bound of
        the scores; 0: none.
        """

    def begin(self) -> None: ...  # noqa: B027  # optional
    def begin_layers(self, number: int) -> None: ...  # noqa: B027
    def end(self) -> None: ...  # noqa: B027


# Runs the recurrent module of a number on a step's row: [1, T, H] → [1, T, size] (recurrent.py).
RunRecurrent = Callable[[int, Tensor], Tensor]

# .backend and .recurrent: of the step on this thread; .layer: that SHARED_LAYER stands for
_context = threading.local()


@contextmanager
def forward_context(
    backend: AttentionBackend, recurrent: RunRecurrent | None = None
) -> Iterator[None]:
    """Make a model that runs in the context, on this thread, attend by `backend`, and its recurrent
    layers run by `recurrent`."""
    _context.backend, _context.recurrent = backend, recurrent
    running_step.torch_only = backend.torch_only
    try:
        backend.begin()
        yield
    finally:
        backend.end()
        _context.backend = _context.recurrent = None
        running_step.torch_only = False


def step_recurrent() -> RunRecurrent | None:
    """Return what runs recurrent layers in the running step; None outside of one."""
    recurrent: RunRecurrent | None = getattr(_context, "recurrent", None)
    return recurrent


def call_as_layers(number: int, run: Callable[..., Any], *args: Any) -> Any:
    """Call `run`, in which SHARED_LAYER is the layer of this number."""
    _context.layer = number
    _context.backend.begin_layers(number)
    return run(*args)


def attend(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None,
    layer: int, scale: float, window: int, softcap: float,
) -> Tensor:  # fmt: skip
    """Attend by the backend of the running step; see AttentionBackend.attend."""
    backend: AttentionBackend = _context.backend
    if layer <= SHARED_LAYER:
        layer = _context.layer + SHARED_LAYER - layer
    return backend.attend(query, key, value, sinks, layer, scale, window, softcap)


# `attend` as operations that are opaque to the compiler: a graph depends only on the number of
# tokens. The cache is reached through the thread, so no argument is mutated. On a CPU the native
# library replaces the first operation's kernel, and calls the second in steps of other backends.
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
    """Implement transformers' attention interface: [1, heads, T, size] → [1, T, heads, size]."""
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    options = (module.layer_idx, scale, sliding_window or 0, softcap or 0.0)
    latent = getattr(module, LATENT, None)
    if latent is not None:
        query = latent.absorb(query)
    is_tracing = torch.compiler.is_dynamo_compiling()
    run = torch.ops.onequeue.paged_attention if is_tracing else attend
    out: Tensor = run(query, key, value, s_aux, *options)
    return out if latent is None else latent.expand(out), None


# Without a registered mask function transformers builds no mask, and does not read the positions,
# which on a GPU would wait for all launched steps.
AttentionInterface.register(ATTENTION, attention_function)


# ── the torch backend ──


class AttentionMetadata(AttentionBackend):
    """Paged attention by torch's functions.

    Spans of similar reach share a call: their blocks are gathered side by side, and a mask hides
    what a query must not attend to.
    """

    torch_only = True

    def __init__(self, cache: KVCache, batch: Batch) -> None:
        self.cache = cache
        self.blocks = [span.blocks for span in batch.spans]
        self.starts = np.array([span.start for span in batch.spans])
        self.widths = np.array([span.width for span in batch.spans])
        self.offsets = np.array(batch.offsets)  # first row of each span
        self.grouped = np.ones(len(self.widths), np.bool_)  # spans that `attend` gathers
        positions = np.array(batch.positions)
        blocks = [
            np.repeat(b[s // BLOCK : (s + w - 1) // BLOCK + 1], BLOCK)[s % BLOCK : s % BLOCK + w]
            for b, s, w in batch.spans
        ]
        slots = np.concatenate(blocks) * BLOCK + positions % BLOCK
        # blocks that the step starts and does not fill
        started = [b[(s + w) // BLOCK] for b, s, w in batch.spans if 0 < (s + w) % BLOCK <= w]
        self.positions = to_device(positions, cache.device)  # [T]
        self.slots = to_device(slots, cache.device)  # [T]
        self.started_blocks = to_device(started, cache.device)
        self._groups: dict[tuple[int, int, bool], list[SpanGroup]] = {}

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None,
        layer: int, scale: float, window: int, softcap: float,
    ) -> Tensor:  # fmt: skip
        cache, shape = self.cache, self.cache.layers[layer]
        if shape.temperature:
            query = shape.rescale(query, self.positions)
        q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))  # [T, heads, size]
        if len(self.started_blocks):
            for stored in (cache.keys[layer], cache.values[layer]):
                stored.index_fill_(0, self.started_blocks, 0)
        if panels := cache.panels[layer]:
            panels.write(self.slots, k, v)
        else:
            for stored, new in ((cache.keys[layer], k), (cache.values[layer], v)):
                stored.view(-1, *stored.shape[2:]).index_copy_(0, self.slots, new)
        return self._attend_grouped(q, k, v, sinks, layer, scale, window, softcap).unsqueeze(0)

    def _attend_grouped(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None,
        layer: int, scale: float, window: int, softcap: float,
    ) -> Tensor:  # fmt: skip
        """Attend from the rows of `grouped` spans; return [T, heads, size], other rows undefined.

        q, k, v: [T, heads, size], of the step. The cache has its keys and values.
        """
        out = q.new_empty(q.shape[0], q.shape[1], v.shape[2])
        needs_mask = softcap > 0 or sinks is not None
        for group in self.groups(window, self.cache.layers[layer].chunk, needs_mask):
            b, t = group.shape
            if group.blocks is None:
                ks, vs = (select(new, group.rows) for new in (k, v))
            elif panels := self.cache.panels[layer]:
                ks, vs = panels.gather(group.blocks)
            else:
                stored = self.cache.keys[layer], self.cache.values[layer]
                ks, vs = (x.index_select(0, group.blocks) for x in stored)
            ks, vs = (x.view(b, -1, *x.shape[-2:]) for x in (ks, vs))
            qs = select(q, group.rows).view(b, t, *q.shape[1:])
            attended = group.attend(qs, ks, vs, scale, softcap, sinks)  # [b, t, H, Dv]
            attended = attended.reshape(b * t, *out.shape[1:])
            if group.target_rows is None:
                out = attended.contiguous()  # as the operation's fake kernel promises
            else:
                out.index_copy_(0, group.target_rows, select(attended, group.unpadded))
        return out

    def groups(self, window: int, chunk: int, needs_mask: bool) -> list["SpanGroup"]:
        """Return the groups for layers with this window and attention chunk (0: none).

        `needs_mask`: make a mask even where it is the causal one.
        """
        key = (window, chunk, needs_mask)
        if key not in self._groups:
            self._groups[key] = [self._group(m, *key) for m in self._members(window, chunk)]
        return self._groups[key]

    def _members(self, window: int, chunk: int) -> Iterator[Any]:
        """Yield the span numbers of each group: whole prompts apart from those with a prefix in
        the cache, of similar reach."""
        first = self._first_gathered(slice(None), window, chunk)
        reach = self.starts + self.widths - first // BLOCK * BLOCK
        without_prefix = (self.starts == 0) & (self.widths > 1)
        for is_member in (self.grouped & without_prefix, self.grouped & ~without_prefix):
            members = np.flatnonzero(is_member)
            if len(members) and _can_share_call(reach[members], self.widths[members]):
                yield members
                continue
            members = members[np.lexsort((reach[members], self.widths[members] > BLOCK))]
            begin = 0
            for end in range(1, len(members) + 1):
                extended = members[begin : end + 1]
                if end == len(members) or not _can_share_call(
                    reach[extended], self.widths[extended]
                ):
                    yield np.sort(members[begin:end])
                    begin = end

    def _group(self, members: Any, window: int, chunk: int, needs_mask: bool) -> "SpanGroup":
        starts, widths = self.starts[members], self.widths[members]
        b, t, device = len(members), int(widths.max()), self.cache.device
        within = np.arange(t)
        queries = starts[:, None] + within  # [b, t] positions
        is_token = within < widths[:, None]  # [b, t]
        rows = self.offsets[members, None] + np.minimum(within, widths[:, None] - 1)
        unpadded = None if is_token.all() else to_device(np.flatnonzero(is_token), device)
        is_whole_step = unpadded is None and b == len(self.widths)
        blocks = ranges = device_ranges = mask = None
        begin, keys = np.zeros_like(starts), t
        if t == 1 or starts.any():
            gathered, begin = self._gathered(members, window, chunk)
            blocks, keys = to_device(gathered.ravel(), device), gathered.shape[1] * BLOCK
        if blocks is not None or needs_mask or 0 < window < t or 0 < chunk < t:
            positions = np.stack(self._visible_range(queries, window, chunk, rows))
            ranges = np.clip(positions - begin[:, None], 0, keys - 1)
            device_ranges = to_device(ranges, device)
            if t <= BLOCK:
                mask = make_mask(device_ranges, slice(0, keys), self.cache.dtype)
        target_rows = None if is_whole_step else to_device(rows[is_token], device)
        rows = None if is_whole_step else to_device(rows.ravel(), device)
        return SpanGroup(rows, unpadded, target_rows, (b, t), blocks, ranges, device_ranges, mask)

    def _gathered(self, members: Any, window: int, chunk: int) -> tuple[Any, Any]:
        """Return the members' visible blocks [b, n], and the position where each row begins [b]."""
        starts, widths = self.starts[members], self.widths[members]
        first = self._first_gathered(members, window, chunk) // BLOCK
        last = (starts + widths - 1) // BLOCK
        n = int((last - first).max()) + 1
        blocks = np.empty((len(members), n), dtype=np.int64)
        for row, member in enumerate(members):
            visible = self.blocks[member][first[row] : last[row] + 1]
            blocks[row, : len(visible)] = visible
            blocks[row, len(visible) :] = visible[-1]
        return blocks, first * BLOCK

    def _first_gathered(self, members: Any, window: int, chunk: int) -> Any:
        """Return the first position that any query of each member attends to."""
        return self._first_visible(self.starts[members], window, chunk)

    def _visible_range(self, queries: Any, window: int, chunk: int, rows: Any) -> Any:
        """Return the first and last position [b, t] that each query attends to; `rows` [b, t]: of
        the queries in the step."""
        return self._first_visible(queries, window, chunk), queries

    def _first_visible(self, position: Any, window: int, chunk: int) -> Any:
        first = np.maximum(position - window + 1, 0) if window else np.zeros_like(position)
        return np.maximum(first, position // chunk * chunk) if chunk else first


def select(tensor: Tensor, rows: Tensor | None) -> Tensor:
    """Return these rows; None: all."""
    return tensor if rows is None else tensor.index_select(0, rows)


def _can_share_call(reach: Any, widths: Any) -> bool:
    """Return whether padding all spans to the longest costs less than a call for each."""
    similar = reach.max() <= max(reach.min() * MAX_REACH_RATIO, reach.min() + MAX_REACH_EXCESS)
    return bool(similar and widths.max() <= max(BLOCK, widths.min() * MAX_REACH_RATIO))


# ── one call for a group of spans ──


@dataclass(frozen=True, slots=True)
class SpanGroup:
    """Spans that share one attention call: b spans, padded to the t tokens of the widest.

    Each query attends to one range of its span's keys. The masks of long spans are recomputed for
    each layer, for few queries at a time, which bounds their memory.
    """

    rows: Tensor | None  # [b * t] rows of the step, padding repeats the last; None: all, in order
    unpadded: Tensor | None  # indices into `rows` without padding; None: all
    target_rows: Tensor | None  # `rows` without padding; None: all, in order
    shape: tuple[int, int]  # b, t
    blocks: Tensor | None  # [b * n] blocks to gather; None: a span attends to its own tokens only
    ranges: Any  # int [2, b, t] first and last key of each query; None: causal
    device_ranges: Tensor | None  # `ranges` on the device
    mask: Tensor | None  # of short spans, shared by all layers

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float, sinks: Tensor | None
    ) -> Tensor:
        """Return [b, t, H, Dv] for q [b, t, H, D], k [b, keys, Hkv, D] and v [b, keys, Hkv, Dv]."""
        heads_per_key = q.shape[2] // k.shape[2]
        if self.device_ranges is None:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            gqa = heads_per_key > 1
            if gqa and k.shape[1] == 1 and q.shape[3] > MAX_FLASH_SIZE:
                # views; with fewer key heads only flash attention does not store all scores
                k, v = (x.expand(-1, q.shape[1], -1, -1) for x in (k, v))
            out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=gqa)
            return out.transpose(1, 2)
        if self.mask is not None:
            return _masked_attention(q, k, v, self.mask, scale, softcap, sinks)
        # of one span, and of several, whose masks are repeated for each query head
        limits = MAX_MASK_ELEMENTS, MAX_MASK_ELEMENTS // heads_per_key
        if _materializes_scores(softcap, sinks):
            limits = MAX_MASK_ELEMENTS // q.shape[2], MAX_MASK_ELEMENTS // q.shape[2]
        out = q.new_empty(*q.shape[:3], v.shape[3])
        b, t = self.shape
        for spans, queries, keys in _pieces(self.ranges, slice(0, b), slice(0, t), limits):
            mask = make_mask(self.device_ranges[:, spans, queries], keys, q.dtype)
            out[spans, queries] = _masked_attention(
                q[spans, queries], k[spans, keys], v[spans, keys], mask, scale, softcap, sinks
            )
        return out


def make_mask(ranges: Tensor, keys: slice, dtype: torch.dtype) -> Tensor:
    """Return [b, 1, t, keys]: 0 for keys in the `ranges` [2, b, t] of the queries, else -inf."""
    first, last = ranges.unsqueeze(-1)
    positions = torch.arange(keys.start, keys.stop, device=ranges.device)
    hidden = (positions < first).logical_or_(positions > last)
    mask = torch.zeros(hidden.shape, dtype=dtype, device=ranges.device)
    return mask.masked_fill_(hidden, -torch.inf).unsqueeze(1)


def _pieces(
    ranges: Any, spans: slice, queries: slice, limits: tuple[int, int]
) -> Iterator[tuple[slice, slice, slice]]:
    """Yield spans, their queries and the keys of those, with masks of at most `limits[0]` elements
    for one span and `limits[1]` for several."""
    first, last = ranges[:, spans, queries]
    keys = slice(int(first.min()), int(last.max()) + 1)
    b, t = first.shape
    if b * t == 1 or b * t * (keys.stop - keys.start) <= limits[b > 1]:
        yield spans, queries, keys
    elif b > 1:
        middle = spans.start + b // 2
        yield from _pieces(ranges, slice(spans.start, middle), queries, limits)
        yield from _pieces(ranges, slice(middle, spans.stop), queries, limits)
    else:
        middle = queries.start + t // 2
        yield from _pieces(ranges, spans, slice(queries.start, middle), limits)
        yield from _pieces(ranges, spans, slice(middle, queries.stop), limits)


def _materializes_scores(softcap: float, sinks: Tensor | None) -> bool:
    return softcap > 0 or sinks is not None


def _masked_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float,
    sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """Return [b, t, H, Dv] for q [b, t, H, D], k [b, keys, Hkv, D] and v [b, keys, Hkv, Dv].

    Keys are not repeated: the query heads of a key head become rows of one head, which repeats the
    mask. For many queries of one span they become a batch instead, which does not.
    """
    b, t, heads, size = q.shape
    groups = heads // k.shape[2]
    k, v = k.transpose(1, 2), v.transpose(1, 2)  # [b, Hkv, keys, D]
    q = q.view(b, t, -1, groups, size).permute(0, 3, 2, 1, 4)  # [b, groups, Hkv, t, D]
    if b == 1 and t > BLOCK and not _materializes_scores(softcap, sinks):
        k, v = (x.expand(groups, -1, -1, -1) for x in (k, v))
        out = scaled_dot_product_attention(q[0], k, v, attn_mask=mask, scale=scale)
        return out.permute(2, 1, 0, 3).flatten(1, 2).unsqueeze(0)
    q = q.transpose(1, 2).flatten(2, 3)
    if _materializes_scores(softcap, sinks):
        out = _softmax_attention(q, k, v, mask, scale, softcap, sinks)
    else:
        mask = mask.unsqueeze(2).expand(-1, -1, groups, -1, -1).flatten(2, 3)
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    out = out.view(b, -1, groups, t, out.shape[3])
    return out.permute(0, 3, 1, 2, 4).flatten(2, 3)


def _softmax_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float,
    sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """Compute scores, as fused functions have no soft cap (Gemma 2) and no sinks [H] (GPT-OSS)."""
    scores = torch.matmul(q, k.transpose(2, 3)) * scale
    if softcap > 0:
        scores = torch.tanh(scores / softcap) * softcap
    scores.view(*scores.shape[:2], -1, *mask.shape[2:]).add_(mask.unsqueeze(2))
    if sinks is not None:
        b, heads, rows, _ = scores.shape
        by_row = sinks.view(1, heads, -1, 1).repeat(b, 1, 1, rows * heads // len(sinks))
        scores = torch.cat([scores, by_row.flatten(2).unsqueeze(-1).to(scores.dtype)], -1)
    weights = torch.softmax(scores.float(), -1)[..., : k.shape[2]]
    return torch.matmul(weights.to(v.dtype), v)
