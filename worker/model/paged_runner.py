"""The model runner over a paged KV cache: a batch goes in, the logits of its rows come out.

Which implementation runs a step is decided here only: the eager model or its compiled copy, torch's
or native attention, or a CUDA graph (cuda_graphs.py). The model is compiled in a background thread
and used from the next step on, if it gives the same logits up to rounding.

With native operations a token's logits do not depend on the rest of its batch, on the chunks of its
prompt or on the number of threads, in every bit. Until they are built, torch's serve. All forms of
the model share the weights but round otherwise, so a sequence stays on the one that it began with.
"""

import gc
import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from batching.sequence import Batch, Form, Span
from batching.state_pool import MAX_CHECKPOINTS, MAX_DRAFTS, StatePool
from worker import compilers
from worker.cores import unpin
from worker.device.async_copy import fill_placeholders, to_device
from worker.device.self_check import CannotRun, length_beyond_windows
from worker.error_classification import first_line
from worker.load_context import on_worker
from worker.model.attention.kv_cache import BLOCK, KVCache
from worker.model.attention.paged import (
    AttentionBackend,
    AttentionMetadata,
    forward_context,
)
from worker.model.check import Reference, check
from worker.model.decoder_hook import DecoderHook
from worker.model.language_model import LanguageModel
from worker.model.loading import LoadingFailed

if TYPE_CHECKING:
    from worker.backends.adapter_file import LoraWeights
    from worker.backends.cuda.cuda_graphs import CudaGraphs, RowsMetadata

log = logging.getLogger("onequeue.paged_runner")

# Tokens of the batches that compile and check the model: several, then one, and several again,
# which runs the first graph with another size.
COMPILED_WIDTHS = (24, 7, 1, 7)
# Steps that show whether logits depend on the batch: copies of one text, with the start and
# the end of each chunk. Kernels change at 16, 32, 64 and 128 rows.
COMPARED_STEPS = (
    [(0, 0, 77)],
    [(1, 0, 7)],
    [(1, 7, 8)],
    [(1, 8, 9), (2, 0, 3)],
    [(1, 9, 77), (2, 3, 33), (3, 0, 77)],
    [(2, 33, 57)],
)
# What is lost without native attention, and without compilation. Steps of SmolLM2-135M with 1, 8
# and 16 rows took 2.2 to 2.9 and 1.6 times as long on two cores of an Intel Xeon with AMX.
SLOWER_TORCH = "outputs depend on the batch; steps are about 2.5 times slower"
SLOWER_RECURRENCE = "recurrent layers are slower, and drafts are not verified"
SLOWER_EAGER = "steps are about 1.6 times slower"
# After the capture of a CUDA graph the next one waits for so many times its duration.
CAPTURE_REST = 9


# A step of a check: prompts' numbers, with the start and the end of their tokens.
Chunks = Sequence[tuple[int, int, int]]


class StateSlots(NamedTuple):
    """How many sequences may have states of recurrent layers, how many checkpoints of such states
    are kept, and how many drafts a step may have."""

    sequences: int
    checkpoints: int
    drafts: int = 0

    def pool(self) -> StatePool:
        return StatePool(self.sequences, self.checkpoints, self.drafts)


class PagedRunner:
    """Runs batches of a language model over a paged cache.

    `blocks`: number of cache blocks that sequences share. `max_model_len`: tokens of the longest
    sequence. `max_running`: most sequences in a step; 0: no CUDA graphs. `slots`: of recurrent
    layers' states; None: as many as run, and a few checkpoints.
    """

    idempotent = True  # a batch may be run again with other tokens: only the last run counts
    runs_ahead = False  # its steps run beside the host, though its device is a CPU

    def __init__(
        self,
        language: LanguageModel,
        blocks: int,
        max_model_len: int,
        max_running: int,
        slots: StateSlots | None = None,
    ) -> None:
        from worker.backends.cuda.cuda_graphs import SIZES, SPARE_BLOCKS, SPARE_SLOTS

        self.language = language
        self.decoder_hook = DecoderHook(language.model) if language.is_multimodal else None
        self._compiled_hook: DecoderHook | None = None  # of the compiled model
        self.blocks = blocks
        self.max_model_len = max_model_len
        self.compile_state: Literal["running", "done", "off"] = "off"
        self.slots = slots or StateSlots(max(1, max_running), 2 * MAX_CHECKPOINTS, MAX_DRAFTS)
        state_slots = self.slots.pool().num_slots + SPARE_SLOTS
        self.cache = new_cache(language, blocks + SPARE_BLOCKS, state_slots)
        self.model: Callable[..., Any] = language.model  # or its compiled copy, unless eager
        self.metadata: Callable[[KVCache, Batch], AttentionBackend] = AttentionMetadata
        self._compiled: Callable[..., Any] | None = None  # set by the thread, for the next step
        self.builds_later = False  # they are built in the background
        self.record_form: Callable[[Form, Any], None] = lambda form, model: None  # once complete
        self._background: tuple[str, float] | None = None  # what a thread does, since when
        if language.deterministic:
            self._attend_by_rows()
        self._rows = SIZES[-1] if max_running else 0
        if language.states:  # rows of decodes, one for each state
            self._rows = min(self._rows, self.slots.sequences)
        self._compiled_graphs: CudaGraphs | None = None  # of the compiled model, while captured
        self._capture_at = 0.0  # when the next of them is due
        self._graphs = self._capture()
        if self._graphs and not language.deterministic:
            self._use_decode_kernel()

    @property
    def verifies_drafts(self) -> bool:
        """Whether a step runs the drafts of a sequence for little more than one token: recurrent
        layers need native operations for it, as each draft has a state of its own."""
        recurrent = self.language.recurrent
        is_torch_only = self.metadata is AttentionMetadata
        return not recurrent or (not is_torch_only and all(module.native for module in recurrent))

    @property
    def stage(self) -> str:
        """What is built or compiled in the background, and for how long; empty: nothing."""
        if (background := self._background) is None:
            return ""
        stage, started = background
        return stage.format(f"{time.monotonic() - started:.0f} s so far")

    def form(self, is_adapted: bool) -> Form:
        """Return the form of the model on which a new sequence runs; `is_adapted`: it has an
        adapter, which compiled code leaves out. On a GPU, and where nothing is compiled, there is
        one."""
        is_compiled = self.compile_state == "done" and not is_adapted
        if self.language.device.type == "cuda" or self.compile_state == "off" or is_compiled:
            return ""
        return "torch" if self.metadata is AttentionMetadata else "eager"

    def forward(self, batch: Batch, sampled: Tensor | None = None) -> Tensor:
        """Run the batch and write the keys and values of all its tokens. Its sequences have one
        form.

        `sampled`: int64, the previous step's tokens by row, for placeholders in the batch's ids.
        Return the logits [R, vocabulary] of the batch's rows, or hidden states [R, H] of a model
        without a head; both are valid until the next call.
        """
        if self._compiled:
            self._use_compiled(self._compiled)
        if self._compiled_graphs and time.monotonic() >= self._capture_at:
            self._capture_next(self._compiled_graphs)
        form = batch.chunks[0].sequence.form if batch.chunks else ""
        lora = self.language.lora
        segments = lora.segments_of(batch) if lora else []
        if segments:
            form = form or "eager"
        with lora.applied(segments) if segments else nullcontext():
            if batch.multimodal_spans:
                return self._run_multimodal(batch, sampled, form)
            if not form and self._graphs and self._graphs.supports(batch):
                return self._graphs.forward(batch, sampled)
            return self._run(batch, sampled, form)

    def backend(self, form: Form) -> Callable[[KVCache, Batch], AttentionBackend]:
        return AttentionMetadata if form == "torch" else self.metadata

    def _run(self, batch: Batch, sampled: Tensor | None = None, form: Form = "") -> Tensor:
        metadata, model = self.backend(form)(self.cache, batch), None if form else self.model
        return run_model(self.language, batch, metadata, sampled, model=model)

    def load_adapter(self, folder: Path) -> "LoraWeights":
        """Return the weights of a LoRA adapter, for `Sequence.adapter`. Raises InvalidAdapter."""
        language = self.language
        if language.lora is None:
            from worker.backends.lora import LoraLayers

            cache = new_cache(language, 4, 4)

            def run(batch: Batch) -> Tensor:
                return run_model(language, batch, AttentionMetadata(cache, batch))

            language.lora = LoraLayers(language, run)
        weights: LoraWeights = language.lora.load(folder)
        return weights

    def _run_multimodal(self, batch: Batch, sampled: Tensor | None, form: Form) -> Tensor:
        """Run a batch with image tokens through a decoder hook: the compiled model's if only
        embeddings are injected, as in its check, and the sequences have no other form."""
        from worker.model.attention.bidirectional import backend_of
        from worker.model.multimodal_batch import injected_rows, multimodal_position_ids

        backend = self.backend(form)
        metadata = backend_of(batch, backend)(self.cache, batch)
        metadata.torch_only = backend is AttentionMetadata
        positions = to_device(multimodal_position_ids(batch).numpy(), self.cache.device)
        indices, rows = injected_rows(batch)
        only_embeddings = positions.dim() == 2 and rows.keys() <= {"inputs_embeds"}
        hook = self._compiled_hook if only_embeddings and not form else None
        hook = hook or self.decoder_hook
        assert hook is not None
        with hook.inject(to_device(indices.numpy(), self.cache.device), rows):
            return run_model(self.language, batch, metadata, sampled, positions, hook.model)

    def _capture(self) -> "CudaGraphs | None":
        if self.language.device.type != "cuda" or not self._rows:
            return None
        from worker.backends.cuda.cuda_graphs import capture_graphs

        capture = partial(
            capture_graphs, self.language, self.model, self._rows_metadata(), self._run
        )
        return on_worker(capture)

    def _rows_metadata(self) -> "RowsMetadata":
        from worker.backends.cuda.cuda_graphs import RowsMetadata
        from worker.backends.cuda.mixed import ALL_PROGRAMS

        blocks = min(self.blocks, -(-self.max_model_len // BLOCK))
        metadata = RowsMetadata(self.cache, self._rows, blocks)
        if self.language.deterministic:
            metadata.programs = ALL_PROGRAMS
        return metadata

    def _capture_next(self, graphs: "CudaGraphs") -> None:
        """Capture one more size of the compiled model, in a tenth of the time: capturing all at
        once would stall streams for seconds. The eager model's graphs serve until all are
        captured."""
        started = time.monotonic()
        is_captured = self._attempt_graphs(graphs.capture_next)
        ended = time.monotonic()
        self._capture_at = ended + CAPTURE_REST * (ended - started)
        if is_captured and graphs.is_complete:
            self._graphs = graphs
            log.info("captured CUDA graphs of the compiled model")
        if not is_captured or graphs.is_complete:
            self._compiled_graphs = None

    def _attend_by_rows(self) -> None:
        """Attend in all steps by the decode kernel; raise LoadingFailed if logits differ."""
        from worker.backends.cuda.mixed import RowwiseMetadata

        language = self.language
        try:
            self._check_attention(RowwiseMetadata)
        except Exception as error:  # such as a kernel that does not compile
            reason = first_line(error)
            raise LoadingFailed(f"DETERMINISTIC=1 is not possible: {reason}") from error
        self.metadata = RowwiseMetadata
        if language.states or language.is_multimodal:
            log.warning("DETERMINISTIC=1 does not hold for recurrent layers and images")

    def _use_decode_kernel(self) -> None:
        """Attend by the decode kernel also in steps with prompts, and to these by flash attention,
        as far as the logits are the same."""
        from worker.backends.cuda.mixed import MixedMetadata
        from worker.backends.cuda.varlen import VarlenMetadata  # seconds to import

        backends = (
            (VarlenMetadata, "flash attention", "prompts are slower"),
            (MixedMetadata, "decode kernel beside prompts", "decodes beside prompts are slower"),
        )
        for backend, refused, lost in backends:
            check_backend = partial(self._check_attention, backend)
            if self.language.attempt(check_backend, refused, "torch's attention", lost):
                self.metadata = backend
                return

    def _use_compiled(self, compiled: Callable[..., Any]) -> None:
        self.model, self._compiled = compiled, None
        self._compiled_hook = DecoderHook(compiled) if self.decoder_hook else None
        if self._graphs:
            self._attempt_graphs(self._prepare_graphs)

    def _prepare_graphs(self) -> None:
        from worker.backends.cuda.cuda_graphs import CudaCapture, CudaGraphs

        capture = CudaCapture(checked=True)  # the eager model is
        self._compiled_graphs = CudaGraphs(
            self.language, self.model, self._rows_metadata(), self._run, capture
        )

    def _attempt_graphs(self, change: Callable[[], None]) -> bool:
        refused, lost = "CUDA graphs of the compiled model", "small steps are slower"
        return self.language.attempt(change, refused, "the eager model's", lost)

    # ── native operations, and compiling in the background thread ──

    def compile(self) -> None:
        """Use native operations, if they are built; else build and then use them in a thread. After
        that, compile in a thread; `compile_state` shows when all is done."""
        threads = torch.get_num_threads()
        self.builds_later = self._builds_later()
        if self.builds_later:
            self._start(self._build, threads, "building native operations, {}, once")
        else:
            self._use_native_ops()
            self._start_compiling(threads)

    def _builds_later(self) -> bool:
        """Return whether native operations are not built, and share the weights with torch's. Other
        weights would be in memory twice: of the heads of latents (backends/latent.py), and those
        for which LanguageModel.pack_weights has waited."""
        from worker.backends.cpu.head_linear import HeadLinear
        from worker.backends.native_attention import NATIVE_DTYPES, try_load_native_ops

        language = self.language
        if language.device.type != "cpu" or language.dtype not in NATIVE_DTYPES:
            return False
        has_heads = any(isinstance(module, HeadLinear) for module in language.model.modules())
        return not has_heads and not try_load_native_ops(build=False)

    def _start(self, run: Callable[[int], None], threads: int, stage: str) -> None:
        self.compile_state, self._background = "running", (stage, time.monotonic())
        threading.Thread(target=run, args=(threads,), name="compile", daemon=True).start()

    def _build(self, threads: int) -> None:
        """OpenMP forgets the team of a thread that ends: compilation has a thread of its own."""
        unpin()
        torch.set_num_threads(threads)
        self._use_native_ops()
        self._start_compiling(threads)

    def _start_compiling(self, threads: int) -> None:
        self.record_form("eager", self.language.model)
        # a model without a head runs prompts only: nothing to gain
        if self.language.model.base_model is self.language.model or compilers.ending.is_set():
            self.record_form("", self.language.model)
            self.compile_state, self._background = "off", None
        else:
            self._start(self._compile, threads, "compiling, {}")

    def _compile(self, threads: int) -> None:
        """`threads`: number of torch threads of the worker, for which the code is compiled."""
        from worker.model.compiling import compile_model

        unpin()
        torch.set_num_threads(threads)
        started = time.monotonic()
        language = self.language
        state: Literal["done", "off"] = "off"
        try:
            if language.device.type == "cuda":
                torch.cuda.set_device(language.device)  # Triton launches on the thread's device
            self._compiled = compile_model(
                language.model, self._check_compiled, language.is_multimodal
            )
        except Exception as error:
            if compilers.ending.is_set():
                return
            language.fall_back("compilation", error, "the eager model", SLOWER_EAGER)
        else:
            log.info("compiled seconds=%.0f", time.monotonic() - started)
            state = "done"
        self.record_form("", self._compiled or self.model)
        if gc.get_freeze_count():  # as in server/lifespan.py: collecting these takes up to 0.4 s
            gc.collect()
            gc.freeze()
        self.compile_state, self._background = state, None

    def _use_native_ops(self) -> None:
        """Use native operations for new sequences, if they support the model and are checked. Steps
        of others, which may run meanwhile, leave them out."""
        from worker.backends.cpu.functional import align_activations
        from worker.backends.cpu.linear import (
            use_native_functions,
            use_native_linear,
        )
        from worker.backends.native_attention import NATIVE_DTYPES, NativeMetadata, load_native_ops
        from worker.backends.native_recurrent import use_native_recurrence

        language = self.language
        if language.device.type != "cpu" or language.dtype not in NATIVE_DTYPES:
            return
        started = time.monotonic()
        try:
            load_native_ops()
            use_native_linear(language.model)
            use_native_functions(language.model)
            align_activations(language.model)
            use = partial(
                use_native_recurrence, language.recurrent, language.states, language.dtype
            )
            language.attempt(use, "native recurrence", "torch's", SLOWER_RECURRENCE)
            self._check_attention(NativeMetadata)
            if language.lora:
                language.lora.use_native()
        except Exception as error:
            if compilers.ending.is_set():
                return
            language.fall_back("native attention", error, "torch's attention", SLOWER_TORCH)
        else:
            self.metadata = NativeMetadata
            log.info("native attention seconds=%.0f", time.monotonic() - started)
            if not self._keeps_rows_apart():
                reason = CannotRun("a token's logits differ between batches")
                lost = "outputs depend on the batch"
                language.fall_back("batch invariance", reason, "torch's rounding", lost)

    def _check_attention(self, checked: Callable[[KVCache, Batch], AttentionBackend]) -> None:
        """Raise CannotRun unless chunks of two sequences, longer than the attention windows, give
        the logits of torch's attention."""
        language = self.language
        longest = length_beyond_windows(language.config, language.context - 2, 3 * BLOCK)
        long, short = language.random_prompts([longest, longest // 2 + 1])
        expected, actual = (partial(self._run_chunks, k) for k in (AttentionMetadata, checked))
        check(expected, actual, [long, short], language.tolerance)

    def _run_chunks(
        self,
        kind: Callable[[KVCache, Batch], AttentionBackend],
        prompts: Sequence[Sequence[int]],
    ) -> list[Tensor]:
        """Return the logits [L, V] of at most two prompts in three shared steps, which attend by
        this backend."""
        steps = chunk_steps(prompts, (len(prompts[0]) // 2, 3))
        return PromptRun(self.language, prompts, kind).run(steps)

    def _keeps_rows_apart(self) -> bool:
        """Return whether a token's logits are equal in every bit in steps of several lengths, from
        any start and beside other sequences."""
        from worker.backends.cpu.linear import stacked_products_differ

        language = self.language
        if not self.verifies_drafts or stacked_products_differ(language.decoder):
            return False  # by torch's operations: equal in some batches only
        [text] = language.random_prompts([min(COMPARED_STEPS[0][0][2], language.context)])
        steps = [
            [(n, start, min(end, len(text))) for n, start, end in chunks if start < len(text)]
            for chunks in COMPARED_STEPS
        ]
        return _begin_equally(PromptRun(language, [text] * 4, self.metadata).run(steps))

    def _check_compiled(self, compiled: Callable[..., Any]) -> None:
        """Raise CannotRun unless the compiled model gives the logits of the eager one. Where these
        do not depend on a token's batch, those of the compiled model must not either."""
        from worker.backends.native_attention import NativeMetadata

        language = self.language
        [text] = language.random_prompts([max(COMPILED_WIDTHS)])
        texts = [text[:width] for width in COMPILED_WIDTHS]
        eager = Reference(partial(self._run_alone, language.model), texts)
        compiled_logits = self._run_alone(compiled, texts)
        eager.check(compiled_logits, language.tolerance)
        if language.is_multimodal:
            own, other = (partial(self._run_injected, m) for m in (language.model, compiled))
            check(own, other, texts, language.tolerance)
        is_native = self.metadata is NativeMetadata
        if is_native and _begin_equally(eager.logits) and not _begin_equally(compiled_logits):
            raise CannotRun("a token's logits depend on its batch if compiled")

    def _run_alone(self, model: Any, prompts: Sequence[Sequence[int]]) -> list[Tensor]:
        """Return the logits [L, V] of each prompt in a batch of its own."""
        steps = [[(n, 0, len(prompt))] for n, prompt in enumerate(prompts)]
        return PromptRun(self.language, prompts, self.metadata, model).run(steps)

    def _run_injected(self, model: Any, prompts: Sequence[Sequence[int]]) -> list[Tensor]:
        """Do the same with random embeddings in place of every other token's."""
        language, hook, outputs = self.language, DecoderHook(model), []
        for prompt in prompts:
            indices = torch.arange(0, len(prompt), 2, device=language.device)
            generator = torch.Generator().manual_seed(0)
            rows = torch.randn(len(indices), language.config.hidden_size, generator=generator)
            with hook.inject(indices, {"inputs_embeds": rows.to(language.device)}):
                outputs += self._run_alone(hook.model, [prompt])
        return outputs


def new_cache(language: LanguageModel, blocks: int, slots: int) -> KVCache:
    """Return a cache for the keys and values of a model's layers, and for their states."""
    return KVCache(
        language.layers, blocks, language.dtype, language.device, language.states, slots,
        in_panels=language.native,
    )  # fmt: skip


class PromptRun:
    """Prompts that a check runs in steps of its choice, on a cache of their own. `model`: a copy of
    the model to call."""

    def __init__(
        self, language: LanguageModel, prompts: Sequence[Sequence[int]],
        kind: Callable[[KVCache, Batch], AttentionBackend] = AttentionMetadata,
        model: Callable[..., Any] | None = None,
    ) -> None:  # fmt: skip
        self._language, self._prompts, self._kind, self._model = language, prompts, kind, model
        count = len(prompts)
        total = count * -(-max(map(len, prompts)) // BLOCK)
        self.tables = [range(n, total, count) for n in range(count)]  # apart
        self._pool = StatePool(count, count)
        self.cache = new_cache(language, total, self._pool.num_slots)
        opened = (self._pool.open(None, 0, {len(prompt) * 3 // 4}) for prompt in prompts)
        self.states = [state for state in opened if state]  # before the last step

    def run(self, steps: Sequence[Chunks]) -> list[Tensor]:
        """Return the logits [L, V] of each prompt's tokens that run."""
        rows: list[list[Tensor]] = [[] for _ in self._prompts]
        for chunks in steps:
            spans = [Span(self.tables[n], start, end - start) for n, start, end in chunks]
            ids = [token for n, start, end in chunks for token in self._prompts[n][start:end]]
            for n, start, _ in chunks:
                self._pool.commit(self.states[n], start)
            segments = [self._pool.plan(self.states[n], end) for n, _, end in chunks]
            batch = Batch(spans, ids, range(len(ids)), states=segments)
            metadata = self._kind(self.cache, batch)
            metadata.torch_only = False  # the operations that the layers have are compared
            step = partial(run_model, self._language, batch, metadata, model=self._model)
            logits = on_worker(step)
            for (n, start, end), offset in zip(chunks, batch.offsets, strict=True):
                rows[n].append(logits[offset : offset + end - start])
        return [torch.cat(parts) for parts in rows]


def chunk_steps(prompts: Sequence[Sequence[int]], first: Sequence[int]) -> list[Chunks]:
    """Return steps of all prompts: so many first tokens of each, then all but the last token, then
    that."""
    ends = [(0, at, len(p) - 1, len(p)) for at, p in zip(first, prompts, strict=False)]
    return [
        [(n, start, end) for n, (start, end) in enumerate(bounds) if start < end]
        for bounds in zip(*map(itertools.pairwise, ends), strict=True)
    ]


def _begin_equally(logits: Sequence[Tensor]) -> bool:
    """Return whether the first tokens have the same logits [T, vocabulary], in every bit, in
    batches of several lengths T. The first batch is the longest."""
    return all(torch.equal(rows, logits[0][: len(rows)]) for rows in logits)


@torch.inference_mode()
def run_model(
    language: LanguageModel, batch: Batch, metadata: AttentionBackend,
    sampled: Tensor | None = None, positions: Tensor | None = None,
    model: Callable[..., Any] | None = None,
) -> Tensor:  # fmt: skip
    """Run a language model whose layers attend by `metadata`.

    `sampled`: tokens for the placeholders in the batch's ids. `positions`: the model's position
    ids, if they are not the batch's own. `model`: a copy of the model to call. Return the logits
    [R, vocabulary] of the batch's rows, or the hidden states [R, H] of a model without a head.
    """
    model, device = model or language.model, metadata.cache.device
    if positions is None:
        row = to_device(batch.position_ids, device) if batch.shifts else metadata.positions
        positions = row[None]
    rows = to_device(batch.rows, device)
    recurrent = None
    if language.recurrent:
        from worker.backends.recurrent import PackedStates

        recurrent = PackedStates(language.recurrent, metadata.cache, batch).run
    with forward_context(metadata, recurrent):
        output = model(
            input_ids=fill_placeholders(to_device([batch.ids], device), sampled),
            position_ids=positions.clone(),  # a new tensor, as the compiler's guards expect
            use_cache=False,
            logits_to_keep=rows,
        )
    logits: Tensor = output[0][0]
    return logits if len(logits) == len(rows) else logits[rows]
