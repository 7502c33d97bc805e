"""Packed encoder batches: the layers see no padding.

A batch [B, L] passes the embeddings as it is. Before the first layer its real tokens are gathered
into one row [1, T, H]; after the last layer they are scattered back to [B, L, H], so that poolers
and heads see their usual input. In between, an attention function registered with transformers
keeps the sequences apart. loading.py decides by running the model whether it can be packed.

On a CPU, native attention and linear layers replace torch's once they are compiled and compared
with it; on a GPU, flash attention in bfloat16 and float16. This module does not choose which
requests share a batch (batching/batcher.py).
"""

import itertools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from worker.cores import unpin, use_one_core
from worker.device.device import free_bytes
from worker.device.self_check import MIN_PROMPT_TOKENS, TOLERANCE, CannotRun, compare, set_attention
from worker.error_classification import first_line
from worker.load_context import on_worker
from worker.model.loading import is_worth_compiling

log = logging.getLogger("onequeue.packed_attention")

ATTENTION = "onequeue_packed"
CPU = torch.device("cpu")
HIDDEN_STATES = "hidden_states"  # a layer's first argument, where it is passed by name
# Sequences share one attention call while the longest is at most this times the shortest.
MAX_LENGTH_RATIO = 1.35
# On a GPU also while they have so few tokens with their padding: launching a call takes longer.
MAX_PADDED_TOKENS = 16384


# ── the plan of a batch ──


@dataclass(frozen=True, slots=True)
class PackedGroup:
    """Sequences of similar length that share one attention call, padded to the longest."""

    gather_index: Tensor  # [b, l] positions in the packed row; padding points at token 0
    key_mask: Tensor | None  # [b, 1, 1, l] bool: keys that all attend to; None: all
    scatter_index: Tensor  # [b * l] positions in the packed row; padding points behind its end


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """A layer's attention. With a `window` a token attends to window - 1 tokens on each side."""

    heads: int
    kv_heads: int
    head_size: int
    scale: float
    window: int  # 0: none
    causal: bool


@dataclass(frozen=True, slots=True)
class PackingPlan:
    """The layout of one packed batch."""

    batch_size: int
    width: int
    counts: Tensor  # [B] tokens per sequence
    bounds: Tensor  # int32 [B + 1] where each sequence begins in the packed row, and the last ends
    longest: int  # of `counts`
    token_index: Tensor  # [T] into the flattened [B * L] batch
    groups: Sequence[PackedGroup]
    head_index: Tensor | None  # [B, M] packed positions for the head; None: all [B, L]
    masks_tokens: bool = False  # the groups' masks hide tokens too: native kernels do not


def plan_batch(
    counts: Sequence[int],
    width: int,
    device: torch.device,
    head_positions: Sequence[Sequence[int]] | None = None,
    attended: Sequence[int] = (),
) -> PackingPlan:
    """Plan right-padded sequences of `counts` tokens in a batch of `width` columns.

    `head_positions[i]`, if given, are the only positions of sequence i that the head sees.
    `attended[i]`, if given: the tokens at its start that all attend to.
    """
    starts = [0, *itertools.accumulate(counts)]
    ranges = (torch.arange(i * width, i * width + n) for i, n in enumerate(counts))
    token_index = torch.cat(list(ranges)).to(device)
    groups = [
        _group(members, counts, attended or counts, starts, device)
        for members in similar_lengths(counts, device.type == "cuda")
    ]
    head_index = None
    if head_positions is not None:
        pairs = zip(head_positions, starts, strict=False)
        rows = [torch.tensor(positions) + start for positions, start in pairs]
        head_index = pad_sequence(rows, batch_first=True).to(device)
    bounds = torch.tensor(starts, dtype=torch.int32).to(device)
    return PackingPlan(
        len(counts), width, torch.tensor(counts), bounds, max(counts), token_index,
        groups, head_index, bool(attended),
    )  # fmt: skip


def similar_lengths(counts: Sequence[int], on_gpu: bool) -> list[list[int]]:
    """Return the numbers of the sequences that share an attention call, for each call."""
    order = sorted(range(len(counts)), key=lambda i: counts[i])
    groups = [[order[0]]]
    for i in order[1:]:
        members = groups[-1]
        is_similar = counts[i] <= MAX_LENGTH_RATIO * counts[members[0]]
        if is_similar or (on_gpu and counts[i] * (len(members) + 1) <= MAX_PADDED_TOKENS):
            members.append(i)
        else:
            groups.append([i])
    return groups


def _group(
    members: Sequence[int], counts: Sequence[int], attended: Sequence[int],
    starts: Sequence[int], device: torch.device,
) -> PackedGroup:  # fmt: skip
    lengths, keys, first = (
        torch.tensor([values[i] for i in members]) for values in (counts, attended, starts)
    )
    column = torch.arange(int(lengths.max()))
    is_token, is_key = column < lengths[:, None], column < keys[:, None]  # [b, l]
    positions = first[:, None] + column
    gather, scatter = (torch.where(is_token, positions, padding) for padding in (0, starts[-1]))
    mask = None if is_key.all() else is_key[:, None, None, :].to(device)
    return PackedGroup(gather.to(device), mask, scatter.flatten().to(device))


Attend = Callable[[Tensor, Tensor, Tensor, PackingPlan, AttentionConfig], Tensor]

# ── the hooks on a model ──


class Packing:
    """Hooks on one model's layer stack. Run a forward inside `with packing.batch(...)`."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.layers = find_layers(model)
        self.plan: PackingPlan | None = None
        self.calls = 0  # of the attention function in the last batch
        self.attention_configs: set[AttentionConfig] = set()  # of all layers run so far
        self.attend: Attend = attend_in_groups

    @contextmanager
    def batch(
        self,
        counts: Sequence[int],
        width: int,
        head_positions: Sequence[Sequence[int]] | None = None,
        attended: Sequence[int] = (),
    ) -> Iterator[None]:
        """Run the model calls inside packed: right-padded rows [B, width] of `counts` tokens. With
        `head_positions` the head gets those [B, M] instead of all tokens. `attended`: as in
        `plan_batch`."""
        self.plan = plan_batch(counts, width, self.model.device, head_positions, attended)
        self.calls = 0
        try:
            yield
        finally:
            self.plan = None

    def attach(self) -> Callable[[], None]:
        """Install the attention function and the hooks; return a function that removes them."""
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

    def _pack(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Pack the hidden states before the first layer, and before each layer the arguments that
        belong to tokens (rotary tables, positions)."""
        is_first = module is self.layers[0]
        return (
            tuple(self._gather(v) if n or is_first else v for n, v in enumerate(args)),
            {
                k: self._gather(v) if k != HIDDEN_STATES or is_first else v
                for k, v in kwargs.items()
            },
        )

    def _gather(self, value: Any) -> Any:
        plan = self.plan
        assert plan is not None
        if isinstance(value, tuple):
            return tuple(map(self._gather, value))
        if not isinstance(value, Tensor) or value.ndim < 2:
            return value
        if value.shape[1] != plan.width or value.shape[0] not in (1, plan.batch_size):
            return value
        if value.shape[0] == 1:
            value = value.expand(plan.batch_size, *value.shape[1:])
        return value.flatten(0, 1).index_select(0, plan.token_index).unsqueeze(0)

    def _unpack(self, module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (self._scatter(output[0]), *output[1:])
        return self._scatter(output)

    def _scatter(self, packed: Tensor) -> Tensor:
        plan = self.plan
        assert plan is not None
        if plan.head_index is not None:
            return packed[0][plan.head_index]
        flat = packed.new_zeros(plan.batch_size * plan.width, packed.shape[-1])
        flat.index_copy_(0, plan.token_index, packed[0])
        return flat.view(plan.batch_size, plan.width, -1)


def find_layers(model: PreTrainedModel) -> Sequence[nn.Module]:
    """Return the layers of a model with one stack of equal layers, in order. Raises CannotRun."""
    if getattr(model.config, "is_encoder_decoder", False):
        raise CannotRun("it has an encoder and a decoder")
    lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]
    depth = getattr(model.config, "num_hidden_layers", 0)
    stacks = [layers for layers in lists if len(layers) == depth and len({*map(type, layers)}) == 1]
    if len(stacks) != 1:
        raise CannotRun("it has no single stack of layers")
    return stacks[0]


def scatter_logits(output: Any, positions: Sequence[int]) -> Any:
    """Expand the logits [1, M, V] of head positions to [1, L, V]; the others are uninitialized."""
    rows = output["logits"]
    logits = rows.new_empty(1, output["input_ids"].shape[1], rows.shape[2])
    logits[0, list(positions)] = rows[0, : len(positions)]
    return {"logits": logits, "input_ids": output["input_ids"]}


# ── attention ──


def packed_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, sliding_window: int | None = None,
    is_causal: bool | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attend over a packed row: query [1, heads, T, D] → [1, T, heads, D].

    Registered with transformers' AttentionInterface. The mask is ignored: the plan keeps the
    sequences apart. Raises CannotRun for attention with arguments that it does not implement.
    """
    packing: Packing = module.onequeue_packing  # type: ignore[assignment]  # set by attach
    for name in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise CannotRun(f"its attention uses {name}")
    plan = packing.plan
    assert plan is not None
    packing.calls += 1
    causal = bool(getattr(module, "is_causal", False) if is_causal is None else is_causal)
    heads, head_size = query.shape[1], query.shape[3]
    scale = head_size**-0.5 if scaling is None else float(scaling)
    config = AttentionConfig(heads, key.shape[1], head_size, scale, sliding_window or 0, causal)
    packing.attention_configs.add(config)
    attend = attend_in_groups if plan.masks_tokens else packing.attend
    return attend(query, key, value, plan, config), None


def attend_natively(
    query: Tensor, key: Tensor, value: Tensor, plan: PackingPlan, config: AttentionConfig
) -> Tensor:
    """Attend with the C++ operation that worker/backends/native_attention.py loads."""
    attended: Tensor = torch.ops.onequeue.packed_attention(
        query, key, value, plan.counts, config.scale, config.window, config.causal
    )
    return attended


def attend_by_flash(
    query: Tensor, key: Tensor, value: Tensor, plan: PackingPlan, config: AttentionConfig
) -> Tensor:
    """Attend with torch's flash attention, in one call."""
    from worker.backends.cuda.varlen import GQA, varlen_attn  # seconds to import

    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))  # [T, heads, D]
    reach = config.window - 1 if config.window else -1
    attended = varlen_attn(
        q, k, v, plan.bounds, plan.bounds, plan.longest, plan.longest, scale=config.scale,
        window_size=(reach, 0 if config.causal else reach), **GQA,
    )  # fmt: skip
    assert isinstance(attended, Tensor)
    return attended[None]


def attend_in_groups(
    query: Tensor, key: Tensor, value: Tensor, plan: PackingPlan, config: AttentionConfig
) -> Tensor:
    """Attend with torch's function, one call per group of sequences of similar length."""
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))  # [T, heads, D]
    out = q.new_empty(len(q) + 1, *q.shape[1:])  # the last row receives the padding
    for group in plan.groups:
        (b, width), index = group.gather_index.shape, group.gather_index.flatten()
        parts = (t.index_select(0, index).view(b, width, *t.shape[1:]) for t in (q, k, v))
        qg, kg, vg = (part.transpose(1, 2) for part in parts)  # [b, heads, l, D]
        mask, is_masked_causal = group.key_mask, config.causal and group.key_mask is not None
        if is_masked_causal or 0 < config.window <= width:
            mask = _band_mask(group, config.window, config.causal, q.device)
        attended = scaled_dot_product_attention(
            qg, kg, vg, mask, is_causal=config.causal and mask is None, scale=config.scale,
            enable_gqa=config.heads != config.kv_heads,
        )  # fmt: skip
        attended = attended.transpose(1, 2).reshape(-1, *q.shape[1:])
        out.index_copy_(0, group.scatter_index, attended)
    return out[None, :-1]


def _band_mask(group: PackedGroup, window: int, causal: bool, device: torch.device) -> Tensor:
    """[b or 1, 1, l, l] bool: True where a query of the group may attend to a key."""
    position = torch.arange(group.gather_index.shape[1], device=device)
    distance = position[:, None] - position  # query minus key
    visible = distance.abs() < (window or len(position))
    if causal:
        visible &= distance >= 0
    mask = visible[None, None]
    return mask if group.key_mask is None else mask & group.key_mask


AttentionInterface.register(ATTENTION, packed_attention)
AttentionMaskInterface.register(ATTENTION, lambda *args, **kwargs: None)


# ── faster kernels ──


def use_flash_attention(
    model: PreTrainedModel, packing: Packing | None, run: Callable[[], object]
) -> None:
    """Use flash attention on a GPU, if it supports the layers and is checked."""
    if packing is None or model.device.type != "cuda" or model.dtype == torch.float32:
        return
    run()  # records the attention configurations of the layers
    try:
        for config in list(packing.attention_configs):
            on_worker(partial(check_attention, attend_by_flash, config, model.dtype, model.device))
    except Exception as error:  # such as an operator that torch's build lacks
        log.warning("packed rows attend without flash attention: %.300s", first_line(error))
    else:
        packing.attend = attend_by_flash


def start_native_kernels(
    model: PreTrainedModel, packing: Packing | None, run: Callable[[], object], compile: str
) -> None:
    """Replace an encoder's linear layers, and in the background its attention, by native kernels.

    `run` runs the model. `packing.attend` changes when the background thread has compiled and
    checked the kernels. Heads keep their layers: a vocabulary's may be as large as all other
    layers together, and is multiplied by few rows or none.
    """
    from worker.backends.cpu.linear import pack_weights
    from worker.backends.cpu.linear_layers import packs_dtype
    from worker.backends.native_attention import NATIVE_DTYPES

    if model.device.type != "cpu" or model.dtype not in NATIVE_DTYPES:
        return
    parameters = model.num_parameters()
    if packs_dtype(model.dtype):
        pack_weights(model.base_model, free_bytes(model.device), run, fuse=False)
    if packing and is_worth_compiling(compile, parameters):
        run()  # records the attention configurations of the layers
        threading.Thread(
            target=_enable_native_kernels, args=(packing,), name="compile", daemon=True
        ).start()


def _enable_native_kernels(packing: Packing) -> None:
    from worker.backends.cpu.amx_linear import use_amx_linear
    from worker.backends.cpu.linear import use_native_linear
    from worker.backends.native_attention import load_native_ops

    unpin()
    use_one_core()
    try:
        load_native_ops()
        for config in list(packing.attention_configs):
            check_attention(attend_natively, config, packing.model.dtype)
    except Exception as error:
        log.warning("native attention disabled, using torch: %.300s", first_line(error))
    else:
        packing.attend = attend_natively
        log.info("native attention enabled")
        use_amx_linear(packing.model.base_model, free_bytes(packing.model.device))
        use_native_linear(packing.model.base_model)


@torch.inference_mode()
def check_attention(
    attend: Attend, config: AttentionConfig, dtype: torch.dtype, device: torch.device = CPU
) -> None:
    """Compare `attend` with torch's function on random sequences longer than the window. Raises
    CannotRun where they differ."""
    counts = [3, 2 * config.window + MIN_PROMPT_TOKENS, 17, 18]
    plan = plan_batch(counts, max(counts), device)
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, heads, sum(counts), config.head_size, generator=generator).to(device, dtype)
        for heads in (config.heads, config.kv_heads, config.kv_heads)
    )
    reference, attended = (
        run(query, key, value, plan, config) for run in (attend_in_groups, attend)
    )
    compare(attended, reference, TOLERANCE[dtype], "its sums differ")
