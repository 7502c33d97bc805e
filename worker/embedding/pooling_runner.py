"""The runner that embedders and rerankers share. The worker serves it like a pipeline's runner:
batches, breaker and bisection are the same.

    prepare (pool thread): tokenize and validate
    → forward (worker thread): run the token rows in one pass or one step of chunks, pool the rows
      that are complete, apply the head
    → finish (pool thread): convert to the response's numbers
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from batching.request_queue import WorkItem
from batching.sequence import TokenIds
from worker.embedding.pooling import PoolFunction
from worker.embedding.tokenization import TextTokenizer, TokenRow
from worker.messages.generation import TEXT_ONLY
from worker.messages.protocol import (
    ALONE,
    CUT,
    UNFINISHED,
    Batching,
    ModelInfo,
    OtherModels,
    TextModel,
    Unfinished,
)
from worker.messages.scoring import EmbeddingInput, ScoringInput

Payload = TypeVar("Payload", bound=EmbeddingInput | ScoringInput)
Result = TypeVar("Result")


class RowModel(Protocol):
    """A model that runs token rows: SinglePassModel or ChunkedPrefillModel."""

    @property
    def device(self) -> torch.device: ...

    @property
    def batching(self) -> Batching: ...

    @property
    def batching_reason(self) -> str:
        """The reason why rows are not packed; empty if they are."""

    def run(self, rows: Sequence[TokenRow], pool: PoolFunction, others: OtherModels) -> None:
        """Run the rows, or those that fit into a turn beside `others`, and set `row.result` where
        a row is complete."""


class PoolingRunner(ABC, Generic[Payload, Result]):
    """Implements Runner and TextModel of worker.messages.protocol. `pool` is applied to the
    states of a complete row."""

    warm_up_input: Payload  # the smallest valid one
    others: OtherModels = ALONE

    def __init__(
        self, model: RowModel, pool: PoolFunction, tokenizer: TextTokenizer, info: ModelInfo
    ) -> None:
        self.model, self.pool = model, pool
        self.tokenizer = tokenizer
        self.info = info
        self.max_model_len = tokenizer.limit
        self.no_images_reason = TEXT_ONLY
        self.encode, self.decode, self.token = tokenizer.encode, tokenizer.decode, tokenizer.token

    @property
    def text_model(self) -> TextModel:
        return self

    def prepare(self, item: WorkItem[Payload, list[TokenRow]]) -> None:
        """Tokenize an item's payload and set its `prepared`, `rows`, `tokens` and `width`. Raises
        InvalidInput."""
        rows = self.tokenize(item.payload)
        for row in rows:
            row.cache_namespace, row.owner = item.payload.cache_namespace, item.owner
            row.ids = TokenIds(row.ids)
            row.token_type_ids = row.token_type_ids and TokenIds(row.token_type_ids)
        counts = [len(row.ids) for row in rows]
        item.prepared = rows
        item.rows, item.tokens, item.width = len(rows), sum(counts), max(counts)

    @abstractmethod
    def tokenize(self, payload: Payload) -> list[TokenRow]:
        """Return the token rows of a payload. Raises InvalidInput."""

    @torch.inference_mode()
    def forward(self, prepared: list[list[TokenRow]]) -> list[Tensor | Unfinished]:
        """Return a tensor [rows, …] per item; UNFINISHED or CUT where rows need another step."""
        self.model.run([row for rows in prepared for row in rows], self.pool, self.others)
        incomplete = UNFINISHED if self.info.batching == "continuous" else CUT
        is_done = [all(row.result is not None for row in rows) for rows in prepared]
        done = [rows for rows, complete in zip(prepared, is_done, strict=True) if complete]
        if not done:
            return [incomplete] * len(prepared)
        results = [row.result for rows in done for row in rows if row.result is not None]
        pooled = torch.stack(results)
        outputs = self.apply_head(pooled).cpu()
        parts = iter(torch.split(outputs, [len(rows) for rows in done]))
        return [next(parts) if complete else incomplete for complete in is_done]

    def apply_head(self, pooled: Tensor) -> Tensor:
        """Run the layers after pooling on [rows, …]."""
        return pooled

    @abstractmethod
    def finish(self, item: WorkItem[Payload], raw: Tensor) -> Result: ...

    def warm_up(self) -> None:
        """Run the smallest valid payload; raise if the model is broken."""
        self.run(self.warm_up_input)

    def run(self, payload: Payload) -> Result:
        """Return the result for one payload."""
        item: WorkItem[Payload, list[TokenRow]] = WorkItem(payload, float("inf"), 0.0)
        self.prepare(item)
        return self.finish(item, self.compute(item.prepared))

    def compute(self, rows: list[TokenRow]) -> Tensor:
        """Return the output [rows, …], from as many forward passes as it takes."""
        while isinstance(output := self.forward([rows])[0], Unfinished):
            pass
        return output
