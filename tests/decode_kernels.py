"""Reference implementations in Python of the kernels of backends/cuda/triton_decode.py."""

import torch
from torch import Tensor

from worker.model.attention.kv_cache import BLOCK


def write(
    key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slots: Tensor, tails: Tensor
) -> None:
    """Compute the same as the Triton kernel of this name."""
    for stored, new in ((keys, key), (values, value)):
        flat = stored.view(-1, *stored.shape[2:])
        for row in range(len(slots)):
            flat[slots[row]] = new[row]
            flat[slots[row] + 1 : slots[row] + 1 + tails[row]] = 0


def attend(
    query: Tensor, keys: Tensor, values: Tensor, tables: Tensor, table_starts: Tensor,
    positions: Tensor, *, programs: int, scale: float, window: int, chunk: int, softcap: float,
    sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """Compute the same as the Triton kernel of this name."""
    out = []
    rows = zip(query, table_starts.tolist(), positions.tolist(), strict=True)
    for q, start, position in rows:
        first = max(0, position - window + 1) if window else 0
        first = max(first, position // chunk * chunk) if chunk else first
        blocks = tables[start : start + position // BLOCK + 1].long()
        k, v = (s[blocks].flatten(0, 1)[first : position + 1] for s in (keys, values))
        k, v = (x.repeat_interleave(len(q) // x.shape[1], 1) for x in (k, v))
        scores = torch.einsum("hd,khd->hk", q, k) * scale
        scores = torch.tanh(scores / softcap) * softcap if softcap else scores
        if sinks is not None:
            scores = torch.cat([scores, sinks[:, None]], 1)
        weights = scores.softmax(-1)[:, : len(k)]
        out.append(torch.einsum("hk,khd->hd", weights, v))
    return torch.stack(out)
