"""Recurrent modules by native operations, on a CPU: short convolutions, the gated delta rule, and
the recurrence of Mamba-2.

Modules call functions of their modeling files for these, transformers' fallbacks without a GPU's
kernels: some thirty operations for each token or chunk. The functions are known by their
parameters. A module gets a copy of its forward that calls native operations instead, once both give
the same outputs. It runs once a step, on the whole packed row: the operations know which rows
belong to which sequence, and read and write states where they lie (native/segments.cpp).

A row's result does not depend on the other rows. torch computes the last numbers of a tensor
otherwise than the others, so rows are added until no tensor of the module has such a rest.
"""

import inspect
import logging
import math
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache

from batching.state_pool import NO_SLOT
from worker.backends.cpu.functional import copied_method
from worker.backends.recurrent import RecurrentModule
from worker.device.self_check import CannotRun, compare
from worker.model.attention.kv_cache import KVCache, StateShape

log = logging.getLogger("onequeue.native_recurrent")

# Tokens of two sequences in the compared steps: new ones, chunks, and single tokens.
COMPARED_STEPS = ((130, 1), (7, 1), (1, 40), (1, 1))
# Largest difference: of float32, and of bfloat16, in which inputs are rounded.
ROUNDING = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
# torch computes so many numbers of a tensor together; a row of a module has at least one.
VECTOR = 32

torch.library.define(
    "onequeue::short_conv",
    "(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) states, Tensor segments, bool activates)"
    " -> Tensor",
)
torch.library.define(
    "onequeue::gated_delta_rule",
    "(Tensor query, Tensor key, Tensor value, Tensor decay, Tensor beta, Tensor(a!) states,"
    " Tensor segments, bool normalizes) -> Tensor",
)
torch.library.define(
    "onequeue::state_space",
    "(Tensor x, Tensor dt, Tensor decay, Tensor b, Tensor c, Tensor? skip, Tensor(a!) states,"
    " Tensor segments) -> Tensor",
)

# .segments, .states by their kind, and .prompt_rows(), of the module that runs
_call = threading.local()

# ── in place of transformers' functions: of the packed row of the running module ──


def short_conv(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None,
    activation: str | None = None, **kwargs: Any,
) -> Tensor:  # fmt: skip
    is_silu = activation in ("silu", "swish")
    out: Tensor = torch.ops.onequeue.short_conv(
        hidden_states, weight, bias, _call.states["conv_states"], _call.segments, is_silu
    )
    return out if is_silu or activation is None else ACT2FN[activation](out)


def delta_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, *args: Any,
    use_qk_l2norm_in_kernel: bool = False, **kwargs: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    states = _call.states["recurrent_states"]
    out = torch.ops.onequeue.gated_delta_rule(
        query, key, value, g, beta, states, _call.segments, use_qk_l2norm_in_kernel
    )
    return out, states


def chunk_scan(
    hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int,  # noqa: N803
    D: Tensor | None = None, dt_bias: Tensor | None = None, dt_softplus: bool = False,  # noqa: N803
    dt_limit: tuple[float, float] = (0.0, math.inf), **kwargs: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if kwargs.get("z") is not None:
        raise CannotRun("it has a gate")
    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)
    if dt_softplus:
        dt = nn.functional.softplus(dt)
    if tuple(dt_limit) != (0.0, math.inf):  # transformers does not limit those of generated tokens
        dt = torch.where(_call.prompt_rows()[:, None], dt.clamp(*dt_limit), dt)
    states = _call.states["recurrent_states"]
    out = torch.ops.onequeue.state_space(hidden_states, dt, A, B, C, D, states, _call.segments)
    return out, states


class Replacement(NamedTuple):
    """A function that stands in for one that takes these parameters, and not `without`."""

    parameters: frozenset[str]
    function: Callable[..., Any]
    kind: str  # of the states that it keeps
    without: str = ""

    def replaces(self, function: Any) -> bool:
        try:
            taken = inspect.signature(function).parameters.keys()
        except (TypeError, ValueError):  # a built-in function
            return False
        return taken >= self.parameters and self.without not in taken


REPLACEMENTS = (
    Replacement(
        frozenset({"hidden_states", "weight", "bias", "activation"}), short_conv, "conv_states",
        without="conv_state",
    ),
    Replacement(
        frozenset({"query", "key", "value", "g", "beta", "initial_state"}), delta_rule,
        "recurrent_states",
    ),
    Replacement(
        frozenset({"hidden_states", "dt", "A", "B", "C", "chunk_size", "initial_states"}),
        chunk_scan, "recurrent_states",
    ),
)  # fmt: skip


class _NoCache(Cache):
    """The cache that a module gets: a new one, which stays empty."""

    def __init__(self) -> None:
        super().__init__(layers=[])

    def get_conv_state(self, *args: Any, **kwargs: Any) -> Any:
        return None

    def get_recurrent_state(self, *args: Any, **kwargs: Any) -> Any:
        return None

    def update_conv_state(self, conv_states: Any, *args: Any, **kwargs: Any) -> Any:
        return conv_states

    def update_recurrent_state(self, recurrent_states: Any, *args: Any, **kwargs: Any) -> Any:
        return recurrent_states

    def has_previous_state(self, *args: Any, **kwargs: Any) -> bool:
        return False

    def is_recording_past(self, *args: Any, **kwargs: Any) -> bool:
        return False


class NativeForward:
    """A module's forward with native operations, on a packed row [1, T, H] → [1, T, size]."""

    def __init__(self, module: RecurrentModule) -> None:
        """Raise CannotRun if the operations do not keep all of the module's states."""
        forward: Any = inspect.unwrap(type(module.module).forward)
        functions, kinds = {}, set()
        for name in forward.__code__.co_names:
            function = forward.__globals__.get(name)
            for replacement in REPLACEMENTS if callable(function) else ():
                if replacement.replaces(function):
                    functions[name] = replacement.function
                    kinds.add(replacement.kind)
        self.states = {key.kind: number for key, number in module.states.items()}
        if len(self.states) < len(module.states) or kinds != self.states.keys():
            raise CannotRun("not all of its states are of native operations")
        self.forward = copied_method(module.module, forward, functions)
        self.arguments = {**module.arguments, module.cache_name: _NoCache()}
        self.input_name = module.input_name
        narrow = [
            n for p in module.module.parameters() if (n := p.numel()) == max(p.shape, default=0)
        ]
        # two rows at least: a single one would be a step of generation
        self.rows = max(2, VECTOR // math.gcd(VECTOR, *narrow))

    def __call__(
        self, hidden: Tensor, segments: Tensor, store: KVCache, prompt_rows: Callable[[], Tensor]
    ) -> Tensor:
        tokens = hidden.shape[1]
        if added := -tokens % self.rows:
            hidden = nn.functional.pad(hidden, (0, 0, 0, added))
        _call.segments = segments
        _call.prompt_rows = lambda: nn.functional.pad(prompt_rows(), (0, added))
        _call.states = {kind: store.states[number] for kind, number in self.states.items()}
        try:
            out: Tensor = self.forward(**{**self.arguments, self.input_name: hidden})
        finally:
            del _call.segments, _call.states, _call.prompt_rows
        return out[:, :tokens]


def use_native_recurrence(
    modules: Sequence[RecurrentModule], shapes: Sequence[StateShape], dtype: torch.dtype
) -> None:
    """Let modules run native operations, which must be loaded; log how many do. Raise CannotRun at
    the first one whose results differ."""
    for module in modules:
        try:
            native = NativeForward(module)
        except CannotRun:
            continue
        _compare(module, native, shapes, dtype)
        module.native = native
    if modules:
        using = sum(module.native is not None for module in modules)
        log.info("native recurrence modules=%d of %d", using, len(modules))


@torch.inference_mode()
def _compare(
    module: RecurrentModule, native: NativeForward, shapes: Sequence[StateShape], dtype: torch.dtype
) -> None:
    """Raise CannotRun unless both give the same outputs for random rows of two sequences."""
    own, other = (KVCache([], 0, dtype, torch.device("cpu"), shapes, 4) for _ in range(2))
    generator = torch.Generator().manual_seed(0)
    for step, counts in enumerate(COMPARED_STEPS):
        x = torch.randn(1, sum(counts), module.hidden_size, generator=generator).to(dtype)
        segments, expected, row = [], [], 0
        for number, count in enumerate(counts):
            source, target = (number + 2 * (step % 2), number + 2 * ((step + 1) % 2))
            known = torch.tensor([source]) if step else None
            part = x[:, row : row + count]
            expected.append(module.run(part, known, torch.tensor([target]), own))
            segments.append((row, count, source if step else NO_SLOT, target))
            row += count
        new = torch.tensor([not step or count > 1 for count in counts])
        prompt_rows = partial(new.repeat_interleave, torch.tensor(counts))
        out = native(x, torch.tensor(segments), other, prompt_rows)
        compare(out, torch.cat(expected, 1), ROUNDING[dtype])
