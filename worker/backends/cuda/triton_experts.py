"""Mixtures of experts on a GPU: an implementation for transformers' ExpertsInterface.

transformers multiplies the rows of all experts by torch's grouped product. Except for bfloat16 on
some GPUs, it waits for the GPU to read how many rows each expert has, and a step that waits cannot
be captured (cuda_graphs.py). Here the rows are sorted by expert, and a kernel finds the expert of
each of its tiles itself. Weights of experts that are not hit are not read.
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from worker.backends.cpu.experts import experts_of
from worker.backends.cuda.cuda_graphs import synchronizing_raises
from worker.device.self_check import CannotRun
from worker.load_context import on_worker

log = logging.getLogger("onequeue.triton_experts")

NAME = "onequeue-triton"
MAX_ROWS = 512  # of a step; the rows of longer prompts are left to torch
TILE_INPUTS = 256  # bytes of a row that a program loads at a time
# Rows of a tile for so many rows per expert: as few as fit, so that few are padding.
TILE_ROWS = ((12, 16), (40, 32))
MAX_TILE_ROWS = 64


@triton.jit
def _grouped(
    x, weight, out, starts, order, inputs, outputs, expert_stride, input_stride, output_stride,
    choices,
    experts: tl.constexpr, experts_pad: tl.constexpr, gathers: tl.constexpr, scatters: tl.constexpr,
    tile_rows: tl.constexpr, tile_outputs: tl.constexpr, tile_inputs: tl.constexpr,
):  # fmt: skip
    """Multiply a tile of one expert's rows by a tile of its weight's columns."""
    column, tile = tl.program_id(0), tl.program_id(1)
    e = tl.arange(0, experts_pad)
    start = tl.load(starts + e, mask=e < experts, other=0)
    end = tl.load(starts + e + 1, mask=e < experts, other=0)
    tiles = (end - start + tile_rows - 1) // tile_rows
    expert = tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int32), 0)
    if expert < experts:
        first = tl.sum(tl.where(e < expert, tiles, 0), 0)
        rows = tl.load(starts + expert) + (tile - first) * tile_rows + tl.arange(0, tile_rows)
        valid = rows < tl.load(starts + expert + 1)
        pairs = tl.load(order + rows, mask=valid, other=0)
        source = pairs // choices if gathers else rows
        target = pairs if scatters else rows
        n = column * tile_outputs + tl.arange(0, tile_outputs)
        k = tl.arange(0, tile_inputs)
        columns = weight + expert.to(tl.int64) * expert_stride + n[None, :] * output_stride
        total = tl.zeros((tile_rows, tile_outputs), tl.float32)
        for first_k in range(0, inputs, tile_inputs):
            kk = first_k + k
            a = tl.load(
                x + source.to(tl.int64)[:, None] * inputs + kk[None, :],
                mask=valid[:, None] & (kk < inputs)[None, :], other=0.0,
            )  # fmt: skip
            b = tl.load(
                columns + kk[:, None] * input_stride,
                mask=(kk < inputs)[:, None] & (n < outputs)[None, :], other=0.0,
            )  # fmt: skip
            total = tl.dot(a, b, total, input_precision="ieee")
        at = out + target.to(tl.int64)[:, None] * outputs + n[None, :]
        mask = valid[:, None] & (n < outputs)[None, :]
        tl.store(at, total.to(out.dtype.element_ty), mask=mask)


def multiply(
    x: Tensor, weight: Tensor, starts: Tensor, order: Tensor, choices: int, gathers: bool
) -> Tensor:
    """Multiply each row by the weight [E, K, N] of its expert; return [P, N] for P pairs.

    `starts` [E + 1]: where each expert's pairs begin once they are sorted by expert, and `order`
    [P]: the pairs in this order. `gathers`: x [S, K] has the rows that make `choices` pairs each,
    and the output is sorted; else x [P, K] is sorted, and the output is not.
    """
    pairs, (experts, inputs, outputs) = len(order), weight.shape
    if pairs > MAX_ROWS * choices:
        rows = x[order // choices] if gathers else x
        product: Tensor = torch.nn.functional.grouped_mm(rows, weight, offs=starts[1:].clone())
        return product if gathers else torch.empty_like(product).index_copy_(0, order, product)
    out = x.new_empty(pairs, outputs)
    tile_rows = next((n for most, n in TILE_ROWS if pairs <= most * experts), MAX_TILE_ROWS)
    tile_outputs = 32 if pairs <= 64 else 64
    tiles = min(pairs, experts) + pairs // tile_rows  # as many as there may be
    _grouped[triton.cdiv(outputs, tile_outputs), tiles](
        x, weight, out, starts, order, inputs, outputs, *(weight.stride(n) for n in range(3)),
        choices, experts, triton.next_power_of_2(experts), gathers, not gathers,
        tile_rows, tile_outputs, TILE_INPUTS // x.element_size(), num_warps=4, num_stages=4,
    )  # fmt: skip
    return out


# opaque to the compiler: the tiles depend on the number of rows
_multiply_op = torch.library.custom_op("onequeue::grouped_product", multiply, mutates_args=())


@_multiply_op.register_fake
def _(x: Any, weight: Any, starts: Any, order: Any, choices: int, gathers: bool) -> Any:
    return x.new_empty(order.shape[0], weight.shape[2])


def experts_forward(
    module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Implement transformers' experts interface."""
    rows, choices = top_k_index.shape
    ids = top_k_index.reshape(-1)
    sorted_ids, order = torch.sort(ids)
    numbers = torch.arange(module.num_experts + 1, device=ids.device)
    starts = torch.searchsorted(sorted_ids, numbers, out_int32=True)
    name = "gate_up_proj" if module.has_gate else "up_proj"
    up, down = getattr(module, name), module.down_proj
    if not module.is_transposed:
        up, down = up.transpose(1, 2), down.transpose(1, 2)
    out = _multiply_op(hidden_states.contiguous(), up, starts, order, choices, True)
    if module.has_bias:
        out = out + getattr(module, f"{name}_bias")[sorted_ids]
    out = module._apply_gate(out) if module.has_gate else module.act_fn(out)
    out = _multiply_op(out.contiguous(), down, starts, order, choices, False)
    if module.has_bias:
        out = out + module.down_proj_bias[ids]
    if module.has_post_expert_norm:
        out = module.post_expert_norm(out)
    out = out.view(rows, choices, -1) * top_k_weights.unsqueeze(-1)
    result: Tensor = out.sum(1).to(hidden_states.dtype)
    return result


ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)


@torch.inference_mode()
def waits(experts: Any) -> bool:
    """Return whether a module of experts waits for the GPU."""
    size = experts.down_proj.shape[2 if experts.is_transposed else 1]
    hidden = experts.down_proj.new_zeros(2, size)
    index = torch.zeros(2, 1, dtype=torch.long, device=hidden.device)
    run = partial(experts, hidden, index, hidden[:, :1])
    run()  # the first call also initializes, which may wait
    try:
        with synchronizing_raises():
            run()
    except RuntimeError:
        return True
    return False


def use_triton_experts(model: Any, check: Callable[[], object]) -> None:
    """Use this implementation for a model's experts if the library's waits for the GPU. Raise what
    `check`, which runs the model, raises; the library's then stays."""
    found = list(experts_of(model))
    if not found:
        return
    before = model.get_experts_implementation()
    try:
        if not on_worker(partial(waits, found[0])):
            return
        model.set_experts_implementation(NAME)
        if any(module.config._experts_implementation != NAME for module in found):
            raise CannotRun("not all experts use the interface")
        check()
    except Exception:  # such as a kernel that does not compile
        model.set_experts_implementation(before)
        raise
    log.info("experts use Triton kernels layers=%d", len(found))
