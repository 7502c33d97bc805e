"""Attention of spans side by side by torch's functions, as paged_attention.py calls it.

A query sees a stretch of its span's keys, which a mask shows. Masks are made on the device, from
where the stretches begin and end. Those of long spans are made again for each layer, of so few
queries at a time that they take little memory however far the queries reach.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from worker.model.kv_cache import BLOCK

# Places of a mask, 64 MB of them in two bytes; or of scores, where they are written out.
MOST = 1 << 25


@dataclass(frozen=True, slots=True)
class Group:
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
