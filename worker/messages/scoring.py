"""Messages of embeddings, reranking and scoring.

A request's list is split into parts of a few inputs, a work item each: no stage handles thousands
of texts at once, and a batch holds parts of several requests. No torch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

# The inputs of a part: a list of 2,048 takes 128 of the queue's slots.
MAX_PART_INPUTS = 16
# Products of tokens that MaxSim compares: a query of 2,048 with a document of 8,192.
MAX_TOKEN_PAIRS = 1 << 24
T = TypeVar("T")
# Of vectors: as JSON, for /v1/embeddings or as a bare list; the vectors of each token; sparse ones;
# an array.
Encoding = Literal["float", "base64", "bare", "tokens", "sparse", "vectors"]


@dataclass(frozen=True, slots=True)
class Truncation:
    """How a text that is too long is handled: it is truncated, or refused."""

    enabled: bool = False
    max_tokens: int | None = None  # None: the model's limit
    keep_end: bool = False  # remove tokens at the beginning instead of the end


@dataclass(frozen=True, slots=True)
class EmbeddingInput:
    """A part of a request's inputs: texts, or token ids that are used as they are."""

    inputs: Sequence[str | Sequence[int]]
    first_index: int | None  # of the first input in the request's list; None if it is no list
    prompt: str | None = None  # the name of a prompt
    role: str | None = None  # query, document, or the name of a prompt
    dimensions: int | None = None
    normalize: bool | None = None  # None: the checkpoint's setting
    truncation: Truncation = Truncation()
    encoding: Encoding = "float"
    is_query: bool = False  # for late interaction without a prompt: not a document
    param: str = "input"
    numbers: list[int] = field(default_factory=list)  # of the response, by part; a shared list
    cache_namespace: bytes = b""  # cached prefixes are shared within it alone
    adapter: ClassVar[None] = None

    def path(self, n: int) -> str:
        """Return the path of the n-th of these inputs in the request, for errors."""
        return self.param if self.first_index is None else f"{self.param}[{self.first_index + n}]"


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """The vectors of a part: as JSON with commas between, or as an array [inputs, D], which is
    empty for the vectors of tokens and sparse ones."""

    content: bytes
    vectors: NDArray[np.float32]
    tokens: int
    token_vectors: Sequence[NDArray[np.float32]] = ()  # of late interaction, [tokens, D] by input


@dataclass(frozen=True, slots=True)
class ScoringInput:
    """A part of a request's pairs, each a query and a document, with their paths in the request."""

    pairs: Sequence[tuple[str, str]]
    paths: Sequence[tuple[str, str]]
    instruction: str | None = None
    max_document_tokens: int | None = None
    truncation: Truncation = Truncation(enabled=True)  # of the documents; queries stay whole
    raw: bool = False  # scores without the model's activation function
    cache_namespace: bytes = b""  # as of an EmbeddingInput
    adapter: ClassVar[None] = None


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    scores: list[float]  # one per pair
    tokens: int


class PartSize(NamedTuple):
    """The limits of a part: inputs, and characters or tokens in all."""

    inputs: int
    total: int


def split_parts(
    inputs: Sequence[T], sizes: Sequence[int], limit: PartSize
) -> Iterator[tuple[int, Sequence[T]]]:
    """Yield parts of `inputs`, each with the index of its first one. `sizes` are the inputs' own.
    Only a part of one input may exceed the limit."""
    start = total = 0
    for end, size in enumerate(sizes):
        if end > start and (end - start == limit.inputs or total + size > limit.total):
            yield start, inputs[start:end]
            start, total = end, 0
        total += size
    yield start, inputs[start:]
