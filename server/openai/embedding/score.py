"""`POST /v1/score`, as vLLM has it: how well texts go together, each pair by itself.

By the rerank model, or by the cosine of embeddings where that model is named or there is no other.
"""

import secrets
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from batching.errors import InvalidInput
from server.http.json import to_json
from server.openai import response_schemas as schemas
from server.openai.embedding.endpoint import Truncatable
from server.openai.embedding.rerank import Texts, pairs_in_pieces
from server.openai.request_fields import Filled, Salt, required
from worker.messages.scoring import (
    EmbeddingInput,
    EmbeddingOutput,
    PartSize,
    ScoringInput,
    split_parts,
)


class ScoreRequest(Truncatable, kw_only=True):
    text_1: Filled | Texts | None = None
    text_2: Filled | Texts | None = None
    queries: Filled | Texts | None = None
    documents: Filled | Texts | None = None
    model: str | None = None
    instruction: str | None = None
    use_activation: bool | None = None
    cache_salt: Salt | None = None

    def sides(self) -> tuple[tuple[str, list[str]], tuple[str, list[str]]]:
        """Both fields and their texts: as many of either, or one of one."""
        by_text = self.text_1 is not None or self.text_2 is not None
        first, second = ("text_1", "text_2") if by_text else ("queries", "documents")
        read = []
        for name in (first, second):
            given: str | list[str] = required(getattr(self, name), name)
            read.append((name, [given] if isinstance(given, str) else given))
        counts = len(read[0][1]), len(read[1][1])
        if counts[0] != counts[1] and 1 not in counts:
            unequal = f"has {counts[1]} texts for the {counts[0]} of {first}"
            raise InvalidInput.at(second, unequal)
        return read[0], read[1]

    def payloads(self, most: PartSize, serves: str) -> Sequence[ScoringInput | EmbeddingInput]:
        return self.pairs(most) if serves == "rerank" else self.texts(most)

    def pairs(self, most: PartSize) -> list[ScoringInput]:
        (first, ones), (second, others) = self.sides()
        count = max(len(ones), len(others))
        return pairs_in_pieces(
            [(ones[n % len(ones)], others[n % len(others)]) for n in range(count)],
            [(_path(first, ones, n), _path(second, others, n)) for n in range(count)],
            most,
            instruction=self.instruction,
            truncation=self.truncation(),
            raw=self.use_activation is False,
        )

    def texts(self, most: PartSize) -> list[EmbeddingInput]:
        if self.instruction is not None:
            raise InvalidInput.at("instruction", "is for a reranker; this is an embedding model")
        made = []
        for name, texts in self.sides():
            for first, part in split_parts(texts, [len(text) for text in texts], most):
                place = first if isinstance(getattr(self, name), list) else None
                options: Any = {
                    "truncation": self.truncation(),
                    "encoding": "vectors",
                    "param": name,
                }
                made.append(EmbeddingInput(part, place, normalize=True, **options))
        return made

    def content(self, outputs: list[Any]) -> list[bytes]:
        if isinstance(outputs[0], EmbeddingOutput):
            scores = cosines(outputs, len(self.sides()[0][1]))
        else:
            scores = [score for each in outputs for score in each.scores]
        tokens = sum(each.tokens for each in outputs)
        id, usage = (
            "score-" + secrets.token_hex(12),
            schemas.EmbeddingUsage(tokens, tokens),
        )
        data = [schemas.Score(n, "score", each) for n, each in enumerate(scores)]
        made = schemas.Scores(id, "list", int(time.time()), self.model or "", data, usage)
        return [to_json(made)]


def _path(name: str, texts: Sequence[str], n: int) -> str:
    return f"{name}[{n}]" if len(texts) > 1 else name


def cosines(outputs: Sequence[EmbeddingOutput], count: int) -> list[float]:
    """Of unit vectors, of which the first `count` are one side."""
    vectors = np.concatenate([each.vectors for each in outputs])
    one, other = vectors[:count], vectors[count:]
    scores: list[float] = (one * other).sum(1).tolist()
    return scores
