"""Run token rows through a decoder's paged prefill: in chunks, with a prefix cache.

    rows → sequences, waiting or running → the chunks of a step → states, stored in blocks like
    keys and values → the pooled result of each complete row

A batch is one step on the worker's thread, so that short texts run beside a long one. A cached
block of a prefix, shared within a cache namespace, keeps the states too, so that any pooling works.
"""

import time
from collections import abc
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from batching.block_pool import BlockPool
from batching.scheduler import ContinuousScheduler
from batching.sequence import Batch, Chunk, Sequence, Span
from batching.step_times import PrefillBudget
from worker.device.self_check import CannotRun
from worker.embedding.pooling import PoolFunction
from worker.embedding.tokenization import TokenRow
from worker.error_classification import first_line
from worker.messages.protocol import OtherModels
from worker.model.attention.kv_cache import BLOCK
from worker.model.language_model import LanguageModel
from worker.model.loading import is_worth_compiling
from worker.model.paged_runner import PagedRunner
from worker.model.paging import PagingCheck, cache_blocks, cache_bytes

# Tokens of KV cache beyond the longest text, if memory allows.
EXTRA_CACHE_TOKENS = 1 << 16
# The share of the blocks that the prefix cache may hold.
PREFIX_CACHE_SHARE = 0.25


@dataclass(eq=False)
class ChunkedPrefillModel:
    """Implements RowModel over a paged cache. `max_running`: rows that run in a step."""

    runner: PagedRunner
    max_running: int
    batching: ClassVar[Literal["continuous"]] = "continuous"
    batching_reason: ClassVar[str] = ""

    def __post_init__(self) -> None:
        self._budget = PrefillBudget(self.device.type)
        probe = self.runner.forward(Batch([Span([0], 0, 1)], [0], range(1)))
        self._states = probe.new_empty(self.runner.blocks * BLOCK, probe.shape[1])  # [slots, H]
        self._reset()

    def _reset(self) -> None:
        pool = BlockPool(self.runner.blocks, BLOCK, PREFIX_CACHE_SHARE)
        self._scheduler = ContinuousScheduler(pool, self.max_running)
        self._sequences: dict[TokenRow, Sequence] = {}  # of the incomplete rows
        self._rows: dict[Sequence, TokenRow] = {}

    @property
    def device(self) -> torch.device:
        return self.runner.language.device

    @torch.inference_mode()
    def run(self, rows: abc.Sequence[TokenRow], pool: PoolFunction, others: OtherModels) -> None:
        """Run one step for `rows`, some of which may have started in earlier steps, and drop all
        other rows that have. `pool` reduces the states [tokens, H] of a complete row to its result.

        After a step that raised, its rows run to completion within one call, in the parts that the
        caller chooses: bisection finds the failing row that way."""
        try:
            self._update_sequences(rows)
            while self._step(pool, others) and any(row.in_failed_step for row in self._sequences):
                pass
        except BaseException:
            for row in self._sequences:
                row.in_failed_step = True
            self._reset()  # the scheduler's state may be inconsistent
            raise

    def _step(self, pool: PoolFunction, others: OtherModels) -> bool:
        """Run one step; return whether there was anything to run."""
        started = time.monotonic()
        budget = self._budget.prompt_tokens(others.busy, max_turn_s=others.max_turn_s)
        if chunks := self._scheduler.schedule(budget):
            batch = self._forward(chunks)
            for chunk in chunks:
                self._advance(chunk, pool)
            self._budget.times.learn(len(batch.ids), 0, time.monotonic() - started)
        return bool(chunks)

    def _update_sequences(self, rows: abc.Sequence[TokenRow]) -> None:
        """Remove the sequences of rows that are not in `rows`; add those of new rows."""
        wanted = dict.fromkeys(rows)
        for row in [row for row in self._sequences if row not in wanted]:
            self._remove(row)
        for row in rows:
            if row.result is None and row not in self._sequences:
                sequence = Sequence(
                    row.ids,
                    max_tokens=0,
                    owner=row.owner,
                    cache_namespace=row.cache_namespace,
                )
                self._sequences[row], self._rows[sequence] = sequence, row
                self._scheduler.add(sequence)

    def _forward(self, chunks: abc.Sequence[Chunk]) -> Batch:
        batch = Batch.from_chunks(chunks)
        batch.rows = range(len(batch.ids))  # states of all tokens, not only of the last
        states = self.runner.forward(batch)
        slots = torch.cat([slots_of(blocks, start, start + n) for blocks, start, n in batch.spans])
        self._states[slots.to(self.device)] = states
        return batch

    def _advance(self, chunk: Chunk, pool: PoolFunction) -> None:
        self._scheduler.advance(chunk)
        if not chunk.reaches_end:
            return
        row, table = self._rows[chunk.sequence], chunk.sequence.table
        assert table is not None
        slots = slots_of(table.blocks, 0, len(row.ids)).to(self.device)
        row.result = pool(self._states[slots], row)
        self._remove(row)

    def _remove(self, row: TokenRow) -> None:
        sequence = self._sequences.pop(row)
        del self._rows[sequence]
        self._scheduler.remove(sequence)


def slots_of(blocks: abc.Sequence[int], start: int, end: int) -> Tensor:
    """Return the memory slots of a sequence's positions from `start` to `end`."""
    positions = torch.arange(start, end)
    return torch.tensor(blocks)[positions // BLOCK] * BLOCK + positions % BLOCK


def load_chunked_prefill(
    language: LanguageModel, limit: int, compile: str, max_running: int
) -> ChunkedPrefillModel:
    """Page a model without a head, for texts of up to `limit` tokens.

    Raises CannotRun where the model does not run paged, and leaves it unchanged."""

    def check_room() -> None:
        if language.states:
            raise CannotRun("its recurrent layers have states")
        blocks = cache_blocks(language, cache_bytes(language, None), limit + BLOCK)
        if blocks * BLOCK < limit or limit > language.context:
            raise CannotRun(f"memory is too small for keys and values of {limit} tokens")

    try:
        check = PagingCheck(language, check_room)
    except Exception as error:  # encoders refuse a decoder's arguments
        raise CannotRun(f"it is not called like a decoder: {first_line(error)[:200]}") from error
    check.enable()
    compiles = is_worth_compiling(compile, language.parameters)
    language.pack_weights("none", check.compare, native=compiles)
    room = cache_bytes(language, None)
    blocks = cache_blocks(language, room, limit + EXTRA_CACHE_TOKENS)
    runner = PagedRunner(language, blocks, limit, max_running=0)
    if compiles:
        runner.compile()
    return ChunkedPrefillModel(runner, max_running)
