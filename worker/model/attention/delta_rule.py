"""The gated delta rule of linear attention by the native operation, on a CPU.

Modules call a function of their modeling file for it, transformers' fallback without a GPU's
kernels: some thirty operations for each token or chunk. The native operation reads and writes the
states where they lie (native/gated_delta_rule.cpp). The functions are known by their parameters. A
module gets a copy of its forward that calls the native operation instead, once both give the same
outputs and states.
"""

import inspect
import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor

from worker.device.self_check import compare
from worker.error_classification import first_line
from worker.model.attention.kv_cache import KVCache, StateShape
from worker.model.attention.recurrent import IN_PLACE, RecurrentModule

log = logging.getLogger("onequeue.delta_rule")

# What a function of the gated delta rule takes, among others.
PARAMETERS = {"query", "key", "value", "g", "beta", "initial_state", "use_qk_l2norm_in_kernel"}
# Tokens of the compared steps: a new sequence, its continuation in chunks, and single tokens.
COMPARED_TOKENS = (1, 130, 7, 1, 1)
# Largest difference: of float32, and of bfloat16, in which inputs are rounded.
ROUNDING = {torch.float32: 1e-4, torch.bfloat16: 2e-2}

torch.library.define(
    "onequeue::gated_delta_rule",
    "(Tensor query, Tensor key, Tensor value, Tensor decay, Tensor beta, Tensor(a!) states,"
    " Tensor? sources, Tensor targets, bool normalizes) -> Tensor",
)

_call = threading.local()  # .states, .sources and .targets of the module that runs on this thread


def delta_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, *args: Any,
    use_qk_l2norm_in_kernel: bool = False, **kwargs: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Stand in for transformers' functions, which return the output and the new state. The states
    of the running module are read and written in place."""
    out = torch.ops.onequeue.gated_delta_rule(
        query, key, value, g, beta, _call.states, _call.sources, _call.targets,
        use_qk_l2norm_in_kernel,
    )  # fmt: skip
    return out, IN_PLACE


@contextmanager
def _on_states(states: Tensor, sources: Tensor | None, targets: Tensor) -> Iterator[None]:
    _call.states, _call.sources, _call.targets = states, sources, targets
    try:
        yield
    finally:
        del _call.states, _call.sources, _call.targets


def use_native_delta_rule(
    modules: Sequence[RecurrentModule], shapes: Sequence[StateShape], dtype: torch.dtype
) -> None:
    """Let modules run the native operation, where both give the same; the library must be loaded.
    Log how many do."""
    used = []
    for module in modules:
        own = module.forward, module.in_place, module.on_states
        if not _replace(module):
            continue
        try:
            _compare(module, own[0], shapes, dtype)
        except Exception as error:
            module.forward, module.in_place, module.on_states = own
            log.warning("native delta rule disabled: %.200s", first_line(error))
            return
        used.append(module)
    if used:
        log.info("native delta rule modules=%d of %d", len(used), len(modules))


def _replace(module: RecurrentModule) -> bool:
    """Give the module a forward with the native operation; return False if it has no use for it."""
    forward: Any = inspect.unwrap(type(module.module).forward)
    functions = {
        name: delta_rule
        for name in forward.__code__.co_names
        if callable(function := forward.__globals__.get(name)) and _is_delta_rule(function)
    }
    states = [n for key, n in module.states.items() if key.kind == "recurrent_states"]
    if not functions or len(states) != 1:
        return False
    copied = FunctionType(
        forward.__code__, forward.__globals__ | functions, forward.__name__,
        forward.__defaults__, forward.__closure__,
    )  # fmt: skip
    copied.__kwdefaults__ = forward.__kwdefaults__
    module.forward = MethodType(copied, module.module)
    module.in_place, module.on_states = states[0], _on_states
    return True


def _is_delta_rule(function: Any) -> bool:
    try:
        return inspect.signature(function).parameters.keys() >= PARAMETERS
    except (TypeError, ValueError):  # a built-in function
        return False


@torch.inference_mode()
def _compare(
    module: RecurrentModule, own_forward: Any, shapes: Sequence[StateShape], dtype: torch.dtype
) -> None:
    """Raise CannotRun unless both give the same outputs and states for random rows."""
    own = RecurrentModule(
        module.module, own_forward, module.arguments, module.input_name, module.cache_name,
        module.states, module.size,
    )  # fmt: skip
    caches = [KVCache([], 0, dtype, torch.device("cpu"), shapes, 4) for _ in range(2)]
    generator = torch.Generator().manual_seed(0)
    source, target = torch.tensor([0, 1]), torch.tensor([2, 3])
    for step, tokens in enumerate(COMPARED_TOKENS):
        x = torch.randn(2, tokens, module.hidden_size, generator=generator).to(dtype)
        known = source if step else None
        results = [
            one.run(x, known, target, cache)
            for one, cache in zip((own, module), caches, strict=True)
        ]
        compare(results[1], results[0], ROUNDING[dtype])
        for number in module.states.values():
            expected, got = (cache.states[number][target] for cache in caches)
            compare(got.float(), expected.float(), ROUNDING[dtype])
        source, target = target, source
