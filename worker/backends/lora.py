"""LoRA adapters in a step: each adapted layer adds the products of the rows that have an adapter.

A hook of the layer adds them to its output, whatever computes that: a plain, packed, quantized or
fused product. Rows lie span after span, so those of one adapter are ranges of the packed row. Which
layers see the rows like that is observed in a forward, not derived from names.

On a CPU the native operation adds up to each row on its own, in a fixed order: a row's result does
not depend on the other rows. Compiled graphs have no hooks: rows with adapters run on the eager
model (paged_runner.py).
"""

import logging
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from batching.sequence import Batch, Span
from batching.state_pool import NO_SLOT, StateSegment
from worker.backends.adapter_file import LoraWeights, read_weights
from worker.backends.cpu.linear import products_match
from worker.backends.cpu.torch_only import is_torch_only
from worker.backends.native_attention import NATIVE_DTYPES, try_load_native_ops
from worker.device.device import unreserved_bytes
from worker.load_context import on_worker, remaining_bytes
from worker.model.language_model import LanguageModel

log = logging.getLogger("onequeue.lora")

# Tokens of the two sequences of the step in which layers are found.
PROBE_WIDTHS = (5, 3)

Run = Callable[[Batch], object]

torch.library.define(
    "onequeue::add_lora", "(Tensor x, Tensor(a!) out, Tensor[] down, Tensor[] up, int[] rows) -> ()"
)


class AdapterRows(NamedTuple):
    """The rows [start, end) of a step, which have one adapter."""

    start: int
    end: int
    weights: LoraWeights


def segments_of(batch: Batch) -> list[AdapterRows]:
    """Return the rows of a step that have an adapter, in order."""
    segments: list[AdapterRows] = []
    for chunk, offset in zip(batch.chunks, batch.offsets, strict=False):
        weights = chunk.sequence.adapter
        if not isinstance(weights, LoraWeights):
            continue
        end = offset + chunk.width
        if segments and segments[-1].end == offset and segments[-1].weights is weights:
            segments[-1] = AdapterRows(segments[-1].start, end, weights)
        else:
            segments.append(AdapterRows(offset, end, weights))
    return segments


_step = threading.local()  # .segments: of the step that runs on this thread


@contextmanager
def applied(segments: Sequence[AdapterRows]) -> Iterator[None]:
    """Make the layers of a model that runs in the context, on this thread, add these adapters."""
    _step.segments = segments
    try:
        yield
    finally:
        _step.segments = ()


class LoraLayers:
    """The layers of a model that may be adapted. `run`: runs steps on a cache of four blocks and
    slots."""

    segments_of, applied = staticmethod(segments_of), staticmethod(applied)

    def __init__(self, language: LanguageModel, run: Run) -> None:
        self.language = language
        self.layers = on_worker(partial(adaptable_layers, language, run))
        self._hooked: set[str] = set()
        self._hooking = threading.Lock()  # an abandoned load may end while another one runs
        self._add: Callable[..., object] = _add_rows
        self.is_native = False
        if language.device.type == "cpu" and language.dtype in NATIVE_DTYPES:
            self.use_native()
        log.info(
            "adapters layers=%d native=%s: their rows run on the eager model",
            len(self.layers), self.is_native,
        )  # fmt: skip

    def use_native(self) -> None:
        """Add by the native operation if it is built and gives the same."""
        if try_load_native_ops(build=False) and native_matches(self.language.dtype):
            self._add = torch.ops.onequeue.add_lora
            self.is_native = True

    def load(self, folder: Path) -> LoraWeights:
        """Return an adapter's weights, which its layers add from now on. Raises InvalidAdapter."""
        language = self.language
        free = min(unreserved_bytes(language.device), remaining_bytes())
        weights = read_weights(folder, self.layers, language.dtype, language.device, free)
        with self._hooking:
            for name in weights.pairs.keys() - self._hooked:
                module = language.model.get_submodule(name)
                module.register_forward_hook(partial(self._hook, name))
                self._hooked.add(name)
        return weights

    def _hook(self, name: str, module: nn.Module, inputs: tuple[Tensor], out: Tensor) -> None:
        if torch.compiler.is_dynamo_compiling():
            return
        segments: Sequence[AdapterRows] = getattr(_step, "segments", ())
        rows: list[int] = []
        down: list[Tensor] = []
        up: list[Tensor] = []
        for start, end, weights in segments:
            if pair := weights.pairs.get(name):
                rows += (start, end)
                down.append(pair.down)
                up.append(pair.up)
        if rows:
            add = _add_rows if is_torch_only() else self._add
            add(inputs[0], out, down, up, rows)


def _add_rows(
    x: Tensor, out: Tensor, down: Sequence[Tensor], up: Sequence[Tensor], rows: Sequence[int]
) -> None:
    """Implement onequeue::add_lora by torch: out [..., T, out] += up(down(x [..., T, in])) for the
    ranges [rows[2 n], rows[2 n + 1]) of T rows, each with its own matrices."""
    x, flat = x.reshape(-1, x.shape[-1]), out.view(-1, out.shape[-1])
    for n, (a, b) in enumerate(zip(down, up, strict=True)):
        start, end = rows[2 * n : 2 * n + 2]
        flat[start:end].addmm_(x[start:end] @ a.T, b)


@torch.inference_mode()
def native_matches(dtype: torch.dtype) -> bool:
    """Return whether the native operation adds what torch's functions add."""
    generator = torch.Generator().manual_seed(0)
    down, up = (
        [torch.randn(rank, size, generator=generator).to(dtype) for rank in (3, 16)]
        for size in (70, 50)
    )

    def product(add: Callable[..., object], x: Tensor) -> Tensor:
        out, middle = x.new_zeros(len(x), 50), len(x) // 2
        add(x, out, down, up, [0, middle, middle, len(x)])
        return out

    native, own = (partial(product, add) for add in (torch.ops.onequeue.add_lora, _add_rows))
    return products_match(native, own, 70, dtype)


# ── the layers that may be adapted ──


@torch.inference_mode()
def adaptable_layers(language: LanguageModel, run: Run) -> dict[str, tuple[int, int]]:
    """Return the inputs and outputs of each layer x [..., T, in] → [..., T, out] that sees the T
    rows of a step at once, which is observed in a step of two sequences. `run`: as in LoraLayers.
    """
    first, second = PROBE_WIDTHS
    [ids] = language.random_prompts([first + second])
    sizes: dict[str, set[tuple[int, int, int]]] = {}  # rows, inputs and outputs of its calls

    def record(name: str, module: nn.Module, inputs: tuple[Any, ...], out: Any) -> None:
        tensors = len(inputs) == 1 and isinstance(inputs[0], Tensor) and isinstance(out, Tensor)
        if not tensors or not inputs[0].is_floating_point() or inputs[0].dim() < 2:
            return
        *shape, width = inputs[0].shape
        if (*shape,) == out.shape[:-1] and out is not inputs[0]:
            sizes.setdefault(name, set()).add((math.prod(shape), width, out.shape[-1]))

    hooks = [
        module.register_forward_hook(partial(record, name))
        for name, module in language.model.named_modules()
        if not [*module.children()] or type(module).__module__.startswith("worker.")
    ]
    spans = [Span(range(2), 0, first), Span(range(2, 4), 0, second)]
    states = [(StateSegment(width, NO_SLOT, slot),) for width, slot in ((first, 0), (second, 2))]
    try:
        # the logits of one row: an output head does not see the others
        run(Batch(spans, ids, [0], states=states))
    finally:
        for hook in hooks:
            hook.remove()
    return {
        name: (width, outputs)
        for name, calls in sizes.items()
        for rows, width, outputs in calls
        if len(calls) == 1 and rows == first + second
    }
