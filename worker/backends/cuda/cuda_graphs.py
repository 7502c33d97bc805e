"""CUDA graphs for steps of few rows: decoding, verifying drafts, and short prompts.

Launching a model's thousand kernels takes longer than running them for a few hundred tokens. A step
is captured once per batch size, rounded up to SIZES, and replayed with its input buffers refilled.
Unused rows are padding that writes to a spare block. Each row is one token with a block table
(triton_decode.py), whatever the length of its sequence: the tokens of a prompt read its
keys once each. With recurrent layers each row continues a state of its own, so only decodes are
captured.
"""

import copy
import functools
import logging
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from batching.sequence import Batch, Span
from batching.state_pool import NO_SLOT, StateSegment
from worker.backends.cuda.mixed import MAX_SPAN_WIDTH, concatenate_tables, programs
from worker.device.async_copy import fill_placeholders, to_device
from worker.model.attention.kv_cache import BLOCK, KVCache
from worker.model.attention.paged import AttentionBackend, forward_context
from worker.model.check import Reference
from worker.model.language_model import LanguageModel

log = logging.getLogger("onequeue.cuda_graphs")
warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")

Run = Callable[[], Tensor]
# Captures a run; returns the function that replays it, and its output buffer.
Capture = Callable[[Run], tuple[Callable[[], Any], Tensor]]

# Numbers of rows that steps are padded to.
SIZES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512)
# The keys that the tokens of a step's prompts read in a layer, at most. Those of a whole prompt of
# 512 tokens take a few milliseconds in all layers; launching the layers' kernels takes ten times as
# long.
MAX_PROMPT_READS = SIZES[-1] ** 2 // 2
# The cache's last blocks, which no sequence gets: one for padding rows, one for the check.
SPARE_BLOCKS = 2
SPARE_SLOTS = 1  # the last slot of recurrent layers' states, for both
BUFFERS = 8  # int64 numbers of a row, from `ids` to `targets`
ROOM = 1  # blocks that decodes may begin before all tables are written again


class RowsMetadata(AttentionBackend):
    """The attention backend of captured steps: each row is a token with a block table.

    Holds the input buffers of the graphs: `ids`, `positions`, `slots` (where the key and value go),
    `tails` (slots after it to zero in a block that the step starts), `position_ids` (passed to the
    model; they differ from `positions` behind images), `table_starts` (where the table of the row's
    sequence begins in `tables`), `sources` and `targets` (slots of the states of recurrent layers),
    int64 [rows] each, and `tables`, int32, one table after another. `max_blocks`: of a table.
    """

    def __init__(self, cache: KVCache, rows: int, max_blocks: int) -> None:
        self.cache = cache
        self.programs = programs(cache.device)
        self._buffer = torch.zeros(BUFFERS, rows, dtype=torch.long, device=cache.device)
        self._take_rows(self._buffer)
        size = (1 + rows) * (max_blocks + ROOM)  # the first is that of padding rows
        self.tables = torch.zeros(size, dtype=torch.int32, device=cache.device)
        # the last batch, its tables, where they begin, and the last block that each has room for
        self._filled: tuple[Batch | None, Any, Any, Any] = (None, None, None, None)

    def _take_rows(self, buffer: Tensor) -> None:
        self.ids, self.positions, self.slots, self.tails, self.position_ids, *others = buffer
        self.table_starts, self.sources, self.targets = others

    def first(self, rows: int) -> "RowsMetadata":
        view = copy.copy(self)
        view._take_rows(self._buffer[:, :rows])
        return view

    def fill(self, batch: Batch, rows: int, spare: int, sampled: Tensor | None = None) -> None:
        """Write the batch's tokens into the first of `rows` rows; the others are padding, at the
        first slot of block `spare`. `sampled`: tokens for the placeholders in the batch's ids."""
        count = len(batch.ids)
        columns = np.zeros((BUFFERS, rows), np.int32)
        ids, positions, slots, tails, position_ids, row_tables, sources, targets = columns
        ids[:count] = batch.ids
        positions[:count] = batch.positions
        position_ids[:count] = batch.position_ids if batch.shifts else positions[:count]
        widths = np.diff(batch.offsets, append=count)
        ends = np.array(batch.offsets) + widths
        lasts = positions[ends - 1]
        blocks = lasts // BLOCK
        filled, tables, table_starts, limits = self._filled
        if batch is filled and (blocks <= limits).all():  # it has moved by a token
            begun = [span.blocks[n] for span, n in zip(batch.spans, blocks.tolist(), strict=True)]
            tables[table_starts[1:] + blocks] = begun
        else:
            tables, table_starts = concatenate_tables([Span([spare], 0, 1), *batch.spans], ROOM)
            self._filled = batch, tables, table_starts, blocks + ROOM
        row_tables[:count] = np.repeat(table_starts[1:], widths)
        slots[:] = tables[row_tables + positions // BLOCK] * BLOCK + positions % BLOCK
        starts_block = lasts % BLOCK < widths
        tails[ends - 1] = np.where(starts_block, BLOCK - 1 - lasts % BLOCK, 0)
        if stored := self.cache.states:
            sources[:] = targets[:] = len(stored[0]) - SPARE_SLOTS
            segments = [of_span[0] for of_span in batch.states]
            sources[:count] = [segment.source for segment in segments]
            targets[:count] = [segment.target for segment in segments]
        # one array for all buffers, as each copy to the device costs a launch
        packed = to_device(np.append(columns, tables), self.tables.device)
        self._buffer[:, :rows] = packed[: columns.size].view(BUFFERS, rows)
        self.tables[: len(tables)] = packed[columns.size :]
        if sampled is not None:
            self.ids[:rows] = fill_placeholders(self.ids[:rows], sampled)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None,
        layer: int, scale: float, window: int, softcap: float,
    ) -> Tensor:  # fmt: skip
        # triton comes with torch's builds for GPUs only
        from worker.backends.cuda import triton_decode

        keys, values = self.cache.keys[layer], self.cache.values[layer]
        shape = self.cache.layers[layer]
        if shape.temperature:
            query = shape.rescale(query, self.positions)
        q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
        q, k, v = (t if t.stride(2) == 1 else t.contiguous() for t in (q, k, v))
        triton_decode.write(k, v, keys, values, self.slots, self.tails)
        return triton_decode.attend(
            q, keys, values, self.tables, self.table_starts, self.positions,
            programs=self.programs, scale=scale, window=window, chunk=shape.chunk,
            softcap=softcap, sinks=sinks,
        ).unsqueeze(0)  # fmt: skip


class CudaGraphs:
    """Graphs of the model for every batch size up to the metadata's number of rows, once
    `capture_next` has captured each.

    Raise CannotRun if the logits differ from those of `reference`, or what the capture raises.
    """

    def __init__(
        self, language: LanguageModel, model: Callable[..., Any], metadata: RowsMetadata,
        reference: Callable[[Batch], Tensor], capture: Capture,
    ) -> None:  # fmt: skip
        self._language, self._model = language, model
        self._metadata, self._capture = metadata, capture
        self._reference = reference
        rows, keys, states = len(metadata.ids), metadata.cache.keys, metadata.cache.states
        self._spare = len(keys[0]) - SPARE_BLOCKS if keys else 0
        self._spare_slot = len(states[0]) - SPARE_SLOTS if states else NO_SLOT
        self._sizes = [size for size in SIZES if size < rows] + [rows]
        self._missing = [*self._sizes]
        self._captured: dict[int, Callable[[], Any]] = {}  # replays a size
        self._logits: Tensor | None = None  # of all sizes: that of the largest
        [self._prompt] = language.random_prompts([MAX_SPAN_WIDTH])
        self._expected = Reference(
            lambda prompts: [reference(self._check_batch(rows)) for _ in prompts], [self._prompt]
        )

    def _check_batch(self, rows: int) -> Batch:
        """Return a prompt of at most so many rows; with recurrent layers one row, after a prompt
        whose states are written here."""
        ids, table, slot = self._prompt[:rows], [self._spare + 1], self._spare_slot
        if slot == NO_SLOT:
            return Batch([Span(table, 0, len(ids))], ids, range(len(ids)))
        *ids, last = self._prompt
        segments = [(StateSegment(len(ids), NO_SLOT, slot),)], [(StateSegment(1, slot, slot),)]
        self._reference(Batch([Span(table, 0, len(ids))], ids, [0], states=segments[0]))
        return Batch([Span(table, len(ids), 1)], [last], [0], states=segments[1])

    @property
    def is_complete(self) -> bool:
        return not self._missing

    def capture_next(self) -> None:
        """Capture and check the largest missing size: smaller ones reuse its memory."""
        size = self._missing[-1]
        self._metadata.fill(self._check_batch(size), size, self._spare)
        replay, logits = self._capture(functools.partial(self._run, size))
        self._captured[size] = replay
        if self._logits is None:
            self._logits = logits
        width = len(self._check_batch(size).ids)  # writes the states again
        replay()
        self._expected.check([self._logits[:width]], self._language.tolerance)
        self._missing.pop()

    def supports(self, batch: Batch) -> bool:
        """Return whether the batch has few rows, whose prompts read few keys, or with recurrent
        layers decodes only."""
        if len(batch.ids) > self._sizes[-1]:
            return False
        if self._spare_slot != NO_SLOT:
            segments = [of_span[0] for of_span in batch.states]
            are_single = all(span.width == 1 for span in batch.spans)
            return are_single and all(segment.source != NO_SLOT for segment in segments)
        prompts = (span for span in batch.spans if span.width > MAX_SPAN_WIDTH)
        reads = sum(span.width * (span.start + span.width // 2) for span in prompts)
        return reads <= MAX_PROMPT_READS

    def forward(self, batch: Batch, sampled: Tensor | None = None) -> Tensor:
        """Return the logits [R, V] of the batch's rows, valid until the next call.

        Writes the keys and values of its tokens. `sampled`: tokens for the placeholders.
        """
        size = next(size for size in self._sizes if size >= len(batch.ids))
        self._metadata.fill(batch, size, self._spare, sampled)
        self._captured[size]()
        assert self._logits is not None
        rows = list(batch.rows)
        if rows == list(range(len(rows))):
            return self._logits[: len(rows)]
        return self._logits[to_device(rows, self._logits.device)]

    @torch.inference_mode()
    def _run(self, size: int) -> Tensor:
        metadata, modules = self._metadata.first(size), self._language.recurrent

        def run_recurrent(number: int, hidden: Tensor) -> Tensor:
            """Run a module on rows that each continue a state, as PackedStates on decodes."""
            rows, slots = hidden.transpose(0, 1), (metadata.sources, metadata.targets)
            return modules[number].run(rows, *slots, metadata.cache).transpose(0, 1).contiguous()

        # views of the buffer would make the compiler compile once more
        ids, positions = metadata.ids[None].clone(), metadata.position_ids[None].clone()
        with forward_context(metadata, run_recurrent if modules else None):
            output = self._model(input_ids=ids, position_ids=positions, use_cache=False)
        logits: Tensor = output.logits[0]
        # one buffer for all sizes: buffers of their own would take three times the memory
        return logits if self._logits is None else self._logits[:size].copy_(logits)


def capture_graphs(
    language: LanguageModel, model: Callable[..., Any], metadata: RowsMetadata,
    reference: Callable[[Batch], Tensor],
) -> CudaGraphs | None:  # fmt: skip
    """Return the graphs; None, with a log line, if capturing fails or gives other logits."""
    started = time.monotonic()
    try:
        graphs = CudaGraphs(language, model, metadata, reference, CudaCapture())
        while not graphs.is_complete:
            graphs.capture_next()
    except Exception as error:  # a model that reads values, a kernel that does not compile
        language.fall_back("CUDA graphs", error, "launch by launch", "small steps are slower")
        return None
    rows = len(metadata.ids)
    log.info("captured CUDA graphs up to rows=%d seconds=%.1f", rows, time.monotonic() - started)
    return graphs


class CudaCapture:
    """Capture on the current GPU. The graphs share their memory, as only one runs at a time.

    `checked`: the model is known not to read device values. Else its first run shows that.
    """

    def __init__(self, checked: bool = False) -> None:
        self._checked = checked
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()

    def __call__(self, run: Run) -> tuple[Callable[[], Any], Tensor]:
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            run()  # compile kernels and allocate workspaces, which cannot be captured
            if not self._checked:
                with synchronizing_raises():
                    run()
                self._checked = True
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        try:
            # other threads may use the GPU meanwhile
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                logits = run()
        except Exception:
            torch.cuda.set_stream(current)  # torch leaves the capturing one
            raise
        return graph.replay, logits


@contextmanager
def synchronizing_raises() -> Iterator[None]:
    """Make reads of device values raise.

    A model that reads values cannot be captured, and a failing capture would leave torch's
    allocator broken; so the run before the capture must fail instead. The mode is the process's: a
    load in another thread would fail too, so it is kept short.
    """
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
