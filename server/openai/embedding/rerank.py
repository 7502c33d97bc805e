"""`POST /rerank`, `/v1/rerank`, `/v2/rerank`: documents by their relevance to a query.

    body → pairs of a query and a document → pieces of a few, a work item each → scores → an answer

One handler for the shapes of Jina and Cohere (`documents`: an object, best first, documents that
are too long are cut) and of text-embeddings-inference (`texts`: a bare list, cut on request).
"""

import secrets
from collections.abc import Sequence
from typing import Annotated, Any

from msgspec import UNSET, Meta

from batching.errors import InvalidInput
from server.http.json import Document, to_json
from server.openai.embedding.endpoint import MOST_INPUTS, Truncatable
from server.openai.request_fields import Count, Filled, Salt
from server.openai.response_schemas import EmbeddingUsage, Ranked, Reranked, TextDocument
from worker.messages.scoring import PartSize, ScoringInput, ScoringOutput, split_parts

PATHS = ("/rerank", "/v1/rerank", "/v2/rerank")

SOME = Meta(min_length=1, max_length=MOST_INPUTS)
Texts = Annotated[list[Filled], SOME]
AtLeastOne = Annotated[int, Meta(ge=1)]


class RerankRequest(Truncatable, kw_only=True):
    query: Filled
    documents: Annotated[list[Filled | TextDocument], SOME] | None = None
    texts: Texts | None = None
    model: str | None = None
    top_n: Count | None = None
    return_documents: bool | None = None
    return_text: bool | None = None
    max_tokens_per_doc: AtLeastOne | None = None
    instruction: str | None = None
    raw_scores: bool | None = None
    use_activation: bool | None = None
    cache_salt: Salt | None = None

    @property
    def is_bare(self) -> bool:
        """Whether it is text-embeddings-inference's."""
        return self.texts is not None

    @property
    def shown(self) -> bool:
        """Whether the answer has the documents."""
        return bool(self.return_text) if self.is_bare else self.return_documents is not False

    def read(self) -> list[str]:
        """The documents' texts."""
        if (self.documents is None) == (self.texts is None):
            raise InvalidInput.at("documents", "needs either this or texts")
        given: Sequence[Any] = self.documents or self.texts or ()
        return [each.text if isinstance(each, TextDocument) else each for each in given]

    def payloads(self, most: PartSize, serves: str) -> list[ScoringInput]:
        documents = self.read()
        param = "texts" if self.is_bare else "documents"
        return pairs_in_pieces(
            [(self.query, document) for document in documents],
            [("query", f"{param}[{n}]") for n in range(len(documents))],
            most,
            instruction=self.instruction,
            max_document_tokens=self.max_tokens_per_doc,
            truncation=self.truncation(cuts=not self.is_bare),
            raw=bool(self.raw_scores) or self.use_activation is False,
        )

    def content(self, outputs: list[ScoringOutput]) -> list[bytes]:
        scores = [score for each in outputs for score in each.scores]
        ranked = sorted(range(len(scores)), key=scores.__getitem__, reverse=True)
        ranked = ranked[: self.top_n or None]
        texts = self.read() if self.shown else []
        if self.is_bare:
            bare: list[Document] = [{"index": n, "score": scores[n]} for n in ranked]
            for each in bare if texts else ():
                each["text"] = texts[each["index"]]
            return [to_json(bare)]
        results = [Ranked(n, scores[n], TextDocument(texts[n]) if texts else UNSET) for n in ranked]
        tokens = sum(each.tokens for each in outputs)
        id, usage = "rerank-" + secrets.token_hex(12), EmbeddingUsage(tokens, tokens)
        return [to_json(Reranked(id, self.model or "", usage, results))]


def pairs_in_pieces(
    pairs: Sequence[tuple[str, str]],
    paths: Sequence[tuple[str, str]],
    most: PartSize,
    **options: Any,
) -> list[ScoringInput]:
    sizes = [len(query) + len(document) for query, document in pairs]
    return [
        ScoringInput(part, paths[first : first + len(part)], **options)
        for first, part in split_parts(pairs, sizes, most)
    ]
