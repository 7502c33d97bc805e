"""Recurrent layers in a packed step: linear attention, state-space layers, short convolutions.

Such a layer keeps one state for all tokens before a position. transformers has one interface for
all of them (LinearAttentionCacheLayerMixin), so no architecture is named here. `find_modules` runs
the model and records the modules that call it. In a step each module runs its own forward on the
packed row's parts: once for all sequences that decode, as a batch of single tokens, and once for
each prompt chunk. The cache that it gets holds copies of the states in the step's source slots;
afterwards the whole states are written to its target slots (batching/state_pool.py), since some
modules change them in place without a call. On a CPU native operations run most modules on the
whole row instead (native_recurrent.py).

A new sequence has no state rather than one of zeros, and runs as a chunk even if it is a single
token.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from batching.sequence import Batch
from batching.state_pool import NO_SLOT
from worker.backends.cpu.torch_only import is_torch_only
from worker.device.async_copy import to_device
from worker.device.self_check import CannotRun
from worker.model.attention.kv_cache import KVCache, StateShape
from worker.model.attention.paged import step_recurrent

# Names of the cache in models' arguments and outputs: "cache" since transformers 5.24.
CACHE_NAMES = ("cache", "past_key_values", "cache_params", "state")


class StateKey(NamedTuple):
    """One state of a cache layer."""

    kind: str  # the layer's attribute that holds it
    layer: int
    number: int


@dataclass(eq=False, slots=True)
class RecurrentModule:
    """A module that keeps states, and how to call it.

    `arguments`: of its forward, by name; those that are tensors are None, since masks and positions
    describe a packed row. `states`: with the index of their tensors in the cache.
    """

    module: nn.Module
    forward: Callable[..., Tensor]  # the module's own
    arguments: dict[str, Any]
    input_name: str
    cache_name: str
    states: dict[StateKey, int]
    size: int  # of an output
    hidden_size: int  # of an input
    # A state continues with single tokens only, since the module loses it otherwise.
    stepwise: bool = False
    # Runs a packed row with its segments, and a function that returns `PackedStates.prompt_rows`
    # (native_recurrent.py); None: the module's own forward runs its parts.
    native: Callable[[Tensor, Tensor, KVCache, Callable[[], Tensor]], Tensor] | None = None

    def run(self, x: Tensor, sources: Tensor | None, targets: Tensor, store: KVCache) -> Tensor:
        """Run rows x [B, T, H] of B sequences; return [B, T, size].

        `sources`, `targets`: slots [B] of their states; None: they have none yet.
        """
        layers: dict[int, _Layer] = {}
        for key, number in self.states.items():
            layer = layers.setdefault(key.layer, _Layer(1 + max(k.number for k in self.states)))
            if sources is not None:
                layer.set_state(key, store.states[number].index_select(0, sources))
        inputs = {self.input_name: x, self.cache_name: _LayerCache(layers)}
        out = self.forward(**{**self.arguments, **inputs})
        for key, number in self.states.items():
            new = getattr(layers[key.layer], key.kind)[key.number]
            store.states[number].index_copy_(0, targets, new)
        return out


class _Layer(LinearAttentionLayer):
    """The states of a batch in one layer. An updated state replaces the old one, without a copy."""

    def set_state(self, key: StateKey, state: Tensor) -> None:
        getattr(self, key.kind)[key.number] = state
        getattr(self, f"is_{key.kind}_initialized")[key.number] = True
        self.has_previous_state[key.number] = True
        if key.kind == "conv_states":
            self.conv_kernel_size[key.number] = state.shape[-1]

    def update_recurrent_state(
        self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        old = self.recurrent_states[state_idx]
        new = recurrent_states if old is None else recurrent_states.to(old.dtype)
        self.recurrent_states[state_idx] = new
        self.is_recurrent_states_initialized[state_idx] = True
        return new


class _LayerCache(Cache):
    """A cache with the layers of one module."""

    def __init__(self, layers: dict[int, _Layer]) -> None:
        empty: list[Any] = [None] * (1 + max(layers))
        for number, layer in layers.items():
            empty[number] = layer
        super().__init__(layers=empty)


# ── in a step ──


class PackedStates:
    """Runs recurrent modules on a step's packed row."""

    def __init__(self, modules: Sequence[RecurrentModule], cache: KVCache, batch: Batch) -> None:
        self.modules, self.cache, self.batch = modules, cache, batch

    def run(self, number: int, hidden: Tensor) -> Tensor:
        module, cache = self.modules[number], self.cache
        if module.native and not is_torch_only():
            return module.native(hidden, self.segments, cache, lambda: self.prompt_rows)
        parts = self.parts
        if parts.decoding and not parts.chunks:
            _, sources, targets = parts.decoding
            out = module.run(hidden.transpose(0, 1), sources, targets, cache)
            return out.transpose(0, 1).contiguous()
        out = hidden.new_empty(1, hidden.shape[1], module.size)
        if parts.decoding:
            rows, sources, targets = parts.decoding
            x = hidden[0].index_select(0, rows).unsqueeze(1)
            out[0].index_copy_(0, rows, module.run(x, sources, targets, cache)[:, 0])
        for part, source, target in parts.chunks:
            if source is None or not module.stepwise:
                out[:, part] = module.run(hidden[:, part], source, target, cache)
                continue
            for row in range(part.start, part.stop):
                one = slice(row, row + 1)
                out[:, one] = module.run(hidden[:, one], source, target, cache)
                source = target
        return out

    @cached_property
    def segments(self) -> Tensor:
        """[S, 4]: first row, number of rows, source and target slot."""
        segments: list[tuple[int, int, int, int]] = []
        for row, of_span in zip(self.batch.offsets, self.batch.states, strict=True):
            for tokens, source, target in of_span:
                segments.append((row, tokens, source, target))
                row += tokens
        return torch.tensor(segments)

    @cached_property
    def prompt_rows(self) -> Tensor:
        """[T]: whether a row is a prompt's, as all are in the batch of a check."""
        positions = torch.tensor(self.batch.positions)
        if not self.batch.chunks:
            return torch.ones_like(positions, dtype=torch.bool)
        ends, widths = zip(
            *((chunk.sequence.prompt_len, chunk.width) for chunk in self.batch.chunks), strict=True
        )
        return positions < torch.tensor(ends).repeat_interleave(torch.tensor(widths))

    @cached_property
    def parts(self) -> "_Parts":
        device = self.cache.device
        rows: list[tuple[int, int, int]] = []
        chunks: list[tuple[slice, Tensor | None, Tensor]] = []
        for row, of_span in zip(self.batch.offsets, self.batch.states, strict=True):
            for number, (tokens, source, target) in enumerate(of_span):
                if tokens == 1 and source != NO_SLOT and not number:
                    rows.append((row, source, target))
                else:
                    known = None if source == NO_SLOT else to_device([source], device)
                    part = slice(row, row + tokens)
                    chunks.append((part, known, to_device([target], device)))
                row += tokens
        if not rows:
            return _Parts(None, chunks)
        row_numbers, sources, targets = (
            to_device(part, device) for part in zip(*rows, strict=True)
        )
        return _Parts((row_numbers, sources, targets), chunks)


class _Parts(NamedTuple):
    """The parts of a packed row, each with the slots of its states.

    `decoding`: rows [B] of the sequences that run a single token, with their source and target
    slots. `chunks`: others, one after another, since the parts of a divided chunk depend on each
    other: rows and both slots.
    """

    decoding: tuple[Tensor, Tensor, Tensor] | None
    chunks: list[tuple[slice, Tensor | None, Tensor]]


def run_recurrent(hidden: Tensor, number: int, size: int) -> Tensor:
    """Run a recurrent module on the running step's packed row: [1, T, H] → [1, T, size]."""
    run = step_recurrent()
    assert run
    return run(number, hidden)


# opaque to the compiler: how a row is divided changes with each step
_recurrent_op = torch.library.custom_op("onequeue::recurrent", run_recurrent, mutates_args=())


@_recurrent_op.register_fake
def _(hidden: Any, number: int, size: int) -> Any:
    return hidden.new_empty(1, hidden.shape[1], size)


def install(modules: Sequence[RecurrentModule]) -> None:
    """Let the modules run in packed steps."""
    for number, module in enumerate(modules):
        module.module.forward = _packed_forward(module, number)


def uninstall(modules: Sequence[RecurrentModule]) -> None:
    for module in modules:
        del module.module.forward


def _packed_forward(module: RecurrentModule, number: int) -> Callable[..., Tensor]:
    """Return the module's forward in packed steps; outside of one it is the module's own."""
    name, size = module.input_name, module.size

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        hidden = kwargs[name] if name in kwargs else args[0]
        if torch.compiler.is_dynamo_compiling():
            out: Tensor = torch.ops.onequeue.recurrent(hidden, number, size)
            return out
        run = step_recurrent()
        return run(number, hidden) if run else module.forward(*args, **kwargs)

    return forward


# ── finding the modules ──


class _Call(NamedTuple):
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class _RecordingCache(DynamicCache):
    """Records which running module, the innermost one, reads or updates each state."""

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        self.running: list[_Call] = []
        self.calls: dict[nn.Module, _Call] = {}
        self.touched: dict[nn.Module, set[tuple[int, int]]] = {}

    def _record(self, layer: int, index: int) -> None:
        call = self.running[-1]
        self.calls[call.module] = call
        self.touched.setdefault(call.module, set()).add((layer, index))

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Any:
        self._record(layer_idx, state_idx)
        return super().get_conv_state(layer_idx, state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Any:
        self._record(layer_idx, state_idx)
        return super().get_recurrent_state(layer_idx, state_idx)

    def update_conv_state(
        self, conv_states: Any, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Any:
        self._record(layer_idx, state_idx)
        return super().update_conv_state(conv_states, layer_idx, state_idx, **kwargs)

    def update_recurrent_state(
        self, recurrent_states: Any, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Any:
        self._record(layer_idx, state_idx)
        return super().update_recurrent_state(recurrent_states, layer_idx, state_idx, **kwargs)


class RecurrentProbe:
    """Finds a model's recurrent modules in one forward. `layers`: of its cache, None where there
    are none of recurrent layers."""

    def __init__(self, decoder: nn.Module, config: Any) -> None:
        self.decoder = decoder
        try:
            cache: Any = _RecordingCache(config)
        except Exception:  # a configuration without layers that transformers' cache knows
            cache = None
        layers = cache.layers if cache else ()
        is_recurrent = any(isinstance(one, LinearAttentionCacheLayerMixin) for one in layers)
        self.cache: Any = cache if is_recurrent else None
        self._attending: set[nn.Module] = set()  # modules in which others attend
        self._outputs: dict[nn.Module, Any] = {}

    def attending(self, layers: int) -> set[int]:
        """Return which layers have keys and values, of a model with so many layers."""
        if self.cache is None:
            return set(range(layers))
        return {n for n, one in enumerate(self.cache.layers) if isinstance(one, CacheLayerMixin)}

    def record_attention(self) -> None:
        if self.cache is not None:
            self._attending |= {call.module for call in self.cache.running}

    def arguments(self, model: nn.Module) -> dict[str, Any]:
        """Return the arguments of the forward to record."""
        if self.cache is None:
            return {"use_cache": False}
        return {"use_cache": True, cache_argument(model): self.cache}

    @contextmanager
    def recording(self) -> Iterator[None]:
        if self.cache is None:
            yield
            return
        running = self.cache.running

        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            running.append(_Call(module, args, kwargs))

        def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            running.pop()
            if module in self.cache.calls:
                self._outputs[module] = output

        with ExitStack() as hooks:
            for module in self.decoder.modules():
                before = module.register_forward_pre_hook(enter, with_kwargs=True)
                after = module.register_forward_hook(leave, with_kwargs=True)
                hooks.callback(before.remove)
                hooks.callback(after.remove)
            yield

    def find(self) -> tuple[list[RecurrentModule], list[StateShape]]:
        """Return the modules and the shapes of their states, once the model has run."""
        if self.cache is None:
            return [], []
        modules: list[RecurrentModule] = []
        shapes: list[StateShape] = []
        for module, call in self.cache.calls.items():
            if module in self._attending:
                raise CannotRun(f"{type(module).__name__} uses both states and keys")
            states: dict[StateKey, int] = {}
            for layer, index in sorted(self.cache.touched[module]):
                for kind in ("conv_states", "recurrent_states"):
                    state = getattr(self.cache.layers[layer], kind)[index]
                    if state is not None:
                        states[StateKey(kind, layer, index)] = len(shapes)
                        shapes.append(StateShape(tuple(state.shape[1:]), state.dtype))
            modules.append(_recurrent_module(call, self._outputs[module], states, self.cache))
        used = [key for module in modules for key in module.states]
        if len(used) != len(set(used)):
            raise CannotRun("two of its modules use one state")
        return modules, shapes


def cache_argument(module: nn.Module) -> str:
    """Return the name of the forward's argument for its cache; raise CannotRun if it has none."""
    parameters = inspect.signature(module.forward).parameters
    name = next((name for name in CACHE_NAMES if name in parameters), None)
    if name is None:
        raise CannotRun("its forward takes no cache")
    return name


def _recurrent_module(
    call: _Call, output: Any, states: dict[StateKey, int], cache: Any
) -> RecurrentModule:
    module = call.module
    positional = list(inspect.signature(module.forward).parameters)[: len(call.args)]
    arguments = {**dict(zip(positional, call.args, strict=True)), **call.kwargs}
    tensors = [name for name, value in arguments.items() if isinstance(value, Tensor)]
    caches = [name for name, value in arguments.items() if value is cache]
    shapes = [
        tensor.shape[:2]
        for tensor in (arguments[tensors[0]] if tensors else None, output)
        if isinstance(tensor, Tensor) and tensor.dim() == 3
    ]
    if len(shapes) < 2 or shapes[0] != shapes[1] or len(caches) != 1 or not states:
        raise CannotRun(f"{type(module).__name__} does not map hidden states and a cache to others")
    plain = {
        name: value if isinstance(value, (bool, int, float, str)) else None
        for name, value in arguments.items()
    }
    sizes = output.shape[2], arguments[tensors[0]].shape[2]
    return RecurrentModule(module, module.forward, plain, tensors[0], caches[0], states, *sizes)
