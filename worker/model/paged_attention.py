"""Attention over the paged KV cache: what layers call, and how they attend by torch's functions.

Layers find a step's metadata through the thread, on which it is told before the model runs. A batch
is one row of tokens, span after span, each some tokens of one sequence. A layer's keys and values
go into the blocks that the scheduler gave the sequence (batching/block_pool.py), then each token
sees its sequence only. Spans of similar reach share a call (span_attention.py): their blocks are
gathered side by side, what is not theirs is masked. Elsewhere: few rows on a GPU (cuda_graphs.py),
a CPU with a compiler (native_attention.py).
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface

from batching.sequence import Batch
from worker.model.kv_cache import BLOCK, KVCache
from worker.model.span_attention import Group, mask_of
from worker.model.transfers import to_device

ATTENTION = "onequeue_paged"
# Spans share a call while the farthest reach is at most this factor and this many tokens more.
SPREAD, SLACK = 1.5, 256


class Attends(ABC):
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
def forward_context(metadata: Attends) -> Iterator[None]:
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
    metadata: Attends = _context.metadata
    return metadata.attend(query, key, value, sinks, layer, scale, window, softcap)


# The same, opaque to the compiler: its graph depends on the number of tokens only. The cache is
# found through the thread, not passed, and each layer writes its part alone. On a CPU, the native
# operation takes the first one's place once it is loaded, and leaves steps that are not its own to
# the second.
_attend_op = torch.library.custom_op("onequeue::paged_attention", attend, mutates_args=())
torch.library.custom_op("onequeue::plain_attention", attend, mutates_args=())


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


class AttentionMetadata(Attends):
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
        self._groups: dict[tuple[int, int, bool], list[Group]] = {}

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

    def groups(self, window: int, chunk: int, masked: bool) -> list[Group]:
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

    def _group(self, members: Any, window: int, chunk: int, masked: bool) -> Group:
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
        return Group(rows, places, target, (b, t), blocks, seen, stretches, mask)

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
