"""Packed encoder batches: nothing is padded inside the layers.

A batch [B, L] goes through the embeddings as it is; before the first layer its real tokens
are gathered into one row [1, T, H], after the last layer they are scattered back to
[B, L, H], so that poolers and heads see what they always see. In between, an attention
function registered with transformers keeps the sequences apart. Whether a model can do this
is found out by running it (batch_check.py), not by a list of names.

Not here: which requests share a batch (batching/batcher.py), decoding (the generation engine).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

ATTENTION = "onequeue_packed"
# Sequences share one attention call while the longest is at most this times the shortest.
GROUP_SPREAD = 1.35


class CannotPack(Exception):
    """This model does not run packed; the message says why."""


@dataclass(frozen=True, slots=True)
class Group:
    """Sequences of similar length that share one attention call, padded to the longest."""

    rows: torch.Tensor  # [b * l] positions in the packed row; padding points at token 0
    real: torch.Tensor | None  # [b, 1, 1, l] bool, True where a key is real; None: no padding
    inverse: torch.Tensor  # [t] which of the b * l places are real, in the order of `target`
    target: torch.Tensor  # [t] where those go in the packed row
    shape: tuple[int, int]  # (b, l)


@dataclass(frozen=True, slots=True)
class Plan:
    """How one batch is packed. `tokens` [T] indexes the flattened [B * L] batch."""

    batch: int
    length: int
    tokens: torch.Tensor
    groups: Sequence[Group]
    keep: torch.Tensor | None  # [B, M] packed positions to hand on instead of all [B, L]


def plan_batch(
    lengths: Sequence[int], width: int, device: torch.device, keep: Sequence[Sequence[int]] | None
) -> Plan:
    """Plan right-padded sequences of `lengths` tokens in a batch of `width` columns.

    `keep[i]`, when given, are the only positions of sequence i that the head will see.
    """
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    tokens = torch.cat([torch.arange(i * width, i * width + n) for i, n in enumerate(lengths)])
    order = sorted(range(len(lengths)), key=lambda i: lengths[i])
    groups, members = [], [order[0]]
    for i in order[1:]:
        if lengths[i] > GROUP_SPREAD * lengths[members[0]]:
            groups.append(_group(members, lengths, starts, device))
            members = []
        members.append(i)
    groups.append(_group(members, lengths, starts, device))
    kept = None
    if keep is not None:
        most = max(len(positions) for positions in keep)
        kept = torch.tensor(
            [
                [starts[i] + p for p in positions] + [starts[i]] * (most - len(positions))
                for i, positions in enumerate(keep)
            ],
            device=device,
        )
    return Plan(len(lengths), width, tokens.to(device), groups, kept)


def _group(
    members: Sequence[int], lengths: Sequence[int], starts: Sequence[int], device: torch.device
) -> Group:
    width = max(lengths[i] for i in members)
    sizes = torch.tensor([lengths[i] for i in members])
    first = torch.tensor([starts[i] for i in members])
    column = torch.arange(width)
    real = column < sizes[:, None]  # [b, l]
    rows = torch.where(real, first[:, None] + column, 0).flatten()
    inverse = real.flatten().nonzero().squeeze(1)
    mask = None if bool(real.all()) else real[:, None, None, :].to(device)
    return Group(
        rows=rows.to(device),
        real=mask,
        inverse=inverse.to(device),
        target=rows[inverse].to(device),
        shape=(len(members), width),
    )


class Packing:
    """Hooks on one model's layer stack. Use `with packing.batch(...)` around a forward."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.layers = find_layers(model)
        self.plan: Plan | None = None
        self.calls = 0

    @contextmanager
    def batch(
        self,
        lengths: Sequence[int],
        width: int,
        keep: Sequence[Sequence[int]] | None = None,
    ) -> Iterator[None]:
        """Run the model calls inside on right-padded rows of `lengths`, packed."""
        self.plan = plan_batch(lengths, width, self.model.device, keep)
        self.calls = 0
        try:
            yield
        finally:
            self.plan = None

    def attach(self) -> Callable[[], None]:
        """Install attention and hooks; returns a function that takes them out again."""
        before = self.model.config._attn_implementation
        try:
            self.model.set_attn_implementation(ATTENTION)
        except Exception as error:  # each model class refuses in its own way
            raise CannotPack(f"it takes no attention function: {error}") from error
        if self.model.config._attn_implementation != ATTENTION:  # some only log that they don't
            raise CannotPack("it takes no attention function")
        for module in self.model.modules():
            module.onequeue_packing = self  # type: ignore[assignment]  # nn.Module typing
        handles = [
            layer.register_forward_pre_hook(self._pack_kwargs, with_kwargs=True)
            for layer in self.layers
        ]
        handles.append(self.layers[0].register_forward_pre_hook(self._pack, with_kwargs=True))
        handles.append(self.layers[-1].register_forward_hook(self._unpack))

        def detach() -> None:
            for handle in handles:
                handle.remove()
            self.model.set_attn_implementation(before)

        return detach

    def _pack(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        assert self.plan is not None
        if args:
            return (self._gather(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": self._gather(kwargs["hidden_states"])}

    def _pack_kwargs(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Per-token extras (rotary tables, positions) follow their tokens into the row."""
        extras = {k: self._gather(v) for k, v in kwargs.items() if k != "hidden_states"}
        return (*args[:1], *map(self._gather, args[1:])), {**kwargs, **extras}

    def _gather(self, value: Any) -> Any:
        plan = self.plan
        assert plan is not None
        if isinstance(value, tuple):
            return tuple(map(self._gather, value))
        if not isinstance(value, torch.Tensor) or value.ndim < 2:
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

    def _scatter(self, packed: torch.Tensor) -> torch.Tensor:
        plan = self.plan
        assert plan is not None
        if plan.keep is not None:
            return packed[0][plan.keep]
        flat = packed.new_zeros(plan.batch * plan.length, packed.shape[-1])
        return flat.index_copy_(0, plan.tokens, packed[0]).view(plan.batch, plan.length, -1)


def packed_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention over a packed row: query [1, heads, T, D] → [1, T, heads, D].

    Registered with transformers' AttentionInterface; the mask is ignored, the plan keeps
    sequences apart. `sliding_window` w lets a token see w - 1 neighbours on each side.
    """
    packing: Packing = module.onequeue_packing  # type: ignore[assignment]  # set by attach
    for name in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise CannotPack(f"its attention uses {name}")
    plan = packing.plan
    assert plan is not None
    packing.calls += 1
    causal = bool(getattr(module, "is_causal", False) if is_causal is None else is_causal)
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))  # [T, heads, D]
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    for group in plan.groups:
        b, width = group.shape
        parts = (t.index_select(0, group.rows).view(b, width, *t.shape[1:]) for t in (q, k, v))
        qg, kg, vg = (t.transpose(1, 2) for t in parts)  # [b, heads, l, D]
        mask, local_causal = group.real, causal
        if (sliding_window is not None and width >= sliding_window) or (
            causal and mask is not None
        ):
            mask, local_causal = _band(group, sliding_window, causal, q.device), False
        attended = scaled_dot_product_attention(
            qg,
            kg,
            vg,
            attn_mask=mask,
            is_causal=local_causal,
            scale=scaling,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        rows = attended.transpose(1, 2).reshape(b * width, *q.shape[1:])
        out.index_copy_(0, group.target, rows.index_select(0, group.inverse))
    return out.unsqueeze(0), None


def _band(group: Group, window: int | None, causal: bool, device: torch.device) -> torch.Tensor:
    """[b or 1, 1, l, l] bool: which keys each query of a group may see."""
    position = torch.arange(group.shape[1], device=device)
    distance = position[:, None] - position  # query minus key
    seen = (
        torch.ones_like(distance, dtype=torch.bool) if window is None else distance.abs() < window
    )
    if causal:
        seen = seen & (distance >= 0)
    return seen[None, None] if group.real is None else seen[None, None] & group.real


AttentionInterface.register(ATTENTION, packed_attention)
AttentionMaskInterface.register(ATTENTION, lambda *args, **kwargs: None)


def find_layers(model: PreTrainedModel) -> Sequence[nn.Module]:
    """The stack of equal layers of a single-stack model, in order."""
    if getattr(model.config, "is_encoder_decoder", False):
        raise CannotPack("it has an encoder and a decoder")
    stacks = [
        list(module)
        for module in model.modules()
        if isinstance(module, nn.ModuleList) and len({type(layer) for layer in module}) == 1
    ]
    wanted = getattr(model.config, "num_hidden_layers", 0)
    stacks = [stack for stack in stacks if len(stack) == wanted]
    if len(stacks) != 1:
        raise CannotPack("it has no single stack of layers")
    return stacks[0]
