"""`POST /rerank`, `/v1/rerank`, `/v2/rerank`: documents by their relevance to a query.

    body → pairs of query and document → payloads, a work item each → scores → response

`documents` are those of Jina and Cohere: they are truncated, and the response is an object, best
document first. `texts` are those of text-embeddings-inference: a bare list, truncated on request.
"""

import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

from msgspec import UNSET, Meta, Struct, UnsetType

from batching.errors import InvalidInput
from server.apis.openai.embedding.endpoint import MAX_INPUTS, ScoringRequest
from server.apis.openai.request_fields import Count, NonEmpty, PositiveInt
from server.apis.openai.response_schemas import EmbeddingUsage
from server.http.json import to_json
from server.http.operation import Operation
from worker.messages.scoring import PartSize, ScoringInput, ScoringOutput, split_parts

RANKED_TEXTS = {"type": "array", "items": {"type": "object", "required": ["index", "score"]}}
LENGTH = Meta(min_length=1, max_length=MAX_INPUTS)
Texts = Annotated[list[NonEmpty], LENGTH]


class TextDocument(Struct):
    text: Annotated[str, Meta(min_length=1)]


class RankedDocument(Struct):
    index: int
    relevance_score: float
    document: TextDocument | UnsetType = UNSET


class Ranking(Struct):
    id: str
    model: str
    usage: EmbeddingUsage
    results: list[RankedDocument]


class RankedText(Struct):
    """A result as text-embeddings-inference returns it."""

    index: int
    score: float
    text: str | UnsetType = UNSET


class RerankRequest(ScoringRequest, kw_only=True):
    query: NonEmpty
    documents: Annotated[list[NonEmpty | TextDocument], LENGTH] | None = None
    texts: Texts | None = None
    top_n: Count | None = None
    return_documents: bool | None = None
    return_text: bool | None = None
    max_tokens_per_doc: PositiveInt | None = None
    instruction: str | None = None
    raw_scores: bool | None = None
    use_activation: bool | None = None

    @property
    def is_bare(self) -> bool:
        """Whether the response is a bare list, as in text-embeddings-inference."""
        return self.texts is not None

    def document_texts(self) -> list[str]:
        if (self.documents is None) == (self.texts is None):
            raise InvalidInput.at("documents", "is required, or texts instead; not both")
        documents: Sequence[str | TextDocument] = self.documents or self.texts or ()
        return [entry.text if isinstance(entry, TextDocument) else entry for entry in documents]

    def payloads(self, max_size: PartSize, kind: str) -> list[ScoringInput]:
        texts = self.document_texts()
        param = "texts" if self.is_bare else "documents"
        payload = ScoringInput(
            [(self.query, text) for text in texts],
            [("query", f"{param}[{n}]") for n in range(len(texts))],
            self.instruction,
            self.max_tokens_per_doc,
            self.truncation(by_default=not self.is_bare),
            raw=bool(self.raw_scores) or self.use_activation is False,
        )
        return split_pairs(payload, max_size)

    def content(self, outputs: Sequence[ScoringOutput]) -> list[bytes]:
        scores = [score for output in outputs for score in output.scores]
        ranking = sorted(range(len(scores)), key=scores.__getitem__, reverse=True)
        ranking = ranking[: self.top_n or None]
        returns_texts = self.return_text if self.is_bare else self.return_documents is not False
        texts = self.document_texts() if returns_texts else []
        if self.is_bare:
            bare = [RankedText(n, scores[n], texts[n] if texts else UNSET) for n in ranking]
            return [to_json(bare)]
        results = [
            RankedDocument(n, scores[n], TextDocument(texts[n]) if texts else UNSET)
            for n in ranking
        ]
        tokens = sum(output.tokens for output in outputs)
        id, usage = "rerank-" + secrets.token_hex(12), EmbeddingUsage(tokens, tokens)
        return [to_json(Ranking(id, self.model or "", usage, results))]


RERANK = [
    Operation(
        f"POST {path}",
        "Documents by relevance to a query; those of `texts` as a bare list",
        Ranking,
        RerankRequest,
        alternatives=[RANKED_TEXTS],
    )
    for path in ("/rerank", "/v1/rerank", "/v2/rerank")
]


def split_pairs(payload: ScoringInput, max_size: PartSize) -> list[ScoringInput]:
    """Return the payload with each part of its pairs."""
    pairs, paths = payload.pairs, payload.paths
    sizes = [len(query) + len(document) for query, document in pairs]
    return [
        replace(payload, pairs=part, paths=paths[first : first + len(part)])
        for first, part in split_parts(pairs, sizes, max_size)
    ]
