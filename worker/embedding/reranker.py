"""Relevance of documents to queries: pairs → token ids (pairs.py) → one number each.

    cross-encoder   both texts in one row, a head with one label
    yes or no       a decoder is asked whether the document answers the query; the score is how much
                    likelier it would say the one than the other

Entries of the registry like a pipeline. Scores go through the checkpoint's activation, sigmoid if
it names none.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from batching.errors import ItemFailed
from batching.request_queue import WorkItem
from worker.embedding.pairs import Pairs
from worker.embedding.rows import RowModel
from worker.embedding.texts import Row, TextReader
from worker.protocol import TEXT_ALONE, ModelInfo
from worker.scoring import PairsInput, Scored


class Reranker:
    """Implements worker.protocol.Runner and Tokenizing. `pairs` makes a row of each pair; `score`,
    one number [rows] for each row."""

    def __init__(
        self,
        reader: TextReader,
        pairs: Pairs,
        score: Callable[[Sequence[Row]], Tensor],
        activation: nn.Module | None,
        info: ModelInfo,
    ) -> None:
        self.reader = reader
        self.pairs, self.score = pairs, score
        self.activation = activation or nn.Sigmoid()
        self.info = info
        self.max_model_len = reader.limit
        self.no_images = TEXT_ALONE
        self.encode, self.decode, self.token = reader.encode, reader.decode, reader.token

    # ── pool threads ──

    def prepare(self, item: WorkItem) -> None:
        rows = self.pairs(item.payload)
        counts = [len(row.ids) for row in rows]
        item.prepared = rows
        item.rows, item.tokens, item.width = len(rows), sum(counts), max(counts)

    def finish(self, item: WorkItem, raw: Tensor) -> Scored:
        payload: PairsInput = item.payload
        if not raw.isfinite().all():
            raise ItemFailed("the model gave no finite number for this input")
        scores: Tensor = raw if payload.raw else self.activation(raw)
        return Scored(scores.tolist(), item.tokens)

    # ── the worker thread ──

    @torch.inference_mode()
    def forward(self, prepared: list[Any]) -> list[Tensor]:
        """The numbers of each item's pairs."""
        scores = self.score([row for each in prepared for row in each]).float().cpu()
        return list(torch.split(scores, [len(each) for each in prepared]))

    def warm_up(self) -> None:
        item = WorkItem(PairsInput([("a", "a")], [("query", "documents")]), float("inf"), 0.0)
        self.prepare(item)
        [raw] = self.forward([item.prepared])
        self.finish(item, raw)


def by_label(rows: RowModel) -> Callable[[Sequence[Row]], Tensor]:
    return lambda pairs: rows(pairs)[:, 0]


def by_answer(rows: RowModel, direction: Tensor) -> Callable[[Sequence[Row]], Tensor]:
    """`direction` [H]: the output weights of one answer less those of the other."""

    def score(pairs: Sequence[Row]) -> Tensor:
        ends = torch.tensor([len(row.ids) for row in pairs], device=rows.device).cumsum(0)
        return rows(pairs)[ends - 1].float() @ direction

    return score
