"""`POST /v1/score`, `/score`, as in vLLM: the similarity of pairs of texts; TEI's `/similarity`.

Scores are those of the rerank model, or the cosine of embeddings (MaxSim, with late interaction) if
the embedding model is named or is the only one.
"""

import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, Literal

import numpy as np
from msgspec import Struct

from batching.errors import InvalidInput
from server.apis.openai.embedding.embeddings import split_inputs
from server.apis.openai.embedding.endpoint import ScoringRequest
from server.apis.openai.embedding.rerank import Texts, split_pairs
from server.apis.openai.request_fields import NonEmpty, required
from server.apis.openai.response_schemas import EmbeddingUsage
from server.http.json import to_json
from server.http.operation import JSON, Body, Operation
from worker.messages.scoring import (
    MAX_TOKEN_PAIRS,
    EmbeddingInput,
    EmbeddingOutput,
    PartSize,
    ScoringInput,
    ScoringOutput,
)


class Score(Struct):
    index: int
    object: Literal["score"]
    score: float


class Scores(Struct):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: EmbeddingUsage


class ScoreRequest(ScoringRequest, kw_only=True):
    compares: ClassVar = True

    text_1: NonEmpty | Texts | None = None
    text_2: NonEmpty | Texts | None = None
    queries: NonEmpty | Texts | None = None
    documents: NonEmpty | Texts | None = None
    instruction: str | None = None
    use_activation: bool | None = None

    def sides(self) -> tuple[tuple[str, list[str]], tuple[str, list[str]]]:
        """Return the names and texts of both fields: equally many, or one on a side."""
        has_texts = self.text_1 is not None or self.text_2 is not None
        first, second = ("text_1", "text_2") if has_texts else ("queries", "documents")
        sides = []
        for name in (first, second):
            texts: str | list[str] = required(getattr(self, name), name)
            sides.append((name, [texts] if isinstance(texts, str) else texts))
        counts = len(sides[0][1]), len(sides[1][1])
        if counts[0] != counts[1] and 1 not in counts:
            reason = f"has {counts[1]} texts for the {counts[0]} of {first}"
            raise InvalidInput.at(second, reason)
        return sides[0], sides[1]

    def payloads(self, max_size: PartSize, kind: str) -> Sequence[ScoringInput | EmbeddingInput]:
        return self._pairs(max_size) if kind == "rerank" else self.embedding_inputs(max_size)

    def _pairs(self, max_size: PartSize) -> list[ScoringInput]:
        (first, firsts), (second, seconds) = self.sides()
        count = max(len(firsts), len(seconds))
        payload = ScoringInput(
            [(firsts[n % len(firsts)], seconds[n % len(seconds)]) for n in range(count)],
            [(_path(first, firsts, n), _path(second, seconds, n)) for n in range(count)],
            self.instruction,
            truncation=self.truncation(),
            raw=self.use_activation is False,
        )
        return split_pairs(payload, max_size)

    def embedding_inputs(self, max_size: PartSize) -> list[EmbeddingInput]:
        if self.instruction is not None:
            raise InvalidInput.at("instruction", "requires a reranker; this is an embedding model")
        inputs: list[EmbeddingInput] = []
        payload = EmbeddingInput(
            (), None, normalize=True, truncation=self.truncation(), encoding="vectors", numbers=[]
        )
        for n, (name, _) in enumerate(self.sides()):
            of_side = replace(payload, param=name, is_query=n == 0)
            inputs += split_inputs(getattr(self, name), of_side, max_size)
        return inputs

    def content(self, outputs: Sequence[EmbeddingOutput | ScoringOutput]) -> list[bytes]:
        scores: list[float] = []
        embedded = []
        for output in outputs:
            if isinstance(output, EmbeddingOutput):
                embedded.append(output)
            else:
                scores += output.scores
        if embedded:
            scores = similarities(embedded, len(self.sides()[0][1]))
        tokens = sum(output.tokens for output in outputs)
        id, usage = "score-" + secrets.token_hex(12), EmbeddingUsage(tokens, tokens)
        data = [Score(n, "score", score) for n, score in enumerate(scores)]
        return [to_json(Scores(id, "list", int(time.time()), self.model or "", data, usage))]


class SimilarityInput(Struct):
    source_sentence: NonEmpty
    sentences: Texts


class SimilarityOptions(ScoringRequest, kw_only=True):
    compares: ClassVar = True

    prompt_name: str | None = None


class SimilarityRequest(SimilarityOptions, kw_only=True):
    """The options are those of `parameters`, or else fields of the body."""

    inputs: SimilarityInput
    parameters: SimilarityOptions | None = None

    def payloads(self, max_size: PartSize, kind: str) -> Sequence[EmbeddingInput]:
        options, texts = self.parameters or self, self.inputs
        pairs = ScoreRequest(text_1=texts.source_sentence, text_2=texts.sentences)
        paths = {"text_1": "inputs.source_sentence", "text_2": "inputs.sentences"}
        name, truncation = options.prompt_name, options.truncation()
        return [
            replace(each, param=paths[each.param], prompt=name, truncation=truncation)
            for each in pairs.embedding_inputs(max_size)
        ]

    def content(self, outputs: Sequence[EmbeddingOutput]) -> list[bytes]:
        return [to_json(similarities(outputs, 1))]


SCORE = [
    Operation(f"POST {path}", "The similarity of pairs of texts", Scores, ScoreRequest)
    for path in ("/v1/score", "/score")
]
NUMBERS: Body = {JSON: {"type": "array", "items": {"type": "number"}}}
SIMILARITY = Operation("POST /similarity", "The cosines of texts", NUMBERS, SimilarityRequest)


def _path(name: str, texts: Sequence[str], n: int) -> str:
    return f"{name}[{n}]" if len(texts) > 1 else name


def similarities(outputs: Sequence[EmbeddingOutput], count: int) -> list[float]:
    """Return the cosines of unit vectors, of which the first `count` are one side, or their MaxSim.
    Raises InvalidInput for too many tokens."""
    if not outputs[0].token_vectors:
        vectors = np.concatenate([output.vectors for output in outputs])
        scores: list[float] = (vectors[:count] * vectors[count:]).sum(1).tolist()
        return scores
    rows = [vectors for output in outputs for vectors in output.token_vectors]
    length = max(count, len(rows) - count)
    pairs = [(rows[n % count], rows[count + n % (len(rows) - count)]) for n in range(length)]
    if sum(len(query) * len(document) for query, document in pairs) > MAX_TOKEN_PAIRS:
        raise InvalidInput(f"the texts have over {MAX_TOKEN_PAIRS} pairs of tokens to compare")
    return [float((query @ document.T).max(1).sum()) for query, document in pairs]
