"""The engine of decoders that embed or rerank: a text is a sequence of the generation engine that
generates nothing, with a head that pools the states of its tokens.

    prepare (pool): token rows → add: a sequence each → step → finish (pool): the response's numbers

Texts run in chunks on paged memory, short ones beside a long one, with a prefix cache.
"""

from typing import Any

import torch
from torch import Tensor

from batching.block_pool import BlockPool
from batching.request_queue import WorkItem
from batching.scheduler import ContinuousScheduler
from batching.sequence import Chunk
from worker.device.async_copy import AsyncCopy
from worker.device.self_check import CannotRun
from worker.engines.embedding.pooling_runner import PoolingRunner, states_of
from worker.engines.embedding.tokenization import TokenRow
from worker.engines.generation.engine import GenerationEngine
from worker.engines.generation.output import PromptOutput
from worker.error_classification import first_line
from worker.model.attention.kv_cache import BLOCK
from worker.model.language_model import LanguageModel
from worker.model.loading import is_worth_compiling
from worker.model.paged_runner import PagedRunner
from worker.model.paging import PagingCheck, cache_blocks, cache_bytes
from worker.model.sampler import SampledToken

Scorer = PoolingRunner[Any, Any]
# Tokens of KV cache beyond the longest text, if memory allows.
EXTRA_CACHE_TOKENS = 1 << 16
# The share of the blocks that the prefix cache may hold.
PREFIX_CACHE_SHARE = 0.25


class StateCache:
    """The states of the tokens in a cache's blocks: cached prefixes keep them too."""

    def __init__(self, runner: PagedRunner) -> None:
        probe = states_of(runner, TokenRow([0]))
        self._states = probe.new_empty(runner.blocks * BLOCK, probe.shape[1])

    def update(self, chunk: Chunk, states: Tensor) -> Tensor:
        """Store the states of a chunk; return those of all tokens up to its end."""
        assert chunk.table is not None
        end = chunk.start + len(states)
        positions = torch.arange(end)
        slots = torch.tensor(chunk.table.blocks)[positions // BLOCK] * BLOCK + positions % BLOCK
        slots = slots.to(states.device)
        self._states[slots[chunk.start :]] = states
        return self._states[slots] if chunk.start else states


class PooledText(PromptOutput):
    """The result of a text's token row. `cache` has the states for a head that reads all of them;
    None: it reads the last one."""

    result: AsyncCopy  # once the row has run

    def __init__(
        self, item: WorkItem, row: TokenRow, scorer: Scorer, cache: StateCache | None
    ) -> None:
        super().__init__(item, row.ids)
        self.reads = "all" if cache else "last"
        self._row, self._scorer, self._cache = row, scorer, cache

    @torch.inference_mode()
    def score(self, rows: Tensor, chunk: Chunk) -> list[SampledToken]:
        if self._cache:
            rows = self._cache.update(chunk, rows)
        if chunk.reaches_end:
            self.result = AsyncCopy(self._scorer.head(rows, self._row))
        return []


class ScoringEngine(GenerationEngine):
    """Runs an embedder or a reranker on a paged cache. `max_running`: texts in a step."""

    def __init__(self, scorer: Scorer, max_running: int) -> None:
        self.scorer, self.max_running, runner = scorer, max_running, scorer.model
        assert isinstance(runner, PagedRunner)
        self._states = None if scorer.reads_last_state else StateCache(runner)

        def new_scheduler() -> ContinuousScheduler:
            pool = BlockPool(runner.blocks, BLOCK, PREFIX_CACHE_SHARE)
            return ContinuousScheduler(pool, self.max_running)

        processor: Any = scorer  # has what texts without output need
        super().__init__(runner, processor, new_scheduler)

    def add(self, item: WorkItem[Any, Any]) -> None:
        item.prepared = [PooledText(item, row, self.scorer, self._states) for row in item.prepared]
        super().add(item)

    def finish(self, item: WorkItem, raw: Any) -> object:
        return self.scorer.finish(item, raw)

    def close(self) -> None:
        """Do nothing: a scorer has no threads."""

    def _raw_output(self, item: WorkItem[Any, Any]) -> list[Tensor]:
        return [text.result.tensor() for text in item.prepared]


def load_paged_runner(language: LanguageModel, limit: int, compile: str) -> PagedRunner:
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
    return runner
