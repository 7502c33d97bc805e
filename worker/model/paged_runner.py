"""The model runner over a paged KV cache: a batch goes in, the logits of its rows come out.

How a step is run is decided here and nowhere else: by the eager model, by the compiled one and with
native attention once those have been made in the background, or by CUDA graphs (cuda_graphs.py).

A model with its body compiled, for the paged runner: what it is made of, and what a call checks.

The compiler's function checks at every call whatever its graph was made from, which for the
hundreds of modules of a model takes as long as some of its layers. Nothing of that changes once it
serves: only what it is called with is looked at.
"""

import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from batching.sequence import Batch, Span
from worker.cores import unpin
from worker.device.async_copy import fill_placeholders, to_device
from worker.device.self_check import CannotRun, length_beyond_windows
from worker.error_classification import first_line
from worker.model.attention.kv_cache import BLOCK, KVCache
from worker.model.attention.native import NATIVE_DTYPES, NativeMetadata, load_native_ops
from worker.model.attention.paged import (
    AttentionBackend,
    AttentionMetadata,
    BidirectionalMetadata,
    forward_context,
    has_blocks,
)
from worker.model.cpu.linear import use_bf16_weights, use_native_linear, warm_up_onednn
from worker.model.cuda_graphs import SIZES, SPARE, CudaGraphs, RowsMetadata, capture_graphs
from worker.model.decoder_hook import DecoderHook, copy_path, path_to_decoder
from worker.model.language_model import LanguageModel
from worker.model.multimodal_batch import injected_rows, position_ids

log = logging.getLogger("onequeue.paged_runner")

# Widths of the batches that the compiled model is made and checked with: several tokens, then one,
# and several again by the graph that was made for them.
COMPILED_WIDTHS = (24, 7, 1, 7)


class PagedRunner:
    """`blocks`: how many sequences may have between them. `max_model_len`: tokens of the longest
    sequence. `max_running`: the most sequences of a step; 0: no graphs are captured."""

    idempotent = True  # a batch may be run again, with other tokens: that is as if it ran once

    def __init__(
        self, language: LanguageModel, blocks: int, max_model_len: int, max_running: int
    ) -> None:
        self.language = language
        self.decoder_hook = DecoderHook(language.model) if language.is_multimodal else None
        self._quick: DecoderHook | None = None  # of the model compiled, where embeddings alone join
        self.blocks = blocks
        self.max_model_len = max_model_len
        self.compile_state: Literal["running", "done", "off"] = "off"
        self.cache = KVCache(language.layers, blocks + SPARE, language.dtype, language.device)
        self.model: Callable[..., Any] = language.model  # or it compiled
        self.metadata: Callable[[KVCache, Batch], AttentionBackend] = AttentionMetadata
        self._compiled: Callable[..., Any] | None = None  # by the thread, to be taken over
        self._rows = min(max_running, SIZES[-1])
        self._graphs = self._capture()

    def forward(self, batch: Batch, drawn: Tensor | None = None) -> Tensor:
        """Logits [R, vocabulary] of the batch's rows, or states [R, H], valid until the next call;
        keys and values of all its tokens are written. `drawn`: what promised ones stand for."""
        if self._compiled:
            self._take_over(self._compiled)
        if batch.multimodal_spans:
            return self._run_pictured(batch, drawn)
        if self._graphs and self._graphs.takes(batch):
            return self._graphs.forward(batch, drawn)
        return self._run(batch, drawn)

    def _capture(self) -> CudaGraphs | None:
        if self.language.device.type != "cuda" or not self._rows:
            return None
        blocks = min(self.blocks, -(-self.max_model_len // BLOCK))
        metadata = RowsMetadata(self.cache, self._rows, blocks)
        return capture_graphs(self.language, self.model, metadata, self._run)

    def _run(self, batch: Batch, drawn: Tensor | None = None) -> Tensor:
        return run_model(self.model, batch, self.metadata(self.cache, batch), drawn)

    def _run_pictured(self, batch: Batch, drawn: Tensor | None) -> Tensor:
        """Pictures join on the way to the decoder: the compiled one where they do so as when it was
        checked."""
        metadata = (BidirectionalMetadata if has_blocks(batch) else self.metadata)(
            self.cache, batch
        )
        positions = to_device(position_ids(batch).numpy(), self.cache.device)
        places, rows = injected_rows(batch)
        usual = positions.dim() == 2 and rows.keys() <= {"inputs_embeds"}
        decoder_hook = self._quick if self._quick and usual else self.decoder_hook
        assert decoder_hook is not None
        with decoder_hook.inject(to_device(places.numpy(), self.cache.device), rows):
            return run_model(decoder_hook.model, batch, metadata, drawn, positions)

    # ── compiling ──

    def compile(self) -> None:
        """Begin, in a separate thread; `compile_state` tells when it is done."""
        self.compile_state = "running"
        threads = torch.get_num_threads()
        thread = threading.Thread(
            target=self._compile, args=(threads,), name="compile", daemon=True
        )
        thread.start()

    def _compile(self, threads: int) -> None:
        """`threads`: of the worker's thread; the code is made for so many."""
        unpin()
        torch.set_num_threads(threads)
        self._take_native_attention()
        if self.language.model.base_model is self.language.model:
            self.compile_state = "off"  # without a head only prompts are run: nothing to win
            return
        started = time.monotonic()
        try:
            language = self.language
            self._compiled = compile_model(
                language.model, self._check_compiled, language.is_multimodal
            )
        except Exception as error:
            log.warning("not compiled, serving goes on as it is: %.300s", first_line(error))
            self.compile_state = "off"
        else:
            log.info("compiled seconds=%.0f", time.monotonic() - started)
            self.compile_state = "done"

    def _take_native_attention(self) -> None:
        """From the next step on, if it is for this model, can be built, and says the same."""
        language = self.language
        if language.device.type != "cpu" or language.dtype not in NATIVE_DTYPES:
            return
        started = time.monotonic()
        try:
            load_native_ops()
            use_bf16_weights(language.model)
            if self.decoder_hook:
                self.decoder_hook = DecoderHook(language.model)  # of what stands there now
            use_native_linear(language.model)
            self._check_native()
            warm_up_onednn(language.model.base_model)
        except Exception as error:
            log.warning("no native attention, torch's serves: %.300s", first_line(error))
        else:
            self.metadata = NativeMetadata
            log.info("native attention seconds=%.0f", time.monotonic() - started)

    def _check_native(self) -> None:
        """CannotRun unless chunks of two sequences, beyond the windows, give the logits that they
        give without it."""
        language = self.language
        longest = length_beyond_windows(language.config, language.context - 2, 3 * BLOCK)
        blocks = -(-longest // BLOCK)
        tables = range(1, 2 * blocks, 2), range(0, 2 * blocks, 2)
        shape = language.layers, 2 * blocks, language.dtype, language.device
        caches = KVCache(*shape), KVCache(*shape)
        ends = (0, longest // 2, longest - 1, longest), (0, 3, longest // 2, longest // 2 + 1)
        for chunks in zip(*map(itertools.pairwise, ends), strict=True):
            spans = [
                Span(t, start, end - start) for t, (start, end) in zip(tables, chunks, strict=True)
            ]
            width = sum(span.width for span in spans)
            ids = [1 + 7 * n % (language.vocab_size - 1) for n in range(width)]
            batch = Batch(spans, ids, range(width))
            kinds = (AttentionMetadata, NativeMetadata)
            steps = [kind(cache, batch) for kind, cache in zip(kinds, caches, strict=True)]
            reference, got = (run_model(language.model, batch, step) for step in steps)
            language.compare(got, reference)

    def _check_compiled(self, compiled: Callable[..., Any]) -> None:
        """CannotRun unless it gives the logits of the eager model."""
        language = self.language
        cache = KVCache(language.layers, 2, language.dtype, language.device)
        for width in COMPILED_WIDTHS:
            ids = [1 + 7 * n % (language.vocab_size - 1) for n in range(width)]
            batch = Batch([Span([0, 1], 0, width)], ids, range(width))
            metadata = self.metadata(cache, batch)
            reference = run_model(language.model, batch, metadata)
            language.compare(run_model(compiled, batch, metadata), reference)
            if language.is_multimodal:
                self._check_entered(compiled, batch, metadata)

    def _check_entered(self, compiled: Any, batch: Batch, metadata: AttentionBackend) -> None:
        """CannotRun unless it does with what a picture could bring, too."""
        language, width = self.language, len(batch.ids)
        places = torch.arange(0, width, 2, device=language.device)
        generator = torch.Generator().manual_seed(0)
        rows = torch.randn(len(places), language.config.hidden_size, generator=generator)
        made = []
        for model in (language.model, compiled):
            decoder_hook = DecoderHook(model)
            with decoder_hook.inject(places, {"inputs_embeds": rows.to(language.device)}):
                made.append(run_model(decoder_hook.model, batch, metadata))
        language.compare(made[1], made[0])

    def _take_over(self, compiled: Callable[..., Any]) -> None:
        self.model, self._compiled = compiled, None
        self._quick = DecoderHook(compiled) if self.decoder_hook else None
        if self._graphs:
            self._graphs = None  # their memory is needed
            self._graphs = self._capture()


@torch.inference_mode()
def run_model(
    model: Callable[..., Any], batch: Batch, metadata: AttentionBackend, drawn: Tensor | None =
    None,
    positions: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Logits [R, vocabulary] by the model, or states [R, H] by one without a head, whose layers
    attend by the metadata. `drawn`: what promised tokens stand for. `positions`: as the model is
    told them, where that is not [1, T]."""
    device = metadata.cache.device
    if positions is None:
        told = to_device(batch.position_ids, device) if batch.shifts else metadata.positions
        positions = told[None]
    rows = to_device(batch.rows, device)
    with forward_context(metadata):
        output = model(
            input_ids=fill_placeholders(to_device([batch.ids], device), drawn),
            position_ids=positions.clone(),  # made here, for the compiler's guards
            use_cache=False,
            logits_to_keep=rows,
        )
    logits: Tensor = output[0][0]
    return logits if len(logits) == len(rows) else logits[rows]


# Kernels ask how many threads there are when they run (cores.py).
ON_CPU = {"freezing": True, "cpp.dynamic_threads": True}


def compile_model(model: Any, check: Callable[[Any], None], is_multimodal: bool = False) -> Any:
    """A copy of the model, with the same weights, whose body's forward is compiled; of one that
    sees, its decoder's. It is when `check`, which raises if it must not be used, runs it. Whatever
    the compiler raises is raised.

    One graph for any number of tokens, since attention and its memory are opaque to the compiler,
    and one for a single token; on a CPU weights are constants in it, those of packed layers the
    same, and what calls its kernels is compiled too, where the compiler can do that. The output
    head stays outside: its number of rows changes with every step.
    """
    path = path_to_decoder(model) if is_multimodal else _body_of(model)
    if model.device.type != "cpu":
        return _compile_model(model, path, check, {})
    try:
        return _compile_model(model, path, check, ON_CPU | {"cpp_wrapper": True})
    except Exception as error:
        log.info("kernels are called from Python: %.300s", first_line(error))
        return _compile_model(model, path, check, ON_CPU)


def _compile_model(
    model: Any, path: str, check: Callable[[Any], None], settings: dict[str, bool]
) -> Any:
    from torch._inductor import config as inductor  # seconds to import

    with inductor.patch(settings):
        made, *_, body = copy_path(model, path)
        body.forward = torch.compile(
            _forward_of(model.get_submodule(path)),
            dynamic=True,
            options={"guard_filter_fn": _on_inputs},
        )
        check(made)
    return made


def _body_of(model: Any) -> str:
    """What the model calls it. Some classes give a name that they don't use (Llama 4): there it is
    the part that is a model itself."""
    misnamed = model.base_model is model
    for name, part in model.named_children():
        if part is model.base_model or (misnamed and isinstance(part, PreTrainedModel)):
            return str(name)
    raise CannotRun("which part is its body is not known")


def _forward_of(body: Any) -> Callable[..., Any]:
    """With code of its own: graphs are kept with the code that they were made from, and without
    the checks those of two models could not be told apart."""

    def forward(**inputs: Any) -> Any:
        return body.forward(**inputs)

    code = forward.__code__.replace()
    return FunctionType(code, forward.__globals__, "forward", None, forward.__closure__)


def _on_inputs(guards: Sequence[Any]) -> list[bool]:
    """Of what a graph depends on, what each call checks: the tensors and the sizes it is given."""
    return [guard.guard_type == "SHAPE_ENV" or guard.name.startswith("inputs[") for guard in guards]
