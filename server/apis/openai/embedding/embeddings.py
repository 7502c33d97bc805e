"""`POST /v1/embeddings`; `/embed`, `/embed_all`, `/embed_sparse` of text-embeddings-inference.

    body → checked inputs → payloads, a work item each → their JSON, joined

Inputs are texts or token ids. `inputs` instead of `input` asks for a bare list of vectors, which
text-embeddings-inference returns. Prompts, dimensions and lengths are checked by the model's
`prepare` (worker/engines/embedding).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct
from starlette.types import Receive, Scope, Send

from batching.errors import InvalidInput
from server.apis.openai.embedding.endpoint import (
    MAX_INPUTS,
    ScoringEndpoint,
    ScoringRequest,
    ScoringTask,
)
from server.apis.openai.request_fields import PositiveInt, TextsOrIds, read_inputs
from server.apis.openai.response_schemas import EmbeddingUsage
from server.core.worker_client import Submission
from server.http.json import Document, to_json
from server.http.ndjson import LineStream
from server.http.operation import JSON, Body, Operation, Schema
from server.http.request import is_ndjson
from worker.messages.scoring import EmbeddingInput, EmbeddingOutput, PartSize, split_parts

VECTORS: Schema = {"type": "array", "items": {"type": "array", "items": {"type": "number"}}}
LISTS: Body = {JSON: {"type": "array", "items": VECTORS}}
ENTRIES: Body = {JSON: {"type": "array", "items": {"type": "array", "items": {"type": "object"}}}}
Inputs = Annotated[TextsOrIds, Meta(extra_json_schema={"minItems": 1, "maxItems": MAX_INPUTS})]


class Embedding(Struct):
    """Encoded by the embedding model's `finish`, in a pool thread."""

    object: Literal["embedding"]
    index: int
    embedding: Annotated[list[float] | str, Meta(description="base64: float32, little-endian")]


class Embeddings(Struct):
    object: Literal["list"]
    data: list[Embedding]
    model: str | None
    usage: EmbeddingUsage


class EmbeddingRequest(ScoringRequest, kw_only=True):
    input: str | Inputs | None = None
    inputs: str | Inputs | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: PositiveInt | None = None
    input_type: str | None = None
    prompt_name: str | None = None
    normalize: bool | None = None

    @property
    def is_bare(self) -> bool:
        """Whether the response is a bare list, as in text-embeddings-inference."""
        return self.inputs is not None

    def payloads(self, max_size: PartSize, kind: str) -> list[EmbeddingInput]:
        if self.input is None and self.inputs is None:
            raise InvalidInput.at("input", "is required")
        if self.input is not None and self.inputs is not None:
            raise InvalidInput.at("input", "cannot be combined with inputs")
        param = "inputs" if self.is_bare else "input"
        payload = EmbeddingInput(
            (),
            None,
            prompt=self.prompt_name,
            role=self.input_type,
            dimensions=self.dimensions,
            normalize=self.is_bare or None if self.normalize is None else self.normalize,
            truncation=self.truncation(),
            encoding="bare" if self.is_bare else self.encoding_format or "float",
            param=param,
        )
        return split_inputs(self.inputs if self.is_bare else self.input, payload, max_size)

    def content(self, outputs: Sequence[EmbeddingOutput]) -> list[bytes]:
        """Return the response with the vectors as the pool has encoded them."""
        vectors = bare_list(outputs)
        if self.is_bare:
            return vectors
        tokens = sum(output.tokens for output in outputs)
        usage = EmbeddingUsage(tokens, tokens)
        head, tail = to_json(Embeddings("list", [], self.model, usage)).split(b"[]", 1)
        return [head, *vectors, tail]


class EmbedAllRequest(ScoringRequest, kw_only=True):
    encoding: ClassVar[Literal["tokens", "sparse"]] = "tokens"

    inputs: str | Inputs
    prompt_name: str | None = None

    def payloads(self, max_size: PartSize, kind: str) -> list[EmbeddingInput]:
        payload = EmbeddingInput(
            (),
            None,
            prompt=self.prompt_name,
            truncation=self.truncation(),
            encoding=self.encoding,
            param="inputs",
        )
        return split_inputs(self.inputs, payload, max_size)

    def content(self, outputs: Sequence[EmbeddingOutput]) -> list[bytes]:
        return bare_list(outputs)


class EmbedSparseRequest(EmbedAllRequest, kw_only=True):
    encoding: ClassVar[Literal["tokens", "sparse"]] = "sparse"


def split_inputs(inputs: Any, payload: EmbeddingInput, max_size: PartSize) -> list[EmbeddingInput]:
    """Return the payload with each part of the inputs."""
    by_path = read_inputs(inputs, payload.param)
    if len(by_path) > MAX_INPUTS:
        reason = f"takes at most {MAX_INPUTS} inputs, not {len(by_path)}"
        raise InvalidInput.at(payload.param, reason)
    texts, is_single = [*by_path.values()], payload.param in by_path
    return [
        replace(payload, inputs=part, first_index=None if is_single else first)
        for first, part in split_parts(texts, list(map(len, texts)), max_size)
    ]


def bare_list(outputs: Sequence[EmbeddingOutput]) -> list[bytes]:
    parts = [part for output in outputs for part in (b",", output.content)][1:]
    return [b"[", *parts, b"]"]


EMBEDDINGS = [
    Operation(
        f"POST {path}",
        "The vectors of texts or token ids; those of `inputs` as a bare list",
        Embeddings,
        EmbeddingRequest,
        alternatives=[VECTORS],
        takes_lines=True,
    )
    for path in ("/v1/embeddings", "/embed")
]
EMBEDDINGS += [
    Operation("POST /embed_all", "The states of each token", LISTS, EmbedAllRequest),
    Operation("POST /embed_sparse", "Sparse vectors", ENTRIES, EmbedSparseRequest),
]


@dataclass(eq=False)
class EmbeddingEndpoint(ScoringEndpoint):
    """Also takes NDJSON: a line is a text, or a body; its `parameters` are fields of the body."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if is_ndjson(scope):
            await LineStream(scope, receive, send, self).run()
        else:
            await super().__call__(scope, receive, send)

    @property
    def model(self) -> str:
        return self.models.default.registry_name

    def parse_line(self, value: str | Document, scope: Scope) -> ScoringTask:
        if isinstance(value, str):
            return self.read_document({"input": value}, scope)
        if (parameters := value.pop("parameters", None)) is None:
            parameters = {}
        if not isinstance(parameters, dict):
            raise InvalidInput.at("parameters", "must be an object")
        return self.read_document({**parameters, **value}, scope)

    async def content(self, scope: Scope, request: ScoringTask, work: Submission[Any]) -> bytes:
        outputs = [await item.future for item in work.items]
        return b"".join(request.body.content(outputs))
