"""`POST /v1/embeddings`, and `/embed` as text-embeddings-inference has it.

    body → checked inputs → pieces of a few, a work item each → their JSON, end to end

Texts or token ids; `inputs` in the place of `input` asks for the bare list of vectors that
text-embeddings-inference and Hugging Face's client know. What needs the model (prompts, sizes,
lengths) is checked in a pool (worker/embedding).
"""

from typing import Annotated, Any, Literal

from msgspec import Meta

from batching.errors import InvalidInput
from server.http.json import to_json
from server.openai.embedding.endpoint import MOST_INPUTS, Truncatable
from server.openai.request_fields import Salt, TokenId, read_inputs
from server.openai.response_schemas import EmbeddingUsage
from worker.messages.scoring import EmbeddingInput, EmbeddingOutput, PartSize, split_parts

PATHS = ("/v1/embeddings", "/embed")
Inputs = Annotated[
    list[str | TokenId | list[TokenId]],
    Meta(extra_json_schema={"minItems": 1, "maxItems": MOST_INPUTS}),
]


class EmbeddingRequest(Truncatable, kw_only=True):
    input: str | Inputs | None = None
    inputs: str | Inputs | None = None
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    input_type: str | None = None
    prompt_name: str | None = None
    normalize: bool | None = None
    cache_salt: Salt | None = None

    @property
    def is_bare(self) -> bool:
        """Whether it is text-embeddings-inference's."""
        return self.inputs is not None

    def payloads(self, most: PartSize, serves: str) -> list[EmbeddingInput]:
        if (self.input is None) == (self.inputs is None):
            required = "is required" if self.input is None else "takes either this or inputs"
            raise InvalidInput.at("input", required)
        param = "inputs" if self.is_bare else "input"
        given = self.inputs if self.input is None else self.input
        found = read_inputs(given, param)
        if len(found) > MOST_INPUTS:
            many = f"takes at most {MOST_INPUTS} inputs, not {len(found)}"
            raise InvalidInput.at(param, many)
        inputs = [*found.values()]
        form = "bare" if self.is_bare else self.encoding_format or "float"
        options: dict[str, Any] = {
            "prompt": self.prompt_name,
            "role": self.input_type,
            "dimensions": self.dimensions,
            "normalize": self.normalize,
            "truncation": self.truncation(),
            "encoding": form,
            "param": param,
        }
        single, parts = param in found, split_parts(inputs, [len(each) for each in inputs], most)
        return [EmbeddingInput(part, None if single else n, **options) for n, part in parts]

    def content(self, outputs: list[EmbeddingOutput]) -> list[bytes]:
        parts = [part for each in outputs for part in (b",", each.content)][1:]
        if self.is_bare:
            return [b"[", *parts, b"]"]
        tokens = sum(each.tokens for each in outputs)
        usage = EmbeddingUsage(tokens, tokens)
        tail = b'],"model":%b,"usage":%b}' % (to_json(self.model), to_json(usage))
        return [b'{"object":"list","data":[', *parts, tail]
