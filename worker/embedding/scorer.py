"""What embedders and rerankers have in common: entries of the registry like a pipeline
(worker/registry.py), whose batches, breaker and bisection are those of all.

    prepare (pool): rows of tokens, and all that can be refused
    → forward (worker): rows through the model, all at once or a step of them, and what its head
      makes of those that have got through
    → finish (pool)
"""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from batching.request_queue import WorkItem
from worker.embedding.paged_rows import PagedRows
from worker.embedding.rows import Reduce, RowModel
from worker.embedding.texts import Row, TextReader
from worker.messages.generation import TEXT_ALONE
from worker.messages.protocol import UNFINISHED, ModelInfo


class Scorer(ABC):
    """Implements Runner and Tokenizing of worker.messages.protocol. `reduce` is applied to a row's
    states."""

    smallest: Any  # sound input, for warming up

    def __init__(
        self, rows: RowModel | PagedRows, reduce: Reduce, reader: TextReader, info: ModelInfo
    ) -> None:
        self.rows, self.reduce = rows, reduce
        self.reader = reader
        self.info = info
        self.max_model_len = reader.limit
        self.no_images = TEXT_ALONE
        self.encode, self.decode, self.token = reader.encode, reader.decode, reader.token

    def prepare(self, item: WorkItem) -> None:
        rows = self.read(item.payload)
        for row in rows:
            row.root = item.cache_namespace
        counts = [len(row.ids) for row in rows]
        item.prepared = rows
        item.rows, item.tokens, item.width = len(rows), sum(counts), max(counts)

    @abstractmethod
    def read(self, payload: Any) -> list[Row]:
        """InvalidInput says what cannot be served."""

    @torch.inference_mode()
    def forward(self, prepared: list[Any]) -> list[Any]:
        """Tensors [rows, …] of the items' rows."""
        self.rows.run([row for each in prepared for row in each], self.reduce)
        ended = [all(row.result is not None for row in each) for each in prepared]
        through = [each for each, has_ended in zip(prepared, ended, strict=True) if has_ended]
        if not through:
            return [UNFINISHED] * len(prepared)
        made = self.head_of(torch.stack([row.result for each in through for row in each])).cpu()
        parts = iter(torch.split(made, [len(each) for each in through]))
        return [next(parts) if has_ended else UNFINISHED for has_ended in ended]

    def head_of(self, kept: Tensor) -> Tensor:
        """Of what is kept of each row [rows, …], what its answer is written from."""
        return kept

    @abstractmethod
    def finish(self, item: WorkItem, raw: Tensor) -> Any: ...

    def warm_up(self) -> None:
        self.answer(self.smallest)

    def answer(self, payload: Any, cache_namespace: bytes = b"") -> Any:
        """An input's answer, from as many forwards as that takes."""
        item = WorkItem(payload, float("inf"), 0.0, cache_namespace=cache_namespace)
        self.prepare(item)
        while (raw := self.forward([item.prepared])[0]) is UNFINISHED:
            pass  # each step brings it on
        return self.finish(item, raw)
