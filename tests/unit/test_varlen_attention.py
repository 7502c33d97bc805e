"""On a GPU, the prompts of a step share one call of torch's flash attention, and decodes attend by
the decode kernel.

Python functions stand in for torch's operator and the kernel: no GPU is needed.
"""

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import decode_kernels
from tests.matrix import matrix
from tests.unit.test_paged_attention import CASES, Case, check, memory, mixes, name
from worker.backends import cuda as cuda_package
from worker.backends.cuda import varlen
from worker.backends.cuda.mixed import MAX_SPAN_WIDTH, MixedMetadata
from worker.backends.cuda.varlen import GQA, VarlenMetadata
from worker.model.attention.paged import SpanGroup


def varlen_attn(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor,
    max_q: int, max_k: int, *, scale: float, window_size: tuple[int, int], **gqa: bool,
) -> Tensor:  # fmt: skip
    """Compute what torch's operator documents: the last query attends to the last key."""
    assert gqa == GQA
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    queries, keys, values = (
        torch.tensor_split(x, bounds[1:-1].tolist())
        for x, bounds in ((query, cu_seq_q), (key, cu_seq_k), (value, cu_seq_k))
    )
    assert (max_q, max_k) == (max(map(len, queries)), max(map(len, keys)))
    left, right = window_size
    assert right == 0
    out = []
    for q, k, v in zip(queries, keys, values, strict=True):
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        behind = torch.arange(len(q))[:, None] + len(k) - len(q) - torch.arange(len(k))
        visible = (behind >= 0) & (behind <= (left if left >= 0 else len(k)))
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        weights = torch.where(visible, scores, -torch.inf).softmax(-1)
        out.append(torch.einsum("hqk,khd->hqd", weights, v))
    return torch.cat(out, 1).transpose(0, 1)  # as torch's, laid out as the query may be


@pytest.fixture(autouse=True)
def rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each call of the decode kernel."""
    counts: list[int] = []

    def attend(query: Tensor, *arguments: Any, **named: Any) -> Tensor:
        counts.append(len(query))
        return decode_kernels.attend(query, *arguments, **named)

    kernels = SimpleNamespace(attend=attend)
    monkeypatch.setattr(cuda_package, "triton_decode", kernels, raising=False)
    return counts


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Numbers of queries and keys of each call."""
    counts: list[tuple[int, int]] = []

    def counted(query: Tensor, key: Tensor, *arguments: Any, **named: Any) -> Tensor:
        counts.append((len(query), len(key)))
        return varlen_attn(query, key, *arguments, **named)

    monkeypatch.setattr(varlen, "varlen_attn", counted)
    monkeypatch.setattr(varlen, "has_flash_attention", lambda q, v: q.shape[-1] == v.shape[-1])
    return counts


@pytest.mark.parametrize("case", matrix(CASES, *CASES[::3]), ids=name)
def test_each_token_attends_to_its_own_sequence_only(
    case: Case, calls: list[tuple[int, int]]
) -> None:
    torch.manual_seed(0)
    chance = random.Random(name(case))
    for broken in (None, 0):
        mix = mixes(chance, case.kind)
        calls.clear()
        check(case, mix, chance, VarlenMetadata, (broken,))
        prompts = [width for _, width in mix if width > MAX_SPAN_WIDTH]
        others = case.softcap or case.sinks or case.chunk or case.value_size != case.key_size
        assert len(calls) == (1 if prompts and not others else 0)
        assert not calls or calls[0][0] == sum(prompts)


@pytest.mark.parametrize(
    ("mix", "window", "expected"),
    [
        ([(0, 40), (0, 17), (5, 1)], 0, (57, 57)),  # the step's own keys
        ([(100, 40), (0, 17)], 0, (57, 157)),
        ([(100, 40), (0, 17)], 20, (57, 59 + 17)),
        ([(100, 40), (0, 17)], 140, (57, 157)),
    ],
)
def test_only_visible_keys_are_gathered(
    mix: list[tuple[int, int]], window: int, expected: tuple[int, int], calls: list[tuple[int, int]]
) -> None:
    check(Case("all", window=window), mix, random.Random(0), VarlenMetadata)
    assert calls == [expected]


def test_a_chunk_beyond_all_prompts_is_no_limit(calls: list[tuple[int, int]]) -> None:
    check(Case("all", chunk=200), [(100, 40)], random.Random(0), VarlenMetadata)
    assert calls == [(40, 140)]


@pytest.mark.parametrize("window", [0, 64])
def test_torchs_operator_takes_the_arguments(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On tensors without memory: shapes and options are checked, nothing is computed."""
    shapes: list[Any] = []

    def on_meta(*arguments: Any, **named: Any) -> Tensor:
        moved: list[Any] = [x.to("meta") if isinstance(x, Tensor) else x for x in arguments]
        out = torch.nn.attention.varlen.varlen_attn(*moved, **named)
        assert isinstance(out, Tensor)
        shapes.append(out.shape)
        return torch.zeros(out.shape)

    monkeypatch.setattr(varlen, "varlen_attn", on_meta)
    cached = memory(Case("all", key_size=64, value_size=64), [(100, 40)], random.Random(0))
    metadata = VarlenMetadata(cached.cache, cached.batch)
    q, k, v = (torch.zeros(40, heads, 64) for heads in (4, 2, 2))
    metadata._attend_grouped(q, k, v, None, 0, 0.1, window, 0.0)
    assert shapes == [(40, 4, 64)]


@pytest.mark.parametrize("case", matrix(CASES, *CASES[::4]), ids=name)
def test_decodes_attend_by_the_kernel_beside_prompts(case: Case, rows: list[int]) -> None:
    torch.manual_seed(0)
    chance = random.Random(name(case))
    for _ in range(2):
        mix = mixes(chance, case.kind)
        rows.clear()
        check(case, mix, chance, MixedMetadata)
        short = sum(width for _, width in mix if width <= MAX_SPAN_WIDTH)
        assert rows == ([short] if short else [])


def test_only_prompts_are_gathered_beside_decodes(
    rows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes: list[tuple[int, int]] = []
    attend = SpanGroup.attend

    def recorded(group: SpanGroup, *arguments: Any) -> Tensor:
        shapes.append(group.shape)
        return attend(group, *arguments)

    monkeypatch.setattr(SpanGroup, "attend", recorded)
    mix = [(700, 1), (5, 1), (64, 40), (30, 4), (1500, 1)]
    check(Case("all"), mix, random.Random(0), MixedMetadata)
    assert shapes == [(1, 40)]
    assert rows == [7]
