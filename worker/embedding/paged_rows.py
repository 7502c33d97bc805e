"""Rows of tokens through a decoder's paged prefill: in chunks, and what begins alike is run once.

    rows → sequences, waiting or running → a step's chunks → states, kept in blocks like keys and
    values → of each row that has got through, what is kept

A step is one turn on the worker's thread, so that a long text comes beside short ones. Blocks that
hold a beginning which was run before, for somebody with the same root, hold its states too, which
any pooling may then look at.
"""

import time
from collections import abc
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from batching.block_pool import BlockPool
from batching.scheduler import ContinuousScheduler, PrefillBudget
from batching.sequence import Batch, Chunk, Sequence, Span
from worker.device.self_check import CannotRun
from worker.embedding.rows import Reduce
from worker.embedding.texts import Row
from worker.error_classification import first_line
from worker.model.attention.kv_cache import BLOCK
from worker.model.language_model import LanguageModel
from worker.model.loading import is_worth_compiling
from worker.model.paged_runner import PagedRunner
from worker.model.paging import PagingCheck, cache_blocks

# Tokens that there is room for beside the longest text, if memory allows.
CACHED = 1 << 16
# How much of that room is used for the sake of prefixes.
PREFIX_SHARE = 0.25


@dataclass(eq=False)
class PagedRows:
    runner: PagedRunner
    max_running: int
    batching: ClassVar[Literal["continuous"]] = "continuous"
    why: ClassVar[str] = ""

    def __post_init__(self) -> None:
        self._budget = PrefillBudget(self.device.type)
        probe = self.runner.forward(Batch([Span([0], 0, 1)], [0], range(1)))
        self._states = probe.new_empty(self.runner.blocks * BLOCK, probe.shape[1])  # [slots, H]
        self._clear()

    def _clear(self) -> None:
        pool = BlockPool(self.runner.blocks, BLOCK, PREFIX_SHARE)
        self._scheduler = ContinuousScheduler(pool, self.max_running)
        self._under_way: dict[Row, Sequence] = {}

    @property
    def device(self) -> torch.device:
        return self.runner.language.device

    @torch.inference_mode()
    def run(self, rows: abc.Sequence[Row], reduce: Reduce) -> None:
        """One step for `rows`, some of them under way; others that were are dropped, as nobody
        waits for them. `reduce` makes a row's result of its states [tokens, H], once it has got
        through. After a step that raised, its rows are run to their ends, in parts as the caller
        likes: so it is found out which of them is to blame."""
        try:
            self._take(rows)
            while self._step(reduce) and any(row.doubted for row in self._under_way):
                pass
        except BaseException:
            for row in self._under_way:
                row.doubted = True
            self._clear()  # what was scheduled, and how, may be what is wrong
            raise

    def _step(self, reduce: Reduce) -> bool:
        """Whether there was anything to do."""
        started = time.monotonic()
        if chunks := self._scheduler.schedule(self._budget.prompt_tokens(streaming=False)):
            batch = self._forward(chunks)
            for chunk in chunks:
                self._advance(chunk, reduce)
            self._budget.learn(len(batch.ids), 0, time.monotonic() - started)
        return bool(chunks)

    def _take(self, rows: abc.Sequence[Row]) -> None:
        wanted = dict.fromkeys(rows)
        for row in [row for row in self._under_way if row not in wanted]:
            self._scheduler.remove(self._under_way.pop(row))
        for row in rows:
            if row.result is None and row not in self._under_way:
                new = Sequence(row.ids, row, max_tokens=0, root=row.root)
                self._under_way[row] = new
                self._scheduler.add(new)

    def _forward(self, chunks: abc.Sequence[Chunk]) -> Batch:
        batch = Batch.of(chunks)
        batch.rows = range(len(batch.ids))  # what is wanted of a prompt is usually less
        states = self.runner.forward(batch)
        slots = torch.cat([slots_of(blocks, start, start + n) for blocks, start, n in batch.spans])
        self._states[slots.to(self.device)] = states
        return batch

    def _advance(self, chunk: Chunk, reduce: Reduce) -> None:
        self._scheduler.advance(chunk)
        if not chunk.reaches_end:
            return
        row, table = chunk.sequence.output, chunk.sequence.table
        assert table is not None
        slots = slots_of(table.blocks, 0, len(row.ids)).to(self.device)
        row.result = reduce(self._states[slots], row)
        self._scheduler.remove(self._under_way.pop(row))


def slots_of(blocks: abc.Sequence[int], start: int, end: int) -> Tensor:
    """Where in memory a sequence's positions from `start` to `end` lie."""
    positions = torch.arange(start, end)
    return torch.tensor(blocks)[positions // BLOCK] * BLOCK + positions % BLOCK


def paged_rows(language: LanguageModel, limit: int, compile: str, max_running: int) -> PagedRows:
    """For a model without a head, of which texts of `limit` tokens are asked. CannotRun where it
    does not run paged, and it is as it was."""

    def check_room() -> None:
        if cache_blocks(language, None, limit + BLOCK) * BLOCK < limit or limit > language.context:
            raise CannotRun(f"there is no room for keys and values of {limit} tokens")

    try:
        check = PagingCheck(language, check_room)
    except Exception as error:  # as encoders refuse what decoders are given
        raise CannotRun(f"it is not called like a decoder: {first_line(error)[:200]}") from error
    check.page()
    compiles = is_worth_compiling(compile, language.parameters)
    language.pack_weights("none", check.compare, native=compiles)
    blocks = cache_blocks(language, None, limit + CACHED)
    runner = PagedRunner(language, blocks, limit, max_running=0)
    if compiles:
        runner.compile()
    return PagedRows(runner, max_running)
