"""`POST /v1/score`, as vLLM has it: how well texts go together, each pair by itself.

By the rerank model, or by the cosine of embeddings where that model is named or there is no other.
"""

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio.to_thread
import numpy as np
from msgspec import Struct
from starlette.types import Receive, Scope, Send

from batching.errors import InvalidInput
from server.engine import Engine
from server.http.json import Document, Parsing
from server.http.request import read_json_request, send_json
from server.openai.embeddings import in_pieces
from server.openai.models import ModelNames, find
from server.openai.params import Filled, Salt, decode
from server.openai.request import rooted
from server.rerank import Texts, check_count, pairs_in_pieces
from server.settings import Settings
from server.submission import Submission
from worker.scoring import (
    Embedded,
    EmbeddingInput,
    PairsInput,
    PieceSize,
    Truncation,
    pieces,
)


class ScoreRequest(Struct, kw_only=True):
    text_1: Filled | Texts | None = None
    text_2: Filled | Texts | None = None
    queries: Filled | Texts | None = None
    documents: Filled | Texts | None = None
    model: str | None = None
    instruction: str | None = None
    truncate: bool | None = None
    cache_salt: Salt | None = None

    def sides(self) -> tuple[tuple[str, list[str]], tuple[str, list[str]]]:
        """Both fields and their texts: as many of either, or one of one."""
        by_text = self.text_1 is not None or self.text_2 is not None
        first, second = ("text_1", "text_2") if by_text else ("queries", "documents")
        read = []
        for name in (first, second):
            if (given := getattr(self, name)) is None:
                raise InvalidInput.at(name, "is required")
            if given == "":
                raise InvalidInput.at(name, "must not be empty")
            texts = [given] if isinstance(given, str) else given
            check_count(texts, name)
            read.append((name, texts))
        counts = len(read[0][1]), len(read[1][1])
        if counts[0] != counts[1] and 1 not in counts:
            unequal = f"has {counts[1]} texts for the {counts[0]} of {first}"
            raise InvalidInput.at(second, unequal)
        return read[0], read[1]

    def pairs(self, most: PieceSize) -> list[PairsInput]:
        (first, ones), (second, others) = self.sides()
        count = max(len(ones), len(others))
        return pairs_in_pieces(
            [(ones[n % len(ones)], others[n % len(others)]) for n in range(count)],
            [(_path(first, ones, n), _path(second, others, n)) for n in range(count)],
            most,
            instruction=self.instruction,
            cuts=bool(self.truncate),
        )

    def texts(self, most: PieceSize) -> list[EmbeddingInput]:
        if self.instruction is not None:
            raise InvalidInput.at("instruction", "is for a reranker; this is an embedding model")
        made = []
        for name, texts in self.sides():
            for first, part in pieces(texts, [len(text) for text in texts], most):
                cuts = Truncation(bool(self.truncate))
                place = first if isinstance(getattr(self, name), list) else None
                piece = EmbeddingInput(
                    part, place, truncation=cuts, normalize=True, form="vectors", param=name
                )
                made.append(piece)
        return made

    def answer(self, scores: list[float], tokens: int) -> Document:
        data = [{"index": n, "object": "score", "score": each} for n, each in enumerate(scores)]
        return {
            "id": "score-" + secrets.token_hex(12),
            "object": "list",
            "created": int(time.time()),
            "model": self.model,
            "data": data,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }


def _path(name: str, texts: Sequence[str], n: int) -> str:
    return f"{name}[{n}]" if len(texts) > 1 else name


@dataclass(eq=False)
class Score:
    """A bare ASGI app, of a reranker, an embedder or both."""

    settings: Settings
    engine: Engine
    models: Sequence[ModelNames]
    parsing: Parsing = field(init=False, default_factory=Parsing)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, deadlines = await read_json_request(scope, receive, self.models[0].serves)
        request, names, payloads = await self.parsing.run(self.parse, body, deadlines.first)
        payloads = rooted(payloads, scope, names.id, request.cache_salt)
        with Submission(self.engine, names.serves, payloads, deadlines, receive) as work:
            answers: list[Any] = await work.answers()
        tokens = sum(each.tokens for each in answers)
        if names.serves == "rerank":
            scores = [score for each in answers for score in each.scores]
        else:
            count = len(request.sides()[0][1])
            scores = await anyio.to_thread.run_sync(cosines, answers, count)
        await send_json(send, request.answer(scores, tokens), headers=work.timing_headers())

    def parse(self, body: bytes) -> tuple[ScoreRequest, ModelNames, list[Any]]:
        request = decode(body, ScoreRequest, lambda given: find(self.models, given).serves)
        names = next(each for each in self.models if each.serves == request.model)
        request.model = names.id
        make: Any = request.pairs if names.serves == "rerank" else request.texts
        return request, names, in_pieces(make, self.settings)


def cosines(answers: Sequence[Embedded], count: int) -> list[float]:
    """Of unit vectors, of which the first `count` are one side."""
    vectors = np.concatenate([each.vectors for each in answers])
    one, other = vectors[:count], vectors[count:]
    scores: list[float] = (one * other).sum(1).tolist()
    return scores
