"""Relevance of documents to queries: pairs → token ids (pairs.py) → one score each.

    cross-encoder   both texts in one row, a head with one label
    yes or no       a decoder gets both in a prompt; the score is the difference of the logits of
                    its two answers

Scores pass the checkpoint's activation, by default a sigmoid. A late-interaction model has a row
for each query and each document instead, and the score is MaxSim.
"""

import torch
from torch import Tensor, nn

from batching.errors import InvalidInput
from batching.request_queue import WorkItem
from worker.engines.embedding.late_interaction import FormTokenizer
from worker.engines.embedding.pairs import PairTokenizer
from worker.engines.embedding.pooling import Head, PoolingHead
from worker.engines.embedding.pooling_runner import PoolingRunner, RowModel
from worker.engines.embedding.sentence_transformers import SentenceTransformersConfig
from worker.engines.embedding.tokenization import TextTokenizer, TokenRow
from worker.messages.protocol import ModelInfo
from worker.messages.scoring import MAX_TOKEN_PAIRS, ScoringInput, ScoringOutput, Truncation


class Reranker(PoolingRunner[ScoringInput, ScoringOutput]):
    """`pair_tokenizer`: from pairs to a token row each. `head`: from a row's states to a number."""

    warm_up_input = ScoringInput([("a", "a")], [("query", "documents")])

    def __init__(
        self,
        model: RowModel,
        head: Head,
        tokenizer: TextTokenizer,
        pair_tokenizer: PairTokenizer,
        activation: nn.Module | None,
        info: ModelInfo,
    ) -> None:
        super().__init__(model, head, tokenizer, info)
        self.pair_tokenizer = pair_tokenizer
        self.activation = activation or nn.Sigmoid()

    def tokenize(self, payload: ScoringInput) -> list[TokenRow]:
        return self.pair_tokenizer(payload)

    def result(self, item: WorkItem[ScoringInput], raw: list[Tensor]) -> ScoringOutput:
        logits = torch.stack(raw)
        scores: Tensor = logits if item.payload.raw else self.activation(logits)
        return ScoringOutput(scores.tolist(), item.tokens)


class LateReranker(PoolingRunner[ScoringInput, ScoringOutput]):
    """Compares a query with documents by MaxSim over the vectors of their tokens."""

    warm_up_input = Reranker.warm_up_input

    def __init__(
        self,
        model: RowModel,
        tokenizer: TextTokenizer,
        config: SentenceTransformersConfig,
        info: ModelInfo,
    ) -> None:
        super().__init__(model, PoolingHead(config, info.device), tokenizer, info)
        assert config.late
        self.reduce = Tensor.mean if config.late.is_mean else Tensor.sum
        self.prompts = config.role_prompt("query"), config.role_prompt("document")
        self.queries = FormTokenizer(config.late, tokenizer, "query")
        self.documents = FormTokenizer(config.late, tokenizer, "document")

    def tokenize(self, payload: ScoringInput) -> list[TokenRow]:
        """Return the rows of the distinct queries, then those of the documents."""
        if payload.instruction is not None:
            raise InvalidInput.at("instruction", "this model takes no instruction")
        (texts, documents), (params, document_params) = (
            zip(*values, strict=True) for values in (payload.pairs, payload.paths)
        )
        distinct = dict(zip(texts, params, strict=True))
        truncation = payload.truncation
        rows = self.queries.rows([*distinct], [*distinct.values()], self.prompts[0], truncation)
        queries = dict(zip(distinct, rows, strict=True))
        if limit := payload.max_document_tokens:
            limit = min(limit, truncation.max_tokens or limit)
            truncation = Truncation(True, limit, truncation.keep_end)
        rows = self.documents.rows(documents, document_params, self.prompts[1], truncation)
        for query, document, param in zip(texts, rows, document_params, strict=True):
            if len(queries[query].kept or ()) * len(document.kept or ()) > MAX_TOKEN_PAIRS:
                raise InvalidInput.at(
                    param, f"has over {MAX_TOKEN_PAIRS} pairs of its tokens with its query's"
                )
        return [*queries.values(), *rows]

    def result(self, item: WorkItem[ScoringInput], raw: list[Tensor]) -> ScoringOutput:
        texts = [query for query, _ in item.payload.pairs]
        queries = dict(zip(dict.fromkeys(texts), raw, strict=False))
        pairs = zip(texts, raw[len(queries) :], strict=True)
        scores = [
            float(self.reduce((queries[text] @ document.T).amax(1))) for text, document in pairs
        ]
        return ScoringOutput(scores, item.tokens)


def label_logit(logits: Tensor, row: TokenRow) -> Tensor:
    """Return the logit of a cross-encoder's one label."""
    return logits[0].float()


def answer_logit(direction: Tensor) -> Head:
    """Return a function from states to the logit of one answer less that of the other.

    `direction` [H] is the difference of the two answers' output weights."""
    return lambda states, row: states[-1].float() @ direction
