"""Steps of few rows on a GPU, captured as CUDA graphs: decoding, and drafts to verify.

Launching a model's some thousand kernels takes longer than running them for a few tokens. So a
step is captured once for each size of batch and replayed: its inputs are buffers that are filled
anew, and what a smaller batch leaves empty is padded with rows of a block that no sequence has.
Each row has a table of blocks (triton_decode.py), whatever its sequence's length.
"""

import copy
import functools
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from batching.sequence import Batch, Span
from worker.device.async_copy import fill_placeholders, to_device
from worker.error_classification import first_line
from worker.model.attention.kv_cache import BLOCK, KVCache
from worker.model.attention.paged import AttentionBackend, forward_context
from worker.model.language_model import LanguageModel

log = logging.getLogger("onequeue.cuda_graphs")

Run = Callable[[], Tensor]
# What captures a run: something that does it again, and where its output lies.
Capture = Callable[[Run], tuple[Callable[[], Any], Tensor]]

SIZES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256)
# The cache's last blocks, which no sequence gets: one that padding is written to, one for the check
SPARE = 2
# A span of more tokens is a prompt: as rows, each would read all that is before it.
WIDEST = 16
# Programs that a processor of the GPU should have to choose from.
PROGRAMS = 4


class RowsMetadata(AttentionBackend):
    """The attention metadata of a captured step: each row is a token with a table of blocks.
    `table`: the most blocks that a sequence has."""

    def __init__(self, cache: KVCache, rows: int, table: int) -> None:
        self.cache = cache
        self.programs = PROGRAMS
        if cache.device.type == "cuda":
            self.programs *= torch.cuda.get_device_properties(cache.device).multi_processor_count
        self._filled = torch.zeros(5, rows, dtype=torch.long, device=cache.device)
        # `rests`: places after it in a block that the step begins; `told`: positions as the model
        # is told them, behind pictures
        self.ids, self.positions, self.slots, self.rests, self.told = self._filled
        self.tables = torch.zeros(rows, table, dtype=torch.int32, device=cache.device)

    def first(self, rows: int) -> "RowsMetadata":
        """A view of the first rows."""
        view = copy.copy(self)
        view.ids, view.positions, view.slots, view.rests, view.told = self._filled[:, :rows]
        view.tables = self.tables[:rows]
        return view

    def fill(self, batch: Batch, rows: int, spare: int, drawn: Tensor | None = None) -> None:
        """The batch's tokens, and the first place of block `spare` for the rest of the `rows`."""
        count = len(batch.ids)
        starts = np.array([span.start for span in batch.spans])
        widths = np.array([span.width for span in batch.spans])
        lasts = starts + widths - 1
        seen = lasts // BLOCK + 1  # blocks of each span
        blocks = np.zeros((len(seen), seen.max()), np.int32)
        for row, (table, _, _) in enumerate(batch.spans):
            blocks[row, : seen[row]] = table[: seen[row]]
        span = np.repeat(np.arange(len(seen)), widths)  # of each row
        positions = np.array(batch.positions)
        told = np.full((rows, 5 + blocks.shape[1]), spare, np.int32)
        told[:count, 5:] = blocks[span]
        filled = told[:, :5].T
        filled[:] = 0
        filled[0, :count] = batch.ids
        filled[1, :count] = positions
        filled[4, :count] = batch.position_ids if batch.shifts else positions
        filled[2] = spare * BLOCK
        filled[2, :count] = blocks[span, positions // BLOCK] * BLOCK + positions % BLOCK
        begun = lasts % BLOCK < widths
        ends = np.array(batch.offsets) + widths
        filled[3, ends - 1] = np.where(begun, BLOCK - 1 - lasts % BLOCK, 0)
        sent = to_device(told, self.tables.device)
        self._filled[:, :rows] = sent[:, :5].T
        self.tables[:rows, : blocks.shape[1]] = sent[:, 5:]
        if drawn is not None:
            self.ids[:rows] = fill_placeholders(self.ids[:rows], drawn)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None,
        layer: int, scale: float, window: int, softcap: float,
    ) -> Tensor:  # fmt: skip
        from worker.model.attention import (
            triton_decode,  # needs triton, which comes with torch for GPUs
        )

        keys, values = self.cache.keys[layer], self.cache.values[layer]
        shape = self.cache.layers[layer]
        if shape.temperature:
            query = shape.rescaled(query, self.positions)
        q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
        q, k, v = (t if t.stride(2) == 1 else t.contiguous() for t in (q, k, v))
        triton_decode.write(k, v, keys, values, self.slots, self.rests)
        return triton_decode.attend(
            q, keys, values, self.tables, self.positions, programs=self.programs, scale=scale,
            window=window, chunk=shape.chunk, softcap=softcap, sinks=sinks,
        ).unsqueeze(0)  # fmt: skip


class CudaGraphs:
    """Captures the model for every size of batch up to `rows`; CannotRun, or whatever the capture
    raises, where that fails. `reference` gives a batch's logits as they must be."""

    def __init__(
        self, language: LanguageModel, model: Callable[..., Any], metadata: RowsMetadata,
        reference: Callable[[Batch], Tensor], capture: Capture,
    ) -> None:  # fmt: skip
        self._model = model
        self._metadata = metadata
        rows = len(metadata.ids)
        self._spare = len(metadata.cache.keys[0]) - SPARE
        self._sizes = [size for size in SIZES if size < rows] + [rows]
        self._captured: dict[int, tuple[Callable[[], Any], Tensor]] = {}
        prompt = [1 + 7 * n % (language.vocab_size - 1) for n in range(min(rows, WIDEST))]

        def trial(width: int) -> Batch:
            return Batch([Span([self._spare + 1], 0, width)], prompt[:width], range(width))

        expected = reference(trial(len(prompt)))
        for size in reversed(self._sizes):  # the smaller ones fit into the largest's memory
            width = min(size, len(prompt))
            metadata.fill(trial(width), size, self._spare)
            replay, logits = self._captured[size] = capture(functools.partial(self._run, size))
            replay()
            language.compare(logits[:width], expected[:width])

    def takes(self, batch: Batch) -> bool:
        return len(batch.ids) <= self._sizes[-1] and all(s.width <= WIDEST for s in batch.spans)

    def forward(self, batch: Batch, drawn: Tensor | None = None) -> Tensor:
        """Logits [R, V] of the batch's rows, until the next call; keys and values are written."""
        size = next(size for size in self._sizes if size >= len(batch.ids))
        self._metadata.fill(batch, size, self._spare, drawn)
        replay, logits = self._captured[size]
        replay()
        wanted = list(batch.rows)
        if wanted == list(range(len(wanted))):
            return logits[: len(wanted)]
        return logits[to_device(wanted, logits.device)]

    @torch.inference_mode()
    def _run(self, size: int) -> Tensor:
        metadata = self._metadata.first(size)
        # clones are to the compiler what an eager step passes: it compiles no more
        ids, positions = metadata.ids[None].clone(), metadata.told[None].clone()
        with forward_context(metadata):
            output = self._model(input_ids=ids, position_ids=positions, use_cache=False)
        logits: Tensor = output.logits[0]
        return logits


def capture_graphs(
    language: LanguageModel, model: Callable[..., Any], metadata: RowsMetadata,
    reference: Callable[[Batch], Tensor],
) -> CudaGraphs | None:  # fmt: skip
    """None, with a line in the log, where the model or its device does not capture."""
    started = time.monotonic()
    try:
        graphs = CudaGraphs(language, model, metadata, reference, CudaCapture())
    except Exception as error:  # a model that looks at its numbers, a kernel that does not compile
        log.warning("no CUDA graphs, steps are launched one by one: %.300s", first_line(error))
        return None
    rows = len(metadata.ids)
    log.info("captured CUDA graphs up to rows=%d seconds=%.1f", rows, time.monotonic() - started)
    return graphs


class CudaCapture:
    """On the current GPU. Its graphs share their memory, as only one runs at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def __call__(self, run: Run) -> tuple[Callable[[], Any], Tensor]:
        ordinary = torch.cuda.current_stream()
        self._aside.wait_stream(ordinary)
        with torch.cuda.stream(self._aside):
            run()  # compiles kernels and makes what libraries keep, neither of which is captured
            with waiting_is_an_error():
                run()
        ordinary.wait_stream(self._aside)
        graph = torch.cuda.CUDAGraph()
        try:
            # other threads may use the GPU meanwhile
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._aside, capture_error_mode="thread_local"
            ):
                logits = run()
        except Exception:
            torch.cuda.set_stream(ordinary)  # torch leaves the other
            raise
        return graph.replay, logits


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    """A model that looks at its numbers cannot be captured, and a capture that fails leaves
    torch's allocator broken: so the run before it raises."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
