"""The model runner over a paged KV cache: a batch goes in, the logits of its rows come out.

How a step is run is decided here and nowhere else: by the eager model, by the compiled one once
that has been made in the background, or by CUDA graphs of either (cuda_graphs.py).
"""

import copy
import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from batching.sequence import Batch, Span
from worker.cores import release
from worker.model.cuda_graphs import SIZES, SPARE, CudaGraphs, RowsMetadata, capture_graphs
from worker.model.kv_cache import BLOCK, KVCache
from worker.model.language_model import LanguageModel
from worker.model.loading import first_line
from worker.model.paged_attention import AttentionMetadata, forward_context

log = logging.getLogger("onequeue.paged_runner")

# Widths of the batches that the compiled model is made and checked with: several tokens, then one.
COMPILED_WIDTHS = (24, 7, 1)


class PagedRunner:
    """`blocks`: how many sequences may have between them. `max_model_len`: tokens of the longest
    sequence. `max_running`: the most sequences of a step; 0: no graphs are captured."""

    def __init__(
        self, language: LanguageModel, blocks: int, max_model_len: int, max_running: int
    ) -> None:
        self.language = language
        self.blocks = blocks
        self.max_model_len = max_model_len
        self.compile_state: Literal["running", "done", "off"] = "off"
        self.cache = KVCache(language.layers, blocks + SPARE, language.dtype, language.device)
        self.model: Callable[..., Any] = language.model  # or it compiled
        self._compiled: Callable[..., Any] | None = None  # by the thread, to be taken over
        self._rows = min(max_running, SIZES[-1])
        self._graphs = self._capture()

    def forward(self, batch: Batch) -> Tensor:
        """Logits [R, vocabulary] of the batch's rows, valid until the next call; keys and values
        of all its tokens are written."""
        if self._compiled:
            self._take_over(self._compiled)
        if self._graphs and self._graphs.takes(batch):
            return self._graphs.forward(batch)
        return self._run(batch)

    def _capture(self) -> CudaGraphs | None:
        if self.language.device.type != "cuda" or not self._rows:
            return None
        blocks = min(self.blocks, -(-self.max_model_len // BLOCK))
        metadata = RowsMetadata(self.cache, self._rows, blocks)
        return capture_graphs(self.language, self.model, metadata, self._run)

    def _run(self, batch: Batch) -> Tensor:
        return run(self.model, batch, AttentionMetadata(self.cache, batch))

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
        started = time.monotonic()
        release()
        torch.set_num_threads(threads)
        try:
            self._compiled = compiled(self.language.model, self._check_compiled)
        except Exception as error:
            log.warning("not compiled, serving goes on as it is: %.300s", first_line(error))
            self.compile_state = "off"
        else:
            log.info("compiled seconds=%.0f", time.monotonic() - started)
            self.compile_state = "done"

    def _check_compiled(self, compiled: Callable[..., Any]) -> None:
        """CannotRun unless it gives the logits of the eager model."""
        language = self.language
        cache = KVCache(language.layers, 2, language.dtype, language.device)
        for width in COMPILED_WIDTHS:
            ids = [1 + 7 * n % (language.vocab_size - 1) for n in range(width)]
            batch = Batch([Span([0, 1], 0, width)], ids, range(width))
            metadata = AttentionMetadata(cache, batch)
            reference = run(language.model, batch, metadata)
            language.compare(run(compiled, batch, metadata), reference)

    def _take_over(self, compiled: Callable[..., Any]) -> None:
        self.model, self._compiled = compiled, None
        if self._graphs:
            self._graphs = None  # their memory is needed
            self._graphs = self._capture()


def compiled(model: Any, check: Callable[[Any], None]) -> Any:
    """The same modules and weights, with the body's forward compiled: it is when `check`, which
    raises if it must not be used, runs it. Whatever the compiler raises is raised.

    One graph for any number of tokens, since attention and its memory are opaque to the compiler,
    and one for a single token; on a CPU weights are constants in it, those of packed layers the
    same. The output head stays outside: its number of rows changes with every step.
    """
    from torch._inductor import config as inductor  # seconds to import

    with inductor.patch(freezing=model.device.type == "cpu"):
        body = copy.copy(model.base_model)
        body.forward = torch.compile(model.base_model.forward, dynamic=True)
        made = copy.copy(model)
        modules = model._modules.items()
        made._modules = {name: body if m is model.base_model else m for name, m in modules}
        check(made)
    return made


@torch.inference_mode()
def run(model: Callable[..., Any], batch: Batch, metadata: AttentionMetadata) -> Tensor:
    """Logits [R, vocabulary] by the model, whose layers attend by the metadata."""
    device = metadata.cache.device
    rows = torch.tensor(list(batch.rows), dtype=torch.long, device=device)
    with forward_context(metadata):
        output = model(
            input_ids=torch.tensor([list(batch.ids)], device=device),
            position_ids=metadata.positions[None].clone(),  # made here, for the compiler's guards
            use_cache=False,
            logits_to_keep=rows,
        )
    logits: Tensor = output.logits[0]
    return logits if len(logits) == len(rows) else logits[rows]
