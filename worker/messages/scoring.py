"""What crosses between the event loop, the pool and the worker thread for embeddings and reranking.

A request's inputs travel in pieces of a few, each piece a work item, so that nothing is done for
thousands of texts in one go and a batch holds pieces of several requests. No torch here.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

# A piece ends after so many inputs: a list of 2,048 takes 128 of the queue's places.
PIECE = 16
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Truncation:
    """What becomes of a text that is too long: cut, or refused."""

    cuts: bool = False
    tokens: int | None = None  # at most so many are kept; None: as many as the model takes
    left: bool = False  # the end is kept, not the beginning


@dataclass(frozen=True, slots=True)
class EmbeddingInput:
    """Some of a request's texts, or token ids as they are. `first` is the number of the first among
    all; None where the request had no list."""

    inputs: Sequence[str | list[int]]
    first: int | None
    prompt: str | None = None  # a prompt's name
    role: str | None = None  # what the text is: a query, a document or a prompt's name
    dimensions: int | None = None
    normalize: bool | None = None  # None: as the checkpoint does
    truncation: Truncation = Truncation()
    form: Literal["float", "base64", "bare", "vectors"] = "float"
    param: str = "input"

    def path(self, n: int) -> str:
        """What errors about the n-th of these inputs name."""
        return self.param if self.first is None else f"{self.param}[{self.first + n}]"


@dataclass(frozen=True, slots=True)
class Embedded:
    """The answer: JSON of the inputs' vectors, between commas, or the vectors [inputs, D]."""

    content: bytes
    vectors: NDArray[np.float32]
    tokens: int


@dataclass(frozen=True, slots=True)
class PairsInput:
    """Some of a request's pairs, each a query and a document, and where in the request they are."""

    pairs: Sequence[tuple[str, str]]
    paths: Sequence[tuple[str, str]]
    instruction: str | None = None
    document_tokens: int | None = None  # so many of a document's tokens are read at most
    truncation: Truncation = Truncation(cuts=True)  # of rows, in documents; queries stay whole
    raw: bool = False  # scores as the model gives them, without an activation


@dataclass(frozen=True, slots=True)
class Scored:
    scores: list[float]  # one for each pair
    tokens: int


class PieceSize(NamedTuple):
    """What a piece may have: inputs, and characters or tokens in all."""

    inputs: int
    total: int


def pieces(
    inputs: Sequence[T], sizes: Sequence[int], most: PieceSize
) -> Iterator[tuple[int, Sequence[T]]]:
    """Inputs in pieces, each with the number of its first; `sizes` are theirs. A piece has more
    than `most` only if it is one input that alone has."""
    start = total = 0
    for end, size in enumerate(sizes):
        if end > start and (end - start == most.inputs or total + size > most.total):
            yield start, inputs[start:end]
            start, total = end, 0
        total += size
    yield start, inputs[start:]
