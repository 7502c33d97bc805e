"""Relevance of documents to queries: pairs → token ids (pairs.py) → one score each.

    cross-encoder   both texts in one row, a head with one label
    yes or no       a decoder gets both in a prompt; the score is the difference of the logits of
                    its two answers

Scores pass the checkpoint's activation, by default a sigmoid.
"""

import torch
from torch import Tensor, nn

from batching.errors import ItemFailed
from batching.request_queue import WorkItem
from worker.engines.embedding.pairs import PairTokenizer
from worker.engines.embedding.pooling import PoolFunction
from worker.engines.embedding.pooling_runner import PoolingRunner, RowModel
from worker.engines.embedding.tokenization import TextTokenizer, TokenRow
from worker.messages.protocol import ModelInfo
from worker.messages.scoring import ScoringInput, ScoringOutput


class Reranker(PoolingRunner[ScoringInput, ScoringOutput]):
    """`pair_tokenizer`: from pairs to a token row each. `pool`: from a row's states to a number."""

    warm_up_input = ScoringInput([("a", "a")], [("query", "documents")])

    def __init__(
        self,
        model: RowModel,
        pool: PoolFunction,
        tokenizer: TextTokenizer,
        pair_tokenizer: PairTokenizer,
        activation: nn.Module | None,
        info: ModelInfo,
    ) -> None:
        super().__init__(model, pool, tokenizer, info)
        self.pair_tokenizer = pair_tokenizer
        self.activation = activation or nn.Sigmoid()

    def tokenize(self, payload: ScoringInput) -> list[TokenRow]:
        return self.pair_tokenizer(payload)

    def finish(self, item: WorkItem[ScoringInput], raw: list[Tensor]) -> ScoringOutput:
        """Return an item's scores, one per pair. Raises ItemFailed for NaN."""
        logits = torch.stack(raw)
        if not logits.isfinite().all():
            raise ItemFailed("the model returned NaN or infinity for this input")
        scores: Tensor = logits if item.payload.raw else self.activation(logits)
        return ScoringOutput(scores.tolist(), item.tokens)


def label_logit(logits: Tensor, row: TokenRow) -> Tensor:
    """Return the logit of a cross-encoder's one label."""
    return logits[0].float()


def answer_logit(direction: Tensor) -> PoolFunction:
    """Return a function from states to the logit of one answer less that of the other.

    `direction` [H] is the difference of the two answers' output weights."""
    return lambda states, row: states[-1].float() @ direction
