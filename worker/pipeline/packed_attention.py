"""Packed encoder batches: nothing is padded inside the layers.

A batch [B, L] goes through the embeddings as it is; before the first layer its real tokens
are gathered into one row [1, T, H], after the last layer they are scattered back to
[B, L, H], so that poolers and heads see what they always see. In between, an attention
function registered with transformers keeps the sequences apart. Whether a model can do this
is found out by running it (load.py), not by a list of names.

Not here: which requests share a batch (batching/batcher.py), decoding (the generation engine).

What makes an encoder quick on a CPU: weights laid out for its kernels; then, built and compared
in the background, native attention of packed rows and products by matrix tiles or of few rows, each
used as soon as it is there. Without a compiler, or where they say something else, torch's go on.
"""

import itertools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from worker.cores import compute_alone, release
from worker.device.device import free_bytes
from worker.device.self_check import MIN_PROMPT_TOKENS, TOLERANCE, CannotRun, compare, set_attention
from worker.error_classification import first_line
from worker.model.attention.native import NATIVE_DTYPES, load_native_ops
from worker.model.cpu.amx_linear import use_amx_linear
from worker.model.cpu.linear import pack_weights, packs_dtype, use_native_linear
from worker.model.loading import is_worth_compiling

ATTENTION = "onequeue_packed"
HIDDEN = "hidden_states"  # what a layer calls its first argument, if it is named
# Sequences share one attention call while the longest is at most this times the shortest.
GROUP_SPREAD = 1.35


@dataclass(frozen=True, slots=True)
class PackedGroup:
    """Sequences of similar length that share one attention call, padded to the longest."""

    rows: Tensor  # [b, l] positions in the packed row; padding points at token 0
    real: Tensor | None  # [b, 1, 1, l] bool, True where a key is real; None: no padding
    target: Tensor  # [b * l] where they go in the packed row; padding behind its end


@dataclass(frozen=True, slots=True)
class Attention:
    """How a layer attends. With a `window` a token sees window - 1 neighbours on each side."""

    heads: int
    key_heads: int
    size: int
    scale: float
    window: int  # 0: none
    causal: bool


@dataclass(frozen=True, slots=True)
class PackingPlan:
    """How one batch is packed. `tokens` [T] indexes the flattened [B * L] batch; None where it
    comes as one row."""

    batch: int
    length: int
    counts: Tensor  # [B] tokens of each
    tokens: Tensor | None
    groups: Sequence[PackedGroup]
    keep: Tensor | None  # [B, M] packed positions to hand on instead of all [B, L]


def plan_batch(
    counts: Sequence[int],
    width: int | None,
    device: torch.device,
    keep: Sequence[Sequence[int]] | None,
) -> PackingPlan:
    """Plan right-padded sequences of `counts` tokens in a batch of `width` columns; without a
    width they come end to end.

    `keep[i]`, when given, are the only positions of sequence i that the head will see.
    """
    starts = [0, *itertools.accumulate(counts)]
    tokens = None
    if width is not None:
        places = (torch.arange(i * width, i * width + n) for i, n in enumerate(counts))
        tokens = torch.cat(list(places)).to(device)
    order = sorted(range(len(counts)), key=lambda i: counts[i])
    groups, members = [], [order[0]]
    for i in order[1:]:
        if counts[i] > GROUP_SPREAD * counts[members[0]]:
            groups.append(_group(members, counts, starts, device))
            members = []
        members.append(i)
    groups.append(_group(members, counts, starts, device))
    kept = None
    if keep is not None:
        rows = [torch.tensor(each) + start for each, start in zip(keep, starts, strict=False)]
        kept = pad_sequence(rows, batch_first=True).to(device)
    return PackingPlan(len(counts), width or starts[-1], torch.tensor(counts), tokens, groups, kept)


def _group(
    members: Sequence[int], counts: Sequence[int], starts: Sequence[int], device: torch.device
) -> PackedGroup:
    width = max(counts[i] for i in members)
    sizes = torch.tensor([counts[i] for i in members])
    first = torch.tensor([starts[i] for i in members])
    column = torch.arange(width)
    real = column < sizes[:, None]  # [b, l]
    places = first[:, None] + column
    rows, target = (torch.where(real, places, end) for end in (0, starts[-1]))
    mask = None if real.all() else real[:, None, None, :].to(device)
    return PackedGroup(rows.to(device), mask, target.flatten().to(device))


class Packing:
    """Hooks on one model's layer stack. Use `with packing.batch(...)` around a forward."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.layers = find_layers(model)
        self.plan: PackingPlan | None = None
        self.calls = 0
        self.kinds: set[Attention] = set()  # of the layers that have attended
        self.native = False  # the native operation attends (packed_attention.py)
        self.ends_early = False  # kept positions alone go through the rest of the last layer

    @contextmanager
    def batch(
        self, counts: Sequence[int], width: int | None, keep: Sequence[Sequence[int]] | None = None
    ) -> Iterator[None]:
        """Model calls inside run packed: on right-padded rows [B, width] of `counts` tokens or,
        without a width, on all in one row [1, T]. The head gets positions `keep` alone, [B, M]."""
        self.plan = plan_batch(counts, width, self.model.device, keep)
        self.calls = 0
        try:
            yield
        finally:
            self.plan = None

    def attach(self) -> Callable[[], None]:
        """Install attention and hooks; returns a function that takes them out again."""
        before = self.model.config._attn_implementation
        set_attention(self.model, ATTENTION)
        for module in self.model.modules():
            module.onequeue_packing = self  # type: ignore[assignment]  # nn.Module typing
        handles = [
            layer.register_forward_pre_hook(self._pack, with_kwargs=True) for layer in self.layers
        ]
        handles.append(self.layers[-1].register_forward_hook(self._unpack))

        def detach() -> None:
            for handle in handles:
                handle.remove()
            self.model.set_attn_implementation(before)

        return detach

    def end_early_at(self, join: nn.Module) -> Callable[[], None]:
        """Kept positions go on alone from this module of the last layer; returns what undoes it."""

        def cut(module: nn.Module, args: Any) -> Any:
            if self.plan is None or self.plan.keep is None:
                return args
            kept = self.plan.keep.flatten()
            return tuple(each.index_select(1, kept) for each in args)

        handle, self.ends_early = join.register_forward_pre_hook(cut), True

        def undo() -> None:
            handle.remove()
            self.ends_early = False

        return undo

    def _pack(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Before the first layer the hidden states become one row; before each layer its per-token
        extras (rotary tables, positions) follow their tokens there."""
        first = module is self.layers[0]
        return (
            tuple(self._gather(v) if n or first else v for n, v in enumerate(args)),
            {k: self._gather(v) if k != HIDDEN or first else v for k, v in kwargs.items()},
        )

    def _gather(self, value: Any) -> Any:
        plan = self.plan
        assert plan is not None
        if isinstance(value, tuple):
            return tuple(map(self._gather, value))
        if plan.tokens is None or not isinstance(value, Tensor) or value.ndim < 2:
            return value
        if value.shape[1] != plan.length or value.shape[0] not in (1, plan.batch):
            return value
        if value.shape[0] == 1:
            value = value.expand(plan.batch, *value.shape[1:])
        return value.flatten(0, 1).index_select(0, plan.tokens).unsqueeze(0)

    def _unpack(self, module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (self._scatter(output[0]), *output[1:])
        return self._scatter(output)

    def _scatter(self, packed: Tensor) -> Tensor:
        plan = self.plan
        assert plan is not None
        if plan.keep is not None:
            if self.ends_early:
                return packed.view(*plan.keep.shape, packed.shape[-1])
            return packed[0][plan.keep]
        if plan.tokens is None:
            return packed
        flat = packed.new_zeros(plan.batch * plan.length, packed.shape[-1])
        return flat.index_copy_(0, plan.tokens, packed[0]).view(plan.batch, plan.length, -1)


def spread(output: Any, keep: Sequence[int]) -> Any:
    """Logits [1, M, V] of a row of which only the positions `keep` were handed on, as [1, L, V];
    the others are not set."""
    rows = output["logits"]
    logits = rows.new_empty(1, output["input_ids"].shape[1], rows.shape[2])
    logits[0, list(keep)] = rows[0, : len(keep)]
    return {"logits": logits, "input_ids": output["input_ids"]}


def packed_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, sliding_window: int | None = None,
    is_causal: bool | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attention over a packed row: query [1, heads, T, D] → [1, T, heads, D].

    Registered with transformers' AttentionInterface; the mask is ignored, the plan keeps
    sequences apart.
    """
    packing: Packing = module.onequeue_packing  # type: ignore[assignment]  # set by attach
    for name in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise CannotRun(f"its attention uses {name}")
    plan = packing.plan
    assert plan is not None
    packing.calls += 1
    causal = bool(getattr(module, "is_causal", False) if is_causal is None else is_causal)
    heads, size = query.shape[1], query.shape[3]
    scale = size**-0.5 if scaling is None else float(scaling)
    kind = Attention(heads, key.shape[1], size, scale, sliding_window or 0, causal)
    packing.kinds.add(kind)
    attend = attend_natively if packing.native else attend_in_groups
    return attend(query, key, value, plan, kind), None


def attend_natively(
    query: Tensor, key: Tensor, value: Tensor, plan: PackingPlan, kind: Attention
) -> Tensor:
    """By the operation that worker/model/attention/native.py loads."""
    attended: Tensor = torch.ops.onequeue.packed_attention(
        query, key, value, plan.counts, kind.scale, kind.window, kind.causal
    )
    return attended


def attend_in_groups(
    query: Tensor, key: Tensor, value: Tensor, plan: PackingPlan, kind: Attention
) -> Tensor:
    """By torch's function, sequences of similar length together."""
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))  # [T, heads, D]
    out = q.new_empty(len(q) + 1, *q.shape[1:])
    for group in plan.groups:
        (b, width), rows = group.rows.shape, group.rows.flatten()
        parts = (t.index_select(0, rows).view(b, width, *t.shape[1:]) for t in (q, k, v))
        qg, kg, vg = (part.transpose(1, 2) for part in parts)  # [b, heads, l, D]
        mask, is_masked_causal = group.real, kind.causal and group.real is not None
        if is_masked_causal or 0 < kind.window <= width:
            mask = _band(group, kind.window, kind.causal, q.device)
        attended = scaled_dot_product_attention(
            qg, kg, vg, mask, is_causal=kind.causal and mask is None, scale=kind.scale,
            enable_gqa=kind.heads != kind.key_heads,
        )  # fmt: skip
        out.index_copy_(0, group.target, attended.transpose(1, 2).reshape(-1, *q.shape[1:]))
    return out[None, :-1]


def _band(group: PackedGroup, window: int, causal: bool, device: torch.device) -> Tensor:
    """[b or 1, 1, l, l] bool: which keys each query of a group may see."""
    position = torch.arange(group.rows.shape[1], device=device)
    distance = position[:, None] - position  # query minus key
    seen = distance.abs() < (window or len(position))
    if causal:
        seen &= distance >= 0
    return seen[None, None] if group.real is None else seen[None, None] & group.real


AttentionInterface.register(ATTENTION, packed_attention)
AttentionMaskInterface.register(ATTENTION, lambda *args, **kwargs: None)


def find_layers(model: PreTrainedModel) -> Sequence[nn.Module]:
    """The stack of equal layers of a single-stack model, in order."""
    if getattr(model.config, "is_encoder_decoder", False):
        raise CannotRun("it has an encoder and a decoder")
    lists = [list(each) for each in model.modules() if isinstance(each, nn.ModuleList)]
    depth = getattr(model.config, "num_hidden_layers", 0)
    stacks = [each for each in lists if len(each) == depth and len(set(map(type, each))) == 1]
    if len(stacks) != 1:
        raise CannotRun("it has no single stack of layers")
    return stacks[0]


log = logging.getLogger("onequeue.native_packing")


def start_native_packing(
    model: PreTrainedModel, packing: Packing | None, run: Callable[[], object], compile: str
) -> None:
    """`run` runs the model; `packing.native` tells when the rest, which takes a thread of its own
    if it is worth it, is used. Heads stay as they are: a vocabulary's may be as large as all other
    layers, and is multiplied by few rows or none."""
    if model.device.type != "cpu" or model.dtype not in NATIVE_DTYPES:
        return
    parameters = model.num_parameters()
    if packs_dtype(model.dtype):
        pack_weights(model.base_model, free_bytes(model.device), run, shares=False)
    if packing and is_worth_compiling(compile, parameters):
        run()  # the packing sees how its layers attend
        threading.Thread(target=_take, args=(packing,), name="compile", daemon=True).start()


def _take(packing: Packing) -> None:
    release()
    compute_alone()
    try:
        load_native_ops()
        for kind in list(packing.kinds):
            check_native_packing(kind, packing.model.dtype)
    except Exception as error:
        log.warning("no native attention, torch's serves: %.300s", first_line(error))
    else:
        packing.native = True
        log.info("native attention")
        use_amx_linear(packing.model.base_model, free_bytes(packing.model.device))
        use_native_linear(packing.model.base_model)


@torch.inference_mode()
def check_native_packing(kind: Attention, dtype: torch.dtype) -> None:
    """CannotRun unless it gives what torch's attention gives for random rows beyond the window."""
    counts = [3, 2 * kind.window + MIN_PROMPT_TOKENS, 17, 18]
    plan = plan_batch(counts, max(counts), torch.device("cpu"), None)
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, heads, sum(counts), kind.size, generator=generator).to(dtype)
        for heads in (kind.heads, kind.key_heads, kind.key_heads)
    )
    reference, got = (
        attend(query, key, value, plan, kind) for attend in (attend_in_groups, attend_natively)
    )
    compare(got, reference, TOLERANCE[dtype], "its sums differ")
