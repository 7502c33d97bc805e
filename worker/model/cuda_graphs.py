"""Steps of few rows on a GPU, captured as CUDA graphs: decoding, and drafts to verify.

Launching a model's some thousand kernels takes longer than running them for a few tokens. So a
step is captured once for each size of batch and replayed: its inputs are buffers that are filled
anew, and what a smaller batch leaves empty is padded with rows of a block that nobody owns. Each
row has its own table of blocks (triton_decode.py), whatever its sequence's length.
"""

import copy
import functools
import itertools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from worker.model.attention_interface import running
from worker.model.language_model import LanguageModel
from worker.model.paged_attention import BLOCK, AttentionParams, Chunks, PagedCache, Step, rewarmed

log = logging.getLogger("onequeue.decode_graphs")

Run = Callable[[], Tensor]
# What captures a run: something that does it again, and where its output lies.
Capture = Callable[[Run], tuple[Callable[[], Any], Tensor]]

SIZES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256)
# Blocks beside the sequences': one that padding is written to, one for the check.
SPARE = 2
# A chunk of more tokens is a prompt: as rows, each would read all that is before it.
WIDEST = 16
# Programs that a processor of the GPU should have to choose from.
PROGRAMS = 4


class RowsStep:
    """Where a captured step's rows are. Each is a token with its own table of blocks."""

    def __init__(self, cache: PagedCache, rows: int, table: int) -> None:
        self.cache = cache
        self.programs = PROGRAMS * _processors(cache.device)
        self._filled = torch.zeros(4, rows, dtype=torch.long, device=cache.device)
        # `rests`: places after it in a block that the step begins
        self.ids, self.positions, self.slots, self.rests = self._filled
        self.tables = torch.zeros(rows, table, dtype=torch.int32, device=cache.device)

    def first(self, rows: int) -> "RowsStep":
        """A view of the first rows."""
        view = copy.copy(self)
        view.ids, view.positions, view.slots, view.rests = self._filled[:, :rows]
        view.tables = self.tables[:rows]
        return view

    def fill(self, chunks: Chunks, ids: Sequence[int], rows: int, nobodys: int) -> None:
        """The chunks' tokens, and `nobodys` block's first place up to `rows`."""
        starts = np.array([start for _, start, _ in chunks])
        widths = np.array([width for _, _, width in chunks])
        lasts = starts + widths - 1
        counts = lasts // BLOCK + 1
        own = itertools.chain.from_iterable(
            blocks[:count] for (blocks, _, _), count in zip(chunks, counts.tolist(), strict=True)
        )
        blocks = np.zeros((len(chunks), counts.max()), np.int32)
        blocks[np.arange(blocks.shape[1]) < counts[:, None]] = np.fromiter(own, np.int32)
        ends = np.cumsum(widths)
        chunk = np.repeat(np.arange(len(chunks)), widths)  # of each row
        positions = np.arange(len(ids)) - (ends - widths)[chunk] + starts[chunk]
        tables = np.full((rows, blocks.shape[1]), nobodys, np.int32)
        tables[: len(ids)] = blocks[chunk]
        filled = np.zeros((4, rows), np.int64)
        filled[0, : len(ids)] = ids
        filled[1, : len(ids)] = positions
        filled[2] = nobodys * BLOCK
        filled[2, : len(ids)] = (
            blocks[chunk, positions // BLOCK].astype(np.int64) * BLOCK + positions % BLOCK
        )
        begun = lasts % BLOCK < widths
        filled[3, ends - 1] = np.where(begun, BLOCK - 1 - lasts % BLOCK, 0)
        self._filled[:, :rows].copy_(torch.from_numpy(filled))
        self.tables[:rows, : tables.shape[1]].copy_(torch.from_numpy(tables))

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, how: AttentionParams
    ) -> Tensor:
        """Of one layer, [1, heads, T, size] in, [1, T, heads, size] out."""
        from worker.model import triton_decode  # needs triton, which comes with torch for GPUs

        keys, values = self.cache.keys[how.layer], self.cache.values[how.layer]
        q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
        q, k, v = (t if t.stride(2) == 1 else t.contiguous() for t in (q, k, v))
        shape = self.cache.layers[how.layer]
        if shape.warming:
            q = (q * rewarmed(self.positions, *shape.warming)).to(q.dtype)
        triton_decode.write(k, v, keys, values, self.slots, self.rests)
        return triton_decode.attend(
            q, keys, values, self.tables, self.positions, programs=self.programs, scale=how.scale,
            window=how.window, chunk=shape.chunk, softcap=how.softcap, sinks=sinks,
        ).unsqueeze(0)  # fmt: skip


class DecodeGraphs:
    """Captures every size of batch, checked against plain steps: raises where that fails.

    `spare`: the first of SPARE blocks of the cache that no sequence gets. `table`: the most blocks
    that a sequence has. `most`: rows of the largest batch.
    """

    def __init__(
        self, language: LanguageModel, cache: PagedCache, spare: int, table: int, most: int,
        capture: Capture,
    ) -> None:  # fmt: skip
        self.call = language.call  # what was captured
        self._nobodys = spare
        self._sizes = [size for size in SIZES if size < most] + [most]
        self._step = RowsStep(cache, most, table)
        self._captured: dict[int, tuple[Callable[[], Any], Tensor]] = {}
        prompt = [1 + 7 * n % (language.vocab_size - 1) for n in range(min(most, WIDEST))]
        chunks = [([spare + 1], 0, len(prompt))]
        own = language.forward(Step(cache, chunks, language.dtype), prompt, range(len(prompt)))
        for size in reversed(self._sizes):  # the smaller ones fit into the largest's memory
            trial = [([spare + 1], 0, min(size, len(prompt)))]
            self._step.fill(trial, prompt[: trial[0][2]], size, self._nobodys)
            replay, logits = self._captured[size] = capture(functools.partial(self._run, size))
            replay()
            language.compare(logits[: trial[0][2]], own[: trial[0][2]])

    def takes(self, chunks: Chunks) -> bool:
        widths = [width for _, _, width in chunks]
        return sum(widths) <= self._sizes[-1] and max(widths) <= WIDEST

    def forward(self, chunks: Chunks, ids: Sequence[int], wanted: Sequence[int]) -> Tensor:
        """Logits [len(wanted), V] of the rows `wanted`, until the next call; keys and values are
        written."""
        size = next(size for size in self._sizes if size >= len(ids))
        self._step.fill(chunks, ids, size, self._nobodys)
        replay, logits = self._captured[size]
        first = len(wanted) if list(wanted) == list(range(len(wanted))) else 0
        # made before the replay, for which it would wait
        rows = None if first else torch.tensor(list(wanted), dtype=torch.long, device=logits.device)
        replay()
        return logits[:first] if rows is None else logits[rows]

    @torch.inference_mode()
    def _run(self, size: int) -> Tensor:
        step = self._step.first(size)
        # clones are to the compiler what LanguageModel.forward passes: it compiles no more
        ids, positions = step.ids[None].clone(), step.positions[None].clone()
        with running(step):
            output = self.call(input_ids=ids, position_ids=positions, use_cache=False)
        logits: Tensor = output.logits[0]
        return logits


def decode_graphs(
    language: LanguageModel, cache: PagedCache, spare: int, table: int, most: int
) -> DecodeGraphs | None:
    """None, with a line in the log, where a model or its device does not capture."""
    if language.device.type != "cuda":
        return None
    started = time.monotonic()
    try:
        graphs = DecodeGraphs(language, cache, spare, table, most, CudaCapture())
    except Exception as error:  # a model that looks at its numbers, a kernel that does not compile
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        log.warning("no CUDA graphs, steps are launched one by one: %s", first[:300])
        return None
    log.info("captured CUDA graphs up to rows=%d seconds=%.1f", most, time.monotonic() - started)
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
    torch's allocator broken: it must be known before."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
