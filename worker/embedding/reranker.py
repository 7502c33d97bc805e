"""Relevance of documents to queries: pairs → token ids (pairs.py) → one number each.

    cross-encoder   both texts in one row, a head with one label
    yes or no       a decoder is asked whether the document answers the query; the score is how much
                    likelier it would say the one than the other

Entries of the registry like a pipeline. Scores go through the checkpoint's activation, sigmoid if
it names none.
"""

from torch import Tensor, nn

from batching.errors import ItemFailed
from batching.request_queue import WorkItem
from worker.embedding.paged_rows import PagedRows
from worker.embedding.pairs import Pairs
from worker.embedding.rows import Reduce, RowModel
from worker.embedding.scorer import Scorer
from worker.embedding.texts import Row, TextReader
from worker.messages.protocol import ModelInfo
from worker.messages.scoring import PairsInput, Scored


class Reranker(Scorer):
    """`pairs` makes a row of each pair; `reduce`, one number of that."""

    smallest = PairsInput([("a", "a")], [("query", "documents")])

    def __init__(
        self,
        rows: RowModel | PagedRows,
        reduce: Reduce,
        reader: TextReader,
        pairs: Pairs,
        activation: nn.Module | None,
        info: ModelInfo,
    ) -> None:
        super().__init__(rows, reduce, reader, info)
        self.pairs = pairs
        self.activation = activation or nn.Sigmoid()

    def read(self, payload: PairsInput) -> list[Row]:
        return self.pairs(payload)

    def finish(self, item: WorkItem, raw: Tensor) -> Scored:
        payload: PairsInput = item.payload
        if not raw.isfinite().all():
            raise ItemFailed("the model gave no finite number for this input")
        scores: Tensor = raw if payload.raw else self.activation(raw)
        return Scored(scores.tolist(), item.tokens)


def of_label(logits: Tensor, row: Row) -> Tensor:
    """A cross-encoder has one label: its logit."""
    return logits[0].float()


def of_answer(direction: Tensor) -> Reduce:
    """`direction` [H]: the output weights of one answer less those of the other."""
    return lambda states, row: states[-1].float() @ direction
